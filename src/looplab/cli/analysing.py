"""analyze offline, analyze wandb, fetch-config: runs of other tools, in folders or on W&B."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import MeasureConfig, find_lab, load_lab
from looplab.errors import LabError
from looplab.report.wording import plural

COLUMNS = 5
"""Number of metrics in a table; the JSON has all of them."""
NO_METRICS = "no readable metrics"
RUN_FILES = "wandb/, tfevents, metrics.jsonl, a progress or metrics CSV, or trainer_summary.json"
_RESERVED = ("steps", "note", "name", "state", "url")
"""Keys of a run's entry that are not metrics."""
_KEYWORDS = (
    frozenset({"success", "solved"}),
    frozenset({"reward", "rewards", "return", "returns", "score"}),
    frozenset({"accuracy", "acc"}),
    frozenset({"loss"}),
)
"""Words in the names of metrics that people look for, the most important first."""

Summaries = dict[str, dict[str, Any]]
"""Run → metric → its summary; also `steps` and other reserved keys."""


def offline(outputs_root: Path, limit: int, out_json: Path | None, json: bool) -> None:
    from looplab.measure.folders import FolderReading, find_runs, summarise_many
    from looplab.measure.summary import to_dict

    if not outputs_root.is_dir():
        raise LabError(f"there is no folder {outputs_root}", hint="--outputs-root names the folder with the runs")
    measure, objectives = _lab_names()
    reading = FolderReading(aliases=measure.aliases, goals=measure.goals)
    found = sorted(find_runs(outputs_root), key=lambda run: _last_change(run, reading), reverse=True)
    runs = found[:limit]
    summaries: Summaries = {}
    for run, metrics in summarise_many(runs, reading).items():
        last = max((m.last_step for m in metrics.values() if m.last_step is not None), default=None)
        summaries[str(run)] = _entry(to_dict(metrics), last)
    if not summaries:
        raise LabError(f"no runs found below {outputs_root}", hint=f"a run folder contains {RUN_FILES}")
    _print_summaries(summaries, _choose_columns(summaries, objectives, measure.aliases), out_json, json)
    if not json and len(found) > limit:
        output.say(f"the newest {limit} of {len(found)} folders; --limit shows more")


def wandb(entity: str, project: str, limit: int, out_json: Path | None, json: bool) -> None:
    from looplab.measure.summary import to_dict
    from looplab.measure.wandb_online import fetch_runs

    measure, objectives = _lab_names()
    summaries: Summaries = {}
    for run in fetch_runs(entity, project, limit, measure.aliases, measure.goals):
        about = {"name": run.name, "state": run.state, "url": run.url}
        summaries[f"{entity}/{project}/{run.id}"] = _entry(to_dict(run.metrics), run.steps) | about
    if not summaries:
        raise LabError(f"{entity}/{project} has no runs")
    _print_summaries(summaries, _choose_columns(summaries, objectives, measure.aliases), out_json, json)


def fetch_config(entity: str, project: str, runs: Sequence[str], out_dir: Path, json: bool) -> None:
    from looplab.measure.wandb_online import fetch_config as fetch

    wrong = next((run for run in runs if not re.fullmatch(r"[\w.-]+", run)), None)
    if wrong is not None:
        raise LabError(f"{wrong!r} is not a run id", hint="the id is the last part of the run's URL")
    fetched = []
    for run in dict.fromkeys(runs):
        config = fetch(entity, project, run)
        path = out_dir / f"fromwandb_{run}.json"
        _write_json(path, config)
        fetched.append({"path": str(path), "run": f"{entity}/{project}/{run}", "config": config})
        if not json:
            output.say(str(path))
    if json:
        output.print_json(fetched[0] if len(fetched) == 1 else {"runs": fetched})


def _last_change(run: Path, reading: Any) -> float:
    """Time of the run's last measurement, in seconds since the epoch."""
    times = [os.stat(source.path).st_mtime for source in reading.reader(run).sources() if source.path.exists()]
    return max(times, default=run.stat().st_mtime)


def _entry(metrics: Mapping[str, Any], steps: float | None) -> dict[str, Any]:
    """Return the flat entry of a run: metric → summary, the number of steps, and a note if there are no metrics."""
    entry: dict[str, Any] = {f"metric:{name}" if name in _RESERVED else name: value for name, value in metrics.items()}
    entry["steps"] = None if steps is None else int(steps)
    if not metrics:
        entry["note"] = NO_METRICS
    return entry


def _print_summaries(summaries: Summaries, shown: Sequence[str], out_json: Path | None, json: bool) -> None:
    if out_json is not None:
        _write_json(out_json, summaries)
    if json:
        output.print_json(summaries)
        return
    rows = []
    for name, entry in summaries.items():
        note = entry.get("note")
        cells = [note, *[""] * (len(shown) - 1)] if note else [_cell(entry.get(metric)) for metric in shown]
        rows.append((name, "-" if entry["steps"] is None else str(entry["steps"]), *map(str, cells)))
    output.table(("run", "steps", *(f"{metric} (last / best)" for metric in shown)), rows)
    if out_json is not None:
        output.say(f"{plural(len(summaries), 'run')} written to {out_json}")


def _lab_names() -> tuple[MeasureConfig, list[str]]:
    """Return the aliases and goals of the current lab's studies, and their objectives; empty outside a lab."""
    try:
        folder = find_lab(Path.cwd())
    except LabError:
        return MeasureConfig(), []
    studies = load_lab(folder).studies.values()
    aliases = {name: others for study in studies for name, others in study.measure.aliases.items()}
    goals = {name: goal for study in studies for name, goal in study.measure.goals.items()}
    objectives = [study.objective.metric for study in studies if study.objective is not None]
    return MeasureConfig(aliases=aliases, goals=goals), objectives


def _choose_columns(summaries: Summaries, objectives: Sequence[str], aliases: Mapping[str, Any]) -> list[str]:
    """Choose the metrics of the table; metrics that fewer than half of the runs have come last.

    Objectives come first, then what people look for in any training (success, reward, accuracy, loss), then metrics
    with aliases, then the most common metrics, the longest curves first.
    """
    order = {name: rank for rank, name in enumerate(aliases)}
    counts: Counter[str] = Counter()
    points: Counter[str] = Counter()
    for entry in summaries.values():
        for name, summary in entry.items():
            if name not in _RESERVED:
                counts[name] += 1
                points[name] += summary["n"]
    common = max(counts.values(), default=0) / 2

    def rank(name: str) -> tuple[bool, bool, int, int, int, int, str]:
        rare, canonical = counts[name] < common, order.get(name, len(order))
        return rare, name not in objectives, _interest(name), canonical, -counts[name], -points[name], name

    return sorted(counts, key=rank)[:COLUMNS] or ["metrics"]


def _interest(metric: str) -> int:
    """Rank a metric by the words in the last part of its name; 0 is the most important."""
    words = re.split(r"[^a-z0-9]+", metric.rsplit("/", 1)[-1].lower())
    return next((rank for rank, keywords in enumerate(_KEYWORDS) if not keywords.isdisjoint(words)), len(_KEYWORDS))


def _cell(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return "-"
    last = "nan" if summary["last_is_nan"] else output.number(summary["last"])
    return f"{last} / {output.number(summary['best'])}"


def _write_json(path: Path, data: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, dump_json(data))
    except OSError as error:
        raise LabError(f"cannot write: {error.strerror or error}", file=path) from error
