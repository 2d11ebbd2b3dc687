from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.cli import reporting
from looplab.errors import LabError
from looplab.measure.base import Curve
from looplab.report.compare import MISSING, RunComparison, compare, compare_page, differing, spark, sparks
from looplab.report.wording import BARS


def compared(maker: Any, *names: str) -> RunComparison:
    return compare(maker.outputs, maker.study, maker.record, names)


@pytest.fixture
def three(making: Any, maker: Any) -> Any:
    maker.train(losses=[3.0, 2.0, 2.0], proposer="base")
    config = making.edited(model__width=512)
    config["model"]["extra"] = {"depth": 3}
    maker.train(config, [3.0, 1.5, 1.25])
    maker.train(making.edited(model__width=512, seed=2), [3.0, 0.5, 1.0])
    return maker


def test_only_keys_that_differ_are_shown(three: Any) -> None:
    assert compared(three, "1", "2", "3").config == {
        "model.width": (256, 512, 512),
        "seed": (1, 1, 2),
        "model.extra.depth": (MISSING, 3, MISSING),
    }
    assert set(compared(three, "2", "3").config) == {"seed", "model.extra.depth"}


def test_values_that_print_alike_but_are_of_another_type_differ() -> None:
    assert differing([{"a": 1, "b": None}, {"a": 1.0, "b": None}]) == {"a": (1, 1.0)}
    assert differing([{"b": None}, {}]) == {"b": (None, MISSING)}


def test_metrics_stand_against_the_first_run(three: Any) -> None:
    metric = compared(three, "1", "2", "BEST").metrics[0]
    assert (metric.metric, metric.goal, metric.known) == ("eval/loss", "min", True)
    assert metric.last == (2.0, 1.25, 1.0)
    assert metric.best == (2.0, 1.25, 0.5)
    assert [metric.delta(place) for place in range(3)] == [None, -0.75, -1.0]


def test_a_run_that_goes_on_is_compared_by_what_it_has_measured(three: Any, making: Any) -> None:
    run = three.plan(making.edited(seed=5))
    with pytest.raises(LabError, match="has not started"):
        compared(three, "1", run.id)
    (three.launch(run) / "metrics.jsonl").write_text('{"step": 0, "eval/loss": 3}\n{"step": 1, "eval/loss": 2.5}\n')
    assert compared(three, "1", run.id).metrics[0].last == (2.0, 2.5)


def test_there_must_be_two_runs(three: Any) -> None:
    with pytest.raises(LabError, match="nothing to compare"):
        compared(three, "1")
    with pytest.raises(LabError, match="the same run"):
        compared(three, "3", "BEST")
    with pytest.raises(LabError, match="has no run '99'"):
        compared(three, "1", "99")


def test_curves_in_text_share_their_axes(three: Any) -> None:
    first, second, third = sparks(compared(three, "1", "2", "3"), "eval/loss", 9)
    assert first[0] == second[0] == third[0] == BARS[-1]
    assert first[-1] > second[-1] > third[-1]
    assert third[4] == BARS[0]
    assert {len(line) for line in (first, second, third)} == {9}


@given(st.lists(st.floats()), st.integers(1, 40))
def test_a_curve_in_text_never_fails_and_keeps_its_width(values: list[float], width: int) -> None:
    steps = [float(step) for step in range(len(values))]
    line = spark(Curve(steps, values), (0.0, max(steps, default=0.0)), (-1.0, 1.0), width)
    assert len(line) == width
    assert set(line) <= {" ", *BARS}


def test_the_command_prints_tables_and_curves_and_writes_a_page(
    three: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], browser: Any
) -> None:
    page = tmp_path / "side by side.html"
    reporting.compare(three.lab, None, ["1", "2", "3"], page, False)
    printed = capsys.readouterr().out
    ids = [three.record.run(str(n)).id for n in (1, 2, 3)]
    assert printed.splitlines()[1].split() == ["key", *ids]
    assert "1.25 (-0.75)" in printed
    assert BARS[-1] in printed
    assert printed.rstrip().endswith(str(page))
    browser.open(page)
    assert browser.errors == []
    assert browser.requests == [page.resolve().as_uri()]
    lines = browser.js(
        "charts[0].columns.map((_, i) => Array.from(charts[0].plot.data[i + 1]).filter(Number.isFinite))"
    )
    assert [len(line) for line in lines] == [3, 3, 3]
    text = browser.js("document.querySelector('main').innerText")
    assert all(run in text for run in ids)
    assert "model.width" in text


def test_json_holds_what_the_tables_show(three: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    reporting.compare(three.lab, None, ["1", "3"], None, True)
    printed_json = json.loads(capsys.readouterr().out)
    first, third = (three.record.run(n).id for n in ("1", "3"))
    assert printed_json["config"]["seed"] == {first: 1, third: 2}
    assert printed_json["metrics"]["eval/loss"]["runs"][third] == {"last": 1.0, "best": 0.5, "delta": -1.0}


def test_a_page_cannot_be_written_where_there_is_no_folder(three: Any, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="cannot write"):
        reporting.compare(three.lab, None, ["1", "2"], tmp_path / "missing" / "page.html", False)


def test_nothing_in_a_comparison_can_end_its_data(three: Any, making: Any) -> None:
    three.train(making.edited(data__path="</script><b>"), reason="</script>")
    assert compare_page(compared(three, "1", "4")).count("</script>") == 4
