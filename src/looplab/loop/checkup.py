"""What `looplab doctor` looks at: the machine, its programs, the disk of a lab, and what the lab lacks."""

from __future__ import annotations

import ast
import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from looplab.agents.base import AgentSpec
from looplab.agents.run import check_spec, find_program, spec_of
from looplab.config.disk import existing, network_disk
from looplab.config.lab import FIND_OBJECTIVE, LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.launch.devices import Devices
from looplab.launch.executors import check_executor, needs_shared_disk
from looplab.loop.preview import base_command
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions
from looplab.runs.capsule import machine
from looplab.runs.disk_checks import check_disk, mount_of
from looplab.runs.programs import ProgramError, run_program
from looplab.untrusted import clean_line

PACKAGES = {
    "torch": ("trainers that use it", "pip install torch"),
    "ray": ("runs on a Ray cluster", "pip install 'looplab[ray]'"),
    "optuna": ("some kinds of search, pruning", "pip install 'looplab[search]'"),
    "wandb": ("trainers that log to W&B", "pip install 'looplab[wandb]'"),
    "matplotlib": ("plots in reports", "pip install 'looplab[plots]'"),
}
"""Optional packages: what they are for, and how to get them."""
PROGRAMS = {
    "git": ("recording the code of runs, versions", "install git"),
    "sbatch": ("runs on a Slurm cluster", "use a login node of the cluster"),
    "codex": ("agents", "npm install -g @openai/codex"),
    "claude": ("agents", "npm install -g @anthropic-ai/claude-code"),
    "ssh-keygen": ("signed anchors", "install openssh-client"),
}
VERSION_S = 20.0
"""Seconds for a program to print its version."""
MIN_FREE_GB = 1.0
IMPORTS = """
import importlib.util, sys
sys.path[0] = sys.argv[1]
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return False
print("\\n".join(name for name in sys.argv[2:] if is_missing(name)))
"""
"""Program for a trainer's interpreter: prints which modules it lacks, without importing them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table."""

    area: Literal["machine", "programs", "disk", "lab"]
    name: str
    found: str
    """What was found, in words."""
    level: Literal["ok", "note", "problem"] = "ok"
    """`note`: something optional is missing, or slow. `problem`: runs will fail, or data may be lost."""
    fix: str = ""
    """What to do about it."""


def check_machine() -> Iterator[Finding]:
    """Yield the devices, cores and memory of this machine, and optional packages and programs with their versions."""
    facts = machine()
    cores, quota = len(os.sched_getaffinity(0)), _cgroup_cores()
    usable = cores if quota is None else min(cores, quota)
    limited = f", {usable:g} of them usable" if usable < facts["cores"] else ""
    yield Finding("machine", "host", f"{facts['host']}, {facts['system']}")
    yield Finding("machine", "cores", f"{facts['cores']}{limited}: {facts['cpu']}")
    memory, limit = facts["memory_gb"], _cgroup_memory_gb()
    limited = f", limited to {limit:.1f} GB" if limit is not None and limit < memory else ""
    yield Finding("machine", "memory", f"{memory:.1f} GB{limited}")
    names = facts["gpus"]
    visible = Devices().ids()
    shown = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU (NVML finds none)"
    if names and len(visible) < len(names):
        shown += f"; visible: {', '.join(visible) or 'none'}"
    yield Finding("machine", "devices", shown)
    yield Finding("machine", "python", f"{platform.python_version()} ({sys.executable})")
    for name, (purpose, fix) in PACKAGES.items():
        try:
            yield Finding("programs", name, version(name))
        except PackageNotFoundError:
            yield Finding("programs", name, f"not installed: for {purpose}", "note", fix)
    for name, (purpose, fix) in PROGRAMS.items():
        path = shutil.which(name)
        if path is None:
            yield Finding("programs", name, f"not on PATH: for {purpose}", "note", fix)
        else:
            yield Finding("programs", name, _version_of(path) or path)


