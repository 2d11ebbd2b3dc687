"""ui."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import find_study, open_record
from looplab.config.lab import LabConfig
from looplab.errors import LabError
from looplab.loop.lock import engine_pid
from looplab.pipeline.overview import pipelines_of
from looplab.ui.steering import Steering

TOKEN = "LOOPLAB_UI_TOKEN"  # noqa: S105 (the name of a variable)
LEAST_TOKEN = 16
MISSING = "the live page needs `pip install 'looplab[ui]'`"


def ui(
    folder: Path | None, *, host: str, port: int, token: str | None, token_file: Path | None, allow_host: Sequence[str],
    allow_control: bool, open_browser: bool, json: bool,
) -> None:  # fmt: skip
    """Serve the live page until Ctrl-C."""
    try:
        from looplab.ui.model import LabModel
        from looplab.ui.security import AccessRules, host_of, is_loopback
        from looplab.ui.server import PageHooks, PageServer, listen, serve
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    wrong = next((name for name in allow_host if host_of(name) is None), None)
    if wrong is not None:
        raise LabError(f"{wrong!r} is not a host name", hint="--allow-host hub.example.org")
    lab = open_record(folder)
    chosen = _token(token, token_file)
    listening = listen(host, port)
    bound = listening.getsockname()[1]
    rules = AccessRules.make(chosen, bound, host=host, names=allow_host, control=allow_control)
    hooks = PageHooks(
        pipelines_of,
        _steering(lab.folder) if allow_control else None,
        lambda study: (sys.executable, "-m", "looplab.cli.slices", str(lab.folder), study),
    )
    model = LabModel(lab, find_study=find_study, engine_pid=engine_pid)
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104 (compared)
    url = f"http://{shown}:{bound}/?token={chosen}"
    if json:
        output.print_line({"url": url, "port": bound, "pid": os.getpid(), "control": allow_control})
    else:
        output.say(f"{lab.folder.name}: {url}")
        output.say("Ctrl-C stops the page; runs and engines continue.")
    if not is_loopback(host):
        output.warn(f"the page listens on {host}, and its traffic is not encrypted: `ssh -L` is safer")
    if open_browser and os.environ.get("DISPLAY"):
        import webbrowser  # needed once, if at all

        webbrowser.open(url)
    serve(PageServer(model, rules, hooks), listening)


def snapshot(lab: LabConfig) -> str:
    """Return the live page as one file.

    Raises:
        LabError: Its packages are missing.
    """
    import asyncio

    try:
        from looplab.ui.export import collect, snapshot_page
        from looplab.ui.model import LabModel
        from looplab.ui.security import AccessRules
        from looplab.ui.server import PageHooks, PageServer
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    model = LabModel(lab, find_study=find_study, engine_pid=engine_pid)
    rules = AccessRules.make(secrets.token_urlsafe(24), 0, host="127.0.0.1")

    async def answers() -> dict[str, Any]:
        return await collect(PageServer(model, rules, PageHooks(pipelines_of)))

    return snapshot_page(f"{lab.folder.name} – looplab", asyncio.run(answers()))


def _missing(error: ModuleNotFoundError) -> Exception:
    return LabError(MISSING) if error.name in ("starlette", "uvicorn") else error


def _token(given: str | None, file: Path | None) -> str:
    """Return the token of the page: as given, from a file, from the environment, or a random one."""
    if file is not None:
        try:
            given = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise LabError(f"cannot be read: {error.strerror}", file=file) from None
    found = given or os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    if len(found) < LEAST_TOKEN or not all(sign.isalnum() or sign in "-_.~" for sign in found):
        raise LabError(
            f"a token needs at least {LEAST_TOKEN} letters, digits or -_.~", hint="leave it out for a random one"
        )
    return found


def _steering(lab: Path) -> Steering:
    from looplab.cli.page_control import (
        LabSteering,  # with the engine's rooms, which a page that only reads does without
    )

    return LabSteering(lab)
