"""What every source promises (`looplab.testing`), for each of looplab's own, and that none reads a byte twice."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from looplab.measure import tail
from looplab.measure.base import MetricSource
from looplab.measure.csv import CsvSource
from looplab.measure.jsonl import JsonlSource
from looplab.measure.stdout import StdoutSource
from looplab.measure.tensorboard import TensorBoardSource
from looplab.measure.wandb_legacy import WandbHistorySource
from looplab.measure.wandb_log import BLOCK, WandbSource
from looplab.testing.sources import Rows, SourceContract, expected, plain, rows


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


class _KindContract(SourceContract):
    kind: Kind

    def open_source(self, path: Path) -> MetricSource:
        return self.kind.open(path)

    def encode(self, rows: Rows) -> list[bytes]:
        return self.kind.encode(rows)


class TestJsonl(_KindContract):
    kind = KINDS[0]


class TestCsv(_KindContract):
    kind = KINDS[1]
    detects_damage = False


class TestStdout(_KindContract):
    kind = KINDS[2]
    detects_damage = False


class TestWandb(_KindContract):
    kind = KINDS[3]


class TestWandbHistory(_KindContract):
    kind = KINDS[4]


class TestTensorBoard(_KindContract):
    kind = KINDS[5]
    has_records_per_metric = True


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
def test_a_file_of_many_chunks_is_read_whole(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "CHUNK", 1000)
    path = tmp_path / "file"
    path.write_bytes(b"".join(kind.encode(rows(1500))))
    assert plain(kind.open(path).poll()) == expected(rows(1500))
