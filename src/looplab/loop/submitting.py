"""Commands submitted with `looplab submit`, executed like the runs of the study.

They are runs of a separate study, `<study>.jobs`, with the slots, limits, measures and budget of the real one. The
config of such a run is the command: its arguments, working directory, and the files that it names. An engine runs them
in the background, exits when it has been idle for a while, and is started again on demand.

The engine of the study and the engine of its commands share resources only as follows:
- A device is used by one engine at a time, since the training process holds its lock. An engine that finds a device
  locked retries every few seconds. There is no queue between the two: a study that is never idle can starve a command.
- Slots without a device have no lock. Each engine has its own set of them with the same core numbers, so a core may
  serve one run of each engine.
- The budget is shared: runs, device-hours and wall-clock time of commands are charged to the study, and vice versa.
  Time during which both engines run counts once. `run --runs N` counts only the study's own runs. Each engine uses the
  lab file as it was when the engine started.
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

from looplab.config.files import canonical_json
from looplab.config.lab import LAB_FILE, BudgetConfig, ConfigRendering, LabConfig, Require, StudyConfig, derived_study
from looplab.decide.base import Proposal
from looplab.decide.queue import waiting
from looplab.errors import LabError
from looplab.launch import supervisor
from looplab.launch.command import find_program
from looplab.launch.devices import Devices
from looplab.ledger.catalogue import ToldEvent
from looplab.ledger.plan import Job
from looplab.ledger.roles import Origin
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import JOBS_SUFFIX, BudgetUsage, RunRow
from looplab.loop.setup import RunOptions, Setup, find_prints, make_guard, study_slots
from looplab.report.wording import plural
from looplab.runs import clock
from looplab.runs.folder import hash_file
from looplab.runs.names import inside, random_suffix
from looplab.runs.redact import redact_argv
from looplab.untrusted import append_own, real_path

IDLE_S = 5.0
"""Seconds that an idle engine waits for more commands before it exits."""
LIMITS = ("timeout", "budget")
"""Kinds of watch rules that apply to any command; the others depend on metrics of the study's own trainer."""
INHERITED = ("flags", "objective", "deterministic", "mix", "round_size", "slots", "measure", "track", "anchor", "data",
             "evaluator", "keep_going", "pipeline", "stages", "case", "executor", "suite",
             "resources", "retry")  # fmt: skip
"""Fields that the study of the commands shares with the real study."""
STOPPED = ("stopped", "drained")
OWN = ("LOOPLAB_LOCK_DIR", "LOOPLAB_STATE_DIR", "LOOPLAB_DEBUG")
"""LOOPLAB_* variables that an engine inherits; the others describe a single run."""


# -- the study of the commands


def jobs_study(lab: LabConfig, study: StudyConfig) -> StudyConfig:
    """Return the study of the submitted commands: like the real one, but without knobs, proposers and judge.

    Raises:
        LabError: The lab already has a study of that name.
    """
    name = study.name + JOBS_SUFFIX
    if name in lab.studies:
        raise LabError(
            f"the lab has a study {name!r}, which is the name reserved for commands of {study.name!r}",
            hint="rename that study",
        )
    limits = [rule for rule in study.watch if rule.kind in LIMITS]
    return derived_study(
        study,
        INHERITED,
        name=name,
        launch=study.launch.model_copy(update={"config": ConfigRendering(), "cwd": "."}),
        base=[],
        modes={},
        knobs={},
        normalise=[],
        derive={},
        constraints=[],
        seed=None,
        holdout=None,
        proposers=[],
        warm_start=None,
        probe=None,
        watch=[rule.model_copy(update={"stop": rule.stops, "requeue": []}) for rule in limits],
        judge=None,
        budget=BudgetConfig(runs=study.budget.runs, wall=study.budget.wall, device_hours=study.budget.device_hours),
        require=Require(),
        needs_exec=False,
    )


def jobs_setup(lab: LabConfig, study: StudyConfig, said: RunOptions, owner_pid: int = 0) -> Setup:
    """Return the setup for the engine of the commands.

    Args:
        said: Options of the study's last `run`; its slots are used here too.
        owner_pid: Process for which the engine stays alive; 0: none.
    """
    jobs = jobs_study(lab, study)
    options = RunOptions(
        continuous=True, concurrency=said.concurrency, gpus=said.gpus, share=said.share, informal=True, jobs=owner_pid
    )
    devices = Devices()
    share = jobs.slots.share if said.share is None else said.share
    slots = study_slots(jobs, options, devices)
    prints = find_prints(lab, jobs)
    return Setup(lab.folder, jobs, options, make_guard(jobs), (), slots, devices, share, None, prints)


