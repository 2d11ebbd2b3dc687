"""A scripted model on loopback: it speaks to the real codex (/v1/responses) and the real claude (/v1/messages).

    with Model([UseTool("exec_command", {"cmd": "echo 1 > a.txt"}), Say("done")]) as model:
        ... start the program with model.url ...
    model.requests   # what it was asked, one per step

Each question of the agent takes the next step of the script; after the last one the model says "nothing more".
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest

LOCAL = Path(__file__).parents[2] / ".agents"
PROVIDER = """
model = "scripted"
model_provider = "loopback"
[model_providers.loopback]
name = "loopback"
base_url = "{url}/v1"
wire_api = "responses"
requires_openai_auth = false
request_max_retries = 0
stream_max_retries = 0
"""
"""The config.toml of codex that leads it here."""


def program(name: str) -> str:
    """The real codex or claude; the test is skipped where there is none."""
    found = (
        os.environ.get(f"LOOPLAB_{name.upper()}")
        or shutil.which(name, path=LOCAL / "node_modules" / ".bin")
        or shutil.which(name)
    )
    if not found:
        pytest.skip(f"{name} is not installed; `make agents` does it")
    return found


@contextmanager
def new_home() -> Iterator[Path]:
    """A home of its own, outside of the temporary folder: codex keeps no helpers there."""
    parent = LOCAL if LOCAL.is_dir() else Path.home()
    with tempfile.TemporaryDirectory(prefix=".looplab-test-", dir=parent, ignore_cleanup_errors=True) as folder:
        (Path(folder) / "work").mkdir()
        (Path(folder) / "codex").mkdir()
        yield Path(folder)


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class UseTool:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Refuse:
    status: int = 429
    message: str = "rate limit reached, slow down"
    kind: str = "rate_limit_error"


@dataclass(frozen=True)
class Hang:
    """Answers nothing until the model is closed."""


Step = Say | UseTool | Refuse | Hang
INPUT, CACHED, OUTPUT = 100, 40, 10
"""What every step is said to have cost; INPUT contains CACHED."""


class Model:
    def __init__(self, script: Sequence[Step]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.asked = threading.Event()
        """Set when the first question came."""
        self.closed = threading.Event()
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        handler = type("BoundHandler", (Handler,), {"model": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Model:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def next_step(self, body: dict[str, Any]) -> Step:
        with self.lock:
            self.requests.append(body)
            self.asked.set()
            return self.script.pop(0) if self.script else Say("nothing more")


class Handler(BaseHTTPRequestHandler):
    model: ClassVar[Model]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer_json(200, {})

    def do_GET(self) -> None:
        self.answer_json(200 if self.path.startswith("/v1/models") else 404, {"data": [], "models": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if self.path.startswith("/v1/responses"):
            self.act(self.model.next_step(body), responses_events)
        elif self.path.startswith("/v1/messages/count_tokens"):
            self.answer_json(200, {"input_tokens": INPUT})
        elif self.path.startswith("/v1/messages"):
            # claude also asks small questions of its own (a title, say), without tools: they are not in the script.
            self.act(self.model.next_step(body) if body.get("tools") else Say("ok"), messages_events)
        else:
            self.answer_json(404, {"error": {"message": f"no {self.path} here"}})

    def act(self, step: Step, events: Any) -> None:
        if isinstance(step, Hang):
            self.model.closed.wait()
            self.close_connection = True
        elif isinstance(step, Refuse):
            self.answer_json(step.status, {"type": "error", "error": {"type": step.kind, "message": step.message}})
        else:
            text = "".join(
                f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
                for event in events(step, next(self.model.numbers))
            )
            self.answer(200, "text/event-stream", text.encode())

    def answer_json(self, status: int, body: dict[str, Any]) -> None:
        self.answer(status, "application/json", json.dumps(body).encode())

    def answer(self, status: int, kind: str, data: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


def responses_events(step: Say | UseTool, number: int) -> list[dict[str, Any]]:
    item: dict[str, Any]
    if isinstance(step, Say):
        content = [{"type": "output_text", "text": step.text, "annotations": []}]
        item = {"type": "message", "role": "assistant", "id": f"msg_{number}", "content": content}
    else:
        item = {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": step.name,
            "arguments": json.dumps(step.arguments),
        }
    usage = {
        "input_tokens": INPUT,
        "input_tokens_details": {"cached_tokens": CACHED},
        "output_tokens": OUTPUT,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": INPUT + OUTPUT,
    }
    answer = {"id": f"resp_{number}"}
    return [
        {"type": "response.created", "response": answer},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {**answer, "usage": usage}},
    ]


def messages_events(step: Say | UseTool, number: int) -> list[dict[str, Any]]:
    block: dict[str, Any]
    if isinstance(step, Say):
        block, delta, reason = {"type": "text", "text": ""}, {"type": "text_delta", "text": step.text}, "end_turn"
    else:
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": step.name, "input": {}}
        delta, reason = {"type": "input_json_delta", "partial_json": json.dumps(step.arguments)}, "tool_use"
    usage = {"input_tokens": INPUT - CACHED, "cache_read_input_tokens": CACHED, "cache_creation_input_tokens": 0}
    message = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 1},
    }
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {**usage, "output_tokens": OUTPUT},
        },
        {"type": "message_stop"},
    ]
