"""The live page in a real browser, on labs that really run."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from looplab.ledger.catalogue import (
    AgentAskedEvent,
    VersionBegunEvent,
    VersionChampionEvent,
    VersionJudgedEvent,
    VersionMeasuredEvent,
)
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.versions import is_about_versions, write_table
from looplab.report.language import texts

pytestmark = pytest.mark.slow

PAGES = ("now", "runs", "lineage", "agents", "judge", "pipelines", "record")
TRAINER = """\
import json, os, sys, time
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    for step in range(1, 2000):
        print(json.dumps({"step": step, "loss": config["lr"] + 1 / step}), file=file, flush=True)
        print("step", step, flush=True)
        if os.path.exists(os.path.join(os.environ["LOOPLAB_LAB"], config["wait"])):
            break
        time.sleep(0.1)
"""
LAB = """\
study: live
launch: {command: ["{python}", train.py]}
base: base.json
objective: {metric: loss, goal: min}
knobs: {lr: {type: float, low: 0, high: 1}, wait: {choices: [now, first, second]}}
proposers: [{queue: queue.yaml}]
slots: {count: 2, gpus: none}
round_size: 3
budget: {runs: 5}
"""
QUEUE = """\
proposals:
  - {edits: [lr@set=0.1, wait@set=first], parent: base, reason: waits for the first file}
  - {edits: [lr@set=0.2, wait@set=first], parent: base, reason: waits too}
  - {edits: [lr@set=0.3, wait@set=second], parent: base, reason: waits for the second file}
  - {edits: [lr@set=0.4], parent: base, reason: the last one}
