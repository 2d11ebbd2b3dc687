"""The end of a run: its record is restored, its secrets are hidden, its summary is written, its row is closed.

Whatever a run has done to its folder is that run's problem, noted in its summary. Problems of the whole lab, such as a
full disk, are raised.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from looplab.config.lab import LAB_FILE, RUN_FOLDER
from looplab.config.paths import diff
from looplab.launch.base import Exit
from looplab.ledger.catalogue import AlarmEvent
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.outbox import Outbox
from looplab.loop.prepare import Prepared, Preparer
from looplab.loop.setup import Setup
from looplab.measure.discover import describe
from looplab.measure.run_metrics import RunMetrics, join_segments, left_nothing, summarise
from looplab.measure.summary import digest
from looplab.runs import folder
from looplab.runs.outside import written_since
from looplab.runs.redact import redact_text, scrub_file

LOOKS_OUTSIDE = 5
"""Runs of an engine after which it looks for files outside of their folders; a trainer writes to the same places."""
SATURATED = (0.0, 1.0, 100.0)
"""Values at which accuracies and success rates saturate: two equal ones prove nothing."""


class _Tolerant:
    """The context manager of `Recorder.tolerant`; a class, since a generator would take five times as long."""

    __slots__ = ("_recorder", "_run", "_what")

    def __init__(self, recorder: Recorder, run: RunRow, what: str) -> None:
        self._recorder, self._run, self._what = recorder, run, what

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return error is not None and self._recorder.note_problem(self._run, self._what, error)


class Recorder:
    """Records how runs ended and what they measured; inside the transaction of the engine.

    Args:
        setup: The study.
        study: Its part of the ledger.
        outputs: Its folder.
        preparer: Prepared the runs.
        outbox: Receives alarms.
        run_metrics: Metrics of the current runs, shared with the engine; those of recorded runs are removed.
    """

    def __init__(
        self, setup: Setup, study: StudyLedger, outputs: Path, preparer: Preparer, outbox: Outbox,
        run_metrics: dict[str, RunMetrics],
    ) -> None:  # fmt: skip
        self.prepared: dict[str, Prepared] = {}
        """Run → the files it was started with."""
        self.fingerprints: dict[str, str] = {}
        """Recorded run → fingerprint of data and evaluator, until the judge takes it."""
        self._setup = setup
        self._study = study
        self._outputs = outputs
        self._preparer = preparer
        self._outbox = outbox
        self._run_metrics = run_metrics
        self._looked_outside = 0
        self._outside: set[str] = set()  # entries of the lab's folder that runs wrote to, and a note has named
        self._notes: dict[str, list[str]] = {}  # ended run → notes on its files
        self._untouched: set[str] = set()  # ended runs of this engine that left nothing in their folders

    # -- problems with the files of a run

    def tolerant(self, run: RunRow, what: str) -> _Tolerant:
        """Turn any problem with the files of one run into a recorded note on that run. Problems of the whole lab, such
        as a full disk, are raised."""
        return _Tolerant(self, run, what)

    def note_problem(self, run: RunRow, what: str, error: BaseException) -> bool:
        """Note a problem with the files of one run; return False if it concerns the whole lab."""
        if isinstance(error, sqlite3.Error) or not isinstance(error, Exception):
            return False
        if folder.concerns_lab(error, self._outputs):
            return False
        why = describe(error)
        self._notes.setdefault(run.id, []).append(f"{what}: {why}")
        self._study.unreadable(run.id, what, why)
        return True

    def take_notes(self, run_id: str) -> list[str]:
        """Return the notes on a run, and forget them."""
        return self._notes.pop(run_id, [])

    # -- the end of a run

    def has_read(self, run: RunRow, exit_: Exit, run_dir: Path, until: float) -> bool:
        """Read the last metrics of an ended run; return False if the time was used up, and the rest is read later."""
        metrics = self._run_metrics.get(run.id)
        if run.id not in self._notes:
            notes = self._notes[run.id] = []
            is_own = False
            with self.tolerant(run, "its record"):
                in_place = folder.is_in_place(run_dir)
                is_own = in_place and run.id in self.prepared
                if not in_place and folder.is_linked(run_dir):
                    led = ", ".join(folder.replace_links(run_dir))
                    notes.append(f"it put a link in the place of its folder ({led}), which was removed")
                changed = self._restore(run, run_dir) if in_place or os.path.isdir(run_dir) else None
                if changed is not None:
                    notes.append(changed)
                    exit_file = folder.record_file(run_dir, "exit.json")
                    if not exit_file.exists():  # the run has deleted the folder in which it should be
                        folder.write_json(exit_file, asdict(exit_))
            if metrics is None:
                if not left_nothing(run_dir):
                    metrics = self._run_metrics[run.id] = RunMetrics(self._setup.study, run_dir)
                elif is_own:
                    self._untouched.add(run.id)
        return metrics is None or metrics.finish(exit_, until)

    def record(self, run: RunRow, exit_: Exit, run_dir: Path) -> tuple[RunRow, RunMetrics | None, str | None]:
        """Record how a run ended and what it measured, after `has_read`.

        Returns:
            Its row, its metrics (None: it measured nothing), and the notes on it in one line (None: there are none).
        """
        is_untouched = run.id in self._untouched
        self._untouched.discard(run.id)
        is_there = is_untouched or os.path.isdir(run_dir)
        metrics = self._run_metrics.pop(run.id, None)
        for what, why in metrics.problems.items() if metrics is not None else ():
            self._study.unreadable(run.id, what, why)
        summary, status, objective = summarise(
            run, self._setup.study, metrics, exit_, lab=self._setup.lab, run_dir=run_dir
        )
        if run.role == Role.CONTINUATION and run.parent is not None:
            earlier = folder.read_json(self._outputs / run.parent, "summary.json", strict=False)
            objective = join_segments(summary, earlier, self._setup.study.objective)
        record = f"{folder.RECORD}/" if is_untouched else folder.record_name(run_dir, "")
        files: dict[str, str] = {}
        # After the last reading: a file that is replaced would be read again from its start.
        with self.tolerant(run, "hiding secrets"):
            # Without metrics it has neither printed nor written anything.
            left = () if metrics is None else (f"{record}train.log", *folder.LEFT_BEHIND)
            files = self._hide_secrets(run, run_dir, left) if is_there else {}
        self._add_fingerprint(run, run_dir, summary)
        row = run.as_ended(status, exit_.code, exit_.signal, exit_.started, exit_.ended or time.time(), objective)
        measured = None
        if metrics is not None and objective is not None:
            measured = digest(metrics.summariser.result(), self._setup.study.knobs)
        summary["measured"] = measured
        notes = self._notes.setdefault(run.id, [])
        if measured is not None:
            with self.tolerant(run, "comparing it with other runs"):
                unchanged = self._alarm_if_unchanged(row, measured)
                if unchanged is not None:
                    notes.append(unchanged)
        with self.tolerant(run, "looking for files outside of its folder"):
            outside = self._written_outside(exit_, summary["notes"])
            if outside is not None:
                notes.append(outside)
        if is_there:
            self._hash_files(run, run_dir, record, files, with_metrics=metrics is not None)
            name = f"{record}summary.json"
            summary["notes"] = [redact_text(one) for one in (*summary["notes"], *notes)]
            noted = len(notes)
            with self.tolerant(run, f"writing {name}"):
                files = {name: folder.write_json(f"{run_dir}/{name}", summary), **files}
            notes = notes[noted:]
        note = redact_text("; ".join([*summary["notes"], *notes])) or None
        del self._notes[run.id]
        self._study.ended(
            run.id, status=status, code=exit_.code, signal=exit_.signal, started=exit_.started,
            ended=row.ended, objective=objective, files=files, note=note, measured=measured,
        )  # fmt: skip
        return row, metrics, note

    def _written_outside(self, exit_: Exit, notes: Sequence[str]) -> str | None:
        """Return a note on files that the run wrote to the lab, outside of its folder; each place is named once.

        Args:
            notes: Notes that may name some of them already.
        """
        setup = self._setup
        if exit_.started is None or setup.options.jobs is not None or self._looked_outside >= LOOKS_OUTSIDE:
            return None
        self._looked_outside += 1
        study = setup.study
        known = {LAB_FILE, *study.base, *setup.options.cfgs, *study.data, *study.evaluator}
        known |= {file for entry in study.proposers for file in (entry.queue, entry.rules) if file}
        places = {path.partition("/")[0]: path for path in written_since(setup.lab, exit_.started, known)}
        new = [
            path
            for place, path in places.items()
            if place not in self._outside and not any(path in note for note in notes)
        ]
        self._outside.update(places)
        if not new:
            return None
        named = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
        advice = "let it write to {out_dir}" + (", or use `launch.cwd: run`" * (study.launch.cwd != RUN_FOLDER))
        return f"while it ran, files outside of its folder were written: {named} ({advice})"

    def _add_fingerprint(self, run: RunRow, run_dir: Path, summary: dict[str, Any]) -> None:
        """Note under which data and evaluator the run was measured; they may have changed while it ran."""
        now = self._setup.prints.digest()
        if now:
            began_with = folder.read_json(run_dir, "run.json", strict=False).get("fingerprint", "")
            summary["fingerprint"] = now if now == began_with else f"{began_with}, then {now}"
            self.fingerprints[run.id] = summary["fingerprint"]

    def _hash_files(
        self, run: RunRow, run_dir: Path, record: str, files: dict[str, str], *, with_metrics: bool
    ) -> None:
        """Add the hashes of the files that must not change any more."""
        names = [f"{record}process.json", f"{record}exit.json"]
        if with_metrics:
            names += [f"{record}train.log", *folder.LEFT_BEHIND]
        else:
            files[f"{record}train.log"] = folder.EMPTY  # as `left_nothing` has found
        for name in names:
            try:
                found = folder.hash_file(f"{run_dir}/{name}")
            except Exception as error:
                if not self.note_problem(run, f"hashing {name}", error):
                    raise
            else:
                if found is not None:
                    files[name] = found

    def _hide_secrets(self, run: RunRow, run_dir: Path, names: Sequence[str]) -> dict[str, str]:
        """Remove secrets from the files of an ended run; return the new hashes of config files that had some."""
        for name in names:  # under these names a trainer can leave anything
            with self.tolerant(run, f"hiding secrets in {name}"), contextlib.suppress(FileNotFoundError):
                if os.stat(f"{run_dir}/{name}").st_size:
                    scrub_file(run_dir / name)
        if not self._preparer.hides(run):
            return {}
        return self._preparer.hide_secrets(run, self._study.config_of(run, run_dir))

    def _alarm_if_unchanged(self, run: RunRow, measured: str) -> str | None:
        """Return a note if another config measured exactly the same, and raise the alarm once for each set of keys."""
        same = self._study.same_measurement(run, measured)
        if same is None or run.objective in SATURATED:
            return None
        configs = [self._study.config_of(one, self._outputs / one.id) for one in (same, run)]
        keys = sorted(diff(*configs))
        named = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
        named = named or "the arguments of the trainer"
        text = (
            f"{run.id} differs from {same.id} in {named} and measured exactly the same, to the last digit: the change "
            "changes nothing. Does it reach the trainer?"
        )
        if not any(alarm.get("keys") == keys for alarm in self._study.alarms()):
            self._study.alarm(run.id, AlarmEvent(text=text, same_as=same.id, keys=keys))
            self._outbox.alarm(text, run.id)
        return f"it measured exactly the same as {same.id}, to the last digit"

    def _restore(self, run: RunRow, run_dir: Path) -> str | None:
        """Restore the prepared files that the run has changed, and report them; returns a sentence about them."""
        prepared = self.prepared.pop(run.id, None)
        if prepared is not None:
            contents = prepared.contents
            changed = [name for name in contents if not folder.has_content(f"{run_dir}/{name}", contents[name])]
            changes = folder.restore(run_dir, {name: prepared.hashes[name] for name in changed}, contents)
        elif folder.record_folder(run_dir) == run_dir:
            return None  # started by an early version
        else:  # started by an earlier engine, or by nobody
            os.makedirs(f"{run_dir}/{folder.RECORD}", exist_ok=True)
            recorded = self._study.launched_files(run.id)
            if self._preparer.hides(run):  # an engine was killed after it had hidden the secrets
                hidden = self._preparer.hidden_files(self._study.config_of(run, run_dir))
                same = {
                    name
                    for name, content in hidden.items()
                    if folder.hash_file(run_dir / name) == folder.hash_bytes(content)
                }
                recorded = {name: digest for name, digest in recorded.items() if name not in same}
            contents = self._preparer.rebuild(run, self._study.plan_of(run.id)) if recorded else {}
            changes = folder.restore(run_dir, recorded, contents)
        if not changes:
            return None
        self._study.record_changed(run.id, changes)
        lost = [change.name for change in changes if not change.restored]
        said = f"the run changed {', '.join(change.name for change in changes)}, which only looplab writes"
        said += f"; what {', '.join(lost)} said is lost" if lost else "; restored"
        self._outbox.alarm(f"run {run.id}: {said}", run.id)
        return said
