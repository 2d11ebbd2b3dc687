"""What NVML says about the devices of this machine: which there are, and who uses them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device that is not one of ours."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Devices:
    """NVML, where it is. Without a driver there are no devices and nobody is on them."""

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
        return self._nvml is not None

    def ids(self) -> list[str]:
        """The devices to use by default: all of them, or what CUDA_VISIBLE_DEVICES leaves."""
        if self._nvml is None:
            return []
        there = [str(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return there
        names = [part.strip() for part in visible.split(",")]
        # As CUDA reads it: what comes after a name that is no device (`-1`, say) is not visible either.
        return list(takewhile(lambda name: name in there or name.startswith(("GPU-", "MIG-")), names))

    def other_processes(self, device: str) -> list[DeviceProcess]:
        """Processes that compute on the device and were not started by looplab."""
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
        return [DeviceProcess(p.pid, _name(p.pid)) for p in processes if not _is_ours(p.pid)]


def _is_ours(pid: int) -> bool:
    try:
        return any(
            item.startswith(b"LOOPLAB_RUN_DIR=") for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    except OSError:
        return False


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"
