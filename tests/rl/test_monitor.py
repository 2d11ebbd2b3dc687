"""The system monitor: its file, its thread, and machines with and without GPUs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.errors import LabError
from looplab.rl.metrics import SCHEMA, read_rows
from looplab.rl.monitor import SystemMonitor


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


class Nvml(ModuleType):
    """A stand-in for pynvml with some devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, utils: dict[int, list[int]]) -> None:
        super().__init__("pynvml")
        self.utils, self.asked, self.broken, self.ended = utils, dict.fromkeys(utils, 0), False, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.utils:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.ended += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.utils)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        return int(name.removeprefix("GPU-"))

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:  # noqa: N802
        if self.broken:
            raise self.NVMLError("gone")
        readings = self.utils[device]
        at = min(self.asked[device], len(readings) - 1)
        self.asked[device] += 1
        return SimpleNamespace(gpu=readings[at])

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=2 << 20, total=8 << 20)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[int]]], Nvml]:
    def install(utils: dict[int, list[int]]) -> Nvml:
        fake = Nvml(utils)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return fake

    return install


def test_the_monitor_writes_its_own_file_and_its_thread_ends(tmp_path: Path, nvml: Any) -> None:
    nvml({})
    path = tmp_path / "monitor.jsonl"
    with SystemMonitor(path, period=0.01) as monitor:
        wait_for(lambda: path.exists() and len(list(read_rows(path))) >= 3)
        assert monitor.gpu_metrics() == {}  # no GPU: missing, not 0
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]
    samples = list(read_rows(path))
    assert [row["step"] for row in samples] == list(range(len(samples)))
    known = {field.name for field in SCHEMA if field.stream in ("monitor", "both")}
    assert all(row.keys() <= known for row in samples)
    assert "cpu_percent" not in samples[0]  # needs two readings
    assert samples[1]["process_rss_mb"] > 1
    assert 0 < samples[1]["ram_used_mb"] < samples[1]["ram_total_mb"]
    assert any("process_cpu_percent" in row for row in samples)
    assert not any(name.startswith("gpu") for row in samples for name in row)


def test_gpu_utilization_is_averaged_over_devices_and_a_window(tmp_path: Path, nvml: Any) -> None:
    fake = nvml({0: [0, 10, 50, 90], 1: [0, 30, 70, 90]})
    path = tmp_path / "monitor.jsonl"
    with SystemMonitor(path, period=0.01, window=2) as monitor:
        wait_for(lambda: monitor.gpu_metrics().get("gpu_util_mean_window") == 90)
        assert monitor.gpu_metrics() == {"gpu_util_last": 90, "gpu_util_mean_window": 90}
    samples = list(read_rows(path))
    assert [row["gpu_util"] for row in samples[:4]] == [0, 20, 60, 90]
    assert samples[0]["gpu_memory_used_mb"] == 4
    assert fake.ended == 1


@pytest.mark.parametrize(
    ("visible", "expected"), [("1", 30), ("GPU-1,0", 20), ("", None), ("-1", None), ("0,none,1", 10)]
)
def test_only_visible_devices_are_read(
    tmp_path: Path, nvml: Any, monkeypatch: pytest.MonkeyPatch, visible: str, expected: float | None
) -> None:
    nvml({0: [10], 1: [30]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    path = tmp_path / "monitor.jsonl"
    with SystemMonitor(path, period=0.01):
        wait_for(lambda: path.exists() and list(read_rows(path)))
    assert next(read_rows(path)).get("gpu_util") == expected


def test_a_failed_device_is_missing_from_later_rows(tmp_path: Path, nvml: Any) -> None:
    fake = nvml({0: [40]})
    path = tmp_path / "monitor.jsonl"
    with SystemMonitor(path, period=0.01) as monitor:
        wait_for(monitor.gpu_metrics)
        fake.broken = True
        wait_for(lambda: not monitor.gpu_metrics())
    assert "gpu_util" not in list(read_rows(path))[-1]


def test_an_unwritable_file_ends_only_the_monitor(tmp_path: Path, nvml: Any) -> None:
    nvml({})
    (tmp_path / "file").write_text("")
    with SystemMonitor(tmp_path / "file" / "monitor.jsonl", period=0.01) as monitor:
        wait_for(lambda: monitor.error)
    assert isinstance(monitor.error, OSError)


def test_a_second_monitor_appends_to_the_same_file(tmp_path: Path, nvml: Any) -> None:
    nvml({})
    path = tmp_path / "monitor.jsonl"
    for least in (2, 4):
        with SystemMonitor(path, period=0.01):
            wait_for(lambda n=least: path.exists() and len(list(read_rows(path))) >= n)
    samples = [row["step"] for row in read_rows(path)]
    assert samples == list(range(len(samples)))


def test_a_period_of_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError):
        SystemMonitor(tmp_path / "monitor.jsonl", period=0)
