"""Interface for changes to a study: the page requests them; the command line, which imports the engine, makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from looplab.errors import LabError

ACTIONS = ("pause", "resume", "drain", "stop", "stop run", "propose", "say", "veto", "objective")
MAX_EDITS = 100
MAX_WORDS = 20_000
"""Characters of a text from the page."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asked for something, and from where."""

    who: str
    where: str


class Steering(Protocol):
    """Changes a study on behalf of a person."""

    def act(self, study: str, action: str, arguments: Mapping[str, Any], actor: Actor) -> dict[str, Any]:
        """Do one of `ACTIONS` and record who asked for it; return what was done under `did`, in words.

        Raises:
            LabError: It cannot be done.
        """
        ...

    def check(self, study: str, edits: Sequence[str], parent: str) -> dict[str, Any]:
        """Return under `refused` why the guard would reject a proposal now (None: it would not), under `warning` what
        else it says, and under `changes` the differences from the parent's config. Nothing is recorded."""
        ...

    def form(self, study: str) -> dict[str, Any]:
        """Return the knobs for a form: `key`, `type`, `low`, `high`, `choices`, and the value in the parent."""
        ...


def text_of(arguments: Mapping[str, Any], key: str, *, needed: bool = False) -> str:
    """Return a text that the page sent.

    Raises:
        LabError: It is not a text, too long, or missing although it is needed.
    """
    value = arguments.get(key, "")
    if not isinstance(value, str) or len(value) > MAX_WORDS:
        raise LabError(f"{key} must be a text of at most {MAX_WORDS:,} characters")
    if needed and not value.strip():
        raise LabError(f"{key} is missing")
    return value.strip()


def edits_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return the edits that the page sent.

    Raises:
        LabError: They are not a list of texts, or too many.
    """
    edits = arguments.get("edits")
    if not isinstance(edits, list) or not edits or not all(isinstance(edit, str) for edit in edits):
        raise LabError("edits must be a list of texts such as train.lr@set=0.1")
    if len(edits) > MAX_EDITS or sum(map(len, edits)) > MAX_WORDS:
        raise LabError("there are too many edits")
    return edits
