"""Slots: the devices and cores of a run, and the environment variables that select them.

A run is bound to a slot, never to an index in a list. A device is claimed by a lock file that the trainer itself keeps
open, so neither a second study nor an engine started after a crash can race for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from looplab.errors import LabError
from looplab.launch.base import Slot

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

MAX_SLOTS = 10_000


def make_slots(
    *,
    gpus: Sequence[str] = (),
    per_gpu: int = 1,
    count: int | None = None,
    cores: str | Sequence[Sequence[int]] = "auto",
    available: Sequence[int] | None = None,
) -> list[Slot]:
    """Return the slots of a study.

    Slots are ordered over all devices first (gpu0, gpu1, gpu0.1, gpu1.1), so that a cap spreads over the devices.

    Args:
        gpus: Device ids; empty: slots without devices.
        per_gpu: Slots on each device.
        count: Number of slots without devices (None: 1), or a cap on those with devices (None: no cap).
        cores: `auto`: split the available cores evenly; `none`: no pinning; or one set of cores per slot.
        available: Cores that may be used; None: those of this process.

    Raises:
        LabError: The slots cannot be made.
    """
    if len(set(gpus)) != len(gpus):
        raise LabError(
            f"a device is listed twice: {','.join(gpus)}", hint="use per_gpu to run several trainers on one device"
        )
    if per_gpu < 1 or (count is not None and count < 1):
        raise LabError("at least one slot is required: per_gpu and concurrency must be 1 or more")
    if max(per_gpu, count or 1) > MAX_SLOTS:
        raise LabError(
            f"more than {MAX_SLOTS:,} slots are not supported", hint="see slots in lab.yaml, and --concurrency"
        )
    slots: list[tuple[str, tuple[str, ...], int]]
    if gpus:
        slots = [
            (f"gpu{gpu}" + (f".{device_share}" if device_share else ""), (gpu,), device_share)
            for device_share in range(per_gpu)
            for gpu in gpus
        ]
        if count is not None and count > len(slots):
            raise LabError(
                f"concurrency {count} needs more slots than {len(gpus)} device(s) with per_gpu={per_gpu} have",
                hint="list more devices with --gpus, or raise slots.per_gpu",
            )
        slots = slots[:count]
    else:
        slots = [(f"cpu{i}", (), 0) for i in range(count or 1)]
    core_sets = _split_cores(len(slots), cores, core_order() if available is None else list(available))
    return [
        Slot(name, devices, core_set, device_share)
        for (name, devices, device_share), core_set in zip(slots, core_sets, strict=True)
    ]


def _split_cores(n: int, cores: str | Sequence[Sequence[int]], available: list[int]) -> list[tuple[int, ...]]:
    """Return the cores of each of `n` slots; an empty tuple means no pinning."""
    if cores == "none":
        return [()] * n
    if isinstance(cores, str):
        if n > len(available):
            return [(available[i % len(available)],) for i in range(n)]
        size, extra = divmod(len(available), n)
        core_sets, first = [], 0
        for i in range(n):
            end = first + size + (i < extra)
            core_sets.append(tuple(sorted(available[first:end])))
            first = end
        return core_sets
    if len(cores) < n:
        raise LabError(f"slots.cores lists {len(cores)} set(s) of cores for {n} slots", hint="list one set per slot")
    foreign = sorted({core for core_set in cores for core in core_set} - set(available))
    if foreign:
        raise LabError(f"slots.cores: this process may not use core(s) {foreign}", hint=f"it may use {available}")
    return [tuple(core_set) for core_set in cores[:n]]


def core_order() -> list[int]:
    """Return the cores this process may use, with the threads of one physical core next to each other."""

    def siblings(core: int) -> tuple[int, int]:
        try:
            text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
            return int(text.replace("-", ",").split(",")[0]), core
        except (OSError, ValueError):
            return core, core

    return sorted(os.sched_getaffinity(0), key=siblings)


def slot_environment(slot: Slot) -> dict[str, str]:
    """Return the variables that restrict a run to its slot: its devices and its number of threads. Where the executor
    chooses them, they are set by the launcher on the node."""
    if not slot.fixed:
        return {"LOOPLAB_SLOT": slot.name}
    devices = ",".join(slot.devices)
    env = {
        "LOOPLAB_SLOT": slot.name,
        "LOOPLAB_DEVICES": devices,
        "CUDA_VISIBLE_DEVICES": devices,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbering that nvidia-smi and NVML use
        "HIP_VISIBLE_DEVICES": devices,
    }
    if slot.devices:
        env["ONEAPI_DEVICE_SELECTOR"] = "level_zero:" + devices
        env["ZE_AFFINITY_MASK"] = devices
    if slot.cores:
        env["LOOPLAB_CORES"] = ",".join(map(str, slot.cores))
        env.update(dict.fromkeys(THREAD_VARIABLES, str(len(slot.cores))))
    return env


def lock_folder() -> Path:
    """Return the folder for device locks: one per user and machine, writable by nobody else.

    Raises:
        LabError: It cannot be created, or belongs to another user.
    """
    folder = Path(os.environ.get("LOOPLAB_LOCK_DIR") or f"/tmp/looplab-{os.getuid()}")  # noqa: S108 (owner checked)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise LabError(
            f"the folder for device locks cannot be created: {error.strerror}",
            file=folder,
            hint="set LOOPLAB_LOCK_DIR to a folder of your own",
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise LabError(f"{folder} belongs to another user", hint="set LOOPLAB_LOCK_DIR to a folder of your own")
    return folder


def lock_paths(slot: Slot) -> list[Path]:
    """Return the lock files of a slot: one per device."""
    if not slot.devices:
        return []
    folder = lock_folder()
    return [folder / f"gpu-{device.replace('/', '_')}.{slot.device_share}.lock" for device in slot.devices]
