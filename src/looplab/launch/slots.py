"""Slots: which devices and which cores a run gets, and what it sees of them in its environment.

A run is bound to a slot, never to its place in a list. A device is taken by a lock file that the training itself
holds open, so that neither a second study nor an engine started after a crash can race for it.
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
    """The slots of a study: `per_gpu` on every device, or `count` without devices; `count` also caps the former.

    Lanes of different devices come first (gpu0, gpu1, gpu0.1, gpu1.1), so that a cap spreads over the devices.
    """
    if len(set(gpus)) != len(gpus):
        raise LabError(f"a device is named twice: {','.join(gpus)}", hint="use per_gpu to run several on one device")
    if per_gpu < 1 or (count is not None and count < 1):
        raise LabError("at least one slot is needed: per_gpu and concurrency start at 1")
    if max(per_gpu, count or 1) > MAX_SLOTS:
        raise LabError(f"more than {MAX_SLOTS:,} slots cannot be used", hint="see slots in lab.yaml, and --concurrency")
    places: list[tuple[str, tuple[str, ...], int]]
    if gpus:
        places = [
            (f"gpu{gpu}" + (f".{device_share}" if device_share else ""), (gpu,), device_share)
            for device_share in range(per_gpu)
            for gpu in gpus
        ]
        if count is not None and count > len(places):
            raise LabError(
                f"concurrency {count} asks for more slots than {len(gpus)} device(s) with per_gpu={per_gpu} give",
                hint="name more devices with --gpus, or raise slots.per_gpu",
            )
        places = places[:count]
    else:
        places = [(f"cpu{i}", (), 0) for i in range(count or 1)]
    shares = _core_shares(len(places), cores, core_order() if available is None else list(available))
    return [
        Slot(name, devices, share, device_share)
        for (name, devices, device_share), share in zip(places, shares, strict=True)
    ]


def _core_shares(n: int, cores: str | Sequence[Sequence[int]], available: list[int]) -> list[tuple[int, ...]]:
    if cores == "none":
        return [()] * n
    if isinstance(cores, str):
        if n > len(available):
            return [(available[i % len(available)],) for i in range(n)]
        size, extra = divmod(len(available), n)
        shares, at = [], 0
        for i in range(n):
            take = size + (i < extra)
            shares.append(tuple(sorted(available[at : at + take])))
            at += take
        return shares
    if len(cores) < n:
        raise LabError(f"slots.cores names {len(cores)} set(s) of cores for {n} slots", hint="one set a slot")
    foreign = sorted({core for share in cores for core in share} - set(available))
    if foreign:
        raise LabError(f"slots.cores: this process may not use core(s) {foreign}", hint=f"it may use {available}")
    return [tuple(share) for share in cores[:n]]


def core_order() -> list[int]:
    """The cores this process may use, threads of one physical core side by side."""

    def siblings(core: int) -> tuple[int, int]:
        try:
            text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
            return int(text.replace("-", ",").split(",")[0]), core
        except (OSError, ValueError):
            return core, core

    return sorted(os.sched_getaffinity(0), key=siblings)


def slot_environment(slot: Slot) -> dict[str, str]:
    """What a run in this slot sees: its own devices and its own number of threads, and nothing of the others."""
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
    """Where device locks live: one folder a user and machine, which nobody else may write to."""
    folder = Path(os.environ.get("LOOPLAB_LOCK_DIR") or f"/tmp/looplab-{os.getuid()}")  # noqa: S108 (owner checked)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise LabError(
            f"the folder for device locks cannot be made: {error.strerror}",
            file=folder,
            hint="set LOOPLAB_LOCK_DIR to a folder of your own",
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise LabError(f"{folder} belongs to somebody else", hint="set LOOPLAB_LOCK_DIR to a folder of your own")
    return folder


def lock_paths(slot: Slot) -> list[Path]:
    if not slot.devices:
        return []
    folder = lock_folder()
    return [folder / f"gpu-{device.replace('/', '_')}.{slot.device_share}.lock" for device in slot.devices]
