"""submit."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from looplab import signals
from looplab.cli import output
from looplab.cli.labs import recorded_notes
from looplab.config.lab import LabConfig, StudyConfig, find_lab, load_lab, parse_duration
from looplab.errors import BusyError, LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop import submitting
from looplab.loop.lock import engine_pid
from looplab.loop.setup import RunOptions
from looplab.runs import folder as runs
from looplab.runs.clock import format_seconds
from looplab.runs.logs import LogStream, read_tail
from looplab.untrusted import UntrustedError, open_descriptor

POLL_S = 0.1
ANNOUNCE_S = 1.0
"""Seconds before a wait is announced, and between checks of the budget."""
MAX_KILLED = 3
"""Number of killed engines that one call replaces; their trainings continue."""
NEW, JOINED, EARLIER = "new", "joined", "earlier"


@dataclass(frozen=True, slots=True)
class JobContext:
    """The study of submitted commands, with its lab and its part of the ledger."""

    lab: LabConfig
    study: StudyConfig
    """The study of the commands, not the one that was named."""
    named: str
    """Name of the study that the caller named."""
    record: StudyLedger

    def folder(self, run: RunRow) -> Path:
        return runs.study_folder(self.lab.folder, self.study.name) / run.id


def submit(
    folder: Path | None,
    name: str | None,
    argv: Sequence[str],
    *,
    label: str | None,
    timeout: str | None,
    again: bool,
    detach: bool,
    json: bool,
) -> None:
    """Run a command in a slot, stream its output, and exit with its code."""
    lab, study = _open_study(folder, name)
    limit = _parse_timeout(timeout)
    job = submitting.make_job(lab.folder, Path.cwd(), argv, study.launch.env)
    with contextlib.closing(Ledger(lab.claim_ledger())) as ledger:
        jobs = submitting.jobs_study(lab, study)
        context = JobContext(lab, jobs, study.name, StudyLedger(ledger, jobs.name))
        with ledger.write():  # of two equal simultaneous calls, the second finds the first
            proposal = None if again else submitting.find_job(context.record, job)
            how = JOINED
            if proposal is None:
                why = submitting.refusal(jobs.budget, context.record)
                if why is not None:
                    raise LabError(f"the command was rejected: {why}", hint="see budget in lab.yaml")
                proposal = submitting.submit(context.record, job, label or shlex.join(argv), limit)
                how = NEW
        caller = Caller(context, proposal, json)
        try:
            if detach and not caller.is_over():
                caller.leave(how)
                return
            if how == JOINED and caller.is_over():
                how = EARLIER
            if not caller.is_over():
                instead = "SIGTERM, which leaves the command running, or `looplab stop`, which ends it"
                signals.warn_ctrl_c(output.warn, instead)
            run = caller.follow(how)
            caller.report(run, how)
            sys.stdout.flush()
        except KeyboardInterrupt:
            output.warn(f"\n{caller.detach_message()}")
            sys.exit(130)
        except BrokenPipeError:  # the reader is gone: the command continues, and the next call reports its end
            output.mute(1)
            sys.exit(128 + 13)
        submitting.note_told(context.record, run)
    sys.exit(submitting.exit_code(run))


def check_dashes(argv: Sequence[str]) -> None:
    """Require `--` before the command: words before it are parsed as options of looplab."""
    if argv and sys.argv[-len(argv) - 1] != "--":
        raise LabError("the command comes after `--`", hint="looplab submit -- python train.py --lr 0.1")


def serve(folder: Path | None, name: str | None, owner_pid: int) -> None:
    """Run the engine of a study's submitted commands."""
    from looplab.cli.running import TerminalSession
    from looplab.loop.session import check_sources, last_options

    lab, study = _open_study(folder, name)
    check_sources(lab, study)
    with TerminalSession(lab, submitting.jobs_study(lab, study), json=False) as session:
        options = RunOptions()
        with contextlib.suppress(LabError):  # the study has never been run
            options = last_options(StudyLedger(session.ledger, study.name), lab.folder)
        session.drive(submitting.jobs_setup(lab, study, options, owner_pid))


def _open_study(folder: Path | None, name: str | None) -> tuple[LabConfig, StudyConfig]:
    lab = load_lab(submitting.home_of(find_lab(folder or Path.cwd())))
    return lab, lab.study(name)


def _parse_timeout(timeout: str | None) -> float | None:
    try:
        if timeout is None:
            return None
        plain = re.fullmatch(r"[0-9]*\.?[0-9]+", timeout)
        return parse_duration(float(timeout) if plain else timeout)
    except ValueError as error:
        raise LabError(f"--timeout: {error}") from None


