"""The front-end modules, served as `looplab ui` serves them: under a strict policy, in a real browser."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import looplab.report
from looplab.report.bundle import read_asset

ASSETS = Path(looplab.report.__file__).parent / "assets"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><link rel="icon" href="data:,"><title>modules</title>
<link rel="stylesheet" href="assets/vendor/uPlot.min.css"><link rel="stylesheet" href="assets/theme.css">
<main><div id="table"></div><div id="one"></div><div id="two"></div><div id="figures"></div></main>
<script src="assets/vendor/uPlot.iife.min.js"></script><script type="module" src="try.js"></script></html>"""
SCRIPT = """
import { Table, parseFilter } from "./assets/table.js";
import { LineChart, smoothed } from "./assets/charts.js";
import { Forest, forestRows, Lineage, Parallel, Progress, SHAPES, Timeline } from "./assets/figures.js";
import { Focus, honest, pValue } from "./assets/dom.js";
const hostile = "<img src=x onerror=\\"document.title='owned'\\">";
const place = (id) => document.getElementById(id);
const columns = [
  { key: "id", name: "run", get: (row) => row.id, sort: (row) => row.n, narrow: true },
  { key: "lr", name: "lr", num: true, get: (row) => String(row.lr), sort: (row) => row.lr, narrow: true },
  { key: "by", name: "by", get: (row) => row.by },
  { key: "why", name: hostile, get: () => hostile, hidden: true },
];
const make = (n) => ({ id: `r${n}`, n, lr: ((n * 7919) % 1000) / 1000, by: n % 3 ? "agent" : "search" });
const rows = [...Array(100000).keys()].map(make);
const table = new Table(place("table"), { label: "runs", columns, rows, selectable: true, second: (row) => row.by,
  sort: { key: "lr", down: true } });
const steps = [...Array(500).keys()];
const wave = (by) => steps.map((step) => Math.sin(step / 40) + by);
const band = (by) => ({ low: wave(by - 0.2), high: wave(by + 0.2) });
const series = (n) => [...Array(n).keys()].map((k) => ({ id: k, name: `${hostile} ${k}`, colour: `c${k}`, x: steps, y: wave(k), ...band(k) }));
const one = new LineChart(place("one"), { label: "one", sync: "both", smooth: 0.2 });
const two = new LineChart(place("two"), { label: "two", sync: "both", log: true, logX: true });
one.setSeries(series(3));
two.setSeries([{ id: 9, name: "own steps", x: [1, 10, 100, 400], y: [1, 0, 3, 4] }, { id: 8, name: "other", x: [2, 30, 300], y: [5, 6, 7] }]);
const focus = new Focus();
const host = place("figures");
const ids = [0, 1, 2];
const forest = new Forest(host, { label: "effects", focus, noise: 0.1, best: 0, rows: ids.map((id) => ({ id, name: hostile,
  verdict: "keep", effect: id, low: id - 1, high: id + 1, paired: id > 0, p: 0.001, bar: 0.01, n: 4, shown: "x" })) });
new Parallel(host, { label: "knobs", focus, items: ids, axes: [
  { name: hostile, short: hostile, kind: "category", names: ["a", "b"], value: (id) => (id ? "a" : "b") },
  { name: "y", short: "y", kind: "number", low: 0, high: 2, value: (id) => id }] });
new Timeline(host, { label: "slots", focus, from: 0, to: 7200, lanes: [{ name: hostile, bars: [{ id: 0, from: 10, to: 3000, kind: "keep", text: hostile }] }] });
new Lineage(host, { label: "lineage", focus, nodes: ids.map((id) => ({ id, parent: id - 1, n: id, value: id, verdict: "keep", isChampion: true })) });
new Progress(host, { label: "progress", focus, path: [[1, 1]], points: ids.map((id) => ({ id, n: id + 1, value: id, style: "f0", shape: SHAPES[0], size: 3 })) });
Object.assign(globalThis, { LineChart, Table, columns, focus, forest, forestRows, honest, make, one, pValue, parseFilter, place, rows, series, smoothed, steps, table, two, wave });
"""


