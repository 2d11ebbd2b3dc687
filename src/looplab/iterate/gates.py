"""Gates: what a version must have before it counts. Each is a small function that gives findings, with reasons that the
agent can act on. Nothing here believes what an agent says: files are looked at, and commands are run."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json, write_atomic
from looplab.iterate import trial
from looplab.iterate.settings import Evaluate, Schedule, Smoke
from looplab.untrusted import load_json, read_bounded, real_path

ALIASES = {
    "plan": ("计划", "启动"),
    "observations": ("observation", "观察"),
    "runs": ("运行", "run log"),
    "results": ("result", "结果", "指标"),
    "learning": ("learnings", "lessons", "学习", "经验", "总结", "教训"),
}
"""What else the headings of a document may be called."""
HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*")
TOLD_CHARS = 3000
MOST_BYTES = 64 << 20
"""Of a file that a version has written."""
CLOSE = 1e-6
"""Values of a schedule that differ by less than this part of them are the same."""


@dataclass(frozen=True, slots=True)
class GateFinding:
    """What one gate saw."""

    ok: bool
    what: str
    """The gate."""
    why: str
    warning: bool = False
    """Whether it is only to be told: the gate is passed."""

    @property
    def stops(self) -> bool:
        return not self.ok and not self.warning


# -- the document


def sections_of(text: str) -> list[tuple[str, str]]:
    """Every heading of a Markdown text with what stands below it, its subheadings included; not the title."""
    lines = text.splitlines()
    heads: list[tuple[int, int, str]] = []
    fence = ""
    for number, line in enumerate(lines):
        mark = line.strip()[:3]
        if mark in ("```", "~~~") and (not fence or mark == fence):
            fence = "" if fence else mark
        match = HEADING.fullmatch(line) if not fence else None
        if match:
            heads.append((number, len(match[1]), match[2]))
    if sum(level == 1 for _, level, _ in heads) == 1:
        heads = [head for head in heads if head[1] > 1] or heads
    found = []
    for place, (number, level, title) in enumerate(heads):
        end = next((n for n, other, _ in heads[place + 1 :] if other <= level), len(lines))
        found.append((title, "\n".join(lines[number + 1 : end]).strip()))
    return found


def section(text: str, name: str) -> str | None:
    """What stands in the section of this name, in English or Chinese; None if there is none."""
    words = (name.lower(), *ALIASES.get(name.lower(), ()))
    bodies = [body for title, body in sections_of(text) if any(word in title.lower() for word in words)]
    return max(bodies, key=_said, default=None)


def _said(body: str) -> int:
    """How much text there is, without headings, comments and marks."""
    plain = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    return sum(len(re.sub(r"[\W_]", "", line)) for line in plain.splitlines() if not HEADING.fullmatch(line))


def check_document(path: Path, sections: Sequence[str]) -> list[GateFinding]:
    try:
        text = read_bounded(path, MOST_BYTES).decode()
    except FileNotFoundError:
        return [GateFinding(False, "document", f"{path.name} is not there")]
    except (OSError, ValueError) as error:
        return [GateFinding(False, "document", f"{path.name} cannot be read: {error}")]
    found = []
    for name in sections:
        body = section(text, name)
        if body is None:
            found.append(GateFinding(False, "document", f"{path.name} has no section {name!r}"))
        elif not _said(body):
            found.append(GateFinding(False, "document", f"the section {name!r} of {path.name} is empty"))
    return found or [GateFinding(True, "document", f"{path.name} has {', '.join(sections)}")]


# -- the files


def check_files(version: Path) -> list[GateFinding]:
    """What git could not keep, or what leads elsewhere."""
    found = []
    for folder, folders, files in os.walk(version):
        for name in [*folders, *files]:
            path = Path(folder, name)
            where = path.relative_to(version)
            if name == ".git":
                found.append(GateFinding(False, "files", f"{where} makes a repository of its own: remove it"))
            elif path.is_symlink() and not real_path(path).is_relative_to(version.resolve()):
                found.append(
                    GateFinding(False, "files", f"{where} is a link that leads out of the version: copy the file")
                )
    return found or [GateFinding(True, "files", "nothing leads out of the version")]


def check_artifacts(version: Path, patterns: Sequence[str]) -> list[GateFinding]:
    found = []
    for pattern in patterns:
        files = [p for p in version.glob(pattern) if p.is_file() and p.name != ".gitkeep" and p.stat().st_size > 0]
        why = f"{pattern}: {len(files)} file(s)" if files else f"nothing but empty files matches {pattern}"
        found.append(GateFinding(bool(files), "artifacts", why))
    return found


# -- the training


def check_smoke(
    smoke: Smoke, places: Mapping[str, str | Path], cwd: Path, log: Path, writable: Sequence[Path] | None = None
) -> GateFinding:
    """The version trains for a moment, in a folder of its own; `writable`: where else it may write, None: anywhere."""
    with tempfile.TemporaryDirectory(prefix="looplab-smoke-", ignore_cleanup_errors=True) as scratch:
        argv = trial.fill(smoke.command, {**places, "scratch": scratch})
        allowed = None if writable is None else [Path(scratch), *writable]
        outcome = trial.run(argv, cwd, log, smoke.timeout, allowed)
    if outcome.ok:
        return GateFinding(True, "smoke", "the smoke run ended well")
    return GateFinding(False, "smoke", f"the smoke run failed: {outcome.why}\n{outcome.tail[-TOLD_CHARS:]}".rstrip())


# -- schedules: what was declared against what was done


def check_schedule(version: Path, schedule: Schedule) -> list[GateFinding]:
    """A declared value that the trace never shows, and a gate that never fires, were not trained with."""
    warning = not schedule.strict
    declared, problem = _json(version / schedule.declared)
    trace, also = _json(version / schedule.trace)
    if problem or also:
        return [GateFinding(False, "schedule", why, warning) for why in (problem, also) if why]
    rows = trace.get("trace") if isinstance(trace, dict) else trace
    if not isinstance(declared, dict) or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        why = "the schedule is an object of names, its trace a list of rows (or an object with one, `trace`)"
        return [GateFinding(False, "schedule", why, warning)]
    missing = [GateFinding(False, "schedule", why, warning) for why in never_reached(declared, rows)]
    return missing or [GateFinding(True, "schedule", f"all that was declared was reached in {len(rows)} rows")]


def never_reached(declared: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What was declared and never came.

    A schedule is a value, a list of values, or an object with `values`, `start`, `end`, `reach`. A gate is an object
    with `metric` and `above` or `below`, or `fires: true`: then the trace has a column of its name.
    """
    schedules = declared.get("schedules", declared)
    gates = declared.get("gates", {})
    named = {**(schedules if isinstance(schedules, Mapping) else {}), **(gates if isinstance(gates, Mapping) else {})}
    for name, wanted in named.items():
        if name in ("gates", "schedules"):
            continue
        if isinstance(wanted, Mapping) and ("above" in wanted or "below" in wanted):
            yield from _threshold(name, wanted, rows)
        elif wanted is True or (isinstance(wanted, Mapping) and wanted.get("fires")):
            if not any(row.get(name) for row in rows):
                yield f"the gate {name} never fired"
        else:
            seen = [row[name] for row in rows if name in row]
            for value in _values(wanted):
                if not any(_same(value, one) for one in seen):
                    shown = f"it was {seen[0]!r} at first and {seen[-1]!r} at last" if seen else "the trace has no such"
                    yield f"{name} was to reach {value!r} and never did: {shown}"


