"""The `.wandb` reader against files that wandb itself wrote: old clients, the newest, a killed one, a living one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from math import inf, isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.conftest import PATIENCE_S

from looplab.measure.base import Batch, merge
from looplab.measure.wandb_log import RecordLog, WandbSource, read_wandb_config

DATA = Path(__file__).parent / "data"
OLD = sorted(DATA.glob("wandb-*.wandb"))


def check_the_small_run(path: Path) -> None:
    """What `data/make_wandb.py` logs."""
    source = WandbSource(path)
    batch = source.poll()
    assert source.skipped == 0
    assert set(batch) == {"loss", "acc", "count", "good", "nested.inner.x", "odd", "endless", "eval/loss"}
    assert batch["loss"].steps == [step * 5.0 for step in range(40)]
    assert batch["loss"].values == pytest.approx([1 / (step + 1) for step in range(40)])
    assert batch["count"].values == [float(step) for step in range(40)]
    assert batch["good"].values == [float(step % 2 == 0) for step in range(40)]
    assert batch["nested.inner.x"].values == [step * 0.5 for step in range(40)]
    assert batch["eval/loss"].steps == [45.0, 95.0, 145.0, 195.0]
    assert isnan(batch["odd"].values[0])
    assert batch["endless"].values == [inf]
    assert read_wandb_config(path) == {"lr": 0.001, "net": {"width": 64}, "late": 5}


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_files_of_old_clients_are_read(path: Path) -> None:
    check_the_small_run(path)


def test_there_are_files_of_two_old_clients() -> None:
    assert [path.stem for path in OLD] == ["wandb-0.16.6", "wandb-0.19.11"]


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_an_old_file_read_byte_by_byte_yields_the_same(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()[:3000]
    (tmp_path / "whole").write_bytes(data)
    growing = tmp_path / "growing"
    growing.write_bytes(b"")
    source = WandbSource(growing)
    batch: Batch = {}
    for byte in data:
        with growing.open("ab") as file:
            file.write(bytes([byte]))
        merge(batch, source.poll())
    assert batch == WandbSource(tmp_path / "whole").poll()
    assert source.skipped == 0


def test_a_flipped_bit_costs_one_record(tmp_path: Path) -> None:
    data = bytearray(OLD[0].read_bytes())
    data[data.index(b"0.1111111111111111")] ^= 1  # the loss of step 40
    path = tmp_path / "run-x.wandb"
    path.write_bytes(data)
    source = WandbSource(path)
    batch = source.poll()
    assert source.skipped == 1
    assert batch["loss"].steps == [step * 5.0 for step in range(40) if step != 8]


def test_a_damaged_length_costs_no_more_than_its_block(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as proto  # type: ignore[import-untyped,unused-ignore]

    rows = 2000
    records = []
    for step in range(rows):
        record = proto.Record(num=step + 1)
        for key, value in (("_step", step), ("loss", 0.5)):
            item = record.history.item.add()
            item.nested_key.append(key)
            item.value_json = str(value)
        records.append(record.SerializeToString())
    data = bytearray(frame(records))
    data[50_000 + data[50_000:].index(b"_step") - 20 : 50_000 + data[50_000:].index(b"_step") - 8] = b"\xff" * 12
    path = tmp_path / "run-x.wandb"
    path.write_bytes(data)
    source = WandbSource(path)
    steps = source.poll()["loss"].steps
    assert source.skipped >= 1
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-1] == rows - 1
    assert rows - len(steps) < 32 * 1024 / 30


def frame(records: list[bytes]) -> bytes:
    import struct
    import zlib

    out = b":W&B\xe1\xbe\x00"
    for record in records:
        first = True
        while first or record:
            left = 32768 - len(out) % 32768
            if left < 7:
                out += b"\0" * left
                continue
            piece, record = record[: left - 7], record[left - 7 :]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + piece), len(piece), kind) + piece
            first = False
    return out


def test_values_that_are_not_json_but_typed_are_read(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as proto

    if "number" not in proto.HistoryItem.DESCRIPTOR.fields_by_name:
        pytest.skip("this wandb has no typed values")
    record = proto.Record(num=1)
    for key, field, value in (("a", "number", 0.25), ("b", "integer", -3), ("c", "boolean", True), ("d", "text", "x")):
        item = record.history.item.add(nested_key=[key])
        setattr(item, field, value)
    record.history.step.num = 12
    path = tmp_path / "run-x.wandb"
    path.write_bytes(frame([record.SerializeToString()]))
    batch = WandbSource(path).poll()
    assert {name: (curve.steps, curve.values) for name, curve in batch.items()} == {
        "a": ([12.0], [0.25]),
        "b": ([12.0], [-3.0]),
        "c": ([12.0], [1.0]),
    }


def test_long_names_and_values_are_read_like_short_ones(tmp_path: Path) -> None:
    """Lengths of 130 look like the tag between name and value."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as proto

    records = []
    lengths = [*range(100, 140), 300]
    for step in range(3):
        record = proto.Record(num=step)
        record.history.item.add(key="_step", value_json=str(step))
        for length in lengths:
            record.history.item.add(nested_key=["k" * length], value_json=str(step))
            record.history.item.add(nested_key=[f"v{length}"], value_json=" " * (length - 1) + str(step))
        records.append(record.SerializeToString())
    path = tmp_path / "run-x.wandb"
    path.write_bytes(frame(records))
    source = WandbSource(path)
    batch = source.poll()
    assert source.skipped == 0
    assert set(batch) == {"k" * length for length in lengths} | {f"v{length}" for length in lengths}
    assert all(curve.steps == curve.values == [0.0, 1.0, 2.0] for curve in batch.values())


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    pytest.importorskip("wandb")
    return os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_DIR": str(tmp_path),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_DATA_DIR": str(tmp_path / "data"),
    }


