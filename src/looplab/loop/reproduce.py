"""Reproduction of a run from its capsule: its code in a separate worktree, its config, and its seed.

The capsule is used only if it matches the hash chain. Everything that cannot be restored (packages, the machine, files
that were never in git) is compared and reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.ledger.study import StudyLedger
from looplab.report.wording import plural
from looplab.runs import folder, tree
from looplab.runs.capsule import Capsules, Fingerprints, doubt
from looplab.runs.git import GitError, git, require_commit, work_tree
from looplab.runs.names import inside
from looplab.untrusted import UntrustedError, load_json, read_bounded

GIT_S = 60.0
"""Timeout of a git command, in seconds."""
MOST_BYTES = 64 << 20
"""Maximum size of a capsule or config, in bytes."""
SHARED = re.compile(rf"{folder.SHARED}/(?:code|packages)-([0-9a-f]{{16}})\.(?:patch|json)")
OWN = ((".looplab",), ("outputs",))
"""Folders of a lab that are never copied into a checkout."""


def read_capsule(record: StudyLedger, outputs: Path, run: str) -> dict[str, Any]:
    """Read the capsule of a run, and validate its hash and structure.

    Raises:
        LabError: A file differs from what was recorded at launch, or the capsule is malformed.
    """
    run_dir = folder.require(outputs / run)
    recorded = record.launched_files(run)
    contents = {}
    is_early = folder.record_name(run_dir, folder.EARLY_CAPSULE) in recorded
    source = folder.EARLY_CAPSULE if is_early else "run.json"
    for name in (source, "config.json"):
        path = folder.record_name(run_dir, name)
        try:
            content = contents[name] = read_bounded(run_dir / path, MOST_BYTES)
        except (OSError, UntrustedError) as error:
            raise LabError(f"cannot be read: {error}", file=run_dir / path) from None
        if path not in recorded:
            raise LabError(
                f"the chain does not say what {name} of run {run} was, so it may have changed",
                file=run_dir / path,
                hint="the ledger was rebuilt or has an early version; rerun its config with `looplab propose`",
            )
        if folder.hash_bytes(content) != recorded[path]:
            raise LabError(f"{name} has changed since run {run} was launched", file=run_dir / path)
    try:
        capsule = load_json(contents[source])
    except UntrustedError as error:
        raise LabError(f"is not a capsule: {error}", file=folder.record_file(run_dir, source)) from None
    if not is_early:
        capsule = capsule.get("capsule") if isinstance(capsule, dict) else None
    problem = _problem(capsule)
    if problem is not None:
        raise LabError(f"is not a capsule: {problem}", file=folder.record_file(run_dir, source))
    code = capsule.get("code") or {}
    for shared in (code.get("patch"), (capsule.get("python") or {}).get("packages")):
        _check_shared(outputs, shared)
    return dict(capsule)


def _problem(capsule: object) -> str | None:
    """Return what is wrong with the structure of a capsule, in words; None if it is valid."""
    if not isinstance(capsule, dict):
        return "it is not an object"
    for key, kind in (("program", str), ("machine", dict), ("argv", list)):
        if not isinstance(capsule.get(key), kind):
            return f"{key} is missing or not {kind.__name__}"
    for key in ("code", "python", "data"):
        if not isinstance(capsule.get(key) or {}, dict):
            return f"{key} is not an object"
    code = capsule.get("code") or {}
    if code.get("commit") is not None:
        try:
            require_commit(code["commit"])
        except LabError as error:
            return f"code.commit: {error.message}"
    for what, name in (("code.patch", code.get("patch")), ("packages", (capsule.get("python") or {}).get("packages"))):
        if name is not None and not (isinstance(name, str) and SHARED.fullmatch(name)):
            return f"{what} is not the name of a shared file"
    names = [*(code.get("untracked") or []), *(capsule.get("data") or {})]
    for name in names:
        try:
            tree.parts_of(name)
        except (LabError, TypeError):
            return f"{str(name)[:80]!r} leads out of the lab"
    return None


def _check_shared(outputs: Path, name: str | None) -> None:
    """Check that the content of a shared file matches the hash in its name; None is ignored.

    Raises:
        LabError: The file is missing or was changed.
    """
    match = SHARED.fullmatch(name or "")
    if match is not None and (folder.hash_file(outputs / match[0]) or "")[:16] != match[1]:
        raise LabError("is missing or has changed since it was written", file=outputs / match[0])


def place_of(lab: Path, run_id: str) -> Path | None:
    """Return the lab inside the checkout of a run's code; None if there is no checkout."""
    link = lab / ".looplab" / "again" / run_id / "lab"
    return link.resolve() if link.exists() else None


