"""Run stages: a `StageRun` is one call on a run folder.

The process may be killed at any line, by kill -9 or a power cut. What makes that safe:
- A running stage belongs to the executor's supervisor, not to this process, and continues without it. The next call
  finds it by the files in the run folder, attaches to it, and records how it ended.
- `NAME.begun.json` is written before the stage starts, `NAME.json` only after it is complete. An incomplete attempt is
  resumed if its fingerprint is unchanged; otherwise its outputs are removed first.
- A stage that runs again never deletes what is finished: see `kept.py`. If it fails, outputs, manifest, config and
  LATEST are as before.
- The ledger is written after the folder. What a killed call did not record is recorded by the next one.
- `run.log` is a copy of `train.log`; its length since the start of the stage is the number of bytes copied so far.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from looplab.config.files import canonical_json, hash_config
from looplab.errors import BusyError, LabError
from looplab.launch.base import Executor, Exit, LaunchSpec, Slot
from looplab.launch.local import find_by_mark, is_running, read_exit, read_json
from looplab.launch.slots import slot_environment
from looplab.ledger.pipelines import PipelineLedger
from looplab.pipeline import fingerprint
from looplab.pipeline.folder import CALL_CONFIG, CONFIG, LATEST, RunFolder, point_latest, unpoint_latest
from looplab.pipeline.kept import KeptOutputs
from looplab.pipeline.plan import PipelinePlan, fill_template, find_stage_program
from looplab.runs import clock, tree
from looplab.runs.clock import format_seconds
from looplab.runs.folder import pointed, sweep
from looplab.runs.logs import TAIL_LINES, read_tail
from looplab.runs.redact import known_secrets, redact_argv, redact_data, redact_text, scrub_file
from looplab.untrusted import UntrustedError, append_own, open_regular

HERE = Slot("here")
"""Slot without pinning: the devices and cores of this process."""
State = Literal["waiting", "running", "complete", "failed", "stopped"]


@dataclass(slots=True)
class StageResult:
    """Outcome of one stage of a call."""

    stage: str
    how: Literal["complete", "skipped", "failed", "stopped"]
    why: str
    seconds: float | None = None
    """Wall time."""


@dataclass
class StageRun:
    """A call on a run folder; its stages run one after the other."""

    plan: PipelinePlan
    run: RunFolder
    name: str
    """Name in messages and, as a prefix, for the executor."""
    force: bool = False
    pointed: bool = True
    """Whether to maintain LATEST in the root."""
    record: PipelineLedger | None = None
    """Where stages are recorded; None: nowhere."""
    say: Callable[[str], None] = lambda text: None
    write: Callable[[str], None] = lambda text: None
    """Receives the output of the stage, with secrets redacted."""
    state: State = "waiting"
    done: list[StageResult] = field(default_factory=list)
    stage: str | None = None
    """The running stage."""
    since: float = 0.0
    """Start of the running stage, Unix time."""
    slot: Slot = HERE
    error: str = ""
    blocked: str = ""
    """Why it waits for a slot; empty if it does not."""
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _begun: dict[str, Any] = field(default_factory=dict)
    _adopted: bool = False
    _queue: deque[str] = field(default_factory=deque)
    _forced_since: float = 0.0
    _was_latest: bool = False
    _config: dict[str, Any] = field(default_factory=dict)
    _config_hash: str = ""

    # -- the call

    def open(self) -> None:
        """Lock the run folder and record the call.

        Raises:
            LabError: The call cannot run on this folder.
            BusyError: Another call holds the folder, or another stage is still running in it.
        """
        self.plan.check_upstream(self.run)
        self.plan.check_commands(self.run)
        for stage in self.plan.first:
            self.plan.parts(stage, self.run)  # reports errors before a folder is created
        self._stack.enter_context(self.run.lock(f"looplab stage {' '.join(self.plan.called)}"))
        try:
            self.plan.check_upstream(self.run)  # again, now that no other process can change it
            self._refuse_other_running_stage()
            self._record_call()
        except BaseException:
            self.close()
            raise
        self._queue = deque(self.plan.called)
        self.state = "running"

    def close(self) -> None:
        """Release the run folder and save cached hashes."""
        self._stack.close()
        self.plan.hashes.save()

    def _record_call(self) -> None:
        folder = self.run.path
        self.run.refuse_links()
        (folder / "stages").mkdir(exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        sweep(folder)
        sweep(folder / "stages")
        call = {"stages": list(self.plan.called), "force": self.force}
        last = self.run.call() or {}
        began = last["began"] if {**call, "began": last.get("began")}.items() <= last.items() else clock.now()
        self._was_latest = bool(last.get("was_latest")) or pointed(folder.parent, LATEST) == self.run.name
        self.run.write("stages/call.json", {**call, "began": began, "was_latest": self._was_latest})
        self._forced_since = began if self.force else 0.0
        self._config = self._resolved_config()
        self._config_hash = hash_config(redact_data(self._config))
        self.run.write(CALL_CONFIG, self._config)
        if not (folder / CONFIG).exists():
            self.run.write(CONFIG, self._config)
        self.run.describe(self.plan.study.name, self.plan.source, self.plan.edits)

    def _resolved_config(self) -> dict[str, Any]:
        """Return the config with the actual name of the run."""
        from looplab.config.edits import Edit, Op, apply_edits
        from looplab.config.paths import find

        key = self.plan.run_id_key
        if key is None or not find(self.plan.config, key):
            return self.plan.config
        return dict(apply_edits(self.plan.config, [Edit(key, Op.NEW, self.run.name)]).config)

    def _refuse_other_running_stage(self) -> None:
        """Raise BusyError if an earlier call left a stage running that this call cannot attach to."""
        for stage in self.plan.stages:
            begun = self.run.begun(stage)
            if begun is None or begun["state"] != "running" or not self._is_running():
                continue
            called = stage in self.plan.called
            if called and begun["fingerprint"] == fingerprint.hash_parts(self.plan.parts(stage, self.run)):
                continue
            process = read_json(self.run.path / "process.json") or {}
            raise BusyError(
                f"stage {stage} of run {self.run.name} is still running (pid {process.get('pid', '?')})"
                + (", with another fingerprint" if called else ""),
                file=self.run.path,
                hint="wait for it, or stop that process",
            )

    def running_slot(self) -> str | None:
        """Return the slot in which an earlier call left a stage running."""
        begun = [self.run.begun(stage) for stage in self.plan.called]
        running = [about["slot"] for about in begun if about is not None and about["state"] == "running"]
        return running[0] if running and self._is_running() else None

    def _is_running(self) -> bool:
        folder = self.run.path
        if (folder / "exit.json").exists() or not (folder / "train.log").exists():
            return False
        return is_running(folder, folder) or bool(find_by_mark(folder))

    # -- its stages

    @property
    def has_more(self) -> bool:
        """Whether stages of the call are left."""
        return bool(self._queue)

    def next(self, executor: Executor, slot: Slot) -> str | None:
        """Start the next stage that is not up to date; return the executor's name for it, None if none is left."""
        self.slot = slot
        while self._queue:
            started = self._enter(self._queue[0], executor)
            if started is not None:
                return started
            if self.state != "running":
                return None
            self._queue.popleft()
        self.run.write(CONFIG, self._config)
        self.run.remove("stages/call.json")
        self.run.remove(CALL_CONFIG)
        if self.pointed:
            point_latest(self.run)
        self.state, self.stage = "complete", None
        return None

    def _enter(self, stage: str, executor: Executor) -> str | None:
        """Adopt, finish, skip or start a stage; return the executor's name for it if it is running."""
        parts = self.plan.parts(stage, self.run)
        digest = fingerprint.hash_parts(parts)
        kept = self._kept(stage)
        begun = self._settle(stage, kept, digest)
        self.stage = stage
        if begun is not None and begun["state"] == "running" and begun["fingerprint"] == digest:
            self._begun = begun
            self._note(begun)
            ended = read_exit(self.run.path)
            if ended is None:
                name = self._executor_name(stage, begun)
                self.since = begun["began"]
                self._adopted = executor.adopt(name, self.run.path)
                if self._adopted:
                    self.say(f"{stage}: still running from an earlier call; attached to it")
                else:  # the call was killed before the start, or its device was in use
                    self._move_to_slot(stage)
                    self._start(stage, executor)
                return name
            if self._record_end(stage, ended) is None:
                return None  # it completed while no call was attached
            begun = self.run.begun(stage)
        partial = kept.partial()
        continues = begun is None and partial is not None and partial["fingerprint"] == digest
        made = self.run.complete(stage)
        self._note_earlier(made, begun)
        why = self._why_run(made, begun, parts)
        if why is not None and continues:
            why = "resumed"
        if why is None:
            assert made is not None
            if (self.run.path / "stages" / f"{stage}.begun.json").exists():
                self._clean_up(stage)  # interrupted right after its end; otherwise the files may be a later stage's
            self.done.append(StageResult(stage, "skipped", "unchanged", made["seconds"]))
            self.say(f"{stage}: skipped, complete and unchanged (took {format_seconds(made['seconds'])})")
            return None
        resume = begun is not None and begun["fingerprint"] == digest and begun["state"] != "clearing"
        self._begin(stage, parts, digest, why, resume=resume or continues)
        self._start(stage, executor)
        return self._executor_name(stage, self._begun)

    def _kept(self, stage: str) -> KeptOutputs:
        return KeptOutputs(self.run, stage, self.plan.stages[stage].outputs)

    def _settle(self, stage: str, kept: KeptOutputs, digest: str) -> dict[str, Any] | None:
        """Return the record of an attempt that is not complete and that this call continues.

        Any other one that had replaced complete outputs is over: those are restored.
        """
        begun = self.run.begun(stage)
        if begun is None or begun.get("previous") is None:
            return begun
        if begun["state"] == "running" and begun["fingerprint"] == digest:
            return begun
        kept.restore(begun["previous"], None if begun["state"] == "clearing" else begun)
        return None

    def _why_run(
        self, made: dict[str, Any] | None, begun: dict[str, Any] | None, parts: fingerprint.Parts
    ) -> str | None:
        """Return why a stage must run; None if it is up to date."""
        if begun is not None:
            changes = fingerprint.changes(begun["parts"], parts)
            if changes:
                return f"restarted: {fingerprint.shorten(changes)}"
            return "restarted" if begun["state"] == "clearing" else "resumed"
        if made is None:
            return "first time"
        changes = fingerprint.changes(made["parts"], parts)
        changes += fingerprint.changed_outputs(self.run.path, made["outputs"], self.plan.hashes)
        if changes:
            return f"rerun: {fingerprint.shorten(changes)}"
        return "rerun: --force" if made["ended"] < self._forced_since else None

    def _begin(self, stage: str, parts: fingerprint.Parts, digest: str, why: str, *, resume: bool) -> None:
        run, kept, made = self.run, self._kept(stage), self.run.complete(stage)
        before = run.begun(stage) or made or {"attempt": 0}
        begun = {
            "stage": stage,
            "attempt": max(before["attempt"], (kept.partial() or before)["attempt"]) + 1,
            "state": "clearing",
            "previous": made["attempt"] if made is not None else before.get("previous"),
            "fingerprint": digest,
            "config": self._config_hash,
            "parts": parts,
            "resume": resume,
            "slot": self.slot.name,
            "why": why,
            "began": clock.now(),
        }
        if self.pointed:
            unpoint_latest(run)
        if made is not None:
            run.write(f"stages/{stage}.begun.json", begun)
            kept.set_aside(made["attempt"])
            if resume:
                kept.use_partial()
        elif not resume:
            # Files that existed before the first attempt are not outputs of the stage.
            begun["clears"] = before["clears"] if before.get("state") == "clearing" else before["attempt"] > 0
            run.write(f"stages/{stage}.begun.json", begun)
            if begun["clears"]:
                self._clear_outputs(stage)
        run.clear_process()
        log_at = self._stamp(f"{stage} starts ({why}), attempt {begun['attempt']}")
        self._begun = {**begun, "state": "running", "log_at": log_at}
        run.write(f"stages/{stage}.begun.json", self._begun)
        if made is not None and resume:
            kept.drop_partial()
        self._note(self._begun)
        self.since = begun["began"]
        self.say(f"{stage}: starts ({why})")

    def _move_to_slot(self, stage: str) -> None:
        """Record the slot in which a stage will be started, if it is another one."""
        if self._begun["slot"] != self.slot.name:
            self._begun = {**self._begun, "slot": self.slot.name}
            self.run.write(f"stages/{stage}.begun.json", self._begun)

    def _clear_outputs(self, stage: str) -> None:
        for name in self.plan.stages[stage].outputs:
            tree.remove(self.plan.lab.resolve(), (self.run.path / name).relative_to(self.plan.lab.resolve()))

    def _start(self, stage: str, executor: Executor) -> None:
        plan, run, about = self.plan, self.run, self.plan.stages[stage]
        argv = plan.argv(stage, run, self.slot)
        variables = {"run_dir": str(run.path), "run_id": run.name, "lab": str(plan.lab), "stage": stage}
        settings = {
            name: fill_template(value, plan.config, variables, f"stages.{stage}.env.{name}") or ""
            for name, value in {**plan.study.pipeline.env, **about.env}.items()
        }
        env = {
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
            **(slot_environment(self.slot) if self.slot is not HERE else {}),
            "LOOPLAB_STAGE": stage,
            "LOOPLAB_RUN_ID": run.name,
            "LOOPLAB_CONFIG": str(run.path / CALL_CONFIG),
            "LOOPLAB_METRICS": os.environ.get("LOOPLAB_METRICS") or str(run.path / "metrics.jsonl"),
            "LOOPLAB_STUDY": plan.study.name,
            "LOOPLAB_LAB": str(plan.lab),
            "LOOPLAB_RESUME": "1" if self._begun["resume"] else "",
            "LOOPLAB_PREVIOUS": self._previous_folder(stage),
            **settings,
        }
        program = find_stage_program(argv[0], plan.lab, env, f"stages.{stage}.command")
        self._adopted = False
        executor.start(
            LaunchSpec(
                self._executor_name(stage, self._begun), run.path, argv, program, plan.lab, self.slot, env,
                about.timeout, about.grace,
            )
        )  # fmt: skip

    def _previous_folder(self, stage: str) -> str:
        """Return the folder with the outputs that a running stage replaces; empty if there are none."""
        attempt = self._begun.get("previous")
        return "" if attempt is None else str(self._kept(stage).previous_folder(attempt))

    def _executor_name(self, stage: str, begun: dict[str, Any]) -> str:
        return f"{self.name}:{stage}:{begun['attempt']}"

    # -- its end

    def ended(self, outcome: Exit) -> None:
        """Handle the end of the running stage."""
        stage = self.stage
        assert stage is not None
        if outcome.reason == "lost" and self._adopted:
            self._record_end(stage, outcome)  # its exit was not observed: resume it
            return
        why = self._record_end(stage, outcome)
        if why is None:
            self._queue.popleft()
            return
        stopped = outcome.reason == "stop"
        self.state, self.error = "stopped" if stopped else "failed", f"{stage}: {why}"
        self.done.append(
            StageResult(stage, "stopped" if stopped else "failed", why, max(0.0, clock.now() - self.since))
        )

    def _record_end(self, stage: str, outcome: Exit) -> str | None:
        """Record the end of an attempt; return why the stage is incomplete, None if it is complete."""
        self.copy_output(final=True)
        about, run, begun = self.plan.stages[stage], self.run, self._begun
        missing = [name for name in about.outputs if not (run.path / name).exists()]
        why = None if outcome.ok else str(outcome)
        if why is None and missing:
            why = f"it succeeded, but did not write {', '.join(missing)}"
        ended = outcome.ended or clock.now()
        seconds = max(0.0, ended - (outcome.started or begun["began"]))
        if why is None:
            made = fingerprint.outputs_of(run.path, about.outputs, self.plan.hashes)
            digest = hashlib.sha256(canonical_json(made)).hexdigest()
            other = self.plan.artifacts if self.plan.uses_artifacts(stage) else None
            record = {
                "stage": stage,
                "id": hashlib.sha256(f"{begun['fingerprint']} {digest}".encode()).hexdigest(),
                "fingerprint": begun["fingerprint"],
                "config": begun.get("config"),
                "parts": begun["parts"],
                "argv": redact_argv(self.plan.argv(stage, run, self.slot)),
                "attempt": begun["attempt"],
                "resumed": begun["resume"],
                "why": begun["why"],
                "slot": self.slot.name,
                "artifacts": str(other.path) if other is not None else None,
                "began": begun["began"],
                "ended": ended,
                "seconds": round(seconds, 3),
                "outputs": made,
                "outputs_digest": digest,
            }
            run.write(f"stages/{stage}.json", record)
            run.write(CONFIG, self._config)
        else:
            outcome_word = {"stop": "stopped", "lost": "lost"}.get(outcome.reason or "", "failed")
            record = {**begun, **_ending(outcome_word, why, ended, round(seconds, 3))}
            run.write(f"stages/{stage}.begun.json", record)
        self._note(record)
        self._stamp(f"{stage} {'complete' if why is None else f'not complete: {why}'}, {format_seconds(seconds)}")
        scrub_file(run.log, known_secrets())
        self._clean_up(stage)
        self._settle_outputs(stage, record if why is not None else None)
        if why is None:
            self.done.append(StageResult(stage, "complete", begun["why"], seconds))
            self.say(f"{stage}: complete in {format_seconds(seconds)}")
        else:
            self.say(f"{stage}: not complete: {why}")
        return why

    def _settle_outputs(self, stage: str, failed: dict[str, Any] | None) -> None:
        """Restore what a failed attempt had replaced, or forget what a complete one has replaced long ago."""
        kept = self._kept(stage)
        if failed is None:
            kept.drop_partial()
            kept.prune(self.plan.study.pipeline.keep)
        elif failed.get("previous") is not None:
            kept.restore(failed["previous"], failed)
            if self.pointed and self._was_latest and not any(done.how == "complete" for done in self.done):
                point_latest(self.run)
            self.say(f"{stage}: the outputs of its last complete attempt are unchanged; what this attempt wrote is in "
                     f"{self.run.path / 'partial' / stage}, and the same call continues there")  # fmt: skip

    def _note(self, record: Mapping[str, Any]) -> None:
        """Record a stage in the ledger from its file. A ledger that cannot be written does not stop the stage."""
        if self.record is not None:
            try:
                self.record.stage(self.run.path, record)
            except (LabError, OSError, sqlite3.Error) as error:
                self.say(f"{record['stage']}: not recorded in the ledger: {error}; the next call records it")

    def _note_earlier(self, made: dict[str, Any] | None, begun: dict[str, Any] | None) -> None:
        """Record what an earlier call did and could not record any more."""
        if made is not None:
            self._note(made)
        elif begun is not None and begun["state"] != "clearing":
            is_over = begun["state"] == "ended"
            self._note(begun if is_over else {**begun, **_ending("lost", "its end was not observed", None, None)})

    def _clean_up(self, stage: str) -> None:
        """Remove the files that only a running stage needs."""
        self.run.clear_process()
        if self.run.begun(stage) is None:
            self.run.remove(f"stages/{stage}.begun.json")

    # -- its log

    def _stamp(self, text: str) -> int:
        """Append a line of looplab's own to the log; return the offset after it."""
        self.run.refuse_links()
        with append_own(self.run.log) as file:
            start = b"\n" if file.seek(0, os.SEEK_END) and _last_byte(self.run.log) != b"\n" else b""
            file.write(start + f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
            return file.tell()

    def copy_output(self, *, final: bool = False) -> bool:
        """Copy new output of the stage to the log and to `write`; return whether there was any.

        Args:
            final: Also copy an unfinished last line.
        """
        if not self._begun or self._begun["state"] != "running":
            return False
        try:
            self.run.refuse_links()
            with open_regular(self.run.path / "train.log", follow=False) as source, append_own(self.run.log) as log:
                source.seek(max(0, log.seek(0, os.SEEK_END) - self._begun["log_at"]))
                new = source.read()
                if not final:  # hold back an unfinished line: a secret in it must not be split
                    new = new[: max(new.rfind(b"\n"), new.rfind(b"\r")) + 1]
                log.write(new)
        except (FileNotFoundError, UntrustedError, LabError):
            return False
        if new:
            self.write(redact_text(new.decode(errors="replace")))
        return bool(new)

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """Return the last lines of the stage's output."""
        return read_tail(self.run.log, lines, start=int(self._begun.get("log_at", 0))).splitlines()


def _ending(outcome: str, why: str, ended: float | None, seconds: float | None) -> dict[str, Any]:
    """Return the fields that end the record of an attempt that is not complete."""
    return {"state": "ended", "outcome": outcome, "why": why, "ended": ended, "seconds": seconds}


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()
