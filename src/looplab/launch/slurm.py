"""The Slurm executor: one job per run, or one job array for runs that are started together.

It needs sbatch, squeue and scancel, and a folder that the nodes share with this machine; no accounting. On the node,
`node.py` starts the run. Its record folder is the source of truth: `train.log` (or `attempt-2`, …) is the claim,
`process.json` with its heartbeat the sign of life, and `exit.json` the end. Slurm is polled, in one call for all jobs,
for why a job waits, and whether one without a sign of life is over.

`job.json` in the record folder names the job before it is submitted: an engine that was killed between the submission
and the answer finds the job by that name. If it is submitted twice all the same, the claim lets one of them run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from looplab.config.lab import SlurmConfig
from looplab.errors import LabError
from looplab.launch import node, supervisor
from looplab.launch.base import (
    Ended,
    ExecutorContext,
    ExecutorTraits,
    Exit,
    LaunchSpec,
    Place,
    Queued,
    Rejected,
    Started,
    claim_name,
)
from looplab.launch.local import read_exit, read_json, read_process
from looplab.launch.remote import STUBBORN_S, RemoteExecutor, record_of
from looplab.runs import clock
from looplab.runs.redact import redact_argv

COALESCE_S = 0.02
"""Seconds to wait for more starts before runs are submitted, so that they become one array."""
MAX_ARRAY = 1000
"""Runs in one array; Slurm's own default limit is 1001."""
MAX_SECRETS = 100_000
"""Characters of the secrets of one array: Linux allows 128 KiB for a variable."""
NOT_EXECUTABLE = (errno.E2BIG, errno.EACCES, errno.ENOEXEC)
"""Errors of the system after which the same command fails again."""
LOOK_S = 0.05
"""Seconds between two looks into the folders, for up to 100 runs."""
COMMAND_S = 60.0
"""Seconds that a command of Slurm may take."""
SETTLE_S = 3.0
"""Seconds that an exit may take to appear after Slurm reports the end of the job."""
SILENT_S = node.HEARTBEAT_S + 1.0
"""Seconds without a heartbeat after which a job that slurmd has ended is over."""
REASON_S = 10.0
"""Seconds to wait for Slurm's reason of a death by signal."""
UNKNOWN_S = 15.0
"""Seconds after which a job that Slurm never listed is submitted again."""
RESUBMIT_S = 2.0
SBATCH_VARIABLE = re.compile(r"SBATCH_.*|SLURM_CONF|SLURM_CLUSTERS|PATH|HOME|USER|LOGNAME")
"""Variables that sbatch itself may need."""
QUEUED_EVERY_S = 60.0
"""Seconds between two reports of why a run waits."""
ENDED_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
UNCERTAIN_STATES = {"NODE_FAIL", "BOOT_FAIL", "REVOKED", ""}
"""States in which processes of a job may be alive; the empty one: Slurm no longer lists the job."""
REASONS = {
    "PREEMPTED": "preempted", "NODE_FAIL": "lost", "BOOT_FAIL": "lost", "REVOKED": "lost", "": "lost",
    "TIMEOUT": "timeout", "DEADLINE": "timeout", "CANCELLED": "stop",
}  # fmt: skip
"""State of a job → reason of the exit of a run without one; others have none."""
PASSING = re.compile(
    r"timed out|unable to contact|temporarily|connection refused|try again|communication|"
    r"MaxSubmitJob|MaxJobCount|QOSMax|AssocMax|maximum number of jobs|Controller is",
    re.IGNORECASE,
)
"""Errors of sbatch after which the same submission may succeed later."""


