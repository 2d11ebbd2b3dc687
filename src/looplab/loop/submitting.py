"""Commands that somebody hands in with `looplab submit`: they are run like every run of the study.

They are the runs of a study of its own, `<study>.jobs`, with the slots, limits, measures and budget of the real one.
The config of such a run is the command: its arguments, its folder, and the files it names. An engine runs them in the
background, ends when it has had nothing to do for a while, and is started again by whoever needs it.

Between the engine of the study and the one of its commands this holds, and no more:
- A device is used by one of them at a time: its lock is held by the training itself. Whoever finds it held tries again
  every few seconds; there is no queue between the two, so a study that is never idle can keep a command waiting.
- Slots without a device have no lock. Each engine keeps to its own number of them, both number their cores alike, and
  so a core may have a run of each.
- The budget is one: what commands use (runs, device-hours, and wall-clock time, where time that both engines were at
  work counts once) is missing for the study, and the other way round. `run --runs N` counts the study's own runs only.
  Each engine goes by the lab file as it was when the engine began.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from looplab.config.edits import Edit, Op, apply_edits
from looplab.config.files import canonical_json
from looplab.config.lab import LAB_FILE, BudgetConfig, ConfigRendering, LabConfig, Require, StudyConfig
from looplab.decide.base import Proposal
from looplab.decide.queue import waiting
from looplab.errors import LabError
from looplab.launch import supervisor
from looplab.launch.command import find_program
from looplab.launch.devices import Devices
from looplab.ledger.study import JOBS_SUFFIX, BudgetUsage, RunRow, StudyLedger
from looplab.loop.setup import RunOptions, Setup, find_prints, make_guard, plan_slots
from looplab.runs import clock
from looplab.runs.folder import hash_file
from looplab.runs.names import inside, random_suffix
from looplab.runs.redact import redact_argv
from looplab.untrusted import append_own, real_path

JOB = "job"
"""The proposer of runs that are a command."""
IDLE_S = 5.0
"""How long an engine without work waits for more."""
LIMITS = ("timeout", "budget")
"""The watch rules that hold for any command; the others speak of what the study's own trainer measures."""
STOPPED = ("stopped", "drained")
OWN = ("LOOPLAB_LOCK_DIR", "LOOPLAB_DEBUG")
"""Of looplab's variables, those that are meant for an engine. The others mark what belongs to a run."""


# -- the study of the commands


def jobs_study(lab: LabConfig, study: StudyConfig) -> StudyConfig:
    """The study of the commands: launched, limited and measured as the real one, but with nothing to decide."""
    name = study.name + JOBS_SUFFIX
    if name in lab.studies:
        raise LabError(
            f"the lab has a study {name!r}, which is the name for the commands of {study.name!r}",
            hint="rename that study",
        )
    limits = [rule for rule in study.watch if rule.kind in LIMITS]
    return study.model_copy(
        update={
            "name": name,
            "launch": study.launch.model_copy(update={"config": ConfigRendering(), "cwd": "."}),
            "base": [],
            "modes": {},
            "knobs": {},
            "normalise": [],
            "derive": {},
            "constraints": [],
            "seed": None,
            "holdout": None,
            "proposers": [],
            "warm_start": None,
            "probe": None,
            "watch": [rule.model_copy(update={"stop": rule.stops, "requeue": []}) for rule in limits],
            "judge": None,
            "budget": BudgetConfig(
                runs=study.budget.runs, wall=study.budget.wall, device_hours=study.budget.device_hours
            ),
            "require": Require(),
            "needs_exec": False,
        }
    )


def jobs_setup(lab: LabConfig, study: StudyConfig, said: RunOptions, owner_pid: int = 0) -> Setup:
    """What the engine of the commands needs; in the slots that the last `run` of the study was told to use."""
    made = jobs_study(lab, study)
    options = RunOptions(
        continuous=True, concurrency=said.concurrency, gpus=said.gpus, share=said.share, informal=True, jobs=owner_pid
    )
    devices = Devices()
    share = made.slots.share if said.share is None else said.share
    slots = plan_slots(made, options, devices)
    prints = find_prints(lab, made)
    return Setup(lab.folder, made, options, make_guard(made), (), slots, devices, share, None, prints)


