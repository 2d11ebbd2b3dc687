"""Case reports in Markdown: prompt, retrieval, probes, decisions, injections and the answer of single questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.errors import LabError

from . import files, prompts
from .data import Example

if TYPE_CHECKING:
    from .config import EsmSettings
    from .evaluate import Report

MAX_CASES = 5
"""Cases of each kind in cases_T*.md: the first ones, not a selection."""


def pick(examples: Sequence[Example], wanted: str) -> list[Example]:
    """Return the questions of a list such as `0,6` or `test-12`: indices in the split, or ids."""
    by_id = {example.id: example for example in examples}
    found = []
    for name in (part.strip() for part in wanted.split(",") if part.strip()):
        if name in by_id:
            found.append(by_id[name])
        elif name.isdigit() and int(name) < len(examples):
            found.append(examples[int(name)])
        else:
            raise LabError(
                f"no example {name!r}", hint=f"use 0 to {len(examples) - 1}, or an id such as {examples[0].id}"
            )
    if not found:
        raise LabError("no examples given", hint="--example-ids 0,6")
    return list(dict.fromkeys(found))


def write_cases(report: Report, settings: EsmSettings, run_dir: Path) -> Path | None:
    """Write cases/cases_T*.md: answers that ESM fixed, and answers that it broke."""
    if not {"greedy", "esm"} <= set(report.rows):
        return None
    both = list(zip(report.examples, report.correct("greedy")[0], report.correct("esm")[0], strict=True))
    parts = [f"# Cases, {settings.task.dataset} {report.split}, T_max {report.t_max}\n"]
    for title, kind in (("Fixed by ESM", (False, True)), ("Broken by ESM", (True, False))):
        places = [place for place, (_, greedy, esm) in enumerate(both) if (greedy, esm) == kind]
        parts.append(f"## {title}: {len(places)}\n")
        if len(places) > MAX_CASES:
            parts.append(f"The first {MAX_CASES} in the order of the questions.\n")
        for place in places[:MAX_CASES]:
            parts += _case(report, settings, place, ("greedy", "esm"))
    file = run_dir / "cases" / f"cases_T{report.t_max}.md"
    files.atomic_write(file, "\n".join(parts).encode())
    return file


def write_case(report: Report, settings: EsmSettings, run_dir: Path, tag: str) -> Path:
    """Write cases/<tag>_<methods>_T*.md: these questions with every method."""
    parts = [f"# {tag}: {settings.task.dataset} {report.split}, T_max {report.t_max}\n"]
    if report.test_reads:
        parts.append(f"Reading {report.test_reads} of the test set.\n")
    for place in range(len(report.examples)):
        parts += _case(report, settings, place, list(report.rows))
    file = run_dir / "cases" / f"{tag}_{'-'.join(report.rows)}_T{report.t_max}.md"
    files.atomic_write(file, "\n".join(parts).encode())
    return file


def _case(report: Report, settings: EsmSettings, place: int, names: Sequence[str]) -> Iterator[str]:
    example = report.examples[place]
    yield f"### {example.id}\n"
    yield _block(prompts.render(settings.prompt.template, example))
    yield f"Correct answer: `{example.gold}`\n"
    for name in names:
        row = report.rows[name][0][place]
        verdict = "correct" if row["correct"] else "incorrect"
        cost = f"{row['tokens_used']} tokens + {row['probe_tokens_used']} probe tokens"
        yield f"#### {name}: {verdict}, answered `{row['pred']}` ({cost}, {row['finish_reason']})\n"
        if not row["steps"]:
            yield _block(row["text"])
            continue
        for step in row["steps"]:
            yield from _step(step)
        rest = row["text"][sum(len(step["text"]) for step in row["steps"]) :]
        if rest:
            yield f"The rest, after segment {row['steps'][-1]['m']}, without steering:\n"
            yield _block(rest)


def _step(step: dict[str, Any]) -> Iterator[str]:
    yield f"**Segment {step['m']}**: {_decision(step)}\n"
    if step["candidates"]:
        yield "| candidate | cos | Â | confidence gain | score |\n|---|---|---|---|---|"
        for one in step["candidates"]:
            gain = "–" if one["conf_gain"] is None else f"{one['conf_gain']:+.3f}"
            mark = " ←" if one["name"] == step["chosen"] else ""
            yield f"| `{one['name']}`{mark} | {one['sim']:.3f} | {one['ahat']:.3f} | {gain} | {one['score']:.3f} |"
        yield f"| null | | {step['null_ahat']:.3f} | | |\n"
    yield _block(step["text"])


def _decision(step: dict[str, Any]) -> str:
    if step["chosen"]:
        return f"injected `{step['chosen']}` with scale {step['chosen_scale']:.3f} (score {step['chosen_score']:.3f})"
    if step["mem_reason"] not in (None, "ok"):
        sim = "" if step["mem_top_sim"] is None else f", nearest {step['mem_top_sim']:.3f}"
        return f"not steered: {step['mem_reason']} ({step['mem_n_entries']} entries{sim})"
    return f"not steered: {step['note']}"


def _block(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}\n"
