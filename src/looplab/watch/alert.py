"""Telling somebody outside: a command that gets the alarm as JSON on stdin, or a webhook that gets it as a POST.

An alert is sent in the background and never holds up the engine or raises into it; what goes wrong is handed to a
function. A webhook's address may hold a secret, so only its host is ever named.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from looplab.config.lab import AlertConfig
from looplab.runs.programs import ProgramError, run_program

TIMEOUT_S = 10.0


def send(
    alert: AlertConfig,
    payload: Mapping[str, Any],
    failed: Callable[[str], None],
    *,
    folder: Path | None = None,
    timeout: float = TIMEOUT_S,
) -> threading.Thread:
    """Send an alert; a command runs in `folder`. `failed` gets a sentence if it did not arrive, and is called from the
    thread that is returned: join it to wait for the alert."""
    text = json.dumps(payload, allow_nan=False)

    def work() -> None:
        if alert.command is not None:
            problem = _run(alert.command, text, folder, timeout)
        else:
            assert alert.webhook is not None
            problem = _post(alert.webhook, text, timeout)
        if problem is not None:
            failed(problem)

    thread = threading.Thread(target=work, name="alert", daemon=True)
    thread.start()
    return thread


def _run(command: Sequence[str], text: str, folder: Path | None, timeout: float) -> str | None:
    try:
        run_program(command, text.encode(), timeout=timeout, cwd=folder)
    except ProgramError as error:
        return f"the alert command {command[0]} {error}"
    return None


def _post(address: str, text: str, timeout: float) -> str | None:
    what = "the webhook"
    try:
        what += f" at {urlsplit(address).hostname}"
        request = urllib.request.Request(  # noqa: S310 - the lab file's schema takes http and https alone
            address, text.encode(), {"Content-Type": "application/json", "User-Agent": "looplab"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout):  # noqa: S310
            return None
    except HTTPError as error:
        error.close()
        return f"{what} answered {error.code} {error.reason}"
    except URLError as error:
        return f"{what} cannot be reached: {error.reason}"
    except TimeoutError:
        return f"{what} did not answer in {timeout:g} s"
    except (OSError, HTTPException, ValueError) as error:
        # Such an error may repeat the address in its words; its kind says enough.
        return f"{what} failed: {type(error).__name__}"
