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
from looplab.config.lab import LabConfig, StudyConfig, find_lab, load_lab, parse_duration
from looplab.errors import BusyError, LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import RunRow, StudyLedger
from looplab.loop import submitting
from looplab.loop.lock import engine_pid
from looplab.loop.setup import RunOptions
from looplab.runs import folder as runs
from looplab.runs.logs import LogStream
from looplab.runs.redact import redact_text
from looplab.untrusted import UntrustedError, open_descriptor, open_regular

POLL_S = 0.1
PATIENT_S = 1.0
"""A wait that is shorter than this is not worth a word; and how often it is asked whether the budget is used."""
TAIL = 20
"""How many of the last lines of its log a command is told with as JSON."""
MOST_KILLED = 3
"""An engine that is killed is replaced so often by one call; its trainings live on."""
NEW, JOINED, EARLIER = "new", "joined", "earlier"


@dataclass(frozen=True, slots=True)
class JobContext:
    lab: LabConfig
    study: StudyConfig
    """Of the commands, not the one that was named."""
    named: str
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
    """Have a command run, stream what it prints, and exit as it does."""
    lab, study = _open(folder, name)
    limit = _seconds(timeout)
    job = submitting.make_job(lab.folder, Path.cwd(), argv, study.launch.env)
    with contextlib.closing(Ledger(lab.ledger_path)) as ledger:
        made = submitting.jobs_study(lab, study)
        place = JobContext(lab, made, study.name, StudyLedger(ledger, made.name))
        with ledger.write():  # of two equal calls at the same moment the second finds the first
            proposal = None if again else submitting.find_job(place.record, job)
            how = JOINED
            if proposal is None:
                why = submitting.refusal(made.budget, place.record)
                if why is not None:
                    raise LabError(f"the command was refused: {why}", hint="see budget in lab.yaml")
                proposal = submitting.submit(place.record, job, label or shlex.join(argv), limit)
                how = NEW
        caller = Caller(place, proposal, json)
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
            caller.tell(run, how)
            sys.stdout.flush()
        except KeyboardInterrupt:
            output.warn(f"\n{caller.farewell()}")
            sys.exit(130)
        except BrokenPipeError:  # nobody listens any more: it goes on, and the next call is told how it ended
            output.mute(1)
            sys.exit(128 + 13)
        submitting.note_told(place.record, run)
    sys.exit(submitting.exit_code(run))


def check_dashes(argv: Sequence[str]) -> None:
    """The command follows `--`: words in front of it may be options of looplab, and are read as such."""
    if argv and sys.argv[-len(argv) - 1] != "--":
        raise LabError("the command comes after `--`", hint="looplab submit -- python train.py --lr 0.1")


def serve(folder: Path | None, name: str | None, owner_pid: int) -> None:
    """Be the engine of a study's commands."""
    from looplab.cli.running import TerminalSession
    from looplab.loop.session import check_sources, last_options

    lab, study = _open(folder, name)
    check_sources(lab, study)
    with TerminalSession(lab, submitting.jobs_study(lab, study), json=False) as session:
        options = RunOptions()
        with contextlib.suppress(LabError):  # the study was never run
            options = last_options(StudyLedger(session.ledger, study.name), lab.folder)
        session.drive(submitting.jobs_setup(lab, study, options, owner_pid))


def _open(folder: Path | None, name: str | None) -> tuple[LabConfig, StudyConfig]:
    lab = load_lab(submitting.home_of(find_lab(folder or Path.cwd())))
    return lab, lab.study(name)


def _seconds(timeout: str | None) -> float | None:
    try:
        if timeout is None:
            return None
        plain = re.fullmatch(r"[0-9]*\.?[0-9]+", timeout)
        return parse_duration(float(timeout) if plain else timeout)
    except ValueError as error:
        raise LabError(f"--timeout: {error}") from None


