"""The server of the live page: routes, threads, and how it starts and ends.

All reading of the ledger happens in one thread, which owns its connection; files are read in a few others. An answer is
made completely before it is sent, so no transaction is open while a slow client reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import getpass
import os
import socket
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from looplab import __version__
from looplab.errors import LabError
from looplab.ledger.view import MAX_RUN_DIGITS
from looplab.report.overview import WINDOW_S
from looplab.ui import pages
from looplab.ui.curves import MAX_METRICS, MAX_POINTS, MAX_RUNS, CurveCache, CurveRequest, draw
from looplab.ui.files import ShownFile, read_file, read_log
from looplab.ui.model import PORTION_S, LabModel
from looplab.ui.security import AccessRules, Gate
from looplab.ui.steering import ACTIONS, Actor, Steering, edits_of, text_of
from looplab.untrusted import UntrustedError, dump_json, load_json, mend_text

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
MAX_BODY = 100_000
"""Bytes of a request."""
COMMAND_S = 120.0
"""Seconds that the model of the search may take."""
IDLE_S = 10.0
"""Seconds after which a connection that asks for nothing is closed; open connections are limited."""
GZIP_FROM = 1500
MEDIA = {
    "css": "text/css; charset=utf-8", "html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "json": "application/json", "svg": "image/svg+xml",
}  # fmt: skip
CACHE = "no-cache"
"""Assets may be cached but must be revalidated, so an upgrade of looplab takes effect at once."""
CONFINED = {"content-security-policy": "default-src 'none'; sandbox", "content-disposition": "inline"}
"""Headers of files that runs have written."""


@dataclass(frozen=True, slots=True)
class PageHooks:
    """What the page needs from rooms that it does not import."""

    pipelines: pages.Pipelines
    """Returns the run folders of pipelines, and the suites."""
    steering: Steering | None = None
    """Changes studies; None: the page is read-only."""
    slices: Callable[[str], Sequence[str]] | None = None
    """Returns the command that prints what the model of a study's search believes, as JSON; None: there is none."""


