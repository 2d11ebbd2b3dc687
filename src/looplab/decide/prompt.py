"""The prompt of an agent: the facts of a study, rendered into a template that people may edit."""

from __future__ import annotations

import contextlib
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.config.lab import StudyConfig
from looplab.decide.history import History, PastRun
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import show_value
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.view import RunRow, StudyView, sibling_study
from looplab.measure.discover import reader_of
from looplab.runs import folder
from looplab.untrusted import clean_line, clean_text, read_bounded

SHOWN = 12
"""Number of latest runs that are listed."""
POINTS = 8
"""Number of values of a curve that are shown."""
MAX_TEXT = 400
"""Maximum length of one line, in characters."""
MAX_NOTE = 2_000
"""Maximum length of a note of a person, in characters."""
MAX_VERDICTS = 6
"""Number of the agent's own latest proposals that are listed with their outcome."""
MAX_FIELD = 100_000
"""Maximum length of one field, in characters."""
MAX_TEMPLATE = 10_000_000
"""Maximum size of a template, in bytes."""

TEMPLATE = """\
You decide what to try next in a study of machine-learning trainings. You only propose: looplab checks your proposal,
runs the training, measures it and judges it. Do not start trainings and do not change any file except the answer.

# Goal
{goal}

# What you may change
{knobs}
Nothing else can be changed. Constraints:
{constraints}

# State of the study
Champion: {champion}

{runs}

Rejected proposals, and why:
{rejected}

Remaining budget: {budget}
{model}{verdicts}{refused}{said}
# Your answer
Your edits apply to {parent}. A key that you leave out keeps its value there.
{answer}
"""

FIELDS = frozenset(name for _, name, _, _ in string.Formatter().parse(TEMPLATE) if name)
ALWAYS = ("rejected", "model", "verdicts", "refused", "said")
"""Fields that are appended to a template that does not contain them, since the agent must know them."""

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
                "required": ["edits", "region", "reason", "hypothesis", "parent"],
                "properties": {
                    "edits": {"type": "array", "items": {"type": "string"}},
                    "region": {"type": "array", "items": {"type": "string"}},
                    "reason": {"type": "string"},
                    "hypothesis": {"type": "string"},
                    "parent": {"type": "string"},
                },
            },
        }
    },
}
"""JSON schema of the final message, for agents whose program accepts one."""


def read_template(path: Path | None) -> str:
    """Return the template of a file; None: the default.

    Raises:
        LabError: The file cannot be read, or is not a valid template.
    """
    if path is None:
        return TEMPLATE
    try:
        text = read_bounded(path, MAX_TEMPLATE).decode()
    except OSError as error:
        raise LabError(f"the prompt cannot be read: {error.strerror}", file=path) from error
    except ValueError as error:  # not UTF-8, or too large
        raise LabError(f"the prompt cannot be read: {error}", file=path) from error
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise LabError(f"the prompt has an unclosed brace: {error}", file=path,
                       hint="write {{ and }} for literal braces") from error  # fmt: skip
    unknown = sorted(names - FIELDS)
    if unknown:
        raise LabError(f"the prompt uses {{{unknown[0]}}}, which is not a known field", file=path,
                       hint=f"known: {', '.join(sorted(FIELDS))}; {{{{ and }}}} are literal braces")  # fmt: skip
    if "answer" not in names:
        raise LabError("the prompt does not say how to answer", file=path, hint="put {answer} into it")
    return text


