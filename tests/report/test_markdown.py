from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from looplab.report.facts import study_facts
from looplab.report.markdown import block, code, render, table, text
from looplab.report.reports import knob_importance

HOSTILE = "<script>alert(1)</script> | [x](javascript:alert(1)) `code` **bold** \\ end"


def report_of(maker: Any) -> str:
    facts = study_facts(maker.lab, maker.study, maker.record)
    return render(facts, knob_importance(facts)[0])


def tables(report: str) -> list[list[str]]:
    """The rows of each table, as GitHub reads them."""
    found: list[list[str]] = [[]]
    for line in report.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


def cells(row: str) -> list[str]:
    return re.split(r"(?<!\\)\|", row)[1:-1]


def test_a_report_tells_where_the_study_stands_and_what_each_round_did(making: Any, maker: Any) -> None:
    maker.train(losses=[3.0, 2.0], proposer="base")
    maker.new_round()
    best = maker.train(making.edited(model__width=512), [3.0, 1.5], reason="wider may pay")
    report = report_of(maker)
    assert report.startswith("# Report of study tiny\n")
    assert f"**Best:** [{best.id}]({best.id}/) with **1.5**, -0.5 against its base" in report
    assert "one run is a hint, not a result" in report
    assert "runs 2 of 400" in report
    assert "needs at least 8 measured runs; there are 2" in report
    assert report.index("## Round 1") < report.index("## Round 2")
    row = next(line for line in report.splitlines() if "wider may pay" in line and line.startswith("|"))
    assert [cell.strip() for cell in cells(row)] == [
        f"[{best.id}]({best.id}/)", "queue", "ok", "**1.5**", "-0.5", "-0.5", "`model.width` 256 → 512", "wider may pay",
    ]  # fmt: skip


def test_the_metrics_of_the_best_run_begin_with_the_objective(full: Any) -> None:
    report = report_of(full)
    section = report.partition("## Metrics of the best run")[2].partition("\n## ")[0]
    names = [cells(row)[0].strip() for row in tables(section)[0][2:]]
    assert names[0] == "`eval/loss`"
    assert set(names) == {f"`{name}`" for name in ("eval/loss", "train/loss", "eval/accuracy", "grad_norm", "lr")}


def test_every_table_has_as_many_cells_in_each_row(making: Any, maker: Any) -> None:
    maker.train(making.edited(data__path=HOSTILE), reason=HOSTILE, hypothesis=HOSTILE)
    maker.reject(f"model.width@set={HOSTILE}", HOSTILE, HOSTILE)
    maker.fail(HOSTILE, making.edited(seed=2), reason=HOSTILE + "\n\n# not a heading")
    report = report_of(maker)
    for rows in tables(report):
        assert len({len(cells(row)) for row in rows}) == 1, rows
    without_blocks = re.sub(r"```text\n.*?\n```", "", report, flags=re.DOTALL)
    outside = re.sub(r"(?<![`\\])(`+)(?!`).*?(?<!`)\1(?!`)", "", without_blocks)
    assert not re.search(r"(?<!\\)<script", outside)
    assert not re.search(r"(?<!\\)\]\(javascript", outside)
    assert "\n# not a heading" not in report


def test_failures_come_with_their_last_lines_and_rejections_with_their_reasons(making: Any, maker: Any) -> None:
    maker.fail("```\nfence in the log\n```\nBOOM", making.edited(seed=2))
    maker.reject("model.width@set=9999", "9999 is above 2048", "bigger is better")
    report = report_of(maker)
    assert "### 1 run: failed, exit code 1" in report
    assert "````text\n```\nfence in the log\n```\nBOOM\n````" in report
    assert "9999 is above 2048" in report
    assert "bigger is better" in report


def test_a_large_round_shows_its_best_and_its_latest(making: Any, maker: Any) -> None:
    for n in range(70):
        maker.train(making.edited(seed=n), [5.0, 1.0 + n / 100])
    report = report_of(maker)
    rows = tables(report.partition("## Round 1")[2])[0][2:]
    assert len(rows) == 50
    assert "20 more are in summary.json and report.html" in report


def test_addresses_at_wandb_are_links(making: Any, maker: Any) -> None:
    run = maker.plan(making.BASE)
    maker.launch(run)
    maker.end(run, [], "View run at https://wandb.ai/me/p/runs/ab12\n")
    assert f"- {run.id}: <https://wandb.ai/me/p/runs/ab12>" in report_of(maker)


def test_a_study_without_runs_has_a_report(maker: Any) -> None:
    assert "none yet; `looplab run` starts the study" in report_of(maker)


@given(st.text())
def test_foreign_text_stays_on_its_line_and_in_its_cell(given_text: str) -> None:
    for shown in (text(given_text), code(given_text)):
        assert "\n" not in shown
        assert len(cells(f"| {shown} |")) == 1


@given(st.text(alphabet="`ab\n"))
def test_a_block_of_code_ends_where_it_should(given_text: str) -> None:
    first, *inner, last = "\n".join(block(given_text)).split("\n")
    assert first == last + "text"
    assert last not in inner


def test_raw_tables_line_up() -> None:
    rows = table(["name", "value", "why"], [["a", "1", "x"], ["longer", "22.5", "yy"]], [1])
    assert rows == [
        "| name   | value | why |",
        "| ------ | ----: | --- |",
        "| a      |     1 | x |",
        "| longer |  22.5 | yy |",
    ]
