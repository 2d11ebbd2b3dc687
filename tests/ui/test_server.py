"""The server of the live page: what it answers, to whom, and what it never says."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import PATIENCE_S

import looplab.report
import looplab.ui
from looplab.cli import top
from looplab.cli.serving import snapshot
from looplab.cli.top import BACK, KEYS
from looplab.config.lab import load_lab
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.measure.base import Curve
from looplab.report import budget, overview
from looplab.report import judged as judged_facts
from looplab.report.fanova import LABEL as FANOVA_LABEL
from looplab.report.html import STATES
from looplab.report.importance import LABEL
from looplab.report.judged import points
from looplab.report.language import in_each, language_of_terminal, t, texts
from looplab.report.overview import NEEDS
from looplab.ui.curves import CurveCache, CurveRequest, RunCurves, draw
from looplab.ui.files import HeldOutFilter, read_log
from looplab.ui.model import CORE, Revisions
from looplab.ui.security import AccessRules, host_of

WEB = Path(looplab.ui.__file__).parent / "web"
ASSETS = Path(looplab.report.__file__).parent / "assets"
READS = ("lab", "changes", "now", "run", "compare", "importance", "judge", "agents", "versions", "pipelines", "record",
         "log", "curves")  # fmt: skip
SECRET = 0.8712345
"""A value of the held-out metric."""


def ask_all(client: Any, run: str, study: str = "tiny") -> dict[str, str]:
    """Return the bodies of all answers about a study."""
    query = {"study": study, "run": run, "runs": run}
    return {name: client.client.get(f"/api/{name}", params=query).text for name in READS}


# -- who may ask for what


@pytest.mark.parametrize(
    ("header", "name"),
    [("localhost", "localhost"), ("LOCALHOST:80", "localhost"), ("127.0.0.1:8000", "127.0.0.1"), ("[::1]:1", "::1"),
     ("hub.example.", "hub.example"), ("evil@localhost", None), ("localhost:x", None), ("", None), (None, None),
     ("localhost/x", None)],
)  # fmt: skip
def test_a_host_header_is_read_exactly(header: str | None, name: str | None) -> None:
    assert host_of(header) == name


def test_nothing_is_answered_without_the_token_or_to_another_host(judged_full: Any, serve: Callable[..., Any]) -> None:
    with serve(judged_full.lab, token=False) as client:
        http = client.client
        paths = ["/", "/web/app.js", "/assets/theme.css", *(f"/api/{name}?study=tiny&run=1&runs=1" for name in READS)]
        for path in paths:
            assert http.get(path).status_code == 401, path
            for wrong in ("", "x", client.rules.token[:-1], client.rules.control_token):
                assert http.get(path, headers={"x-looplab-token": wrong}).status_code == 401, path
            own = {"x-looplab-token": client.rules.token}
            for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost:x", "a b"):
                assert http.get(path, headers={**own, "host": host}).status_code == 421, (path, host)
            assert http.get(path, headers=own).status_code == 200, path
            assert http.get(path, headers={**own, "host": "hub.example"}).status_code == 200, path
        assert http.get("/?token=wrong").status_code == 401
        for asked, target in (("zh", "./?lang=zh"), ('"><script>', "./"), ("", "./")):
            page = http.get("/", params={"token": client.rules.token, "lang": asked}).text
            assert f'content="0; url={target}"' in page
        http.cookies.clear()
        opened = http.get(f"/?token={client.rules.token}")
        cookie = opened.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=" not in cookie  # the browser takes the page's own, also below the prefix of a proxy
        assert http.get("/api/lab").status_code == 200  # with the cookie
        assert http.get("/api/lab", headers={"sec-fetch-site": "cross-site"}).status_code == 403


def test_every_answer_has_the_strict_policy(judged_full: Any, serve: Callable[..., Any]) -> None:
    with serve(judged_full.lab) as client:
        for path in ("/", "/web/app.js", "/api/lab", "/api/nothing", "/api/run?study=tiny&run=nothing"):
            headers = client.client.get(path).headers
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';"), path
            assert "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert "access-control-allow-origin" not in headers


def test_a_change_needs_control_token_origin_and_json(judged_full: Any, serve: Callable[..., Any]) -> None:
    before = judged_full.ledger.head()
    with serve(judged_full.lab, control=True) as client:
        good = {"origin": "http://localhost", "x-looplab-control": client.rules.control_token,
                "content-type": "application/json"}  # fmt: skip
        body = json.dumps({"study": "tiny", "action": "say", "text": "hello"})
        wrong = [
            {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://localhost:81"}, {"origin": None},
            {"origin": "http://["}, {"origin": "http://evil.example@localhost"}, {"origin": "localhost"},
            {"x-looplab-control": ""}, {"x-looplab-control": client.rules.token}, {"content-type": "text/plain"},
            {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"host": "evil.example"},
            {"x-looplab-token": "wrong"},
        ]  # fmt: skip
        for change in wrong:
            headers = {key: value for key, value in {**good, **change}.items() if value is not None}
            assert client.client.post("/api/control", content=body, headers=headers).status_code in (401, 403, 421), (
                change
            )
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            for path in ("/api/control", "/api/lab", "/", "/api/run"):
                assert client.client.request(method, path, content=body).status_code in (403, 405), (method, path)
        assert client.client.request("DELETE", "/api/control", headers=good).status_code == 405
    with serve(judged_full.lab) as client:
        answer = client.client.post("/api/control", content=body, headers=good)
        assert answer.status_code == 403
        assert "--allow-control" in answer.json()["error"]
        assert client.client.get("/api/form", params={"study": "tiny"}).status_code == 400
    assert judged_full.ledger.head() == before


def test_reading_changes_nothing_in_the_lab(judged_full: Any, serve: Callable[..., Any]) -> None:
    def stamps() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in judged_full.lab.rglob("*")
                if path.is_file() and not path.name.endswith("-shm")}  # fmt: skip

    before = stamps()
    with serve(judged_full.lab, control=True) as client:
        ask_all(client, "1")
        client.get("form", study="tiny")
        assert client.get("check", study="tiny", edits='["model.width@set=64"]', parent="base")["refused"] is None
        assert "above" in client.get("check", study="tiny", edits='["model.dropout@set=4"]', parent="base")["refused"]
    assert stamps() == before


# -- differences


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), max_size=40), st.data())
def test_differences_add_up_to_the_whole(changes: list[tuple[str, int]], data: st.DataObject) -> None:
    kept, heard = Revisions(), 0
    seen: dict[str, int] = {}

    def since(revision: int) -> dict[str, int]:
        return dict(json.loads(kept.since(revision)))

    for revision, (key, value) in enumerate(changes, 1):
        kept.put(key, (key, value), revision)
        if data.draw(st.booleans()):
            seen |= since(heard)
            heard = revision
    assert seen | since(heard) == since(0) == dict(changes) == dict(kept)
    assert all(kept.get(key) == [key, value] and key in kept for key, value in dict(changes).items())


def test_a_page_that_asks_for_differences_knows_what_a_fresh_one_knows(maker: Any, serve: Callable[..., Any]) -> None:
    chance = random.Random(1)
    rows: dict[str, Any] = {}
    cells: dict[str, Any] = {}
    after, epoch = 0, ""
    with serve(maker.lab) as client, serve(maker.lab) as other:
        for _ in range(12):
            done = chance.random()
            if done < 0.6:
                maker.train({**maker_config(chance), "seed": 1}, [3.0, chance.random()], reason="<b>why</b>")
            else:
                run = maker.plan(maker_config(chance))
                maker.launch(run)
            found = wait_complete(client, after, epoch, maker.ledger.head()[0])
            assert found["fresh"] == (epoch == "")
            after, epoch = found["next"], found["epoch"]
            rows |= {row[0]: row for row in found["rows"]}
            cells |= {one[0]: one for one in found["cells"]}
        whole = wait_complete(other, 0, "")
    assert rows == {row[0]: row for row in whole["rows"]}
    place = {name: n for n, name in enumerate(found["knobs"])}
    for id_, knobs, metrics in whole["cells"]:
        for n, name in enumerate(whole["knobs"][: len(knobs)]):
            mine = cells[id_][1]
            assert (mine[place[name]] if place[name] < len(mine) else None) == knobs[n]
        assert metrics == cells[id_][2]
    assert [row[0] for row in whole["rows"]] == [run.id for run in maker.record.runs()]


def maker_config(chance: random.Random) -> dict[str, Any]:
    return {"train": {"learning_rate": chance.random(), "batch_size": chance.choice([16, 32])}, "model": {"width": 64}}


def wait_complete(client: Any, after: int, epoch: str, seq: int = 0) -> Any:
    """Ask until an event is known, and configs and summaries were read; add up the answers."""
    found = client.get("changes", study="tiny", after=after, epoch=epoch)
    while not found["complete"] or found["seq"] < seq:
        more = client.get("changes", study="tiny", after=found["next"], epoch=found["epoch"])
        found = {
            **more,
            "fresh": found["fresh"],
            "rows": found["rows"] + more["rows"],
            "cells": found["cells"] + more["cells"],
        }
    return found


def test_the_start_of_a_run_is_seen_although_it_is_no_event(maker: Any, serve: Callable[..., Any]) -> None:
    run = maker.plan(maker_config(random.Random(0)))
    with serve(maker.lab) as client:
        first = client.get("changes", study="tiny")
        assert first["rows"][0][CORE.index("state")] == "planned"
        maker.launch(run)
        found: Any = {"rows": []}
        while not any(row[CORE.index("started")] for row in found["rows"]):
            found = client.get("changes", study="tiny", after=first["next"], epoch=first["epoch"])


def test_the_first_run_of_each_config_is_the_one_of_the_reports(judged_full: Any, serve: Callable[..., Any]) -> None:
    with serve(judged_full.lab) as client:
        rows = client.get("changes", study="tiny")["rows"]
    shown = {row[0]: row[CORE.index("lead")] for row in rows}
    found = points(judged_full.record.runs())
    assert shown == {run.id: lead for lead, point in found.items() for run in (*point.runs, *point.copies)}


def test_ten_thousand_runs_are_answered_before_their_configs_are_read(big: Any, serve: Callable[..., Any]) -> None:
    with serve(big.lab) as client:
        first = client.get("changes", study="tiny")
        assert len(first["rows"]) == first["runs"] >= 10_000
        found = wait_complete(client, first["next"], first["epoch"])
        assert len(first["cells"]) + len(found["cells"]) >= 10_000
        later = client.get("changes", study="tiny", after=found["next"], epoch=found["epoch"])
        assert later["rows"] == later["cells"] == []


def test_ten_thousand_runs_take_little_memory_and_nothing_of_the_engine(big: Any, page: Callable[..., Any]) -> None:
    server = page(big.lab)
    run = big.record.runs(limit=1)[0].id

    def ask(name: str, **query: str) -> Any:
        words = urlencode({"study": "tiny", "run": run, "runs": run, **query})
        request = Request(f"{server.base}api/{name}?{words}", headers={"x-looplab-token": server.token})
        return json.loads(urlopen(request, timeout=PATIENCE_S).read())

    def megabytes() -> float:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024 / 1e6

    ask("versions")
    before = megabytes()
    found = ask("changes")
    while not found["complete"]:
        found = ask("changes", after=str(found["next"]), epoch=found["epoch"])
    for name in READS:
        ask(name)
    grown = megabytes() - before
    assert grown < 17, f"{grown:.1f} MB more than before the first run was read"
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert not re.search(r"/(numpy|scipy|pandas|pyarrow|torch)/", maps)


def test_a_page_that_only_reads_imports_nothing_of_the_engine(judged_full: Any) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from looplab.cli import labs, serving\n"
        "from looplab.ui import model, pages, server\n"
        "lab = labs.open_record(Path(sys.argv[1]))\n"
        "read = model.LabModel(lab, find_study=labs.find_study, engine_pid=serving.engine_pid)\n"
        "pages.now_page(read, 'tiny', since=0, window=60.0)\n"
        "pages.agents_page(read, 'tiny'), pages.judge_page(read, 'tiny')\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, judged_full.lab], capture_output=True, text=True, check=True)
    engine = ("looplab.loop.setup", "looplab.loop.engine", "looplab.launch.local", "looplab.decide.agent",
              "looplab.agents.run", "looplab.judge.judge", "numpy", "rich")  # fmt: skip
    assert not set(done.stdout.split()) & set(engine)


def test_a_ledger_that_was_being_created_when_it_was_opened_is_read_when_it_is_there(
    maker: Any, serve: Callable[..., Any], until: Any
) -> None:
    maker.train()
    maker.record.ledger.close()
    path = maker.lab / ".looplab/ledger.db"
    complete = path.read_bytes()
    with contextlib.closing(sqlite3.connect(path.with_name("new"))) as database:
        database.execute("PRAGMA journal_mode=WAL")
    path.write_bytes(path.with_name("new").read_bytes())  # the same inode throughout
    with serve(maker.lab) as client:
        assert client.get("changes", study="tiny")["runs"] == 0
        path.write_bytes(complete)
        until(lambda: client.get("changes", study="tiny")["runs"] == 1)


def test_a_replaced_ledger_and_a_changed_lab_file_start_the_page_over(
    maker: Any, serve: Callable[..., Any], until: Any
) -> None:
    maker.train()
    with serve(maker.lab) as client:
        first = client.get("changes", study="tiny")
        lab_file = maker.lab / "lab.yaml"
        lab_file.write_text(lab_file.read_text().replace("runs: 400", "runs: 500"))
        again = until(
            lambda: (now := client.get("changes", study="tiny", after=1, epoch=first["epoch"]))["fresh"] and now
        )
        assert len(again["rows"]) == 1
        lab_file.write_text("study: [")
        assert client.get("changes", study="tiny")["rows"]  # one with a mistake is ignored until it is mended
        path = load_lab_ledger(maker)
        os.rename(path, path.with_name("aside"))
        assert until(lambda: client.get("changes", study="tiny")["problem"])
        os.rename(path.with_name("aside"), path)
        until(lambda: client.get("changes", study="tiny")["problem"] is None)


def load_lab_ledger(maker: Any) -> Path:
    path: Path = maker.ledger.path
    return path


# -- what is never said


def test_the_held_out_metric_is_in_no_answer(judged: Any, serve: Callable[..., Any]) -> None:
    run = judged.plan({**maker_config(random.Random(0)), "seed": 1}, proposer="base")
    run_dir = judged.launch(run)
    rows = [{"step": step, "eval/loss": 2.0 - step / 10, "eval/secret": SECRET} for step in range(3)]
    log = f"step 1 eval/secret {SECRET}\nEval_Secret={SECRET}\nnothing special\n"
    judged.end(run, rows, log)
    (run_dir / "notes.txt").write_text(f"eval secret was {SECRET}")
    (run_dir / "table.csv").write_text(f"step,eval/secret\n1,{SECRET}\n")
    (run_dir / "dump.json").write_text(json.dumps({"eval/secret": {"last": SECRET}}, indent=1))
    with judged.ledger.write():
        judged.record.ask_held_out(run.id, run.id, 1, f"better by {SECRET}")
    with serve(judged.lab) as client:
        bodies = ask_all(client, run.id)
        for file in [one["name"] for one in json.loads(bodies["run"])["files"]]:
            bodies[file] = client.client.get("/api/file", params={"study": "tiny", "run": run.id, "name": file}).text
        assert "nothing special" in bodies["log"]
        assert "eval/loss" in bodies["curves"]
        assert "metrics.jsonl" in bodies
    bodies["the exported page"] = snapshot(load_lab(judged.lab))
    assert run.id in bodies["the exported page"]
    assert [name for name, body in bodies.items() if str(SECRET)[:7] in body] == []


def test_secrets_in_logs_files_and_reasons_are_hidden(maker: Any, serve: Callable[..., Any]) -> None:
    secret = "sk-proj-" + "a1B2" * 12
    run = maker.plan(maker_config(random.Random(0)), reason=f"with {secret}")
    run_dir = maker.launch(run)
    maker.end(run, [{"step": 1, "eval/loss": 1.0}], f"OPENAI_API_KEY={secret}\n")
    (run_dir / "notes.txt").write_text(secret)
    (run_dir / ".env").write_text("A=b")
    with serve(maker.lab) as client:
        bodies = ask_all(client, run.id)
        query = {"study": "tiny", "run": run.id}
        bodies["notes"] = client.client.get("/api/file", params={**query, "name": "notes.txt"}).text
        assert client.client.get("/api/file", params={**query, "name": ".env"}).status_code == 400
    assert [name for name, body in bodies.items() if secret in body] == []


def test_no_file_outside_a_run_folder_can_be_read(maker: Any, serve: Callable[..., Any]) -> None:
    run = maker.train()
    run_dir = maker.outputs / run.id
    outside = maker.lab / "private.txt"
    outside.write_text("not for the page")
    (run_dir / "link.txt").symlink_to(outside)
    (run_dir / "folder").symlink_to(maker.lab)
    os.mkfifo(run_dir / "pipe")
    (run_dir / "page.html").write_text("<script>alert(1)</script>")
    (run_dir / "fake.png").write_text("<svg onload=alert(1)>")
    with serve(maker.lab) as client:

        def read(name: str) -> Any:
            return client.client.get("/api/file", params={"study": "tiny", "run": run.id, "name": name})

        names = ["../../../private.txt", "/etc/passwd", "link.txt", "folder/private.txt", "pipe", "..", ".", "",
                 "record/../../../../private.txt", "%2e%2e/private.txt", "a\0b", "record", str(outside)]  # fmt: skip
        for name in names:
            answer = read(name)
            assert answer.status_code == 400, name
            assert "not for the page" not in answer.text
        for name in ("page.html", "fake.png"):
            answer = read(name)
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
        assert client.client.get("/api/artifact", params={"folder": "outputs", "name": "x"}).status_code == 400
        for path in ("/web/../server.py", "/web/%2e%2e/server.py", "/assets//etc/passwd", "/web/nothing.js"):
            assert client.client.get(path).status_code == 404, path
        for query in ({"run": "../x"}, {"run": "1' OR 1=1"}, {"study": "nothing"}, {"study": "../tiny"}):
            assert client.client.get("/api/run", params={"study": "tiny", "run": "1", **query}).status_code == 400


# -- logs and curves


def test_a_log_is_sent_by_whole_lines_and_survives_truncation(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record/run.json").write_text("{}")
    log = tmp_path / "record/train.log"
    hidden = HeldOutFilter(load_lab_study())

    def read(begin: int | None, *, is_over: bool = False) -> dict[str, Any]:
        return read_log(tmp_path, begin, is_over=is_over, hidden=hidden)

    assert read(None)["text"] == ""
    log.write_bytes(b"one\nAPI_KEY=half")
    first = read(None)
    assert first["text"] == "one\n"
    log.write_bytes(b"one\nAPI_KEY=halfofasecretvalue123\nlast")
    second = read(first["next"])
    assert "halfofasecret" not in second["text"]
    assert read(second["next"])["text"] == ""
    assert read(second["next"], is_over=True)["text"] == "last"
    log.write_bytes(b"new\n")
    assert read(second["next"]) | {"size": 0} == {
        "text": "new\n",
        "next": 4,
        "start": 0,
        "size": 0,
        "reset": True,
        "more": False,
    }
    log.write_bytes(b"10%\r50%\r\x1b[31m100%\x1b[0m\n\x00\xff\n")
    assert read(0)["text"].splitlines()[0] == "100%"
    log.write_bytes(b"x" * (1 << 20))
    assert read(0)["text"] == "[a very long line is not shown]\n"
    log.unlink()
    assert read(5)["reset"] is True


def load_lab_study() -> Any:
    class Study:
        holdout = None

    return Study()


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 400), st.floats(-1e6, 1e6)), min_size=1, max_size=80), min_size=1, max_size=4),
    st.integers(2, 60), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_grid_keeps_every_finite_point_between_its_envelope(
    curves: list[list[tuple[int, float]]], points: int, log: bool, together: bool
) -> None:
    class Cache(CurveCache):
        def read(self, study: Any, run_dir: Path, *, is_over: bool) -> RunCurves:
            followed = RunCurves(reader=type("R", (), {"problems": {}})())
            pairs = sorted(curves[int(run_dir.name)])
            followed.add({"m": Curve([float(step) for step, _ in pairs], [value for _, value in pairs])})
            return followed

    study = type("S", (), {"objective": None})()
    runs = [(str(n), "0" if together else str(n), True) for n in range(len(curves))]
    made = draw(Cache(), study, Path("/"), CurveRequest(runs, (), points=points, log=log, by_config=together))
    chart = made["charts"][0]
    assert len(chart["x"]) <= points
    assert chart["x"] == sorted(chart["x"])
    for series in chart["series"]:
        assert len(series["mean"]) == len(series["low"]) == len(series["high"]) == len(chart["x"])
        for mean, low, high in zip(series["mean"], series["low"], series["high"], strict=True):
            assert (mean is None) == (low is None) == (high is None)
            if mean is not None:
                assert low - 1e-5 * abs(low) - 1e-9 <= mean <= high + 1e-5 * abs(high) + 1e-9
    if not together and not log:
        for series in chart["series"]:
            values = [value for _, value in curves[int(series["run"])]]
            assert min(filter(lambda v: v is not None, series["low"])) == pytest.approx(min(values), rel=1e-4, abs=1e-9)
            assert max(filter(lambda v: v is not None, series["high"])) == pytest.approx(
                max(values), rel=1e-4, abs=1e-9
            )


def test_seeds_of_a_config_are_one_series(judged_full: Any, serve: Callable[..., Any]) -> None:
    base = next(iter(points(judged_full.record.runs()).values()))
    runs = ",".join(run.id for run in base.runs)
    with serve(judged_full.lab) as client:
        together = client.get("curves", study="tiny", runs=runs, metrics='["eval/loss"]')["charts"][0]["series"]
        apart = client.get("curves", study="tiny", runs=runs, metrics='["eval/loss"]', seeds=1)["charts"][0]["series"]
    assert [(one["run"], one["runs"]) for one in together] == [(base.run.id, len(base.runs))]
    assert together[0]["mean"][-1] == pytest.approx(base.mean, rel=1e-4)
    assert len(apart) == len(base.runs)


# -- verdicts


def test_the_sentences_of_the_judge_have_honest_digits(judged_full: Any) -> None:
    def digits(number: str) -> int:
        return len(number.partition("e")[0].replace(".", "").lstrip("0"))

    sentences = [str(evidence["why"]) for evidence in judged_full.record.verdicts().values()]
    assert max(digits(one) for text in sentences for one in re.findall(r"\d+\.\d+(?:e-\d+)?", text)) <= 4
    found = [re.search(r"p ([\d.e-]+), needed ([\d.e-]+)", text) for text in sentences]
    assert max(digits(one) for match in found if match for one in match.groups()) <= 2


def test_a_verdict_comes_with_its_evidence_and_its_bar(judged_full: Any, serve: Callable[..., Any]) -> None:
    with serve(judged_full.lab) as client:
        found = client.get("judge", study="tiny")
        tested = [one for one in found["entries"] if one["p"] is not None]
        assert tested
        assert all(one["boundary"] is not None and one["alpha"] is not None and one["n"] > 1 for one in tested)
        assert [one["run"] for one in found["entries"]] == list(judged_full.record.verdicts())
        page = client.get("run", study="tiny", run=tested[0]["run"])
        assert page["verdict"]["boundary"] == tested[0]["boundary"]
        assert {one["rival"] for one in page["replicates"]} == {True, False}
        now = client.get("now", study="tiny")
        assert now["judge"]["champion"] == found["judge"]["champion"]
        assert now["happened"]["tried"] == 12
        later = client.get("now", study="tiny", since=now["seq"])
        assert later["happened"]["tried"] == later["happened"]["ended"] == 0
        assert later["happened"]["champion"] is None
        record = client.get("record", limit=5)
        assert record["chain"] == {"checked": judged_full.ledger.head()[0], "broken": None}
        assert [one["seq"] for one in record["events"]] == sorted(
            (one["seq"] for one in record["events"]), reverse=True
        )


# -- steering


def test_every_action_is_an_event_with_who_and_from_where(
    judged: Any, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (judged.lab / "train.py").write_text("")
    run = judged.train(judged_base(), proposer="base")
    running = judged.plan({**judged_base(), "model": {**judged_base()["model"], "width": 128}})
    judged.launch(running)
    monkeypatch.setattr("looplab.cli.page_control.engine_pid", lambda *_: None)
    with serve(judged.lab, control=True) as client:
        for action in ("pause", "resume", "drain", "stop"):
            assert client.control("tiny", action).status_code == 400  # there is no engine
        monkeypatch.setattr("looplab.cli.page_control.engine_pid", lambda *_: 1)
        done = [
            client.control("tiny", action, **more)
            for action, more in [
                ("pause", {}), ("resume", {}), ("drain", {}), ("stop", {}), ("stop run", {"run": running.id}),
                ("say", {"text": "keep the width"}), ("veto", {"run": run.id, "why": "broken"}),
                ("propose", {"edits": ["model.dropout@set=0.3"], "parent": "base", "reason": "less overfitting"}),
            ]
        ]  # fmt: skip
        assert [answer.status_code for answer in done] == [200] * len(done), [answer.text for answer in done]
        refused = client.control("tiny", "propose", edits=["model.dropout@set=4"], parent="base", reason="why not")
        assert refused.status_code == 400
        assert "guard" in refused.json()["error"]
        for action, more in (("nothing", {}), ("say", {"text": " "}), ("veto", {"run": run.id, "why": ""}),
                             ("propose", {"edits": "x", "reason": "y"}), ("stop run", {"run": run.id}),
                             ("objective", {"metric": "eval/loss"})):  # fmt: skip
            assert client.control("tiny", action, **more).status_code == 400, action
    events = list(judged.ledger.events("tiny"))
    steered = [event for event in events if event.kind == "steered"]
    assert [event.data["what"] for event in steered] == [
        "pause", "resume", "drain", "stop", "stop run", "say", "veto", "propose",
    ]  # fmt: skip
    assert {event.data["where"] for event in steered} == {"page, testclient"}
    assert all(event.data["who"] for event in steered)
    assert [what for what, _ in judged.record.take_commands()] == ["pause", "resume", "drain", "stop", "stop", "veto"]
    assert judged.record.messages() == ["keep the width"]
    assert judged.record.void_runs() == [run.id]
    assert [one.edits for one in judged.record.waiting(5)] == [("model.dropout@set=0.3",)]
    assert judged.ledger.first_broken_link(noted=False) is None


def judged_base() -> dict[str, Any]:
    return {
        "train": {"learning_rate": 0.001, "batch_size": 64, "optimizer": "adamw", "weight_decay": 0.01, "warmup": True},
        "model": {"width": 256, "dropout": 0.1, "activation": "gelu"},
        "seed": 1,
        "data": {"path": "data/train.bin"},
    }


def test_a_study_without_an_objective_gets_one_from_the_page(
    tmp_path: Path, making: Any, serve: Callable[..., Any]
) -> None:
    text = re.sub(r"^objective:.*\n", "", making.LAB, flags=re.MULTILINE)
    made = making.make(tmp_path / "lab", text)
    with serve(made.lab, control=True) as client:
        answer = client.control("tiny", "objective", metric="eval/loss", goal="min")
        assert answer.status_code == 200, answer.text
        found = client.get("lab")
    objective = load_lab(made.lab).study("tiny").objective
    assert objective is not None
    assert (objective.metric, objective.goal) == ("eval/loss", "min")
    assert [event.data["what"] for event in made.ledger.events("tiny") if event.kind == "steered"] == ["objective"]
    assert found["studies"][0]["name"] == "tiny"


def test_verify_knows_the_events_of_the_page(maker: Any, serve: Callable[..., Any]) -> None:
    with serve(maker.lab, control=True) as client:
        assert client.control("tiny", "say", text="hello").status_code == 200
    maker.ledger.close()
    ledger = Ledger(maker.ledger.path)
    assert [finding for finding in audit(ledger, maker.lab).findings if finding.what == "chain"] == []


# -- the page's own files


def test_the_page_never_writes_text_as_html() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!www\.w3\.org)"
    )
    for path in WEB.iterdir():
        if path.suffix in (".js", ".html", ".css"):
            assert forbidden.search(path.read_text(encoding="utf-8")) is None, path
            assert not re.search(r"""(?:src|href)\s*=\s*["']/""", path.read_text(encoding="utf-8")), (
                path
            )  # relative only


