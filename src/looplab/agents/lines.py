"""The lines of an agent's stream: cut from the bytes as they come, decoded, and without secrets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from looplab.runs.redact import SHORTEST, hide_known, known_secrets, redact_text

LONGEST_LINE = 4 << 20
"""Bytes of a printed line that are kept; an answer has at most a quarter of this."""
LONGEST_RECORD = 64 << 20
"""Bytes of a line that is read back from a log."""
PLAIN = {"URL", "HOST", "HOME", "DIR", "PATH", "FILE", "MODEL", "REGION", "PROJECT", "VERTEX", "BEDROCK"}
"""A variable whose name ends in one of these holds no secret; its value is to be seen in the log."""


class Lines:
    """Cuts a stream into lines. A half line waits for its rest; one without end is cut, and its rest dropped."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._parts: list[bytes] = []
        self._held = 0
        self._dropping = False

    def feed(self, data: bytes) -> Iterator[str]:
        *ended, rest = data.split(b"\n")
        for part in ended:
            if self._parts or self._dropping or len(part) > self._longest:
                self._hold(part)
                yield from self.finish()
                self._dropping = False
            elif text := part.decode("utf-8", "replace").removesuffix("\r"):  # most lines
                yield text
        self._hold(rest)

    def finish(self) -> Iterator[str]:
        """The last line, which has no end of its own."""
        if self._parts:
            line = b"".join(self._parts)
            self._parts.clear()
            self._held = 0
            text = line.decode("utf-8", "replace").removesuffix("\r")
            if text:
                yield text

    def _hold(self, part: bytes) -> None:
        room = self._longest - self._held
        if part and not self._dropping:
            self._parts.append(part[:room])
            self._held += len(part[:room])
            self._dropping = len(part) > room


def decode(line: str) -> dict[str, Any] | None:
    """The object of a line; None for anything else. Programs also print what is none: warnings, half lines."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def named_secrets(env: Mapping[str, str], named: Iterable[str]) -> set[str]:
    """The values of these variables that are secrets, since they are passed to an agent by name."""
    hidden = [name for name in named if name.upper().rpartition("_")[2] not in PLAIN]
    return {env[name] for name in hidden if len(env.get(name, "")) >= SHORTEST}


class Scrubber:
    """Takes secrets out: the values of this environment that are ones, those named, and all that looks like one."""

    def __init__(self, env: Mapping[str, str], named: Iterable[str] = ()) -> None:
        values = {value.decode("utf-8", "replace") for value in known_secrets(env)}
        values |= named_secrets(env, named)
        self._secrets = sorted(values, key=len, reverse=True)

    def text(self, text: str) -> str:
        text = hide_known(text, self._secrets)
        # A torn emoji is a character that cannot be written.
        return redact_text(text).encode("utf-8", "replace").decode()

    def value(self, value: Any) -> Any:
        """The same with every text cleaned, on any depth."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(each) for key, each in value.items()}
        return value

    def line(self, line: str) -> tuple[str, dict[str, Any] | None]:
        """A line without secrets, and its object. It is cleaned inside its texts, so that it stays what it was."""
        record = decode(line)
        if record is not None:
            try:
                clean = self.value(record)
                return (line if clean == record else json.dumps(clean, ensure_ascii=False)), clean
            except RecursionError:
                pass
        return self.text(line), None
