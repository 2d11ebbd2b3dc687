from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from looplab.cli import reporting
from looplab.errors import LabError
from looplab.report.facts import study_facts
from looplab.report.reports import write, write_reports


def test_three_files_are_written_and_nothing_is_left_over(full: Any) -> None:
    written = write_reports(full.lab, full.study, full.record)
    assert [path.name for path in written] == ["report.md", "report.html", "summary.json"]
    assert all(path.parent == full.outputs and path.stat().st_size for path in written)
    assert not list(full.outputs.glob(".tmp-*"))


def test_the_summary_holds_every_run_on_a_line_of_its_own(full: Any) -> None:
    path = write_reports(full.lab, full.study, full.record)[2]
    summary = json.loads(path.read_text())
    runs = full.record.runs()
    assert list(summary["runs"]) == [run.id for run in runs]
    best = full.record.best()
    assert summary["best"] == best.id
    printed_json = summary["runs"][best.id]
    assert (printed_json["status"], printed_json["objective"]) == ("ok", best.objective)
    assert printed_json["metrics"]["eval/loss"]["last"] == best.objective
    assert printed_json["knobs"]["train.learning_rate"] > 0
    lines = path.read_text().splitlines()
    assert sum(line.startswith(f'    "{run.id}": {{') for run in runs for line in lines) == len(runs)


def test_reports_can_be_written_while_runs_are_planned_running_and_measured_as_nan(making: Any, maker: Any) -> None:
    maker.train(losses=[1.0, float("nan")])
    maker.launch(maker.plan(making.edited(seed=3)))
    maker.plan(making.edited(seed=4))
    path = write_reports(maker.lab, maker.study, maker.record)[2]
    printed_json = json.loads(path.read_text())["runs"].values()
    assert [(run["status"], run["objective"]) for run in printed_json] == [
        ("ok", None), ("running", None), ("planned", None),
    ]  # fmt: skip


def test_the_command_writes_reports_and_plots_and_says_where(full: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    reporting.report(full.lab, None, None, True)
    printed_json = json.loads(capsys.readouterr().out)
    names = [Path(path).relative_to(full.outputs) for path in printed_json["files"]]
    assert list(map(str, names)) == [
        "report.md", "report.html", "summary.json", "plots/curves.png", "plots/best_so_far.png", "plots/knobs.png",
    ]  # fmt: skip
    for path in printed_json["files"][3:]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")
    assert "![curves](plots/curves.png)" in (full.outputs / "report.md").read_text()
    assert printed_json["best"]["id"] == full.record.best().id


def test_without_matplotlib_there_is_a_note_and_no_failure(
    maker: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.train()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reporting.report(maker.lab, None, None, False)
    printed = capsys.readouterr().out
    assert "report.html" in printed
    assert "pip install 'looplab[plots]'" in printed
    assert "![" not in (maker.outputs / "report.md").read_text()


def test_plots_that_no_longer_hold_are_taken_away(making: Any, maker: Any) -> None:
    pytest.importorskip("matplotlib")
    old = maker.outputs / "plots" / "knobs.png"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    maker.train()
    written = write(study_facts(maker.lab, maker.study, maker.record), maker.study, plots=True)
    assert [path.name for path in written[3:]] == ["curves.png", "best_so_far.png"]
    assert not old.exists()


def test_a_lab_that_never_ran_says_what_to_do(making: Any, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(making.LAB)
    with pytest.raises(LabError, match="looplab run"):
        reporting.report(tmp_path, None, None, False)
