"""What `looplab try` prints about a run: how it ended, what it measured, and what to know about it."""

from __future__ import annotations

import os
import re

from looplab.cli import output
from looplab.config.lab import LAB_FILE, RUN_FOLDER, StudyConfig
from looplab.onboard.base import Script
from looplab.onboard.objective import rank_objectives
from looplab.onboard.output_folder import output_words
from looplab.onboard.trial import Comparison, Observation
from looplab.onboard.written import explain_written, writes_beside_itself
from looplab.runs.clock import format_seconds

SHOWN = 12
"""Metrics that are listed."""


def show_run(run: Observation, study: StudyConfig, script: Script | None) -> None:
    """Print what a run showed: how it ended, what it measured, and what to know about it."""
    seconds = format_seconds(run.seconds)
    if run.status in ("timeout", "stopped"):
        head = f"stopped after {format_seconds(run.limit_s) if run.status == 'timeout' else seconds}"
        head += ": the metrics so far" if run.metrics else ""
    else:
        head = f"{run.status} in {seconds}"
    facts = []
    if run.peak_memory_mb is not None and run.status != "failed":
        facts.append(f"peak memory {_size(run.peak_memory_mb)}")
    if run.full_run_s is not None and run.seconds and abs(run.full_run_s - run.seconds) > 0.05 * run.seconds:
        facts.append(f"a full run takes about {format_seconds(run.full_run_s)}")
    output.say("; ".join([head, *facts]))
    if run.status == "failed":
        _show_failure(run)
    elif not run.metrics:
        output.say(explain_silence(run))
    if run.metrics:
        _show_metrics(run, study)
    if run.ended_by is not None:
        output.say(explain_stop(run))
    if run.wrote and not run.must_be_new:
        beside = script is not None and writes_beside_itself(script)
        output.say(explain_written(run.wrote, in_run_dir=study.launch.cwd == RUN_FOLDER, beside_script=beside))


def explain_new_folder(run: Observation, study: StudyConfig, script: Script | None) -> str:
    """Return a sentence about an output folder that must not exist, with what to do."""
    made = [one.file for one in run.wrote if one.is_new and "/" in one.file]
    if run.diagnosis is not None and (named := re.search(r"its output (\S+) already exists", run.diagnosis.what)):
        made = [os.path.relpath(named[1]) if os.path.isabs(named[1]) else named[1]]
    words = output_words(script, made) if script is not None and made else []
    if words:
        remedy = f"add {', '.join(words)} to launch.command in {LAB_FILE}"
    elif study.launch.cwd != RUN_FOLDER:
        remedy = f"set launch.cwd: run in {LAB_FILE}, so that each run has its own"
    else:
        remedy = f"pass {{out_dir}} for it in launch.command, with launch.output_dir: absent, in {LAB_FILE}"
    place = f" ({made[0].partition('/')[0]})" if made else ""
    return f"its output folder{place} must not exist when it starts, so the next run would fail: {remedy}"


def _show_failure(run: Observation) -> None:
    if run.diagnosis is not None:
        output.say(str(run.diagnosis))
    if not run.last_line:
        output.say("it printed nothing")
        return
    if run.diagnosis is None or run.last_line not in run.diagnosis.what:
        output.say(f"its last line: {run.last_line}")
    if run.diagnosis is None or run.diagnosis.kind == "exception":
        output.say(f"full output: looplab logs {run.run} --study {run.study}")


def _rate(value: float | None) -> str:
    return f"{value:.0f}" if value is not None and value >= 10 else output.number(value, 2)


def _size(megabytes: float) -> str:
    return f"{megabytes / 1024:.1f} GB" if megabytes >= 1024 else f"{megabytes:.0f} MB"


def explain_silence(run: Observation) -> str:
    """Return a sentence about a run that measured nothing, with what to do."""
    if run.status == "stopped":
        return "it has measured nothing yet"
    said = f"its last line: {run.last_line}" if run.last_line else "it printed nothing"
    if run.status == "timeout":
        return f"no metrics so far ({said}). Give it longer: looplab try --time 30m"
    if run.measured_elsewhere:
        return f"it measured nothing in its run folder, but wrote {run.measured_elsewhere[0]}"
    if run.unread:
        said = f"it wrote {run.unread[0]}, a format that looplab does not read"
    return (
        f"looplab found no metrics ({said}). Let it print `name: value` or write metrics.jsonl, CSV, "
        "TensorBoard or W&B files; for another format, set measure.stdout in lab.yaml"
    )


def explain_stop(run: Observation) -> str:
    """Return a sentence about how a run ended when its time was over."""
    after = format_seconds(run.ended_after_s)
    if run.ended_by == "SIGKILL":
        return f"it ignored SIGTERM and was killed after {after} (launch.grace)"
    if run.ended_by == "itself":
        return f"it exited {after} after SIGTERM"
    return f"SIGTERM ended it within {after}"


def _show_metrics(run: Observation, study: StudyConfig) -> None:
    objective = study.objective.metric if study.objective is not None else None
    hidden = study.holdout.metric if study.holdout is not None else None
    metrics = [metric for metric in run.metrics if metric.name != hidden]
    ranked = {guess.metric: i for i, guess in enumerate(rank_objectives(metrics, run.settings))}
    rows = sorted(metrics, key=lambda metric: (metric.name != objective, ranked.get(metric.name, len(metrics))))
    output.table(
        ("metric", "in", "points", "per min", "first", "last", "noise"),
        [
            (
                metric.name,
                metric.source,
                str(metric.points),
                _rate(metric.per_minute) if metric.points > 1 else "-",
                output.number(metric.first, 5),
                output.number(metric.last, 5),
                "-" if metric.noise is None else f"{100 * metric.noise:.0f}%",
            )
            for metric in rows[:SHOWN]
        ],
    )
    if len(rows) > SHOWN:
        output.say(f"and {len(rows) - SHOWN} more: looplab show {run.run} --study {run.study}")


def explain_comparison(result: Comparison, run: Observation, other: Observation) -> str:
    """Return a sentence about what two runs say about the script."""
    changed = sorted(
        name for name in {*run.settings, *other.settings} if run.settings.get(name) != other.settings.get(name)
    )
    names = ", ".join(f"{name} {_value(other, name)} → {_value(run, name)}" for name in changed[:3])
    if result == "same config, same numbers":
        return f"the same config as {other.run}, and exactly the same numbers: the run is reproducible"
    if result == "same config, other numbers":
        return (
            f"the same config as {other.run}, but different numbers: it is not seeded or not deterministic; "
            "a single run says little"
        )
    if result == "no difference":
        return (
            f"{names}: the same numbers as {other.run}, to the last digit. The change does not reach the trainer: "
            "does the script use it?"
        )
    return f"{names}: different numbers than {other.run}, so the change reaches the trainer"


def _value(run: Observation, name: str) -> str:
    return output.cell(run.settings[name]) if name in run.settings else "-"