class JobQueue:
    """Proposes the waiting commands, and keeps an idle engine alive for `IDLE_S` seconds.

    If an owner process is given, the engine stays alive as long as that process, which may submit more commands.
    """

    name: str = Origin.JOB
    problem: str | None = None

    def __init__(self, owner_pid: int) -> None:
        self._owner_pid = (owner_pid, supervisor.start_ticks(owner_pid)) if owner_pid else None
        self._last = clock.now()  # when there was last work to do

    @property
    def thinking(self) -> bool:
        """Whether the engine should wait for more commands."""
        if self._owner_pid is not None and supervisor.start_ticks(self._owner_pid[0]) == self._owner_pid[1]:
            return True
        return clock.now() - self._last < IDLE_S

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        """Return up to n waiting commands, oldest first."""
        rows = study.waiting(n, Origin.JOB)
        now = clock.now()
        self._last = now if rows else min(now, max(self._last, study.last_end() or 0.0))
        return [waiting(row) for row in rows]

    def close(self) -> None:
        """Do nothing: the queue holds no resources."""


def start_engine(lab: Path, study: str, owner_pid: int = 0) -> subprocess.Popen[bytes]:
    """Start the engine of a study's commands in its own session; it exits when idle.

    A process that is killed together with its descendants, such as an agent under its supervisor, must not start the
    engine itself. Another process starts it and passes the pid for which it stays alive (`owner_pid`; 0: none).
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
    """Return the log file of the engine of a study's commands."""
    return lab / ".looplab" / f"{study}{JOBS_SUFFIX}.log"


# -- one command


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A submitted command."""

    argv: tuple[str, ...]
    program: str
    """Path of the executable, resolved with the caller's PATH, since the engine's may differ."""
    cwd: str
    """Working directory, relative to the lab."""
    files: Mapping[str, str]
    """SHA-256 of the lab files among its arguments, by path relative to the lab."""

    @property
    def call(self) -> str:
        """Hash of arguments and working directory, equal for identical calls."""
        return hashlib.sha256(canonical_json({"argv": self.argv, "cwd": self.cwd})).hexdigest()[:16]

    def is_as(self, files: Mapping[str, str]) -> bool:
        """Return whether the files of an earlier identical call are unchanged.

        Files that did not exist then are ignored: they are outputs of the command, not inputs.

        Args:
            files: SHA-256 by path, from the earlier call.
        """
        return all(self.files.get(name) == digest for name, digest in files.items())

    def job(self, timeout: float | None) -> Job:
        """Return what is recorded and run.

        Args:
            timeout: Seconds that the command may run; None: no limit of its own.
        """
        argv = self.argv if "/" in self.argv[0] else (self.program, *self.argv[1:])
        return Job(argv, self.cwd, self.files, timeout)


def home_of(folder: Path) -> Path:
    """Return the lab that a folder belongs to if it is in a checkout below `.looplab`, else the folder itself."""
    for parent in reversed((folder, *folder.parents)):
        if parent.name == ".looplab" and (parent.parent / LAB_FILE).exists():
            return parent.parent
    return folder


def make_job(lab: Path, cwd: Path, argv: Sequence[str], env: Mapping[str, str]) -> SubmittedJob:
    """Check a command before it is submitted.

    Args:
        env: Variables that the lab file sets for every run.

    Raises:
        LabError: The command is empty, contains a secret, is outside the lab, or its program is not found.
    """
    if not argv or not argv[0]:
        raise LabError("no command is given", hint="looplab submit -- python train.py --lr 0.1")
    if redact_argv(argv) != list(argv):
        raise LabError(
            "the arguments contain a secret, which the ledger does not store", hint="pass it in the environment"
        )
    folder = inside(lab, cwd, "the command's folder")
    try:
        program = _find_python(lab, argv[0], folder, env) or find_program(argv[0], folder, env)
    except LabError as error:
        what = error.message.removeprefix("trainer not found: ")
        raise LabError(
            f"the command cannot be run: {what}", hint="no shell is involved: each word is one argument"
        ) from None
    return SubmittedJob(
        tuple(argv), program, os.path.relpath(folder, lab.resolve()), _named_files(lab.resolve(), folder, argv)
    )


def _find_python(lab: Path, name: str, folder: Path, env: Mapping[str, str]) -> str | None:
    """Return the lab's Python for a `python` that PATH does not have, as in the login shell of an agent; else None."""
    if name not in ("python", "python3"):
        return None
    try:
        return find_program(name, folder, env)
    except LabError:
        own = lab / "venv" / "bin" / name
        return str(own) if own.exists() else sys.executable


