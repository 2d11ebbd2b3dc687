"""Checkpoints: atomic, the newest intact one is found, and failed writes are reported to the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import PATIENCE_S

from looplab import trainkit
from looplab.errors import LabError
from looplab.trainkit import checkpoint


def state(value: int) -> dict[str, Any]:
    return {"weights": np.full(1000, value, "f4"), "moments": {0: np.full(10, value)}, "rate": value / 3, "raw": b"ab"}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail(message: str) -> None:
    raise AssertionError(message)


def test_a_checkpoint_is_a_folder_with_tensors_and_a_manifest(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(state(7), 12, counters={"epoch": 3, "best": np.float32(0.5)})
        checkpoints.wait()
        assert names(tmp_path) == ["latest", "step_0000000012"]
        assert (tmp_path / "latest").read_text() == "step_0000000012\n"
        assert names(path) == ["manifest.json", "tensors.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert {"format", "step", "name", "counters", "created", "files", "state", "sha256"} == set(manifest)
    assert (manifest["format"], manifest["step"], manifest["counters"]) == (1, 12, {"epoch": 3, "best": 0.5})
    (file,) = manifest["files"]
    assert file["size"] == (path / file["name"]).stat().st_size
    loaded = trainkit.load(path)
    assert (loaded.step, loaded.name, loaded.counters, loaded.path) == (12, "latest", {"epoch": 3, "best": 0.5}, path)
    assert loaded.state["moments"][0].tolist() == [7] * 10
    assert (loaded.state["rate"], loaded.state["raw"]) == (7 / 3, b"ab")
    loaded.state["weights"][0] = 5  # a writable copy
    assert trainkit.load(tmp_path / "latest").state["weights"].tolist() == [7] * 1000


def test_the_state_is_copied_when_save_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    real = checkpoint._write_synced

    def late(path: Path, data: memoryview) -> str:
        assert may_write.wait(PATIENCE_S)
        return real(path, data)

    monkeypatch.setattr(checkpoint, "_write_synced", late)
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        live = state(1)
        path = checkpoints.save(live, 1)
        live["weights"][:] = 99
        live["moments"][0] += 1
        live["rate"] = -1.0
        assert trainkit.newest(tmp_path, fail) is None
        may_write.set()
        checkpoints.wait()
    loaded = trainkit.load(path).state
    assert (loaded["weights"].max(), loaded["moments"][0][0], loaded["rate"]) == (1, 1, 1 / 3)


def test_the_last_ones_and_the_named_ones_are_kept(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(6):
            checkpoints.save(
                state(step), step, name="best" if step == 1 else "before_tuning" if step == 2 else "latest"
            )
    kept = [f"step_000000000{step}" for step in (1, 2, 4, 5)]
    assert names(tmp_path) == ["before_tuning", "best", "latest", *kept]
    assert trainkit.load(tmp_path / "best").step == 1
    assert trainkit.load(tmp_path / "before_tuning").step == 2
    newest = trainkit.newest(tmp_path, fail)
    assert newest is not None
    assert (newest.step, newest.name) == (5, "latest")


def test_keep_none_keeps_all(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path, keep=None, background=False) as checkpoints:
        for step in range(4):
            assert checkpoints.save(state(step), step).is_dir()
    assert len(names(tmp_path)) == 5


def test_checkpoints_saved_after_going_back_to_an_earlier_step_are_kept(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state(1), 200)
        path = checkpoints.save(state(2), 150)
    assert names(tmp_path) == ["latest", path.name]


def test_a_step_saved_twice_is_two_checkpoints_and_a_plain_save_comes_after_a_named_one(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path, keep=None) as checkpoints:
        for value, name in ((1, "latest"), (2, "latest"), (3, "best")):
            checkpoints.save(state(value), 8, name)
    assert [name for name in names(tmp_path) if name.startswith("step_")] == [
        f"step_0000000008{end}" for end in ("", "-2", "-3")
    ]
    newest = trainkit.newest(tmp_path, fail)
    assert newest is not None
    assert newest.state["weights"][0] == 2
    assert trainkit.load(tmp_path / "latest").state["weights"][0] == 3


def test_the_newest_is_found_at_any_depth_by_its_step(tmp_path: Path) -> None:
    assert trainkit.newest(tmp_path / "nothing", fail) is None
    for step, place in ((10, "a/checkpoints"), (30, "a/deep/er"), (20, "b")):
        with trainkit.Checkpoints(tmp_path / place) as checkpoints:
            checkpoints.save(state(step), step)
    newest = trainkit.newest(tmp_path, fail)
    assert newest is not None
    assert newest.path == tmp_path / "a/deep/er/step_0000000030"


def damage(path: Path, kind: str) -> None:
    tensors, manifest = path / "tensors.safetensors", path / "manifest.json"
    file = manifest if "manifest" in kind else tensors
    data = bytearray(file.read_bytes())
    if "gone" in kind:
        file.unlink()
    elif "cut" in kind:
        file.write_bytes(data[:-3])
    elif "empty" in kind:
        file.write_bytes(b"")
    elif "header" in kind:
        data[20] ^= 1
        file.write_bytes(data)
    elif "length" in kind:
        data[6] ^= 64
        file.write_bytes(data)
    elif "digit" in kind:
        file.write_bytes(bytes(data).replace(b'"step": 3', b'"step": 4'))
    else:
        data[len(data) // 2] ^= 4
        file.write_bytes(data)


@pytest.mark.parametrize(
    "kind",
    ["bit of the tensors", "bit in the header", "bit in the length", "tensors cut", "tensors empty", "tensors gone",
     "bit of the manifest", "digit of the manifest", "manifest cut", "manifest empty", "manifest gone"],
)  # fmt: skip
def test_a_corrupt_checkpoint_is_skipped_and_reported(tmp_path: Path, kind: str) -> None:
    with trainkit.Checkpoints(tmp_path, keep=None) as checkpoints:
        paths = [checkpoints.save(state(step), step) for step in (1, 2, 3)]
    damage(paths[2], kind)
    messages: list[str] = []
    newest = trainkit.newest(tmp_path, messages.append)
    assert newest is not None
    assert newest.step == 2
    assert len(messages) == 1
    assert messages[0].startswith(f"skipped: {paths[2]}")
    with pytest.raises(LabError):
        trainkit.load(paths[2])


def test_a_flipped_bit_anywhere_is_detected(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save({"w": np.arange(9, dtype="f4"), "lr": 0.25, "text": "ab"}, 1)
    for file in path.iterdir():
        whole = file.read_bytes()
        for place in range(0, len(whole), 3):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            file.write_bytes(flipped)
            with pytest.raises(LabError):
                trainkit.load(path)
        file.write_bytes(whole)
    assert trainkit.load(path).state["lr"] == 0.25


def test_a_newer_format_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(state(1), 1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    (path / "manifest.json").write_bytes(checkpoint._with_checksum({**manifest, "format": 2}))
    with pytest.raises(LabError, match="format 2, this looplab reads 1"):
        trainkit.newest(tmp_path, fail)


@pytest.mark.parametrize("name", ["", "a/b", "..", "step_5", ".hidden", "a b"])
def test_an_invalid_name_is_rejected(tmp_path: Path, name: str) -> None:
    with trainkit.Checkpoints(tmp_path) as checkpoints, pytest.raises(LabError, match="is not a valid checkpoint name"):
        checkpoints.save({}, 1, name)


def test_a_save_after_close_is_still_written(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state(1), 1)
    assert trainkit.load(checkpoints.save(state(2), 2)).step == 2


def test_invalid_arguments_are_reported(tmp_path: Path) -> None:
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(LabError, match="an int ≥ 0, not -1"):
            checkpoints.save({}, -1)
        with pytest.raises(LabError, match="counter best is a tensor"):
            checkpoints.save({}, 1, counters={"best": np.zeros(2)})
    with pytest.raises(LabError, match="keep must be at least 1"):
        trainkit.Checkpoints(tmp_path, keep=0)
    with pytest.raises(LabError, match="no such checkpoint"):
        trainkit.load(tmp_path / "missing")


# --- a full disk

FULL = """
import errno, json, os, resource, sys
from looplab import trainkit
from looplab.errors import LabError