def checkout(lab: Path, outputs: Path, run_id: str, capsule: Mapping[str, Any]) -> list[str]:
    """Check out the run's code below `.looplab/again`, if it differs from the current code.

    Returns:
        What was done and what could not be restored, in words.

    Raises:
        LabError: The code cannot be restored exactly, or git failed.
    """
    code = capsule.get("code") or {}
    commit = code.get("commit")
    unknown = doubt(code)
    if commit is None:
        return [f"{unknown or 'the lab was not in git'}: the code is the current one"]
    today = Capsules(lab, outputs).code()
    notes = [unknown] if unknown else []
    notes += [
        f"{name}, outside the lab, had uncommitted changes that were not kept" for name in code.get("elsewhere") or ()
    ]
    same = (today["commit"], today.get("patch")) == (commit, code.get("patch"))
    if same and not unknown and not doubt(today) and not code.get("elsewhere") and not today.get("elsewhere"):
        then, now = (side.get("left_out") or {} for side in (code, today))
        notes += [
            f"{name} has changed since; its content is not kept, since it is a file for secrets"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        ]
        changes = ", with its uncommitted changes" if code.get("patch") else ""
        return [*notes, f"the code is unchanged ({commit[:12]}{changes})"]
    if code.get("redacted"):
        raise LabError(
            f"the uncommitted changes of this run held secrets, which were not kept: {', '.join(code['redacted'])}",
            hint="its code cannot be checked out exactly; commit the code before a run that you want to reproduce",
        )
    top = work_tree(lab, timeout=GIT_S)
    home = lab / ".looplab" / "again" / run_id
    drop(lab, run_id)
    home.mkdir(parents=True)
    checkout = home / "tree"
    _git(lab, "worktree", "add", "--detach", "--force", "--", str(checkout), commit)
    if code.get("patch"):
        _git(checkout, "apply", "--binary", "--whitespace=nowarn", "--", str(outputs.resolve() / code["patch"]))
    place = checkout / lab.resolve().relative_to(top.resolve())
    notes += [
        f"the code of {commit[:12]} was checked out{', with its uncommitted changes' if code.get('patch') else ''}"
    ]
    notes += [
        f"{name} had uncommitted changes that were not kept: it is a file for secrets"
        for name in code.get("left_out") or ()
    ]
    named = code.get("untracked") or []
    below = lab.resolve().relative_to(top.resolve()).parts
    for name in named:
        own = tree.parts_of(name)[len(below) :][:1] in OWN
        if not own and not os.path.lexists(checkout / name) and tree.copy(top, checkout, name):
            notes.append(f"{name} was never in git: the current version is used")
    more = (code.get("untracked_count") or 0) - len(named)
    if more > 0:
        notes.append(
            f"{plural(more, 'more file was', 'more files were')} never in git and not named in the capsule: missing"
        )
    for name in capsule.get("data") or {}:
        if not os.path.lexists(place / name) and (lab / name).exists():
            with tree.open_parent(place, name, create=True) as (parent, last):
                os.symlink(inside(lab, name, "data"), last, dir_fd=parent)
    os.symlink(place, home / "lab")
    return notes


def drop(lab: Path, run_id: str) -> None:
    """Remove the checkout of a run."""
    home, name = lab / ".looplab", f"again/{run_id}"
    if (home / name / "tree").exists():
        tree.make_writable(home, f"{name}/tree")  # raises if a symlink is in the path
        git(lab, "worktree", "remove", "--force", "--", str(home / name / "tree"), ok=True, timeout=GIT_S)
    if home.exists():
        tree.remove(home, name)


def differences(lab: Path, outputs: Path, capsule: Mapping[str, Any], data: Fingerprints) -> list[str]:
    """Return the differences between the recorded and the current environment, except for code, in words."""
    now = Capsules(lab, outputs, data).make([], capsule["program"], {}, {})
    changes = []
    for name, digest in (capsule.get("data") or {}).items():
        if now["data"].get(name) != digest:
            changes.append(f"{name} has changed")
    before, after = (side.get("python") or {} for side in (capsule, now))
    if before.get("version") != after.get("version"):
        changes.append(f"Python was {before.get('version')}, now {after.get('version')}")
    if before.get("packages") != after.get("packages"):
        changes.append("different packages are installed: " + (_packages(outputs, before, after) or "not known which"))
    for part in ("cpu", "gpus"):
        if capsule["machine"].get(part) != now["machine"].get(part):
            changes.append(f"{part}: was {capsule['machine'].get(part)}, is {now['machine'].get(part)}")
    return changes


def _packages(outputs: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the packages that differ, in words; empty if unknown."""
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
    """Run git; failures are raised as a LabError with a hint."""
    try:
        return git(where, *args, timeout=GIT_S)
    except GitError as error:
        raise LabError(error.message, hint="is the run's commit still in this repository?") from None