class PageServer:
    """The application: one lab, read by any number of pages.

    Args:
        model: The lab; used in the thread of the ledger alone.
        rules: Who may ask for what.
        hooks: See `PageHooks`.
    """

    def __init__(self, model: LabModel, rules: AccessRules, hooks: PageHooks) -> None:
        self._model = model
        self._rules = rules
        self._hooks = hooks
        self._curves = CurveCache()
        self._ledger_thread = ThreadPoolExecutor(1, "ledger")
        self._curve_thread = ThreadPoolExecutor(1, "curves")
        self._file_threads = ThreadPoolExecutor(3, "files")
        self._filling = False
        self._believing = asyncio.Lock()
        self._slices_made: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._now: dict[tuple[str, int, float], tuple[float, dict[str, Any]]] = {}
        self.app = Starlette(
            routes=[
                Route("/", self._asset("looplab.ui", "web", "index.html")),
                Route("/web/{name:path}", self._asset("looplab.ui", "web")),
                Route("/assets/{name:path}", self._asset("looplab.report", "assets")),
                *(Route(f"/api/{name}", self._api(make)) for name, make in self._reading().items()),
                Route("/api/log", self._guarded(self._log)),
                Route("/api/curves", self._guarded(self._curve_page)),
                Route("/api/file", self._guarded(self._file)),
                Route("/api/artifact", self._guarded(self._artifact)),
                Route("/api/slices", self._guarded(self._slices)),
                Route("/api/form", self._guarded(self._form)),
                Route("/api/check", self._guarded(self._check)),
                Route("/api/control", self._guarded(self._control), methods=["POST"]),
            ],
            middleware=[Middleware(GZipMiddleware, minimum_size=GZIP_FROM, compresslevel=1)],
            lifespan=self._lifespan,
        )
        self.asgi = Gate(self.app, rules)

    # -- threads

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.running():
            yield

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close the ledger and end the threads after the block."""
        yield
        await self._in_ledger(self._model.close)
        for pool in (self._ledger_thread, self._curve_thread, self._file_threads):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_ledger(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        return await self._in(self._ledger_thread, function, *args, **keywords)

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(function, *args, **keywords))

    def _fill(self) -> None:
        """Read configs and summaries in portions, each after the requests that arrived in the meantime."""
        if self._model.fill(time.monotonic() + PORTION_S):
            with contextlib.suppress(RuntimeError):  # the server ends
                self._ledger_thread.submit(self._fill)
        else:
            self._filling = False

    def _start_filling(self) -> None:
        if not self._filling:
            self._filling = True
            self._ledger_thread.submit(self._fill)

    # -- answers

    def _reading(self) -> dict[str, Callable[[Mapping[str, str]], Any]]:
        """Return the answers of the API that only read the ledger, by name; each runs in the ledger's thread."""
        model = self._model
        return {
            "lab": self._lab,
            "changes": self._changes,
            "now": self._overview,
            "run": lambda query: pages.run_page(model, query["study"], query["run"]),
            "compare": lambda query: pages.compare_page(model, query["study"], query["runs"].split(",")),
            "importance": lambda query: pages.importance_page(model, query["study"]),
            "judge": lambda query: pages.judge_page(model, query["study"]),
            "agents": lambda query: pages.agents_page(model, query["study"]),
            "transcript": lambda query: pages.transcript(model, query["study"], query["call"]),
            "versions": lambda _: self._refreshed(lambda: pages.versions_page(model)),
            "pipelines": lambda _: self._refreshed(lambda: pages.pipelines_page(model, self._hooks.pipelines)),
            "record": lambda query: pages.record_page(
                model, after=_whole(query, "after"), study=query.get("study"), kind=query.get("kind"),
                before=_whole(query, "before") or None, limit=_whole(query, "limit", 200),
            ),
        }  # fmt: skip

    def _refreshed(self, make: Callable[[], T]) -> T:
        self._model.refresh()
        return make()

    def _lab(self, _: Mapping[str, str]) -> dict[str, Any]:
        self._model.refresh()
        studies = []
        for name in self._model.studies():
            config = self._model.study(name).config
            view = self._model.view(name)
            objective = config.objective
            best = view.best() if view is not None else None
            studies.append(
                {"name": name, "metric": objective.metric if objective else None,
                 "at": objective.at if objective else "", "goal": objective.goal if objective else "min",
                 "judge": config.judge_rule if config.judge else None,
                 "best": best.objective if best else None, "best_run": best.id if best else None,
                 "engine": self._model.engine(name), "counts": view.counts() if view is not None else {},
                 "holdout": config.holdout is not None}
            )  # fmt: skip
        return {
            "lab": self._model.lab.folder.name,
            "folder": str(self._model.lab.folder),
            "version": __version__,
            "host": socket.gethostname(),
            "at": time.time(),
            "studies": studies,
            "control": self._rules.control_token if self._rules.control else None,
            "problem": self._model.problem,
        }

    def _changes(self, query: Mapping[str, str]) -> bytes:
        state, lists = self._model.changes(query["study"], _whole(query, "after"), query.get("epoch", ""))
        if not state["complete"]:
            self._start_filling()
        made = [f',"{name}":'.encode() + values for name, values in lists.items()]
        return b"".join([dump_json(state).encode()[:-1], *made, b"}"])

    def _overview(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the page "Now"; it is made once a second, however many pages ask."""
        window = min(7 * 86400.0, max(60.0, float(query.get("window", WINDOW_S))))
        key = (query["study"], _whole(query, "since"), window)
        made = self._now.get(key)
        if made is None or time.monotonic() - made[0] > 1.0:
            facts = pages.now_page(self._model, key[0], since=key[1], window=window)
            self._now = {one: what for one, what in self._now.items() if time.monotonic() - what[0] < 5.0}
            made = self._now[key] = (time.monotonic(), facts)
        return made[1]

    def _steering(self) -> Steering:
        if self._hooks.steering is None:
            raise LabError("this page is read-only", hint="start it with `looplab ui --allow-control` to steer")
        return self._hooks.steering

    def _api(self, make: Callable[[Mapping[str, str]], Any]) -> Handler:
        async def answer(request: Request) -> Response:
            return _answer(await self._in_ledger(make, dict(request.query_params)))

        return self._guarded(answer)

    def _guarded(self, handler: Handler) -> Handler:
        """Return the handler with errors as JSON."""

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except KeyError as error:
                return _answer({"error": f"{error.args[0]} is missing"}, 400)
            except (LabError, UntrustedError) as error:
                hint = getattr(error, "hint", None)
                return _answer({"error": mend_text(str(error)), "hint": hint}, 400)
            except (ValueError, OverflowError):
                return _answer({"error": "a parameter is not valid"}, 400)
            except sqlite3.Error as error:
                return _answer({"error": f"the ledger cannot be read: {error}"}, 503)

        return guarded

    async def _run_of(self, request: Request) -> tuple[str, str, bool]:
        """Return the study, the id of the run, and whether it has ended."""
        query = request.query_params
        study, name = query["study"], query["run"]

        def find() -> tuple[str, str, bool]:
            view = self._model.view(study)
            if view is None:
                raise LabError("there are no runs yet")
            run = view.run(name)
            return study, run.id, run.state == "ended"

        return await self._in_ledger(find)

    async def _log(self, request: Request) -> Response:
        study, run, over = await self._run_of(request)
        model = self._model.study(study)
        text = request.query_params.get("from")
        begin = int(text) if text and len(text) <= MAX_RUN_DIGITS else None
        made = await self._in(
            self._file_threads, read_log, model.outputs / run, begin, is_over=over, hidden=model.hidden
        )
        return _answer({**made, "over": over})

    async def _curve_page(self, request: Request) -> Response:
        query = dict(request.query_params)
        study = query["study"]
        names = query["runs"].split(",")[:MAX_RUNS]

        def find() -> tuple[Any, CurveRequest]:
            view = self._model.view(study)
            model = self._model.study(study)
            rows = [view.run(name) for name in names] if view is not None else []
            return model, CurveRequest(
                runs=[(row.id, model.lead_of(row.id), row.state == "ended") for row in rows],
                metrics=_names(query.get("metrics", "[]"))[:MAX_METRICS],
                points=min(MAX_POINTS, _whole(query, "points", 400)),
                low=float(query["low"]) if "low" in query else None,
                high=float(query["high"]) if "high" in query else None,
                log=query.get("log") == "1",
                by_config=query.get("seeds") != "1",
            )

        model, wanted = await self._in_ledger(find)
        return _answer(await self._in(self._curve_thread, draw, self._curves, model.config, model.outputs, wanted))

    async def _file(self, request: Request) -> Response:
        study, run, _ = await self._run_of(request)
        model = self._model.study(study)
        name = request.query_params["name"]
        return _shown(await self._in(self._file_threads, read_file, model.outputs / run, name, model.hidden))

    async def _artifact(self, request: Request) -> Response:
        query = request.query_params
        return _shown(await self._in_ledger(pages.artifact, self._model, query["folder"], query["name"]))

    async def _slices(self, request: Request) -> Response:
        """Return what the model believes along each knob: made by one process at a time, and kept until a run ends, is
        measured again or is declared void, or the lab file changes."""
        study = request.query_params["study"]
        if self._hooks.slices is None:
            raise LabError("this page cannot ask the model")

        def known() -> tuple[int, tuple[Any, ...]]:
            view = self._model.view(study)
            if view is None:
                return 0, ()
            ended = sum(one.runs for one in view.totals() if one.state == "ended")
            return ended, (self._model.epoch, ended, view.last_event("remeasured"), *view.void_runs())

        ended, state = await self._in_ledger(known)
        async with self._believing:
            made = self._slices_made.get(study)
            if made is None or made[0] != state:
                text = await run_bounded(self._hooks.slices(study))
                made = self._slices_made[study] = state, load_json(text)
        found = made[1]
        if "error" in found:
            raise LabError(found["error"])
        return _answer({**found, "ended": ended})

    async def _form(self, request: Request) -> Response:
        return _answer(await self._in(self._file_threads, self._steering().form, request.query_params["study"]))

    async def _check(self, request: Request) -> Response:
        query = request.query_params
        edits = edits_of({"edits": _json(query["edits"])})
        parent = query.get("parent", "best")
        return _answer(await self._in(self._file_threads, self._steering().check, query["study"], edits, parent))

    async def _control(self, request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise LabError("the request is too large")
        arguments = _json(body.decode("utf-8", "replace"))
        if not isinstance(arguments, dict):
            raise LabError("the request is not a JSON object")
        action, study = text_of(arguments, "action", needed=True), text_of(arguments, "study", needed=True)
        if action not in ACTIONS:
            raise LabError(f"there is no action {action!r}", hint=f"there are {', '.join(ACTIONS)}")
        client = request.client.host if request.client else "unknown"
        actor = Actor(_user(), f"page, {client}")
        return _answer(await self._in(self._file_threads, self._steering().act, study, action, arguments, actor))

    # -- assets

    def _asset(self, package: str, place: str, name: str | None = None) -> Handler:
        async def answer(request: Request) -> Response:
            return _file_answer(package, place, name or request.path_params["name"], request)

        return answer


def _file_answer(package: str, place: str, name: str, request: Request) -> Response:
    found = _assets(package, place).get(name)
    if found is None:
        return _answer({"error": "there is no such file"}, 404)
    content, digest = found
    headers = {"etag": digest, "cache-control": CACHE}
    if request.headers.get("if-none-match") == digest:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA[name.rpartition(".")[2]], headers=headers)


@functools.cache
def _assets(package: str, place: str) -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by name, with the hash of each; only these are served."""
    import hashlib

    found: dict[str, tuple[bytes, str]] = {}
    stack = [("", files(package) / place)]
    while stack:
        prefix, folder = stack.pop()
        for one in folder.iterdir():
            if one.is_dir():
                stack.append((f"{prefix}{one.name}/", one))
            elif one.name.rpartition(".")[2] in MEDIA:
                content = one.read_bytes()
                found[prefix + one.name] = (content, f'"{hashlib.sha256(content).hexdigest()[:24]}"')
    return found


def _answer(data: Any, status: int = 200) -> Response:
    """Return data as JSON; bytes are JSON already."""
    content = data if isinstance(data, bytes) else dump_json(data)
    return Response(content, status, media_type="application/json")


def _shown(file: ShownFile) -> Response:
    return Response(file.content, media_type=file.media, headers=CONFINED)


def _whole(query: Mapping[str, str], name: str, default: int = 0) -> int:
    text = query.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= MAX_RUN_DIGITS else default


def _json(text: str) -> Any:
    if len(text) > MAX_BODY:
        raise LabError("the request is too large")
    return load_json(text)


def _names(text: str) -> list[str]:
    """Return the texts in a JSON list."""
    found = _json(text)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return "unknown"


async def run_bounded(argv: Sequence[str]) -> str:
    """Return what a command prints; it has few seconds, one thread and little priority.

    Raises:
        LabError: It failed, or was not done in time.
    """
    quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **quiet},
        start_new_session=True, preexec_fn=functools.partial(os.nice, 5),
    )  # fmt: skip
    try:
        async with asyncio.timeout(COMMAND_S):
            printed, _ = await process.communicate()
    except TimeoutError:
        raise LabError(f"the model was not ready after {COMMAND_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise LabError("the model failed", hint="`looplab doctor` checks the packages that it needs")
    return printed.decode("utf-8", "replace")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0: any free one.

    Raises:
        LabError: The address is taken or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        hint = "`--port 0` takes any free port" if port else None
        raise LabError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from None
    return listening


def _limit_malloc() -> None:
    """Give freed memory back to the system: glibc would keep an arena for each thread, and large answers in them."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        library = ctypes.CDLL(None)
        for option, value in ((-8, 1), (-3, 1 << 17), (-1, 1 << 17)):  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            library.mallopt(option, value)


class ImpatientProtocol(H11Protocol):
    """Closes connections that have not completed a request for some time; uvicorn waits for it forever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._close_if_idle, None)

    def _close_if_idle(self, before: object) -> None:
        """Close the connection if it was idle after the same request the last time, too."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is before:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(IDLE_S, self._close_if_idle, self.cycle if is_idle else self)


def serve(server: PageServer, listening: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    _limit_malloc()
    config = uvicorn.Config(
        server.asgi, loop="asyncio", http=ImpatientProtocol, ws="none", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=2, limit_concurrency=500, lifespan="on",
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        uvicorn.Server(config).run(sockets=[listening])
