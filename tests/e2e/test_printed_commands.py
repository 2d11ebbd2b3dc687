"""The tables of docs/auto-loop.md and docs/autopilot.md: every command of the right column works, in this order.

What needs a GPU, a W&B server, an agent or minutes of training has a stand-in: devices without a driver, a server on
this machine, a command that answers by a script, a trainer that only writes its log.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.e2e.conftest import COMMAND, until

import looplab
from looplab.config.files import read_config

ROOT = Path(__file__).parents[2]
RECIPES = Path(looplab.__file__).parent / "recipes"
_spec = importlib.util.spec_from_file_location("wandb_stand_in_printed", ROOT / "tests/measure/wandb_stand_in.py")
assert _spec is not None
assert _spec.loader is not None
stand_in = importlib.util.module_from_spec(_spec)
sys.modules["wandb_stand_in_printed"] = stand_in  # dataclasses look themselves up
_spec.loader.exec_module(stand_in)

TRAINER = """\
import json, os, pathlib, sys
run = pathlib.Path(os.environ["LOOPLAB_RUN_DIR"])
row = {"train/ot_pi_sum": 1e-30, "train/l1_loss": 1.0, "eval/offline_eval/avg_l1": 0.5, "mean_reward": 1.0, "sps": 100}
with open(os.environ["LOOPLAB_METRICS"], "w") as file:
    for step in range(1, 11):
        print(json.dumps({"step": step, **row, "sps": 100 + step}), file=file)