class _Handler(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "assets").symlink_to(ASSETS)
    (folder / "index.html").write_text(PAGE)
    (folder / "try.js").write_text(SCRIPT)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def opened(served: str, browser: Any) -> Any:
    browser.visit(served)
    browser.wait_for("typeof table === 'object'")
    return browser


def value(browser: Any, expression: str) -> Any:
    return json.loads(browser.js(f"JSON.stringify({expression}) ?? 'null'"))


def test_vendored_files_have_the_recorded_hashes_and_their_licence() -> None:
    listed = json.loads(read_asset("vendor/vendor.json"))
    named = {name: sha for one in listed.values() for name, sha in one["files"].items()}
    present = {path.name for path in (ASSETS / "vendor").iterdir()} - {"vendor.json"}
    assert present == set(named)
    for name, sha in named.items():
        assert hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest() == sha
    for name, one in listed.items():
        assert one["license"] == "MIT"
        assert "Permission is hereby granted" in read_asset(f"vendor/{name}.LICENSE")
        assert one["version"] in read_asset(f"vendor/{name}.iife.min.js")[:200]


def test_no_module_can_turn_text_into_html() -> None:
    for path in ASSETS.glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function", path.read_text()
        )
        assert not found, path.name


def test_nothing_breaks_a_strict_policy_and_hostile_text_stays_text(opened: Any) -> None:
    assert opened.errors == []
    assert {url.rsplit("/", 1)[0].split("//")[1].split("/")[0] for url in opened.requests} == {
        opened.js("location.host")
    }
    opened.js("table.show(['id', 'why'])")
    assert "onerror" in opened.js("document.querySelector('td:nth-child(3)').textContent")
    assert opened.js("document.title") == "modules"
    assert opened.js("document.querySelectorAll('img').length") == 0
    assert opened.js("document.querySelectorAll('canvas').length") == 2
    assert opened.js("document.querySelectorAll('#figures svg').length") == 5


def test_a_hundred_thousand_rows_are_sorted_and_only_the_visible_ones_drawn(opened: Any) -> None:
    drawn = "document.querySelectorAll('tr[data-id]').length"
    assert 0 < opened.js(drawn) <= 80
    assert opened.js("table.node.getAttribute('aria-rowcount')") == "100001"
    best = [row["lr"] for row in value(opened, "table.view.slice(0, 200)")]
    assert best == sorted(best, reverse=True)
    assert opened.js("table.view.length") == 100_000
    opened.js("document.querySelector('th:nth-child(2) button').click()")
    assert value(opened, "table.view.slice(0, 3).map((row) => row.n)") == [0, 1, 2]
    opened.js("table.reveal('r99999')")
    assert opened.js("[...document.querySelectorAll('tr[data-id]')].at(-1).dataset.id") == "r99999"
    assert opened.js(drawn) <= 80


def test_the_table_keeps_focus_and_selection_while_rows_come(opened: Any) -> None:
    opened.js("table.sortBy('id', false); document.querySelector('tr[data-id]').focus()")
    opened.key("ArrowDown")
    opened.js("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: ' ', bubbles: true}))")
    assert value(opened, "[...table.selected]") == ["r1"]
    opened.js("table.update([{...make(-1), by: 'new'}, {...make(1), by: 'changed'}])")
    assert opened.js("document.activeElement.dataset.id") == "r1"
    assert opened.js("document.activeElement.getAttribute('aria-selected')") == "true"
    assert opened.js("document.querySelector('tr[data-id=r1] td:nth-child(4)').textContent") == "changed"
    assert opened.js("table.view[0].id") == "r-1"
    opened.key("End")
    assert opened.js("document.activeElement.dataset.id") == "r99999"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("lr<0.002", "row.lr < 0.002"),
        ("lr>=0.5 by:agent", "row.lr >= 0.5 && row.by === 'agent'"),
        ("-by:agent", "row.by !== 'agent'"),
        ("by=search r12", "row.by === 'search' && row.id.includes('r12')"),
        ('"r77" -search', "row.id.includes('r77') && row.by !== 'search'"),
    ],
)
def test_a_filter_is_an_expression_over_columns(opened: Any, words: str, kept: str) -> None:
    opened.js(f"table.setFilter(parseFilter({words!r}, columns, (row) => row.id + ' ' + row.by))")
    expected = value(opened, f"rows.filter((row) => {kept}).map((row) => row.id)")
    assert expected
    assert sorted(value(opened, "table.view.map((row) => row.id)")) == sorted(expected)
    assert opened.js("parseFilter('  ', columns, () => '')") is None


