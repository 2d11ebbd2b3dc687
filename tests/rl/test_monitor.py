"""The monitor: a file of its own, a thread that ends, and no GPU where there is none."""

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
from looplab.rl.metrics import SCHEMA, rows
from looplab.rl.monitor import Monitor


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class Nvml(ModuleType):
    """Speaks as pynvml does, of some devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, uses: dict[int, list[int]]) -> None:
        super().__init__("pynvml")
        self.uses, self.asked, self.broken, self.ended = uses, dict.fromkeys(uses, 0), False, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.uses:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.ended += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.uses)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        return int(name.removeprefix("GPU-"))

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:  # noqa: N802
        if self.broken:
            raise self.NVMLError("gone")
        readings = self.uses[device]
        at = min(self.asked[device], len(readings) - 1)
        self.asked[device] += 1
        return SimpleNamespace(gpu=readings[at])

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=2 << 20, total=8 << 20)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[int]]], Nvml]:
    def install(uses: dict[int, list[int]]) -> Nvml:
        fake = Nvml(uses)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return fake

    return install


def test_it_writes_a_file_of_its_own_and_ends_with_the_trainer(tmp_path: Path, nvml: Any) -> None:
    nvml({})
    path = tmp_path / "monitor.jsonl"
    with Monitor(path, period=0.01) as monitor:
        wait_for(lambda: path.exists() and len(list(rows(path))) >= 3)
        assert monitor.row() == {}  # no GPU: missing, not 0
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]
    seen = list(rows(path))
    assert [row["step"] for row in seen] == list(range(len(seen)))
    known = {field.name for field in SCHEMA if field.stream in ("monitor", "both")}
    assert all(row.keys() <= known for row in seen)
    assert "cpu_percent" not in seen[0]  # nothing to compare with yet
    assert seen[1]["process_rss_mb"] > 1
    assert 0 < seen[1]["ram_used_mb"] < seen[1]["ram_total_mb"]
    assert any("process_cpu_percent" in row for row in seen)
    assert not any(name.startswith("gpu") for row in seen for name in row)


def test_the_use_of_the_gpus_is_a_mean_over_devices_and_a_window(tmp_path: Path, nvml: Any) -> None:
    fake = nvml({0: [0, 10, 50, 90], 1: [0, 30, 70, 90]})
    path = tmp_path / "monitor.jsonl"
    with Monitor(path, period=0.01, window=2) as monitor:
        wait_for(lambda: monitor.row().get("gpu_util_mean_window") == 90)
        assert monitor.row() == {"gpu_util_last": 90, "gpu_util_mean_window": 90}
    seen = list(rows(path))
    assert [row["gpu_util"] for row in seen[:4]] == [0, 20, 60, 90]
    assert seen[0]["gpu_memory_used_mb"] == 4
    assert fake.ended == 1


@pytest.mark.parametrize(("named", "wanted"), [("1", 30), ("GPU-1,0", 20), ("", None), ("-1", None), ("0,none,1", 10)])
def test_only_visible_devices_are_read(
    tmp_path: Path, nvml: Any, monkeypatch: pytest.MonkeyPatch, named: str, wanted: float | None
) -> None:
    nvml({0: [10], 1: [30]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    path = tmp_path / "monitor.jsonl"
    with Monitor(path, period=0.01):
        wait_for(lambda: path.exists() and list(rows(path)))
    assert next(rows(path)).get("gpu_util") == wanted


def test_a_device_that_fails_is_missing_from_then_on(tmp_path: Path, nvml: Any) -> None:
    fake = nvml({0: [40]})
    path = tmp_path / "monitor.jsonl"
    with Monitor(path, period=0.01) as monitor:
        wait_for(monitor.row)
        fake.broken = True
        wait_for(lambda: not monitor.row())
    assert "gpu_util" not in list(rows(path))[-1]


def test_a_file_that_cannot_be_written_ends_the_monitor_alone(tmp_path: Path, nvml: Any) -> None:
    nvml({})
    (tmp_path / "file").write_text("")
    with Monitor(tmp_path / "file" / "monitor.jsonl", period=0.01) as monitor:
        wait_for(lambda: monitor.error)
    assert isinstance(monitor.error, OSError)


def test_a_second_monitor_goes_on_in_the_same_file(tmp_path: Path, nvml: Any) -> None:
    nvml({})
    path = tmp_path / "monitor.jsonl"
    for least in (2, 4):
        with Monitor(path, period=0.01):
            wait_for(lambda n=least: path.exists() and len(list(rows(path))) >= n)
    seen = [row["step"] for row in rows(path)]
    assert seen == list(range(len(seen)))


def test_a_monitor_without_a_period_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError):
        Monitor(tmp_path / "monitor.jsonl", period=0)
