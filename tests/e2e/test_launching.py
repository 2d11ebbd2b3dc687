"""How a trainer is started: its config, its output folder, its devices and cores."""

from __future__ import annotations

import os
import sys
from itertools import pairwise

import pytest


def given(lab, **config: object) -> dict:
    """What the trainer of a single run saw when the config is passed like this."""
    lab.configure(launch={**lab.study["launch"], "config": config})
    lab.queue(["train.lr@set=0.3"])
    lab("run", "--concurrency", "1")
    return lab.all("seen.json")[1]


def test_as_flags_every_key_is_an_option_of_the_trainer(lab) -> None:
    lab.base(anneal=True, lazy=False, layers=[64, 64], title="a b", nothing=None)
    argv = given(lab, **{"as": "flags"})["argv"]
    assert argv[:4] == ["--train.lr", "0.3", "--train.batch", "32"]
    assert argv[argv.index("--title") + 1] == "a b"
    assert "--anneal" in argv
    assert "--no-lazy" in argv
    assert argv[argv.index("--layers") + 1] == "[64, 64]"
    assert "--nothing" not in argv


def test_flags_can_be_written_in_the_trainers_own_way(lab) -> None:
    lab.base(num_envs=4, anneal=True)
    argv = given(
        lab,
        **{"as": "flags", "case": "snake", "keys": "flat", "separator": "equals", "booleans": "value"},
        skip=["wait", "meet", "sleep", "exit", "steps"],
    )["argv"]
    assert argv == ["--lr=0.3", "--batch=32", "--num_envs=4", "--anneal=True"]


def test_as_hydra_overrides_only_what_changed_is_passed(lab) -> None:
    assert given(lab, **{"as": "hydra"})["argv"] == ["train.lr=0.3"]


def test_as_environment_every_key_is_a_variable(lab) -> None:
    env = given(lab, **{"as": "env"}, prefix="CFG_")["env"]
    assert (env["CFG_TRAIN__LR"], env["CFG_TRAIN__BATCH"], env["CFG_STEPS"]) == ("0.3", "32", "3")


@pytest.mark.parametrize("form", ["json", "yaml", "toml"])
def test_as_a_file_the_config_has_the_format_that_was_asked_for(lab, form: str) -> None:
    lab.write(
        "train.py",
        "import os, sys\n"
        "text = open(sys.argv[1]).read()\n"
        "open(os.path.join(os.environ['LOOPLAB_RUN_DIR'], 'read.txt'), 'w').write(sys.argv[1] + '\\n' + text)\n",
    )
    lab.configure(
        launch={"command": ["{python}", "-S", "train.py", "{config}"], "config": {"as": "file", "format": form}},
        objective=None,
    )
    lab("run")
    (run,) = lab.runs()
    path, _, text = (run / "read.txt").read_text().partition("\n")
    assert path == str(run / f"record/config.{form}")
    assert {"json": '"lr": 0.1', "yaml": "lr: 0.1", "toml": "lr = 0.1"}[form] in text
    assert lab.read(run, "config.json")["train"]["lr"] == 0.1


def test_templates_are_filled_and_never_split(lab) -> None:
    command = ["{python}", "-S", "train.py", "--out={out_dir}", "{run_id} {slot}", "{{plain}}", "{study}"]
    lab.configure(launch={"command": command, "env": {"WHERE": "{run_dir}/x", "PLAIN": "a $b"}})
    lab("run")
    (run,) = lab.runs()
    seen = lab.read(run, "seen.json")
    assert seen["argv"] == [f"--out={run}", f"{run.name} cpu0", "{plain}", "toy"]
    assert (seen["env"]["WHERE"], seen["env"]["PLAIN"]) == (f"{run}/x", "a $b")


def test_the_trainer_starts_in_the_folder_of_launch_cwd(lab) -> None:
    (lab.folder / "code").mkdir()
    (lab.folder / "train.py").rename(lab.folder / "code" / "train.py")
    lab.configure(launch={"command": ["{python}", "-S", "train.py"], "cwd": "code"})
    lab("run")
    assert lab.all("seen.json")[0]["cwd"] == str(lab.folder / "code")


