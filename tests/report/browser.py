"""A real headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE_S

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One browser with one page; records its network requests and script errors."""

    flags = FLAGS

    def __init__(self, program: str, profile: Path) -> None:
        self.program = program
        read_theirs, self._to = os.pipe()
        self._from, write_theirs = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 50) for descriptor in (read_theirs, write_theirs)]

        def place_pipes() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        argv = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            argv, preexec_fn=place_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for descriptor in (read_theirs, write_theirs, *high):
            os.close(descriptor)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        details = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(details["exceptionDetails"])[:500])
            case "Log.entryAdded" if details["entry"]["level"] == "error":
                self.errors.append(details["entry"]["text"])
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, fragment: str = "") -> None:
        self.visit(path.resolve().as_uri() + fragment, width, height)

    def visit(self, url: str, width: int = 1280, height: int = 900) -> None:
        self.requests.clear()
        self.errors.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url="about:blank")  # so that another fragment is another page too
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.protocol !== 'about:'")

    def dark(self, on: bool) -> None:
        value = "dark" if on else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def js(self, expression: str) -> Any:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self.js(expression):
                    return
            except AssertionError as error:
                if "navigated" not in str(error):  # a page that is being left cannot answer
                    raise
            assert time.monotonic() < deadline, f"this never came true: {expression}"

    def mouse(self, kind: str, x: float, y: float) -> None:
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def drag(self, x: float, start: float, end: float) -> None:
        self.mouse("mouseMoved", x, start)
        self.mouse("mousePressed", x, start)
        for part in range(1, 5):
            self.send(
                "Input.dispatchMouseEvent", type="mouseMoved", x=x, y=start + (end - start) * part / 4, button="left",
                buttons=1,
            )  # fmt: skip
        self.mouse("mouseReleased", x, end)

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
