"""Connections of the page that ask for nothing are closed, so that they cannot use up the number of connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import uvicorn

from looplab.ui import server as page

REQUEST = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(4 * page.IDLE_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(page, "IDLE_S", 0.2)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=page.ImpatientProtocol, ws="none", log_config=None, lifespan="off", loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[:2]
    server.should_exit = True
    thread.join()
    listening.close()


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=60)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST[:-2] % b""])
def test_a_connection_without_a_whole_request_is_closed(address: tuple[str, int], sent: bytes) -> None:
    with connect(address) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""


def test_a_connection_that_stops_in_its_second_request_is_closed(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(REQUEST % b"" + b"GET /")
        answer = b""
        while chunk := connection.recv(1000):
            answer += chunk
        assert answer.endswith(b"ok")


def test_a_slow_answer_is_waited_for(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        for _ in range(2):
            connection.sendall(REQUEST % b"slow")
            answer = b""
            while not answer.endswith(b"ok"):
                answer += (chunk := connection.recv(1000))
                assert chunk, answer
