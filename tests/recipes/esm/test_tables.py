"""The tables: what they hold, and that they say how often the test set was read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from looplab.recipes.esm.esm import tables
from looplab.recipes.esm.esm.config import EsmSettings, parse_settings
from looplab.recipes.esm.esm.data import Example
from looplab.recipes.esm.esm.evaluate import Report


def row(correct: bool, tokens: int = 10, probes: int = 0, chosen: str | None = None, **more: Any) -> dict[str, Any]:
    steps = (
        [{"m": 1, "chosen": None, "mem_reason": None}, {"m": 2, "chosen": chosen, "mem_reason": "ok"}] if probes else []
    )
    return {"correct": correct, "pred": "1", "text": "#### 1", "tokens_used": tokens, "probe_tokens_used": probes,
            "finish_reason": "stop", "steps": steps, "tokens_hash": str(correct), **more}  # fmt: skip


@pytest.fixture
def config() -> EsmSettings:
    return parse_settings({"task": {"dataset": "gsm8k"}, "eval": {"ablations": ["random_direction"]}})


@pytest.fixture
def report() -> Report:
    examples = [Example(f"test-{i}", f"question {i}", "1", "number") for i in range(10)]
    rows = {
        "greedy": [[row(i < 4) for i in range(10)]],
        "esm": [[row(i < 8, 12, 6, "tool" if i % 2 else None) for i in range(10)]],
        "random_direction": [[row(i < 4) for i in range(10)], [row(i < 6) for i in range(10)]],
    }
    return Report("test", examples, 256, rows, test_reads=3)


def read(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def test_the_main_table_has_accuracy_interval_cost_and_count(
    report: Report, config: EsmSettings, tmp_path: Path
) -> None:
    tables.write(report, config, tmp_path)
    (main,) = read(tmp_path / "tables" / "main_results_single.csv")
    assert list(main)[:5] == ["dataset", "split", "T_max", "Greedy-CoT", "ESM"]
    assert (main["Greedy-CoT"], main["ESM"], main["delta"], main["n"]) == ("0.4", "0.8", "0.4", "10")
    assert float(main["ci_low"]) < 0.4 < float(main["ci_high"])
    assert float(main["mcnemar_p"]) == pytest.approx(0.125)
    assert (main["tokens"], main["probe_tokens"], main["probe_overhead"], main["test_reads"]) == (
        "12.0",
        "6.0",
        "0.5",
        "3",
    )


def test_an_ablation_with_seeds_shows_their_range(report: Report, config: EsmSettings, tmp_path: Path) -> None:
    tables.write(report, config, tmp_path)
    rows = {line["variant"]: line for line in read(tmp_path / "tables" / "ablation.csv")}
    assert list(rows) == ["greedy", "esm", "random_direction"]
    control = rows["random_direction"]
    assert (control["acc"], control["acc_min"], control["acc_max"], control["seeds"]) == ("0.5", "0.4", "0.6", "2")
    assert {line["test_reads"] for line in rows.values()} == {"3"}


def test_rates_are_over_steps_where_the_memory_could_act(report: Report) -> None:
    found = tables.diagnostics(report, "esm")
    assert found["steps"] == 10
    assert found["tool_step_rate"] == pytest.approx(0.5)
    assert found["gates"] == {"ok": 10}
    assert found["overhead_ratio"] == pytest.approx(0.5)
    assert tables.diagnostics(report, "greedy")["tool_step_rate"] == 0


def test_the_comparison_names_its_questions(report: Report, config: EsmSettings, tmp_path: Path) -> None:
    tables.write(report, config, tmp_path)
    found = json.loads((tmp_path / "tables" / "compare_T256.json").read_bytes())
    assert found["win_ids"] == [f"test-{i}" for i in range(4, 8)]
    counts = ("win", "lose", "both_correct", "both_wrong", "net_win", "hard_n")
    assert tuple(found[name] for name in counts) == (4, 0, 4, 2, 4, 6)


def test_differences_without_a_memory_are_reported(report: Report, config: EsmSettings, tmp_path: Path) -> None:
    report.rows["no_memory"] = report.rows["greedy"]
    assert not any("differ" in note for note in tables.write(report, config, tmp_path))
    report.rows["no_memory"] = [[row(i < 5) for i in range(10)]]
    assert "1 answers differ" in tables.write(report, config, tmp_path)[-1]


def test_greedy_alone_leaves_the_other_cells_empty(report: Report, tmp_path: Path) -> None:
    alone = Report("dev", report.examples, 256, {"greedy": report.rows["greedy"]})
    tables.write(alone, parse_settings({"task": {"dataset": "gsm8k"}, "eval": {"methods": ["greedy"]}}), tmp_path)
    (main,) = read(tmp_path / "tables" / "main_results_single.csv")
    assert (main["ESM"], main["delta"], main["mcnemar_p"]) == ("", "", "")
    assert not (tmp_path / "tables" / "ablation.csv").exists()


def test_the_figure_is_a_pdf_that_does_not_change(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert tables.figure(report, tmp_path / "a.pdf") == []
    tables.figure(report, tmp_path / "b.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()


@pytest.mark.parametrize(
    ("esm", "rivals", "sentence"),
    [
        (
            30,
            {"greedy": 5, "majority": 6, "mean_vector": 12},
            "ESM wins against its best rival, one mean vector: 0.750",
        ),
        (12, {"greedy": 5, "majority": 30, "mean_vector": 6}, "ESM loses to majority vote: 0.300 against 0.750"),
        (20, {"greedy": 5, "majority": 6, "mean_vector": 20}, "Undecided between ESM and its best rival"),
        (30, {"greedy": 5}, "not compared with majority vote and one mean vector"),
    ],
)
def test_the_headline_says_who_wins(esm: int, rivals: dict[str, int], sentence: str) -> None:
    correct = {name: [[place < right for place in range(40)]] for name, right in {**rivals, "esm": esm}.items()}
    assert sentence in tables.headline(correct)


def test_controls_and_ablations_are_not_rivals() -> None:
    correct = {
        "greedy": [[False] * 9],
        "esm": [[True] * 9],
        "no_probing": [[True] * 9],
        "random_direction": [[True] * 9],
    }
    found = tables.best_rival(correct)
    assert found is not None
    assert found[0] == "greedy"


def test_the_headline_is_in_the_tables(report: Report, config: EsmSettings, tmp_path: Path) -> None:
    notes = tables.write(report, config, tmp_path)
    assert (tmp_path / "tables" / "headline.txt").read_text().strip() in notes
    report.rows["mean_vector"] = report.rows["greedy"]
    assert any("eval.own.mean_vector" in note for note in tables.write(report, config, tmp_path))