def _threshold(name: str, gate: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    metric = str(gate.get("metric", name))
    seen = [float(row[metric]) for row in rows if _number(row.get(metric))]
    for word, passes in (("above", max(seen, default=-math.inf)), ("below", min(seen, default=math.inf))):
        bar = gate.get(word)
        if _number(bar) and not (passes >= float(bar) if word == "above" else passes <= float(bar)):  # type: ignore[arg-type]
            best = f"it came to {passes:g}" if seen else f"the trace has no {metric}"
            yield f"the gate {name} never fired: {metric} was to be {word} {bar!r}, {best}"


def _values(wanted: Any) -> list[Any]:
    if isinstance(wanted, Mapping):
        listed = list(wanted["values"]) if isinstance(wanted.get("values"), list) else []
        return [*(wanted[key] for key in ("start", "end", "reach", "final") if key in wanted), *listed]
    return list(wanted) if isinstance(wanted, list) else [wanted]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _same(one: Any, other: Any) -> bool:
    if _number(one) and _number(other):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-12)
    return bool(one == other)


def _json(path: Path) -> tuple[Any, str]:
    try:
        return load_json(read_bounded(path, MOST_BYTES)), ""
    except FileNotFoundError:
        return None, f"{path.name} is not there"
    except (OSError, ValueError) as error:
        return None, f"{path.name} cannot be read: {error}"


# -- the frozen evaluation


@dataclass(frozen=True, slots=True)
class Measured:
    """What the frozen evaluation said about a version."""

    value: float
    """The metric."""
    values: tuple[float, ...]
    """One a fixed episode; empty where the evaluation gives none."""


def evaluate(evaluation: Evaluate, places: Mapping[str, str | Path], lab: Path, log: Path) -> Measured | GateFinding:
    """Run the lab's own evaluator on a version; a finding if it gives no number."""
    with tempfile.TemporaryDirectory(prefix="looplab-evaluate-") as scratch:
        result = Path(scratch, "result.json")
        argv = trial.fill(evaluation.command, {**places, "result": result, "scratch": scratch})
        outcome = trial.run(argv, lab, log, evaluation.timeout)
        if not outcome.ok:
            why = f"the frozen evaluation failed: {outcome.why}\n{outcome.tail[-TOLD_CHARS:]}".rstrip()
            return GateFinding(False, "evaluation", why)
        said, problem = _json(result)
        if not problem:
            write_atomic(log.with_suffix(".json"), dump_json(said))
    if problem:
        return GateFinding(False, "evaluation", f"the frozen evaluation left no result: {problem}")
    value = at(said, evaluation.metric)
    if not _number(value):
        return GateFinding(
            False, "evaluation", f"the evaluation's {evaluation.metric} is {value!r}, not a finite number"
        )
    values = at(said, evaluation.values) if evaluation.values else []
    if not isinstance(values, list) or not all(_number(one) for one in values):
        return GateFinding(False, "evaluation", f"the evaluation's {evaluation.values} is not a list of finite numbers")
    return Measured(float(value), tuple(float(one) for one in values))


def compare_declared(version: Path, evaluation: Evaluate, measured: Measured) -> list[GateFinding]:
    """What the version says of itself, against what was measured: told, never used."""
    said, problem = _json(version / evaluation.declared)
    value = None if problem else at(said, evaluation.metric)
    if not _number(value):
        return []
    same = math.isclose(value, measured.value, rel_tol=1e-3, abs_tol=1e-9)  # type: ignore[arg-type]
    why = f"{evaluation.declared} says {evaluation.metric} {value:g}, the frozen evaluation {measured.value:g}"
    return [GateFinding(same, "declared", why, warning=True)]


def at(data: Any, path: str) -> Any:
    """The value at a dotted path; None if there is none."""
    if isinstance(data, dict) and path in data:
        return data[path]
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data