def the_log(tmp_path: Path) -> Path:
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    return path


def test_a_file_of_the_newest_client_is_read(offline: dict[str, str], tmp_path: Path) -> None:
    import wandb

    script = str(DATA / "make_wandb.py")
    subprocess.run([sys.executable, script, str(tmp_path), wandb.__version__], env=offline, check=True, cwd=tmp_path)
    check_the_small_run(the_log(tmp_path))


PICTURES = """
import wandb, numpy
run = wandb.init(project="p")
wandb.log({"a": 1, "picture": wandb.Image(numpy.zeros((4, 4, 3), numpy.uint8)), "shape": wandb.Histogram([1, 2, 3])})
wandb.log({"a": 2, "table": wandb.Table(columns=["x"], data=[[1]])})
run.finish()
"""


def test_images_histograms_and_tables_are_not_metrics(offline: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("PIL")
    subprocess.run([sys.executable, "-c", PICTURES], env=offline, check=True, cwd=tmp_path)
    batch = WandbSource(the_log(tmp_path)).poll()
    assert set(batch) == {"a"}


ENDLESS = """
import time, wandb
wandb.init(project="p", settings=wandb.Settings(x_disable_stats=True))
step = 0
while True:
    wandb.log({"loss": 1 / (step + 1), "x": step}, step=step)
    step += 1
    time.sleep(0.0005)
"""


def test_a_living_run_is_followed_and_a_killed_one_keeps_what_it_wrote(offline: dict[str, str], tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", ENDLESS], env=offline, cwd=tmp_path, start_new_session=True)
    try:
        batch: Batch = {}
        growths = 0
        source = None
        deadline = time.monotonic() + PATIENCE_S
        while growths < 2 and time.monotonic() < deadline:
            logs = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
            if logs and source is None:
                source = WandbSource(logs[0])
            new = source.poll() if source is not None else {}
            growths += bool(new)
            merge(batch, new)
            time.sleep(0.01)
        assert source is not None
        assert growths == 2
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
    merge(batch, source.poll())
    seen = len(batch["x"].values)
    assert seen > 0
    assert batch["x"].steps == batch["x"].values == [float(step) for step in range(seen)]
    assert source.skipped == 0


def test_a_record_log_without_its_head_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    path.write_bytes(b"garbage" + frame([b"one", b"two"])[7:])
    log = RecordLog(path, lambda: None)
    assert [record for records in log.blocks() for record in records] == [b"one", b"two"]


def varint(number: int) -> bytes:
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + varint(number >> 7)


def message(tag: int, content: bytes) -> bytes:
    return varint(tag << 3 | 2) + varint(len(content)) + content


def history(row: list[tuple[list[str], Any]], step: int | None) -> bytes:
    """A history message as clients write it: keys or nested keys, JSON values, and the step last."""
    items = b""
    for path, value in row:
        names = [message(1, path[0].encode())] if len(path) == 1 else [message(2, name.encode()) for name in path]
        items += message(1, b"".join(names) + message(16, json.dumps(value, ensure_ascii=False).encode()))
    return items + (b"" if step is None else message(2, b"\x08" + varint(step) if step else b""))


names = st.text(st.sampled_from('ab/_é\x01\x82\u0402\x00\n"'), min_size=1, max_size=4) | st.sampled_from(
    ["_step", "loss", "a" * 120, "a" * 126, "é" * 64, "\x82\x01"]
)
values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.integers(115, 140).map("x".__mul__),
    st.lists(st.integers(0, 300), max_size=50), st.sampled_from(["\x82\x01", "\u0402\x01", 130, 0x8201]),
)  # fmt: skip
rows = st.lists(st.tuples(st.lists(names, min_size=1, max_size=2), values), max_size=6)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(rows, st.none() | st.integers(0, 1 << 20)), min_size=1, max_size=4))
@example([([(["_step"], 1), (["a"], "x" * 126)], None), ([(["_step"], 2), (["a"], 3)], 2)])
def test_rows_that_are_split_are_equal_to_rows_that_are_decoded(
    written: list[tuple[list[tuple[list[str], Any]], int | None]],
) -> None:
    """The fast path may decline a row, but never read it differently."""
    messages = [history(row, step) for row, step in written]
    source, slow = WandbSource(Path("x")), WandbSource(Path("x"))
    for data in [*messages, *messages]:  # once to learn the names, once with names known
        assert repr(source._read_row(data, 0, len(data))) == repr(slow._decode_row(data, 0, len(data)))