folder, limited = sys.argv[1], sys.argv[2] == "limited"
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
checkpoints = trainkit.Checkpoints(folder, keep=2)
checkpoints.save({"a": bytes(1000)}, 1)
checkpoints.wait()
if limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
errors = []
for call in (lambda: checkpoints.save({"a": b"small"}, 3), checkpoints.wait, checkpoints.close):
    checkpoints.save({"a": bytes(900_000)}, 2)
    try:
        call()
    except LabError as error:
        errors.append(str(error))
        cause = error.__cause__.errno
left = sorted(os.listdir(folder))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
with trainkit.Checkpoints(folder) as again:
    again.save({"a": b"fits"}, 4)
print(json.dumps([errors, left, errno.errorcode[cause], trainkit.newest(folder).step]))
"""


@pytest.mark.parametrize("kind", ["limited", "full"])
def test_a_full_disk_raises_and_leaves_earlier_checkpoints_intact(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if kind == "full" and (
        os.getuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("cannot mount a 512 kB disk")
    try:
        done = subprocess.run(
            [sys.executable, "-c", FULL, str(disk), kind], capture_output=True, text=True, timeout=PATIENCE_S
        )
    finally:
        if kind == "full":
            subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 0, done.stderr
    errors, left, cause, newest = json.loads(done.stdout)
    assert len(errors) == 3
    assert all("the checkpoint of step 2 could not be written" in one for one in errors)
    assert left == ["latest", "step_0000000001"]
    assert cause == {"limited": "EFBIG", "full": "ENOSPC"}[kind]
    assert newest == 4


# --- kill -9

KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
from looplab import trainkit

folder, kills, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
trainkit.Checkpoints, trainkit.newest  # imported once, before the forks
rng = random.Random(5)
intact = torn = last = 0
messages = []
for number in range(kills):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = trainkit.newest(folder, messages.append)
        step = 0 if found is None else found.step
        checkpoints = trainkit.Checkpoints(folder, keep=1 + number % 2, background=number % 3 != 0)
        while True:
            step += 1
            checkpoints.save({"a": step.to_bytes(8, "little") * width, "step": step}, step, ("latest", "best")[step % 2])
            if step > (found.step if found else 0) + 1:
                os.write(writer, b".")  # the previous one is complete
    os.close(writer)
    os.read(reader, 1)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    torn += any(path.name.startswith(".") for path in folder.iterdir())
    found = trainkit.newest(folder, messages.append)
    pointed = trainkit.load(folder / "latest")
    if found and found.step > last and found.state["a"] == found.step.to_bytes(8, "little") * width:
        intact += pointed.state["a"] == pointed.step.to_bytes(8, "little") * width
        last = found.step
print(json.dumps({"intact": intact, "torn": torn, "messages": messages, "left": len(list(folder.iterdir())), "last": last}))
"""


def killed(folder: Path, kills: int) -> dict[str, Any]:
    argv = [sys.executable, "-c", KILLS, str(folder), str(kills), "25000"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("kills", [25, pytest.param(200, marks=pytest.mark.long)])
def test_after_every_kill_during_saving_there_is_an_intact_checkpoint(tmp_path: Path, kills: int) -> None:
    result = killed(tmp_path, kills)
    assert result["intact"] == kills
    assert result["torn"] > 0  # some kills did interrupt a write
    assert result["messages"] == []  # partial checkpoints are invisible to readers
    assert result["left"] < 12


# --- the import


def test_importing_trainkit_imports_neither_torch_nor_numpy_nor_its_lazy_modules() -> None:
    code = (
        "import sys; from looplab import trainkit; early = set(sys.modules)\n"
        "trainkit.Checkpoints, trainkit.TrainingState, trainkit.stopping, trainkit.load_into, trainkit.flatten\n"
        "print(sorted(early & {'json', 'looplab.trainkit.checkpoint', 'threading', 'typing'}), sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"}
    )
    assert done.stdout.strip() == "[] []", done.stdout + done.stderr


def test_every_public_name_is_there() -> None:
    for name in trainkit.__all__:
        assert getattr(trainkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trainkit.nothing
