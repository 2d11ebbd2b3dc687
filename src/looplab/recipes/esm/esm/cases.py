"""Single questions on paper: what was asked, retrieved, probed, chosen and injected, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.errors import LabError

from . import files, prompts
from .data import Example

if TYPE_CHECKING:
    from .config import Settings
    from .evaluate import Report

MOST = 5
"""Cases of each kind in cases_T*.md: the first ones, not the best-looking ones."""


def pick(examples: Sequence[Example], wanted: str) -> list[Example]:
    """The questions of a list such as `0,6` or `test-12`: places in the split, or ids."""
    by_id = {example.id: example for example in examples}
    found = []
    for name in (part.strip() for part in wanted.split(",") if part.strip()):
        if name in by_id:
            found.append(by_id[name])
        elif name.isdigit() and int(name) < len(examples):
            found.append(examples[int(name)])
        else:
            raise LabError(
                f"there is no example {name!r}", hint=f"use 0 to {len(examples) - 1}, or an id such as {examples[0].id}"
            )
    if not found:
        raise LabError("no example is named", hint="--example-ids 0,6")
    return list(dict.fromkeys(found))


def write_cases(report: Report, settings: Settings, run_dir: Path) -> Path | None:
    """cases/cases_T*.md: where ESM mended an answer and where it broke one."""
    if not {"greedy", "esm"} <= set(report.rows):
        return None
    both = list(zip(report.examples, report.correct("greedy")[0], report.correct("esm")[0], strict=True))
    parts = [f"# Cases, {settings.task.dataset} {report.split}, T_max {report.t_max}\n"]
    for title, kind in (("Mended by ESM", (False, True)), ("Broken by ESM", (True, False))):
        places = [place for place, (_, greedy, esm) in enumerate(both) if (greedy, esm) == kind]
        parts.append(f"## {title}: {len(places)}\n")
        if len(places) > MOST:
            parts.append(f"The first {MOST} in the order of the questions.\n")
        for place in places[:MOST]:
            parts += _case(report, settings, place, ("greedy", "esm"))
    file = run_dir / "cases" / f"cases_T{report.t_max}.md"
    files.write_whole(file, "\n".join(parts).encode())
    return file


def write_case(report: Report, settings: Settings, run_dir: Path, tag: str) -> Path:
    """cases/<tag>_<methods>_T*.md: these questions with every method."""
    parts = [f"# {tag}: {settings.task.dataset} {report.split}, T_max {report.t_max}\n"]
    if report.test_reads:
        parts.append(f"Reading {report.test_reads} of the test set.\n")
    for place in range(len(report.examples)):
        parts += _case(report, settings, place, list(report.rows))
    file = run_dir / "cases" / f"{tag}_{'-'.join(report.rows)}_T{report.t_max}.md"
    files.write_whole(file, "\n".join(parts).encode())
    return file


def _case(report: Report, settings: Settings, place: int, names: Sequence[str]) -> Iterator[str]:
    example = report.examples[place]
    yield f"### {example.id}\n"
    yield _block(prompts.render(settings.prompt.template, example))
    yield f"Right answer: `{example.gold}`\n"
    for name in names:
        row = report.rows[name][0][place]
        verdict = "right" if row["correct"] else "wrong"
        cost = f"{row['tokens_used']} tokens + {row['probe_tokens_used']} of probes"
        yield f"#### {name}: {verdict}, answered `{row['pred']}` ({cost}, {row['finish_reason']})\n"
        if not row["steps"]:
            yield _block(row["text"])
            continue
        for step in row["steps"]:
            yield from _step(step)
        rest = row["text"][sum(len(step["text"]) for step in row["steps"]) :]
        if rest:
            yield f"The rest, after segment {row['steps'][-1]['m']}, plainly:\n"
            yield _block(rest)


def _step(step: dict[str, Any]) -> Iterator[str]:
    yield f"**Segment {step['m']}**: {_decision(step)}\n"
    if step["candidates"]:
        yield "| offer | cos | Â | gain of confidence | score |\n|---|---|---|---|---|"
        for one in step["candidates"]:
            gain = "–" if one["conf_gain"] is None else f"{one['conf_gain']:+.3f}"
            mark = " ←" if one["name"] == step["chosen"] else ""
            yield f"| `{one['name']}`{mark} | {one['sim']:.3f} | {one['ahat']:.3f} | {gain} | {one['score']:.3f} |"
        yield f"| null | | {step['null_ahat']:.3f} | | |\n"
    yield _block(step["text"])


def _decision(step: dict[str, Any]) -> str:
    if step["chosen"]:
        return (
            f"injected `{step['chosen']}` with the factor {step['chosen_scale']:.3f} (score {step['chosen_score']:.3f})"
        )
    if step["mem_reason"] not in (None, "ok"):
        sim = "" if step["mem_top_sim"] is None else f", nearest {step['mem_top_sim']:.3f}"
        return f"not steered: {step['mem_reason']} ({step['mem_n_entries']} entries{sim})"
    return f"not steered: {step['note']}"


def _block(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}\n"
