from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from looplab.measure import folders
from looplab.measure.folders import CACHE_NAME, FolderReading, summarise_many
from looplab.measure.summary import MetricSummary, objective_value


def summarise_folder(
    run_dir: Path, reading: FolderReading | None = None, *, cache: Path | None = None
) -> dict[str, MetricSummary]:
    return summarise_many([run_dir], reading, jobs=1, cache=cache)[run_dir]


def make_run(folder: Path, *losses: object) -> Path:
    folder.mkdir(parents=True)
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which folders were really read."""
    read: list[Path] = []
    real = folders._summarise

    def noting(run_dir: Path, reading: FolderReading) -> dict[str, folders.MetricSummary]:
        read.append(run_dir)
        return real(run_dir, reading)

    monkeypatch.setattr(folders, "_summarise", noting)
    return read


def test_a_folder_is_summarised(tmp_path: Path) -> None:
    summary = summarise_folder(make_run(tmp_path / "a", 4, 2, 3))["loss"]
    assert (summary.first, summary.last, summary.best, summary.best_step, summary.n) == (4, 3, 2, 1, 3)


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, reads: list[Path]) -> None:
    runs = [make_run(tmp_path / name, 4, index) for index, name in enumerate("abc")]
    cache = tmp_path / CACHE_NAME
    first = summarise_many(runs, cache=cache)
    assert reads == runs
    assert summarise_many(runs, cache=cache) == first
    assert reads == runs
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 9}\n')
    again = summarise_many(runs, cache=cache)
    assert reads == [*runs, runs[1]]
    assert again[runs[1]]["loss"].last == 9
    assert again[runs[0]] == first[runs[0]]


def test_a_new_file_in_a_run_is_noticed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 1)
    cache = tmp_path / CACHE_NAME
    summarise_folder(run, cache=cache)
    (run / "progress.csv").write_text("step,acc\n1,0.5\n")
    assert set(summarise_folder(run, cache=cache)) == {"loss", "acc"}


def test_another_way_of_reading_is_another_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 1, 2)
    cache = tmp_path / CACHE_NAME
    assert summarise_folder(run, cache=cache)["loss"].best == 1
    assert summarise_folder(run, FolderReading(goals={"loss": "max"}), cache=cache)["loss"].best == 2
    assert set(summarise_folder(run, FolderReading(aliases={"train/loss": ["loss"]}), cache=cache)) == {"train/loss"}


def test_the_last_values_come_back_from_the_cache(tmp_path: Path, reads: list[Path]) -> None:
    run = make_run(tmp_path / "a", 1, "NaN", 3)
    reading = FolderReading(tail=2)
    first = summarise_folder(run, reading, cache=tmp_path / CACHE_NAME)
    second = summarise_folder(run, reading, cache=tmp_path / CACHE_NAME)
    assert len(reads) == 1
    assert repr(first) == repr(second)
    assert objective_value(second, "loss", "mean(2)") == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 0}', b"\xff"])
def test_a_cache_that_cannot_be_read_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    run = make_run(tmp_path / "a", 1)
    cache = tmp_path / CACHE_NAME
    cache.write_bytes(content)
    assert summarise_folder(run, cache=cache)["loss"].last == 1
    assert json.loads(cache.read_bytes())["runs"]


def test_the_whole_tree_may_be_moved(tmp_path: Path, reads: list[Path]) -> None:
    run = make_run(tmp_path / "here" / "a", 1)
    summarise_folder(run, cache=tmp_path / "here" / CACHE_NAME)
    (tmp_path / "here").rename(tmp_path / "there")
    summarise_folder(tmp_path / "there" / "a", cache=tmp_path / "there" / CACHE_NAME)
    assert len(reads) == 1


def test_removed_runs_leave_the_cache(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 1) for name in "ab"]
    cache = tmp_path / CACHE_NAME
    summarise_many(runs, cache=cache)
    (runs[0] / "metrics.jsonl").unlink()
    runs[0].rmdir()
    make_run(tmp_path / "c", 1)
    summarise_many([tmp_path / "c"], cache=cache)
    assert set(json.loads(cache.read_bytes())["runs"]) == {"b", "c"}
    assert os.listdir(tmp_path).count(CACHE_NAME) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_processes_share_the_work_and_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / str(index), 4, index) for index in range(6)]
    alone = summarise_many(runs, jobs=1)
    monkeypatch.setattr(folders, "_MIN_POOL_SIZE", 0)
    assert summarise_many(runs, jobs=2) == alone


def test_an_empty_folder_and_no_folders_at_all(tmp_path: Path) -> None:
    assert summarise_folder(tmp_path) == {}
    assert summarise_many([]) == {}
