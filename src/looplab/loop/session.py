"""The application layer: everything around one engine of one study.

A session holds the study's lock and its ledger, checks the study, keeps the options for `resume`, and runs the engine
with its executor, report writer and signals. The command line, the Python API and a page all use it; they parse, call
and show.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from looplab import signals
from looplab.config.edits import Edit, Op
from looplab.config.lab import LabConfig, StudyConfig
from looplab.decide.queue import read_queue
from looplab.errors import BusyError, LabError
from looplab.guard.knobs import Knob
from looplab.launch.base import Executor, PlacingExecutor
from looplab.launch.command import find_program
from looplab.launch.executors import make_executor
from looplab.ledger.ledger import Ledger, LedgerCopy
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.decision import base_runs, decide_base
from looplab.loop.engine import Engine
from looplab.loop.events import EngineEvent, Listener, Note, RunEnded
from looplab.loop.lock import StudyLock, engine_pid
from looplab.loop.outcome import Ending, Outcome
from looplab.loop.planning import bases_to_run
from looplab.loop.setup import RunOptions, Setup, find_cwd, make_guard, prepare, with_executor
from looplab.measure.discover import Reader
from looplab.measure.stdout import StdoutSource
from looplab.report.writer import ReportWriter
from looplab.runs.folder import study_folder
from looplab.runs.redact import HIDDEN, redact_argv
from looplab.untrusted import append_own

START_S = 60.0
"""Seconds that an engine in the background may take to start before it is assumed to come."""
STOP_S = 30.0
"""Seconds that an engine may take to record the end of its runs, in addition to their grace."""


@dataclass(frozen=True, slots=True)
class SessionResult:
    """How a session ended."""

    outcome: Outcome
    counts: dict[str, int]
    """Runs of the study by status."""
    best: str | None
    not_run: tuple[str, ...]
    """A sentence for each config that the call named and that was not run."""
    has_result: bool
    """Whether a run of the study ended well and, if there is an objective, measured it."""

    @property
    def ok(self) -> bool:
        """Whether everything requested was done, and the study has a result unless nothing has run yet."""
        if self.outcome.ending in (Ending.STOPPED, Ending.FAILED) or self.not_run:
            return False
        return self.has_result or not self.counts or bool(self.counts.get("planned"))


class Session:
    """The only writer of a study, while it is entered.

    Args:
        study: The study's configuration; `<study>.jobs` and probes have their own.
        listeners: Called with each event of the engine, in its thread. An exception in one stops the study and is
            raised again when the engine has ended.
        executor: Makes the executor of an engine; None: the one that the study names.
        on_hangup: Called when the terminal was closed.
    """

    def __init__(
        self,
        lab: LabConfig,
        study: StudyConfig,
        *,
        listeners: Sequence[Listener] = (),
        executor: Callable[[], Executor] | None = None,
        on_hangup: Callable[[], None] = lambda: None,
    ) -> None:
        self.lab = lab
        self.study = study
        self.engine: Engine | None = None
        """The engine, once it runs."""
        self._listeners = list(listeners)
        self._make_executor = executor
        self._on_hangup = on_hangup
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            path = self.lab.claim_ledger()
            stack.enter_context(StudyLock(self.lab.folder, self.study.name))
            self.ledger = stack.enter_context(contextlib.closing(Ledger(path)))
            if self.lab.ledger_path != path:
                raise LabError("the ledger was being moved to another folder", hint="try again")
            self.record = StudyLedger(self.ledger, self.study.name)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def begin(self, setup: Setup) -> Setup:
        """Keep the options of a new call for `resume`; return the setup with its runs and rounds counted from now."""
        setup = count_from_now(setup, self.ledger)
        self.keep_options(setup.options)
        return setup

    def keep_options(self, options: RunOptions) -> None:
        """Keep the options of a call for `resume`."""
        # Escaped, since arguments and paths may be bytes that are not valid Unicode.
        self.record.save_options(replace(options, extra=tuple(redact_argv(options.extra))).to_dict())

    def once(self, setup: Setup) -> Setup:
        """Return the setup of one more run: the queue keeps waiting, and `resume` keeps its options."""
        used = self.record.usage()
        return replace(setup, options=replace(setup.options, runs=used.runs + 1, rounds=used.rounds + 1))

    def run(self, setup: Setup, *, resumed: bool = False) -> SessionResult:
        """Run the engine to its end and report what came of it."""
        before, unfinished = self.record.usage().runs, self.record.runs_open()
        outcome = self.drive(setup)
        did_nothing = not resumed and not unfinished and self.record.usage().runs == before
        best = self.record.best()
        return SessionResult(
            outcome=outcome,
            counts=self.record.counts(),
            best=best.id if best else None,
            not_run=tuple(_named_not_run(setup, self.record, did_nothing)) if outcome.ending is Ending.DONE else (),
            has_result=self.record.has_result(measured=setup.study.objective is not None),
        )

    def drive(self, setup: Setup) -> Outcome:
        """Run the engine to its end, with its executor, its reports and, in the main thread, its signals."""
        failures: list[Exception] = []
        lock = threading.Lock()  # the report writer has its own threads

        def emit(event: EngineEvent) -> None:
            with lock:
                if isinstance(event, RunEnded) and event.run is not None:
                    writer.ended(event.run)
                for listener in self._listeners if not failures else ():
                    try:
                        listener(event)
                    except Exception as error:  # noqa: BLE001 (raised again when the engine has ended)
                        failures.append(error)
                        self.request_stop()

        with self._signals(), contextlib.ExitStack() as stack:
            writer = ReportWriter(setup.lab, self.ledger.path, setup.study, lambda problem: emit(Note(problem)))
            stack.callback(writer.close)
            make = self._make_executor or (lambda: make_executor(setup.lab, setup.study))
            self._executor = make()
            stack.callback(self._executor.close)
            if isinstance(self._executor, PlacingExecutor):
                setup = replace(setup, slots=self._executor.capacity(setup.slots))
            self.engine = Engine(setup, self.ledger, self._executor, emit)
            for note in setup.notes:
                emit(Note(note))
            if threading.current_thread() is threading.main_thread():
                signals.warn_ctrl_c(lambda note: emit(Note(note)), "`looplab stop`, or SIGTERM")
            writer.catch_up(self.record)
            outcome = self.engine.run()
        if failures:
            raise failures[0]
        return outcome

    def request_stop(self, *, drain: bool = False) -> None:
        """Ask the engine to end: now, or (`drain`) when the current runs have ended. Safe in any thread."""
        if self.engine is not None:
            self.engine.request("drain" if drain else "stop")
            self._executor.wake()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle the ending signals: the first Ctrl-C drains, the second one and SIGTERM stop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        interrupts = 0

        def handle(number: int, frame: object) -> None:
            nonlocal interrupts
            if self.engine is None:
                raise KeyboardInterrupt
            interrupts += number == signal.SIGINT
            if number == signal.SIGHUP:  # may come twice, from the shell and from the kernel
                self._on_hangup()
            self.request_stop(drain=number != signal.SIGTERM and interrupts < 2)

        with signals.handled(handle):
            yield


# -- before a session


def check_study(lab: LabConfig, study: StudyConfig, options: RunOptions) -> Setup:
    """Check everything before anything is written or started; mistakes in the lab file are reported with their line."""
    from looplab.decide.rules import load_decide, read_rules

    for path, spec in study.knobs.items():
        with lab.at(study, "knobs", path):
            Knob.make(path, spec)
    with lab.at(study, "derive" if study.derive else "normalise"):
        make_guard(study)
    with lab.at(study, "launch", "cwd"):
        cwd = find_cwd(lab.folder, study.launch.cwd)
    with lab.at(study, "launch", "command"):
        if "{" not in study.launch.command[0]:
            find_program(study.launch.command[0], cwd, study.launch.env)
    check_sources(lab, study)
    for entry in study.proposers:
        if entry.queue:
            read_queue(lab.folder / entry.queue)
        elif entry.rules:
            rules = lab.folder / entry.rules
            (load_decide if rules.suffix == ".py" else read_rules)(rules)
        elif entry.search is not None:
            from looplab.decide.packages import check_packages

            with lab.at(study, "proposers"):
                check_packages(entry.search)
    return prepare(lab, study, options)


def refuse_hopeless(lab: LabConfig, study: StudyConfig, edits: Sequence[Edit]) -> None:
    """Refuse edits that the guard rejects whichever config they start from.

    Raises:
        LabError: A key is not a knob, or is set to a value outside of its range.
    """
    setup = check_study(lab, study, RunOptions(informal=True))
    absolute = {one.path for one in edits if one.op in (Op.SET, Op.NEW)}
    found = [
        [
            str(problem)
            for problem in setup.guard.check(base.config, edits).problems
            if problem.rule == "not a knob" or (problem.rule == "knob range" and problem.key in absolute)
        ]
        for base in setup.bases
    ]
    if found and all(found):
        raise LabError("; ".join(found[0]), hint="nothing was queued; `looplab check` lists the knobs")


def check_sources(lab: LabConfig, study: StudyConfig) -> None:
    """Raise LabError if the study's metric sources cannot be used."""
    with lab.at(study, "measure", "sources"):
        Reader(lab.folder, study.measure.sources)
    with lab.at(study, "measure", "stdout"):
        StdoutSource(lab.folder, study.measure.stdout)


