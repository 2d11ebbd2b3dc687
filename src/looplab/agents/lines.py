"""Lines of an agent's stream: split from chunks of bytes, decoded, with secrets redacted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from looplab.runs.redact import SHORTEST, hide_known, known_secrets, redact_text

LONGEST_LINE = 4 << 20
"""Bytes of a printed line that are kept; an answer is at most a quarter of this."""
LONGEST_RECORD = 64 << 20
"""Bytes of a line that are read from a log."""
PLAIN = {"URL", "HOST", "HOME", "DIR", "PATH", "FILE", "MODEL", "REGION", "PROJECT", "VERTEX", "BEDROCK"}
"""Variables whose names end in one of these are not secret; their values are shown in the log."""


class Lines:
    """Splits a stream into lines. An incomplete line is held until its rest arrives; an overlong one is cut."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._parts: list[bytes] = []
        self._held = 0
        self._dropping = False

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that a chunk completes."""
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
        """Yield the last line, which has no newline."""
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
    """Return the JSON object of a line; None for anything else, such as warnings and incomplete lines."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def named_secrets(env: Mapping[str, str], named: Iterable[str]) -> set[str]:
    """Return the secret values among the variables that are passed to an agent by name."""
    hidden = [name for name in named if name.upper().rpartition("_")[2] not in PLAIN]
    return {env[name] for name in hidden if len(env.get(name, "")) >= SHORTEST}


class Scrubber:
    """Redacts secrets: secret values of the environment and of named variables, and strings that look like secrets."""

    def __init__(self, env: Mapping[str, str], named: Iterable[str] = ()) -> None:
        values = {value.decode("utf-8", "replace") for value in known_secrets(env)}
        values |= named_secrets(env, named)
        self._secrets = sorted(values, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        text = hide_known(text, self._secrets)
        # A lone surrogate cannot be encoded.
        return redact_text(text).encode("utf-8", "replace").decode()

    def value(self, value: Any) -> Any:
        """Return a JSON value with every text redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(each) for key, each in value.items()}
        return value

    def line(self, line: str) -> tuple[str, dict[str, Any] | None]:
        """Return a line without secrets, and its JSON object. Only its texts are redacted, so it stays valid JSON."""
        record = decode(line)
        if record is not None:
            try:
                clean = self.value(record)
                return (line if clean == record else json.dumps(clean, ensure_ascii=False)), clean
            except RecursionError:
                pass
        return self.text(line), None
