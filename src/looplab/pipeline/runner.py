"""Running stages: one `StageRun` is a call on a run folder, and `drive` takes many of them through an executor.

Whatever happens here may be cut off at any line, by kill -9 or a power cut. What makes that safe:
- A stage at work belongs to the executor's supervisor, not to us. It goes on without us; the next call finds it by the
  files in the run folder, attaches to it, and learns how it ended.
- `NAME.begun.json` is there before the stage is, and `NAME.json` only after it is complete. An attempt that is not
  complete is resumed when its fingerprint is still the same; otherwise what it left is removed first.
- `run.log` holds what the stage printed, copied from `train.log`; how much was copied is its length since the start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from looplab.config.files import canonical_json
from looplab.errors import BusyError, LabError
from looplab.launch.base import Ended, Executor, Exit, LaunchSpec, Rejected, Slot
from looplab.launch.devices import Devices
from looplab.launch.local import find_by_mark, is_running, read_exit, read_json
from looplab.launch.slots import slot_environment
from looplab.pipeline import fingerprint
from looplab.pipeline.folder import CONFIG, RunFolder, point_latest, read_record, unpoint_latest
from looplab.pipeline.plan import PipelinePlan, fill, find_stage_program
from looplab.runs import clock, tree
from looplab.runs.folder import sweep
from looplab.runs.redact import known_secrets, redact_argv, redact_text, scrub_file
from looplab.untrusted import UntrustedError, append_own, open_regular

POLL_S = 0.1
BLOCKED_S = 1.0
"""How long until a device that somebody else held is asked for again."""
TAIL = 20
HERE = Slot("here")
"""Where we are ourselves: nothing is pinned."""
State = Literal["waiting", "running", "complete", "failed", "stopped"]


@dataclass(slots=True)
class StageResult:
    """What became of one stage in a call."""

    stage: str
    how: Literal["complete", "skipped", "failed", "stopped"]
    why: str
    seconds: float | None = None


@dataclass
class StageRun:
    """A call on a run folder: its stages, one after the other."""

    plan: PipelinePlan
    run: RunFolder
    name: str
    """What it is called in messages and by the executor."""
    force: bool = False
    pointed: bool = True
    """Whether the root has a LATEST."""
    say: Callable[[str], None] = lambda text: None
    write: Callable[[str], None] = lambda text: None
    """Takes what the stage prints, secrets out."""
    state: State = "waiting"
    done: list[StageResult] = field(default_factory=list)
    stage: str | None = None
    """The one at work."""
    since: float = 0.0
    slot: Slot = HERE
    error: str = ""
    blocked: str = ""
    """Who holds the device that it waits for."""
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _begun: dict[str, Any] = field(default_factory=dict)
    _adopted: bool = False
    _queue: deque[str] = field(default_factory=deque)
    _forced_since: float = 0.0

    # -- the call

    def open(self) -> None:
        """Take the run folder; an error if the call cannot be run on it."""
        self.plan.check_upstream(self.run)
        self.plan.check_commands(self.run)
        for stage in self.plan.first:
            self.plan.parts(stage, self.run)  # what is wrong with it is told before a folder is made
        self._stack.enter_context(self.run.lock(f"looplab stage {' '.join(self.plan.called)}"))
        try:
            self.plan.check_upstream(self.run)  # as it is now that nobody else changes it
            self._refuse_another_at_work()
            self._write_down()
        except BaseException:
            self.close()
            raise
        self._queue = deque(self.plan.called)
        self.state = "running"

    def close(self) -> None:
        self._stack.close()
        self.plan.hashes.save()

    def _write_down(self) -> None:
        folder = self.run.path
        self.run.refuse_links()
        (folder / "stages").mkdir(exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        sweep(folder)
        sweep(folder / "stages")
        call = {"stages": list(self.plan.called), "force": self.force}
        last = self.run.call()
        began = last["began"] if last and {**last, "began": 0} == {**call, "began": 0} else clock.now()
        self.run.write("stages/call.json", {**call, "began": began})
        self._forced_since = began if self.force else 0.0
        self.run.write(CONFIG, self._resolved())
        self.run.describe(self.plan.study.name, self.plan.source, self.plan.edits)

    def _resolved(self) -> dict[str, Any]:
        """The config with the run's real name."""
        from looplab.config.edits import Edit, Op, apply_edits
        from looplab.config.paths import find

        key = self.plan.run_id_key
        if key is None or not find(self.plan.config, key):
            return self.plan.config
        return dict(apply_edits(self.plan.config, [Edit(key, Op.NEW, self.run.name)]).config)

    def _refuse_another_at_work(self) -> None:
        """A stage that an earlier call left at work is attached to, if it is the one that is wanted."""
        for stage in self.plan.stages:
            begun = self.run.begun(stage)
            if begun is None or begun["state"] != "running" or not self._is_at_work():
                continue
            wanted = stage in self.plan.called
            if wanted and begun["fingerprint"] == fingerprint.hash_parts(self.plan.parts(stage, self.run)):
                continue
            process = read_json(self.run.path / "process.json") or {}
            raise BusyError(
                f"stage {stage} of run {self.run.name} is still at work (pid {process.get('pid', '?')})"
                + (", made of something else than it would be now" if wanted else ""),
                file=self.run.path,
                hint="wait for it, or end that process",
            )

    def at_work_in(self) -> str | None:
        """The slot in which an earlier call has left a stage at work."""
        begun = [self.run.begun(stage) for stage in self.plan.called]
        running = [about["slot"] for about in begun if about is not None and about["state"] == "running"]
        return running[0] if running and self._is_at_work() else None

    def _is_at_work(self) -> bool:
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
        """Begin the next stage that has something to do; gives the executor's name for it, None at the end."""
        self.slot = slot
        while self._queue:
            started = self._take_up(self._queue[0], executor)
            if started is not None:
                return started
            if self.state != "running":
                return None
            self._queue.popleft()
        self.run.remove("stages/call.json")
        if self.pointed:
            point_latest(self.run)
        self.state, self.stage = "complete", None
        return None

    def _take_up(self, stage: str, executor: Executor) -> str | None:
        """Adopt, finish, skip or begin a stage."""
        parts = self.plan.parts(stage, self.run)
        digest = fingerprint.hash_parts(parts)
        begun = self.run.begun(stage)
        self.stage = stage
        if begun is not None and begun["state"] == "running" and begun["fingerprint"] == digest:
            self._begun = begun
            ended = read_exit(self.run.path)
            if ended is None:
                name = self._executor_name(stage, begun)
                self.since = begun["began"]
                self._adopted = executor.adopt(name, self.run.path)
                if self._adopted:
                    self.say(f"{stage}: is still at work since an earlier call, attached to it")
                else:
                    self._start(stage, executor)
                return name
            if self._conclude(stage, ended) is None:
                return None  # it came to its good end while nobody was there
            begun = self.run.begun(stage)
        made = self.run.complete(stage)
        why = self._why_run(stage, made, begun, parts)
        if why is None:
            assert made is not None
            if (self.run.path / "stages" / f"{stage}.begun.json").exists():
                self._tidy(stage)  # it was cut off right behind its end; else the files may be those of a later stage
            self.done.append(StageResult(stage, "skipped", "unchanged", made["seconds"]))
            self.say(f"{stage}: skipped, complete and unchanged (took {_clock(made['seconds'])})")
            return None
        resume = begun is not None and begun["fingerprint"] == digest and begun["state"] != "clearing"
        self._begin(stage, parts, digest, why, resume=resume)
        self._start(stage, executor)
        return self._executor_name(stage, self._begun)

    def _why_run(
        self, stage: str, made: dict[str, Any] | None, begun: dict[str, Any] | None, parts: fingerprint.Parts
    ) -> str | None:
        """Why a stage is to be run; None: it need not be."""
        if begun is not None:
            told = fingerprint.changes(begun["parts"], parts)
            return (
                f"anew: {fingerprint.in_short(told)}" if told else "resumed" if begun["state"] != "clearing" else "anew"
            )
        if made is None:
            return "first time"
        told = fingerprint.changes(made["parts"], parts)
        told += fingerprint.changed_outputs(self.run.path, made["outputs"], self.plan.hashes)
        if told:
            return f"again: {fingerprint.in_short(told)}"
        return "again: --force" if made["ended"] < self._forced_since else None

    def _begin(self, stage: str, parts: fingerprint.Parts, digest: str, why: str, *, resume: bool) -> None:
        run = self.run
        before = read_record(run.path / "stages" / f"{stage}.begun.json") or run.complete(stage) or {"attempt": 0}
        begun = {
            "stage": stage,
            "attempt": before["attempt"] + 1,
            "state": "clearing",
            "fingerprint": digest,
            "parts": parts,
            "resume": resume,
            "slot": self.slot.name,
            "why": why,
            "began": clock.now(),
        }
        if self.pointed:
            unpoint_latest(run)
        if not resume:
            # What was there before the first attempt is not ours.
            begun["clears"] = before["clears"] if before.get("state") == "clearing" else before["attempt"] > 0
            run.write(f"stages/{stage}.begun.json", begun)
            run.remove(f"stages/{stage}.json")
            if begun["clears"]:
                self._clear_outputs(stage)
        run.clear_process()
        log_at = self._stamp(f"{stage} begins ({why}), attempt {begun['attempt']}")
        self._begun = {**begun, "state": "running", "log_at": log_at}
        run.write(f"stages/{stage}.begun.json", self._begun)
        self.since = begun["began"]
        self.say(f"{stage}: begins ({why})")

    def _clear_outputs(self, stage: str) -> None:
        for name in self.plan.stages[stage].outputs:
            tree.remove(self.plan.lab.resolve(), (self.run.path / name).relative_to(self.plan.lab.resolve()))

    def _start(self, stage: str, executor: Executor) -> None:
        plan, run, about = self.plan, self.run, self.plan.stages[stage]
        argv = plan.argv(stage, run, self.slot)
        variables = {"run_dir": str(run.path), "run_id": run.name, "lab": str(plan.lab), "stage": stage}
        given = {
            name: fill(value, plan.config, variables, f"stages.{stage}.env.{name}") or ""
            for name, value in {**plan.study.pipeline.env, **about.env}.items()
        }
        env = {
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
            **(slot_environment(self.slot) if self.slot is not HERE else {}),
            "LOOPLAB_STAGE": stage,
            "LOOPLAB_RUN_ID": run.name,
            "LOOPLAB_CONFIG": str(run.path / CONFIG),
            "LOOPLAB_METRICS": os.environ.get("LOOPLAB_METRICS") or str(run.path / "metrics.jsonl"),
            "LOOPLAB_STUDY": plan.study.name,
            "LOOPLAB_LAB": str(plan.lab),
            "LOOPLAB_RESUME": "1" if self._begun["resume"] else "",
            **given,
        }
        program = find_stage_program(argv[0], plan.lab, env, f"stages.{stage}.command")
        self._adopted = False
        executor.start(
            LaunchSpec(
                self._executor_name(stage, self._begun), run.path, argv, program, plan.lab, self.slot, env,
                about.timeout, about.grace,
            )
        )  # fmt: skip

    def again(self, executor: Executor) -> None:
        """Ask once more for a stage whose device was held."""
        assert self.stage is not None
        self._start(self.stage, executor)

    def _executor_name(self, stage: str, begun: dict[str, Any]) -> str:
        return f"{self.name}:{stage}:{begun['attempt']}"

    # -- its end

    def ended(self, outcome: Exit) -> None:
        """The stage at work has ended."""
        stage = self.stage
        assert stage is not None
        if outcome.reason == "lost" and self._adopted:
            self._conclude(stage, outcome)  # nobody saw how: it is resumed
            return
        why = self._conclude(stage, outcome)
        if why is None:
            self._queue.popleft()
            return
        stopped = outcome.reason == "stop"
        self.state, self.error = "stopped" if stopped else "failed", f"{stage}: {why}"
        self.done.append(
            StageResult(stage, "stopped" if stopped else "failed", why, max(0.0, clock.now() - self.since))
        )

    def _conclude(self, stage: str, outcome: Exit) -> str | None:
        """Write down the end of an attempt; gives why the stage is not complete, None if it is."""
        self.pump(final=True)
        about, run, begun = self.plan.stages[stage], self.run, self._begun
        missing = [name for name in about.outputs if not (run.path / name).exists()]
        why = None if outcome.ok else str(outcome)
        if why is None and missing:
            why = f"it ended well, but did not make {', '.join(missing)}"
        seconds = max(0.0, (outcome.ended or clock.now()) - (outcome.started or begun["began"]))
        if why is None:
            made = fingerprint.outputs_of(run.path, about.outputs, self.plan.hashes)
            digest = hashlib.sha256(canonical_json(made)).hexdigest()
            other = self.plan.artifacts if self.plan.uses_artifacts(stage) else None
            run.write(
                f"stages/{stage}.json",
                {
                    "stage": stage,
                    "id": hashlib.sha256(f"{begun['fingerprint']} {digest}".encode()).hexdigest(),
                    "fingerprint": begun["fingerprint"],
                    "parts": begun["parts"],
                    "argv": redact_argv(self.plan.argv(stage, run, self.slot)),
                    "attempt": begun["attempt"],
                    "resumed": begun["resume"],
                    "slot": self.slot.name,
                    "artifacts": str(other.path) if other is not None else None,
                    "began": begun["began"],
                    "ended": outcome.ended or clock.now(),
                    "seconds": round(seconds, 3),
                    "outputs": made,
                    "outputs_digest": digest,
                },
            )
        else:
            run.write(f"stages/{stage}.begun.json", {**begun, "state": "ended", "why": why})
        self._stamp(f"{stage} {'complete' if why is None else f'not complete: {why}'}, {_clock(seconds)}")
        scrub_file(run.log, known_secrets())
        self._tidy(stage)
        if why is None:
            self.done.append(StageResult(stage, "complete", begun["why"], seconds))
            self.say(f"{stage}: complete in {_clock(seconds)}")
        else:
            self.say(f"{stage}: not complete: {why}")
        return why

    def _tidy(self, stage: str) -> None:
        """Remove what only a stage at work needs."""
        self.run.clear_process()
        if self.run.begun(stage) is None:
            self.run.remove(f"stages/{stage}.begun.json")

    # -- its log

    def _stamp(self, text: str) -> int:
        """A line of our own in the log; gives the place behind it."""
        self.run.refuse_links()
        with append_own(self.run.log) as file:
            start = b"\n" if file.seek(0, os.SEEK_END) and _last_byte(self.run.log) != b"\n" else b""
            file.write(start + f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
            return file.tell()

    def pump(self, *, final: bool = False) -> bool:
        """Pass on what the stage has printed since; whether there was anything."""
        if not self._begun or self._begun["state"] != "running":
            return False
        try:
            self.run.refuse_links()
            with open_regular(self.run.path / "train.log", follow=False) as source, append_own(self.run.log) as log:
                source.seek(max(0, log.seek(0, os.SEEK_END) - self._begun["log_at"]))
                new = source.read()
                if not final:  # a line that is not yet whole waits: a secret in it must not be cut in two
                    new = new[: max(new.rfind(b"\n"), new.rfind(b"\r")) + 1]
                log.write(new)
        except (FileNotFoundError, UntrustedError, LabError):
            return False
        if new:
            self.write(redact_text(new.decode(errors="replace")))
        return bool(new)

    def tail(self, lines: int = TAIL) -> list[str]:
        """The last lines that the stage printed."""
        try:
            with self.run.log.open("rb") as file:
                file.seek(max(int(self._begun.get("log_at", 0)), file.seek(0, os.SEEK_END) - 65536))
                return redact_text(file.read().decode(errors="replace")).splitlines()[-lines:]
        except FileNotFoundError:
            return []


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{seconds:.1f}s" if seconds < 60 else f"{minutes // 60}h{minutes % 60:02d}m{rest:02d}s"


# -- many of them


@dataclass
class StopRequest:
    """What a person has asked for meanwhile; set by signal handlers."""

    drain: bool = False
    """Begin nothing more."""
    stop: bool = False
    """End what is at work."""
    hurry: bool = False
    """Without waiting for it."""


def drive(
    runs: Sequence[StageRun],
    slots: Sequence[Slot],
    executor: Executor,
    wishes: StopRequest,
    *,
    devices: Devices | None = None,
    share: bool = True,
    tick: Callable[[], None] = lambda: None,
    closed: Callable[[StageRun], None] = lambda run: None,
) -> None:
    """Take every run through its stages, one run a slot, until all are complete, failed or stopped."""
    left = {id(run): there for run in runs if (there := run.at_work_in()) is not None}
    waiting, free = deque(sorted(runs, key=lambda run: id(run) not in left)), deque(slots)
    at_work: dict[str, StageRun] = {}
    blocked: dict[str, tuple[float, StageRun]] = {}
    asked: dict[str, bool] = {}

    def go_on(run: StageRun) -> None:
        """To the run's next stage, or to its end."""
        try:
            if run.state == "running" and run.has_more and (wishes.drain or wishes.stop):
                run.state, run.error = "stopped", "stopped before its end"
            name = run.next(executor, run.slot) if run.state == "running" else None
        except LabError as error:
            run.state, run.error, name = "failed", str(error), None
        if name is not None:
            at_work[name] = run
            return
        run.close()
        free.append(run.slot)
        closed(run)

    try:
        while True:
            while waiting and free and not (wishes.drain or wishes.stop):
                run, slot = waiting[0], free[0]
                holder = _stranger(slot, devices, share) if id(run) not in left else None
                if holder is not None:
                    free.rotate(-1)
                    run.blocked = holder
                    if all(_stranger(other, devices, share) for other in free):
                        break
                    continue
                own = next((slot for slot in free if slot.name == left.get(id(run))), free[0])
                free.remove(own)
                run.slot, run.blocked = own, ""
                waiting.popleft()
                try:
                    if run.state == "waiting":
                        run.open()
                except LabError as error:
                    run.state, run.error = "failed", str(error)
                go_on(run)
            if not at_work and (not waiting or wishes.drain or wishes.stop):
                break
            if wishes.stop:
                for name, run in at_work.items():
                    if name not in blocked and asked.get(name) != wishes.hurry:
                        asked[name] = wishes.hurry
                        grace = 0.0 if wishes.hurry else run.plan.stages[run.stage or ""].grace
                        executor.stop(name, "stop", grace)
            for event in executor.poll(POLL_S):
                run = at_work[event.run_id]
                if isinstance(event, Ended):
                    del at_work[event.run_id]
                    run.blocked = ""
                    try:
                        run.ended(event.exit)
                    except (LabError, OSError) as error:  # what a stage does to its folder is not the end of the others
                        run.state, run.error = "failed", f"{run.stage}: {error}"
                    go_on(run)
                elif isinstance(event, Rejected):
                    run.blocked = event.holder or "an order that was lost"
                    blocked[event.run_id] = (time.monotonic() + BLOCKED_S, run)
            for name, (due, run) in list(blocked.items()):
                if wishes.drain or wishes.stop:
                    del blocked[name], at_work[name]
                    run.state, run.error = "stopped", "stopped before its end"
                    go_on(run)
                elif time.monotonic() >= due:
                    del blocked[name]
                    run.again(executor)
            for run in at_work.values():
                run.pump()
            tick()
    finally:
        for run in runs:
            run.close()
    for run in waiting:
        run.state, run.error = "stopped", "not begun"
        closed(run)


def _stranger(slot: Slot, devices: Devices | None, share: bool) -> str | None:
    """Who computes on the slot's devices, if it is nobody of ours."""
    if share or devices is None or not devices.present:
        return None
    return next((str(who) for device in slot.devices for who in devices.other_processes(device)), None)
