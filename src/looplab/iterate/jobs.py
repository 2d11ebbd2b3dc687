"""The trainings of a version: commands that its agent submitted with `looplab submit`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from looplab.iterate.gates import GateFinding
from looplab.iterate.seal import files_of
from looplab.ledger.ledger import Ledger
from looplab.ledger.roles import Origin
from looplab.ledger.view import JOBS_SUFFIX, StudyView
from looplab.runs.folder import hash_file

SLACK_S = 2.0
"""Seconds by which the time of a file may differ from the clock of the run that wrote it."""


@dataclass(frozen=True, slots=True)
class Training:
    """A submitted command of a version."""

    run: str | None
    """Its run; None while it waits."""
    command: str
    program: str
    status: str | None
    """How it ended; None while it waits or runs."""
    started: float | None
    ended: float | None


def trainings(ledger: Ledger, study: str, folder: str, since: float) -> list[Training]:
    """Return what was submitted in a folder of the lab since a time, oldest first.

    Args:
        ledger: The ledger of the lab.
        study: The study whose slots are used.
        folder: The version's worktree, relative to the lab.
        since: Unix time.
    """
    view = StudyView(ledger, study + JOBS_SUFFIX)
    found = []
    for proposal, _ in view.proposals_from(Origin.JOB):
        job = proposal.job
        if job is None or proposal.created < since or not PurePath(job.cwd).is_relative_to(folder):
            continue
        run = view.run(proposal.run) if proposal.run is not None else None
        status = "rejected" if proposal.status == "rejected" else run.status if run is not None else None
        found.append(
            Training(
                run=proposal.run, command=shlex.join(job.argv), program=job.argv[0], status=status,
                started=run.started if run is not None else None, ended=run.ended if run is not None else None,
            )
        )  # fmt: skip
    return found


def check_trained(version: Path, patterns: Sequence[str], done: Sequence[Training], others: Path) -> list[GateFinding]:
    """Check that the files that a training makes were made by a recorded training of this version.

    Args:
        version: Folder of the version.
        patterns: The files, below that folder.
        done: The version's trainings.
        others: Folder of all versions; a file that is equal to one of another version was copied.
    """
    succeeded = [one for one in done if one.status == "ok"]
    if not succeeded:
        tried = "; ".join(f"{one.command}: {one.status}" for one in done) or "nothing was submitted"
        return [GateFinding(False, "training", f"no training of this version succeeded through the lab ({tried})")]
    problems = list(_not_trained(version, patterns, succeeded, others))
    if problems:
        return [GateFinding(False, "training", problem) for problem in problems]
    return [GateFinding(True, "training", f"{len(succeeded)} training(s) through the lab made what is evaluated")]


def _not_trained(version: Path, patterns: Sequence[str], done: Sequence[Training], others: Path) -> Iterator[str]:
    copied = {
        hash_file(path): path.relative_to(others)
        for other in sorted(others.glob("v[0-9]*"))
        if other.name != version.name
        for path in files_of(other, patterns_of(other, patterns))
        if not path.is_symlink()
    }
    for name in patterns_of(version, patterns):
        for path in files_of(version, [name]):
            where = path.relative_to(version)
            if (digest := hash_file(path)) in copied and path.stat().st_size:
                yield f"{where} is a copy of {copied[digest]}"
            elif not any(_within(path.stat().st_mtime, one) for one in done):
                yield f"{where} was not written by a training that the lab ran: train with `looplab submit`"


def _within(mtime: float, training: Training) -> bool:
    started, ended = training.started, training.ended
    return started is not None and ended is not None and started - SLACK_S <= mtime <= ended + SLACK_S


def patterns_of(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return what the patterns match below a folder, without placeholders, as relative paths."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.name != ".gitkeep"}
    return sorted(str(path.relative_to(folder)) for path in found)