def test_with_cwd_run_the_trainer_starts_in_its_run_folder_and_finds_the_files_of_the_lab(lab) -> None:
    lab.write("data/words.txt", "x")
    (lab.folder / "runs").mkdir()
    command = ["{python}", "-S", "train.py", "data/words.txt", "--data=data/words.txt", "runs", "nothing.txt"]
    lab.configure(launch={"command": command, "cwd": "run"})
    lab("check")
    lab("run", "--", "data/words.txt")
    (run,) = lab.runs()
    seen = lab.read(run, "seen.json")
    words = str(lab.folder / "data" / "words.txt")
    assert seen["cwd"] == str(run)
    assert seen["argv"] == [words, f"--data={words}", "runs", "nothing.txt", words]
    assert lab.read(run, "run.json")["argv"][2] == str(lab.folder / "train.py")
    assert lab.read(run, "run.json")["capsule"]["cwd"] == str(run)


def test_with_cwd_run_a_program_of_the_lab_is_found(lab) -> None:
    lab.write("bin/train", f"#!{sys.executable} -S\n" + (lab.folder / "train.py").read_text()).chmod(0o755)
    lab.configure(launch={"command": ["bin/train"], "cwd": "run"})
    lab("check")
    lab("run")
    (run,) = lab.runs()
    assert lab.read(run, "seen.json")["cwd"] == str(run)
    assert lab.read(run, "summary.json")["objective"]["value"] is not None


def test_with_cwd_run_metrics_beside_the_trainer_are_found(lab) -> None:
    trainer = (
        "import json, os\n"
        "os.makedirs('runs/CartPole', exist_ok=True)\n"
        "with open('runs/CartPole/metrics.jsonl', 'w') as file:\n"
        "    file.write(json.dumps({'step': 1, 'loss': 0.5}) + '\\n')\n"
    )
    lab.write("train.py", trainer)
    lab("run", code=None)
    (run,) = lab.runs()
    (note,) = lab.read(run, "summary.json")["notes"]
    assert "the objective 'loss' was not measured; the run measured nothing. runs/CartPole/metrics.jsonl was" in note
    assert "launch.cwd: run" in note
    lab.configure(launch={**lab.study["launch"], "cwd": "run"}, study="again")
    lab("run")
    (run,) = lab.runs("again")
    assert lab.read(run, "summary.json")["objective"]["value"] == 0.5


def test_a_run_without_its_objective_names_what_comes_near(lab) -> None:
    lab.configure(objective={"metric": "Loss", "goal": "min"})
    lab("run", code=None)
    (run,) = lab.runs()
    (note,) = lab.read(run, "summary.json")["notes"]
    assert "'Loss' was not measured, but 'loss' was, which differs only in separators or case" in note


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("cwd", "message"),
    [
        ("{run_dir}", "write `cwd: run`"),
        ("{lab}/code", "write `cwd: run`"),
        ("nowhere", "the lab has no folder nowhere"),
    ],
)
def test_a_cwd_that_is_not_there_is_refused_before_anything_starts(lab, cwd: str, message: str, command: str) -> None:
    lab.configure(launch={**lab.study["launch"], "cwd": cwd})
    done = lab(command, code=2)
    assert message in done.err
    assert f"lab.yaml:{lab.line('launch')}: launch.cwd" in done.err
    assert lab.runs() == []


def test_a_run_knows_its_name_and_its_place(lab) -> None:
    lab("run")
    (run,) = lab.runs()
    env = lab.read(run, "seen.json")["env"]
    assert env["LOOPLAB_RUN_ID"] == run.name
    assert env["LOOPLAB_RUN_DIR"] == str(run)
    assert env["LOOPLAB_STUDY"] == "toy"
    assert env["LOOPLAB_ROUND"] == "1"
    assert env["PYTHONUNBUFFERED"] == "1"


