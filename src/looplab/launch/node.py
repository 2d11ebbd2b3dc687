"""The launcher on a node: starts one run that a scheduler has placed here, as the supervisor does on one machine.

A batch script runs it as `python -I -S node.py RECORD…` (a job array names one record folder per task). It needs the
standard library only, and `supervisor.py` next to it. The record folder contains `launch.json`: what to start, without
secrets; these are in the environment of the job.

It is a supervisor without an engine, with a lease:
- the devices are those that the scheduler names in the environment; it fills them in for the run and sets no others;
- `place.json` describes this machine, for the capsule;
- `process.json` is touched every HEARTBEAT_S seconds: the run is alive, whatever a scheduler says;
- SIGTERM and SIGUSR1 end the run: with the reason and grace of `stop.json` if an engine wrote one, else `timeout`
  (SIGUSR1, sent before the time limit) or `preempted` (SIGTERM);
- a newer attempt, or `stop.json`, ends the run even if no signal arrives.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from looplab.launch import supervisor

    Dict = dict[str, Any]
elif "looplab.launch" in sys.modules:
    from looplab.launch import supervisor
else:  # run as a script: the file next to this one, whatever is on the path
    _SPEC = importlib.util.spec_from_file_location("supervisor", os.path.dirname(__file__) + "/supervisor.py")
    supervisor = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(supervisor)

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats."""
LOOK_S = 1.0
"""Seconds between checks for `stop.json` and newer attempts."""
LATE_DEVICES = "{looplab.devices}"
"""Stands for the devices in a command and in variables; the same as in base.py."""
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_JOB_GPUS")
"""Variables in which a scheduler names the devices of a job, the most reliable first."""
SECRETS = "LOOPLAB_SECRETS"
"""Variable of the job with the values that `launch.json` leaves out, by run, as JSON."""
CLAIMED_EXIT = 0
"""Exit code of a launcher that has found its attempt started or ended: that is not a failure of the job."""


def read_json(path: str) -> Dict:
    """Return a JSON object; empty if the file is missing or is not one."""
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def devices_here(env: Dict) -> list[str]:
    """Return the devices that the scheduler gave to this job."""
    for name in DEVICE_VARIABLES:
        if env.get(name):
            return [part.strip() for part in str(env[name]).split(",") if part.strip()]
    return []


