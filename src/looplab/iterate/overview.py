"""Summary of all versions, for `iterate status` and the tour."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.iterate.gates import Measured
from looplab.iterate.record import Attempt, VersionHistory
from looplab.iterate.verdict import interval


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """State and results of one version."""

    version: int
    state: str
    """baseline | begun | prepared | agent running | answered | checked | judged | merged | failed | void"""
    attempts: int
    asks: int
    """Calls of the agent over all attempts, including interrupted ones."""
    gates: dict[str, str]
    """Gates of the last check: ok, warning or failed."""
    reasons: tuple[str, ...]
    """Findings of the gates that are not ok."""
    value: float | None
    low: float | None
    high: float | None
    """Metric of the frozen evaluation with its 95 % interval; None if not measured."""
    ruling: dict[str, Any]
    """Verdict with its evidence; empty if there is none."""
    branch: str
    commit: str
    champion: bool
    why: str


def overview(history: VersionHistory) -> list[VersionFacts]:
    """Return every version that was measured or attempted, in order."""
    found = []
    for version in sorted({*history.attempts, *history.baselines}):
        tries = history.attempts.get(version, [])
        champion = version == history.champion
        if tries:
            found.append(_attempted(version, tries, champion))
        else:
            measured = history.baselines[version]
            low, high = _interval(measured)
            found.append(
                VersionFacts(
                    version=version, state="baseline", attempts=0, asks=0, gates={}, reasons=(), value=measured.value,
                    low=low, high=high, ruling={}, branch="", commit="", champion=champion, why="it existed before",
                )
            )  # fmt: skip
    return found


def _attempted(version: int, tries: list[Attempt], champion: bool) -> VersionFacts:
    last = tries[-1]
    gates: dict[str, str] = {}
    findings = last.findings.get(last.ask, [])
    for finding in findings:
        word = "failed" if finding.stops else "ok" if finding.ok else "warning"
        before = gates.get(finding.what, "ok")
        gates[finding.what] = max(before, word, key=("ok", "warning", "failed").index)
    measured = last.measured if last.measured_ask == last.ask else None
    low, high = _interval(measured)
    return VersionFacts(
        version=version, state=last.state, attempts=len(tries), asks=sum(len(attempt.calls) for attempt in tries),
        gates=gates, reasons=tuple(f"{finding.what}: {finding.why}" for finding in findings if not finding.ok),
        value=measured.value if measured else None, low=low, high=high, ruling=last.ruling or {}, branch=last.branch,
        commit=last.commit, champion=champion, why=last.why,
    )  # fmt: skip


def _interval(measured: Measured | None) -> tuple[float | None, float | None]:
    bounds = interval(measured) if measured else None
    return bounds if bounds and all(map(math.isfinite, bounds)) else (None, None)


def gates_in_words(facts: VersionFacts) -> str:
    """Return `5 ok, 1 warning`, or the gates that failed."""
    failed = [name for name, word in facts.gates.items() if word == "failed"]
    if failed:
        return "failed: " + ", ".join(failed)
    counts = Counter(facts.gates.values())
    return ", ".join(f"{counts[word]} {word}" for word in ("ok", "warning") if counts[word]) or "-"


def verdict_of(facts: VersionFacts) -> str:
    """Return keep, discard, inconclusive, void or crash; `-` if there is no verdict yet."""
    if facts.state in ("void", "failed"):
        return "void" if facts.state == "void" else "crash"
    return str(facts.ruling.get("verdict", "-"))


def text_of(path: Path, limit: int) -> str:
    """Return the first `limit` bytes of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
