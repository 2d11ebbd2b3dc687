"""Alerts, to real commands and to a real server on the loopback interface."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import nan
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.config.lab import AlertConfig
from looplab.watch.alert import send
from looplab.watch.watcher import Alarm

ALARM = Alarm(
    rule="nan", run_id="0003-ab12", stops=True, requeue=("lr@mul=0.5",), requeues=3, note=None, alert=None,
    text="step 3: loss is NaN", step=3, values={"loss": nan},
)  # fmt: skip


class Server(ThreadingHTTPServer):
    received: list[tuple[str, str | None, Any]]
    release: threading.Event


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, self.headers["Content-Type"], json.loads(body)))
        if self.path == "/slow":
            self.server.release.wait(PATIENCE_S)
        self.send_response(403 if self.path == "/secret-token" else 204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.received, server.release = [], threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.release.set()
        server.shutdown()


def sent(alert: AlertConfig, folder: Path | None = None, timeout: float = PATIENCE_S) -> list[str]:
    """Send the alarm, wait, and return what was reported."""
    problems: list[str] = []
    thread = send(alert, ALARM.plain(), problems.append, folder=folder, timeout=timeout)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return problems


def webhook(server: Server, path: str) -> AlertConfig:
    return AlertConfig(webhook=f"http://127.0.0.1:{server.server_port}{path}")


def python(code: str) -> AlertConfig:
    return AlertConfig(command=[sys.executable, "-c", code])


def test_a_command_gets_the_alarm_as_json_in_the_folder_of_the_lab(tmp_path: Path) -> None:
    assert sent(python("import sys; open('got.json', 'w').write(sys.stdin.read())"), tmp_path) == []
    assert json.loads((tmp_path / "got.json").read_text()) == {
        "rule": "nan",
        "run": "0003-ab12",
        "step": 3,
        "text": "step 3: loss is NaN",
        "values": {"loss": "NaN"},
        "stops": True,
        "requeue": ["lr@mul=0.5"],
        "note": None,
    }


def test_a_command_does_not_run_in_a_shell(tmp_path: Path) -> None:
    alert = AlertConfig(
        command=[sys.executable, "-c", "import sys; assert sys.argv[1] == '$(touch x); > y'", "$(touch x); > y"]
    )
    assert sent(alert, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_does_not_read_is_fine() -> None:
    assert sent(python("pass")) == []


def test_a_command_that_fails_is_reported_with_its_last_line() -> None:
    (problem,) = sent(python("import sys; print('one'); sys.exit('no such channel')"))
    assert problem == f"the alert command {sys.executable} failed with exit code 1: no such channel"


def test_a_command_that_is_not_there_is_reported() -> None:
    (problem,) = sent(AlertConfig(command=["/no/such/program"]))
    assert problem.startswith("the alert command /no/such/program cannot be started: ")


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    hanging = AlertConfig(command=["sh", "-c", "sleep 600 & echo $! > new; mv new pid; wait"])
    for timeout in (1, 4, 16, 64):  # until there was time to start it
        (problem,) = sent(hanging, tmp_path, timeout=timeout)
        assert problem == f"the alert command sh was killed after {timeout} s"
        if (tmp_path / "pid").exists():
            break
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
        time.sleep(0.01)


def test_a_webhook_gets_the_alarm_as_json(server: Server) -> None:
    assert sent(webhook(server, "/hook")) == []
    ((path, kind, body),) = server.received
    assert (path, kind) == ("/hook", "application/json")
    assert body["text"] == "step 3: loss is NaN"


def test_a_webhook_that_refuses_is_reported_without_its_secret(server: Server) -> None:
    (problem,) = sent(webhook(server, "/secret-token"))
    assert problem == "the webhook at 127.0.0.1 answered 403 Forbidden"


def test_a_webhook_that_does_not_answer_is_reported(server: Server) -> None:
    (problem,) = sent(webhook(server, "/slow"), timeout=0.2)
    assert problem == "the webhook at 127.0.0.1 did not answer in 0.2 s"


def test_a_webhook_that_is_not_there_is_reported(server: Server) -> None:
    address = webhook(server, "/secret-token")
    server.shutdown()
    server.server_close()
    (problem,) = sent(address)
    assert problem.startswith("the webhook at 127.0.0.1 cannot be reached: ")
    assert "secret-token" not in problem


@pytest.mark.parametrize(
    "address", ["http://", "http://127.0.0.1:port/secret", "http://[::1/secret", "http://a b/secret"]
)
def test_an_invalid_address_is_reported_without_its_secret(address: str) -> None:
    (problem,) = sent(AlertConfig(webhook=address))
    assert problem.startswith("the webhook")
    assert "secret" not in problem
