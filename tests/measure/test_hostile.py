"""Files of a run that no trainer should leave: none of them ends, blocks or fills the process that reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from math import isnan
from pathlib import Path

import pytest
from tests.measure import test_contract as formats

from looplab.errors import LabError
from looplab.measure import tail
from looplab.measure.base import Batch, merge
from looplab.measure.discover import MAX_NAME, Reader
from looplab.measure.jsonl import JsonlSource
from looplab.measure.patterns import Patterns, is_linear
from looplab.measure.stdout import StdoutSource
from looplab.measure.tensorboard import TensorBoardSource
from looplab.measure.wandb_log import WandbSource

NAMES = (
    "metrics.jsonl",
    "progress.csv",
    "trainer_summary.json",
    "wandb-summary.json",
    "events.out.tfevents.1",
    "run-abc.wandb",
    "train.log",
)
each_name = pytest.mark.parametrize("name", NAMES)


def bounded(code: str, *arguments: object, cpu_s: int = 20, memory_mb: int = 0) -> str:
    """Run code in a process with so much CPU time and memory, beyond what the imports take; return what it prints."""
    head = f"""
        import resource, sys
        from pathlib import Path
        import looplab.measure.discover, looplab.measure.jsonl, looplab.measure.stdout, looplab.measure.tensorboard
        import looplab.measure.csv, looplab.measure.wandb_log, looplab.runs.redact
        resource.setrlimit(resource.RLIMIT_CPU, ({cpu_s} + int(sum(resource.getrusage(0)[:2])) + 1,) * 2)
        if {memory_mb}:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + {memory_mb << 20},) * 2)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    return done.stdout.strip()


# -- what is not a file


@each_name
@pytest.mark.parametrize("what", ["folder", "pipe", "link to itself", "device", "memory", "nothing"])
def test_what_is_not_a_file_is_not_read(tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / name
    path.touch()
    reader = Reader(tmp_path, ("jsonl", "wandb", "tensorboard", "csv", "stdout", "trainer_summary"))
    assert reader.poll() == {}
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "memory": "/proc/self/mem", "nothing": "gone"}.get(what, name))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    for made in (reader, Reader(tmp_path)):
        found = made.poll(final=True)
        assert [(name_.rpartition("/")[2], curve.values) for name_, curve in found.items()] == [("loss", [0.5])]


def test_a_file_that_is_linked_from_elsewhere_is_read(tmp_path: Path) -> None:
    (tmp_path / "logs.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "logs.jsonl")
    assert Reader(tmp_path / "run").poll()["loss"].values == [0.5]


def test_a_file_that_cannot_be_read_is_named_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (tmp_path / "progress.csv").write_text("step,acc\n1,0.9\n")
    reader = Reader(tmp_path)
    assert set(reader.poll()) == {"loss", "acc"}
    calls = 0

    def broken(self: JsonlSource, final: bool = False, until: float | None = None) -> Batch:
        nonlocal calls
        calls += 1
        raise MemoryError

    monkeypatch.setattr(JsonlSource, "poll", broken)
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("2,0.8\n")
    assert set(reader.poll()) == {"acc"}
    assert reader.poll(final=True) == {}
    assert calls == 1
    assert reader.problems == {"metrics.jsonl": "MemoryError"}
    assert reader.is_doubtful("loss")
    assert not reader.is_doubtful("acc")
    assert not reader.is_doubtful("unknown")


# -- what is in them


@pytest.mark.parametrize("name", ["metrics.jsonl", "trainer_summary.json", "wandb-summary.json"])
@pytest.mark.parametrize("depth", [300, 985, 100_000])
def test_deep_nesting_costs_that_record(tmp_path: Path, name: str, depth: int) -> None:
    (tmp_path / name).write_text('{"a": ' * depth + "1" + "}" * depth + "\n")
    (tmp_path / "progress.csv").write_text("step,acc\n1,0.9\n")
    reader = Reader(tmp_path)
    assert set(reader.poll(final=True)) == {"acc"}
    assert not reader.problems


def test_a_wandb_row_with_an_int_of_400_digits_next_to_a_nan_is_read(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "huge": 10**400, "bad": float("nan"), "loss": 0.25}]
    rows += [{"step": 10**400, "loss": 0.125}]
    path = tmp_path / "run-x.wandb"
    path.write_bytes(b"".join(formats.encode_wandb(rows)))
    found = WandbSource(path).poll()
    assert found["loss"].values == [0.5, 0.25, 0.125]
    assert isnan(found["bad"].values[0])
    assert "huge" not in found


