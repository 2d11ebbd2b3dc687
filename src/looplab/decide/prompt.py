"""What an agent is told: the facts of a study, put into a template that people may change."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.config.lab import Study
from looplab.decide.history import History, Seen
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import show_value
from looplab.ledger.study import IMPORTED, RunRow, StudyLedger
from looplab.measure.discover import reader_of
from looplab.untrusted import clean_line, clean_text, read_bounded

SHOWN = 12
"""How many of the last runs are listed."""
POINTS = 8
"""How many values of a curve are shown."""
MAX_TEXT = 400
MAX_TEMPLATE = 10_000_000

TEMPLATE = """\
You decide what is tried next in a study of machine-learning trainings. You only propose: looplab checks your proposal,
runs the training, measures it and judges it. Do not start trainings and do not change any file but the answer.

# Goal
{goal}

# What you may change
{knobs}
Nothing else can be changed. What must hold:
{constraints}

# Where the study stands
Champion: {champion}

{runs}

Refused proposals, and why:
{rejected}

Left of the budget: {budget}
{said}
# Your answer
Your edits apply to {parent}. A key that you leave out keeps its value there.
{answer}
"""

FIELDS = frozenset(name for _, name, _, _ in string.Formatter().parse(TEMPLATE) if name)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["proposals"],
    "properties": {
        "proposals": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["edits", "reason", "hypothesis", "parent"],
                "properties": {
                    "edits": {"type": "array", "items": {"type": "string"}},
                    "reason": {"type": "string"},
                    "hypothesis": {"type": "string"},
                    "parent": {"type": "string"},
                },
            },
        }
    },
}
"""What the final message of an agent looks like, where its program can be told."""


def read_template(path: Path | None) -> str:
    """The template; a mistake in it is told before anything is asked."""
    if path is None:
        return TEMPLATE
    try:
        text = read_bounded(path, MAX_TEMPLATE).decode()
    except OSError as error:
        raise LabError(f"the prompt cannot be read: {error.strerror}", file=path) from error
    except ValueError as error:  # not UTF-8, or not a file of a sensible size
        raise LabError(f"the prompt cannot be read: {error}", file=path) from error
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise LabError(f"the prompt has a brace that is not closed: {error}", file=path,
                       hint="write {{ and }} for braces that are meant") from error  # fmt: skip
    unknown = sorted(names - FIELDS)
    if unknown:
        raise LabError(f"the prompt asks for {{{unknown[0]}}}, which is not known", file=path,
                       hint=f"known: {', '.join(sorted(FIELDS))}; {{{{ and }}}} are plain braces")  # fmt: skip
    if "answer" not in names:
        raise LabError("the prompt does not say how to answer", file=path, hint="put {answer} into it")
    return text


def fill(
    template: str, study: Study, guard: Guard, record: StudyLedger, history: History, outputs: Path, *,
    parent: RunRow | None, parent_config: Mapping[str, Any], n: int, answer: str, budget: str,
) -> str:  # fmt: skip
    """The prompt."""
    objective = study.objective
    goal = "find a config that trains well"
    if objective is not None:
        word = "largest" if objective.goal == "max" else "smallest"
        goal = f"the {word} {objective.metric} ({objective.at} value of a run)"
        if study.judge is not None:
            goal += "; an improvement counts only if it holds over several seeds"
    knobs = guard.knob_values(guard.with_defaults(dict(parent_config)))
    listed = [f"- {path}: {knob.describe()}" for path, knob in guard.knobs.items()]
    rejected = record.proposals("rejected")[-SHOWN:]
    start = f"run {parent.id}" if parent is not None else "the base config"
    whole = {
        "goal": goal,
        "knobs": "\n".join(listed),
        "constraints": "\n".join(f"- {text}" for text in study.constraints) or "- nothing more",
        "champion": _champion(record, objective.metric if objective else ""),
        "runs": _runs(study, guard, history, outputs),
        "rejected": "\n".join(
            clean_line(f"- {' '.join(row.edits)} (by {row.proposer}): ", MAX_TEXT)
            + clean_line("; ".join(str(p.get("message")) for p in row.problems), 2 * MAX_TEXT)
            for row in rejected
        ) or "- none",
        "budget": budget,
        "said": _said(record.said()),
        "parent": "\n".join([f"{start}, whose values are", *(f"- {key} = {show_value(knobs[key])}" for key in knobs)]),
        "answer": _answer(n, answer),
    }  # fmt: skip
    return clean_text(template.format_map(whole))


def _answer(n: int, path: str) -> str:
    many = "one proposal" if n == 1 else f"up to {n} proposals, the most wanted first"
    return (
        f"Give {many} as JSON, as your final message or in the file {path}:\n"
        '{"proposals": [{"edits": ["train.learning_rate@mul=0.5"], "reason": "what in the data says so", '
        '"hypothesis": "what you expect to see", "parent": ""}]}\n'
        "An edit is `path@op=value` with the operations set, mul, add, min, max. `parent` may name another run to "
        "start from; empty is the one above. Instead of edits, a nested partial config is accepted too, such as "
        '{"train": {"learning_rate": 0.001}}.'
    )


def _said(lines: Sequence[str]) -> str:
    head = "\n# What the people of this lab say (the newest last)\n"
    return head + "\n".join("- " + line.replace("\n", "\n  ") for line in lines) + "\n" if lines else ""


def _champion(record: StudyLedger, metric: str) -> str:
    best = record.best()
    if best is None:
        return "none yet; nothing has been measured"
    words = f"run {best.id}, {metric} = {best.objective:.6g}" if best.objective is not None else f"run {best.id}"
    evidence = record.verdicts().get(best.id)
    return words + (f" ({evidence['why']})" if evidence else " (one run is a hint, not a result)")


def _runs(study: Study, guard: Guard, history: History, outputs: Path) -> str:
    """The last runs: what they changed, what came of it, and how it developed."""
    ended = history.ended()
    seen = [one for one in ended if one.run.role in ("base", "trial")][-SHOWN:]
    imported = _imported(study, guard, [one for one in ended if one.run.role == IMPORTED])
    if not seen:
        return "\n".join(["No run has ended yet.", *imported])
    lines = ["The last runs (the newest last):"]
    base = guard.knob_values(guard.with_defaults(seen[0].config))
    for one in seen:
        knobs = guard.knob_values(guard.with_defaults(one.config))
        changed = {key: value for key, value in knobs.items() if base.get(key) != value}
        lines.append(
            f"- run {one.run.id} by {one.run.proposer}, from {one.run.parent or one.run.base}: {_outcome(one)}"
        )
        lines.append(
            "  " + (clean_line(", ".join(f"{key}={value}" for key, value in changed.items())) or "as the base")
        )
        if one.run.reason:
            lines.append(f"  why: {clean_line(one.run.reason, MAX_TEXT)}")
        curve = _curve(study, outputs / one.run.id)
        if curve:
            lines.append(f"  {curve}")
        others = _others(study, one)
        if others:
            lines.append(f"  {others}")
    return "\n".join([*lines, *imported])


def _imported(study: Study, guard: Guard, runs: Sequence[Seen]) -> list[str]:
    """The best runs of other tools: what they set, and what came of it."""
    larger = study.objective is not None and study.objective.goal == "max"
    best = sorted(
        (one for one in runs if one.run.objective is not None and one.config),
        key=lambda one: (-1 if larger else 1) * (one.run.objective or 0.0),
    )[:SHOWN]
    if not best:
        return []
    lines = ["", "The best runs that other tools recorded (imported; not run here, so only hints):"]
    for one in best:
        knobs = guard.knob_values(guard.with_defaults(one.config))
        lines.append(f"- run {one.run.id}, {clean_line(one.run.reason, MAX_TEXT)}: objective {one.run.objective:.6g}")
        lines.append("  " + clean_line(", ".join(f"{key}={value}" for key, value in knobs.items()), 2 * MAX_TEXT))
    return lines


def _outcome(one: Seen) -> str:
    words = one.run.status or "?"
    if one.run.objective is not None:
        words += f", objective {one.run.objective:.6g}"
    return words + (f", verdict {one.run.verdict}" if one.run.verdict else "")


def _curve(study: Study, run_dir: Path) -> str:
    if study.objective is None or not run_dir.is_dir():
        return ""
    curve = reader_of(study, run_dir).poll(final=True).get(study.objective.metric)
    if curve is None or len(curve.values) < 2:
        return ""
    places = _spread(len(curve.values))
    return f"{study.objective.metric}: " + " ".join(f"{curve.values[i]:.4g}@{curve.steps[i]:g}" for i in places)


def _spread(count: int) -> Sequence[int]:
    if count <= POINTS:
        return range(count)
    return sorted({round(i * (count - 1) / (POINTS - 1)) for i in range(POINTS)})


def _others(study: Study, one: Seen) -> str:
    metric = study.objective.metric if study.objective else ""
    named = [name for name, summary in one.metrics.items() if name != metric and summary.last is not None][:POINTS]
    return ", ".join(f"{name} {one.metrics[name].last:.4g}" for name in named)