def render_prompt(
    template: str, study: StudyConfig, guard: Guard, record: StudyView, history: History, outputs: Path, *,
    parent: RunRow | None, parent_config: Mapping[str, Any], n: int, answer: str, budget: str,
    refused: Sequence[str] = (), model: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the prompt.

    Args:
        parent: The run that the edits apply to; None: the base.
        parent_config: Its config.
        n: The number of proposals to ask for.
        answer: The path of the answer file.
        budget: The remaining budget in words.
        refused: Why earlier answers to this question could not be used.
        model: What the model of the search believes; empty: there is none.
    """
    objective = study.objective
    goal = "find a config that trains well"
    if objective is not None:
        word = "largest" if objective.goal == "max" else "smallest"
        goal = f"the {word} {objective.metric} ({objective.at} value of a run)"
        if objective.then is not None:
            word = "largest" if objective.then.goal == "max" else "smallest"
            goal += f"; ties are broken by the {word} {objective.then.metric}"
        if study.judge is not None:
            goal += "; an improvement counts only if it holds over several seeds"
    knobs = guard.knob_values(guard.with_defaults(dict(parent_config)))
    listed = [f"- {path}: {knob.describe()}" for path, knob in guard.knobs.items()]
    start = f"run {parent.id}" if parent is not None else "the base config"
    fields = {
        "goal": goal,
        "knobs": "\n".join(listed),
        "constraints": "\n".join(f"- {text}" for text in study.constraints) or "- none",
        "champion": _champion(record, objective.metric if objective else ""),
        "runs": _runs(study, guard, history, outputs),
        "rejected": "\n".join(_rejected(record)) or "- none",
        "budget": budget,
        "said": notes_section(record),
        "model": _section("Beliefs of a Gaussian process over all runs", model, 4 * MAX_TEXT),
        "verdicts": _section("Outcome of your latest proposals (newest last)", _verdicts(record, outputs)),
        "refused": _section("Why your earlier answers were rejected", refused, 2 * MAX_TEXT),
        "parent": "\n".join([f"{start}, whose values are", *(f"- {key} = {show_value(knobs[key])}" for key in knobs)]),
        "answer": _answer(n, answer),
    }  # fmt: skip
    fields = {name: clean_text(value, MAX_FIELD) for name, value in fields.items()}
    present = {name for _, name, _, _ in string.Formatter().parse(template)}
    if "rejected" not in present:
        fields["rejected"] = _section("Rejected proposals, and why", [line[2:] for line in _rejected(record)])
    missing = "".join(fields[name] for name in ALWAYS if name not in present)
    return clean_text(template.format_map(fields) + missing)


def _answer(n: int, path: str) -> str:
    many = "one proposal" if n == 1 else f"up to {n} proposals, the most promising first"
    return (
        f"Return {many} as JSON, as your final message or in the file {path}:\n"
        '{"proposals": [{"edits": ["train.learning_rate@mul=0.5"], "reason": "the evidence for it", '
        '"hypothesis": "what you expect to see", "parent": ""}]}\n'
        "An edit is `path@op=value` with the operations set, mul, add, min, max. `parent` may name another run to "
        "start from; empty means the one above. A nested partial config is also accepted instead of edits, such as "
        '{"train": {"learning_rate": 0.001}}.\n'
        "If you know where to look but not the values, name a region: "
        '{"edits": [], "region": ["train.learning_rate=[1e-4, 1e-3]", "train.schedule=[\\"cosine\\"]"], …}. '
        "An optimizer then chooses the point in these ranges (and among these choices) that promises most; knobs that "
        "you do not name are free. Edits together with a region must set a value."
    )


def _section(title: str, lines: Sequence[str], max_length: int | None = None) -> str:
    """Return a section of the prompt; an empty string if it has no lines."""
    shown = [clean_text(line, max_length).replace("\n", "\n  ") for line in lines]
    return f"\n# {title}\n" + "".join(f"- {line}\n" for line in shown) if shown else ""


def notes_section(record: StudyView) -> str:
    """Return people's notes to agents as a section of the prompt; an empty string if there are none."""
    return _section("Messages from the people of this lab (newest last)", record.messages(), MAX_NOTE)


def _rejected(record: StudyView) -> list[str]:
    """Return the latest rejected proposals of all proposers, and the latest rejected submitted commands."""
    jobs = StudyView(record.ledger, sibling_study(record.name)).proposals("rejected")[-SHOWN // 3 :]
    rows = record.proposals("rejected")[-SHOWN:]
    named = [(f"{' '.join(row.edits)} (by {row.proposer})", row) for row in rows]
    named += [(f"the submitted command {' '.join(row.words)}", row) for row in jobs]
    return [
        clean_line(f"- {name}: ", MAX_TEXT)
        + clean_line("; ".join(str(p.get("message")) for p in row.problems), 2 * MAX_TEXT)
        for name, row in named
    ]


def _verdicts(record: StudyView, outputs: Path) -> list[str]:
    """Return the outcome of the agent's own latest proposals: the verdict, and what was measured."""
    verdicts = record.verdicts()
    lines = []
    for run in record.runs_by("agent", MAX_VERDICTS):
        edits = ""
        with contextlib.suppress(LabError):
            edits = " ".join(record.proposal(run.proposal).edits) if run.proposal is not None else ""
        words = f"run {run.id}" + (f" ({clean_line(edits, MAX_TEXT)})" if edits else "")
        words += f": {run.status or run.state}"
        if run.objective is not None:
            words += f", objective {run.objective:.6g}" + _against_parent(record, run)
        evidence = verdicts.get(run.id)
        if evidence is not None:
            words += f"; verdict {evidence['verdict']}: {evidence.get('why', '')}"
        notes = folder.read_json(outputs / run.id, "run.json", strict=False).get("notes")
        if isinstance(notes, list) and notes:
            words += f"; noted: {'; '.join(map(str, notes))}"
        lines.append(clean_line(words, 2 * MAX_TEXT))
    return lines


def _against_parent(record: StudyView, run: RunRow) -> str:
    parent = None
    with contextlib.suppress(LabError):
        parent = record.run(run.parent) if run.parent is not None else None
    return f" (its parent, run {parent.id}: {parent.objective:.6g})" if parent and parent.objective is not None else ""


def _champion(record: StudyView, metric: str) -> str:
    best = record.best()
    if best is None:
        return "none yet; nothing has been measured"
    words = f"run {best.id}, {metric} = {best.objective:.6g}" if best.objective is not None else f"run {best.id}"
    evidence = record.verdicts().get(best.id)
    return words + (
        f" ({clean_line(str(evidence['why']), 2 * MAX_TEXT)})" if evidence else " (one run is a hint, not a result)"
    )


def _runs(study: StudyConfig, guard: Guard, history: History, outputs: Path) -> str:
    """Return the latest runs: what they changed, their outcome and their curves."""
    ended = history.ended()
    runs = [one for one in ended if one.run.role in DECIDED][-SHOWN:]
    imported = _imported(study, guard, [one for one in ended if one.run.role == Role.IMPORTED])
    if not runs:
        return "\n".join(["No run has ended yet.", *imported])
    lines = ["The latest runs (newest last):"]
    base = guard.knob_values(guard.with_defaults(runs[0].config))
    for one in runs:
        knobs = guard.knob_values(guard.with_defaults(one.config))
        changed = {key: value for key, value in knobs.items() if base.get(key) != value}
        lines.append(
            f"- run {one.run.id} by {one.run.proposer}, from {one.run.parent or one.run.base}: {_outcome(one)}"
        )
        lines.append(
            "  "
            + (
                clean_line(", ".join(f"{key}={show_value(value)}" for key, value in changed.items()), 5 * MAX_TEXT)
                or "same as the base"
            )
        )
        if one.run.reason:
            lines.append(f"  why: {clean_line(one.run.reason, MAX_TEXT)}")
        curve = _curve(study, outputs / one.run.id)
        if curve:
            lines.append(f"  {curve}")
        others = _other_metrics(study, one)
        if others:
            lines.append(f"  {others}")
    return "\n".join([*lines, *imported])


def _imported(study: StudyConfig, guard: Guard, runs: Sequence[PastRun]) -> list[str]:
    """Return the best runs imported from other tools: their configs and objectives."""
    maximize = study.objective is not None and study.objective.goal == "max"
    best = sorted(
        (one for one in runs if one.run.objective is not None and one.config),
        key=lambda one: (-1 if maximize else 1) * (one.run.objective or 0.0),
    )[:SHOWN]
    if not best:
        return []
    lines = ["", "The best runs that other tools recorded (imported; not run here, so only a hint):"]
    for one in best:
        knobs = guard.knob_values(guard.with_defaults(one.config))
        lines.append(f"- run {one.run.id}, {clean_line(one.run.reason, MAX_TEXT)}: objective {one.run.objective:.6g}")
        lines.append("  " + clean_line(", ".join(f"{key}={value}" for key, value in knobs.items()), 2 * MAX_TEXT))
    return lines


def _outcome(one: PastRun) -> str:
    words = one.run.status or "?"
    if one.run.objective is not None:
        words += f", objective {one.run.objective:.6g}"
    return words + (f", verdict {one.run.verdict}" if one.run.verdict else "")


def _curve(study: StudyConfig, run_dir: Path) -> str:
    """Return the objective of a run as `value@step`; an empty string if there are fewer than two values."""
    if study.objective is None or not run_dir.is_dir():
        return ""
    curve = reader_of(study, run_dir).poll(final=True).get(study.objective.metric)
    if curve is None or len(curve.values) < 2:
        return ""
    indices = _evenly_spaced(len(curve.values))
    return f"{study.objective.metric}: " + " ".join(f"{curve.values[i]:.4g}@{curve.steps[i]:g}" for i in indices)


def _evenly_spaced(count: int) -> Sequence[int]:
    if count <= POINTS:
        return range(count)
    return sorted({round(i * (count - 1) / (POINTS - 1)) for i in range(POINTS)})


def _other_metrics(study: StudyConfig, one: PastRun) -> str:
    metric = study.objective.metric if study.objective else ""
    names = [name for name, summary in one.metrics.items() if name != metric and summary.last is not None][:POINTS]
    return clean_line(", ".join(f"{name} {one.metrics[name].last:.4g}" for name in names), 2 * MAX_TEXT)
