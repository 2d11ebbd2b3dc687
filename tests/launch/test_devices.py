"""What the driver says, through the real NVML bindings and a stand-in for the library behind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

Driver = Any
"""What the fixture `nvml` gives; see conftest.py."""

ASK = """
import json, sys
from looplab.launch.devices import Devices
devices = Devices()
strangers = {device: [str(process) for process in devices.other_processes(device)] for device in sys.argv[1:]}
print(json.dumps({"present": devices.present, "ids": devices.ids(), "strangers": strangers}))
"""


def ask(env: dict[str, str], *devices: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", ASK, *devices], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_devices_are_used_by_default(nvml: Driver) -> None:
    nvml.show([], [], [])
    found = ask(nvml.env)
    assert found["present"]
    assert found["ids"] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("1", ["1"]),
        (" 1 , 0 ", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("1,7", ["1"]),
        ("NoDevFiles", []),
        ("GPU-00000001", ["GPU-00000001"]),
    ],
)
def test_what_is_hidden_from_this_process_is_not_used(nvml: Driver, visible: str, ids: list[str]) -> None:
    assert ask({**nvml.env, "CUDA_VISIBLE_DEVICES": visible})["ids"] == ids


def test_without_a_driver_there_are_no_devices_and_nobody_on_them(nvml: Driver) -> None:
    nvml.table.unlink()  # the library is there, but finds no driver
    assert ask(nvml.env, "0") == {"present": False, "ids": [], "strangers": {"0": []}}
    without = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if not ask(without)["present"]:
        assert ask({**without, "CUDA_VISIBLE_DEVICES": "0"}, "0") == {
            "present": False,
            "ids": [],
            "strangers": {"0": []},
        }


MISSING = """
import sys
from looplab.launch import devices
from looplab.launch.slots import make_slots
devices.DRIVERS = tuple(sys.argv[2:])
print(devices.Devices().why_missing(make_slots(gpus=[gpu for gpu in sys.argv[1].split(",") if gpu])))
"""


def test_devices_that_are_named_but_not_there_are_reported(nvml: Driver) -> None:
    def missing(gpus: str, *drivers: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", MISSING, gpus, *drivers], env=nvml.env, capture_output=True, text=True
        )
        return (done.stdout + done.stderr).strip()

    nvml.show([], [])
    assert missing("0,1") == "None"
    assert missing("0,GPU-00000001") == "None"
    assert missing("1,2,7") == "this machine has 2 GPU(s), from 0, but not 2, 7"
    nvml.table.unlink()  # no driver answers
    assert missing("0,1").startswith("GPUs 0, 1: this machine has no GPU; runs there use the CPU")
    assert missing("") == "None"
    assert missing("0", "/dev/null") == "None"  # a driver that NVML does not speak to


def test_a_process_of_somebody_else_is_a_stranger_and_one_of_a_run_is_not(nvml: Driver) -> None:
    env = {name: value for name, value in os.environ.items() if name != "LOOPLAB_RUN_DIR"}
    foreign = subprocess.Popen(["/bin/sleep", "600"], env=env)
    ours = subprocess.Popen(["/bin/sleep", "600"], env={**env, "LOOPLAB_RUN_DIR": "/some/run"})
    try:
        nvml.show([foreign.pid, ours.pid], [ours.pid])
        found = ask(nvml.env, "0", "1", "GPU-00000000", "GPU-nowhere", "9")["strangers"]
        stranger = f"sleep (pid {foreign.pid})"
        assert found == {"0": [stranger], "1": [], "GPU-00000000": [stranger], "GPU-nowhere": [], "9": []}
    finally:
        for process in (foreign, ours):
            process.kill()
            process.wait()


def test_a_process_that_cannot_be_looked_at_is_a_stranger(nvml: Driver) -> None:
    nvml.show([2**22 + 1])  # such as those outside of a container
    assert ask(nvml.env, "0")["strangers"] == {"0": [f"a process (pid {2**22 + 1})"]}


def test_an_old_driver_is_asked_in_its_own_way(old_nvml: Driver) -> None:
    old_nvml.show([1])
    assert len(ask(old_nvml.env, "0")["strangers"]["0"]) == 1
