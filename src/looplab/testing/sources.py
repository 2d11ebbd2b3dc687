"""The contract of metric sources: see `looplab.measure.base`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from math import inf, isnan, nan
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from looplab.measure.base import Batch, MetricSource, merge

Rows = list[dict[str, float]]
INHERITED = [HealthCheck.differing_executors]


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


def truncate_and_write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


class SourceContract:
    """What every metric source guarantees, whatever its format. Subclasses define `open_source` and `encode`."""

    detects_damage = True
    """Whether a damaged record is recognised as such; False for plain text, where half a line is still a line."""
    has_records_per_metric = False
    """Whether each value of a row is a separate record."""

    def open_source(self, path: Path) -> MetricSource:
        """Return a source for this file, which may not exist yet."""
        raise NotImplementedError

    def encode(self, rows: Rows) -> list[bytes]:
        """Return the file that a trainer would write, one item per row; the first with what the format begins with.

        Args:
            rows: `step` and the metrics `loss` and `acc`; any metric may be missing, NaN or infinite.
        """
        raise NotImplementedError

    def _read_in_cuts(self, path: Path, data: bytes, cuts: list[int]) -> tuple[Batch, MetricSource]:
        """Return everything that a source returns while the file grows from cut to cut."""
        path.write_bytes(b"")
        source = self.open_source(path)
        all_points: Batch = {}
        before = 0
        for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
            with path.open("ab") as file:
                file.write(data[before:cut])
            before = cut
            merge(all_points, source.poll())
        return all_points, source

    def test_all_that_was_written_comes_out_once_in_order(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"".join(self.encode(rows(300))))
        source = self.open_source(path)
        assert plain(source.poll()) == expected(rows(300))
        assert source.skipped == 0
        assert not source.behind
        assert source.poll() == {}

    @settings(max_examples=25, deadline=None, suppress_health_check=INHERITED)
    @given(cuts=st.lists(st.integers(0, 1 << 30), max_size=12), count=st.integers(0, 60))
    def test_however_a_file_is_cut_into_polls_the_points_are_the_same(self, cuts: list[int], count: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            points, source = self._read_in_cuts(Path(folder) / "file", b"".join(self.encode(rows(count))), cuts)
        assert plain(points) == expected(rows(count))
        assert source.skipped == 0

    @settings(max_examples=40, deadline=None, suppress_health_check=INHERITED)
    @given(
        cuts=st.lists(st.integers(0, 1 << 30), max_size=6),
        at=st.integers(0, 1 << 30),
        garbage=st.binary(min_size=1, max_size=90),
        insert=st.booleans(),
    )
    def test_damage_reads_the_same_however_it_is_cut_and_never_fails(
        self, cuts: list[int], at: int, garbage: bytes, insert: bool
    ) -> None:
        data = b"".join(self.encode(rows(40)))
        at %= len(data)
        data = data[:at] + garbage + data[at if insert else at + len(garbage) :]
        with tempfile.TemporaryDirectory() as folder:
            whole, one = self._read_in_cuts(Path(folder) / "whole", data, [])
            parts, other = self._read_in_cuts(Path(folder) / "parts", data, cuts)
        assert plain(whole) == plain(parts)
        assert one.skipped == other.skipped

    def test_garbage_in_the_middle_is_skipped_and_counted_and_the_rest_is_read(self, tmp_path: Path) -> None:
        records = self.encode(rows(30))
        middle = len(records[10]) // 2
        records[10] = records[10][: middle - 4] + b"\xff\x00{[~" * 2 + records[10][middle + 6 :]
        path = tmp_path / "file"
        path.write_bytes(b"".join(records))
        source = self.open_source(path)
        found = plain(source.poll())
        clean = expected([row for row in rows(30) if row["step"] != 10])
        assert [point for point in found["loss"] if point[0] != 10] == clean["loss"]
        assert [point for point in found["acc"] if point[0] != 10] == clean["acc"]
        if self.detects_damage:  # in text, half a line is still a line, and a bad cell is a missing one
            assert source.skipped >= 1
            assert (10, rows(30)[10]["loss"]) not in found["loss"] or (10, rows(30)[10]["acc"]) not in found["acc"]

    def test_a_torn_tail_waits_for_its_rest(self, tmp_path: Path) -> None:
        *head, last = self.encode(rows(5))
        path = tmp_path / "file"
        path.write_bytes(b"".join(head) + last[:-1])
        source = self.open_source(path)
        points = source.poll()
        assert plain(points)["loss"] == expected(rows(4))["loss"] or self.has_records_per_metric
        assert source.poll() == {}
        with path.open("ab") as file:
            file.write(last[-1:])
        merge(points, source.poll())
        assert plain(points) == expected(rows(5))
        assert source.skipped == 0

    def test_a_missing_file_is_an_empty_batch_and_is_read_when_it_comes(self, tmp_path: Path) -> None:
        source = self.open_source(tmp_path / "file")
        assert source.poll() == {}
        (tmp_path / "file").write_bytes(b"".join(self.encode(rows(3))))
        assert plain(source.poll()) == expected(rows(3))

    def test_an_empty_file_is_an_empty_batch(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        source = self.open_source(tmp_path / "file")
        assert source.poll() == {}
        assert source.skipped == 0

    @pytest.mark.parametrize("rewrite", [truncate_and_write, replace])
    @pytest.mark.parametrize("count", [3, 90], ids=["shorter", "longer"])
    def test_a_rewritten_file_is_read_from_its_start(
        self, rewrite: Callable[[Path, bytes], None], count: int, tmp_path: Path
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"".join(self.encode(rows(30))))
        source = self.open_source(path)
        source.poll()
        rewrite(path, b"".join(self.encode(rows(count, start=100))))
        assert plain(source.poll()) == expected(rows(count, start=100))

    def test_numbers_that_are_not_finite_are_kept_as_such(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        made: Rows = [
            {"step": 0, "loss": nan},
            {"step": 1, "loss": inf},
            {"step": 2, "loss": -inf},
            {"step": 3, "loss": 1.0},
        ]
        path.write_bytes(b"".join(self.encode(made)))
        source = self.open_source(path)
        assert plain(source.poll()) == {"loss": [(0, "nan"), (1, inf), (2, -inf), (3, 1.0)]}
        assert source.skipped == 0
