"""What the machine is doing while a trainer trains: processors, memory and GPU, in a file of their own.

    with Monitor(out / "monitor.jsonl") as monitor:
        Runner(…, extra=monitor.row).run()

A thread takes a sample every few seconds, from /proc and NVML. It ends with the trainer, and never stops it: where
something cannot be read it is missing in the row, and where the file cannot be written the monitor ends by itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

from looplab.errors import LabError
from looplab.rl.metrics import check
from looplab.trainkit.log import Logger

MB = 1 << 20
WAIT = 5.0
"""Seconds for a last sample to end: a driver that hangs must not keep a trainer from ending."""


class Monitor:
    def __init__(self, path: str | os.PathLike[str], period: float = 5.0, window: int = 60) -> None:
        """`period`: seconds between two samples. `window`: samples that gpu_util_mean_window is the mean of."""
        if period <= 0 or window < 1:
            raise LabError(f"a monitor needs a period above 0 and a window from 1 on, not {period} and {window}")
        self.error: OSError | None = None
        """Why it has ended by itself."""
        self._period = period
        self._log = Logger(path)
        self._use: deque[float] = deque(maxlen=window)
        self._row: dict[str, float] = {}
        self._machine = _Machine()
        self._gpu: _Gpu | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(WAIT)
        self._log.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def row(self) -> dict[str, float]:
        """For a row of the metrics: the GPU's use, last and over the window. Empty without a GPU."""
        return dict(self._row)

    def _watch(self) -> None:
        self._gpu = _gpu()
        try:
            while True:
                self._sample()
                if self._stop.wait(self._period):
                    return
        except OSError as error:
            self.error = error
        except ValueError:
            if not self._stop.is_set():  # stop() did not wait any longer, and has closed the file
                raise
        finally:
            if self._gpu is not None:
                self._gpu.close()

    def _sample(self) -> None:
        row = self._machine.read()
        if self._gpu is not None:
            read = self._gpu.read()
            row |= read
            if read:
                self._use.append(read["gpu_util"])
                mean = sum(self._use) / len(self._use)
                self._row = {"gpu_util_last": read["gpu_util"], "gpu_util_mean_window": mean}
            else:
                self._row = {}
        check(row)
        self._log.log(row)


class _Machine:
    """Reads /proc. Shares of processors need two looks, so the first one has none."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None
        self._own_before: tuple[float, float] | None = None

    def read(self) -> dict[str, float]:
        row: dict[str, float] = {}
        if (stat := _text("/proc/stat")) is not None:
            ticks = [int(word) for word in stat.split("\n", 1)[0].split()[1:9]]
            now = (float(sum(ticks)), float(ticks[3] + ticks[4]))  # all; of these idle or waiting for a disk
            if self._before is not None and now[0] > self._before[0]:
                row["cpu_percent"] = 100 * (1 - (now[1] - self._before[1]) / (now[0] - self._before[0]))
            self._before = now
        clock, used = time.monotonic(), time.process_time()
        if self._own_before is not None and clock > self._own_before[0]:
            row["process_cpu_percent"] = 100 * (used - self._own_before[1]) / (clock - self._own_before[0])
        self._own_before = (clock, used)
        if (statm := _text("/proc/self/statm")) is not None:
            row["process_rss_mb"] = int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
        if (meminfo := _text("/proc/meminfo")) is not None:
            sizes = {name: int(rest.split()[0]) / 1024 for name, _, rest in _lines(meminfo)}
            if {"MemTotal", "MemAvailable"} <= sizes.keys():
                row["ram_total_mb"] = sizes["MemTotal"]
                row["ram_used_mb"] = sizes["MemTotal"] - sizes["MemAvailable"]
        if (load := _text("/proc/loadavg")) is not None:
            row["load_1m"] = float(load.split()[0])
        return row


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:  # another system than Linux, or a container that hides it
        return None


def _lines(text: str) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in text.splitlines() if ":" in line]


class _Gpu:
    """The visible devices, by NVML."""

    def __init__(self, nvml: Any, devices: list[Any]) -> None:
        self._nvml, self._devices = nvml, devices

    def read(self) -> dict[str, float]:
        try:
            uses = [self._nvml.nvmlDeviceGetUtilizationRates(device).gpu for device in self._devices]
            memory = [self._nvml.nvmlDeviceGetMemoryInfo(device) for device in self._devices]
        except self._nvml.NVMLError:
            return {}
        return {
            "gpu_util": sum(uses) / len(uses),
            "gpu_memory_used_mb": sum(m.used for m in memory) / MB,
            "gpu_memory_total_mb": sum(m.total for m in memory) / MB,
        }

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return


def _gpu() -> _Gpu | None:
    """None where there is no driver, no device, or none of them is visible."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        devices = _visible(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError:
        devices = []
    gpu = _Gpu(pynvml, devices)
    if devices:
        return gpu
    gpu.close()
    return None


def _visible(nvml: Any, named: str | None) -> list[Any]:
    """As CUDA reads the variable: numbers or UUIDs, up to the first that is neither."""
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    devices = []
    for name in (part.strip() for part in named.split(",")):
        if name.isdecimal():
            devices.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        elif name.startswith("GPU-"):
            devices.append(nvml.nvmlDeviceGetHandleByUUID(name))
        else:
            break
    return devices
