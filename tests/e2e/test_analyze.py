"""`looplab analyze` and `looplab fetch-config`: what looplab did not train."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

MEASURE = Path(__file__).parents[1] / "measure"
_spec = importlib.util.spec_from_file_location("wandb_stand_in_e2e", MEASURE / "wandb_stand_in.py")
assert _spec is not None
assert _spec.loader is not None
stand_in = importlib.util.module_from_spec(_spec)
sys.modules["wandb_stand_in_e2e"] = stand_in  # dataclasses look themselves up
_spec.loader.exec_module(stand_in)


@pytest.fixture
def outputs(lab) -> Path:
    """Folders as trainers leave them; none of them was made by looplab."""
    root: Path = lab.folder / "outputs/train"

    def put(name: str, content: str, age: int) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, (2e9 - age, 2e9 - age))

    history = "".join(json.dumps({"_step": n, "ot_pi_sum": n / 10, "loss": 5.0 - n}) + "\n" for n in range(5))
    put("loop_1/00_base_ab12/wandb/run-20260101_000000-abc/files/wandb-history.jsonl", history, 50)
    put("loop_1/01_other_cd34/metrics.jsonl", '{"step": 100, "loss": 1}\n{"step": 200, "loss": 0.5}\n', 40)
    put("loop_1/02_csv/progress.csv", "iteration,reward\n1,10\n2,30\n3,20\n", 30)
    put("loop_1/03_said/trainer_summary.json", '{"metrics": {"success_rate": 0.75}}', 20)
    put("loop_1/04_crashed/metrics.jsonl", "", 10)
    put("loop_1/05_split/train/metrics.csv", "step,loss\n1,4\n2,3\n", 60)
    put("loop_1/05_split/validation/metrics.csv", "step,loss\n1,6\n2,5\n", 60)
    put("loop_1/05_split/checkpoints/step_1/metrics.jsonl", '{"step": 1, "loss": 1}\n', 60)
    put("notes/readme.txt", "no run", 0)
    put("code/wandb/__init__.py", "no run either", 0)
    (offline := root / "loop_2/00_new/wandb/offline-run-20260101_000000-xyz").mkdir(parents=True)
    shutil.copy(MEASURE / "data/wandb-0.19.11.wandb", offline / "run-xyz.wandb")
    os.utime(offline / "run-xyz.wandb", (1e9, 1e9))
    return root


def analyze(lab, *options: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = lab("analyze", "offline", "--json", *options).json()
    return found


def test_every_kind_of_run_folder_is_found_newest_first(lab, outputs: Path) -> None:
    found = analyze(lab, "--outputs-root", "outputs/train")
    assert list(found) == [
        "outputs/train/loop_1/04_crashed",
        "outputs/train/loop_1/03_said",
        "outputs/train/loop_1/02_csv",
        "outputs/train/loop_1/01_other_cd34",
        "outputs/train/loop_1/00_base_ab12",
        "outputs/train/loop_1/05_split",
        "outputs/train/loop_2/00_new",
    ]


def test_a_run_is_summarised_under_the_names_of_the_lab(lab, outputs: Path) -> None:
    assert set(analyze(lab)["outputs/train/loop_1/00_base_ab12"]) == {"ot_pi_sum", "loss", "steps"}
    aliases = {"train/loss": ["loss"], "train/ot_pi_sum": ["ot_pi_sum"]}
    lab.configure(measure={"aliases": aliases, "goals": {"train/ot_pi_sum": "max"}})
    found = analyze(lab)
    base = found["outputs/train/loop_1/00_base_ab12"]
    assert base["steps"] == 4
    assert set(base) == {"train/ot_pi_sum", "train/loss", "steps"}
    told = {key: base["train/loss"][key] for key in ("first", "last", "best", "best_step", "delta", "pct")}
    assert told == {"first": 5, "last": 1, "best": 1, "best_step": 4, "delta": -4, "pct": -80}
    assert base["train/ot_pi_sum"]["best"] == 0.4  # more is better
    assert found["outputs/train/loop_1/01_other_cd34"]["train/loss"]["last"] == 0.5
    reward = found["outputs/train/loop_1/02_csv"]["reward"]
    assert (reward["best"], reward["best_step"]) == (30, 2)
    assert found["outputs/train/loop_1/03_said"]["success_rate"]["delta"] is None
    split = found["outputs/train/loop_1/05_split"]
    assert (split["train/loss"]["last"], split["validation/loss"]["last"]) == (3, 5)
    assert found["outputs/train/loop_2/00_new"]["steps"] > 0


def test_a_folder_without_readable_metrics_is_listed_as_such(lab, outputs: Path) -> None:
    assert analyze(lab)["outputs/train/loop_1/04_crashed"] == {"steps": None, "note": "no readable metrics"}
    (line,) = [line for line in lab("analyze", "offline").out.splitlines() if "04_crashed" in line]
    assert line.split(maxsplit=2)[1:] == ["-", "no readable metrics"]


def test_the_summaries_are_written_as_json_and_shown_as_a_table(lab, outputs: Path) -> None:
    out = lab(
        "analyze", "offline", "--outputs-root", outputs, "--limit", "4", "--out-json", ".tmp/new/summary.json"
    ).out
    written = json.loads((lab.folder / ".tmp/new/summary.json").read_text())
    assert list(written) == [
        str(outputs / "loop_1" / name) for name in ("04_crashed", "03_said", "02_csv", "01_other_cd34")
    ]
    assert [path.name for path in (lab.folder / ".tmp/new").iterdir()] == ["summary.json"]
    assert "20 / 30" in out
    assert "4 runs written to .tmp/new/summary.json" in out
    assert "the newest 4 of 7 folders" in out


def test_analysing_leaves_the_folders_as_they_were(lab, outputs: Path) -> None:
    before = lab.tree()
    analyze(lab)
    assert lab.tree() == before


def test_a_single_run_can_be_pointed_at(lab, outputs: Path) -> None:
    assert list(analyze(lab, "--outputs-root", "outputs/train/loop_1/02_csv")) == ["outputs/train/loop_1/02_csv"]


def test_a_metric_that_is_called_like_an_entry_of_ours_is_not_lost(lab) -> None:
    lab.write("elsewhere/run/metrics.jsonl", '{"step": 3, "steps": 8, "name": 9}\n')
    (entry,) = analyze(lab, "--outputs-root", "elsewhere").values()
    assert (entry["steps"], entry["metric:steps"]["last"], entry["metric:name"]["last"]) == (3, 8, 9)


def test_where_there_is_nothing_the_error_says_what_was_looked_for(lab) -> None:
    assert "no folder nowhere" in lab("analyze", "offline", "--outputs-root", "nowhere", code=2).err
    (lab.folder / "empty").mkdir()
    done = lab("analyze", "offline", "--outputs-root", "empty", "--out-json", "out.json", code=2)
    assert "no runs found" in done.err
    assert "tfevents" in done.err
    assert not (lab.folder / "out.json").exists()


# -- on W&B

PROJECT = ("--entity", "team", "--project", "proj")


def wandb_env(lab, server) -> dict[str, str]:
    return {
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": stand_in.KEY,
        "WANDB_ERROR_REPORTING": "false",
        "TMPDIR": str(lab.aside),
    }


def test_the_runs_of_a_project_are_summarised(lab) -> None:
    rows = [{"_step": n, "l1_loss": 1.0 - n / 10} for n in range(10)]
    lab.configure(measure={"aliases": {"train/l1_loss": "l1_loss"}})
    runs = [
        stand_in.ServedRun("7r5j8h63", rows=rows),
        stand_in.ServedRun("h5ktqxph", state="crashed", created="2026-02-01T00:00:00Z"),
    ]
    with stand_in.StandIn(runs) as server:
        done = lab("analyze", "wandb", *PROJECT, "--limit", "5", "--out-json", "w.json", env=wandb_env(lab, server))
    found = json.loads((lab.folder / "w.json").read_text())
    assert list(found) == ["team/proj/h5ktqxph", "team/proj/7r5j8h63"]
    run = found["team/proj/7r5j8h63"]
    assert (run["steps"], run["state"], run["name"]) == (9, "finished", "name-of-7r5j8h63")
    assert round(run["train/l1_loss"]["best"], 3) == 0.1
    assert found["team/proj/h5ktqxph"]["note"] == "no readable metrics"
    assert "0.1 / 0.1" in done.out
    assert stand_in.KEY not in done.out + done.err


def test_a_config_on_wandb_becomes_a_base_config(lab) -> None:
    config = {"train": {"lr": 0.25, "batch": 8}, "steps": 2, "sleep": 0, "wait": "", "meet": 0, "exit": 0}
    with stand_in.StandIn([stand_in.ServedRun("h5ktqxph", config=config)]) as server:
        env = wandb_env(lab, server)
        done = lab("fetch-config", *PROJECT, "--run", "h5ktqxph", "--out-dir", "configs/new", env=env)
        assert done.out.strip() == "configs/new/fromwandb_h5ktqxph.json"
        assert "Could not find run" in lab("fetch-config", *PROJECT, "--run", "other", env=env, code=2).err
    assert json.loads((lab.folder / "configs/new/fromwandb_h5ktqxph.json").read_text()) == config
    lab("run", "--cfgs", "configs/new/fromwandb_h5ktqxph.json")
    assert lab.read(lab.runs()[0], "config.json") == config


def test_several_configs_are_fetched_at_once(lab) -> None:
    served = [stand_in.ServedRun(name, config={"n": n}) for n, name in enumerate(("aaaa", "bbbb"))]
    with stand_in.StandIn(served) as server:
        env = wandb_env(lab, server)
        runs = ("--run", "aaaa", "--run", "bbbb", "--run", "aaaa")
        done = lab("fetch-config", *PROJECT, *runs, "--out-dir", "configs", env=env)
        assert done.out.split() == ["configs/fromwandb_aaaa.json", "configs/fromwandb_bbbb.json"]
        told = json.loads(lab("fetch-config", *PROJECT, *runs, "--json", env=env).out)
    assert [one["config"] for one in told["runs"]] == [{"n": 0}, {"n": 1}]


def test_without_a_key_the_error_says_so(lab) -> None:
    env = {"WANDB_API_KEY": ""}
    assert "WANDB_API_KEY is not set" in lab("analyze", "wandb", *PROJECT, env=env, code=2).err
    assert "WANDB_API_KEY is not set" in lab("fetch-config", *PROJECT, "--run", "x", env=env, code=2).err
    done = lab("fetch-config", *PROJECT, "--run", "../../x", env={"WANDB_API_KEY": stand_in.KEY}, code=2)
    assert "not a run id" in done.err


def test_the_table_shows_first_what_people_look_for(lab) -> None:
    metrics = ("agent_steps", "collision_rate", "env/num_drones", "env/num_envs", "episode_length", "mean_reward",
               "policy_loss", "sps", "success_rate")  # fmt: skip
    row = json.dumps({"step": 1, **dict.fromkeys(metrics, 0.5)})
    for name in ("a", "b"):
        lab.write(f"elsewhere/{name}/metrics.jsonl", row + "\n")
    lab.write("elsewhere/a/more.csv", "x")
    heading = lab("analyze", "offline", "--outputs-root", "elsewhere").out.splitlines()[0]
    shown = [part.split()[-1] for part in heading.split("(last / best)")[:-1]]
    assert shown == ["success_rate", "mean_reward", "policy_loss", "agent_steps", "collision_rate"]


def test_the_table_shows_the_objective_of_the_lab_before_all_else(lab) -> None:
    assert json.loads(lab("status", "--json").out)["studies"][0]["metric"] == "loss"
    lab.write("elsewhere/a/metrics.jsonl", json.dumps({"step": 1, "success_rate": 1, "loss": 2, "aa": 3}) + "\n")
    heading = lab("analyze", "offline", "--outputs-root", "elsewhere").out.splitlines()[0]
    assert heading.index("loss (") < heading.index("success_rate (") < heading.index("aa (")
