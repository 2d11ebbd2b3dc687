"""Record CPU, memory and GPU utilization during training, in a separate file.

    with SystemMonitor(out / "monitor.jsonl") as monitor:
        Runner(…, extra_metrics=monitor.gpu_metrics).run()

A thread samples /proc and NVML every few seconds. It ends with the trainer and never stops it: a value that cannot be
read is missing from its row, and if the file cannot be written, only the monitor ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

from looplab.errors import LabError
from looplab.rl.metrics import check_row
from looplab.trainkit.log import Logger

MB = 1 << 20
JOIN_TIMEOUT = 5.0
"""Seconds to wait for the last sample on exit: a hung driver must not keep the trainer from exiting."""


class SystemMonitor:
    """Samples the machine in a thread, between `start` and `stop` or as a context manager."""

    def __init__(self, path: str | os.PathLike[str], period: float = 5.0, window: int = 60) -> None:
        """
        Args:
            path: File for the rows.
            period: Seconds between two samples.
            window: Number of samples that gpu_util_mean_window averages.
        """
        if period <= 0 or window < 1:
            raise LabError(f"period must be positive and window at least 1, not {period} and {window}")
        self.error: OSError | None = None
        """Why the monitor stopped on its own; None otherwise."""
        self._period = period
        self._logger = Logger(path)
        self._gpu_utils: deque[float] = deque(maxlen=window)
        self._gpu_metrics: dict[str, float] = {}
        self._proc = _ProcReader()
        self._gpus: _NvmlReader | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        if self._thread is None:
            self._thread = threading.Thread(target=self._sample_until_stopped, name="monitor", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT)
        self._logger.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def gpu_metrics(self) -> dict[str, float]:
        """Return the GPU utilization, last and averaged over the window, for a metrics row; empty without a GPU."""
        return dict(self._gpu_metrics)

    def _sample_until_stopped(self) -> None:
        self._gpus = _open_nvml()
        try:
            while True:
                self._sample()
                if self._stop.wait(self._period):
                    return
        except OSError as error:
            self.error = error
        except ValueError:
            if not self._stop.is_set():  # otherwise stop() timed out and has closed the file
                raise
        finally:
            if self._gpus is not None:
                self._gpus.close()

    def _sample(self) -> None:
        row = self._proc.read()
        if self._gpus is not None:
            gpu_row = self._gpus.read()
            row |= gpu_row
            if gpu_row:
                self._gpu_utils.append(gpu_row["gpu_util"])
                mean = sum(self._gpu_utils) / len(self._gpu_utils)
                self._gpu_metrics = {"gpu_util_last": gpu_row["gpu_util"], "gpu_util_mean_window": mean}
            else:
                self._gpu_metrics = {}
        check_row(row)
        self._logger.log(row)


class _ProcReader:
    """Reads /proc. CPU utilization needs two readings, so the first row has none."""

    def __init__(self) -> None:
        self._last_ticks: tuple[float, float] | None = None
        """Total and idle ticks of all cores at the last reading."""
        self._last_process_time: tuple[float, float] | None = None
        """Monotonic clock and CPU time of this process at the last reading, in seconds."""

    def read(self) -> dict[str, float]:
        row: dict[str, float] = {}
        if (stat := _read_text("/proc/stat")) is not None:
            ticks = [int(word) for word in stat.split("\n", 1)[0].split()[1:9]]
            total, idle = float(sum(ticks)), float(ticks[3] + ticks[4])  # idle includes waiting for a disk
            if self._last_ticks is not None and total > self._last_ticks[0]:
                row["cpu_percent"] = 100 * (1 - (idle - self._last_ticks[1]) / (total - self._last_ticks[0]))
            self._last_ticks = (total, idle)
        clock, cpu_time = time.monotonic(), time.process_time()
        if self._last_process_time is not None and clock > self._last_process_time[0]:
            last_clock, last_cpu_time = self._last_process_time
            row["process_cpu_percent"] = 100 * (cpu_time - last_cpu_time) / (clock - last_clock)
        self._last_process_time = (clock, cpu_time)
        if (statm := _read_text("/proc/self/statm")) is not None:
            row["process_rss_mb"] = int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
        if (meminfo := _read_text("/proc/meminfo")) is not None:
            sizes = {name: int(rest.split()[0]) / 1024 for name, _, rest in _split_lines(meminfo)}
            if {"MemTotal", "MemAvailable"} <= sizes.keys():
                row["ram_total_mb"] = sizes["MemTotal"]
                row["ram_used_mb"] = sizes["MemTotal"] - sizes["MemAvailable"]
        if (load := _read_text("/proc/loadavg")) is not None:
            row["load_1m"] = float(load.split()[0])
        return row


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:  # not Linux, or a container that hides it
        return None


def _split_lines(text: str) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in text.splitlines() if ":" in line]


class _NvmlReader:
    """Reads the visible devices by NVML."""

    def __init__(self, nvml: Any, devices: list[Any]) -> None:
        self._nvml, self._devices = nvml, devices

    def read(self) -> dict[str, float]:
        try:
            utils = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu for device in self._devices]
            memory_infos = [self._nvml.nvmlDeviceGetMemoryInfo(device) for device in self._devices]
        except self._nvml.NVMLError:
            return {}
        return {
            "gpu_util": sum(utils) / len(utils),
            "gpu_memory_used_mb": sum(info.used for info in memory_infos) / MB,
            "gpu_memory_total_mb": sum(info.total for info in memory_infos) / MB,
        }

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return


def _open_nvml() -> _NvmlReader | None:
    """Return a reader of the visible devices; None without a driver or a visible device."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        devices = _visible_devices(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError:
        devices = []
    reader = _NvmlReader(pynvml, devices)
    if devices:
        return reader
    reader.close()
    return None


def _visible_devices(nvml: Any, cuda_visible_devices: str | None) -> list[Any]:
    """Return the devices as CUDA reads the variable: indices or UUIDs, up to the first that is neither."""
    if cuda_visible_devices is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = []
    for name in (part.strip() for part in cuda_visible_devices.split(",")):
        if name.isdecimal():
            devices.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        elif name.startswith("GPU-"):
            devices.append(nvml.nvmlDeviceGetHandleByUUID(name))
        else:
            break
    return devices