def check_lab_disk(lab: LabConfig) -> Iterator[Finding]:
    """Yield the properties of a lab's disks, and whether they support what looplab needs."""
    mount = mount_of(lab.folder)
    kind = network_disk(lab.folder)
    shown = (mount.kind if mount is not None else "unknown") + (f", a network disk ({kind})" if kind else ", local")
    yield Finding("disk", "kind", shown)
    free = shutil.disk_usage(lab.folder).free / 2**30
    level: Literal["ok", "problem"] = "ok" if free >= MIN_FREE_GB else "problem"
    yield Finding("disk", "free", f"{free:.1f} GB", level, "" if level == "ok" else "make room")
    remote = sorted({one.executor.name for one in lab.studies.values() if needs_shared_disk(one.executor)})
    if remote and kind is None:
        where = f"{lab.folder} is on a local disk, but the nodes of {' and '.join(remote)} must see it"
        fix = "move the lab to a shared disk, unless this machine exports it under this path or is the only node"
        yield Finding("disk", "shared", where, "note", fix)
    if mount is not None and kind is not None:
        cache = mount.cache_s
        late = "an unknown time" if cache is None else f"up to {cache:g} s"
        yield Finding(
            "disk", "cache", f"writes of other hosts become visible after {late}", "ok" if cache == 0 else "note"
        )
    try:
        for check in check_disk(lab.folder):
            fix = "" if check.ok else "keep the lab on a disk that supports this"
            if check.name == "clock" and not check.ok:
                fix = "synchronise the clocks (chrony, NTP)"
            yield Finding("disk", check.name, check.found, "ok" if check.ok else "problem", fix)
    except OSError as error:
        yield Finding("disk", "writing", f"not possible: {error.strerror}", "problem", "make the lab writable")
    ledger = lab.ledger_path
    kind = network_disk(existing(ledger.parent))
    if kind is None:
        yield Finding("disk", "ledger", f"{ledger}: local disk, write-ahead log")
        return
    slow = f"{ledger}: {kind}, rollback journal (safe, slower)"
    fix = "set a local folder (state_dir in lab.yaml, or LOOPLAB_STATE_DIR), then run `looplab doctor --move-ledger`"
    yield Finding("disk", "ledger", slow, "note", fix)


def check_studies(lab: LabConfig) -> Iterator[Finding]:
    """Yield what the studies of a lab lack, one line per thing; one line per study that lacks nothing."""
    for study in lab.studies.values():
        lacks = list(_check_study(lab, study))
        yield from lacks or [Finding("lab", study.name, "lacks nothing")]


def _check_study(lab: LabConfig, study: StudyConfig) -> Iterator[Finding]:
    missing = [name for name in (*study.data, *study.evaluator) if not (lab.folder / name).exists()]
    for name in missing:
        yield Finding("lab", study.name, f"{name} does not exist", "problem", "put it there, or correct lab.yaml")
    try:
        setup = check_study(lab, study, RunOptions(informal=True))
        commands = [base_command(setup, base) for base in setup.bases[:1]]
    except LabError as error:
        if not missing:
            yield Finding("lab", study.name, error.message, "problem", error.hint or "see `looplab check`")
        return
    try:
        check_executor(study.executor)
    except LabError as error:
        fix = (error.hint or "").removesuffix("; nothing was started")
        yield Finding("lab", study.name, error.message, "problem", fix)
    for command in commands:
        for module in _missing_modules(command.argv, Path(command.cwd) if os.path.isdir(command.cwd) else lab.folder):
            fix = f"install it for {command.argv[0]}"
            yield Finding("lab", study.name, f"the trainer imports {module}, which is missing", "problem", fix)
    if study.objective is None and study.is_searched:
        yield Finding("lab", study.name, "search needs an objective", "problem", FIND_OBJECTIVE)
    for entry in study.proposers:
        if entry.agent is not None:
            yield from check_agent(study.name, spec_of(entry.agent, lab.folder))


def check_agent(name: str, spec: AgentSpec) -> Iterator[Finding]:
    """Yield why an agent of a study, or of iterate.yaml, cannot be called."""
    try:
        check_spec(spec)
        find_program(spec, os.environ.get("PATH"))
    except LabError as error:
        yield Finding("lab", name, error.message, "problem", error.hint or "correct `agent`")


def _missing_modules(argv: list[str], cwd: Path) -> list[str]:
    """Return the packages that a Python trainer imports unconditionally and its interpreter lacks."""
    script = next((cwd / word for word in argv[1:] if word.endswith(".py")), None)
    try:
        tree = ast.parse(script.read_bytes()) if script is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return []
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    tops = sorted({name.partition(".")[0] for name in names} - sys.stdlib_module_names)
    if script is None or not tops:
        return []
    try:
        call = [argv[0], "-c", IMPORTS, str(script.parent), *tops]
        return run_program(call, timeout=VERSION_S, cwd=cwd, capture=True).decode(errors="replace").split()
    except ProgramError:
        return []  # not Python


def _version_of(program: str) -> str | None:
    """Return the first line that a program prints about its version; None if it does not say."""
    if Path(program).name == "ssh-keygen":  # has no such option
        return None
    try:
        printed = run_program([program, "--version"], timeout=VERSION_S, capture=True).decode(errors="replace")
    except ProgramError:
        return None
    return clean_line(next(iter(printed.splitlines()), ""))[:80] or None


def _cgroup(name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/sys/fs/cgroup/{name}").read_text().strip()
    return ""


def _cgroup_cores() -> float | None:
    quota, _, period = _cgroup("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _cgroup_memory_gb() -> float | None:
    limit = _cgroup("memory.max")
    return int(limit) / 2**30 if limit.isdigit() else None
