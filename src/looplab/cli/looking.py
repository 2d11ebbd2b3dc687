"""show, logs, diff."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab import signals
from looplab.cli import output
from looplab.cli.labs import LabContext, open_context, recorded_notes
from looplab.config import paths
from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.measure.digits import with_spread
from looplab.runs import folder as run_folder
from looplab.runs.clock import format_seconds
from looplab.runs.logs import LogStream, seek_last_lines
from looplab.untrusted import UntrustedError, open_regular

if TYPE_CHECKING:
    from looplab.report.judged import ReplicatedConfig


def run_status(run: RunRow) -> str:
    """Return how a run ended, else its state."""
    return Role.IMPORTED if run.role == Role.IMPORTED else run.status or run.state


def utc_time(at: float) -> str:
    """Return a Unix time as text, to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def describe_repeat(run: RunRow) -> str:
    """Return `replicate of 0003-x1y2`; empty if the run repeats no other."""
    return f"{run.role} of {run.twin}" if run.twin else ""


def show(folder: Path | None, name: str | None, run_name: str, json: bool) -> None:
    from looplab.decide.belief import recorded_belief
    from looplab.report.facts import ARGUMENTS
    from looplab.report.judged import watched

    context = open_context(folder, name, reading=True)
    run = context.record.run(run_name)
    run_dir = context.outputs / run.id
    summary = run_folder.read_json(run_dir, "summary.json") if run.state == "ended" else {}
    changes = run_folder.read_changes(run_dir)
    about = run_folder.read_json(run_dir, "run.json")
    point = _point_of(context.record, run)
    evidence = context.record.verdicts().get(point.run.id if point else run.id)
    belief = recorded_belief(context.record)
    ids = {one.id for one in point.runs} if point else {run.id}
    believed = next((one for one in belief.best if one.run in ids), None) if belief is not None else None
    if json:
        payload: dict[str, Any] = {
            "run": asdict(run),
            "folder": str(run_dir),
            "about": about,
            "changes": changes,
            "summary": summary,
        }
        payload["belief"] = asdict(believed) if believed is not None else None
        output.print_json({**payload, "verdict": evidence, "point": _point_as_dict(point) if point else None})
        return
    when = utc_time(run.created)
    output.say(f"run {run.id} of {run.study}, round {run.round}, {when}")
    how = f" (exit code {run.exit_code})" if run.exit_code else f" (signal {run.signal})" if run.signal else ""
    duration = f" {'in' if run.state == 'ended' else 'for'} {format_seconds(run.seconds)}" if run.seconds else ""
    output.say(f"  {run_status(run)}{how}{duration}")
    output.say(f"  by {run.proposer}: {run.reason}")
    output.say(f"  from {run.parent or run.base}" + (f", slot {run.slot}" if run.slot else ""))
    output.say(f"  {run_dir}")
    for what, words in (("flags of the call", about.get("call_edits")), (ARGUMENTS, about.get("extra"))):
        if words:
            output.say(f"  {what}: {shlex.join(map(str, words))}")
    if run.twin:
        output.say(f"  {describe_repeat(run)}, seed {run.seed}")
    if point is not None and len(point.runs) > 1:
        output.say(f"  {point.run.id} over all its seeds: {point.shown}")
    if believed is not None and belief is not None:
        rank = ", the best of all configs" if believed is belief.best[0] else ""
        output.say(f"  the model believes: {with_spread(believed.mean, believed.sd)}{rank}")
    if evidence is not None:
        of = f" of {point.run.id}" if point and point.run.id != run.id else ""
        output.say(f"  verdict{of}: {evidence['verdict']}. {evidence['why']}")
        for flag in evidence.get("flags", ()):
            output.say(f"  flag: {flag}")
    for match in watched(context.record):
        if match.run == run.id:
            output.say(f"  watched: {match.rule}: {match.text}" + ("; stopped" if match.stops else ""))
    for note in [*about.get("notes", []), *summary.get("notes", recorded_notes(context.ledger, run))]:
        output.say(f"  note: {note}")
    if changes.get("base"):
        _show_diff(changes["base"], "base", run.id)
    if summary.get("metrics"):
        _show_metrics(summary["metrics"], context.study.measure.groups)


