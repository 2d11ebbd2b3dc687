"""A tiny project for versions: no learning, an evaluator that reads a number from the checkpoint, a scripted agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVALUATE = """\
import json, random, sys
from pathlib import Path
checkpoint, out = Path(sys.argv[1]), Path(sys.argv[2])
skill = json.loads((checkpoint / "policy.json").read_text())["skill"]
with open(Path(__file__).parent.parent / "beside" / "evaluations", "a") as file:
    print(checkpoint.parent.parent.name, file=file)
chance = [random.Random(1000 + n) for n in range(16)]
values = [skill + 0.05 * one.random() + 0.02 * skill * one.random() for one in chance]
out.write_text(json.dumps({"score": sum(values) / len(values), "score_values": values}))
"""
TRAIN = """\
# version {version}
import json, os, sys, time
from pathlib import Path
{body}
out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else Path(__file__).parent / "artifacts"
(out / "checkpoints").mkdir(parents=True, exist_ok=True)
(out / "checkpoints" / "policy.json").write_text(json.dumps({{"skill": {skill}}}))
"""
DOCUMENT = """\
# v{version}
## Plan
More skill.
## 观察
The last one was weak.
## Runs
`python train.py`
## Results
See evaluation.json.
## Learning
Skill <b>helps</b> in v{version}.
"""
PIXEL = (
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000d49444154789c63606060f80f0001040100a5f8e3c50000000049454e44ae426082"
)
AGENT = """\
import re, subprocess, sys, time
from pathlib import Path
beside = Path(sys.argv[1])
prompt = sys.stdin.read()
version = int(re.search(r"v(\\d+) (?:of this|did not)", prompt)[1])
again, interrupted = "did not pass" in prompt, "You were interrupted" in prompt
(beside / f"prompt-v{version}{'-again' if again else ''}").write_text(prompt)


def wait(name):
    "Block while the test holds this point."
    if (beside / f"hold-{name}").exists():
        (beside / f"at-{name}").touch()
        while (beside / f"hold-{name}").exists():
            time.sleep(0.01)


skill = {2: 0.8, 3: 0.79, 4: 0.99}.get(version, 0.5)
folder = Path("experiments") / f"v{version}"
body = ""
if version == 3:
    body = (beside / "slow.txt").read_text() if again else "sys.exit('it broke')"
(folder / "train.py").write_text((beside / "train.txt").read_text().format(version=version, body=body, skill=skill))
(folder / f"dev_v{version}.md").write_text((beside / "document.txt").read_text().format(version=version))
if not again:
    wait(f"v{version}")
(folder / "artifacts/checkpoints/policy.json").write_text('{"skill": %r}' % skill)
(folder / "artifacts/plots/curve.png").write_bytes((beside / "pixel.png").read_bytes())
(folder / "artifacts/eval.json").write_text('{"score": 123.0}')
if version == 4:
    Path("evaluate.py").chmod(0o644)
    Path("evaluate.py").write_text("print('always the best')")
with open(beside / "calls", "a") as file:
    print(f"v{version}{' again' if again else ''}{' after an interruption' if interrupted else ''}", file=file)
print(f"v{version} done")
"""
SLOW = """
if "--smoke" in sys.argv:
    hold = Path({beside!r}) / "hold-smoke"
    while hold.exists():
        hold.with_name("at-smoke").touch()
        time.sleep(0.01)
