"""Former name of `looplab.trainkit.atomic`; it works for one more release."""

from __future__ import annotations

from typing import Any

from looplab.trainkit.deprecated import renamed


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
