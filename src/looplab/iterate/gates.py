"""Gates: checks that a version must pass before it is judged.

Each gate returns findings with reasons that the agent can act on. Gates never rely on what the agent says: they inspect
files and run commands.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from looplab.config.files import dump_json, write_atomic
from looplab.iterate import trial
from looplab.iterate.settings import Evaluate, Schedule, Smoke, ValueGate
from looplab.untrusted import load_json, read_bounded, real_path

HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*")
SHOWN_CHARS = 3000
"""Characters of a command's output in a finding."""
MAX_FILE_BYTES = 64 << 20
"""Largest file of a version that is read."""
CLOSE = 1e-6
"""Relative tolerance for equal values of a schedule."""


@dataclass(frozen=True, slots=True)
class GateFinding:
    """Result of one check."""

    ok: bool
    what: str
    """Name of the gate."""
    why: str
    warning: bool = False
    """Whether a failure is only reported and does not stop the version."""

    @property
    def stops(self) -> bool:
        """Whether the version fails because of it."""
        return not self.ok and not self.warning


# -- the document


def sections_of(text: str) -> list[tuple[str, str]]:
    """Return the headings of a Markdown text, without the title, each with its body including subheadings."""
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
    for index, (number, level, title) in enumerate(heads):
        end = next((n for n, other, _ in heads[index + 1 :] if other <= level), len(lines))
        found.append((title, "\n".join(lines[number + 1 : end]).strip()))
    return found


def section(text: str, headings: Sequence[str]) -> str | None:
    """Return the body of the section whose title contains one of the headings; None if there is none."""
    bodies = [body for title, body in sections_of(text) if any(one.lower() in title.lower() for one in headings)]
    return max(bodies, key=_text_length, default=None)


def _text_length(body: str) -> int:
    """Count the letters and digits, without headings and comments."""
    plain = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    return sum(len(re.sub(r"[\W_]", "", line)) for line in plain.splitlines() if not HEADING.fullmatch(line))