@dataclass(slots=True)
class SlurmJob:
    """A run that is to be submitted, is queued, or runs."""

    run_id: str
    run_dir: Path
    record_dir: Path
    attempt: int
    spec: LaunchSpec | None = None
    """None: an earlier engine, or another executor, has submitted it."""
    key: str | None = None
    """Name of the job or array at Slurm; None: not submitted yet."""
    index: int | None = None
    """Its task in the array; None: it is not in one."""
    id: str | None = None
    since: float = 0.0
    """When it was submitted or adopted. Monotonic, like all times here."""
    submit_at: float = 0.0
    started: bool = False
    state: str | None = None
    """Last state that Slurm reported; None: none yet."""
    asked_at: float = 0.0
    """When Slurm listed it last."""
    over_at: float | None = None
    """When Slurm first reported its end, or stopped listing it."""
    why: str | None = None
    told_at: float = 0.0
    mtime: float | None = None
    beat_at: float = 0.0
    exit: Exit | None = None
    """An exit whose reason only Slurm knows."""
    exit_at: float = 0.0
    stop: tuple[str, float] | None = None
    """Reason and grace of a requested stop."""
    stop_sent: bool = False
    stop_at: float = 0.0
    kill_at: float = 0.0

    @property
    def claim(self) -> Path:
        return self.record_dir / claim_name(self.attempt)


def job_key(record_dirs: Sequence[Path], attempt: int) -> str:
    """Return the name of the job that runs these folders: the same for every caller."""
    text = "\n".join([str(attempt), *map(str, record_dirs)])
    return "looplab-" + hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def seconds_of(limit: str) -> float | None:
    """Return the seconds of a time limit as sbatch takes it (`90`, `1:30:00`, `2-12`); None if it has none."""
    days, dash, rest = limit.rpartition("-")
    try:
        parts = [int(part) for part in rest.split(":")]
        if dash:
            hours, minutes, seconds = [*parts, 0, 0][:3]
            return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    except ValueError:
        return None
    if len(parts) == 1:
        return parts[0] * 60
    return parts[0] * 60 + parts[1] if len(parts) == 2 else (parts[0] * 60 + parts[1]) * 60 + parts[2]