def test_names_that_cannot_be_written_down_are_mended_or_left_out(tmp_path: Path) -> None:
    row = {"step": 1, "half \ud83d": 1.0, "\ud83d\ude80": 2.0, "n" * (MAX_NAME + 1): 3.0, "bad": float("nan")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert set(Reader(tmp_path).poll()) == {"half �", "🚀", "bad"}


@pytest.mark.parametrize("cuts", [(), (500,), (1000, 1001), (1500, 4000)])
def test_a_line_that_is_too_long_is_skipped_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(tail, "CHUNK", 100)
    monkeypatch.setattr(tail, "MAX_LINE", 1000)
    lines = ['{"step": 1, "a": 1}', json.dumps({"step": 2, "a": 2, "x": "y" * 1500}), '{"step": 3, "a": 3}']
    data = "".join(line + "\n" for line in lines).encode()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"")
    source, found, before = JsonlSource(path), {}, 0
    for cut in (*cuts, len(data)):
        with path.open("ab") as file:
            file.write(data[before:cut])
        before = cut
        merge(found, source.poll())
    assert found["a"].values == [1, 3]
    assert source.skipped == 1


@pytest.mark.slow
def test_a_gigabyte_without_a_line_end_takes_little_memory(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "progress.csv", "train.log"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)
    code = """
        from looplab.measure.discover import Reader
        print(Reader(Path(sys.argv[1]), ("jsonl", "csv", "stdout")).poll(final=True))
        """
    assert bounded(code, tmp_path, cpu_s=60, memory_mb=200) == "{}"


def test_a_summary_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "trainer_summary.json").open("wb") as file:
        file.truncate(1 << 30)
    code = """
        from looplab.measure.discover import Reader
        print(Reader(Path(sys.argv[1])).poll(final=True))
        """
    assert bounded(code, tmp_path, memory_mb=100) == "{}"


# -- TensorBoard


def events(values: list[float], start: int = 0) -> bytes:
    rows = [{"step": step, "loss": value} for step, value in enumerate(values, start)]
    return b"".join(formats.encode_tensorboard(rows))


def framed(length: int) -> bytes:
    """The head of a record of this length."""
    size = length.to_bytes(8, "little")
    return size + formats.crc32c(size).to_bytes(4, "little")


