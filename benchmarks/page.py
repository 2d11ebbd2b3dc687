"""What the live page and the report cost, beside optuna-dashboard and TensorBoard on the same runs.

    python benchmarks/page.py [--quick]

One lab with 10,000 runs (600 with --quick), made with the calls of the engine; the same runs as an Optuna study in
SQLite and as TensorBoard summaries (hparams and one scalar; 300 of them, since each run needs a file of its own). Every
page is opened in the same headless Chromium, with an empty cache:

- start_s, start_cpu_s: from the command to the first answer; the processor time of that;
- first_table_s: from the address to the first row of the table of runs, with the server already started;
- sort_10k_s: from a click on a head to the rows in the new order;
- update_lag_s_median: from the commit of another process to the row on the page;
- server_mb, page_kb: memory of the server after all that; bytes that the page has fetched;
- csp_violations: under `script-src 'self'; style-src 'self'`, over all pages;
- report_10k_open_cpu_s: processor time of the whole browser to open report.html.

A peer that is not installed is left out. Wall times on a busy machine are upper bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PATIENCE_S = 120.0
PEER_RUNS = 300
"""Runs for TensorBoard, which reads one file for each."""
PAGES = ("now", "runs", "lineage", "agents", "judge", "pipelines", "record")
ROWS = "document.querySelectorAll('{}').length"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server as a process; ended with its block."""

    def __init__(self, argv: list[str], folder: Path, url: str | None) -> None:
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        if url is None:  # looplab ui --json says where it is
            assert self.process.stdout is not None
            url = str(json.loads(self.process.stdout.readline())["url"])
        self.url = url
        self._wait()
        self.start_s = time.perf_counter() - self.began
        times = psutil.Process(self.process.pid).cpu_times()
        self.start_cpu_s = times.user + times.system

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url, timeout=PATIENCE_S).read()
                return
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)

    def megabytes(self) -> float:
        process = psutil.Process(self.process.pid)
        return float(sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))) / 1e6

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


