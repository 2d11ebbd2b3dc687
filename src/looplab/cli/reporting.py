"""report, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_context, open_for_reading, open_lab
from looplab.config.files import write_atomic
from looplab.errors import LabError
from looplab.ledger.view import StudyView
from looplab.report import compare as comparing
from looplab.report import html as pages
from looplab.report import plots, reports, wording
from looplab.report.facts import study_facts
from looplab.runs.folder import make_study_folder

SPARK_METRICS = 8
"""Number of metrics whose curves are drawn in the terminal."""


def report(folder: Path | None, name: str | None, to: Path | None, json: bool) -> None:
    context = open_context(folder, name, reading=True)
    facts = study_facts(context.lab.folder, context.study, context.record)
    try:
        if to is None:
            make_study_folder(facts.folder)
        written = reports.write(facts, context.study, plots=True, to=to)
    except OSError as error:
        hint = "`--to FOLDER` writes the reports elsewhere" if to is None else None
        raise LabError(f"cannot write: {error.strerror or error}", file=to or facts.folder, hint=hint) from None
    notes = [*facts.notes, *([] if plots.available() else [plots.MISSING])]
    files = [str(path) for path in written]
    best = facts.best
    data = {
        "study": facts.study,
        "files": files,
        "runs": len(facts.runs),
        "best": best and {"id": best.row.id, "objective": best.objective},
        "notes": notes,
    }
    output.answer(json, data, *files, *notes)


def export_pages(folder: Path | None, to: Path, json: bool) -> None:
    """Write the current live page, a report of each study, and an index, for people without access to the lab."""
    from looplab.cli import serving

    lab = open_lab(folder)
    ledger = open_for_reading(lab)
    written, listed = [], []
    try:
        to.mkdir(parents=True, exist_ok=True)
        for study in lab.studies.values():
            facts = study_facts(lab.folder, study, StudyView(ledger, study.name))
            page = to / f"{study.name}.html"
            write_atomic(page, reports.study_page(facts, study, shared=True).encode("utf-8", "replace"))
            written.append(page)
            listed.append(facts)
        index, live = to / "index.html", to / "live.html"
        write_atomic(live, serving.snapshot(lab).encode("utf-8", "replace"))
        write_atomic(index, pages.index_page(lab.folder.name, listed, live=live.name).encode("utf-8", "replace"))
    except OSError as error:
        raise LabError(f"cannot write: {error.strerror or error}", file=to) from None
    files = [str(path) for path in (index, live, *written)]
    output.answer(json, {"files": files}, *files)


def compare(folder: Path | None, name: str | None, runs: Sequence[str], html: Path | None, json: bool) -> None:
    context = open_context(folder, name, reading=True)
    comparison = comparing.compare(context.outputs, context.study, context.record, runs)
    if html is not None:
        try:
            write_atomic(html, comparing.compare_page(comparison).encode("utf-8", "replace"))
        except OSError as error:
            raise LabError(f"cannot write {html}: {error.strerror or error}", hint="use an existing folder") from None
    if json:
        output.print_json(_as_dict(comparison, html))
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
        output.table(("metric", "value", *ids), _metric_rows(comparison), title="metrics")
    else:
        output.say("the runs have no metric in common")
    _print_curves(comparison)
    if html is not None:
        output.say()
        output.say(str(html))


def _cell(value: Any) -> str:
    return "-" if value is comparing.MISSING else output.cell(value)


def _metric_rows(comparison: comparing.RunComparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for compared in comparison.metrics:
        last = [output.number(value) for value in compared.last]
        for i in range(1, len(last)):
            delta = compared.delta(i)
            last[i] += "" if delta is None else f" ({wording.signed(delta)})"
        rows.append((compared.metric, "last", *last))
        if compared.best != compared.last:
            rows.append(("", f"best ({compared.goal})", *(output.number(value) for value in compared.best)))
    return rows


def _print_curves(comparison: comparing.RunComparison) -> None:
    rows: list[tuple[str, ...]] = []
    for compared in comparison.metrics:
        drawn = comparing.sparks(comparison, compared.metric)
        if any(drawn):
            rows += [
                (compared.metric if i == 0 else "", run.id, line)
                for i, (run, line) in enumerate(zip(comparison.runs, drawn, strict=True))
            ]
        if len(rows) >= SPARK_METRICS * len(comparison.runs):
            break
    if rows:
        output.say()
        output.table(("metric", "run", "curve"), rows, title="curves, each metric on its own axes")


def _as_dict(comparison: comparing.RunComparison, html: Path | None) -> dict[str, Any]:
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