def test_a_long_run_of_zeros_in_an_event_file_is_stepped_over(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    with path.open("wb") as file:
        file.write(events([1.0, 2.0]))
        file.seek(50 << 20, os.SEEK_CUR)
        file.write(events([3.0], start=2))
    code = """
        from looplab.measure.tensorboard import TensorBoardSource
        source = TensorBoardSource(Path(sys.argv[1]))
        print(source.poll()["loss"].values, source.skipped)
        """
    assert bounded(code, path, cpu_s=10) == "[1.0, 2.0, 3.0] 1"


@pytest.mark.parametrize("zeros", range(1, 40))
def test_zeros_of_any_length_are_stepped_over(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(events([1.0]) + bytes(zeros) + events([2.0, 3.0], start=1))
    assert TensorBoardSource(path).poll()["loss"].values == [1.0, 2.0, 3.0]


def test_a_message_that_is_too_large_is_skipped_by_its_length(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    head = framed(1 << 30)
    with path.open("wb") as file:
        file.write(events([1.0]) + head)
        file.seek((1 << 30) + 4, os.SEEK_CUR)
        file.write(events([2.0], start=1))
    code = """
        from looplab.measure.tensorboard import TensorBoardSource
        source = TensorBoardSource(Path(sys.argv[1]))
        print(source.poll()["loss"].values, source.skipped)
        """
    assert bounded(code, path, cpu_s=60, memory_mb=100) == "[1.0, 2.0] 1"


def test_a_message_of_a_million_fields_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    content = formats.message(5, formats.message(1, formats.message(8, formats.message(2, b"\x12\x00" * 4_000_000))))
    path.write_bytes(events([1.0]) + (framed(len(content)) + content + bytes(4)) * 8 + events([2.0], start=1))
    code = """
        from looplab.measure.tensorboard import TensorBoardSource
        source = TensorBoardSource(Path(sys.argv[1]))
        print(source.poll()["loss"].values, source.skipped)
        """
    assert bounded(code, path) == "[1.0, 2.0] 8"


# -- printed lines


STRANGE = [
    *("9", "step ", "step" + " " * 50, "loss=9", "-val", "_val", ".held-out", "train/", "loss on ", "'s=nan", "9=hold out:"),
    *("[split:9", "val ", "eyJ", "://a:", "Epoch ", "a.", "1,234", "(", "\x1b[", "mode='", "nan:", "per step "),
]  # fmt: skip


@pytest.mark.parametrize("tail_", ["", "x", "val.py", ":", "=9e"])
def test_the_time_for_a_printed_line_grows_with_its_length_alone(tmp_path: Path, tail_: str) -> None:
    """Lines at the limit, of which the old expressions needed seconds to hours each."""
    log = tmp_path / "train.log"
    heads = ("", "step", "loss=", "val")
    lines = [(head + (unit * 4096)[: 4090 - len(head)]) + tail_ for head in heads for unit in STRANGE for _ in range(4)]
    log.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    code = """
        from looplab.measure.stdout import StdoutSource
        StdoutSource(Path(sys.argv[1])).poll(final=True)
        print("read")
        """
    assert bounded(code, log, cpu_s=30) == "read"


def test_a_chain_of_split_words_that_ends_as_a_file_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(("_val" * 1000 + "val.py\n") * 200)
    code = """
        from looplab.measure.stdout import StdoutSource
        StdoutSource(Path(sys.argv[1])).poll(final=True)
        print("read")
        """
    assert bounded(code, log, cpu_s=15) == "read"


@pytest.mark.parametrize(
    "pattern",
    [
        r"step (?P<step>\d+) loss (?P<loss>\S+)",
        r"loss=(?P<loss>[\d.]+)",
        r"loss[:=]\s*(?P<loss>[\d.eE+-]+)",
        r"^step (?P<step>\d+)\s+(?P<loss>\d+\.\d+)$",
        r"^損失\s*=\s*(?P<loss>[^\s二]+) 二",
    ],
)
def test_simple_patterns_are_known_to_be_linear(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?P<x>(a+)+$)",
        r".*loss (?P<loss>.*)",
        r"(?P<loss>\d+)x",
        r"loss (?P<loss>\d+\.?\d*)z",
        r"(?P<x>\w+)=",
        r"(?i)loss=(?P<loss>\d+)",
        r"a(?P<x>[a-z]+)=",
        r"x(?P<x>(?:a|aa){1,200})z",
        r"x(?P<x>a*)(?=b)",
        r"(?P<x>a)\1*b",
        r"^(?P<x>[一-龥]+)[一-龥]+[一-龥]+z",
        r"^(?P<x>\w+)[ā-龥]+z",
        r"^x(?P<x>[^一]+)二z",
        r"^(?P<x>\d+)٣z",
    ],
)
def test_other_patterns_are_not(pattern: str) -> None:
    assert not is_linear(pattern)


@pytest.mark.parametrize("pattern", [r"loss=(?P<loss>[\d.]+)", r".*?loss=(?P<loss>[\d.]+)"])
def test_what_a_pattern_finds_does_not_depend_on_where_it_is_matched(pattern: str) -> None:
    lines = [f"a loss={n}.5 é loss=2 \x85" for n in range(200)] + ["nothing"]
    found = Patterns([pattern]).find(lines)
    assert found == [[{"loss": f"{n}.5"}, {"loss": "2"}] for n in range(200)] + [None]


def test_a_pattern_that_backtracks_is_given_up_and_the_others_are_not(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1 loss 3\n" + "a" * 80 + "b\n" + "step 2 loss 2\n")
    source = StdoutSource(log, [r"(?P<bad>(a+)+$)", r"step (?P<step>\d+) loss (?P<loss>\S+)"])
    assert source.poll(final=True)["loss"].values == [3.0, 2.0]
    assert source.problem is not None
    assert "(a+)+$" in source.problem
    with log.open("a") as file:
        file.write("a" * 80 + "b\nstep 3 loss 1\n")
    assert source.poll(final=True)["loss"].values == [1.0]


def test_a_metric_of_a_pattern_that_was_given_up_is_doubtful(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("loss: 3\n" + "a" * 80 + "b\n")
    (tmp_path / "progress.csv").write_text("step,acc\n1,0.9\n")
    reader = Reader(tmp_path, ("csv", "stdout"), stdout_patterns=[r"(?P<bad>(a+)+$)"])
    assert set(reader.poll(final=True)) == {"loss", "acc"}
    assert reader.is_doubtful("loss")
    assert not reader.is_doubtful("acc")
    assert list(reader.problems) == ["train.log"]


def test_a_pattern_that_is_nested_too_deeply_is_an_error() -> None:
    with pytest.raises(LabError):
        Patterns(["(" * 5000 + "(?P<x>a)" + ")" * 5000])


# -- in portions


@pytest.mark.parametrize("kind", formats.KINDS, ids=lambda kind: kind.name)
def test_reading_in_portions_finds_the_same(
    kind: formats.Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "PORTION", 1000)
    path = tmp_path / "file"
    path.write_bytes(b"".join(kind.encode(formats.rows(500))))
    source, found, polls = kind.open(path), {}, 0
    pread = os.pread
    sizes: list[int] = []

    def measured(descriptor: int, size: int, offset: int) -> bytes:
        data = pread(descriptor, size, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr("looplab.measure.tail.os.pread", measured)
    while polls == 0 or source.behind:
        sizes.clear()
        merge(found, source.poll(final=True, until=0.0))
        assert 0 < sum(sizes) <= 1000 + tail.SEAM
        polls += 1
    assert polls > 5
    assert formats.plain(found) == formats.expected(formats.rows(500))
    assert source.poll(final=True, until=0.0) == {}


def test_a_less_trusted_file_waits_for_the_more_trusted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "PORTION", 1000)
    rows = [{"step": n, "loss": n / 2} for n in range(200)] + [{"step": 200, "late": 7.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "progress.csv").write_text("step,late,loss\n" + "".join(f"{n},{n},{n}\n" for n in range(300)))
    whole = Reader(tmp_path).poll(final=True)
    reader, found = Reader(tmp_path), {}
    while True:
        merge(found, reader.poll(final=True, until=0.0))
        if not reader.behind:
            break
    assert found == whole
    assert found["late"].values == [7.0]