def sbatch_options(config: SlurmConfig, spec: LaunchSpec, key: str, count: int) -> list[str]:
    """Return the options of sbatch for runs like this one."""
    needs = spec.resources
    options = {
        "job-name": key, "output": "/dev/null", "error": "/dev/null", "chdir": "/", "export": "ALL", "ntasks": "1",
        "partition": config.partition, "account": config.account, "qos": config.qos,
    }  # fmt: skip
    time_s = seconds_of(config.time) if config.time is not None else needs.time_s
    if config.time is not None:
        options["time"] = config.time
    elif time_s is not None:
        options["time"] = str(int(-(-time_s // 60)))
    lead = int(spec.grace) + 30
    if time_s is None or time_s > 4 * lead:
        options["signal"] = f"B:USR1@{lead}"
    if config.gres is not None:
        options["gres"] = config.gres
    elif needs.devices:
        options["gres"] = f"gpu:{needs.devices}"
    if needs.cores is not None:
        options["cpus-per-task"] = str(needs.cores)
    if needs.memory_mb is not None:
        options["mem"] = f"{needs.memory_mb}M"
    if count > 1:
        options["array"] = f"0-{count - 1}"
    options |= {name.replace("_", "-"): value for name, value in needs.constraints.items()}
    return [f"--{name}={value}" for name, value in options.items() if value is not None] + [
        "--no-requeue", *config.sbatch,
    ]  # fmt: skip


def batch_script(config: SlurmConfig, specs: Sequence[LaunchSpec], key: str) -> str:
    """Return the batch script of these runs: one job, or one array."""
    records = [str(record_of(spec)) for spec in specs]
    header = [f"#SBATCH {_checked(option)}" for option in sbatch_options(config, specs[0], key, len(specs))]
    python = config.python or sys.executable
    log = f"{records[0]}/slurm.log"
    command = shlex.join([python, "-I", "-S", str(Path(node.__file__).resolve()), *records])
    lines = ["#!/bin/sh", *header, f"exec >> {shlex.quote(log)} 2>&1", *config.setup, f"exec {command}"]
    return "\n".join(lines) + "\n"


def _checked(option: str) -> str:
    """Return a line of the header.

    Raises:
        LabError: Slurm would read the option as something else.
    """
    if re.search(r"[\s'\"#\\]", option):
        raise LabError(f"executor.slurm: sbatch cannot take {option!r} in a script", hint="leave out spaces and quotes")
    return option


def require_slurm() -> None:
    """Raise LabError if no Slurm answers: a run must not be blamed for that."""
    try:
        done = subprocess.run(
            ["sinfo", "--noheader"], capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False,
            cwd="/", stdin=subprocess.DEVNULL,
        )  # fmt: skip
        why = (done.stderr.strip().splitlines() or [f"sinfo exited with code {done.returncode}"])[-1]
        reachable = done.returncode == 0
    except FileNotFoundError:
        why, reachable = "sinfo is not on PATH", False
    except subprocess.TimeoutExpired:
        why, reachable = f"sinfo did not answer within {COMMAND_S:g} s", False
    if not reachable:
        raise LabError(
            f"Slurm cannot be reached: {why}",
            hint="run this on a machine of the cluster and check `scontrol ping`; nothing was started",
        )


class SlurmExecutor(RemoteExecutor):
    """Runs trainers as Slurm jobs; see `Executor` for the contract. One thread submits, cancels, looks and asks."""

    traits = ExecutorTraits(
        name="slurm", places="theirs", queues=True, prequeues=False, retries={"lost": 2, "preempted": 5}
    )

    request_file = "launch.json"

    def __init__(
        self,
        context: ExecutorContext | None = None,
        config: SlurmConfig | None = None,
        patterns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(patterns)
        self._config = config or SlurmConfig()
        self._commands_env = dict(os.environ)
        self.settle_s = self._config.lease + STUBBORN_S
        self._jobs: dict[str, SlurmJob] = {}
        self._work_r, self._work_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        self._asked_at = 0.0
        self._thread = threading.Thread(target=self._work, name="slurm", daemon=True)
        self._thread.start()

    # -- the contract

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        self.start_all([(spec, after)])

    def start_all(self, starts: Sequence[tuple[LaunchSpec, str | None]]) -> None:
        with self._lock:
            for spec, _ in starts:
                if spec.run_id in self._jobs or self.adopt(spec.run_id, spec.run_dir, record_of(spec), spec.attempt):
                    continue
                submit_at = time.monotonic() + COALESCE_S
                self._jobs[spec.run_id] = SlurmJob(
                    spec.run_id, Path(os.path.abspath(spec.run_dir)), record_of(spec), spec.attempt, spec,
                    submit_at=submit_at,
                )  # fmt: skip
        self._ring()

    def cancel(self, run_id: str) -> None:
        with self._lock:
            job = self._jobs.get(run_id)
            if job is not None and job.spec is not None and job.key is None:
                del self._jobs[run_id]
                self._tell(Rejected(run_id, None))

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        with self._lock:
            job = self._jobs.get(run_id)
            if job is None:
                return
            if job.stop is None or grace < job.stop[1]:
                job.stop = (job.stop[0] if job.stop else reason, grace)
                job.stop_sent = False
        self._ring()

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path | None = None, attempt: int = 1) -> bool:
        run_dir = Path(os.path.abspath(run_dir))
        record_dir = run_dir if record_dir is None else Path(os.path.abspath(record_dir))
        job = SlurmJob(run_id, run_dir, record_dir, attempt, since=time.monotonic())
        with self._lock:
            if run_id in self._jobs:
                return True
            ended = read_exit(record_dir, attempt)
            noted = read_json(record_dir / "job.json") or {}
            if noted.get("attempt", 1) != attempt:
                noted = {}
            if ended is not None and not _asks_slurm(ended):
                self._tell(Ended(run_id, ended))
                return True
            if not noted and not os.path.lexists(job.claim):
                return False
            job.key, job.index, job.id = noted.get("key"), noted.get("index"), noted.get("id")
            self._jobs[run_id] = job
        self._ring()
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ring()
        self._thread.join()
        os.close(self._work_r)
        os.close(self._work_w)
        self._close_events()

    # -- the thread

    def _was_requested(self, record_dir: Path, attempt: int) -> bool:
        return super()._was_requested(record_dir, attempt) or os.path.lexists(record_dir / "job.json")

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake anyway
            os.write(self._work_w, b"x")

    def _work(self) -> None:
        while True:
            with self._lock:
                jobs = list(self._jobs.values())
            pause = LOOK_S * max(1.0, len(jobs) / 100) if jobs else None
            with contextlib.suppress(OSError):
                select.select([self._work_r], [], [], pause)
                os.read(self._work_r, 4096)
            with self._lock:
                jobs = list(self._jobs.values())
            try:
                self._submit_due(jobs, hurry=self._closed)  # what was requested is submitted before it closes
                if self._closed:
                    return
                for job in jobs:
                    self._send_stop(job)
                    self._look(job)
                self._ask(jobs)
                for job in jobs:
                    if job.run_id in self._jobs:
                        self._check_over(job)
            except OSError:
                if self._closed:
                    return
                time.sleep(LOOK_S)  # a full or unreachable disk: the next look may succeed
            except Exception as error:  # noqa: BLE001 (reported by `poll`)
                self._fail(error)
                return

    def _end(self, job: SlurmJob, exit_: Exit) -> None:
        with self._lock:
            if self._jobs.pop(job.run_id, None) is not None:
                self._tell(Ended(job.run_id, exit_))

    def _slurm(self, *argv: str, text: str | None = None, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """Run a command of Slurm; return its code, output and errors."""
        try:
            done = subprocess.run(
                argv, input=text, capture_output=True, text=True, errors="replace", timeout=COMMAND_S, check=False,
                env=dict(env or self._commands_env), cwd="/",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 1, "", f"{argv[0]} timed out"
        except FileNotFoundError:
            return 127, "", f"{argv[0]} is not on PATH: is this a machine of a Slurm cluster?"
        except OSError as error:
            if error.errno not in NOT_EXECUTABLE:
                raise
            return 126, "", f"{argv[0]} cannot be executed: {error.strerror}"
        return done.returncode, done.stdout, done.stderr.strip()

    # -- submitting

    def _submit_due(self, jobs: Sequence[SlurmJob], *, hurry: bool) -> None:
        now = time.monotonic() + (COALESCE_S if hurry else 0.0)
        due = [job for job in jobs if job.spec is not None and job.id is None and now >= job.submit_at > 0]
        alike: dict[tuple[Any, ...], list[SlurmJob]] = {}
        for job in due:
            assert job.spec is not None
            if job.stop is not None:
                self._end_unstarted(job, Exit(None, reason=job.stop[0], message="stopped before it was submitted"))
                continue
            needs = job.spec.resources
            sort = (needs.devices, needs.cores, needs.memory_mb, needs.time_s, str(needs.constraints), job.attempt)
            alike.setdefault((*sort, int(job.spec.grace)), []).append(job)
        for group in alike.values():
            array: list[SlurmJob] = []
            room = MAX_SECRETS
            for job in group:
                assert job.spec is not None
                length = len(json.dumps(_secrets(job.spec)))
                if array and (not self._config.array or len(array) >= MAX_ARRAY or length > room):
                    self._submit(array)
                    array, room = [], MAX_SECRETS
                array.append(job)
                room -= length
            self._submit(array)

    def _submit(self, jobs: list[SlurmJob]) -> None:
        """Submit runs with equal needs as one job or one array."""
        with self._lock:  # those that were cancelled meanwhile are not submitted, and the others cannot be any more
            jobs = [job for job in jobs if self._jobs.get(job.run_id) is job]
            key = job_key([job.record_dir for job in jobs], jobs[0].attempt) if jobs else ""
            for index, job in enumerate(jobs):
                job.key, job.index = key, index if len(jobs) > 1 else None
        if not jobs:
            return
        specs = [job.spec for job in jobs if job.spec is not None]
        secrets: dict[str, dict[str, Any]] = {}
        for job, spec in zip(jobs, specs, strict=True):
            secrets |= _write_request(job, spec, sorted(self._env))
            self._note_job(job)
        # sbatch passes on its own environment (`--export=ALL`), so it gets exactly what runs get. A list of names would
        # make Slurm load the user's login environment on the node, which is slow, and fails at some sites.
        env = {name: value for name, value in self._commands_env.items() if SBATCH_VARIABLE.fullmatch(name)}
        env |= self._env
        if secrets:
            env[node.SECRETS] = json.dumps(secrets)
        try:
            script = batch_script(self._config, specs, key)
        except LabError as error:
            for job in jobs:
                self._end_unstarted(job, Exit(None, reason="not started", message=str(error)))
            return
        code, said, errors = self._slurm("sbatch", "--parsable", text=script, env=env)
        now = time.monotonic()
        if code == 0 and said.strip():
            base = said.strip().split(";")[0]
            for job in jobs:
                job.id = base if job.index is None else f"{base}_{job.index}"
                job.since = now
                self._note_job(job)
                self._tell_queued(job, "submitted")
        elif PASSING.search(errors):
            for job in jobs:
                job.submit_at = now + RESUBMIT_S
                self._tell_queued(job, f"sbatch: {errors}")
        else:
            for job in jobs:
                self._end_unstarted(job, Exit(None, reason="not started", message=f"sbatch: {errors or said}"))

    @staticmethod
    def _note_job(job: SlurmJob) -> None:
        noted = {"key": job.key, "index": job.index, "attempt": job.attempt, "id": job.id}
        supervisor.atomic_write(str(job.record_dir / "job.json"), json.dumps(noted))

    def _end_unstarted(self, job: SlurmJob, exit_: Exit) -> None:
        """Report the end of a run that was never started, after making sure that it never will be."""
        if not supervisor.claim(str(job.claim)):
            return  # it was started at this moment
        now = time.time()
        exit_ = replace(exit_, started=None, ended=now, attempt=job.attempt)
        if not exit_.is_lost:
            outcome = {"code": None, "signal": None, "reason": exit_.reason, "message": exit_.message, "ended": now}
            text = json.dumps(supervisor.with_attempt(outcome, job.attempt))
            supervisor.atomic_write(str(job.record_dir / "exit.json"), text)
        self._end(job, exit_)

    # -- stopping

    def _send_stop(self, job: SlurmJob) -> None:
        now = time.monotonic()
        if job.stop is None or job.id is None:
            return
        if not job.stop_sent:
            reason, grace = job.stop
            request = {"attempt": job.attempt, "reason": reason, "grace": grace}
            supervisor.atomic_write(str(job.record_dir / "stop.json"), json.dumps(request))
            self._slurm("scancel", "--quiet", "--state=PENDING", job.id)
            self._slurm("scancel", "--quiet", "--batch", "--signal=TERM", job.id)
            job.stop_sent, job.kill_at = True, now + grace + STUBBORN_S
        elif now >= job.kill_at:
            job.kill_at = now + STUBBORN_S
            self._slurm("scancel", "--quiet", job.id)

    # -- looking

    def _look(self, job: SlurmJob) -> None:
        """Read the run's own files."""
        try:
            names = os.listdir(job.record_dir)  # not `exists`: network disks cache names that are missing
        except OSError:
            return
        now = time.monotonic()
        process = read_process(job.record_dir, job.attempt) if "process.json" in names else None
        if process is not None:
            with contextlib.suppress(OSError):
                mtime = os.stat(job.record_dir / "process.json").st_mtime
                if mtime != job.mtime:
                    job.mtime, job.beat_at = mtime, now
            if isinstance(process.get("job"), str):
                job.id = process["job"]
        ended = read_exit(job.record_dir, job.attempt) if "exit.json" in names else None
        if ended is not None:
            if job.exit is None and _asks_slurm(ended):
                job.exit, job.exit_at = ended, now
            elif job.exit is None:
                self._end(job, ended)
        elif process is not None and not job.started:
            job.started = True
            place = Place(
                str(process.get("host") or "?"), process["pid"], job.id,
                _texts(process.get("devices")), _numbers(process.get("cores")),
            )  # fmt: skip
            self._tell(Started(job.run_id, place, _start_of(job, process)))

    # -- asking

    def _ask(self, jobs: Sequence[SlurmJob]) -> None:
        """Ask Slurm about all jobs at once; an error leaves their state unknown."""
        now = time.monotonic()
        waiting = [job for job in jobs if job.spec is None or job.key is not None]
        period = self._config.poll * max(1.0, len(waiting) / 1000)
        if not waiting or now - self._asked_at < period:
            return
        self._asked_at = now
        code, said, _ = self._slurm("squeue", "--noheader", "--me", "--array", "--states=all", "--format=%i|%T|%r|%j")
        if code != 0:
            return
        listed: dict[str, tuple[str, str]] = {}
        by_name: dict[tuple[str, int | None], str] = {}
        for line in said.splitlines():
            id_, state, why, name = [*line.strip().split("|", 3), "", "", ""][:4]
            listed[id_] = state, why
            _, underscore, task = id_.partition("_")
            index = int(task) if underscore and task.isdigit() else None
            if by_name.get((name, index)) is None or state not in ENDED_STATES:
                by_name[name, index] = id_
        for job in waiting:
            if job.id is None and job.key is not None and (job.key, job.index) in by_name:
                job.id = by_name[job.key, job.index]
                job.since = now
                self._note_job(job)
            if job.id is not None and job.id in listed:
                job.state, why = listed[job.id]
                job.asked_at = now
                if job.state in ENDED_STATES:
                    job.over_at = now if job.over_at is None else job.over_at
                else:
                    job.over_at = None
                if job.state == "PENDING" and why not in ("", "None"):
                    self._tell_queued(job, why)
            elif job.spec is not None and job.id is None:
                continue  # sbatch was asked to try again later
            elif now - max(job.since, job.asked_at) > UNKNOWN_S:
                job.state = ""
                job.over_at = now if job.over_at is None else job.over_at

    def _tell_queued(self, job: SlurmJob, why: str) -> None:
        now = time.monotonic()
        is_due = job.why in (None, "submitted") or now - job.told_at > QUEUED_EVERY_S
        if job.why != why and is_due:
            job.why, job.told_at = why, now
            self._tell(Queued(job.run_id, job.id or "-", why))

    def _check_over(self, job: SlurmJob) -> None:
        """Report the end of a run that is over according to Slurm and shows no sign of life."""
        now = time.monotonic()
        if job.exit is not None:
            is_known = job.over_at is not None and bool(job.state)
            if is_known or now - job.exit_at > REASON_S:
                self._end(job, _with_reason(job.exit, job.state if is_known else None, job.stop))
            return
        if job.over_at is None or now - job.over_at < SETTLE_S:
            return
        state = job.state or ""
        if not os.path.lexists(job.claim):
            if state == "" and job.stop is None:
                with self._lock:  # never submitted, as far as Slurm knows; the claim makes a late one harmless
                    if self._jobs.pop(job.run_id, None) is not None:
                        with contextlib.suppress(OSError):
                            os.unlink(job.record_dir / "job.json")
                        self._tell(Rejected(job.run_id, None))
                return
            message = _log_tail(job) or f"Slurm ended job {job.id} before the run: {state}"
            reason = job.stop[0] if job.stop else REASONS.get(state, "not started")
            self._end_unstarted(job, Exit(None, reason=reason, message=message))
            return
        patience = self._config.lease if state in UNCERTAIN_STATES else SILENT_S
        if now - max(job.beat_at, job.over_at) < patience:
            return
        how = f"job {job.id}: {state.lower().replace('_', ' ')}" if state else f"Slurm no longer lists job {job.id}"
        reason = job.stop[0] if job.stop else REASONS.get(state, "lost")
        started = (read_process(job.record_dir, job.attempt) or {}).get("started")
        if state == "OUT_OF_MEMORY":
            exit_ = Exit(None, signal=9, message=f"{how}, out of memory")
        else:
            exit_ = Exit(None, reason=reason, message=f"{how}, without an exit record or a heartbeat")
            request = {"attempt": job.attempt, "reason": reason, "grace": 0.0}  # if it lives after all
            supervisor.atomic_write(str(job.record_dir / "stop.json"), json.dumps(request))
        self._end(job, replace(exit_, started=started, ended=max(clock.now(), started or 0.0), attempt=job.attempt))


def _write_request(job: SlurmJob, spec: LaunchSpec, passed: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Write `launch.json`, for the launcher on the node; return what is secret, by run.

    Args:
        passed: Names of the variables of the engine that the job gets.
    """
    request = {
        "id": spec.run_id,
        "dir": str(job.run_dir),
        "record": str(job.record_dir),
        "attempt": spec.attempt,
        "path": spec.path,
        "argv": redact_argv(spec.argv),
        "env": {
            **{name: value for name, value in spec.env.items() if name not in spec.secrets},
            "LOOPLAB_RUN_DIR": str(job.run_dir),
        },
        "passed": list(passed),
        "cwd": str(spec.cwd),
        "timeout": spec.timeout,
        "grace": spec.grace,
        "cleanup_timeout": spec.cleanup_timeout,
        "label": str(job.run_dir),
    }
    supervisor.atomic_write(str(job.record_dir / "launch.json"), json.dumps(request))
    return _secrets(spec)


def _secrets(spec: LaunchSpec) -> dict[str, dict[str, Any]]:
    """Return what must not be written to `launch.json`, by run: variables, and the command if it has a secret in it."""
    argv = list(spec.argv)
    hidden: dict[str, Any] = {}
    if spec.secrets:
        hidden["env"] = {name: spec.env[name] for name in spec.secrets if name in spec.env}
    if redact_argv(argv) != argv:
        hidden["argv"] = argv
    return {spec.run_id: hidden} if hidden else {}


def _start_of(job: SlurmJob, process: Mapping[str, Any]) -> float:
    """Return when a run started: now, or if it was adopted, what its node says, whose clock may differ a little."""
    now, noted = clock.now(), process.get("started")
    if job.spec is None and isinstance(noted, int | float) and 0.0 < noted < now:
        return float(noted)
    return now


def _asks_slurm(ended: Exit) -> bool:
    """Return whether only Slurm knows why a run ended: it was signalled, and not by an engine."""
    return ended.reason == "preempted" or (ended.signal is not None and ended.reason is None)


def _with_reason(ended: Exit, state: str | None, stop: tuple[str, float] | None) -> Exit:
    """Return an exit with the reason that Slurm gives for it."""
    if stop is not None:
        return replace(ended, reason=stop[0])
    if state in REASONS and state not in UNCERTAIN_STATES:
        return replace(ended, reason=REASONS[state])
    if state == "OUT_OF_MEMORY":
        return replace(ended, reason=None, message="out of memory")
    return ended


def _log_tail(job: SlurmJob) -> str:
    """Return the last line of the batch script's output."""
    with contextlib.suppress(OSError), open(job.record_dir / "slurm.log", "rb") as file:
        lines = file.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(one for one in value if isinstance(one, int)) if isinstance(value, list) else ()