class JobQueue:
    """Hands over the commands that wait, and keeps the engine there for a while when there are none; for longer, as
    long as its patron lives, a process that means to send more."""

    name = JOB
    problem: str | None = None

    def __init__(self, owner_pid: int) -> None:
        self._owner_pid = (owner_pid, supervisor.start_ticks(owner_pid)) if owner_pid else None
        self._last = clock.now()  # when there was last anything to do

    @property
    def thinking(self) -> bool:
        if self._owner_pid is not None and supervisor.start_ticks(self._owner_pid[0]) == self._owner_pid[1]:
            return True
        return clock.now() - self._last < IDLE_S

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        rows = study.waiting(n, JOB)
        ended = study.ledger.one("SELECT max(ended) FROM runs WHERE study=?", (study.name,))
        now = clock.now()
        self._last = now if rows else min(now, max(self._last, (ended and ended[0]) or 0.0))
        return [waiting(row) for row in rows]

    def close(self) -> None:
        """There is nothing to let go of."""


def start_engine(lab: Path, study: str, owner_pid: int = 0) -> subprocess.Popen[bytes]:
    """Start the engine of a study's commands in a session of its own; it ends by itself.

    A process that is ended with all its descendants (an agent under its supervisor) must not start it. Another process
    does, and names the process for which the engine stays alive (`owner_pid`).
    """
    argv = [sys.executable, "-m", "looplab", "submit", "--serve", str(owner_pid), "--lab", str(lab), "--study", study]
    env = {name: value for name, value in os.environ.items() if not name.startswith("LOOPLAB_") or name in OWN}
    log = engine_log(lab, study)
    log.parent.mkdir(parents=True, exist_ok=True)
    with append_own(log) as file:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, cwd=lab, env=env
        )


def engine_log(lab: Path, study: str) -> Path:
    return lab / ".looplab" / f"{study}{JOBS_SUFFIX}.log"


# -- one command


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A command as it was handed in."""

    argv: tuple[str, ...]
    program: str
    """Where the caller's PATH has it: the engine may have another."""
    cwd: str
    """Relative to the lab."""
    files: Mapping[str, str]
    """The files of the lab that it names, with the hashes of their content."""

    @property
    def call(self) -> str:
        """The same for calls of the same command in the same folder."""
        return hashlib.sha256(canonical_json({"argv": self.argv, "cwd": self.cwd})).hexdigest()[:16]

    def is_as(self, files: Mapping[str, str]) -> bool:
        """Whether the files that the same call named before are still what they were. One that was not there then
        does not matter: it is what the command has written, and not what it was made of."""
        return all(self.files.get(name) == digest for name, digest in files.items())

    def edits(self, timeout: float | None) -> tuple[str, ...]:
        """The config of its run, as edits on nothing."""
        # A program looks for itself under the name that it was called by: `python` finds its packages in that way.
        argv = list(self.argv) if "/" in self.argv[0] else [self.program, *self.argv[1:]]
        config = {"argv": argv, "cwd": self.cwd, "files": dict(self.files), "timeout": timeout}
        return tuple(str(Edit(key, Op.NEW, value)) for key, value in config.items() if value is not None)


def home_of(folder: Path) -> Path:
    """The lab's own folder, where `folder` is one of the lab's checkouts below its .looplab."""
    for parent in reversed((folder, *folder.parents)):
        if parent.name == ".looplab" and (parent.parent / LAB_FILE).exists():
            return parent.parent
    return folder


def make_job(lab: Path, cwd: Path, argv: Sequence[str], env: Mapping[str, str]) -> SubmittedJob:
    """Look at a command before it is handed in; `env` is what the lab file gives to every run."""
    if not argv or not argv[0]:
        raise LabError("no command is given", hint="looplab submit -- python train.py --lr 0.1")
    if redact_argv(argv) != list(argv):
        raise LabError(
            "a secret is among the arguments, and the ledger does not keep it", hint="give it in the environment"
        )
    folder = inside(lab, cwd, "the command's folder")
    try:
        program = find_program(argv[0], folder, env)
    except LabError as error:
        what = error.message.removeprefix("trainer not found: ")
        raise LabError(
            f"the command cannot be run: {what}", hint="no shell is involved: one word, one argument"
        ) from None
    return SubmittedJob(
        tuple(argv), program, os.path.relpath(folder, lab.resolve()), _named_files(lab.resolve(), folder, argv)
    )


