"""The page of a study in a real browser: charts, pointer and keyboard; no requests, no injected scripts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.report.reports import write_reports

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<a href='javascript:1'>&lt;b&gt; <!-- \u2028"
)


def page_of(maker: Any) -> Path:
    written = write_reports(maker.lab, maker.study, maker.record)
    return next(path for path in written if path.name == "report.html")


@pytest.fixture(scope="session")
def page(full: Any) -> Path:
    return page_of(full)


def shapes(browser: Any, selector: str) -> list[str]:
    return list(browser.js(f"[...document.querySelectorAll({selector!r})].map((node) => node.getAttribute('d'))"))


def drawn(browser: Any) -> list[list[float | None]]:
    """The values of the lines in the chart of curves."""
    lines = "curves.columns.map((one, i) => (one ? Array.from(curves.plot.data[i + 1]) : null)).filter(Boolean)"
    found: list[list[float | None]] = json.loads(browser.js(f"JSON.stringify({lines})"))
    return found


def inked(browser: Any) -> int:
    """How many pixels of the chart of curves are not transparent."""
    return int(
        browser.js(
            "(() => { const {ctx} = curves.plot; const all = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height).data;"
            " let n = 0; for (let i = 3; i < all.length; i += 4) n += all[i] > 0; return n; })()"
        )
    )


def box(browser: Any, selector: str, place: int = 0) -> tuple[float, float, float, float]:
    x, y, width, height = browser.js(
        f"(() => {{ const node = document.querySelectorAll({selector!r})[{place}];"
        " node.scrollIntoView({block: 'center'});"
        " const r = node.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; })()"
    )
    return x, y, width, height


def test_the_dumped_page_holds_curves(page: Path, browser: Any, tmp_path: Path) -> None:
    dumped = subprocess.run(
        [browser.program, *browser.flags, f"--user-data-dir={tmp_path}", "--virtual-time-budget=4000", "--dump-dom",
         page.as_uri()],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    ).stdout  # fmt: skip
    assert "<canvas" in dumped
    paths = re.findall(r'<path class="line[^"]*" d="([^"]*L[^"]*)"', dumped)
    assert len(paths) > 40


def test_all_charts_are_drawn_and_no_request_leaves_the_page(page: Path, browser: Any) -> None:
    browser.open(page)
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    lines = drawn(browser)
    assert len(lines) == browser.js("DATA.curves[0][2].length") == 40
    assert min(sum(value is not None for value in line) for line in lines) > 5
    assert len(set(map(tuple, lines))) == len(lines)
    assert inked(browser) > 500
    assert len(shapes(browser, ".bestline")) == 1
    knobs = "section[aria-label='Knobs and objective'] .base path.line"
    assert browser.js(f'document.querySelectorAll("{knobs}").length') == browser.js("order.length")
    assert browser.js("document.querySelectorAll('section[aria-label=Lineage] .trunk').length") >= 1
    assert browser.js("document.querySelectorAll('.shares .row').length") >= 6
    assert browser.js("table.view.length") == 60


def test_the_file_names_nothing_outside_itself(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_pointing_at_a_curve_tells_its_values_and_marks_the_run_everywhere(page: Path, browser: Any) -> None:
    browser.open(page)
    point = browser.js(
        "(() => { const over = curves.plot.over.getBoundingClientRect(); const at = curves.columns.findIndex((one) => one && one.id === DATA.best);"
        " const middle = Math.floor(curves.plot.data[0].length / 2);"
        " return [over.left + curves.plot.valToPos(curves.plot.data[0][middle], 'x'),"
        "  over.top + curves.plot.valToPos(curves.plot.data[at + 1][middle], 'y')]; })()"
    )
    browser.mouse("mouseMoved", point[0] - 1, point[1])
    browser.mouse("mouseMoved", *point)
    browser.wait_for("focus.hover !== null && !tip.hidden")
    tooltip = browser.js("tip.innerText")
    hovered = browser.js("RUNS[focus.hover].id")
    assert hovered in tooltip
    assert re.search(r"step \d+: \d\.\d+", tooltip)
    browser.js("table.reveal(focus.hover)")
    assert browser.js("document.querySelector('tr.hot td').textContent") == hovered
    assert browser.js("[...document.querySelectorAll('svg .hot')].length") >= 3
    browser.mouse("mouseMoved", 2, 2)
    browser.wait_for("focus.hover === null && tip.hidden")


def test_another_metric_and_a_log_scale_draw_other_lines(page: Path, browser: Any) -> None:
    browser.open(page)
    before, scale = drawn(browser), browser.js("curves.plot.scales.y.distr")
    assert browser.js("document.querySelector('.card select').value") == "eval/loss"
    browser.js("document.querySelector('section[aria-label=Curves] input').click()")
    assert (scale, browser.js("curves.plot.scales.y.distr")) == (1, 3)
    browser.js(
        "(() => { const menu = document.querySelector('.card select'); menu.value = 'grad_norm';"
        " menu.dispatchEvent(new Event('change')); })()"
    )
    other = drawn(browser)
    assert len(before) == len(other)
    assert before != other
    assert browser.errors == []


def test_a_part_of_the_curves_can_be_zoomed_into_and_back(page: Path, browser: Any) -> None:
    browser.open(page)
    x, y, width, height = box(browser, "section[aria-label=Curves] .u-over")
    browser.mouse("mousePressed", x + width / 4, y + height / 2)
    for part in (0.3, 0.4, 0.5):
        browser.send(
            "Input.dispatchMouseEvent",
            type="mouseMoved",
            x=x + part * width,
            y=y + height / 2,
            button="left",
            buttons=1,
        )
    browser.mouse("mouseReleased", x + width / 2, y + height / 2)
    browser.wait_for("curves.zoom !== null")
    low, high = browser.js("curves.zoom")
    last = browser.js("curves.plot.data[0].at(-1)")
    assert 0 < low < high < last
    browser.js("[...document.querySelectorAll('button')].find((b) => b.textContent === 'reset zoom').click()")
    browser.wait_for("curves.zoom === null && curves.plot.scales.x.max === curves.plot.data[0].at(-1)")


def test_a_click_on_a_row_picks_the_run_in_all_charts_and_escape_lets_it_go(page: Path, browser: Any) -> None:
    browser.open(page)
    x, y, _, height = box(browser, "tr[data-id]", 3)
    browser.click(x + 20, y + height / 2)
    browser.wait_for("focus.picked !== null")
    picked = browser.js("RUNS[focus.picked].id")
    assert browser.js("document.querySelectorAll('tr[data-id]')[3].cells[0].textContent") == picked
    assert browser.js("document.querySelector('.panel').hidden") is False
    assert picked in browser.js("document.querySelector('.panel').innerText")
    assert browser.js("location.hash") == f"#{picked}"
    assert browser.js("[...document.querySelectorAll('svg.quiet')].length") >= 3
    assert browser.js("curves.hot") == browser.js("focus.picked") or not browser.js(
        "curves.columns.some((one) => one && one.id === focus.picked)"
    )
    browser.key("Escape")
    browser.wait_for("focus.picked === null && document.querySelector('.panel').hidden")


def test_an_address_with_a_run_opens_with_that_run(full: Any, page: Path, browser: Any) -> None:
    run = full.record.run("12").id
    browser.open(page, fragment=f"#{run}")
    browser.wait_for("focus.picked !== null")
    assert browser.js("document.querySelector('.panel b').textContent") == run
    links = dict(browser.js("[...document.querySelectorAll('.panel a')].map((link) => [link.textContent, link.href])"))
    assert links["folder"] == (page.parent / run).as_uri() + "/"
    assert links["W&B"].startswith("https://wandb.ai/")


def test_the_table_sorts_filters_and_is_reached_by_keyboard(page: Path, browser: Any) -> None:
    browser.open(page)
    cells = "[...document.querySelectorAll('tr[data-id]')].map((row) => row.cells[{}].textContent)"
    measured = [float(value) for value in browser.js(cells.format(1)) if value != "–"]
    assert measured == sorted(measured)
    assert len(measured) > 20
    browser.js("[...document.querySelectorAll('th button')].find((b) => b.textContent.startsWith('run')).click()")
    assert browser.js(cells.format(0)) == sorted(browser.js(cells.format(0)))
    browser.js("document.querySelector('input[type=search]').focus()")
    browser.type("muon leaders")
    browser.wait_for("focus.shown !== null")
    shown = browser.js("table.view.length")
    assert 0 < shown < 60
    assert (
        browser.js("document.querySelectorAll('section[aria-label=\"Best so far\"] .base .out').length") == 60 - shown
    )
    browser.js("document.querySelector('tr[data-id]').focus()")
    browser.key("ArrowDown")
    assert browser.js("document.activeElement === document.querySelectorAll('tr[data-id]')[1]")
    assert browser.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.key("Enter")
    browser.wait_for("focus.picked !== null")


def test_any_knob_or_metric_can_be_a_column_and_a_filter(page: Path, browser: Any) -> None:
    browser.open(page)
    browser.js("(() => { const menu = document.querySelector('details.columns'); menu.open = true; })()")
    browser.wait_for("document.querySelectorAll('.column-list input').length > 10")
    browser.js(
        "[...document.querySelectorAll('.column-list label')].find((one) => one.textContent === 'width').firstChild.click()"
    )
    assert "width" in browser.js("[...document.querySelectorAll('th button')].map((one) => one.textContent)")
    browser.js("document.querySelector('input[type=search]').focus()")
    browser.type("model.width>256 -by:search")
    browser.wait_for("focus.shown !== null")
    widths = browser.js("DATA.knobs.findIndex((knob) => knob.key === 'model.width')")
    kept = browser.js(f"table.view.map((run) => [run.knobs[{widths}], run.by])")
    assert kept
    assert all(width > 256 and by != "search" for width, by in kept)


def test_dragging_along_an_axis_keeps_only_the_runs_inside(page: Path, browser: Any) -> None:
    browser.open(page)
    last = browser.js("document.querySelectorAll('.brush-area').length") - 1
    x, y, width, height = box(browser, ".brush-area", last)
    browser.drag(x + width / 2, y, y + height / 4)
    browser.wait_for("focus.shown !== null")
    kept = browser.js("[...focus.shown].map((run) => RUNS[run].obj)")
    others = browser.js("order.filter((run) => !focus.shown.has(run)).map((run) => RUNS[run].obj)")
    assert kept
    assert max(kept) <= min(others)
    browser.js("[...document.querySelectorAll('button')].find((b) => b.textContent === 'clear selection').click()")
    assert browser.js("focus.shown") is None


def test_nothing_in_reasons_logs_or_configs_runs(making: Any, maker: Any, browser: Any) -> None:
    maker.train(making.edited(data__path=HOSTILE), reason=HOSTILE, hypothesis=HOSTILE, proposer="base")
    maker.train(making.edited(data__path="plain", model__activation=HOSTILE), reason="fine")
    maker.fail(HOSTILE, making.edited(seed=2), reason=HOSTILE)
    maker.reject(f"model.width@set={HOSTILE}", HOSTILE, HOSTILE)
    (maker.outputs / maker.record.run("1").id / "record/notes.md").write_text(HOSTILE)
    path = page_of(maker)
    assert path.read_text().count("</script>") == 4
    browser.open(path, fragment=f"#{maker.record.run('1').id}")
    assert browser.errors == []
    assert browser.js("document.title") == "tiny – looplab"
    assert browser.js("document.querySelectorAll('img, main script').length") == 0
    assert browser.requests == [path.as_uri()]
    assert "onerror=" in browser.js("document.querySelector('.panel').innerText")
    refused = browser.js(
        "(() => { const one = document.createElement('script'); one.textContent = \"document.title = 'owned'\";"
        " document.body.append(one); return document.title; })()"
    )
    assert refused == "tiny – looplab"


def test_names_of_metrics_and_values_may_be_anything(making: Any, maker: Any, browser: Any) -> None:
    names = ["</script>", "7", "__proto__", "half \ud800", "a.b/c\"'", "x" * 200]
    config = making.edited(seed=2**60 + 1)
    config["</script>"] = {"key": [1, {"deep": None}]}
    for seed, each in enumerate((making.edited(seed=1), config)):
        run = maker.plan(each)
        maker.launch(run)
        losses = [{"step": step, "eval/loss": 3.0 - step - seed} for step in range(3)]
        maker.end(run, [{**row, **{name: float(row["step"]) for name in names}} for row in losses])
    browser.open(page_of(maker))
    assert browser.errors == []
    assert browser.js("[...document.querySelector('.card select').options].map((one) => one.value)[0]") == "eval/loss"
    assert browser.js("document.querySelector('.card select').options.length") == 7
    for place in range(7):
        browser.js(
            f"(() => {{ const menu = document.querySelector('.card select'); menu.selectedIndex = {place};"
            " menu.dispatchEvent(new Event('change')); })()"
        )
        assert len(drawn(browser)) == 2
    assert browser.errors == []


@pytest.mark.parametrize("which", ["none", "one", "failed", "no objective", "diverged"])
def test_a_study_of_any_kind_has_a_page_without_errors(
    which: str, making: Any, maker: Any, tmp_path: Path, browser: Any
) -> None:
    if which == "one":
        maker.train(proposer="base")
    elif which == "failed":
        maker.fail("boom")
    elif which == "no objective":
        text = making.LAB.replace("objective: {metric: eval/loss, goal: min, at: last}\n", "")
        maker = making.make(tmp_path / "other", text)
        maker.train()
    elif which == "diverged":
        for n in range(9):
            maker.train(making.edited(model__width=2 ** (n + 5)), [1.0, -2.0, float("nan"), 10.0 ** (n * 30)])
    for width in (1280, 800, 390):
        browser.open(page_of(maker), width=width)
        assert browser.errors == []
        assert browser.js("document.querySelector('h1').textContent") == "tiny"
        assert browser.js("document.documentElement.scrollWidth") <= width
        assert "NaN" not in browser.js("document.querySelector('main').innerHTML")


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_the_page_fits_its_window_in_light_and_dark(page: Path, browser: Any, width: int) -> None:
    seen = set()
    for dark in (False, True):
        browser.dark(dark)
        browser.open(page, width=width)
        assert browser.js("document.documentElement.scrollWidth") <= width
        assert browser.js("Math.max(...[...document.querySelectorAll('.card')].map((c) => c.getBoundingClientRect().right))") <= width  # fmt: skip
        seen.add(browser.js("getComputedStyle(document.documentElement).backgroundColor"))
    browser.dark(False)
    assert len(seen) == 2


@pytest.mark.slow
def test_a_thousand_runs_stay_a_small_file(making: Any, maker: Any, browser: Any) -> None:
    making.fill(maker, 1000, points=12)
    path = page_of(maker)
    assert path.stat().st_size < 5_000_000
    browser.open(path)
    assert browser.errors == []
    assert browser.js("table.view.length") == 1000
    assert browser.js("document.querySelectorAll('tr[data-id]').length") <= 80
    assert browser.js("document.querySelectorAll('*').length") < 12_000


def test_exported_pages_need_neither_the_lab_nor_a_server(judged_full: Any, tmp_path: Path, browser: Any) -> None:
    from looplab.cli import reporting

    reporting.export_pages(judged_full.lab, tmp_path / "shared", False)
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"index.html", "live.html", "tiny.html"}
    browser.open(tmp_path / "shared/index.html")
    assert browser.errors == []
    browser.js("document.querySelector('h2 a').click()")
    browser.wait_for("location.pathname.endsWith('/tiny.html') && typeof table === 'object' && table !== null")
    browser.js("focus.pick(DATA.best)")
    assert browser.js("[...document.querySelectorAll('.panel a')].every((link) => link.textContent !== 'folder')")
    assert browser.errors == []
    run = judged_full.record.run("1").id
    pages = ("now", "runs", "lineage", "agents", "judge", "pipelines", "record")
    for place in (*pages, f"run?run={run}", f"runs?select={run}"):
        browser.open(tmp_path / "shared/live.html", fragment=f"#/{place}")
        browser.wait_for("(document.querySelector('main') || {textContent: ''}).textContent.length > 20")
        if "run=" in place or "select" in place:
            browser.wait_for("document.querySelectorAll('canvas').length > 0")
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))] == []


def test_a_report_and_the_exported_page_speak_the_language_of_the_browser(
    judged_full: Any, tmp_path: Path, browser: Any
) -> None:
    from looplab.cli import reporting

    reporting.export_pages(judged_full.lab, tmp_path / "shared", False)
    for name in ("tiny", "live", "index"):
        browser.open(tmp_path / f"shared/{name}.html", fragment="?lang=zh")
        browser.wait_for("document.querySelector('h1, h2') !== null")
        assert browser.js("document.documentElement.lang") == "zh-CN"
        assert re.search("[\u4e00-\u9fff]", browser.js("document.body.innerText"))
        assert browser.errors == []
