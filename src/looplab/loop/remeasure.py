"""Re-read ended runs after a correction of `measure` or the objective; the old values stay in the record."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from looplab.config.files import dump_json, write_atomic
from looplab.errors import LabError
from looplab.judge.base import JudgeState
from looplab.launch.base import Exit
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.flags import best_run
from looplab.loop.judging import StudyJudge, SummaryWriter, record_judgement
from looplab.loop.setup import Setup, resolved_configuration
from looplab.measure.run_metrics import RunMetrics, join_segments, summarise
from looplab.measure.summary import digest, from_dict, objective_value
from looplab.report.archive import archive_run
from looplab.runs import folder
from looplab.untrusted import read_bounded

SUMMARY = re.compile(r"(?:^|/)summary(?:\.\d+)?\.json$")
KEPT = ("cpu_s", "max_rss_mb", "fingerprint", "verdict")
"""Keys that a new summary copies from the old one."""


@dataclass(frozen=True, slots=True)
class Remeasured:
    """A run with its objective before and after it was re-read."""

    run: str
    before: float | None
    after: float | None
    note: str
    """Notes on the run, such as why it has no objective; may be empty."""

    @property
    def changed(self) -> bool:
        return self.before != self.after


def remeasure(setup: Setup, record: StudyLedger, runs: Sequence[RunRow]) -> list[Remeasured]:
    """Re-read these runs, then update the best run, or restart the judge.

    The caller holds the study's lock. Idempotent, so it can be repeated after a crash.
    """
    objective = setup.study.objective
    if objective is not None and record.open(objective.metric, objective.goal, objective.at):
        runs = [record.run(run.id) for run in runs]  # fetched again: `open` has cleared the old objective
    configuration = record.configure(resolved_configuration(setup))
    outputs = folder.study_folder(setup.lab, setup.study.name)
    recorded = record.files_at_end()
    results = []
    for run in runs:
        read_again = _remeasure_import if run.role == Role.IMPORTED else _remeasure_run
        if run.role == Role.IMPORTED or run.status == "ok":
            results.append(read_again(setup, record, run, outputs / run.id, recorded.get(run.id, {})))
    if setup.study.judge is None:
        _find_best(setup, record, outputs)
    elif record.judge_state() is None or any(
        one.changed for one in results if record.run(one.run).role != Role.IMPORTED
    ):
        _judge_again(setup, record, outputs, configuration)
    best = record.best()
    if best is not None:
        folder.point(outputs, "BEST", best.id)
    return results


def _changed_files(run_dir: Path, recorded: Mapping[str, str]) -> str:
    """Return why files of an ended run cannot be trusted, in words; empty if they are as they were recorded."""
    found = []
    for name, sha256 in recorded.items():
        try:
            is_same = folder.hash_file(run_dir / name) == sha256
        except OSError:
            is_same = False
        if not is_same:
            found.append(name)
    found += folder.appeared(run_dir, recorded)
    return f"not read again: {', '.join(found)} has changed since the run ended" if found else ""


def _remeasure_import(
    setup: Setup, record: StudyLedger, run: RunRow, run_dir: Path, recorded: Mapping[str, str]
) -> Remeasured:
    """Re-read the objective of an imported run from its summary, which uses the metric names of `looplab import`."""
    config = setup.study.objective
    name = folder.record_name(run_dir, "summary.json")
    sha256 = recorded.get(name)
    path = run_dir / name
    # After a crash, the summary may be newer than the chain; then a copy of the old one exists.
    copies = [path, *path.parent.glob("summary.*.json")]
    path = next((one for one in copies if sha256 in (None, folder.hash_file(one))), path)
    if path.exists() and sha256 not in (None, folder.hash_file(path)):
        return Remeasured(run.id, run.objective, run.objective, _changed_files(run_dir, {name: sha256 or ""}))
    summary = folder.read_json(run_dir, path.name, strict=False)
    if config is None or not summary:
        return Remeasured(run.id, run.objective, run.objective, "its summary is missing" if not summary else "")
    try:
        value = objective_value(from_dict(summary.get("metrics", {})), config.metric, config.at)
    except (LabError, TypeError, ValueError, AttributeError):  # mean(k) needs rows, which a summary does not have
        value = None
    if value == run.objective:
        return Remeasured(run.id, value, value, "")
    objective = {"metric": config.metric, "goal": config.goal, "at": config.at, "value": value}
    content = dump_json({**summary, "objective": objective}, finite=True)
    path = folder.record_file(run_dir, "summary.json")
    with record.ledger.write():
        old = _keep_old(path, run_dir)
        files = {old: folder.hash_file(run_dir / old) or ""} if old else {}
        files[folder.record_name(run_dir, "summary.json")] = folder.hash_bytes(content)
        record.remeasured(run.id, objective=value, before=run.objective, measured=None, files=files)
        write_atomic(path, content)
    return Remeasured(run.id, run.objective, value, "")


def _remeasure_run(
    setup: Setup, record: StudyLedger, run: RunRow, run_dir: Path, recorded: Mapping[str, str]
) -> Remeasured:
    """Re-read the measurements of a run of this lab, and update its summary and archive."""
    if not run_dir.is_dir():
        return Remeasured(run.id, run.objective, run.objective, "its folder is gone")
    if folder.is_linked(run_dir):
        return Remeasured(run.id, run.objective, run.objective, "its folder is a link, so nothing is written")
    # Summaries are what is made again; a crash may have left one that is newer than the chain.
    inputs = {name: sha256 for name, sha256 in recorded.items() if not SUMMARY.search(name)}
    if changed := _changed_files(run_dir, inputs):
        return Remeasured(run.id, run.objective, run.objective, changed)
    metrics = RunMetrics(setup.study, run_dir)
    exit_ = Exit(run.exit_code, run.signal, started=run.started, ended=run.ended)
    summary, _, value = summarise(run, setup.study, metrics, exit_, lab=setup.lab, run_dir=run_dir)
    if run.role == Role.CONTINUATION and run.parent is not None:
        earlier = folder.read_json(run_dir.parent / run.parent, "summary.json", strict=False)
        value = join_segments(summary, earlier, setup.study.objective)
    path = folder.record_file(run_dir, "summary.json")
    before = folder.read_json(run_dir, "summary.json", strict=False)
    measured = digest(metrics.summariser.result()) if value is not None else None
    content = dump_json(
        {**summary, **{key: before[key] for key in KEPT if key in before}, "measured": measured}, finite=True
    )
    note = "; ".join(summary["notes"])
    if value == run.objective and folder.hash_file(path) == folder.hash_bytes(content):
        return Remeasured(run.id, value, value, note)
    with record.ledger.write():
        old = _keep_old(path, run_dir)
        files = {old: folder.hash_file(run_dir / old) or ""} if old else {}
        files[folder.record_name(run_dir, "summary.json")] = folder.hash_bytes(content)
        record.remeasured(run.id, objective=value, before=run.objective, measured=measured, files=files)
        write_atomic(path, content)
    try:
        archive = archive_run(run_dir, setup.study)
        digest_ = folder.hash_file(archive) if archive is not None else None
        if archive is not None and digest_ is not None:
            record.archived({run.id: {str(archive.relative_to(run_dir)): digest_}})
    except LabError as error:
        note = "; ".join(filter(None, (note, str(error))))
    return Remeasured(run.id, run.objective, value, note)


def _keep_old(path: Path, run_dir: Path) -> str | None:
    """Copy the old summary to `summary.<n>.json`.

    Returns:
        The path of the copy relative to the run folder; None if there is no summary.
    """
    digest = folder.hash_file(path)
    if digest is None:
        return None
    number = 1
    while os.path.lexists(copy := path.with_name(f"summary.{number}.json")):
        if folder.hash_file(copy) == digest:
            break  # copied before a crash
        number += 1
    write_atomic(copy, read_bounded(path, folder.LARGEST_RECORD))
    return str(copy.relative_to(run_dir))


def _find_best(setup: Setup, record: StudyLedger, outputs: Path) -> None:
    """Update the best run of a study without a judge: the one with the best objective that is not void."""
    best = best_run(setup.study, record, setup.conditions, outputs)
    now = record.best()
    if (best and best.id) != (now and now.id):
        with record.ledger.write():
            record.set_best(best.id if best else None, best.objective if best else None)


def _judge_again(setup: Setup, record: StudyLedger, outputs: Path, configuration: str) -> None:
    """Judge all runs from scratch, since earlier verdicts are based on outdated values."""
    judge = StudyJudge(setup.study, record, outputs)
    summaries = SummaryWriter(outputs)
    with record.ledger.write():
        record.restart_judge("runs were measured again")
        if setup.conditions:
            record.set_judge_state({**JudgeState().as_dict(), "conditions": setup.conditions})
        judge.load()
        judgement = judge.evaluate(record.runs_open())
        if judgement is not None:
            record_judgement(record, judgement, configuration, summaries.add)
    summaries.write()


def describe(found: Sequence[Remeasured], metric: str) -> Mapping[str, object]:
    """Return the outcome as plain data."""
    return {
        "metric": metric,
        "runs": [{"run": one.run, "before": one.before, "after": one.after, "note": one.note} for one in found],
        "changed": sum(one.changed for one in found),
    }