def count_from_now(setup: Setup, ledger: Ledger | LedgerCopy) -> Setup:
    """Count the rounds and runs that a call asks for from now on if it names configs that were never run, or wants them
    again; a call that is repeated continues its count. Notes say which of the named configs are not run."""
    options = setup.options
    if not (options.cfgs or options.again):
        return setup
    record = StudyLedger(ledger, setup.study.name)
    last = None
    with contextlib.suppress(LabError):
        last = last_options(record, setup.lab)
    if last is not None and not options.again and replace(last, since_run=0, since_round=0) == options:
        return replace(setup, options=last)
    done = base_runs(setup, record)
    bases = [decide_base(setup, base) for base in setup.bases]
    if options.again or any(base.key not in done for base in bases):
        used = record.usage()
        return replace(setup, options=replace(options, since_run=used.runs, since_round=used.rounds))
    known = [
        f"{base.base} was run before ({done[base.key][-1].id}) and does not run again; --again reruns it"
        for base in bases
    ]
    return replace(setup, notes=(*setup.notes, *known))


def _named_not_run(setup: Setup, record: StudyLedger, did_nothing: bool) -> list[str]:
    """Return a sentence for each config named in the call that it has not run: the budget left no room, or the config
    was run before and the call has run nothing else either."""
    if not (setup.options.cfgs or setup.options.again):
        return []
    left = bases_to_run(setup, record, [decide_base(setup, base) for base in setup.bases])
    if did_nothing and not left:
        return [f"{base.name} was run before and does not run again (see --again)" for base in setup.bases]
    return [f"{base.base} was not run (allow more with --rounds or --runs)" for base in left]


