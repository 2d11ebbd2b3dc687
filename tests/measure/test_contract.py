"""What every source promises, whatever its format: see `looplab.measure.base`."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.measure import tail
from looplab.measure.base import Batch, MetricSource, merge
from looplab.measure.csv import CsvSource
from looplab.measure.jsonl import JsonlSource
from looplab.measure.stdout import StdoutSource
from looplab.measure.tensorboard import TensorBoardSource
from looplab.measure.wandb_legacy import WandbHistorySource
from looplab.measure.wandb_log import BLOCK, WandbSource

Rows = list[dict[str, float]]


@dataclass(frozen=True)
class Kind:
    name: str
    open: Callable[[Path], MetricSource]
    encode: Callable[[Rows], list[bytes]]
    """A file's records, the first with whatever head the format has."""


def encode_jsonl(rows: Rows, step: str = "step") -> list[bytes]:
    renamed = [{(step if name == "step" else name): value for name, value in row.items()} for row in rows]
    return [json.dumps(row).encode() + b"\n" for row in renamed]


def encode_csv(rows: Rows) -> list[bytes]:
    names = ["step", "loss", "acc"]
    lines = [",".join(str(row[name]) if name in row else "" for name in names).encode() + b"\n" for row in rows]
    return [b"step,loss,acc\n" + lines[0], *lines[1:]] if lines else [b"step,loss,acc\n"]


def encode_stdout(rows: Rows) -> list[bytes]:
    return [" ".join(f"{name}: {value}" for name, value in row.items()).encode() + b"\n" for row in rows]


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def wandb_record(num: int, content: bytes) -> bytes:
    return b"\x08" + varint(num) + content


def wandb_row(row: dict[str, float]) -> bytes:
    names = {"_step" if name == "step" else name: value for name, value in row.items()}
    items = [message(2, name.encode()) + message(16, json.dumps(value).encode()) for name, value in names.items()]
    return message(2, b"".join(message(1, item) for item in items))


def encode_wandb(rows: Rows) -> list[bytes]:
    out: list[bytes] = []
    offset = 0

    def write(data: bytes) -> bytes:
        nonlocal offset
        offset += len(data)
        return data

    def frame(record: bytes) -> bytes:
        framed = b""
        first = True
        while True:
            left = BLOCK - offset % BLOCK
            if left < 7:
                framed += write(b"\0" * left)
                continue
            piece, record = record[: left - 7], record[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not record]
            framed += write(struct.pack("<IHB", zlib.crc32(bytes([kind]) + piece), len(piece), kind) + piece)
            first = False
            if not record:
                return framed

    head = write(b":W&B\xe1\xbe\x00")
    for number, row in enumerate(rows, 1):
        out.append(frame(wandb_record(number, wandb_row(row))))
    return [head + out[0], *out[1:]] if out else [head]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tf_record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", crc32c(length)) + content + struct.pack("<I", crc32c(content))


def tf_event(step: int, tag: str, value: float) -> bytes:
    scalar = message(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    return b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + varint(step) + message(5, message(1, scalar))


def encode_tensorboard(rows: Rows) -> list[bytes]:
    head = tf_record(b"\x09" + struct.pack("<d", 1.7e9) + message(3, b"brain.Event:2"))
    records = [
        b"".join(tf_record(tf_event(int(row["step"]), name, row[name])) for name in ("loss", "acc") if name in row)
        for row in rows
    ]
    return [head + records[0], *records[1:]] if records else [head]


KINDS = [
    Kind("jsonl", JsonlSource, encode_jsonl),
    Kind("csv", CsvSource, encode_csv),
    Kind("stdout", StdoutSource, encode_stdout),
    Kind("wandb", WandbSource, encode_wandb),
    Kind("wandb_history", WandbHistorySource, lambda rows: encode_jsonl(rows, "_step")),
    Kind("tensorboard", TensorBoardSource, encode_tensorboard),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def plain(batch: Batch) -> dict[str, list[tuple[float, float | str]]]:
    """Comparable: NaN becomes a word."""
    return {
        name: [(step, "nan" if isnan(value) else value) for step, value in zip(curve.steps, curve.values, strict=True)]
        for name, curve in batch.items()
    }


def rows(count: int, start: int = 0) -> Rows:
    made = []
    for step in range(start, start + count):
        row = {"step": step, "loss": 1 / 2 ** (step % 20), "acc": step / 64}
        if step % 3 == 0:
            del row["acc"]
        made.append(row)
    return made


def expected(made: Rows) -> dict[str, list[tuple[float, float | str]]]:
    found: dict[str, list[tuple[float, float | str]]] = {}
    for row in made:
        for name in ("loss", "acc"):
            if name in row:
                found.setdefault(name, []).append((row["step"], row[name]))
    return found


def read_in_cuts(kind: Kind, path: Path, data: bytes, cuts: list[int]) -> tuple[Batch, MetricSource]:
    """Everything a source returns while the file grows from cut to cut."""
    path.write_bytes(b"")
    source = kind.open(path)
    all_points: Batch = {}
    before = 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[before:cut])
        before = cut
        merge(all_points, source.poll())
    return all_points, source


@each_kind
def test_all_that_was_written_comes_out_once_in_order(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(kind.encode(rows(300))))
    source = kind.open(path)
    assert plain(source.poll()) == expected(rows(300))
    assert source.skipped == 0
    assert not source.behind
    assert source.poll() == {}


@each_kind
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 1 << 30), max_size=12), count=st.integers(0, 60))
def test_however_a_file_is_cut_into_polls_the_points_are_the_same(kind: Kind, cuts: list[int], count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        points, source = read_in_cuts(kind, Path(folder) / "file", b"".join(kind.encode(rows(count))), cuts)
    assert plain(points) == expected(rows(count))
    assert source.skipped == 0


@each_kind
@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 1 << 30), max_size=6),
    at=st.integers(0, 1 << 30),
    garbage=st.binary(min_size=1, max_size=90),
    insert=st.booleans(),
)
def test_damage_reads_the_same_however_it_is_cut_and_never_fails(
    kind: Kind, cuts: list[int], at: int, garbage: bytes, insert: bool
) -> None:
    data = b"".join(kind.encode(rows(40)))
    at %= len(data)
    data = data[:at] + garbage + data[at if insert else at + len(garbage) :]
    with tempfile.TemporaryDirectory() as folder:
        whole, one = read_in_cuts(kind, Path(folder) / "whole", data, [])
        parts, other = read_in_cuts(kind, Path(folder) / "parts", data, cuts)
    assert plain(whole) == plain(parts)
    assert one.skipped == other.skipped