(run / "checkpoints").mkdir()
(run / "checkpoints" / "best.pt").write_bytes(b"weights")
(run / "seen.json").write_text(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
"""
AGENT = """\
import json, pathlib
calls = pathlib.Path("calls.txt")
n = len(calls.read_text()) if calls.exists() else 0
calls.write_text("x" * (n + 1))
print(json.dumps({"train": {"learning_rate": 0.001 * (n + 1)}}))
"""


def table(page: str) -> list[tuple[str, str]]:
    """The rows of the table of commands: what the original prints, and what looplab takes."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    first = lines.index("| original | looplab |")
    rows = [re.fullmatch(r"\| `(.*)` \| `(.*)` \|", line) for line in lines[first + 2 :] if line.startswith("| `")]
    assert rows
    assert all(rows)
    return [(row[1], row[2]) for row in rows if row is not None]


def recipe_lab(lab: Any, recipe: str, **changes: Any) -> None:
    for name in ("configs", "prompts"):
        if (RECIPES / recipe / name).exists():
            shutil.copytree(RECIPES / recipe / name, lab.folder / name, dirs_exist_ok=True)
    lab.write("train.py", TRAINER)
    lab.study = read_config(RECIPES / recipe / "lab.yaml")
    without = dict.fromkeys(("judge", "holdout", "evaluator", "watch"))
    lab.configure(**{**without, **changes})


def shell(lab: Any, command: str, env: dict[str, str]) -> str:
    """Run a cell of the table as a user would, in a shell; and wait for the engine that it left in the background."""
    path = f"{COMMAND.parent}{os.pathsep}{lab.env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=lab.folder, env={**lab.env, **env, "PATH": path},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    told = f"{command}\n{done.stdout}\n{done.stderr}"
    if command == "looplab attach" and "no engine is running" in done.stderr:
        return ""  # it was done before anybody looked
    assert done.returncode == 0, told
    if command.endswith("& echo $!"):
        pid = int(done.stdout)
        until(lambda: not Path(f"/proc/{pid}").exists(), "the end of a command in the background")
    until(lambda: not lab("status", "--json").json()["studies"][0]["engine"], "the end of the engine")
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_auto_loop(lab) -> None:
    configs = "src/lerobot/scripts/train_config"
    base = f"{configs}/act_fr3_ot_99_20_baseline.json"
    shutil.copy(RECIPES / "act_ot" / "rules.yaml", lab.folder)
    command = ["{python}", "-S", "train.py", "--config_path={config}", "--output_dir={out_dir}"]
    recipe_lab(
        lab, "act_ot", study="train", launch={"command": command, "output_dir": "absent"}, base=base,
        proposers=[{"rules": "rules.yaml", "variants": 2}], slots={"gpus": [0, 1, 2, 3], "cores": "none"}, budget=None,
        require={"wandb": "online"}, needs_exec=True,
    )  # fmt: skip
    baseline = json.loads((lab.folder / "configs/baseline.json").read_text())
    lab.write(base, json.dumps({**baseline, "steps": 20000}))
    cfg = f"{configs}/act_fr3_ot_99_20_baseline_h2jr9c.json"
    lab.write(cfg, json.dumps({**baseline, "steps": 20000, "batch_size": 12}))
    (lab.folder / ".codex_tmp").mkdir()
    new: list[str] = []
    served = stand_in.ServedRun("h5ktqxph", config={**baseline, "steps": 20000})
    with stand_in.StandIn([served], "kjust-pinduoduo", "lerobot") as server:
        env = {
            **{"CONFIGS": configs, "ENTITY": "me", "PROJECT": "lerobot", "cfg": cfg, "TMPDIR": str(lab.aside)},
            **{"WANDB_BASE_URL": server.url, "WANDB_API_KEY": stand_in.KEY, "WANDB_ERROR_REPORTING": "false"},
        }
        for original, ours in table("auto-loop.md"):
            if "generate_and_run" in original and " --out-dir " not in original and "--exec" not in original:
                new.append(shell(lab, ours, env).splitlines()[-1])
                if "fromwandb" in ours:
                    new = [name for name in new if "fromwandb" in name]
                lab.write(".codex_tmp/next_round_cfgs_calibrated.txt", "\n".join(new) + "\n")
            else:
                shell(lab, ours, {**env, "NEW": " ".join(new)})
    about, seen, trained = lab.all("run.json", "train"), lab.all("seen.json", "train"), lab.all("config.json", "train")
    first = [run for run in about if run["round"] <= 3]
    assert {run["round"] for run in first} == {1, 2, 3}
    assert sum(run["round"] == 1 for run in first) == 4
    assert {run["proposer"] for run in first} == {"base", "rules"}
    assert {one["env"]["CUDA_VISIBLE_DEVICES"] for one in seen[:4]} == {"4", "5", "6", "7"}
    assert all(one["env"]["WANDB_MODE"] == "online" for one in seen[:-1])
    steps = [config["steps"] for config in trained]
    assert steps[: len(first)] == [2000] * len(first)
    assert [steps.count(n) for n in (3000, 10000)] == [4, 4]  # four at once; three in the background, and one alone
    assert about[-1]["extra"] == ["--policy.device=cpu"]
    assert list(json.loads((lab.folder / ".codex_tmp/offline_summary.json").read_text()))


@pytest.mark.slow
def test_the_commands_of_the_autopilot(lab) -> None:
    lab.write("agent.py", AGENT)
    (lab.folder / "proposals").mkdir()
    agent = {"cli": "command", "command": [sys.executable, "-S", str(lab.folder / "agent.py")]}
    recipe_lab(
        lab, "drone", launch={"command": ["{python}", "-S", "train.py", "{flags}"], "config": {"as": "flags"}},
        proposers=[{"agent": agent}], slots={"count": 1, "gpus": "none"},
        probe={"sweep": {"vec.num_workers": [1, 2]}, "metric": "sps"},
    )  # fmt: skip
    for _, ours in table("autopilot.md"):
        shell(lab, ours, {})
    about = lab.all("run.json", "drone")
    assert [run["proposer"] for run in about].count("agent") == 3
    assert any("next_config" in (run["source"] or "") for run in about)
    assert (lab.folder / "proposals/probe.json").exists()


def test_every_command_that_the_documents_print_is_in_the_tables() -> None:
    """By the programs that the two documents name, and the flags that they print."""
    rows = [original for page in ("auto-loop.md", "autopilot.md") for original, _ in table(page)]
    printed = " ".join(rows)
    for word in (
        *("generate_and_run", "autorun.py", "accelerate launch", "analyze_offline", "fetch_wandb_config.py", "nohup"),
        *("--steps", "--log-freq", "--eval-freq", "--concurrency", "--gpus", "--decide", "--variants-per-run"),
        *("--rounds", "--exec", "--wandb-online", "--wandb-entity", "--wandb-project", "--extra ", "--extra-args"),
        *("loop.py", "run_training.sh", "render_cli_args.py", "peak_probe.sh", "next_config.json", "best.json"),
    ):
        assert word in printed, word