def _named_files(lab: Path, cwd: Path, argv: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of lab files among the arguments (also `--config=file`), by path relative to the lab."""
    hashes = {}
    for word in argv:
        for name in {word, word.partition("=")[2]} - {""}:
            try:
                path = real_path(cwd / name)
                digest = hash_file(path) if path.is_relative_to(lab) and path.is_file() else None
            except (OSError, ValueError):  # not a valid path: too long, or with a NUL
                continue
            if digest is not None:
                hashes[os.path.relpath(path, lab)] = digest
    return hashes


def submit(record: StudyLedger, job: SubmittedJob, reason: str, timeout: float | None) -> int:
    """Queue a command; return the id of its proposal."""
    source = f"{Origin.JOB}:{job.call}:{random_suffix(8)}"
    proposal = record.propose(Origin.JOB, (), reason, source=source, job=job.job(timeout))
    assert proposal is not None
    return proposal


def find_job(record: StudyLedger, job: SubmittedJob) -> int | None:
    """Return the proposal id of the last identical command if the caller should wait for it instead of a new run.

    This is the case if it is waiting, running, or has ended without its result being reported. Else None.
    """
    rows = (proposal for proposal, _ in reversed(record.proposals_from(f"{Origin.JOB}:{job.call}")))
    same = (row for row in rows if row.job is not None and job.is_as(row.job.files))
    row = next(same, None)
    if row is None or row.status == "rejected":
        return None
    if row.run is not None and record.run(row.run).state == "ended" and was_told(record, row.run):
        return None
    return row.id


def run_of(record: StudyLedger, proposal: int) -> RunRow | None:
    """Return the run of a submitted command; None while it waits.

    Raises:
        LabError: The command was rejected.
    """
    row = record.proposal(proposal)
    if row.status == "rejected":
        raise LabError("the command was rejected: " + "; ".join(str(p["message"]) for p in row.problems))
    return record.run(row.run) if row.run is not None else None


def before(record: StudyLedger, proposal: int) -> int:
    """Return the number of commands that are ahead of this one in the queue."""
    return record.count_before(proposal)


def was_told(record: StudyLedger, run: str) -> bool:
    """Return whether the result of a run has been reported to a caller."""
    return bool(record.events_of("told", run))


def note_told(record: StudyLedger, run: RunRow) -> None:
    """Record that the result of a run was reported; the next identical command starts a new run."""
    with record.ledger.write():
        record.ledger.record(ToldEvent(), record.name, run.id)


def exit_code(run: RunRow) -> int:
    """Return the exit code for the caller: the command's own, 124 after a timeout, or 128 + signal as in a shell."""
    if run.status == "timeout":
        return 124
    if run.signal is not None:
        return 128 + run.signal
    return run.exit_code or (0 if run.status == "ok" else 1)


# -- the budget


def time_spent(budget: BudgetConfig, usage: BudgetUsage) -> str | None:
    """Return which time budget is used up, in words; None if neither is."""
    if budget.wall is not None and usage.wall >= budget.wall:
        return f"the wall-clock budget of {budget.wall:g} s is used"
    if budget.device_hours is not None and usage.device_hours >= budget.device_hours:
        return f"the budget of {budget.device_hours:g} device-hours is used"
    return None


def refusal(budget: BudgetConfig, record: StudyLedger, runs: int | None = None) -> str | None:
    """Return why no more runs are started, in words; None if the budget allows more.

    Args:
        runs: Limit of the current call, which counts only this study's own runs; None: the budget's limit applies.
    """
    usage = record.shared_usage()
    limit, used = (budget.runs, usage.runs) if runs is None else (runs, record.usage().runs)
    if limit is not None and used >= limit:
        return f"the budget of {plural(limit, 'run')} is used"
    return time_spent(budget, usage)


def refuse(record: StudyLedger, proposal: int, why: str) -> bool:
    """Reject a waiting proposal; return False if it has become a run in the meantime."""
    with record.ledger.write():
        if run_of(record, proposal) is not None:
            return False
        problem: dict[str, Any] = {"key": "budget", "rule": "budget", "message": why}
        record.reject(proposal, [problem])
        return True
