from __future__ import annotations

from pathlib import Path

import pytest

from looplab.measure.base import Curve
from looplab.measure.jsonl import JsonlSource


def read(tmp_path: Path, text: str, final: bool = False) -> tuple[dict[str, list[tuple[float, float]]], JsonlSource]:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    source = JsonlSource(path)
    return points(source.poll(final)), source


def points(batch: dict[str, Curve]) -> dict[str, list[tuple[float, float]]]:
    return {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in batch.items()}


def test_clocks_are_not_metrics(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '{"step": 10, "time": 1712.3, "_timestamp": 1.0, "_runtime": 2, "loss": 0.3}\n')
    assert found == {"loss": [(10, 0.3)]}


def test_words_for_infinity_are_numbers_and_other_words_are_missing(tmp_path: Path) -> None:
    found, source = read(
        tmp_path, '{"step": 1, "a": "Infinity", "b": "-Infinity", "c": "good", "d": null, "e": [1, 2]}\n'
    )
    assert found == {"a": [(1, float("inf"))], "b": [(1, float("-inf"))]}
    assert source.skipped == 0


def test_truth_values_are_0_and_1(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '{"step": 1, "ok": true}\n{"step": 2, "ok": false}\n')
    assert found == {"ok": [(1, 1.0), (2, 0.0)]}


def test_nested_objects_are_flattened(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '{"step": 1, "eval": {"loss": 0.5, "by_class": {"cat": 1}}}\n')
    assert found == {"eval/loss": [(1, 0.5)], "eval/by_class/cat": [(1, 1.0)]}


def test_rows_without_a_step_are_numbered_from_0(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '{"loss": 3}\n{"loss": 2}\n{"loss": 1}\n')
    assert found == {"loss": [(0, 3.0), (1, 2.0), (2, 1.0)]}


def test_a_row_without_a_step_belongs_to_the_last_step_seen(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '{"step": 100, "loss": 3}\n{"eval_loss": 2}\n')
    assert found == {"loss": [(100, 3.0)], "eval_loss": [(100, 2.0)]}


@pytest.mark.parametrize("name", ["_step", "global_step", "iteration", "epoch"])
def test_other_names_for_the_step_are_known(tmp_path: Path, name: str) -> None:
    found, _ = read(tmp_path, f'{{"{name}": 7, "loss": 3}}\n')
    assert found == {"loss": [(7, 3.0)]}


def test_an_epoch_next_to_a_step_is_a_metric(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '{"step": 7, "epoch": 1, "loss": 3}\n{"epoch": 2, "eval": 1}\n')
    assert found == {"epoch": [(7, 1.0), (7, 2.0)], "loss": [(7, 3.0)], "eval": [(7, 1.0)]}


def test_rows_with_different_names_keep_their_order(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '{"step": 1, "a": 1}\n{"a": 2, "step": 2}\n{"step": 3, "b": 3}\n{"step": 4, "a": 4}\n')
    assert found == {"a": [(1, 1.0), (2, 2.0), (4, 4.0)], "b": [(3, 3.0)]}


def test_a_bad_step_is_a_missing_step(tmp_path: Path) -> None:
    found, _ = read(
        tmp_path, '{"step": 5, "a": 1}\n{"step": "x", "a": 2}\n{"step": NaN, "a": 3}\n{"step": 6, "a": 4}\n'
    )
    assert found == {"a": [(5, 1.0), (5, 2.0), (5, 3.0), (6, 4.0)]}


def test_lines_that_are_not_objects_are_counted(tmp_path: Path) -> None:
    found, source = read(tmp_path, '{"step": 1, "a": 1}\n[1]\nTraceback\n\n{"step": 2, "a": 2}\n{"step": 3, "a"\n')
    assert found == {"a": [(1, 1.0), (2, 2.0)]}
    assert source.skipped == 3


def test_numbers_too_large_for_a_float_do_not_stop_the_reader(tmp_path: Path) -> None:
    found, _ = read(tmp_path, f'{{"step": 1, "a": 1{"0" * 400}, "b": 2, "c": NaN}}\n')
    assert found["b"] == [(1, 2.0)]


def test_windows_line_ends_are_fine(tmp_path: Path) -> None:
    found, source = read(tmp_path, '{"step": 1, "a": 1}\r\n{"step": 2, "a": 2}\r\n')
    assert found == {"a": [(1, 1.0), (2, 2.0)]}
    assert source.skipped == 0


def test_the_last_line_needs_its_newline_unless_the_writer_ended(tmp_path: Path) -> None:
    text = '{"step": 1, "a": 1}\n{"step": 2, "a": 2}'
    assert read(tmp_path, text)[0] == {"a": [(1, 1.0)]}
    assert read(tmp_path, text, final=True)[0] == {"a": [(1, 1.0), (2, 2.0)]}


def test_a_line_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looplab.measure.tail.CHUNK", 100)
    monkeypatch.setattr("looplab.measure.tail.MAX_LINE", 1000)
    found, source = read(tmp_path, "x" * 5000 + '\n{"step": 1, "a": 1}\n')
    assert found == {"a": [(1, 1.0)]}
    assert source.skipped >= 1