class Caller:
    """The waiting side of a call: keeps an engine running, and passes on the command's output."""

    def __init__(self, context: JobContext, proposal: int, json: bool) -> None:
        self._context = context
        self._record = context.record
        self._proposal = proposal
        self._json = json
        self._engine: subprocess.Popen[bytes] | None = None
        self._killed = 0
        self._log_from = 0
        self._began = time.time()
        self._last_check = time.monotonic()
        self._last_message = ""

    def is_over(self) -> bool:
        run = submitting.run_of(self._record, self._proposal)
        return run is not None and run.state == "ended"

    def follow(self, how: str) -> RunRow:
        """Stream the log until the run ends; return the run."""
        stream: Stream | None = None
        while True:
            run = submitting.run_of(self._record, self._proposal)
            over = run is not None and run.state == "ended"  # check before reading the log to its end
            if run is not None and stream is None:
                # A run whose device is in use is launched and then requeued; only a log shows that it has started.
                log = runs.record_file(self._context.folder(run), "train.log")
                if over or (run.state == "running" and log.exists()):
                    self._announce(run, how)
                    stream = Stream(log, silent=self._json)
            grown = stream.pump(final=over) if stream is not None else False
            if run is not None and over:
                return run
            if stream is None:
                self._check_queue(run)
            self._ensure_engine()
            if not grown:
                time.sleep(POLL_S)

    def leave(self, how: str) -> None:
        """Return as soon as an engine is sure to run the command."""
        while True:
            self._ensure_engine()
            run = submitting.run_of(self._record, self._proposal)
            # A busy engine checks the queue again before it ends; an idle one may be about to exit.
            busy = self._record.runs_open() or self._record.is_paused()
            if run is not None or (busy and engine_pid(self._lab, self._study) is not None):
                break
            time.sleep(POLL_S)
        if self._json:
            folder = str(self._context.folder(run)) if run else None
            output.print_json(
                {"study": self._study, "run": run and run.id, "call": how, "status": None, "folder": folder}
            )
        else:
            output.say(self.detach_message())

    def detach_message(self) -> str:
        """Message for a caller who does not wait for the end."""
        run = submitting.run_of(self._record, self._proposal)
        if run is None:
            return "the command is waiting for a slot; the same call attaches to it"
        return (
            f"the command continues as run {run.id}; the same call attaches to it, "
            f"`looplab stop {run.id} --study {self._study}` stops it"
        )

    def report(self, run: RunRow, how: str) -> None:
        """Print how the run ended."""
        folder = self._context.folder(run)
        summary = runs.read_json(folder, "summary.json")
        notes = summary.get("notes") or recorded_notes(self._record.ledger, run)
        if self._json:
            payload = {
                "run": run.id,
                "study": run.study,
                "call": how,
                "status": run.status,
                "exit_code": submitting.exit_code(run),
                "signal": run.signal,
                "seconds": run.seconds,
                "objective": summary.get("objective"),
                "metrics": summary.get("metrics", {}),
                "notes": notes,
                "folder": str(folder),
                "tail": read_tail(runs.record_file(folder, "train.log")).splitlines(),
            }
            output.print_json(payload)
            return
        how_long = f" after {format_seconds(run.seconds)}" if run.seconds is not None else ""
        objective = self._context.study.objective
        measured = f", {objective.metric} {run.objective:.6g}" if objective and run.objective is not None else ""
        unmeasured = "was not measured"  # a command need not measure the study's objective
        shown_notes = "".join(f"; {note}" for note in notes if unmeasured not in note)
        how = f" with exit code {run.exit_code}" if run.exit_code else f" by signal {run.signal}" if run.signal else ""
        output.warn(f"run {run.id} {run.status}{how_long}{how}{measured}{shown_notes}   {folder}")

    @property
    def _study(self) -> str:
        return self._context.study.name

    @property
    def _lab(self) -> Path:
        return self._context.lab.folder

    def _announce(self, run: RunRow, how: str) -> None:
        words = {
            NEW: f"run {run.id} in {run.slot}",
            JOINED: f"run {run.id} in {run.slot} is already running this command: attached to it",
            EARLIER: f"run {run.id} was this command; its result is shown; it does not run again (see --again)",
        }
        output.warn(words[how])

    def _check_queue(self, run: RunRow | None) -> None:
        if time.monotonic() - self._last_check < ANNOUNCE_S:
            return
        self._last_check = time.monotonic()
        ahead = submitting.before(self._record, self._proposal)
        returned = (
            [event for event in self._record.ledger.events(self._study, run.id) if event.kind == "returned"]
            if run
            else []
        )
        if ahead or returned or self._record.runs(state="running"):
            text = "waiting for a slot" + (f" ({ahead} ahead of you)" if ahead else "")
            text += f": its device is in use by {returned[-1].data['why']}" if returned else ""
            if text != self._last_message:
                output.warn(text)
                self._last_message = text
        if run is None:
            why = submitting.refusal(self._context.study.budget, self._record)
            if why is not None:
                submitting.refuse(self._record, self._proposal, why)

    def _ensure_engine(self) -> None:
        """Start an engine if none is running.

        Raises:
            LabError: The engine failed, or a person stopped it.
        """
        if engine_pid(self._lab, self._study) is not None:
            return
        if self._engine is not None:
            code = self._engine.poll()
            if code is None:
                return  # it is starting or ending
            self._engine = None
            self._killed += code < 0
            if code not in (0, BusyError.exit_code) and (code > 0 or self._killed > MAX_KILLED):
                printed = self._log.read_bytes()[self._log_from :].decode(errors="replace").strip()
                raise LabError(
                    f"the engine for commands ended: {printed.removeprefix('looplab: ') or f'exit code {code}'}"
                )
        last = self._record.last_session()
        if last is not None and (last["ended"] or 0.0) > self._began and last["how"] in submitting.STOPPED:
            raise LabError(
                f"the engine of {self._study} was {last['how']} before the command ended",
                hint="the same call starts it again and continues",
            )
        self._log_from = self._log.stat().st_size if self._log.exists() else 0
        self._engine = submitting.start_engine(self._lab, self._context.named)

    @property
    def _log(self) -> Path:
        return submitting.engine_log(self._lab, self._context.named)


class Stream:
    """Prints a growing log, without secrets."""

    def __init__(self, path: Path, *, silent: bool) -> None:
        self._path = path
        self._silent = silent
        self._file: BinaryIO | None = None

    def pump(self, *, final: bool) -> bool:
        """Print what is new; return whether there was anything."""
        if self._silent:
            return False
        if self._file is None:
            try:
                self._file = os.fdopen(open_descriptor(self._path, follow=False), "rb")
            except (FileNotFoundError, UntrustedError):
                return False
            self._log = LogStream(self._file)
        grown = output.show_growth(self._log, final=final)
        if final:
            self._file.close()
        return grown
