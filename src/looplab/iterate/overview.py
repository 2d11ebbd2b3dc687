"""All versions at a glance: what became of each, for `iterate status` and for the tour."""

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
    """One version."""

    version: int
    state: str
    """baseline | begun | prepared | agent at work | answered | checked | judged | merged | failed | void"""
    attempts: int
    asks: int
    """How often the agent was asked, over all attempts; interrupted calls count."""
    gates: dict[str, str]
    """Each gate of the last check: ok, warning or failed."""
    reasons: tuple[str, ...]
    """What the gates had to say against it."""
    value: float | None
    low: float | None
    high: float | None
    """The metric of the frozen evaluation, and its 95 % interval."""
    ruling: dict[str, Any]
    """The verdict with its evidence; empty if there is none."""
    branch: str
    commit: str
    champion: bool
    why: str


def overview(story: VersionHistory) -> list[VersionFacts]:
    """Every version that was measured or attempted, in its order."""
    found = []
    for version in sorted({*story.attempts, *story.baselines}):
        tries = story.attempts.get(version, [])
        champion = version == story.champion
        if tries:
            found.append(_attempted(version, tries, champion))
        else:
            measured = story.baselines[version]
            low, high = _interval(measured)
            found.append(VersionFacts(version, "baseline", 0, 0, {}, (), measured.value, low, high, {}, "", "",
                                      champion, "it was there before"))  # fmt: skip
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
        version, last.state, len(tries), sum(len(attempt.calls) for attempt in tries), gates,
        tuple(f"{finding.what}: {finding.why}" for finding in findings if not finding.ok),
        measured.value if measured else None, low, high, last.ruling or {}, last.branch, last.commit, champion,
        last.why,
    )  # fmt: skip


def _interval(measured: Measured | None) -> tuple[float | None, float | None]:
    reach = interval(measured) if measured else None
    return reach if reach and all(map(math.isfinite, reach)) else (None, None)


def gates_in_words(facts: VersionFacts) -> str:
    """`5 ok, 1 warning`, or which failed."""
    failed = [name for name, word in facts.gates.items() if word == "failed"]
    if failed:
        return "failed: " + ", ".join(failed)
    counts = Counter(facts.gates.values())
    return ", ".join(f"{counts[word]} {word}" for word in ("ok", "warning") if counts[word]) or "-"


def verdict_of(facts: VersionFacts) -> str:
    """keep | discard | inconclusive | void | crash, or nothing yet."""
    if facts.state in ("void", "failed"):
        return "void" if facts.state == "void" else "crash"
    return str(facts.ruling.get("verdict", "-"))


def text_of(path: Path, limit: int) -> str:
    """The beginning of a text file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