def test_every_text_of_the_page_has_a_translation_with_the_same_values() -> None:
    translated = texts("zh")
    used = {KEYS, BACK, LABEL, FANOVA_LABEL, *NEEDS.values(), *STATES}
    for path in (*WEB.glob("*.js"), *ASSETS.glob("*.js"), *ASSETS.with_name("html").glob("*.js")):
        used |= set(re.findall(r'(?<![\w.])t\(\s*"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8")))
    for path in map(Path, (budget.__file__, judged_facts.__file__, overview.__file__, top.__file__)):
        used |= set(re.findall(r'(?<![\w.])t\(\s*"((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8")))
    assert used - set(translated) == set()

    def values(text: str) -> set[str]:
        return set(re.findall(r"\{(\w+)\}", text))

    assert [key for key, text in translated.items() if not values(text) <= values(key)] == []


def test_a_text_is_said_in_the_language_of_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "{n} {n|run|runs} failed"
    assert [t(key, n=1), t(key, n=2)] == ["1 run failed", "2 runs failed"]
    assert in_each(lambda: t(key, n=2)) == {"en": "2 runs failed", "zh": "2 个运行失败"}
    assert t("nobody translated this {x}", x=3) == "nobody translated this 3"
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert language_of_terminal() == "zh"
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert language_of_terminal() == "en"


def test_the_model_is_asked_by_one_bounded_process_and_its_answer_is_kept(
    maker: Any, serve: Callable[..., Any], until: Callable[..., Any], tmp_path: Path
) -> None:
    count = tmp_path / "count"
    script = (
        "import json, sys; open(sys.argv[1], 'a').write('x'); print(json.dumps({'belief': {'study': sys.argv[2]}}))"
    )
    argv = (sys.executable, "-c", script, str(count))
    maker.train(proposer="base")
    with serve(maker.lab, slices=lambda study: (*argv, study)) as client:
        assert client.get("slices", study="tiny") == {"belief": {"study": "tiny"}, "ended": 1}
        client.get("slices", study="tiny")
        assert count.read_text() == "x"
        maker.train()
        until(lambda: client.get("slices", study="tiny")["ended"] == 2)
        assert count.read_text() == "xx"
        with maker.ledger.write():
            maker.record.judged(maker.record.run("1").id, "void", {"why": "a leak"}, {})
        until(lambda: client.get("slices", study="tiny") and count.read_text() == "xxx")
    with serve(maker.lab, slices=lambda _: (sys.executable, "-c", "raise SystemExit(1)")) as client:
        assert client.client.get("/api/slices", params={"study": "tiny"}).json()["error"].startswith("the model failed")
    with serve(maker.lab) as client:
        assert client.client.get("/api/slices", params={"study": "tiny"}).status_code == 400


def test_a_part_of_a_curve_is_sent_with_finer_buckets(maker: Any, serve: Callable[..., Any]) -> None:
    run = maker.train(losses=[float(n % 7) for n in range(4000)], proposer="base")
    with serve(maker.lab) as client:
        query = {"study": "tiny", "runs": run.id, "metrics": '["eval/loss"]', "points": 100}
        whole = client.get("curves", **query)["charts"][0]
        part = client.get("curves", **query, low=1000, high=1050)["charts"][0]
        for names in ("5", "null", '{"eval/loss": 1}', "[[1], 2]"):
            assert client.get("curves", **{**query, "metrics": names})["charts"] is not None
    assert not whole["exact"]
    assert part["exact"]
    assert len(whole["x"]) == 100
    assert part["x"] == list(range(1000, 1051))


@given(st.text(max_size=40))
def test_any_token_is_compared_without_an_error(given_token: str) -> None:
    rules = AccessRules.make("0123456789abcdef", 1, host="127.0.0.1")
    assert rules.is_token(given_token) == (given_token == "0123456789abcdef")
