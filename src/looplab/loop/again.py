"""Running a run once more from its capsule: its code in a worktree of its own, its config, its seed.

What cannot be brought back (packages, the machine, files that git never knew) is compared and told.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.runs.capsule import Capsules, Prints

AGAIN = "again"
"""The proposer of runs that repeat one exactly."""
GIT_S = 60.0


def place_of(lab: Path, run_id: str) -> Path | None:
    """The lab as it was at the time of the run, where it was brought back."""
    link = lab / ".looplab" / "again" / run_id / "lab"
    return link.resolve() if link.exists() else None


def bring_back(lab: Path, outputs: Path, run_id: str, capsule: Mapping[str, Any]) -> list[str]:
    """Check the run's code out beside the lab, if it is another than today's; says what was done."""
    code = capsule.get("code") or {}
    commit = code.get("commit")
    if commit is None:
        return ["the lab was not in git: the code is the one that is here now"]
    today = Capsules(lab, outputs).code()
    if (today.get("commit"), today.get("patch")) == (commit, code.get("patch")):
        then, now = (side.get("left_out") or {} for side in (code, today))
        changed = [
            f"{name} has changed since; its content is not kept, since it is made for secrets"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        ]
        return [
            *changed,
            f"the code is as it was ({commit[:12]}{', with its uncommitted changes' if code.get('patch') else ''})",
        ]
    if code.get("redacted"):
        raise LabError(
            f"the uncommitted changes of this run held secrets, which were not kept: {', '.join(code['redacted'])}",
            hint="its code cannot be checked out exactly; commit code before a run that is to be reproduced",
        )
    top = Path(_git(lab, "rev-parse", "--show-toplevel"))
    home = lab / ".looplab" / "again" / run_id
    drop(lab, run_id)
    home.mkdir(parents=True)
    tree = home / "tree"
    _git(lab, "worktree", "add", "--detach", "--force", str(tree), commit)
    if code.get("patch"):
        _git(tree, "apply", "--binary", "--whitespace=nowarn", str(outputs / code["patch"]))
    inside = tree / lab.resolve().relative_to(top.resolve())
    told = [f"the code of {commit[:12]} was checked out{', with its uncommitted changes' if code.get('patch') else ''}"]
    told += [
        f"{name} had uncommitted changes that were not kept: it is made for secrets"
        for name in code.get("left_out") or ()
    ]
    for name in code.get("untracked") or []:
        source = top / name
        if source.exists() and not (tree / name).exists() and not name.startswith((".looplab", "outputs")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, tree / name)
            told.append(f"{name} was never in git: taken as it is now")
    for name in capsule.get("data") or {}:
        if not (inside / name).exists() and (lab / name).exists():
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            os.symlink((lab / name).resolve(), inside / name)
    os.symlink(inside, home / "lab")
    return told


def drop(lab: Path, run_id: str) -> None:
    """Remove what was checked out."""
    home = lab / ".looplab" / "again" / run_id
    if (home / "tree").exists():
        _git(lab, "worktree", "remove", "--force", str(home / "tree"))
    shutil.rmtree(home, ignore_errors=True)


def differences(lab: Path, outputs: Path, capsule: Mapping[str, Any], data: Prints) -> list[str]:
    """What is not as it was, beside the code."""
    now = Capsules(lab, outputs, data).make([], capsule["program"], {}, {})
    found = []
    for name, digest in (capsule.get("data") or {}).items():
        if now["data"].get(name) != digest:
            found.append(f"{name} has changed")
    before, after = (side.get("python") or {} for side in (capsule, now))
    if before.get("version") != after.get("version"):
        found.append(f"Python was {before.get('version')}, is {after.get('version')}")
    if before.get("packages") != after.get("packages"):
        found.append("other packages are installed: " + (_packages(outputs, before, after) or "not known which"))
    for part in ("cpu", "gpus"):
        if capsule["machine"].get(part) != now["machine"].get(part):
            found.append(f"{part}: was {capsule['machine'].get(part)}, is {now['machine'].get(part)}")
    return found


def _packages(outputs: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    lists = []
    for side in (before, after):
        name = side.get("packages")
        path = outputs / name if name else None
        if path is None or not path.exists():
            return ""
        lists.append(set(read_config(path).get("packages", ())))
    gone, new = sorted(lists[0] - lists[1]), sorted(lists[1] - lists[0])
    changed = [f"-{name}" for name in gone] + [f"+{name}" for name in new]
    return ", ".join(changed[:8]) + (f" and {len(changed) - 8} more" if len(changed) > 8 else "")


def _git(where: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=where, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"git {args[0]} did not work: {error}") from error
    if done.returncode != 0:
        raise LabError(
            f"git {' '.join(args[:2])} did not work: {done.stderr.strip()}",
            hint="is the run's commit still in this repository?",
        )
    return done.stdout.strip()