class Caller:
    """Whoever waits for a command: sees to it that an engine is there, and passes on what the command prints."""

    def __init__(self, place: JobContext, proposal: int, json: bool) -> None:
        self._place = place
        self._record = place.record
        self._proposal = proposal
        self._json = json
        self._engine: subprocess.Popen[bytes] | None = None
        self._killed = 0
        self._log_from = 0
        self._began = time.time()
        self._asked = time.monotonic()
        self._said = ""

    def is_over(self) -> bool:
        run = submitting.run_of(self._record, self._proposal)
        return run is not None and run.state == "ended"

    def follow(self, how: str) -> RunRow:
        """Wait for the end of the run, and stream its log meanwhile."""
        stream: Stream | None = None
        while True:
            run = submitting.run_of(self._record, self._proposal)
            over = run is not None and run.state == "ended"  # asked before the log is read to its end
            if run is not None and stream is None:
                # A run whose device is held is launched and comes back; one that has a log has really begun.
                log = runs.record_file(self._place.folder(run), "train.log")
                if over or (run.state == "running" and log.exists()):
                    self._announce(run, how)
                    stream = Stream(log, silent=self._json)
            grown = stream.pump(final=over) if stream is not None else False
            if run is not None and over:
                return run
            if stream is None:
                self._wait_in_line(run)
            self._need_engine()
            if not grown:
                time.sleep(POLL_S)

    def leave(self, how: str) -> None:
        """Come back as soon as the command is in the hands of an engine."""
        while True:
            self._need_engine()
            run = submitting.run_of(self._record, self._proposal)
            # An engine with work looks at the queue again before it ends; one that is idle might just be leaving.
            busy = self._record.runs_open() or self._record.is_paused()
            if run is not None or (busy and engine_pid(self._lab, self._study) is not None):
                break
            time.sleep(POLL_S)
        if self._json:
            folder = str(self._place.folder(run)) if run else None
            output.print_json(
                {"study": self._study, "run": run and run.id, "call": how, "status": None, "folder": folder}
            )
        else:
            output.say(self.farewell())

    def farewell(self) -> str:
        """What is said to somebody who does not wait for the end."""
        run = submitting.run_of(self._record, self._proposal)
        if run is None:
            return "the command waits for a slot and will be run; the same call attaches to it"
        return (
            f"the command goes on as run {run.id}; the same call attaches to it, "
            f"`looplab stop {run.id} --study {self._study}` ends it"
        )

    def tell(self, run: RunRow, how: str) -> None:
        """How it ended."""
        folder = self._place.folder(run)
        summary = runs.read_json(folder, "summary.json")
        notes = summary.get("notes") or self._recorded_notes(run)
        if self._json:
            told = {
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
                "tail": _tail(runs.record_file(folder, "train.log")),
            }
            output.print_json(told)
            return
        how_long = f" after {output.seconds(run.seconds)}" if run.seconds is not None else ""
        objective = self._place.study.objective
        measured = f", {objective.metric} {run.objective:.6g}" if objective and run.objective is not None else ""
        unmeasured = "was not measured"  # a command need not measure what the study is about
        said = "".join(f"; {note}" for note in notes if unmeasured not in note)
        how = f" with exit code {run.exit_code}" if run.exit_code else f" by signal {run.signal}" if run.signal else ""
        output.warn(f"run {run.id} {run.status}{how_long}{how}{measured}{said}   {folder}")

    @property
    def _study(self) -> str:
        return self._place.study.name

    @property
    def _lab(self) -> Path:
        return self._place.lab.folder

    def _announce(self, run: RunRow, how: str) -> None:
        words = {
            NEW: f"run {run.id} in {run.slot}",
            JOINED: f"run {run.id} in {run.slot} is this command, at work already: attached to it",
            EARLIER: f"run {run.id} was this command; its end was not told yet, so it is not run again (--again does)",
        }
        output.warn(words[how])

    def _recorded_notes(self, run: RunRow) -> list[str]:
        """What the ledger says of a run that was over before it had a folder."""
        events = self._record.ledger.events(run.study, run.id)
        return [event.data["note"] for event in events if event.kind == "ended" and "note" in event.data]

    def _wait_in_line(self, run: RunRow | None) -> None:
        if time.monotonic() - self._asked < PATIENT_S:
            return
        self._asked = time.monotonic()
        ahead = submitting.before(self._record, self._proposal)
        returned = (
            [event for event in self._record.ledger.events(self._study, run.id) if event.kind == "returned"]
            if run
            else []
        )
        if ahead or returned or self._record.runs(state="running"):
            text = "waiting for a slot" + (f" ({ahead} before you)" if ahead else "")
            text += f": its device is held by {returned[-1].data['why']}" if returned else ""
            if text != self._said:
                output.warn(text)
                self._said = text
        if run is None:
            why = submitting.refusal(self._place.study.budget, self._record)
            if why is not None:
                submitting.refuse(self._record, self._proposal, why)

    def _need_engine(self) -> None:
        """Start an engine if there is none; but not against a person who has stopped it."""
        if engine_pid(self._lab, self._study) is not None:
            return
        if self._engine is not None:
            code = self._engine.poll()
            if code is None:
                return  # it is just beginning, or just ending
            self._engine = None
            self._killed += code < 0
            if code not in (0, BusyError.exit_code) and (code > 0 or self._killed > MOST_KILLED):
                said = self._log.read_bytes()[self._log_from :].decode(errors="replace").strip()
                raise LabError(
                    f"the engine of the commands ended: {said.removeprefix('looplab: ') or f'exit code {code}'}"
                )
        last = self._record.last_session()
        if last is not None and (last["ended"] or 0.0) > self._began and last["how"] in submitting.STOPPED:
            raise LabError(
                f"the engine of {self._study} was {last['how']} before the command was at its end",
                hint="the same call starts it again and goes on",
            )
        self._log_from = self._log.stat().st_size if self._log.exists() else 0
        self._engine = submitting.start_engine(self._lab, self._place.named)

    @property
    def _log(self) -> Path:
        return submitting.engine_log(self._lab, self._place.named)


class Stream:
    """A growing log, passed on as it grows; secrets out."""

    def __init__(self, path: Path, *, silent: bool) -> None:
        self._path = path
        self._silent = silent
        self._file: BinaryIO | None = None

    def pump(self, *, final: bool) -> bool:
        """Pass on what is new; whether there was anything."""
        if self._silent:
            return False
        if self._file is None:
            try:
                self._file = os.fdopen(open_descriptor(self._path, follow=False), "rb")
            except (FileNotFoundError, UntrustedError):
                return False
            self._log = LogStream(self._file)
        grown = False
        for portion in self._log.portions(final=final):
            output.show_log(portion)
            grown = True
        if final:
            self._file.close()
        return grown


def _tail(log: Path) -> list[str]:
    try:
        with open_regular(log, follow=False) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return redact_text(file.read().decode(errors="replace")).splitlines()[-TAIL:]
    except (OSError, UntrustedError):
        return []