def peer_command(name: str) -> list[str]:
    """Return the command of an installed package, also where its script is in another environment's folder."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    return [sys.executable, "-c", f"import sys; from {entry.module} import {entry.attr}; sys.exit({entry.attr}())"]


def wait_until(browser: Any, expression: str) -> float | None:
    """Return the seconds until an expression is true in the page; None: it never was."""
    began = time.perf_counter()
    while not browser.js(expression):
        if time.perf_counter() - began > PATIENCE_S:
            return None
    return time.perf_counter() - began


def open_fresh(browser: Any, url: str, ready: str) -> tuple[float | None, float]:
    """Open a page with an empty cache; return the seconds until `ready`, and the kilobytes fetched."""
    browser.send("Page.navigate", url="about:blank")
    browser.send("Network.clearBrowserCache")
    browser.fetched = 0.0
    began = time.perf_counter()
    browser.send("Page.navigate", url=url)
    found = wait_until(browser, ready)
    return (None if found is None else time.perf_counter() - began), browser.fetched / 1000


def counting(browser_class: type[Any]) -> type[Any]:
    """The browser of the tests, which also counts bytes."""

    class Counting(browser_class):  # type: ignore[misc]
        fetched = 0.0

        def _next(self) -> dict[str, Any]:
            message: dict[str, Any] = super()._next()
            if message.get("method") == "Network.loadingFinished":
                self.fetched += message["params"]["encodedDataLength"]
            return message

    return Counting


def browser_cpu(browser: Any) -> float:
    process = psutil.Process(browser._process.pid)
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


# -- looplab


def measure_looplab(browser: Any, made: Any, repeats: int) -> dict[str, Any]:
    argv = [str(BIN / "looplab"), "ui", "--no-open", "--json"]
    starts, cpu = [], []
    for _ in range(repeats):
        with Server(argv, made.lab, None) as server:
            starts.append(server.start_s)
            cpu.append(server.start_cpu_s)
    with Server(argv, made.lab, None) as server:
        base = server.url.partition("?")[0]
        row = ROWS.format("tr[data-id]") + " > 5"
        browser.visit(server.url)  # the token becomes a cookie
        wait_until(browser, "location.search === ''")
        open_fresh(browser, f"{base}#/runs", row)  # configs and summaries are read once
        time.sleep(3)
        tables, kilobytes = [], 0.0
        for _ in range(repeats):
            seconds, kilobytes = open_fresh(browser, f"{base}#/runs", row)
            tables.append(seconds)
        facts: dict[str, Any] = {"start_s": _median(starts), "start_cpu_s": _median(cpu), "page_kb": kilobytes}
        facts["first_table_s"] = _median(tables)
        facts["sort_10k_s"] = _median([_sort(browser) for _ in range(3 * repeats)])
        facts["update_lag_s_median"] = _median([_lag(browser, made) for _ in range(2 + repeats)])
        errors = [text for text in browser.errors if "Content Security Policy" in text]
        for page in PAGES:
            browser.send("Page.navigate", url=f"{base}#/{page}")
            time.sleep(0.5)
            browser.js("1")
            errors += [text for text in browser.errors if "Content Security Policy" in text]
        facts["csp_violations"] = len(errors)
        facts["server_mb"] = server.megabytes()
    return facts


def _sort(browser: Any) -> float:
    """Click the head of the objective; return the seconds until the first row is another one."""
    return float(
        browser.send(
            "Runtime.evaluate",
            returnByValue=True,
            awaitPromise=True,
            expression="""(async () => {
              const heads = [...document.querySelectorAll('table.virtual th button')];
              const began = performance.now();
              heads[1].click();
              await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
              return (performance.now() - began) / 1000;
            })()""",
        )["result"]["value"]
    )


def _lag(browser: Any, made: Any) -> float:
    """Record one more run; return the seconds until the page knows it."""
    counted = "Number(document.querySelector('table.virtual').getAttribute('aria-rowcount'))"
    before = browser.js(counted)
    made.plan({"seed": time.monotonic_ns() % 10**6}, reason="one more")
    found = wait_until(browser, f"{counted} > {before}")
    return float("nan") if found is None else found


def measure_report(browser: Any, made: Any, repeats: int) -> dict[str, Any]:
    from looplab.report.reports import write_reports

    began = time.process_time()
    page = next(path for path in write_reports(made.lab, made.study, made.record) if path.suffix == ".html")
    wrote = time.process_time() - began
    cpu, sorts = [], []
    for _ in range(repeats):
        before = browser_cpu(browser)
        browser.open(page)
        wait_until(browser, ROWS.format("tr[data-id]") + " > 5")
        time.sleep(0.5)
        cpu.append(browser_cpu(browser) - before)
        sorts.append(_sort(browser))
    nodes = browser.js("document.querySelectorAll('*').length")
    return {
        "report_10k_open_cpu_s": _median(cpu),
        "report_sort_s": _median(sorts),
        "report_write_cpu_s": round(wrote, 2),
        "report_nodes": nodes,
        "report_kb": round(page.stat().st_size / 1000),
    }


# -- peers


def optuna_study(made: Any, folder: Path) -> str:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = f"sqlite:///{folder / 'optuna.db'}"
    study = optuna.create_study(study_name="tiny", storage=url, direction="minimize")
    spread = {
        "lr": optuna.distributions.FloatDistribution(1e-7, 10, log=True),
        "width": optuna.distributions.IntDistribution(1, 10_000),
    }
    trials = []
    for run in made.record.runs():
        if run.objective is not None:
            params = {"lr": 1e-4 * (1 + run.n % 977), "width": 32 + run.n % 512}
            trials.append(optuna.trial.create_trial(params=params, distributions=spread, value=run.objective))
    study.add_trials(trials)
    return url


def tensorboard_logs(made: Any, folder: Path) -> Path:
    from tensorboardX import SummaryWriter

    logs = folder / "tensorboard"
    for run in made.record.runs()[:PEER_RUNS]:
        if run.objective is not None:
            with SummaryWriter(str(logs / run.id)) as writer:
                writer.add_scalar("loss", run.objective, 1)
    return logs


def measure_peers(browser: Any, made: Any, folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if importlib.util.find_spec("optuna_dashboard"):
        port = free_port()
        argv = [
            *peer_command("optuna-dashboard"),
            optuna_study(made, folder),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ]
        url = f"http://127.0.0.1:{port}/dashboard/"
        with Server(argv, folder, url) as server:
            ready = "(document.body?.innerText.match(/Trial [0-9]+/g) || []).length > 5"
            seconds, kilobytes = open_fresh(browser, f"{url}studies/1/trials", ready)
            facts |= _named("optuna_dashboard", server, seconds, kilobytes)
    if importlib.util.find_spec("tensorboard"):
        port = free_port()
        logs = tensorboard_logs(made, folder)
        argv = [*peer_command("tensorboard"), "--logdir", str(logs), "--port", str(port), "--host", "127.0.0.1"]
        with Server(argv, folder, f"http://127.0.0.1:{port}/") as server:
            ready = "(document.body?.innerText.match(/00[0-9]{2}-/g) || []).length > 5"
            seconds, kilobytes = open_fresh(browser, f"http://127.0.0.1:{port}/#timeseries", ready)
            facts |= {"tensorboard_runs": PEER_RUNS, **_named("tensorboard", server, seconds, kilobytes)}
    return facts


def _named(peer: str, server: Server, seconds: float | None, kilobytes: float) -> dict[str, Any]:
    return {
        f"{peer}_start_s": round(server.start_s, 3),
        f"{peer}_start_cpu_s": round(server.start_cpu_s, 3),
        f"{peer}_first_table_s": seconds,
        f"{peer}_kb": round(kilobytes),
        f"{peer}_mb": round(server.megabytes()),
    }


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="page-", dir=os.environ.get("BENCH_DIR")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="600 runs and one repeat")
    quick = parser.parse_args().quick
    runs, repeats = (600, 1) if quick else (10_000, 3)
    sys.path.insert(0, str(ROOT))
    from tests.report import browser as chromium
    from tests.report import making  # what makes labs, and what drives Chromium

    program = chromium.find_chromium()
    if program is None:
        raise SystemExit("no chromium on PATH: `make browser` installs it")
    with workplace() as folder:
        made = making.make(folder / "lab")
        making.fill(made, runs, points=5)
        print(f"{runs} runs made", flush=True)
        browser = counting(chromium.Browser)(program, folder / "profile")
        try:
            results: dict[str, Any] = {"runs": runs}
            parts: list[Callable[[], dict[str, Any]]] = [
                lambda: measure_report(browser, made, repeats),
                lambda: measure_looplab(browser, made, repeats),
                lambda: measure_peers(browser, made, folder),
            ]
            for part in parts:
                found = part()
                print(json.dumps(found), flush=True)
                results |= found
        finally:
            browser.close()
    own, peer = results.get("first_table_s"), results.get("optuna_dashboard_first_table_s")
    results["x_optuna_dashboard_first_table"] = round(peer / own, 2) if own and peer else None
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in results.items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