# -- options


def relative_to_lab(lab: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Name configs by their path inside the lab, so that it can be moved; those outside keep theirs."""
    root = lab.resolve()
    return tuple(str(Path(name).relative_to(root)) if Path(name).is_relative_to(root) else name for name in names)


def last_options(record: StudyLedger, lab: Path) -> RunOptions:
    """Return the options of the study's last `run`."""
    try:
        saved = record.saved_options()
        if saved is None:
            raise LabError(f"study {record.name!r} was never run", hint="start it with `looplab run`")
        options = RunOptions.from_dict(saved)
    except (AttributeError, TypeError, ValueError):
        raise LabError(
            f"the options of the last `run` of study {record.name!r} cannot be read",
            hint="give them again with `looplab run`",
        ) from None
    return replace(options, cfgs=tuple(_relocated(lab, name) for name in relative_to_lab(lab, options.cfgs)))


def _relocated(lab: Path, name: str) -> str:
    """Return the path inside the lab of a config that an early version recorded with the lab's own path, which has
    changed since: the longest end of it that the lab has."""
    path = Path(name)
    if not path.is_absolute() or path.exists():
        return name
    ends = (Path(*path.parts[first:]) for first in range(1, len(path.parts)))
    return next((str(end) for end in ends if (lab / end).is_file()), name)


def options_to_resume(record: StudyLedger, lab: Path) -> RunOptions:
    """Return the options of the study's last `run`, for one that continues it.

    Raises:
        LabError: It was never run, or had a secret among its arguments.
    """
    options = last_options(record, lab)
    if any(HIDDEN in word for word in options.extra):
        raise LabError(
            "the last `run` had a secret among the trainer's arguments, which is not stored",
            hint="continue with `looplab run … -- …`, or pass it in the environment",
        )
    return options


def check_detachable(options: RunOptions) -> None:
    """Raise LabError if the options cannot reach an engine in the background."""
    if redact_argv(options.extra) != list(options.extra):
        raise LabError(
            "a secret among the trainer's arguments does not reach a study in the background, since the ledger does "
            "not store it",
            hint="pass it in the environment",
        )


# -- engines elsewhere


def start_detached(lab: LabConfig, study: StudyConfig) -> tuple[int, Path]:
    """Start `resume` in its own session and wait until its engine runs; return its pid and its log."""
    log = lab.folder / ".looplab" / f"{study.name}.log"
    argv = [sys.executable, "-m", "looplab", "resume", "--lab", str(lab.folder), "--study", study.name]
    with append_own(log) as file:
        start = file.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, cwd=lab.folder
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            printed = log.read_bytes()[start:].decode(errors="replace").strip()
            if process.returncode in (0, 1):  # it had nothing left to do
                break
            error = BusyError if process.returncode == BusyError.exit_code else LabError
            raise error(f"the engine exited at once: {printed.removeprefix('looplab: ')}")
        if engine_pid(lab.folder, study.name) == process.pid:
            break
        time.sleep(0.02)
    return process.pid, log


def stop_study(lab: LabConfig, study: StudyConfig, record: StudyLedger, run: RunRow | None, *, drain: bool) -> str:
    """Stop a study, or one run of it, wherever its engine is; return what was done, in words."""
    pid = engine_pid(lab.folder, study.name)
    if run is not None and run.state not in ("queued", "running"):
        return f"run {run.id} is not running: it is {run.status or run.state}"
    if pid is not None and drain:
        record.command("drain")
        return (
            f"the engine (pid {pid}) starts no new runs and exits when the running ones have ended; "
            "`looplab resume` continues"
        )
    if pid is not None:
        record.command("stop", run=run.id if run else None)
        who = f"run {run.id}" if run else f"the engine (pid {pid})"
        return (
            f"{who} has stopped"
            if _await_stop(lab, study, record, run)
            else f"{who} was asked to stop, but is still running"
        )
    if drain:
        return "no engine is running, so nothing will start"
    outputs = study_folder(lab.folder, study.name)
    runs = [run] if run else [*record.runs(state="queued"), *record.runs(state="running")]
    with contextlib.closing(make_executor(lab.folder, _last_study(study, record, lab.folder))) as executor:
        stopped, unseen = executor.stop_detached([outputs / one.id for one in runs], study.launch.grace)
    what = f"stopped {', '.join(stopped)} (`looplab resume` records it)" if stopped else "no training is alive"
    if unseen:
        what += (
            f"; {', '.join(unseen)} may run on another host or in another container, and cannot be stopped from here"
        )
    return f"no engine is running; {what}"


def _last_study(study: StudyConfig, record: StudyLedger, lab: Path) -> StudyConfig:
    """Return the study with the executor of its last `run`."""
    with contextlib.suppress(LabError):
        return with_executor(study, last_options(record, lab))
    return study


def _await_stop(lab: LabConfig, study: StudyConfig, record: StudyLedger, run: RunRow | None) -> bool:
    deadline = time.monotonic() + study.launch.grace + STOP_S
    while time.monotonic() < deadline:
        if run is not None:
            if record.run(run.id).state == "ended":
                return True
        elif engine_pid(lab.folder, study.name) is None:
            return True
        time.sleep(0.05)
    return False