def job_id(env: Dict) -> str | None:
    """Return the id of this job as Slurm's commands take it."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return str(env["SLURM_JOB_ID"]) if env.get("SLURM_JOB_ID") else None


def machine_here(env: Dict) -> Dict:
    """Return facts about this machine and job."""
    name = os.uname()
    facts: Dict = {
        "host": name.nodename,
        "system": f"{name.sysname} {name.release} {name.machine}",
        "cores": sorted(os.sched_getaffinity(0)),
        "devices": devices_here(env),
        "python": sys.version,
        "job": job_id(env),
        "slurm": {key: env[key] for key in sorted(env) if key.startswith(("SLURM_JOB_", "SLURMD_"))},
    }
    with contextlib.suppress(OSError, ValueError, AttributeError):
        facts["memory_mb"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        facts["driver"] = file.readline().strip()
    return facts


def _run_environment(spec: Dict, facts: Dict) -> dict[str, str]:
    """Return the variables of the run on top of those of the job: its own, its secrets, and its devices."""
    env = {name: value.replace(LATE_DEVICES, ",".join(facts["devices"])) for name, value in spec["env"].items()}
    env |= json.loads(os.environ.get(SECRETS, "{}")).get(spec["id"], {}).get("env", {})
    env["LOOPLAB_DEVICES"] = ",".join(facts["devices"])
    env["LOOPLAB_CORES"] = ",".join(map(str, facts["cores"]))
    return env


class NodeLauncher(supervisor.Supervisor):  # type: ignore[misc,unused-ignore]
    """Supervises one run on this machine until its end is recorded.

    Args:
        spec: The content of `launch.json`.
    """

    def __init__(self, spec: Dict) -> None:
        super().__init__(None)
        self.spec = spec
        self.record = spec["record"]
        self.attempt = spec.get("attempt", 1)
        self.signals: list[int] = []
        self.beat_at = 0.0
        self.look_at = 0.0
        self.stopped = False

    def launch(self) -> int:
        """Start the run and supervise it; return the exit code of the launcher."""
        stop = self.stop_request()
        claimed = self.record + ("/train.log" if self.attempt == 1 else f"/attempt-{self.attempt}")
        if stop is not None:
            if supervisor.claim(claimed):
                now = time.time()
                outcome = {"code": None, "signal": None, "reason": stop["reason"], "message": "stopped while queued"}
                outcome |= {"started": None, "ended": now}
                self.record_exit(self.spec["id"], self.record, supervisor.with_attempt(outcome, self.attempt))
            return CLAIMED_EXIT
        if os.path.lexists(claimed):
            return CLAIMED_EXIT
        facts = machine_here(dict(os.environ))
        self.place = {name: facts[name] for name in ("job", "devices", "cores")}
        spec = self.spec
        secret = json.loads(os.environ.get(SECRETS, "{}")).get(spec["id"], {})
        argv = [word.replace(LATE_DEVICES, ",".join(facts["devices"])) for word in secret.get("argv") or spec["argv"]]
        with contextlib.suppress(OSError):
            supervisor.atomic_write(self.record + "/place.json", json.dumps(facts))
        env = {name: value for name, value in os.environ.items() if name != SECRETS}
        self.env = supervisor.encode_env(env)
        self.starting = {**spec, "argv": argv, "env": _run_environment(spec, facts), "cores": [], "locks": []}
        self.run()
        return self.exit_code

    exit_code = CLAIMED_EXIT

    def begin(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        self.start(self.starting)

    def next_timeout(self) -> float:
        due: float | None = super().next_timeout()
        return min(LOOK_S * 1000, due) if due is not None else LOOK_S * 1000

    def tick(self) -> None:
        now = time.monotonic()
        if self.signals:
            number, self.signals = self.signals[0], []
            self.end_run("timeout" if number == signal.SIGUSR1 else "preempted")
        if now >= self.look_at:
            self.look_at = now + LOOK_S
            if self.stop_request() is not None:
                self.end_run("stop")
            elif os.path.lexists(f"{self.record}/attempt-{self.attempt + 1}"):
                self.end_run("lost")  # another attempt continues this run
        if now >= self.beat_at and self.children:
            self.beat_at = now + HEARTBEAT_S
            with contextlib.suppress(OSError):
                os.utime(self.record + "/process.json")

    def end_run(self, reason: str) -> None:
        """End the run; an engine's own request takes precedence over the reason."""
        request = self.stop_request() or {}
        for child in [*self.children.values(), *self.leaving]:
            grace = float(request.get("grace") or 0.0) if "grace" in request else child.grace
            if not self.stopped or child.kill_at is None or child.kill_at > time.monotonic() + grace:
                self.stop(child, str(request.get("reason", reason)), grace)
        self.stopped = True

    def stop_request(self) -> Dict | None:
        """Return the engine's request to stop this attempt; None if there is none."""
        request = read_json(self.record + "/stop.json")
        is_ours = request.get("attempt", 1) == self.attempt and isinstance(request.get("reason"), str)
        return request if is_ours else None

    def record_exit(self, run_id: str, record: str, outcome: Dict, record_fd: int = -1) -> None:
        super().record_exit(run_id, record, outcome, record_fd)
        code, number = outcome.get("code"), outcome.get("signal")
        self.exit_code = code if code is not None else 128 + number if number is not None else 1


if __name__ == "__main__":
    _index = int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0) if len(sys.argv) > 2 else 0
    sys.exit(NodeLauncher(read_json(sys.argv[1 + _index] + "/launch.json")).launch())