def _point_of(record: StudyLedger, run: RunRow) -> ReplicatedConfig | None:
    """Return the config, with its replicates, that the run belongs to."""
    from looplab.report.judged import points

    found = points(record.runs()).values()
    return next((point for point in found if any(one.id == run.id for one in (*point.runs, *point.copies))), None)


def _point_as_dict(point: ReplicatedConfig) -> dict[str, Any]:
    return {
        "run": point.run.id,
        "runs": [run.id for run in point.runs],
        "mean": point.mean,
        "sd": point.sd,
        "n": len(point.values),
    }


def _show_metrics(metrics: dict[str, Any], groups: Mapping[str, Sequence[str]]) -> None:
    """Print one row per metric: by group (`measure.groups`), then those without a group."""
    keys = ("first", "last", "best", "best_step", "n")
    group_of = {name: group for group, names in groups.items() for name in names if name in metrics}
    order = [*groups, None]
    output.table(
        (*(("group",) if group_of else ()), "metric", *keys),
        [
            (
                *((group_of.get(name, "-"),) if group_of else ()),
                name,
                *(output.number(metrics[name].get(key), 6) for key in keys),
            )
            for name in sorted(metrics, key=lambda name: order.index(group_of.get(name)))
        ],
    )


def logs(folder: Path | None, name: str | None, run_name: str, follow: bool, lines: int | None, json: bool) -> None:
    context = open_context(folder, name, reading=True)
    run = context.record.run(run_name)
    path = run_folder.record_file(context.outputs / run.id, "train.log")
    while not path.exists():
        if not follow or context.record.run(run.id).state == "ended":
            raise LabError(
                f"run {run.id} ({run.status or run.state}) has printed nothing", hint=f"see `looplab show {run.id}`"
            )
        time.sleep(0.1)
    if follow and not json:
        signals.warn_ctrl_c(output.warn, f"SIGTERM (`kill {os.getpid()}`)")
    try:
        with open_regular(path, follow=False) as file:
            if lines is not None:
                seek_last_lines(file, lines)
            stream = LogStream(file)
            if json:
                text = "".join(stream.portions(final=True))
                output.print_json({"run": run.id, "path": str(path), "log": text})
                return
            over = printed = False
            while not over:
                # Check before reading the log to its end. `exit.json` exists even if no engine has updated the ledger.
                over = not follow or (path.parent / "exit.json").exists() or context.record.run(run.id).state == "ended"
                grown = output.show_growth(stream, final=over)
                printed = printed or grown
                if not grown and not over:
                    time.sleep(0.1)
            if not printed:
                yet = "" if context.record.run(run.id).state == "ended" else " yet"
                output.warn(f"run {run.id} ({run.status or run.state}) has printed nothing{yet}")
    except UntrustedError as error:
        raise LabError(str(error), file=path) from error


def diff(folder: Path | None, name: str | None, a: str, b: str, json: bool) -> None:
    context: LabContext | None = None
    sides = []
    names = []
    arguments: list[str | None] = []
    for side in (a, b):
        if Path(side).is_file():
            sides.append(read_config(Path(side)))
            names.append(side)
            arguments.append(None)
        else:
            if Path(side).suffix or os.sep in side:  # the name of a file, not of a run
                read_config(Path(side))
            context = context or open_context(folder, name, reading=True)
            run = context.record.run(side)
            names.append(run.id)
            sides.append(context.record.config_of(run, context.outputs / run.id))
            extra = run_folder.read_json(context.outputs / run.id, "run.json", strict=False).get("extra") or []
            arguments.append(shlex.join(map(str, extra)) or None)
    changes = paths.diff(*sides)
    if arguments[0] != arguments[1]:
        from looplab.report.facts import ARGUMENTS

        sides_of = zip(("old", "new"), arguments, strict=True)
        changes[ARGUMENTS] = {side: text for side, text in sides_of if text is not None}
    if json:
        output.print_json({"a": names[0], "b": names[1], "changes": changes})
    elif not changes:
        output.say("the configs are the same")
    else:
        _show_diff(changes, *names)


def _show_diff(changes: dict[str, Any], a: str, b: str) -> None:
    output.table(
        ("key", a, b),
        [
            (key, output.cell(c["old"]) if "old" in c else "-", output.cell(c["new"]) if "new" in c else "-")
            for key, c in changes.items()
        ],
    )