def check_document(path: Path, sections: Sequence[Sequence[str]]) -> list[GateFinding]:
    """Check that the document has all sections; each is given by its alternative headings."""
    try:
        text = read_bounded(path, MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        return [GateFinding(False, "document", f"{path.name} is missing")]
    except (OSError, ValueError) as error:
        return [GateFinding(False, "document", f"{path.name} cannot be read: {error}")]
    found = []
    for headings in sections:
        body = section(text, headings)
        if body is None:
            found.append(GateFinding(False, "document", f"{path.name} has no section {headings[0]!r}"))
        elif not _text_length(body):
            found.append(GateFinding(False, "document", f"the section {headings[0]!r} of {path.name} is empty"))
    names = ", ".join(headings[0] for headings in sections)
    return found or [GateFinding(True, "document", f"{path.name} has {names}")]


# -- the files


def check_files(version: Path) -> list[GateFinding]:
    """Check for nested repositories and for links that lead out of the version."""
    found = []
    for folder, folders, files in os.walk(version):
        for name in [*folders, *files]:
            path = Path(folder, name)
            where = path.relative_to(version)
            if name == ".git":
                found.append(GateFinding(False, "files", f"{where} is a nested repository: remove it"))
            elif path.is_symlink() and not real_path(path).is_relative_to(version.resolve()):
                found.append(GateFinding(False, "files", f"{where} is a link out of the version: copy the file"))
    return found or [GateFinding(True, "files", "no link leads out of the version")]


def check_artifacts(version: Path, patterns: Sequence[str]) -> list[GateFinding]:
    found = []
    for pattern in patterns:
        files = [p for p in version.glob(pattern) if p.is_file() and p.name != ".gitkeep" and p.stat().st_size > 0]
        why = f"{pattern}: {len(files)} file(s)" if files else f"no non-empty file matches {pattern}"
        found.append(GateFinding(bool(files), "artifacts", why))
    return found


def check_values(version: Path, values: Sequence[ValueGate]) -> list[GateFinding]:
    """Check numbers in the version's JSON files against their bounds."""
    found = []
    for gate in values:
        data, problem = _read_json(version / gate.file)
        value = None if problem else value_at(data, gate.key)
        low, high = gate.at_least, gate.at_most
        named = (("at least", low), ("at most", high))
        bounds = [f"{word} {bound:g}" for word, bound in named if bound is not None]
        bounded = value if _is_number(value) else math.nan
        in_bounds = (low is None or bounded >= low) and (high is None or bounded <= high)
        why = problem or f"{gate.key} in {gate.file} is {value!r} and must be {' and '.join(bounds)}"
        found.append(GateFinding(in_bounds, "values", why))
    return found


# -- the training


def check_smoke(
    smoke: Smoke, variables: Mapping[str, str | Path], cwd: Path, log: Path, writable: Sequence[Path] | None = None
) -> GateFinding:
    """Run a short training of the version in a scratch folder.

    Args:
        writable: Other folders that it may write to; None: it is not confined.
    """
    with tempfile.TemporaryDirectory(prefix="looplab-smoke-", ignore_cleanup_errors=True) as scratch:
        argv = trial.fill_command(smoke.command, {**variables, "scratch": scratch})
        allowed = None if writable is None else [Path(scratch), *writable]
        outcome = trial.run(argv, cwd, log, smoke.timeout, allowed)
    if outcome.ok:
        return GateFinding(True, "smoke", "the smoke run succeeded")
    return GateFinding(False, "smoke", f"the smoke run failed: {outcome.why}\n{outcome.tail[-SHOWN_CHARS:]}".rstrip())


# -- schedules: declared against actual values


def check_schedule(version: Path, schedule: Schedule) -> list[GateFinding]:
    """Compare the declared schedule with the trace of the training; report what was never reached."""
    warning = not schedule.strict
    declared, problem = _read_json(version / schedule.declared)
    trace, also = _read_json(version / schedule.trace)
    if problem or also:
        return [GateFinding(False, "schedule", why, warning) for why in (problem, also) if why]
    rows = trace.get("trace") if isinstance(trace, dict) else trace
    if not isinstance(declared, dict) or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        why = "the schedule must be an object, its trace a list of rows (or an object with the key `trace`)"
        return [GateFinding(False, "schedule", why, warning)]
    missing = [GateFinding(False, "schedule", why, warning) for why in never_reached(declared, rows)]
    return missing or [GateFinding(True, "schedule", f"every declared value was reached in {len(rows)} rows")]


def never_reached(declared: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe each declared value that was never reached and each gate that never fired.

    A schedule is a value, a list of values, or an object with `values`, `start`, `end`, `reach`. A gate is an object
    with `metric` and `above` or `below`, or `fires: true` with a column of its name in the trace.
    """
    schedules = declared.get("schedules", declared)
    gates = declared.get("gates", {})
    named = {**(schedules if isinstance(schedules, Mapping) else {}), **(gates if isinstance(gates, Mapping) else {})}
    for name, expected in named.items():
        if name in ("gates", "schedules"):
            continue
        if isinstance(expected, Mapping) and ("above" in expected or "below" in expected):
            yield from _threshold(name, expected, rows)
        elif expected is True or (isinstance(expected, Mapping) and expected.get("fires")):
            if not any(row.get(name) for row in rows):
                yield f"the gate {name} never fired"
        else:
            actual = [row[name] for row in rows if name in row]
            for value in _values(expected):
                if not any(_is_close(value, one) for one in actual):
                    shown = f"first {actual[0]!r}, last {actual[-1]!r}" if actual else "not in the trace"
                    yield f"{name} never reached {value!r}: {shown}"


def _threshold(name: str, gate: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    metric = str(gate.get("metric", name))
    values = [float(row[metric]) for row in rows if _is_number(row.get(metric))]
    for word, extreme in (("above", max(values, default=-math.inf)), ("below", min(values, default=math.inf))):
        bar = gate.get(word)
        if _is_number(bar) and not (extreme >= bar if word == "above" else extreme <= bar):
            best = f"it reached {extreme:g}" if values else f"the trace has no {metric}"
            yield f"the gate {name} never fired: {metric} must be {word} {bar!r}, {best}"


def _values(expected: Any) -> list[Any]:
    """Return the values that a schedule declares."""
    if isinstance(expected, Mapping):
        listed = list(expected["values"]) if isinstance(expected.get("values"), list) else []
        return [*(expected[key] for key in ("start", "end", "reach", "final") if key in expected), *listed]
    return list(expected) if isinstance(expected, list) else [expected]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_close(one: Any, other: Any) -> bool:
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-12)
    return bool(one == other)


def _read_json(path: Path) -> tuple[Any, str]:
    """Return the content of a JSON file, and why it cannot be read (empty if it can)."""
    try:
        return load_json(read_bounded(path, MAX_FILE_BYTES)), ""
    except FileNotFoundError:
        return None, f"{path.name} is missing"
    except (OSError, ValueError) as error:
        return None, f"{path.name} cannot be read: {error}"


# -- the frozen evaluation


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of the frozen evaluation of a version."""

    value: float
    """The metric."""
    values: tuple[float, ...]
    """One value per fixed episode; empty if the evaluation returns none."""


def evaluate(evaluation: Evaluate, variables: Mapping[str, str | Path], lab: Path, log: Path) -> Measured | GateFinding:
    """Run the lab's evaluator on a version; return a finding if it does not return a number."""
    with tempfile.TemporaryDirectory(prefix="looplab-evaluate-") as scratch:
        result = Path(scratch, "result.json")
        argv = trial.fill_command(evaluation.command, {**variables, "result": result, "scratch": scratch})
        outcome = trial.run(argv, lab, log, evaluation.timeout)
        if not outcome.ok:
            why = f"the frozen evaluation failed: {outcome.why}\n{outcome.tail[-SHOWN_CHARS:]}".rstrip()
            return GateFinding(False, "evaluation", why)
        data, problem = _read_json(result)
        if not problem:
            write_atomic(log.with_suffix(".json"), dump_json(data))
    if problem:
        return GateFinding(False, "evaluation", f"the frozen evaluation wrote no result: {problem}")
    value = value_at(data, evaluation.metric)
    if not _is_number(value):
        return GateFinding(
            False, "evaluation", f"the evaluation's {evaluation.metric} is {value!r}, not a finite number"
        )
    values = value_at(data, evaluation.values) if evaluation.values else []
    if not isinstance(values, list) or not all(_is_number(one) for one in values):
        return GateFinding(False, "evaluation", f"the evaluation's {evaluation.values} is not a list of finite numbers")
    return Measured(float(value), tuple(float(one) for one in values))


def compare_declared(version: Path, evaluation: Evaluate, measured: Measured) -> list[GateFinding]:
    """Compare what the version reports about itself with what was measured; a mismatch is a warning."""
    data, problem = _read_json(version / evaluation.declared)
    value = None if problem else value_at(data, evaluation.metric)
    if not _is_number(value):
        return []
    same = math.isclose(value, measured.value, rel_tol=1e-3, abs_tol=1e-9)
    why = f"{evaluation.declared} says {evaluation.metric} {value:g}, the frozen evaluation {measured.value:g}"
    return [GateFinding(same, "declared", why, warning=True)]


def value_at(data: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    if isinstance(data, dict) and path in data:
        return data[path]
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data