@each_kind
def test_garbage_in_the_middle_is_skipped_and_counted_and_the_rest_is_read(kind: Kind, tmp_path: Path) -> None:
    records = kind.encode(rows(30))
    middle = len(records[10]) // 2
    records[10] = records[10][: middle - 4] + b"\xff\x00{[~" * 2 + records[10][middle + 6 :]
    path = tmp_path / "file"
    path.write_bytes(b"".join(records))
    source = kind.open(path)
    found = plain(source.poll())
    clean = expected([row for row in rows(30) if row["step"] != 10])
    assert [point for point in found["loss"] if point[0] != 10] == clean["loss"]
    assert [point for point in found["acc"] if point[0] != 10] == clean["acc"]
    if kind.name not in ("stdout", "csv"):  # in text, half a line is still a line, and a bad cell is a missing one
        assert source.skipped >= 1
        assert (10, rows(30)[10]["loss"]) not in found["loss"] or (10, rows(30)[10]["acc"]) not in found["acc"]


@each_kind
def test_a_torn_tail_waits_for_its_rest(kind: Kind, tmp_path: Path) -> None:
    *head, last = kind.encode(rows(5))
    path = tmp_path / "file"
    path.write_bytes(b"".join(head) + last[:-1])
    source = kind.open(path)
    points = source.poll()
    assert plain(points)["loss"] == expected(rows(4))["loss"] or kind.name == "tensorboard"
    assert source.poll() == {}
    with path.open("ab") as file:
        file.write(last[-1:])
    merge(points, source.poll())
    assert plain(points) == expected(rows(5))
    assert source.skipped == 0


@each_kind
def test_a_missing_file_is_an_empty_batch_and_is_read_when_it_comes(kind: Kind, tmp_path: Path) -> None:
    source = kind.open(tmp_path / "file")
    assert source.poll() == {}
    (tmp_path / "file").write_bytes(b"".join(kind.encode(rows(3))))
    assert plain(source.poll()) == expected(rows(3))


@each_kind
def test_an_empty_file_is_an_empty_batch(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    source = kind.open(tmp_path / "file")
    assert source.poll() == {}
    assert source.skipped == 0


def truncate_and_write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


@each_kind
@pytest.mark.parametrize("rewrite", [truncate_and_write, replace])
@pytest.mark.parametrize("count", [3, 90], ids=["shorter", "longer"])
def test_a_rewritten_file_is_read_from_its_start(
    kind: Kind, rewrite: Callable[[Path, bytes], None], count: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(kind.encode(rows(30))))
    source = kind.open(path)
    source.poll()
    rewrite(path, b"".join(kind.encode(rows(count, start=100))))
    assert plain(source.poll()) == expected(rows(count, start=100))


@each_kind
def test_nothing_is_read_twice(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = kind.encode(rows(50))
    path = tmp_path / "file"
    path.write_bytes(b"")
    source = kind.open(path)
    read = 0
    real = os.pread

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal read
        data = real(descriptor, size, offset)
        read += len(data)
        return data

    monkeypatch.setattr("looplab.measure.tail.os.pread", counting)
    for record in records:
        with path.open("ab") as file:
            file.write(record)
        source.poll()
    assert read <= path.stat().st_size + tail.SEAM * len(records)
    assert not source.behind


@each_kind
def test_a_poll_without_news_does_not_even_open_the_file(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(kind.encode(rows(5))))
    source = kind.open(path)
    source.poll()

    def refuse(*args: object) -> int:
        raise AssertionError("opened")

    monkeypatch.setattr("looplab.measure.tail.os.open", refuse)
    assert source.poll() == {}


@each_kind
def test_numbers_that_are_not_finite_are_kept_as_such(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "file"
    made: Rows = [
        {"step": 0, "loss": nan},
        {"step": 1, "loss": inf},
        {"step": 2, "loss": -inf},
        {"step": 3, "loss": 1.0},
    ]
    path.write_bytes(b"".join(kind.encode(made)))
    source = kind.open(path)
    assert plain(source.poll()) == {"loss": [(0, "nan"), (1, inf), (2, -inf), (3, 1.0)]}
    assert source.skipped == 0


@each_kind
def test_a_file_of_many_chunks_is_read_whole(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "CHUNK", 1000)
    path = tmp_path / "file"
    path.write_bytes(b"".join(kind.encode(rows(1500))))
    assert plain(kind.open(path).poll()) == expected(rows(1500))
