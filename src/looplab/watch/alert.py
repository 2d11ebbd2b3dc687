"""External alerts: a command that receives the alarm as JSON on stdin, a webhook that receives it, or a plug-in.

Alerts are sent in the background; they never block the engine or raise into it. Failures go to a callback. A webhook's
address may contain a secret, so messages name only its host.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from looplab import plugins
from looplab.config.lab import AlertConfig
from looplab.runs.programs import ProgramError, run_program

TIMEOUT_S = 10.0
"""Seconds that a command or webhook may take."""


def send(
    alert: AlertConfig,
    payload: Mapping[str, Any],
    failed: Callable[[str], None],
    *,
    folder: Path | None = None,
    timeout: float = TIMEOUT_S,
) -> threading.Thread:
    """Send an alert in a thread; join the returned thread to wait for it.

    Args:
        alert: Where to send it.
        payload: JSON without NaN and infinity.
        failed: Called from the thread with a sentence if the alert could not be delivered.
        folder: Working directory of a command; None: the current one.
        timeout: Seconds that the command or webhook may take.
    """
    text = json.dumps(payload, allow_nan=False)

    def deliver() -> None:
        if alert.plugin is not None:
            problem = _call_plugin(alert, payload)
        elif alert.command is not None:
            problem = _run_command(alert.command, text, folder, timeout)
        else:
            assert alert.webhook is not None
            problem = _post_webhook(alert.webhook, text, timeout)
        if problem is not None:
            failed(problem)

    thread = threading.Thread(target=deliver, name="alert", daemon=True)
    thread.start()
    return thread


class AlertPlugin(Protocol):
    """Sends alarms somewhere (entry point group `looplab.alerts`); usually a class, made with its options."""

    def send(self, alarm: Mapping[str, Any]) -> None:
        """Send an alarm in a separate thread; raise if that fails.

        Args:
            alarm: `study`, `rule`, `text` and, if it concerns a run, `run`, `step`, `values`, `stops`, `requeue`,
                `note`.
        """
        ...


def _call_plugin(alert: AlertConfig, payload: Mapping[str, Any]) -> str | None:
    assert alert.plugin is not None
    try:
        sender: AlertPlugin = plugins.make("alerts", alert.plugin, **alert.options)
        sender.send(payload)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever another package raises must not end the engine)
        # The message may contain an address with a secret: name only the type, as for webhooks.
        return f"the alert {alert.plugin} failed: {type(error).__name__}"
    return None


def _run_command(command: Sequence[str], text: str, folder: Path | None, timeout: float) -> str | None:
    try:
        run_program(command, text.encode(), timeout=timeout, cwd=folder)
    except ProgramError as error:
        return f"the alert command {command[0]} {error}"
    return None


def _post_webhook(address: str, text: str, timeout: float) -> str | None:
    webhook = "the webhook"
    try:
        webhook += f" at {urlsplit(address).hostname}"
        request = urllib.request.Request(  # noqa: S310 - the lab file's schema allows only http and https
            address, text.encode(), {"Content-Type": "application/json", "User-Agent": "looplab"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout):  # noqa: S310
            return None
    except HTTPError as error:
        error.close()
        return f"{webhook} answered {error.code} {error.reason}"
    except URLError as error:
        return f"{webhook} cannot be reached: {error.reason}"
    except TimeoutError:
        return f"{webhook} did not answer in {timeout:g} s"
    except (OSError, HTTPException, ValueError) as error:
        # The message of such an error may contain the address: name only its type.
        return f"{webhook} failed: {type(error).__name__}"
