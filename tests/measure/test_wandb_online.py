"""Runs on a W&B server, read by the real client from a stand-in of the server on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

_spec = importlib.util.spec_from_file_location("wandb_stand_in", Path(__file__).with_name("wandb_stand_in.py"))
assert _spec is not None
assert _spec.loader is not None
wandb_stand_in = importlib.util.module_from_spec(_spec)
sys.modules["wandb_stand_in"] = wandb_stand_in  # dataclasses look themselves up
_spec.loader.exec_module(wandb_stand_in)
KEY, ServedRun, StandIn = wandb_stand_in.KEY, wandb_stand_in.ServedRun, wandb_stand_in.StandIn

SCRIPT = """
import json, sys
from dataclasses import asdict
from looplab.errors import LabError
from looplab.measure.wandb_online import fetch_config, fetch_runs

def answer(what, *words):
    try:
        if what == "config":
            return fetch_config(*words)
        return [asdict(run) for run in fetch_runs(*words, aliases={"train/loss": ["loss"]}, goals={"mass": "max"})]
    except LabError as error:
        return {"error": error.message, "hint": error.hint}

print(json.dumps([answer(*question) for question in json.loads(sys.argv[1])]))
"""

Fetch = Callable[..., Any]


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    """Ask a server in a process of its own, since the client starts processes and remembers servers."""

    def ask(server: str, *questions: tuple[str | int, ...], **env: str) -> Any:
        clean = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        clean |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
        clean |= {"WANDB_BASE_URL": server, "WANDB_API_KEY": KEY, "WANDB_HTTP_TIMEOUT": "60", **env}
        argv = [sys.executable, "-c", SCRIPT, json.dumps(questions)]
        env = {name: value for name, value in clean.items() if value}
        try:
            done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S / 3)
        except subprocess.TimeoutExpired:  # rarely, the client never asks its server anything
            done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def steps(count: int, every: int = 1, **columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [
        {
            "_step": n * every,
            "_runtime": n,
            "_timestamp": 1.7e9 + n,
            **{name: make(n) for name, make in columns.items()},
        }
        for n in range(count)
    ]


def test_runs_come_newest_first_with_summaries_over_their_whole_history(fetch: Fetch) -> None:
    old = ServedRun(
        "old",
        rows=steps(
            2500, loss=lambda n: abs(n - 1777) / 100, nested=lambda n: {"a": n}, h=lambda n: {"_type": "histogram"}
        ),
    )
    new = ServedRun("new", rows=steps(3, **{"mass": float}), created="2026-02-02T00:00:00Z", state="running")
    with StandIn([old, new]) as server:
        (found,) = fetch(server.url, ("runs", "team", "proj", 10))
        assert server.strange == []
        assert server.count("HistoryPage") == 4
    assert [(run["id"], run["name"], run["state"]) for run in found] == [
        ("new", "name-of-new", "running"),
        ("old", "name-of-old", "finished"),
    ]
    assert found[0]["url"].endswith("/team/proj/runs/new")
    assert found[0]["metrics"]["mass"]["best"] == 2  # more is better
    assert found[1]["steps"] == 2499
    assert set(found[1]["metrics"]) == {"train/loss", "nested.a"}
    loss = found[1]["metrics"]["train/loss"]
    assert (loss["n"], loss["first"], loss["best"], loss["best_step"]) == (2500, 17.77, 0, 1777)


def test_only_as_many_runs_are_read_as_were_asked_for(fetch: Fetch) -> None:
    runs = [ServedRun(f"run{n}", rows=steps(2, x=float), created=f"2026-01-0{n}T00:00:00Z") for n in range(1, 6)]
    with StandIn(runs) as server:
        (found,) = fetch(server.url, ("runs", "team", "proj", 2))
        assert server.count("HistoryPage") == 2
    assert [run["id"] for run in found] == ["run5", "run4"]


def test_a_history_with_steps_far_apart_needs_few_pages(fetch: Fetch) -> None:
    with StandIn([ServedRun("far", rows=steps(50, every=1_000_000, reward=float))]) as server:
        ((run,),) = fetch(server.url, ("runs", "team", "proj", 1))
        assert server.count("HistoryPage") == 1
    assert run["metrics"]["reward"]["n"] == 50
    assert run["steps"] == 49_000_000


def test_rows_that_the_server_has_put_into_a_file_are_counted_once(fetch: Fetch) -> None:
    with StandIn([ServedRun("filed", rows=steps(20, loss=lambda n: 20.0 - n), exported=15)]) as server:
        ((run,),) = fetch(server.url, ("runs", "team", "proj", 1))
        assert server.strange == []
    loss = run["metrics"]["train/loss"]
    assert (loss["n"], loss["first"], loss["last"], loss["mean"]) == (20, 20, 1, 10.5)


def test_what_is_missing_is_never_zero(fetch: Fetch) -> None:
    summed = ServedRun(
        "summed", summary={"acc": 0.5, "_step": 7, "_wandb": {"runtime": 3}}, created="2026-01-03T00:00:00Z"
    )
    empty = ServedRun("empty", created="2026-01-02T00:00:00Z")
    lost = ServedRun("lost", rows=steps(3, loss=lambda n: "NaN"), created="2026-01-01T00:00:00Z")
    with StandIn([summed, empty, lost]) as server:
        (runs,) = fetch(server.url, ("runs", "team", "proj", 9))
    found = {run["id"]: run for run in runs}
    assert (found["empty"]["metrics"], found["empty"]["steps"]) == ({}, None)
    acc = found["summed"]["metrics"]["acc"]
    assert (acc["last"], acc["delta"], acc["n"], found["summed"]["steps"]) == (0.5, None, 1, 7)
    loss = found["lost"]["metrics"]["train/loss"]
    assert (loss["last"], loss["n"], loss["nan"], loss["last_is_nan"]) == (None, 0, 3, True)


def test_the_config_comes_without_the_entries_of_wandb(fetch: Fetch) -> None:
    config = {"lr": 0.1, "ot": {"loss_config": {"reg": 0.3}, "features": [{"weight": None}]}}
    with StandIn([ServedRun("h5ktqxph", config=config), ServedRun("bare")]) as server:
        found, bare = fetch(server.url, ("config", "team", "proj", "h5ktqxph"), ("config", "team", "proj", "bare"))
    assert found == config
    assert "has no config" in bare["error"]


def test_what_does_not_exist_is_reported(fetch: Fetch) -> None:
    with StandIn([ServedRun("a")]) as server:
        run, project = fetch(server.url, ("config", "team", "proj", "b"), ("runs", "team", "other", 5))
    assert "Could not find run" in run["error"]
    assert "team/other" in project["error"]
    assert "Could not find project" in project["error"]
    assert "WANDB_BASE_URL" in project["hint"]


def test_a_refused_key_is_reported_but_not_shown(fetch: Fetch) -> None:
    wrong = "f" * 40
    with StandIn([]) as server:
        (answer,) = fetch(server.url, ("runs", "team", "proj", 5), WANDB_API_KEY=wrong)
    assert "invalid API key" in answer["error"]
    assert wrong not in str(answer)


def test_without_a_key_nothing_is_asked(fetch: Fetch) -> None:
    with StandIn([]) as server:
        (answer,) = fetch(server.url, ("runs", "team", "proj", 5), WANDB_API_KEY="")
        assert server.asked == []
    assert "WANDB_API_KEY is not set" in answer["error"]


def test_a_server_that_does_not_answer_is_reported(fetch: Fetch) -> None:
    with StandIn([]) as server:
        url = server.url
    (answer,) = fetch(url, ("runs", "team", "proj", 5), WANDB_HTTP_TIMEOUT="1")
    assert url in answer["error"] + answer["hint"]


def test_without_the_client_the_extra_is_named(fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('not installed')")
    (answer,) = fetch("http://127.0.0.1:9", ("runs", "team", "proj", 5), PYTHONPATH=str(tmp_path))
    assert "looplab[wandb]" in answer["hint"]
