"""A whole Slurm on loopback, in one folder, for the tests: munge, slurmctld and several slurmd on this machine."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo", "scontrol")
START_S = 60.0

CONF = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MinJobAge=300
MaxJobCount=20000
MaxArraySize=20001
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=5
MessageTimeout=5
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs={cpus} RealMemory=4000 \
Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def find_program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def free_ports(count: int) -> int:
    """Return the first of some neighbouring free ports, below those that the system gives out itself."""
    for first in range(20000 + os.getpid() % 5000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                listener = stack.enter_context(socket.socket())
                listener.bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")


@dataclass
class SlurmCluster:
    """The daemons of a cluster. `env` lets commands find it."""

    folder: Path
    nodes: int = 2
    cpus: int = 8
    gpus: int = 4
    port: int = 0
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        missing = [name for name in PROGRAMS if find_program(name) is None]
        if missing:
            pytest.skip(f"no {', '.join(missing)}: `make slurm` installs them")
        folder = self.folder
        for name in ("state", "dev"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        for gpu in range(self.gpus):
            (folder / f"dev/gpu{gpu}").symlink_to("/dev/null")
        self.port = free_ports(self.nodes + 1)
        host = socket.gethostname().split(".")[0]
        text = CONF.format(
            host=host, port=self.port, user=getpass.getuser(), folder=folder, nodes=self.nodes, cpus=self.cpus,
            gpus=self.gpus, first=self.port + 1, last=self.port + self.nodes,
        )  # fmt: skip
        (folder / "slurm.conf").write_text(text)
        devices = f"{folder}/dev/gpu[0-{self.gpus - 1}]"
        (folder / "gres.conf").write_text(f"NodeName=n[1-{self.nodes}] Name=gpu File={devices}\n")
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
            "--num-threads=2",
        )  # fmt: skip
        self.start_controller()
        for number in range(1, self.nodes + 1):
            self.start_node(f"n{number}")
        self.await_idle()

    def _daemon(self, name: str, *argv: str, key: str | None = None) -> None:
        program = find_program(name)
        assert program is not None
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons[key or name] = subprocess.Popen(
                [program, *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **self.env},
            )  # fmt: skip

    def start_controller(self) -> None:
        self._daemon("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))

    def stop_controller(self) -> None:
        self._stop("slurmctld")

    def start_node(self, name: str) -> None:
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        self._daemon("slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"), key=name)

    def kill_daemon(self, name: str) -> None:
        """Kill the slurmd of a node; its steps and runs live on."""
        self._daemons[name].kill()
        self._daemons.pop(name).wait()

    def lose_node(self, name: str) -> None:
        """Kill everything on a node at once: no process can report the death of another."""
        victims = [self._daemons[name].pid, *self.processes(name)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._daemons.pop(name).wait()

    def processes(self, node: str | None = None) -> list[int]:
        """Return the processes of the jobs of this cluster, on one node or on all, parents first."""
        found = []
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                names = [word.partition(b"=")[2].decode() for word in words if word.startswith(b"SLURMD_NODENAME=")]
                is_step = process.name() == "slurmstepd"
                if is_step and node is not None:
                    names = [node] if any(f"spool.{node}" in word for word in process.cmdline()) else names
                if mark in words and (names or is_step) and (node is None or node in names):
                    found.append(process.pid)
        return found

    def command(self, *argv: str) -> str:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env={**os.environ, **self.env}, timeout=60
        )
        return done.stdout.strip()

    def await_idle(self) -> None:
        deadline = time.monotonic() + START_S
        while self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split().count("idle") < self.nodes:
            if time.monotonic() > deadline:
                log = (self.folder / "daemons.log").read_text(errors="replace")[-600:]
                version = self.command("sinfo", "--version")
                self.stop()
                pytest.skip(f"{version} does not start here: {log}")
            time.sleep(0.1)

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def stop(self) -> None:
        if self.port and "slurmctld" in self._daemons:
            self.command("scancel", "--quiet", "-u", getpass.getuser())
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in list(self._daemons)[::-1]:
            self._stop(name)
