"""Access rules of the page's server.

Every request needs an allowed Host (against DNS rebinding) and the token (other users of the machine reach loopback
too). Every method but GET and HEAD also needs the origin of the page itself, JSON, and a second token that only scripts
of the page can read. Refused requests are answered before their body is read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEADER = "x-looplab-token"
CONTROL = "x-looplab-control"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")
_PORT = re.compile(r"(?::\d{1,5})?")
_LANGUAGE = re.compile(r"[a-z]{2}")
OPENED = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=./{rest}">'
    '<link rel="icon" href="data:,"><title>looplab</title>'
)
LOCKED = """<!doctype html><html lang="en"><meta charset="utf-8"><link rel="icon" href="data:,"><title>looplab</title>
<h1>This page needs its token</h1>
<p>Open the address that <code>looplab ui</code> printed; it ends in <code>?token=…</code>.</p></html>"""


def host_of(value: str | None) -> str | None:
    """Return the name in a Host header or an authority, in lower case and without its port; None: it is not one."""
    found = _HOST.match(value or "")
    if value is None or found is None or not _PORT.fullmatch(value, found.end()):
        return None
    return found[0].strip("[]").lower().rstrip(".")


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The rules of one server."""

    token: str
    hosts: frozenset[str]
    """Names under which it may be reached, in lower case, without ports."""
    cookie: str
    """Name of the cookie: servers on other ports of the same machine have others."""
    control: bool = False
    """Whether anything may be changed."""

    @classmethod
    def make(cls, token: str, port: int, *, host: str, names: Iterable[str] = (), control: bool = False) -> AccessRules:
        """Return the rules of a server.

        Args:
            host: The address that it listens on.
            names: Further names under which it may be reached.
        """
        own = [] if host in ("0.0.0.0", "::", "") else [host]  # noqa: S104 (compared)
        hosts = frozenset(name.lower().strip("[]") for name in (*LOOPBACK, *own, *names))
        return cls(token, hosts, f"looplab-{port}", control)

    @property
    def control_token(self) -> str:
        """What scripts of the page send with every change: a page of another origin cannot read it."""
        return hmac.new(self.token.encode(), b"control", hashlib.sha256).hexdigest()

    def has_token(self, headers: Headers) -> bool:
        """Return whether a request carries the token, in the header or the cookie."""
        given = headers.get(HEADER) or cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return self.is_token(given)

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def refuse_change(self, headers: Headers) -> str | None:
        """Return why a request may not change anything; None: it may."""
        if not self.control:
            return "this page is read-only; start it with `looplab ui --allow-control` to steer"
        origin, host = headers.get("origin", ""), headers.get("host", "")
        if origin.partition("://")[2].lower() != host.lower():
            return "the request comes from another origin"
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return "the request comes from another site"
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return "the request is not JSON"
        if not hmac.compare_digest(headers.get(CONTROL, "").encode("utf-8", "replace"), self.control_token.encode()):
            return "the request does not come from the page"
        return None


class Gate:
    """ASGI middleware that applies the rules and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in present)]
            await send(message)

        refused = self._refuse(scope)
        await (refused or self._app)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers, rules = Headers(scope=scope), self._rules
        name = host_of(headers.get("host"))
        if name is None or name not in rules.hosts:
            shown = name or "this name"
            return PlainTextResponse(
                f"looplab ui does not answer to {shown}. If you trust it: looplab ui --allow-host {shown}\n", 421
            )
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if scope["method"] == "GET" and scope["path"].rstrip("/") == "" and "token" in query:
            if not rules.is_token(query["token"][0]):
                return HTMLResponse(LOCKED, 401)
            language = query.get("lang", [""])[0]
            answer = HTMLResponse(OPENED.format(rest=f"?lang={language}" if _LANGUAGE.fullmatch(language) else ""))
            # Without a path, the browser takes the page's own: also behind a proxy that serves it below a prefix.
            answer.set_cookie(rules.cookie, rules.token, httponly=True, samesite="strict", path=None)
            return answer
        if not rules.has_token(headers):
            return HTMLResponse(LOCKED, 401) if scope["path"] == "/" else JSONResponse({"error": "no token"}, 401)
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            return JSONResponse({"error": "the request comes from another site"}, 403)
        if scope["method"] not in ("GET", "HEAD"):
            why = rules.refuse_change(headers)
            if why is not None:
                return JSONResponse({"error": why}, 403)
        return None
