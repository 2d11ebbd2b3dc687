"""report, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_place
from looplab.config.files import write_atomic
from looplab.errors import LabError
from looplab.report import compare as comparing
from looplab.report import plots, reports, wording
from looplab.report.facts import study_facts

SPARK_METRICS = 8
"""Metrics whose curves are drawn in a terminal."""


def report(folder: Path | None, name: str | None, to: Path | None, json: bool) -> None:
    place = open_place(folder, name, reading=True)
    facts = study_facts(place.lab.folder, place.study, place.record)
    try:
        written = reports.write(facts, place.study, plots=True, to=to)
    except OSError as error:
        hint = "`--to FOLDER` writes the reports elsewhere" if to is None else None
        raise LabError(f"cannot write: {error.strerror or error}", file=to or facts.folder, hint=hint) from None
    notes = [*facts.notes, *([] if plots.available() else [plots.MISSING])]
    if json:
        best = facts.best
        told = {
            "study": facts.study,
            "files": [str(path) for path in written],
            "runs": len(facts.runs),
            "best": best and {"id": best.row.id, "objective": best.objective},
            "notes": notes,
        }
        output.print_json(told)
        return
    for path in written:
        output.say(str(path))
    for note in notes:
        output.say(note)


def compare(folder: Path | None, name: str | None, runs: Sequence[str], html: Path | None, json: bool) -> None:
    place = open_place(folder, name, reading=True)
    comparison = comparing.compare(place.outputs, place.study, place.record, runs)
    if html is not None:
        try:
            write_atomic(html, comparing.compare_page(comparison).encode("utf-8", "replace"))
        except OSError as error:
            raise LabError(f"cannot write {html}: {error.strerror or error}", hint="give a file in a folder") from None
    if json:
        output.print_json(_told(comparison, html))
        return
    ids = [run.id for run in comparison.runs]
    if comparison.config:
        output.table(
            ("key", *ids), [(key, *map(_cell, values)) for key, values in comparison.config.items()], title="config"
        )
    else:
        output.say("the configs are the same")
    output.say()
    if comparison.metrics:
        output.table(("metric", "value", *ids), _rows(comparison), title="metrics")
    else:
        output.say("the runs have no metric in common")
    _draw(comparison)
    if html is not None:
        output.say()
        output.say(str(html))


def _cell(value: Any) -> str:
    return "-" if value is comparing.MISSING else output.cell(value)


def _rows(comparison: comparing.RunComparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for compared in comparison.metrics:
        last = [output.number(value) for value in compared.last]
        for place in range(1, len(last)):
            delta = compared.delta(place)
            last[place] += "" if delta is None else f" ({wording.signed(delta)})"
        rows.append((compared.metric, "last", *last))
        if compared.best != compared.last:
            rows.append(("", f"best ({compared.goal})", *(output.number(value) for value in compared.best)))
    return rows


def _draw(comparison: comparing.RunComparison) -> None:
    rows: list[tuple[str, ...]] = []
    for compared in comparison.metrics:
        drawn = comparing.sparks(comparison, compared.metric)
        if any(drawn):
            rows += [
                (compared.metric if place == 0 else "", run.id, line)
                for place, (run, line) in enumerate(zip(comparison.runs, drawn, strict=True))
            ]
        if len(rows) >= SPARK_METRICS * len(comparison.runs):
            break
    if rows:
        output.say()
        output.table(("metric", "run", "curve"), rows, title="curves, each metric on axes of its own")


def _told(comparison: comparing.RunComparison, html: Path | None) -> dict[str, Any]:
    return {
        "study": comparison.study,
        "runs": [asdict(run) for run in comparison.runs],
        "config": {
            key: {
                run.id: value
                for run, value in zip(comparison.runs, values, strict=True)
                if value is not comparing.MISSING
            }
            for key, values in comparison.config.items()
        },
        "metrics": {
            compared.metric: {
                "goal": compared.goal,
                "runs": {
                    run.id: {"last": compared.last[i], "best": compared.best[i], "delta": compared.delta(i)}
                    for i, run in enumerate(comparison.runs)
                },
            }
            for compared in comparison.metrics
        },
        "html": None if html is None else str(html),
    }