def test_zoom_is_shared_and_kept_while_data_comes(opened: Any) -> None:
    opened.js("one.zoomTo([100, 200])")
    for chart in ("one", "two"):
        assert value(opened, f"[{chart}.plot.scales.x.min, {chart}.plot.scales.x.max]") == [100, 200]
    opened.js("one.setSeries(series(3).map((line) => ({...line, y: wave(line.id + 1)})))")
    opened.js("one.setSeries(series(4)); one.set({log: false, smooth: 0.5})")
    opened.wait_for("one.plot.scales.x.min === 100 && one.plot.scales.x.max === 200")
    assert opened.js("one.plot.series.length") == 1 + 4 * 3
    opened.js("one.zoomTo(null)")
    opened.wait_for("one.plot.scales.x.min === 0 && one.plot.scales.x.max === 499")
    assert opened.errors == []


def test_a_log_axis_leaves_out_what_it_cannot_show(opened: Any) -> None:
    assert value(opened, "two.plot.data[0]") == [1, 2, 10, 30, 100, 300, 400]
    assert value(opened, "two.plot.data[1]")[2] is None
    assert opened.js("two.plot.scales.y.min > 0")


def test_pointing_moves_the_cursor_of_linked_charts(opened: Any) -> None:
    x, y, width, height = value(
        opened,
        "(() => { place('one').scrollIntoView(); const r = one.plot.over.getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height]; })()",
    )
    opened.mouse("mouseMoved", x + width / 2, y + height / 2)
    opened.wait_for("one.plot.cursor.idx > 200 && two.plot.cursor.left > 0")
    opened.js("document.querySelector('.plot').focus()")
    opened.key("ArrowRight")
    assert "step" in opened.js("document.querySelector('.unseen').textContent")


def test_smoothing_does_not_depend_on_how_often_a_curve_was_sampled(opened: Any) -> None:
    full = value(opened, "smoothed(steps, wave(0), 30)")
    thinned = value(opened, "smoothed(steps.filter((s) => s % 5 === 0), wave(0).filter((_, i) => i % 5 === 0), 30)")
    assert max(abs(a - b) for a, b in zip(full[::5], thinned, strict=True)) < 0.06


def test_numbers_are_written_with_the_digits_they_deserve(opened: Any) -> None:
    cases = {
        "honest(0.97302, 0.002)": "0.973 ± 0.002",
        "honest(0.97302, 0.0013)": "0.9730 ± 0.0013",
        "honest(12345.6, 230)": "12350 ± 230",
        "honest(3.14159, null)": "3.142",
        "honest(1, 0.95)": "1.0 ± 0.9",
        "pValue(0.0006111)": "0.00061",
        "pValue(3.06e-8)": "3e-8",
        "pValue(0)": "< 1e-12",
    }
    assert {expression: opened.js(expression) for expression in cases} == cases


def test_a_forest_always_has_what_was_promoted(opened: Any) -> None:
    made = (
        "[...Array(50).keys()].map((n) => ({ n, verdict: n === 3 ? 'keep' : 'discard', p: n % 10 === 3 ? 0.1 : null }))"
    )
    shown = value(opened, f"forestRows({made}, 8).map((one) => one.n)")
    assert shown == [3, 13, 23, 33, 43, 47, 48, 49]  # promoted, tested, the latest; in their order
    assert value(opened, f"forestRows({made}, 2).map((one) => one.n)") == [3, 43]


def test_everything_fits_a_phone(served: str, browser: Any) -> None:
    browser.visit(served, width=390, height=800)
    browser.wait_for("typeof table === 'object'")
    assert browser.js("document.documentElement.scrollWidth") <= 390
    assert browser.js("table.node.getBoundingClientRect().width") <= 392
    assert browser.js("document.querySelector('tr[data-id] .second').textContent") in ("agent", "search")