def test_where_the_output_dir_must_be_absent_it_is(lab) -> None:
    trainer = (
        "import json, os, sys\n"
        "os.mkdir(sys.argv[1])  # fails if it is there\n"
        "with open(os.path.join(sys.argv[1], 'metrics.jsonl'), 'w') as file:\n"
        "    file.write(json.dumps({'step': 1, 'loss': 0.5}) + '\\n')\n"
    )
    lab.write("train.py", trainer)
    lab.configure(launch={"command": ["{python}", "-S", "train.py", "{out_dir}"], "output_dir": "absent"})
    lab("run")
    (run,) = lab.runs()
    assert (run / "out" / "metrics.jsonl").exists()
    assert lab.read(run, "summary.json")["objective"]["value"] == 0.5


def test_a_device_is_seen_by_one_run_at_a_time_and_every_run_sees_only_its_own(lab) -> None:
    lab.base(sleep=0.05)
    lab.queue(*(f"train.lr@set=0.{n}" for n in range(2, 7)))
    lab("run", "--gpus", "0,1", "--continuous")
    spans: dict[str, list[tuple[float, float]]] = {"0": [], "1": []}
    for run in lab.runs():
        seen = lab.read(run, "seen.json")
        device = seen["env"]["CUDA_VISIBLE_DEVICES"]
        assert lab.read(run, "run.json")["devices"] == [device]
        assert seen["env"]["LOOPLAB_SLOT"] == f"gpu{device}"
        assert seen["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        spans[device].append((seen["start"], seen["end"]))
    assert sum(map(len, spans.values())) == 6
    for of_device in spans.values():
        assert of_device
        of_device.sort()
        assert all(a[1] < b[0] for a, b in pairwise(of_device))


def test_two_labs_take_turns_on_one_device(make_lab, until) -> None:
    first, second = make_lab("first"), make_lab("second")
    second.env["LOOPLAB_LOCK_DIR"] = first.env["LOOPLAB_LOCK_DIR"]
    first.base(wait="gate")
    options = ("--gpus", "0", "--concurrency", "1")
    ahead = first.start("run", *options)
    first.until_at_work()
    behind = second.start("run", *options, "--json")
    until(lambda: '"kind":"waiting"' in behind.out, "word that the other lab waits for the device")
    first.open_gate()
    ahead.ended()
    behind.ended()
    (a,), (b,) = first.all("seen.json"), second.all("seen.json")
    assert a["end"] < b["start"]


def test_several_runs_share_a_device_where_the_lab_says_so(lab) -> None:
    lab.base(meet=2)
    lab.queue("train.lr@set=0.2")
    lab.configure(slots={"gpus": [3], "per_gpu": 2})
    lab("run")
    assert {seen["env"]["CUDA_VISIBLE_DEVICES"] for seen in lab.all("seen.json")} == {"3"}
    assert lab.count(status="ok") == 2


def test_without_devices_a_run_sees_none(lab) -> None:
    lab("run", env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert lab.all("seen.json")[0]["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_a_run_keeps_to_the_cores_of_its_slot_and_knows_how_many_they_are(lab) -> None:
    lab.base(meet=2)
    lab.queue("train.lr@set=0.2")
    lab("run", "--concurrency", "2")
    for run in lab.runs():
        seen, about = lab.read(run, "seen.json"), lab.read(run, "run.json")
        assert seen["cores"] == about["cores"]
        assert seen["env"]["LOOPLAB_CORES"] == ",".join(map(str, about["cores"]))
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            assert seen["env"][name] == str(len(about["cores"]))


def test_without_pinning_a_run_may_use_every_core(lab) -> None:
    lab.configure(slots={"count": 2, "gpus": "none", "cores": "none"})
    lab("run")
    (seen,) = lab.all("seen.json")
    assert seen["cores"] == sorted(os.sched_getaffinity(0))
    assert "LOOPLAB_CORES" not in seen["env"]


def test_python_in_a_command_is_the_one_that_looplab_runs_in(lab) -> None:
    lab("run")
    python = lab.all("run.json")[0]["argv"][0]
    # `python` and `python3` of one environment are the same, whichever of them installed the command.
    assert os.path.dirname(python) == os.path.dirname(sys.executable)
    assert os.path.samefile(python, sys.executable)