"""
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ATTACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>\x1b[31mred\u202e'


@pytest.fixture
def live(tmp_path: Path) -> Path:
    lab = tmp_path / "live"
    lab.mkdir()
    for name, text in (("train.py", TRAINER), ("lab.yaml", LAB), ("queue.yaml", QUEUE)):
        (lab / name).write_text(text)
    (lab / "base.json").write_text(json.dumps({"lr": 0.5, "wait": "now"}))
    (lab / "now").touch()
    return lab


def rows_of(browser: Any) -> list[str]:
    """Return the runs that the table shows."""
    found: list[str] = browser.js("[...document.querySelectorAll('.virtual tbody tr')].map((row) => row.textContent)")
    return [text for text in found if text.strip()]


def text_of(browser: Any, selector: str) -> str:
    return str(browser.js(f"(document.querySelector({selector!r}) || {{textContent: ''}}).textContent"))


def assert_calm(browser: Any, base: str) -> None:
    """Nothing of the page was refused by its policy, nothing failed, and nothing came from elsewhere."""
    assert [error for error in browser.errors if "net::" not in error and "Failed to load" not in error] == []
    assert browser.js("window.hacked === undefined")
    assert [url for url in browser.requests if not url.startswith((base, "about:", "data:"))] == []


def test_hostile_texts_do_nothing_on_any_page_or_width(
    maker: Any, making: Any, browser: Any, page: Callable[..., Any], tmp_path: Path
) -> None:
    config = making.edited(train__learning_rate=0.5)
    config[ATTACK] = ATTACK
    base = maker.train(proposer="base")
    run = maker.plan(config, parent=base, proposer=ATTACK[:50], reason=ATTACK, hypothesis=ATTACK)
    run_dir = maker.launch(run)
    maker.end(run, [{"step": step, "eval/loss": 1.0 - step / 10, ATTACK: 2.0} for step in range(4)], ATTACK + "\n")
    (run_dir / 'a"><script>window.hacked=3<x>.txt').write_text(ATTACK)
    (run_dir / "page.html").write_text(ATTACK)
    for n in range(9):
        maker.train(making.edited(model__width=64 + n), [3.0, 1.5 + n / 10], reason=ATTACK)
    maker.reject(f"model.width@set={ATTACK}", ATTACK, ATTACK)
    with maker.ledger.write():
        maker.record.say(ATTACK)
        maker.record.propose("agent", ["model.width@set=32"], ATTACK, hypothesis=ATTACK)
        maker.record.watched(run.id, ATTACK, ATTACK, False)
    server = page(maker.lab, "--allow-control")
    browser.requests.clear()
    browser.visit(server.url)
    assert browser.js("location.search") == ""  # the token is not in the address any more
    for width in (1280, 390):
        for place in (*(f"#/{name}" for name in PAGES), f"#/run?run={run.id}", f"#/runs?select={run.id},{base.id}"):
            browser.visit(server.base + place, width=width)
            browser.wait_for("document.querySelector('main').textContent.length > 20")
            if "runs" in place:
                browser.wait_for("document.querySelectorAll('.virtual tbody tr').length > 2")
                if "select" in place:
                    browser.wait_for("document.querySelectorAll('.compared canvas').length > 1")
            if "run?" in place:
                browser.wait_for("document.querySelector('main').textContent.includes('<script>')")
                browser.wait_for("document.querySelectorAll('.files button').length > 3")
                browser.js("[...document.querySelectorAll('.files button')].forEach((one) => one.click())")
                browser.wait_for("document.querySelectorAll('canvas').length > 0")
            assert browser.js("document.documentElement.scrollWidth <= innerWidth"), (place, width)
            assert browser.js("document.querySelector('main img[src=x], main script') === null")
            assert_calm(browser, server.base)
    assert "\x1b" not in browser.js("document.body.textContent")
    browser.visit(server.base + "?lang=zh#/now")
    assert browser.js("document.documentElement.lang") == "zh-CN"
    assert text_of(browser, "nav a") == texts("zh")["Now"]
    assert browser.js("[...document.querySelectorAll('button, select, input')].every((one) => one.textContent.trim() || "
                      "one.getAttribute('aria-label') || one.labels.length)")  # fmt: skip
    browser.js("localStorage.clear()")


def test_ten_thousand_runs_sort_filter_and_grow(big: Any, browser: Any, page: Callable[..., Any]) -> None:
    server = page(big.lab)
    browser.visit(server.url)
    browser.visit(server.base + "#/runs")
    browser.wait_for("/1\\d,?\\d{3} rows/.test(document.querySelector('main').textContent)")
    newest = big.record.runs(limit=1)[0].id
    browser.wait_for(f"document.querySelector('main').textContent.includes('{newest}')")
    assert len(rows_of(browser)) < 80
    browser.js(
        "[...document.querySelectorAll('.virtual th button')].find((one) => one.textContent.includes('eval/loss')).click()"
    )
    browser.wait_for("document.querySelectorAll('.virtual tbody tr:not(.space)')[0].textContent.includes('1')")
    best = min(big.record.runs(), key=lambda run: run.objective)
    browser.wait_for(f"document.querySelector('main').textContent.includes('{best.id}')")
    browser.js("const box = document.querySelector('input[type=search]'); box.value = 'by:agent learning_rate<0.002'; "
               "box.dispatchEvent(new Event('input'))")  # fmt: skip
    browser.wait_for("/ of 1\\d{4} rows/.test(document.querySelector('main').textContent)")
    assert "q=by" in browser.js("location.hash")
    with big.ledger.write():
        big.record.propose("agent", ["model.width@set=32"], "why not")
    run = big.train(reason="a new row")
    browser.js("box.value = 'new row'; box.dispatchEvent(new Event('input'))")
    browser.wait_for(f"document.querySelector('main').textContent.includes('{run.id}')")
    assert_calm(browser, server.base)


@contextmanager
def below_prefix(port: int, prefix: str) -> Iterator[str]:
    """A proxy that serves the page below a prefix, as jupyter-server-proxy does."""

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith(prefix):
                return self.send_error(404)
            size = int(self.headers.get("content-length") or 0)
            behind = HTTPConnection("127.0.0.1", port)
            behind.request(self.command, self.path[len(prefix) - 1 :], self.rfile.read(size), dict(self.headers))
            answer = behind.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        do_GET = do_POST = forward  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}{prefix}"
    finally:
        proxy.shutdown()
        proxy.server_close()


def test_the_page_works_below_a_prefix_and_steers_from_there(
    maker: Any, browser: Any, page: Callable[..., Any]
) -> None:
    maker.train(proposer="base")
    server = page(maker.lab, "--allow-control")
    with below_prefix(server.started["port"], "/user/me/proxy/1/") as url:
        browser.visit(url + server.url.partition("/?")[2].join(["?", ""]))
        browser.visit(url + "#/runs")
        browser.wait_for("document.querySelectorAll('.virtual tbody tr').length > 0")
        browser.js(
            "document.querySelector('.say').value = 'hello from below'; document.querySelector('.say-form button').click()"
        )
        browser.wait_for("document.querySelector('.steer .done') !== null")
        assert_calm(browser, url)
    assert maker.record.messages() == ["hello from below"]


def command(*words: object) -> list[str]:
    import sys

    return [str(Path(sys.executable).with_name("looplab")), *map(str, words)]


def test_a_lab_is_watched_while_engine_and_page_are_killed(
    live: Path, browser: Any, page: Callable[..., Any], until: Callable[[Callable[[], Any]], Any]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = page(live, "--port", str(port), "--allow-control")
    browser.visit(server.url)
    tabs = [browser.new_tab() for _ in range(8)]
    for number, tab in enumerate(tabs):
        browser.switch(tab)
        browser.visit(server.base + f"#/{PAGES[number % len(PAGES)]}")
    browser.switch(tabs[1])
    assert "runs" in browser.js("location.hash")
    engine = subprocess.Popen(command("run", "--lab", live), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    browser.wait_for("document.querySelector('main').textContent.includes('waits too')")
    browser.wait_for("document.querySelector('.pill.on') !== null")
    record = StudyLedger(Ledger(live / ".looplab/ledger.db", create=False), "live")
    running = until(lambda: [run for run in record.runs(state="running") if run.started and "waits" in run.reason][:2])
    browser.visit(server.base + f"#/run?run={running[0].id}")
    browser.wait_for("document.querySelector('main').textContent.includes('step 3')")
    browser.wait_for("document.querySelectorAll('canvas').length > 0")

    engine.send_signal(signal.SIGKILL)
    engine.wait()
    browser.wait_for("document.querySelector('.pill.off') !== null")
    server.end(signal.SIGKILL)
    browser.wait_for("document.querySelector('.fresh.stale') !== null")
    assert all(os.path.exists(f"/proc/{run.pid}") for run in running)  # no run notices
    again = page(live, "--port", str(port), "--allow-control")
    browser.wait_for("document.querySelector('.fresh.stale') === null")

    engine = subprocess.Popen(command("resume", "--lab", live), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    browser.wait_for("document.querySelector('.pill.on') !== null")
    browser.js("[...document.querySelectorAll('.steer button')].find((one) => one.textContent === 'Pause').click()")
    browser.wait_for("document.querySelector('.pill.paused') !== null")
    until(lambda: [one for one in record.events_of("steered") if one["what"] == "pause"])
    browser.js("[...document.querySelectorAll('.steer button')].find((one) => one.textContent === 'Resume').click()")
    browser.wait_for("document.querySelector('.pill.paused') === null")
    (live / "first").touch()
    (live / "second").touch()
    assert engine.wait() == 0
    runs = record.runs()
    assert [run.status for run in runs] == ["ok"] * 5  # each was started once, by whichever engine
    assert len(record.events_of("launched")) == 5
    for number, tab in enumerate(tabs):
        browser.switch(tab)
        if number != 1:
            browser.wait_for(
                "document.querySelector('.pill.off') !== null && document.querySelector('.fresh.stale') === null"
            )
        browser.visit(again.base + "#/runs?all=1")
        browser.wait_for(f"document.querySelector('main').textContent.includes('{runs[-1].id}')")
    assert_calm(browser, again.base)
    assert again.end(signal.SIGINT) == 0


NAMED = ("button", "link", "textbox", "searchbox", "combobox", "checkbox", "slider", "image", "table", "navigation")
"""Roles that a screen reader announces by their names."""


def test_every_page_is_walked_by_keyboard_and_named_for_screen_readers(
    judged_full: Any, browser: Any, page: Callable[..., Any]
) -> None:
    server = page(judged_full.lab, "--allow-control")
    run = judged_full.record.best().id
    browser.visit(server.url)
    for place in (*PAGES, f"run?run={run}", f"runs?select={run}"):
        browser.visit(f"{server.base}#/{place}")
        browser.wait_for("document.querySelector('main').textContent.length > 20")
        browser.wait_for("document.querySelector('.fresh:not(.stale)') !== null")
        if "run" in place:
            browser.wait_for("document.querySelectorAll('main table').length > 0")
        nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
        roles = [(node["role"]["value"], (node.get("name") or {}).get("value", "")) for node in nodes if "role" in node]
        assert [role for role, name in roles if role in NAMED and not name.strip()] == [], place
        assert {"banner", "main", "navigation"} <= {role for role, _ in roles}, place

        browser.js("document.body.focus(); document.activeElement.blur()")
        walked: list[str] = []
        for _ in range(25):
            browser.key("Tab")
            # Whatever has the focus is on the page, outlined, and not hidden behind the header.
            walked.append(
                browser.js(
                    "(() => { const one = document.activeElement, box = one.getBoundingClientRect(), style ="
                    " getComputedStyle(one); return one === document.body ? 'body' : box.width > 0 && box.height > 0"
                    " && box.right > 0 && style.outlineStyle !== 'none' ? one.tagName : 'unseen ' + one.outerHTML.slice(0, 120); })()"
                )
            )
            if walked[-1] == "body":  # the end of the page
                break
        assert not [one for one in walked if one.startswith("unseen")], (place, walked)
        assert walked[0] == "A"  # "skip to the content"
        assert len(walked) > 10, place
    browser.visit(f"{server.base}#/judge")
    browser.js("document.activeElement.blur()")
    browser.key("Tab")
    assert browser.js("document.activeElement.className") == "skip"
    browser.js("document.activeElement.click()")
    browser.wait_for("document.activeElement.id === 'main'")
    assert "judge" in browser.js("location.hash")
    assert_calm(browser, server.base)


STAGED = """\
study: steer
pipeline: {root: "outputs/{name}", run_id: null}
stages:
  mine: {command: ["{python}", mine.py, "{config}", "{run_dir}"], outputs: [tables]}
