"""Devices of this machine and the processes that use them, according to NVML."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType

from looplab.launch import procfs
from looplab.launch.base import Slot

DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel/accel0")
"""Device files of GPU drivers: a machine with one of them has a device, even if NVML does not answer."""


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device that looplab did not start."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Devices:
    """The devices that NVML reports; none without a driver."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except ImportError:
            pass
        except pynvml.NVMLError:
            pass

    @property
    def present(self) -> bool:
        """Whether NVML and a driver are available."""
        return self._nvml is not None

    def ids(self) -> list[str]:
        """Return the default devices: all, or those in CUDA_VISIBLE_DEVICES."""
        if self._nvml is None:
            return []
        indices = [str(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return indices
        names = [part.strip() for part in visible.split(",")]
        # Like CUDA: everything after the first invalid name (`-1`, for example) is invisible.
        return list(takewhile(lambda name: name in indices or name.startswith(("GPU-", "MIG-")), names))

    def why_missing(self, slots: Iterable[Slot]) -> str | None:
        """Return which devices of the slots this machine does not have; None if it has all, or if that is unknown."""
        named = dict.fromkeys(device for slot in slots if slot.fixed for device in slot.devices)
        if self._nvml is None:
            if not named or any(Path(driver).exists() for driver in DRIVERS):
                return None
            listed = f"GPU{'s' if len(named) > 1 else ''} {', '.join(named)}"
            return f"{listed}: this machine has no GPU; runs there use the CPU, or fail"
        count = self._nvml.nvmlDeviceGetCount()
        absent = [device for device in named if device.isdigit() and int(device) >= count]
        return f"this machine has {count} GPU(s), from 0, but not {', '.join(absent)}" if absent else None

    def other_processes(self, device: str) -> list[DeviceProcess]:
        """Return the processes that compute on the device and were not started by looplab."""
        if self._nvml is None:
            return []
        try:
            if device.isdigit():
                handle = self._nvml.nvmlDeviceGetHandleByIndex(int(device))
            else:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(device)
            try:
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
            except self._nvml.NVMLError_FunctionNotFound:  # a driver older than 510
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
        except self._nvml.NVMLError:
            return []
        return [DeviceProcess(p.pid, _process_name(p.pid)) for p in processes if not _is_ours(p.pid)]

    def why_busy(self, slot: Slot) -> str | None:
        """Return which other processes compute on the devices of a slot; None if there are none."""
        for device in slot.devices if self._nvml is not None else ():
            others = self.other_processes(device)
            if others:
                return f"device {device} is used by {', '.join(map(str, others))}"
        return None


def _is_ours(pid: int) -> bool:
    try:
        return any(item.startswith(b"LOOPLAB_RUN_DIR=") for item in procfs.environ(pid))
    except OSError:
        return False


def _process_name(pid: int) -> str:
    try:
        return procfs.name(pid)
    except OSError:
        return "a process"
