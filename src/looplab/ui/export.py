"""The live page as one file for sharing: its scripts, its styles, and the answers that a server would give.

Answers are collected from the application itself, so what the server never sends is not in the file either. Curves,
logs and facts of single runs are those of the champions, the best and the latest runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from looplab.errors import LabError
from looplab.report.bundle import single_file
from looplab.report.language import LANGUAGES, texts
from looplab.ui.server import PageServer

MAX_RUNS = 120
"""Runs of a study whose curves, logs and facts are in the file."""
MAX_LOG = 20_000
"""Characters of a log."""
SCRIPTS = (
    "snapshot.js", "store.js", "common.js", "curves.js", "steering.js", "run.js", "runs.js", "lineage.js", "agents.js",
    "judge.js", "now.js", "pipelines.js", "record.js", "app.js",
)  # fmt: skip
"""Each after those it imports; snapshot.js stands for i18n.js."""

_BODY = """\
<a class="skip" href="#main">Skip to the content</a>
<div id="page"></div>
<noscript>This page draws itself with its own script.</noscript>"""


async def collect(server: PageServer) -> dict[str, Any]:
    """Return the answers that the page needs, by name, study and run."""
    async with server.running():
        lab = await _ask(server, "lab")
        found: dict[str, Any] = {"lab": {**lab, "control": None}, "studies": {}, "texts": {}}
        for name in LANGUAGES[1:]:
            found["texts"][name] = dict(texts(name))
        for name in ("versions", "pipelines", "record"):
            found[name] = await _ask(server, name)
        for study in (one["name"] for one in lab["studies"]):
            found["studies"][study] = await _collect_study(server, study)
    return found


async def _collect_study(server: PageServer, study: str) -> dict[str, Any]:
    changes = await _ask(server, "changes", study=study)
    while not changes["complete"]:
        changes = await _ask(server, "changes", study=study)
    found: dict[str, Any] = {"changes": changes}
    for name in ("now", "judge", "agents", "importance"):
        found[name] = await _ask(server, name, study=study)
    found["transcripts"] = {}
    for call in found["agents"]["calls"][:MAX_RUNS]:
        try:
            found["transcripts"][call["call"]] = await _ask(server, "transcript", study=study, call=call["call"])
        except LabError:
            continue  # its log is gone
    found["runs"] = {}
    for run in _chosen(changes, found["now"]):
        log = await _ask(server, "log", study=study, run=run)
        found["runs"][run] = {
            "run": await _ask(server, "run", study=study, run=run),
            "log": {**log, "text": log["text"][-MAX_LOG:], "over": True, "more": False},
            "curves": await _ask(server, "curves", study=study, runs=run, points="200", seeds="1"),
        }
    return found


def _chosen(changes: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the champions, the best and the latest runs, each once."""
    place = {name: n for n, name in enumerate(changes["columns"])}
    rows = changes["rows"]
    champions = [one["run"] for one in ((now.get("judge") or {}).get("champions") or ())]
    sign = -1.0 if now.get("goal") == "max" else 1.0
    measured = sorted(
        (row for row in rows if row[place["objective"]] is not None), key=lambda row: sign * row[place["objective"]]
    )
    best = [row[0] for row in measured[: MAX_RUNS // 2]]
    latest = [row[0] for row in sorted(rows, key=lambda row: -row[place["n"]])]
    return list(dict.fromkeys([*champions, *best, *latest]))[:MAX_RUNS]


async def _ask(server: PageServer, name: str, **query: str) -> Any:
    """Return the answer to a GET of the API, as the page would get it.

    Raises:
        LabError: The server answers with an error.
    """
    sent: list[Any] = []
    scope = {
        "type": "http", "method": "GET", "path": f"/api/{name}", "raw_path": f"/api/{name}".encode(), "root_path": "",
        "query_string": urlencode(query).encode(), "headers": [], "http_version": "1.1", "scheme": "http",
        "server": ("localhost", 80), "client": ("127.0.0.1", 0),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await server.app(scope, receive, send)
    answer = json.loads(b"".join(one.get("body", b"") for one in sent[1:]))
    if sent[0]["status"] != 200:
        raise LabError(str(answer.get("error")))
    return answer


def snapshot_page(title: str, data: Mapping[str, Any]) -> str:
    """Return the page as one file that sends no requests."""
    web = files("looplab.ui") / "web"
    return single_file(title, _BODY, {"snapshot": data}, folder=web, scripts=SCRIPTS, style="page.css")
