"""Write the reports of a study atomically: `report.md`, `report.html` and `summary.json`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from looplab.config.files import write_atomic
from looplab.config.lab import StudyConfig
from looplab.ledger.view import StudyView
from looplab.measure.base import Batch
from looplab.report import curves, html, markdown
from looplab.report.facts import RunFacts, StudyFacts, study_facts
from looplab.report.importance import LABEL, Importance, importance
from looplab.report.judged import Judged
from looplab.untrusted import dump_json

MAX_FOREST_POINTS = 200
"""Maximum number of points for which fANOVA is fast enough."""
MARKDOWN, HTML, SUMMARY = "report.md", "report.html", "summary.json"


def write_reports(lab: Path, study: StudyConfig, record: StudyView) -> list[Path]:
    """Write all reports without plots; return their paths."""
    return write(study_facts(lab, study, record), study)


def write(facts: StudyFacts, study: StudyConfig, *, plots: bool = False, to: Path | None = None) -> list[Path]:
    """Write all reports; return their paths.

    Args:
        plots: Whether to write PNG plots too, if matplotlib is installed.
        to: The folder; None: the study's own, which exists.
    """
    folder = to or facts.folder
    if to is not None:
        folder.mkdir(parents=True, exist_ok=True)
    shares, label = knob_importance(facts, thorough=plots)
    drawn, seeds = _read_curves(facts, study)
    pictures: list[Path] = []
    if plots:
        from looplab.report.plots import write_plots

        pictures = write_plots(facts, shares, drawn, folder)
    names = [str(picture.relative_to(folder)) for picture in pictures]
    contents = {
        MARKDOWN: markdown.render(facts, shares, names, label),
        HTML: html.study_page(facts, shares, drawn, label, seeds=seeds),
        SUMMARY: summary(facts),
    }
    for name, content in contents.items():
        write_atomic(folder / name, content.encode("utf-8", "replace"), sync=False)
    return [*(folder / name for name in contents), *pictures]


def study_page(facts: StudyFacts, study: StudyConfig, *, shared: bool = False) -> str:
    """Return the page of a study; `shared`: for people who do not have the run folders, so nothing links to them."""
    shares, label = knob_importance(facts)
    drawn, seeds = _read_curves(facts, study)
    return html.study_page(facts, shares, drawn, label, seeds=seeds, shared=shared)


def _read_curves(facts: StudyFacts, study: StudyConfig) -> tuple[dict[str, Batch], dict[str, list[Batch]]]:
    """Return the curves of some configs, and of their replicates: each config is one line, its seeds are a band."""
    drawn = curves.read_drawn(replace(facts, runs=tuple(facts.entries)), study)
    return drawn, curves.read_seeds(facts, study, list(drawn))


def knob_importance(facts: StudyFacts, *, thorough: bool = False) -> tuple[Importance, str]:
    """Return the importance of each knob, with one data point per config, and the label of the method.

    fANOVA takes seconds, so it is used only for reports that a user asked for (`thorough`), not after every run.
    """
    entries = facts.entries
    values = {knob.key: [run.knobs.get(knob.key) for run in entries] for knob in facts.varying}
    means = [run.mean for run in entries]
    if thorough and len(facts.measured) <= MAX_FOREST_POINTS:
        from looplab.report import fanova

        found = fanova.fanova(values, means)
        if found is not None:
            return found, fanova.LABEL
    return importance(values, means), LABEL


def summary(facts: StudyFacts) -> str:
    """Return all runs as JSON, one line per run, so that it can be searched by line."""
    head: dict[str, Any] = {
        "study": facts.study,
        "at": facts.at,
        "objective": {
            **{"metric": facts.metric, "goal": facts.goal, "at": facts.moment},
            **({"then": facts.tie_break.model_dump()} if facts.tie_break else {}),
        }
        if facts.metric
        else None,
        "best": facts.best.row.id if facts.best else None,
        "counts": facts.counts(),
        "judge": _judge(facts.judge) if facts.judge else None,
        "alarms": list(facts.alarms),
        "used": {part.name: part.used for part in facts.budget},
    }
    lines = [f"  {dump_json(key)}: {dump_json(value)}," for key, value in head.items()]
    runs = ",\n".join(f"    {dump_json(run.row.id)}: {dump_json(_summary(run))}" for run in facts.runs)
    return "\n".join(["{", *lines, '  "runs": {' + ("\n" + runs + "\n  " if runs else "") + "}", "}"]) + "\n"


def _judge(judge: Judged) -> dict[str, Any]:
    return {
        "headline": judge.headline,
        "champion": judge.champion,
        "base": judge.base,
        "gain": asdict(judge.gain) if judge.gain else None,
        "sigma": judge.sigma,
        "noise_runs": judge.noise_runs,
        "verdicts": judge.counts,
        "alpha": judge.alpha,
        "spent": judge.spent,
        "held_out": judge.held_out,
    }


def _summary(run: RunFacts) -> dict[str, Any]:
    row = run.row
    return {
        "n": row.n,
        "round": row.round,
        "by": row.proposer,
        "parent": row.parent,
        "status": run.status,
        "objective": run.objective,
        "repeats": run.into,
        "mean": run.mean,
        "sd": run.sd,
        "measured": run.measured,
        "verdict": row.verdict,
        "seconds": None if row.seconds is None else round(row.seconds, 3),
        "knobs": run.knobs,
        "metrics": {
            name: {key: getattr(metric, key) for key in ("first", "last", "best", "best_step", "n")}
            for name, metric in run.metrics.items()
        },
        "wandb": run.wandb,
    }