"""


def git(folder: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    who = ["-c", "user.name=someone", "-c", "user.email=someone@localhost"]
    done = subprocess.run(["git", *who, *args], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def settings(agent: dict[str, Any], beside: Path, **more: Any) -> dict[str, Any]:
    return {
        "experiments": "experiments",
        "frozen": ["evaluate.py", "SOP.md"],
        "sections": ["Plan", ["Observations", "观察"], "Runs", "Results", "Learning"],
        "smoke": {
            "command": ["{python}", "-S", "{version}/train.py", "--smoke", "--out", "{scratch}"],
            "timeout": 30,
            "writable": [str(beside)],
        },
        "evaluate": {
            "command": ["{python}", "-S", "evaluate.py", "{version}/artifacts/checkpoints", "{result}"],
            "metric": "score",
            "values": "score_values",
        },
        "artifacts": ["artifacts/plots/*.png"],
        "agent": agent,
        "retries": 1,
        "submit": False,
        **more,
    }


def make(folder: Path, beside: Path, agent: dict[str, Any] | None = None, **more: Any) -> Path:
    """Create the project as a git repository with v1; `beside` holds the agent and the counters."""
    (folder / "experiments/v1/artifacts/checkpoints").mkdir(parents=True)
    beside.mkdir(parents=True, exist_ok=True)
    texts = {
        "agent.py": AGENT,
        "train.txt": TRAIN,
        "document.txt": DOCUMENT,
        "slow.txt": SLOW.format(beside=str(beside)),
    }
    for name, text in texts.items():
        (beside / name).write_text(text)
    (beside / "pixel.png").write_bytes(bytes.fromhex(PIXEL))
    if folder.parent / "beside" != beside:
        (folder.parent / "beside").symlink_to(beside)
    command = [sys.executable, "-S", str(beside / "agent.py"), str(beside)]
    agent = agent or {"cli": "command", "command": command, "writable": [str(beside)]}
    (folder / "iterate.yaml").write_text(json.dumps(settings(agent, beside, **more), indent=1))
    (folder / "SOP.md").write_text("Look, think, try.\n")
    (folder / "evaluate.py").write_text(EVALUATE)
    (folder / "experiments/v1/train.py").write_text(TRAIN.format(version=1, body="", skill=0.5))
    (folder / "experiments/v1/dev_v1.md").write_text(DOCUMENT.format(version=1))
    (folder / "experiments/v1/artifacts/checkpoints/policy.json").write_text('{"skill": 0.5}')
    (folder / ".gitignore").write_text(".looplab/\noutputs/\nagent_runs/\n__pycache__/\ncheckpoints/\nvenv/\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "start")
    return folder


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def branches(folder: Path) -> list[str]:
    return git(folder, "branch", "--list", "looplab/*", "--format=%(refname:short)").split()


def check_whole_story(folder: Path, facts: Sequence[dict[str, Any]]) -> None:
    """After `iterate 2 4`: git, folders, documents and the ledger agree."""
    by = {row["version"]: row for row in facts}
    assert [row["state"] for row in facts] == ["baseline", "merged", "merged", "void"]
    assert [row["verdict"] for row in facts] == ["-", "keep", "discard", "void"]
    assert [row["champion"] for row in facts] == [False, True, False, False]
    assert by[4]["why"] == "evaluate.py was changed"
    assert by[2]["ruling"]["n"] == 16
    assert by[2]["ruling"]["champion"] == "v1"
    assert by[3]["ruling"]["champion"] == "v2"
    assert by[3]["gates"]["declared"] == "warning"  # the agent's own report is compared, not used
    assert set(branches(folder)) == {"looplab/v2", "looplab/v3", "looplab/v4-failed-1"}
    subjects = git(folder, "log", "--format=%s").splitlines()
    assert [subject.split(",")[0] for subject in subjects] == ["v3: discard", "v2: keep", "start"]
    assert git(folder, "rev-parse", "looplab/v3") == git(folder, "rev-parse", "main") == by[3]["commit"]
    assert git(folder, "rev-parse", "looplab/v4-failed-1") == by[4]["commit"]
    assert "always the best" in git(folder, "show", "looplab/v4-failed-1:evaluate.py")
    assert (folder / "evaluate.py").read_text() == EVALUATE
    assert git(folder, "status", "--porcelain") == ""
    assert len(git(folder, "worktree", "list").splitlines()) == 1
    assert sorted(p.name for p in (folder / "experiments").iterdir()) == ["v1", "v2", "v3"]
    for version in (2, 3):
        place = folder / "experiments" / f"v{version}"
        result = json.loads((place / "evaluation.json").read_text())
        assert result["value"] == by[version]["value"]
        assert result["verdict"] == by[version]["verdict"]
        assert json.loads((place / "artifacts/checkpoints/policy.json").read_text())["skill"] > 0.7  # git ignores it
        assert f"v{version}" in (place / f"dev_v{version}.md").read_text()
    logs = sorted(path.name[:8] for path in (folder / "agent_runs").glob("*.jsonl"))
    assert set(logs) == {"v1-to-v2", "v2-to-v3", "v3-to-v4"}
