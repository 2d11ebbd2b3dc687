"""The event-file reader against files that TensorBoard and tensorboardX wrote, and against TensorBoard's own reader."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.measure.base import Batch, merge
from looplab.measure.tensorboard import TensorBoardSource

pytest.importorskip("tensorboard")
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def event_file(folder: Path) -> Path:
    (path,) = folder.glob("events.out.tfevents.*")
    return path


def write(folder: Path, events: list[Any]) -> Path:
    writer = EventFileWriter(str(folder))
    for event in events:
        writer.add_event(event)
    writer.close()
    return event_file(folder)


def event(step: int, *values: Any) -> Any:
    return event_pb2.Event(wall_time=1.7e9 + step, step=step, summary=summary_pb2.Summary(value=values))


def plain(tag: str, value: float) -> Any:
    return summary_pb2.Summary.Value(tag=tag, simple_value=value)


def tensor(tag: str, *, shape: tuple[int, ...] = (), described: bool = True, **content: Any) -> Any:
    dimensions = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in shape]
    proto = tensor_pb2.TensorProto(tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=dimensions), **content)
    described_by = scalar_metadata.create_summary_metadata("", "") if described else None
    return summary_pb2.Summary.Value(tag=tag, tensor=proto, metadata=described_by)


def test_plain_scalars_over_all_lengths_of_step(tmp_path: Path) -> None:
    steps = [0, 1, 127, 128, 300, 16_383, 16_384, 2_097_152, 10**12, 5, 6]
    path = write(tmp_path, [event(step, plain("loss", step / 2)) for step in steps])
    source = TensorBoardSource(path)
    curve = source.poll()["loss"]
    assert curve.steps == steps
    assert curve.values == pytest.approx([step / 2 for step in steps])
    assert source.skipped == 0


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ({"dtype": 1, "float_val": [0.25]}, 0.25),
        ({"dtype": 1, "tensor_content": struct.pack("<f", 0.25)}, 0.25),
        ({"dtype": 2, "double_val": [0.1]}, 0.1),
        ({"dtype": 2, "tensor_content": struct.pack("<d", 0.1)}, 0.1),
        ({"dtype": 3, "int_val": [-7]}, -7),
        ({"dtype": 3, "tensor_content": struct.pack("<i", -7)}, -7),
        ({"dtype": 9, "int64_val": [1 << 40]}, 1 << 40),
        ({"dtype": 9, "tensor_content": struct.pack("<q", -(1 << 40))}, -(1 << 40)),
        ({"dtype": 10, "bool_val": [True]}, 1),
        ({"dtype": 14, "tensor_content": b"\x40\x3f"}, 0.75),
        ({"dtype": 14, "half_val": [0x3F40]}, 0.75),
        ({"dtype": 19, "half_val": [0x3A00]}, 0.75),
        ({"dtype": 19, "tensor_content": struct.pack("<e", 0.75)}, 0.75),
        ({"dtype": 23, "uint64_val": [12]}, 12),
    ],
)
@pytest.mark.parametrize("described", [True, False])
def test_scalars_in_tensors(tmp_path: Path, content: dict[str, Any], value: float, described: bool) -> None:
    events = [event(step, tensor("x", described=described, **content)) for step in range(3)]
    curve = TensorBoardSource(write(tmp_path, events)).poll()["x"]
    assert curve.steps == [0, 1, 2]
    assert curve.values == [value] * 3


def test_tensors_of_many_elements_and_other_plugins_are_not_scalars(tmp_path: Path) -> None:
    other = summary_pb2.SummaryMetadata(plugin_data={"plugin_name": "images"})
    odd = tensor("image", dtype=1, float_val=[1.0], described=False)
    odd.metadata.CopyFrom(other)
    events = [
        event(0, tensor("many", shape=(3,), dtype=1, float_val=[1.0, 2.0, 3.0])),
        event(0, tensor("one", shape=(1,), dtype=1, float_val=[1.0])),
        event(0, odd),
        event(1, tensor("image", dtype=1, float_val=[1.0], described=False)),
        event(0, tensor("text", dtype=7, string_val=[b"hello"])),
        event(0, plain("loss", 0.5)),
    ]
    batch = TensorBoardSource(write(tmp_path, events)).poll()
    assert set(batch) == {"one", "loss"}


def test_several_values_in_one_event(tmp_path: Path) -> None:
    events = [
        event(step, plain("a", step), plain("b", -step), tensor("c", dtype=1, float_val=[1.0])) for step in range(4)
    ]
    batch = TensorBoardSource(write(tmp_path, events)).poll()
    assert batch["a"].values == [0, 1, 2, 3]
    assert batch["b"].values == [0, -1, -2, -3]
    assert batch["c"].steps == [0, 1, 2, 3]


def test_a_tag_that_changes_its_form_keeps_its_order(tmp_path: Path) -> None:
    events = []
    for step in range(200):
        values = (plain("x", step), tensor("x", dtype=1, float_val=[step]), tensor("x", dtype=9, int64_val=[step]))
        events.append(event(step, values[step % 3]))
    curve = TensorBoardSource(write(tmp_path, events)).poll()["x"]
    assert curve.steps == curve.values == [float(step) for step in range(200)]


@pytest.mark.parametrize("offset", [-2, -6, -30], ids=["checksum", "value", "time"])
def test_a_flipped_bit_costs_one_event(tmp_path: Path, offset: int) -> None:
    path = write(tmp_path, [event(step, plain("loss", step)) for step in range(100)])
    data = bytearray(path.read_bytes())
    end = data.index(struct.pack("<f", 50.0)) + 8
    data[end + offset] ^= 4
    path.write_bytes(data)
    source = TensorBoardSource(path)
    assert source.poll()["loss"].steps == [step for step in range(100) if step != 50]
    assert source.skipped == 1


def test_a_hole_of_zeros_is_stepped_over(tmp_path: Path) -> None:
    path = write(tmp_path, [event(step, plain("loss", step)) for step in range(100)])
    data = path.read_bytes()
    path.write_bytes(data[:2000] + b"\0" * 1000 + data[3000:])
    source = TensorBoardSource(path)
    steps = source.poll()["loss"].steps
    assert steps[0] == 0
    assert steps[-1] == 99
    assert 60 < len(steps) < 100
    assert source.skipped >= 1


def test_it_reads_what_tensorboards_own_reader_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = pytest.importorskip("tensorboardX").SummaryWriter(str(tmp_path))
    for step in range(300):
        writer.add_scalar("train/loss", 1 / (step + 1), step)
        writer.add_scalar("lr", 0.001 * step, step)
        if step % 50 == 0:
            writer.add_histogram("weights", [0.1, 0.2, 0.5], step)
            writer.add_text("note", "hello", step)
            writer.add_scalar("eval/loss", step, step)
    writer.close()
    path = event_file(tmp_path)
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
    accumulator.Reload()
    source = TensorBoardSource(path)
    batch = source.poll()
    assert source.skipped == 0
    assert set(batch) == set(accumulator.Tags()["scalars"])
    for tag, curve in batch.items():
        assert list(zip(curve.steps, curve.values, strict=True)) == [
            (e.step, e.value) for e in accumulator.Scalars(tag)
        ]


ENDLESS = """
import sys
from tensorboardX import SummaryWriter
writer = SummaryWriter(sys.argv[1], flush_secs=0.05, max_queue=1)
step = 0
while True:
    writer.add_scalar("loss", step % 1000, step)
    writer.add_scalar("train/acc", step % 7, step)
    step += 1
"""


def test_a_living_writer_is_followed_and_a_killed_one_keeps_what_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    trainer = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], start_new_session=True)
    batch: Batch = {}
    growths = 0
    source = None
    try:
        deadline = time.monotonic() + PATIENCE_S
        while growths < 5 and time.monotonic() < deadline:
            files = list(tmp_path.glob("events.*"))
            if files and source is None:
                source = TensorBoardSource(files[0])
            new = source.poll() if source is not None else {}
            growths += bool(new)
            merge(batch, new)
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
    assert source is not None
    merge(batch, source.poll())
    seen = len(batch["loss"].values)
    assert batch["loss"].steps == [float(step) for step in range(seen)]
    assert batch["loss"].values == [float(step % 1000) for step in range(seen)]
    assert source.skipped == 0
