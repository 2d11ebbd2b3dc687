from __future__ import annotations

from pathlib import Path

import pytest

from looplab.measure.csv import CsvSource

Points = dict[str, list[tuple[float, float]]]


def poll(source: CsvSource, final: bool = False) -> Points:
    return {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in source.poll(final).items()}


def read(tmp_path: Path, text: str) -> tuple[Points, CsvSource]:
    path = tmp_path / "progress.csv"
    path.write_text(text)
    source = CsvSource(path)
    return poll(source), source


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_delimiter_is_found(tmp_path: Path, delimiter: str) -> None:
    found, _ = read(tmp_path, "step,loss,acc\n1,0.5,0.1\n2,0.25,0.2\n".replace(",", delimiter))
    assert found == {"loss": [(1, 0.5), (2, 0.25)], "acc": [(1, 0.1), (2, 0.2)]}


def test_cells_that_are_not_numbers_are_missing(tmp_path: Path) -> None:
    found, source = read(tmp_path, "step,loss,note\n1,,begin\n2,0.5,\n3,None,end\n4,nan,x\n")
    assert found["loss"][0] == (2, 0.5)
    assert [step for step, _ in found["loss"]] == [2, 4]
    assert "note" not in found
    assert source.skipped == 0


@pytest.mark.parametrize("name", ["step", "Step", "global_step", "iteration", "iter", "epoch", "time/total_timesteps"])
def test_the_step_column_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    found, _ = read(tmp_path, f"loss,{name}\n0.5,10\n0.25,20\n")
    assert found == {"loss": [(10, 0.5), (20, 0.25)]}


def test_without_a_step_column_rows_are_numbered(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "loss\n0.5\n0.25\n")
    assert found == {"loss": [(0, 0.5), (1, 0.25)]}


def test_a_repeated_header_is_not_a_row(tmp_path: Path) -> None:
    found, source = read(tmp_path, "step,loss\n1,0.5\nstep,loss\n1,0.4\n2,0.3\n")
    assert found == {"loss": [(1, 0.5), (1, 0.4), (2, 0.3)]}
    assert source.skipped == 0


def test_a_restarted_trainer_may_have_other_columns(tmp_path: Path) -> None:
    found, source = read(tmp_path, "step,loss\n1,0.5\nstep,acc,loss\n2,0.9,0.3\n")
    assert found == {"loss": [(1, 0.5), (2, 0.3)], "acc": [(2, 0.9)]}
    assert source.skipped == 0


def test_rows_of_the_wrong_width_are_counted(tmp_path: Path) -> None:
    found, source = read(tmp_path, "step,loss\n1,0.5\n2\n3,0.4,9\n4,0.3\n")
    assert found == {"loss": [(1, 0.5), (4, 0.3)]}
    assert source.skipped == 2


def test_quoted_cells_and_names(tmp_path: Path) -> None:
    found, _ = read(tmp_path, '"step","loss, train",note\n1,0.5,"a, b"\n')
    assert found == {"loss, train": [(1, 0.5)]}


def test_a_comment_line_and_a_byte_order_mark_are_not_a_header(tmp_path: Path) -> None:
    assert read(tmp_path, '#{"t_start": 1.5, "env_id": "x"}\nr,l\n1.0,20\n')[0] == {"r": [(0, 1.0)], "l": [(0, 20.0)]}
    assert read(tmp_path, "\ufeffstep,loss\n1,0.5\n")[0] == {"loss": [(1, 0.5)]}


def test_a_file_of_bare_numbers_has_no_metrics(tmp_path: Path) -> None:
    found, source = read(tmp_path, "1,2\n3,4\n")
    assert found == {}
    assert source.skipped == 2


def test_a_file_rewritten_with_a_wider_header_returns_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    path.write_text("step,loss\n1,0.5\n2,0.4\n")
    source = CsvSource(path)
    assert poll(source) == {"loss": [(1, 0.5), (2, 0.4)]}
    path.write_text("step,loss,acc\n1,0.5,\n2,0.4,\n3,0.3,0.9\n")
    assert poll(source) == {"loss": [(3, 0.3)], "acc": [(3, 0.9)]}


def test_evaluation_rows_without_a_step_belong_to_the_last_step(tmp_path: Path) -> None:
    found, _ = read(tmp_path, "step,loss,val\n10,0.5,\n,,0.7\n20,0.4,\n")
    assert found == {"loss": [(10, 0.5), (20, 0.4)], "val": [(10, 0.7)]}
