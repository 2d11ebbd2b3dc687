"""Flags of `run` that change every config of a call, configs that are named, arguments of the trainer."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

RULES = """
rules:
  - {name: raise lr, when: "loss.last > 0", edits: ["train.lr@mul=2"], reason: the loss is high}
"""
PRINTED = (
    *("--steps", "2", "--log-freq", "50", "--eval-freq", "200", "--concurrency", "1", "--gpus", "none", "--decide"),
    *("--variants-per-run", "1", "--rounds", "2", "--exec", "--wandb-online", "--wandb-entity", "me"),
    *("--wandb-project", "p"),
)


def with_rules(lab: Any, **changes: Any) -> None:
    lab.write("rules.yaml", RULES)
    lab.configure(proposers=[{"rules": "rules.yaml", "variants": 2}], **changes)


def test_the_flags_of_a_call_edit_every_config_and_are_recorded(lab) -> None:
    lab.base(log_freq=10, evaluation={"eval-freq": 10})
    with_rules(lab)
    out = lab("run", "--cfgs", "configs/base.json", *PRINTED).out
    assert "--steps 2: edit steps@set=2" in out
    assert "--eval-freq 200: edit evaluation.eval-freq@set=200" in out
    assert "--variants-per-run 1: proposers.rules {variants: 1}" in out
    assert "--decide: the next rounds are proposed by rules" in out
    assert "--wandb-online --wandb-entity me --wandb-project p: track.wandb {mode: online, entity: me" in out
    configs = lab.all("config.json")
    assert len(configs) == 2
    assert [(c["steps"], c["log_freq"], c["evaluation"]["eval-freq"]) for c in configs] == [(2, 50, 200)] * 2
    assert all(about["call_edits"][0] == "steps@set=2" for about in lab.all("run.json"))
    environment = lab.all("seen.json")[1]["env"]  # also in the second round
    assert [environment[f"WANDB_{name}"] for name in ("MODE", "ENTITY", "PROJECT")] == ["online", "me", "p"]
    (text,) = lab.ask("SELECT json_extract(data, '$.configuration') FROM events WHERE kind='study configured'")[0]
    recorded = json.loads(text)
    assert recorded["options"]["flags"] == ["steps=2", "log-freq=50", "eval-freq=200"]
    assert recorded["study"]["track"]["wandb"]["mode"] == "online"
    assert "flags of the call: steps@set=2 log_freq@set=50" in lab("show", "1").out


@pytest.mark.parametrize(
    ("config", "flag", "said"),
    [
        ({"a": {"log_freq": 1}, "b": {"log-freq": 1}}, "--log-freq", "has several such keys: a.log_freq, b.log-freq"),
        (
            {"total_steps": 9, "train": {"max_steps": 9, "lr": 1.0}},
            "--steps",
            "has no key steps; similar: total_steps, ",
        ),
        ({"train": {"steps": "many"}}, "--steps", "has no key steps; similar: train.steps"),
    ],
)
def test_a_flag_without_a_clear_key_is_refused_with_the_candidates(lab, config, flag, said) -> None:
    lab.write("other.json", json.dumps(config))
    lab.configure(knobs={})
    before = lab.tree()
    assert said in lab("run", "--cfgs", "other.json", flag, "5", code=2).err
    assert lab.tree() == before


def test_the_lab_file_says_which_key_a_flag_edits(lab) -> None:
    lab.configure(flags={"steps": "train.batch", "log_freq": "sleep"})
    assert lab("plan", "--steps", "64", "--json").json()["runs"][0]["config"]["train"]["batch"] == 64
    lab.configure(flags={"batches": "train.batch"})
    assert "is not a flag that edits a config" in lab("check", code=2).err


def test_a_flag_passes_the_guard(lab) -> None:
    lab.configure(knobs={**lab.study["knobs"], "steps": {"type": "int", "low": 1, "high": 100}})
    assert "steps: 101 is above 100" in lab("run", "--steps", "101", code=2).err


def test_new_configs_count_their_rounds_from_now(lab) -> None:
    lab.base("new.json", train={"lr": 0.7})
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab.configure(slots={"count": 1, "gpus": "none"})
    lab("run", "--rounds", "2")
    assert len(lab.runs()) == 2
    call = ("run", "--cfgs", "new.json", "--rounds", "1")
    assert [run["base"] for run in lab("plan", *call[1:], "--json").json()["runs"]] == ["new.json"]
    lab(*call)
    assert [about["base"] for about in lab.all("run.json")][2:] == ["new.json"]
    done = lab(*call, code=1)  # the same call once more has nothing left to do, and says so
    assert "new.json was run before and does not run again (see --again): 1 round is done" in done.out
    assert len(lab.runs()) == 3
    lab("resume")
    assert len(lab.runs()) == 3


def test_a_named_config_without_room_is_not_run_and_that_is_a_failure(lab) -> None:
    lab.base("new.json", train={"lr": 0.7})
    lab.configure(budget={"rounds": 1})
    lab("run")
    done = lab("run", "--cfgs", "new.json", "--json", code=1)
    last = done.lines()[-1]
    assert last["not_run"] == ["new.json was not run (allow more with --rounds or --runs)"]
    assert last["why"] == "1 round is done"
    assert "new.json was not run" in lab("run", "--cfgs", "new.json", code=1).out


def test_a_config_is_run_again_when_asked_and_never_replaced_in_silence(lab) -> None:
    with_rules(lab)
    lab.base(seed=5)
    lab("run", "--rounds", "1")
    lab("run", "--cfgs", "configs/base.json", "--again", "--rounds", "1", "--no-decide")
    lab("resume")
    first, second = lab.all("run.json")
    assert (second["role"], second["twin"], second["seed"]) == ("reproduction", first["id"], 5)
    assert second["reason"] == "base config configs/base.json, again"
    out = lab("run", "--cfgs", "configs/base.json", "--rounds", "3").out
    assert f"configs/base.json was run before ({first['id']}) and does not run again; --again reruns it" in out
    assert lab.all("run.json")[2]["proposer"] == "rules"


@pytest.mark.slow
def test_arguments_are_part_of_what_a_run_is(lab) -> None:
    with_rules(lab)
    for steps in (400, 800):
        lab("run", "--cfgs", "configs/base.json", "--rounds", "1", "--no-decide", "--", f"--steps={steps}")
    first, second = lab.all("run.json")
    assert (first["config_hash"], first["extra"]) == (second["config_hash"], ["--steps=400"])
    assert first["point"] != second["point"]
    assert lab.all("seen.json")[1]["argv"][-1] == "--steps=800"
    assert "extra arguments: --steps=800" in lab("show", "2").out
    changes = lab("diff", "1", "2", "--json").json()["changes"]
    assert changes == {"extra arguments": {"old": "--steps=400", "new": "--steps=800"}}
    assert "--steps=800" in lab("compare", "1", "2").out
    lab("report")
    report = (lab.outputs() / "report.md").read_text()
    assert "--steps=400" in report
    assert "--steps=800" in report
    assert "are not compared with runs that are trained differently" in lab("plan").out


@pytest.mark.slow
def test_runs_with_other_arguments_are_not_compared(lab) -> None:
    """The trainer reaches a lower loss with more steps; that is no reason to call the config better."""
    lab.write("train.py", (lab.folder / "train.py").read_text().replace(
        'config["steps"] + 1', 'int((["", *sys.argv][-1].split("=") + ["", "3"])[1] or 3) + 1'))  # fmt: skip
    lab.queue("train.lr@set=0.2", "train.lr@set=0.25")
    lab.configure(slots={"count": 1, "gpus": "none"})
    lab("run", "--rounds", "2", "--", "--steps=50")
    assert lab("status", "--json").json()["studies"][0]["best"]["n"] == 2
    lab("run", "--rounds", "3", "--", "--steps=5")  # the base first, since it was never run so
    runs = lab.all("run.json")
    assert [(run["n"], run["proposer"], run["extra"]) for run in runs[2:]] == [(3, "base", ["--steps=5"])]
    assert lab("status", "--json").json()["studies"][0]["best"]["n"] == 3
    lab("veto", "3")
    assert lab("status", "--json").json()["studies"][0]["best"] is None  # the others were trained otherwise
    lab("run", "--rounds", "4", "--", "--steps=50")
    assert lab.all("run.json")[3]["proposer"] == "queue"
    assert lab("status", "--json").json()["studies"][0]["best"]["n"] == 4  # better than run 2, which is best again
    lab("verify")


@pytest.mark.slow
def test_the_judge_compares_runs_of_the_same_arguments(lab) -> None:
    lab.base(seed=1)
    lab.write("train.py", (lab.folder / "train.py").read_text().replace(
        "1 / step", '1 / step + config["seed"] * 1e-3 - 0.01 * len(sys.argv)'))  # fmt: skip
    lab.configure(judge={"baseline_seeds": 2, "replicates": 2, "max_replicates": 2}, slots={"count": 1, "gpus": "none"})
    lab("run", "--rounds", "1")
    lab("run", "--cfgs", "configs/base.json", "--rounds", "1", "--", "--longer")
    runs = lab.all("run.json")
    assert [(run["role"], run["extra"]) for run in runs] == [
        ("base", []), ("replicate", []), ("base", ["--longer"]), ("replicate", ["--longer"])
    ]  # fmt: skip
    judged = lab("status", "--json").json()["studies"][0]["judge"]
    assert (judged["base"], judged["champion"]) == (runs[2]["id"], runs[2]["id"])
    lab("run", "--rounds", "2")  # back under the first conditions: their champion is the champion again
    assert lab("status", "--json").json()["studies"][0]["judge"]["champion"] == runs[0]["id"]
    lab("verify")


def test_a_reproduction_has_the_arguments_of_its_run(lab) -> None:
    lab("run", "--", "--steps=400")
    lab("run", "--", "--steps=800")
    lab("reproduce", "1")
    assert lab.all("seen.json")[-1]["argv"][-1] == "--steps=400"


def test_flags_change_what_a_proposal_starts_from(lab) -> None:
    with_rules(lab, slots={"count": 1, "gpus": "none"})
    lab("run", "--rounds", "1", "--steps", "4")
    lab("run", "--rounds", "3", "--steps", "9")
    assert [config["steps"] for config in lab.all("config.json")] == [4, 9, 9]
    assert lab.all("run.json")[2]["proposer"] == "rules"


@pytest.mark.slow
def test_plan_and_check_show_command_folder_and_environment(lab) -> None:
    lab.configure(launch={**lab.study["launch"], "env": {"PYTHONPATH": "src", "API_KEY": "s3cr3t-value-123"}})
    lab.queue("train.lr@set=0.2")
    told = lab("plan", "--json", "--", "--flag").json()["runs"]
    out = lab("plan", "--commands", "--", "--flag").out
    checked = lab("check").out
    details = lab("check", "--json").json()["studies"][0]["commands"]["configs/base.json"]
    lab("run", "--", "--flag")
    for plan, seen, path in zip(told, lab.all("seen.json"), lab.runs(), strict=True):
        folder = str(path).replace(path.name, plan["id"])
        assert plan["folder"] == folder
        assert plan["argv"][2:] == ["train.py", "--flag"]
        assert plan["cwd"] == seen["cwd"]
        assert plan["env"]["LOOPLAB_RUN_DIR"] == folder
        missing = {k: v for k, v in plan["env"].items() if seen["env"][k] != v and "xxxx" not in v and k != "API_KEY"}
        assert not missing
        assert f"command for run {plan['id']}: {shlex.join(plan['argv'])}" in out
        assert f"folder: {folder}" in out
    assert "PYTHONPATH=src" in out
    assert "PYTHONPATH=src" in checked
    assert details["env"]["PYTHONPATH"] == "src"
    assert "s3cr3t" not in out + checked + json.dumps([told, details])


def test_edit_takes_the_flags_and_arguments_of_a_run(lab) -> None:
    done = lab(
        *("edit", "--base-cfg", "configs/base.json", "--reason", "longer", "--changes", "train.lr@set=0.2"),
        *("--steps", "7", "--out-dir", "variants", "--exec", "--extra-args", "--flag"),
    )
    assert "--steps 7: edit steps@set=7" in done.out
    (config,), (seen,) = lab.all("config.json"), lab.all("seen.json")
    assert (config["steps"], config["train"]["lr"], seen["argv"]) == (7, 0.2, ["--flag"])
    assert json.loads(next((lab.folder / "variants").iterdir()).read_text())["steps"] == 7


def test_one_config_on_its_own_leaves_the_best_of_the_study(lab) -> None:
    lab("run")
    lab("edit", "configs/base.json", "--change", "train.lr@set=0.3", "--run", "--", "--flag")
    assert lab("status", "--json").json()["studies"][0]["best"]["n"] == 1


def test_rules_that_are_not_there_have_no_variants(lab) -> None:
    assert "has no rules" in lab("run", "--variants-per-run", "2", code=2).err
