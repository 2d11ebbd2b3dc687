from __future__ import annotations

import json
from pathlib import Path

import pytest

from looplab.measure import folders
from looplab.measure.folders import FolderReading, summarise_many
from looplab.measure.summary import MetricSummary


def summarise_folder(run_dir: Path, reading: FolderReading | None = None) -> dict[str, MetricSummary]:
    return summarise_many([run_dir], reading, jobs=1)[run_dir]


def make_run(folder: Path, *losses: object) -> Path:
    folder.mkdir(parents=True)
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_a_folder_is_summarised(tmp_path: Path) -> None:
    summary = summarise_folder(make_run(tmp_path / "a", 4, 2, 3))["loss"]
    assert (summary.first, summary.last, summary.best, summary.best_step, summary.n) == (4, 3, 2, 1, 3)


def test_goals_and_aliases_apply(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 1, 2)
    assert summarise_folder(run)["loss"].best == 1
    assert summarise_folder(run, FolderReading(goals={"loss": "max"}))["loss"].best == 2
    assert set(summarise_folder(run, FolderReading(aliases={"train/loss": ["loss"]}))) == {"train/loss"}


def test_processes_share_the_work_and_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / str(index), 4, index) for index in range(6)]
    alone = summarise_many(runs, jobs=1)
    monkeypatch.setattr(folders, "_MIN_POOL_SIZE", 0)
    assert summarise_many(runs, jobs=2) == alone


def test_an_empty_folder_and_no_folders_at_all(tmp_path: Path) -> None:
    assert summarise_folder(tmp_path) == {}
    assert summarise_many([]) == {}
