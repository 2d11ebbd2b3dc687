"""Writing the reports of a study: `report.md`, `report.html` and `summary.json`, each whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from looplab.config.files import write_atomic
from looplab.config.lab import Study
from looplab.ledger.study import StudyLedger
from looplab.report import curves, html, markdown
from looplab.report.gather import RunFacts, StudyFacts, gather
from looplab.report.importance import Importance, importance
from looplab.report.wording import to_json

MARKDOWN, HTML, SUMMARY = "report.md", "report.html", "summary.json"


def write_reports(lab: Path, study: Study, record: StudyLedger, *, plots: bool = False) -> list[Path]:
    """Write them all and give their paths; with `plots` pictures too, where matplotlib is there."""
    return write(gather(lab, study, record), study, plots=plots)


def write(facts: StudyFacts, study: Study, *, plots: bool = False) -> list[Path]:
    """As `write_reports`, of facts that are gathered already."""
    folder = facts.folder
    folder.mkdir(parents=True, exist_ok=True)
    shares = knob_importance(facts)
    drawn = curves.read_drawn(facts, study)
    pictures: list[Path] = []
    if plots:
        from looplab.report.plots import write_plots

        pictures = write_plots(facts, shares, drawn)
    names = [str(picture.relative_to(folder)) for picture in pictures]
    contents = {
        MARKDOWN: markdown.render(facts, shares, names),
        HTML: html.study_page(facts, shares, drawn),
        SUMMARY: summary(facts),
    }
    for name, content in contents.items():
        write_atomic(folder / name, content.encode("utf-8", "replace"), sync=False)
    return [*(folder / name for name in contents), *pictures]


def knob_importance(facts: StudyFacts) -> Importance:
    values = {knob.key: [run.knobs.get(knob.key) for run in facts.runs] for knob in facts.varying}
    return importance(values, [run.objective for run in facts.runs])


def summary(facts: StudyFacts) -> str:
    """All runs as JSON, a line for each, so that it can be searched by line too."""
    head: dict[str, Any] = {
        "study": facts.study,
        "at": facts.at,
        "objective": {"metric": facts.metric, "goal": facts.goal, "at": facts.moment} if facts.metric else None,
        "best": facts.best.row.id if facts.best else None,
        "counts": facts.counts(),
        "used": {part.name: part.used for part in facts.budget},
    }
    lines = [f"  {to_json(key)}: {to_json(value)}," for key, value in head.items()]
    runs = ",\n".join(f"    {to_json(run.row.id)}: {to_json(_summary(run))}" for run in facts.runs)
    return "\n".join(["{", *lines, '  "runs": {' + ("\n" + runs + "\n  " if runs else "") + "}", "}"]) + "\n"


def _summary(run: RunFacts) -> dict[str, Any]:
    row = run.row
    return {
        "n": row.n,
        "round": row.round,
        "by": row.proposer,
        "parent": row.parent,
        "status": run.status,
        "objective": run.objective,
        "verdict": row.verdict,
        "seconds": None if row.seconds is None else round(row.seconds, 3),
        "knobs": run.knobs,
        "metrics": {
            name: {key: getattr(metric, key) for key in ("first", "last", "best", "best_step", "n")}
            for name, metric in run.metrics.items()
        },
        "wandb": run.wandb,
    }