def _named_files(lab: Path, cwd: Path, argv: Sequence[str]) -> dict[str, str]:
    """The files of the lab among the arguments; also as `--config=file`."""
    found = {}
    for word in argv:
        for name in {word, word.partition("=")[2]} - {""}:
            try:
                path = real_path(cwd / name)
                digest = hash_file(path) if path.is_relative_to(lab) and path.is_file() else None
            except (OSError, ValueError):  # no path at all: too long, or with a NUL
                continue
            if digest is not None:
                found[os.path.relpath(path, lab)] = digest
    return found


def submit(record: StudyLedger, job: SubmittedJob, reason: str, timeout: float | None) -> int:
    """Put a command in the queue; gives its number."""
    source = f"{JOB}:{job.call}:{random_suffix(8)}"
    proposal = record.propose(JOB, job.edits(timeout), reason, source=source)
    assert proposal is not None
    return proposal


def find_job(record: StudyLedger, job: SubmittedJob) -> int | None:
    """The last identical command, if it waits, runs, or has come to an end that nobody was told of."""
    rows = record.ledger.rows(
        "SELECT id, status, run, edits FROM proposals WHERE study=? AND source LIKE ? ORDER BY id DESC",
        (record.name, f"{JOB}:{job.call}:%"),
    )
    same = (row for row in rows if job.is_as(apply_edits({}, orjson.loads(row["edits"])).config["files"]))
    row = next(same, None)
    if row is None or row["status"] == "rejected":
        return None
    if row["run"] is not None and record.run(row["run"]).state == "ended" and was_told(record, row["run"]):
        return None
    return int(row["id"])


def run_of(record: StudyLedger, proposal: int) -> RunRow | None:
    """The run that a command has become; None as long as it waits. An error if it was refused."""
    row = record.ledger.one("SELECT status, problems, run FROM proposals WHERE id=?", (proposal,))
    assert row is not None
    if row["status"] == "rejected":
        raise LabError(
            "the command was refused: " + "; ".join(str(p["message"]) for p in orjson.loads(row["problems"]))
        )
    return record.run(row["run"]) if row["run"] is not None else None


def before(record: StudyLedger, proposal: int) -> int:
    """How many commands wait for a slot in front of this one."""
    waiting_before = "SELECT count(*) FROM proposals WHERE study=?1 AND id<?2 AND status='waiting'"
    planned_before = "SELECT count(*) FROM runs WHERE study=?1 AND proposal<?2 AND state='planned'"
    rows = [record.ledger.rows(sql, (record.name, proposal)) for sql in (waiting_before, planned_before)]
    return sum(int(row[0][0]) for row in rows)


def was_told(record: StudyLedger, run: str) -> bool:
    sql = "SELECT 1 FROM events WHERE study=? AND run=? AND kind='told'"
    return record.ledger.one(sql, (record.name, run)) is not None


def note_told(record: StudyLedger, run: RunRow) -> None:
    """Somebody has seen how the run ended; from now on the same command is a new run."""
    with record.ledger.write():
        record.ledger.record("told", record.name, run.id)


def exit_code(run: RunRow) -> int:
    """What the command's caller gets: its own exit code, or what a shell would say."""
    if run.status == "timeout":
        return 124
    if run.signal is not None:
        return 128 + run.signal
    return run.exit_code or (0 if run.status == "ok" else 1)


# -- the budget


def time_spent(budget: BudgetConfig, usage: BudgetUsage) -> str | None:
    """Which budget of time is used, if one is."""
    if budget.wall is not None and usage.wall >= budget.wall:
        return f"the wall-clock budget of {budget.wall:g} s is used"
    if budget.device_hours is not None and usage.device_hours >= budget.device_hours:
        return f"the budget of {budget.device_hours:g} device-hours is used"
    return None


def refusal(budget: BudgetConfig, record: StudyLedger, runs: int | None = None) -> str | None:
    """Return why nothing more is run, or None; `runs` is the limit that a person gave for this study alone."""
    usage = record.shared_usage()
    limit, used = (budget.runs, usage.runs) if runs is None else (runs, record.usage().runs)
    if limit is not None and used >= limit:
        return f"the budget of {limit} run(s) is used"
    return time_spent(budget, usage)


def refuse(record: StudyLedger, proposal: int, why: str) -> bool:
    """Take a proposal out of the queue; False if it has just become a run."""
    with record.ledger.write():
        if run_of(record, proposal) is not None:
            return False
        problem: dict[str, Any] = {"key": "budget", "rule": "budget", "message": why}
        record.reject(proposal, [problem])
        return True
