"""Labs to look at, servers without a socket, and a browser with tabs."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.conftest import PATIENCE_S
from tests.report import making as studies
from tests.report.browser import Browser
from tests.report.fixtures import judged, maker, making, open_browser  # noqa: F401 (fixtures)

from looplab.cli.labs import find_study
from looplab.cli.page_control import LabSteering
from looplab.config.lab import load_lab
from looplab.ledger.plan import RunPlan
from looplab.loop.lock import engine_pid
from looplab.pipeline.overview import pipelines_of
from looplab.ui.model import LabModel
from looplab.ui.security import AccessRules
from looplab.ui.server import PageHooks, PageServer

TOKEN = "a-token-of-the-tests"
COMMAND = Path(sys.executable).with_name("looplab")
BIG = 10_000


@pytest.fixture(scope="session")
def judged_full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A study in which everything was judged; only to be read."""
    made = studies.make(tmp_path_factory.mktemp("judged") / "lab", studies.JUDGED)
    studies.fill_judged(made, 12)
    return made


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A study of ten thousand runs in its ledger; only to be read, or to be added to."""
    made = studies.make(tmp_path_factory.mktemp("big") / "lab")
    with made.ledger.write():
        round_ = made.record.begin_round()
        for n in range(BIG):
            config = studies.edited(train__learning_rate=(n % 997 + 1) / 1000, model__width=32 + n % 512)
            run = made.record.plan(
                round=round_, proposal=None, proposer="base" if n == 0 else ("search", "agent")[n % 2], parent=None,
                base="configs/base.json", reason=f"idea {n}", config_hash=f"{n:016x}", devices=1, plan=RunPlan(config),
                role="base" if n == 0 else "trial", point=f"{n:016x}", seed=1, twin=None,
            )  # fmt: skip
            made.record.launched(run.id, f"cpu{n % 4}", {})
            made.record.ended(
                run.id, status="ok", code=0, signal=None, started=made.clock + n, ended=made.clock + n + 0.9,
                objective=1 + (n * 7919 % BIG) / BIG, files={},
            )  # fmt: skip
    return made


@dataclass
class Client:
    """Requests to a server without a socket."""

    client: TestClient
    rules: AccessRules

    def get(self, name: str, **query: Any) -> Any:
        answer = self.client.get(f"/api/{name}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def control(self, study: str, action: str, **more: Any) -> Any:
        headers = {"origin": "http://localhost", "x-looplab-control": self.rules.control_token}
        return self.client.post("/api/control", headers=headers, json={"study": study, "action": action, **more})


@contextlib.contextmanager
def serve_lab(lab: Path, *, control: bool = False, token: bool = True, slices: Any = None) -> Iterator[Client]:
    rules = AccessRules.make(TOKEN, 8000, host="127.0.0.1", names=["hub.example"], control=control)
    model = LabModel(load_lab(lab), find_study=find_study, engine_pid=engine_pid)
    server = PageServer(model, rules, PageHooks(pipelines_of, LabSteering(lab) if control else None, slices))
    headers = {"x-looplab-token": TOKEN} if token else {}
    with TestClient(server.asgi, base_url="http://localhost", headers=headers) as client:
        yield Client(client, rules)


@pytest.fixture
def serve() -> Callable[..., Any]:
    return serve_lab


class Tabs(Browser):
    """A browser with any number of tabs; each reports violations of its policy."""

    def __init__(self, program: str, profile: Path) -> None:
        super().__init__(program, profile)
        self._first = self._session
        self._added: list[str] = []  # targets of further tabs

    def visit(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        self.errors.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait_for("document.querySelector('header.top') !== null")

    def forget(self) -> None:
        """Leave the pages of an earlier test, which would continue to ask, and forget their requests."""
        self._session = None
        while self._added:
            self.send("Target.closeTarget", targetId=self._added.pop())
        self._session = self._first
        self.send("Page.bringToFront")
        self.send("Page.navigate", url="about:blank")
        self.wait_for("location.href === 'about:blank'")
        self.requests.clear()

    def new_tab(self) -> str:
        """Open a tab and make it the current one; return its session."""
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._added.append(target)
        session = str(self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        self._session = session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return session

    def switch(self, session: str) -> None:
        self._session = session
        self.send("Page.bringToFront")


@pytest.fixture
def browser(shared_browser: Any) -> Any:
    shared_browser.forget()
    return shared_browser


@pytest.fixture(scope="session")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile"), Tabs) as opened:
        yield opened


class PageProcess:
    """`looplab ui` as a process of its own."""

    token = TOKEN

    def __init__(self, lab: Path, *options: str) -> None:
        argv = [COMMAND, "ui", "--json", "--token", TOKEN, "--lab", lab, *options]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        self.started: dict[str, Any] = json.loads(line)
        self.url = self.started["url"]

    @property
    def base(self) -> str:
        return str(self.url.partition("?")[0])

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def page() -> Iterator[Callable[..., PageProcess]]:
    begun: list[PageProcess] = []

    def begin(lab: Path, *options: str) -> PageProcess:
        begun.append(PageProcess(lab, *options))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.end()


def wait_until(ready: Callable[[], Any]) -> Any:
    """Wait for what must come."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.02)
    return found


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Any]:
    return wait_until