suite: {run_name: name, tables: {results.csv: tables/results.csv}}
"""
MINE = """\
import json, pathlib, sys
config, folder = json.load(open(sys.argv[1])), pathlib.Path(sys.argv[2], "tables")
if config["rows"] > 5:
    sys.exit("there are not so many rows")
folder.mkdir()
(folder / "headline.txt").write_text("ESM wins: %s" % config["note"])
(folder / "results.csv").write_text(f'method,score,"note, quoted"\\nESM,{1 / 3},"%s"\\n' % config["note"].replace('"', '""'))
"""


def test_suites_show_their_tables_and_failed_stages_why(tmp_path: Path, browser: Any, page: Callable[..., Any]) -> None:
    lab = tmp_path / "staged"
    lab.mkdir()
    config = {"name": "small", "rows": 1, "note": ATTACK}
    suite = {"suite": {"config": "config.json", "run_name_prefix": "tiny", "stages": ["mine"], "datasets": [
        {"name": "few"}, {"name": "many", "edits": ["rows@set=99"]}]}}  # fmt: skip
    for name, text in (("lab.yaml", STAGED), ("mine.py", MINE), ("config.json", json.dumps(config)),
                       ("suite.json", json.dumps(suite))):  # fmt: skip
        (lab / name).write_text(text)
    argv = command("suite", "--lab", lab, "--config", "suite.json", "--slots", "2", "--id", "first")
    done = subprocess.run(argv, capture_output=True, text=True, cwd=lab)
    assert done.returncode == 1, done.stderr
    server = page(lab)
    browser.visit(server.url)
    for width in (1280, 390):
        browser.visit(server.base + "#/pipelines", width=width)
        browser.wait_for("document.querySelector('.pipelines table.plain') !== null")
        cells = browser.js("[...document.querySelectorAll('.pipelines table.plain td')].map((one) => one.textContent)")
        assert "ESM" in cells
        assert "0.3333" in cells
        assert any("<script>" in cell for cell in cells)
        assert "ESM wins: " in text_of(browser, ".pipelines .said")
        assert "exit code 1" in text_of(browser, ".stage.failed .why")
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
        browser.js("document.querySelectorAll('.pipelines details').forEach((one) => (one.open = true))")
        browser.js(
            "[...document.querySelectorAll('.pipelines .links button')].find((one) => one.textContent.endsWith('.json')).click()"
        )
        browser.wait_for("document.querySelector('.pipelines pre.log') !== null")
        assert_calm(browser, server.base)


def test_no_column_of_a_narrow_page_is_a_few_letters_wide(
    judged: Any, making: Any, browser: Any, page: Callable[..., Any]
) -> None:
    making.fill_judged(judged, 3)
    with judged.ledger.write():
        judged.record.record_agent(
            AgentAskedEvent(call="one", log="one.jsonl", n=2, attempt=1, parent=None, cli="command")
        )
        judged.record.propose(
            "agent", ["train.learning_rate@set=0.00123", "model.width@set=128"],
            "the best three runs have a rate near 0.005; test the neighbourhood with more width",
            source="agent:one:0",
        )  # fmt: skip
    server = page(judged.lab)
    browser.visit(server.url)
    browser.visit(server.base + "#/agents", width=390)
    browser.wait_for("document.querySelector('.call-box code') !== null")
    assert "interrupted" in text_of(browser, ".call-box summary")  # nobody waits for it: no engine runs
    for place in ("agents", "now", "judge", "lineage", "record"):
        browser.visit(f"{server.base}#/{place}", width=390)
        browser.wait_for("document.querySelectorAll('main code, main td').length > 3")
        narrow = browser.js(
            "[...document.querySelectorAll('main td, main td code')].filter((one) => one.textContent.length > 12 &&"
            " one.getBoundingClientRect().width > 0 && one.getBoundingClientRect().width < 60).map((one) => one.textContent)"
        )
        assert narrow == [], place


def test_versions_show_their_notes_and_pictures(tmp_path: Path, browser: Any, page: Callable[..., Any]) -> None:
    lab = tmp_path / "fish"
    for version in (1, 2):
        folder = lab / f"experiments/v{version}"
        (folder / "artifacts").mkdir(parents=True)
        (folder / f"dev_v{version}.md").write_text(f"# Version {version}\n\nA longer horizon. {ATTACK}\n")
        (folder / "artifacts/curve.png").write_bytes(PNG)
    (lab / "lab.yaml").write_text("study: swim\nlaunch: {command: ['true']}\nbase: base.json\n")
    (lab / "base.json").write_text("{}")
    ledger = Ledger(lab / ".looplab/ledger.db")
    StudyLedger(ledger, "swim").open("score", "max")
    with ledger.write():
        for version, value in ((1, 0.5), (2, 0.7317)):
            begun = VersionBegunEvent(
                attempt=1, branch=f"v{version}", base="0" * 40, onto="main", folder=f"experiments/v{version}"
            )
            measured = VersionMeasuredEvent(ask=1, metric="score", value=value, values=[], fingerprint="0")
            for event in (begun, measured):
                ledger.record(event, "iterate", f"v{version}")
        ledger.record(VersionJudgedEvent(verdict="keep", why="better by 0.23", n=40), "iterate", "v2")
        ledger.record(VersionChampionEvent(why="better by 0.23"), "iterate", "v2")
        write_table(ledger, [event for event in ledger.events() if is_about_versions(event)])
    ledger.close()
    server = page(lab)
    browser.visit(server.url)
    for width in (1280, 390):
        browser.visit(server.base + "#/lineage", width=width)
        browser.wait_for("document.querySelectorAll('.card.version img').length === 2")
        browser.wait_for("[...document.querySelectorAll('.card.version img')].every((one) => one.naturalWidth > 0)")
        newest = text_of(browser, ".card.version.champion")
        assert "v2" in newest
        assert "0.7317" in newest
        assert "A longer horizon." in newest
        assert "<script>" in newest  # as text
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
        assert_calm(browser, server.base)
