"""status, show, logs, diff."""

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
from looplab.agents.account import Account, account_of
from looplab.cli import output
from looplab.cli.labs import LabContext, find_study, open_context, open_for_reading, open_lab, open_record
from looplab.config import paths
from looplab.config.files import read_config
from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.ledger.ledger import GENESIS, Ledger, has_ledger
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.versions import read_versions
from looplab.ledger.view import JOBS_SUFFIX, BudgetUsage, RunRow
from looplab.loop.lock import engine_pid
from looplab.loop.place import find_move
from looplab.measure.digits import with_spread
from looplab.pipeline.overview import pipelines_of
from looplab.report.wording import plural
from looplab.runs import folder as run_folder
from looplab.runs.clock import format_seconds
from looplab.runs.folder import record_folder, run_folders, study_folder
from looplab.runs.logs import LogStream, seek_last_lines
from looplab.untrusted import UntrustedError, open_regular

if TYPE_CHECKING:  # slow imports, which most calls of `status` do not need
    from looplab.report.judged import Judged, ReplicatedConfig

LATEST = 8
"""Runs in the table of `status`, and unusable agent calls in its JSON."""
RECENT = 12 * LATEST
"""Runs among which the latest are found that are not replicates."""


def status(folder: Path | None, name: str | None, json: bool) -> None:
    lab = open_record(folder) if name is None else open_lab(folder)
    ledger = open_for_reading(lab) if has_ledger(lab.ledger_path) else None
    studies = [find_study(lab, name)] if name else list(lab.studies.values())
    if name is None and ledger is not None:
        known = ledger.studies() - set(lab.studies)
        studies += [find_study(lab, study + JOBS_SUFFIX) for study in lab.studies if study + JOBS_SUFFIX in known]
    all_facts = [_study_status(lab.folder, study, ledger) for study in studies]
    pipelines, suites = pipelines_of(ledger, lab.folder, name) if ledger else ([], [])
    versions = read_versions(ledger) if ledger and name is None else []
    if json:
        seq, digest = ledger.head() if ledger else (0, GENESIS)
        head = {"ledger": ledger.id() if ledger else None, "seq": seq, "hash": digest}
        output.print_json({"lab": str(lab.folder), "studies": all_facts, "pipelines": pipelines, "suites": suites,
                           "versions": versions, "record": head})  # fmt: skip
        return
    for study, facts in zip(studies, all_facts, strict=True):
        engine = _describe_engine(facts["engine"])
        output.say(f"study {study.name}: {engine}")
        if ledger is None or not facts["counts"]:
            folders = len(list(run_folders(study_folder(lab.folder, study.name))))
            if folders and facts["engine"] is None:
                output.say(
                    f"  {plural(folders, 'run folder')} but no runs in the ledger; `looplab reindex` rebuilds it\n"
                )
                continue
            waiting = f"; {plural(facts['waiting'], 'proposal')} waiting" if facts["waiting"] else ""
            output.say(f"  no runs yet{waiting}; `looplab plan` shows what would run, `looplab run` runs it\n")
            continue
        used, agents = facts["used"], Account.from_dict(facts["agents"])
        output.say("  " + ", ".join(f"{number} {state}" for state, number in sorted(facts["counts"].items())))
        output.say(
            f"  used: {plural(used['rounds'], 'round')}, {plural(used['runs'], 'run')}, "
            f"wall clock {format_seconds(used['wall'])}, device hours {used['device_hours']:.3g}"
            + (f", agents: {agents.tokens:,} tokens and ${agents.usd:.2f}" if agents.calls else "")
            + (f"; {plural(facts['waiting'], 'proposal')} waiting" if facts["waiting"] else "")
        )
        judged = facts["judge"]
        if judged:
            output.say(f"  {judged['headline']}")
            for test in judged["tests"]:
                output.say(
                    f"  under test: {test['run']}, {plural(test['runs'], 'run')}, {plural(test['look'], 'look')} so far"
                )
        elif facts["best"]:
            best = facts["best"]
            ties = facts["tie_break"]
            output.say(
                f"  best: {best['id']} with {facts['metric']} = {output.number(best['objective'])}"
                + (f" (ties by {ties['metric']} = {output.number(ties['best'])})" if ties else "")
            )
            luckiest = facts["luckiest"]
            if luckiest and luckiest["id"] != best["id"]:
                output.say(f"  luckiest run: {luckiest['id']} with {output.number(luckiest['objective'])}")
        if facts["belief"]:
            from looplab.decide.belief import StudyBelief, describe_best

            belief = StudyBelief.from_dict(facts["belief"])
            output.say(f"  {describe_best(belief, str(facts['metric']))}")
        if facts["not_comparable"]:
            output.say(
                f"  {plural(facts['not_comparable'], 'run was', 'runs were')} measured with a different objective than "
                "the one in lab.yaml: `looplab remeasure` re-reads the metrics"
            )
        if facts["place"]:
            output.say(f"  {facts['place']}")
        if facts["ended_early"]:
            output.say(f"  the last engine ended early: {facts['ended_early']}")
        if facts["agent_calls"]["unusable"]:
            output.say(f"  agent: {facts['agent_calls']['summary']}")
        for run_id in facts["unreachable"]:
            output.say(
                f"  run {run_id} was started on another host or in another container; it may still be running there"
            )
        for change in facts["configured"][1:]:
            output.say(f"  {change['sentence']}")
        for alarm in facts["alarms"]:
            output.say(f"  ALARM: {alarm}")
        record = StudyLedger(ledger, study.name)
        unfinished = record.runs(state="queued") + record.runs(state="running")
        recent = record.runs(limit=RECENT if judged else LATEST)
        ideas = [run for run in recent if run.role not in (Role.REPLICATE, Role.CONFIRMATION)] if judged else recent
        rows = {run.id: run for run in unfinished + ideas[-LATEST:]}
        output.table(
            (
                *("run", "round", "by", "slot", "status", facts["metric"] or "objective"),
                *(("verdict",) if judged else ()),
                *("time", "why"),
            ),
            [
                (
                    run.id,
                    str(run.round),
                    run.proposer,
                    run.slot or "-",
                    "unknown" if run.id in facts["unreachable"] else _status_word(run),
                    output.number(run.objective),
                    *((run.verdict or _repeats(run) or "-",) if judged else ()),
                    format_seconds(run.seconds),
                    run.reason,
                )
                for run in rows.values()
            ],
        )
        count = sum(facts["counts"].values())
        if count > len(rows):
            left_out = ", without replicates that have ended" if len(ideas) < len(recent) else ""
            output.say(
                f"  the latest {len(rows)} of {count} runs{left_out}; all of them: `looplab ui`, `looplab report`"
            )
        output.say()
        if not facts["engine"] and any(facts["counts"].get(state) for state in ("planned", "queued", "running")):
            output.say("  unfinished runs: `looplab resume` adopts those still alive and continues\n")
    _show_pipelines(pipelines, suites)
    _show_versions(versions)
    if not (studies or versions):
        output.say("nothing is recorded yet; see `looplab iterate`")


def _show_pipelines(pipelines: Sequence[dict[str, Any]], suites: Sequence[dict[str, Any]]) -> None:
    if pipelines:
        output.say(f"pipelines: {plural(len(pipelines), 'run folder')}")
        states = [", ".join(f"{row['stage']} {row['state']}" for row in run["stages"]) for run in pipelines]
        shown = [(run["study"], run["folder"], state) for run, state in zip(pipelines, states, strict=True)]
        output.table(("study", "folder", "stages"), shown[-LATEST:])
        output.say()
    if suites:
        output.say(f"suites: {len(suites)}")
        output.table(
            ("study", "suite", "state", "datasets"),
            [
                (suite["study"], suite["id"], suite["state"], ", ".join(f"{k} {v}" for k, v in suite["jobs"].items()))
                for suite in suites[-LATEST:]
            ],
        )
        output.say()


def _show_versions(versions: Sequence[dict[str, Any]]) -> None:
    if versions:
        output.say("versions (* is the champion; `looplab iterate status` shows more)")
        output.table(
            ("version", "state", "metric", "verdict", "why"),
            [
                (
                    f"v{one['version']}{' *' * one['champion']}",
                    one["state"],
                    f"{one['metric']} {output.number(one['value'])}" if one["metric"] else "-",
                    one["verdict"] or "-",
                    " ".join(one["why"].split())[:80],
                )
                for one in versions[-LATEST:]
            ],
        )
        output.say()


def _describe_engine(pid: int | None) -> str:
    if pid is None:
        return "no engine running"
    return f"engine running ({f'pid {pid}' if pid else 'on another host, or its pid is unknown'})"


def _study_status(lab: Path, study: StudyConfig, ledger: Ledger | None) -> dict[str, Any]:
    metric = study.objective.metric if study.objective else None
    facts: dict[str, Any] = {"study": study.name, "engine": None, "metric": metric, "counts": {}, "best": None}
    facts["not_comparable"] = 0
    facts["judge"] = facts["belief"] = facts["luckiest"] = None
    then = study.objective.then if study.objective else None
    facts["tie_break"] = {**then.model_dump(), "best": None} if then else None
    if ledger is None:
        return {**facts, "used": asdict(BudgetUsage(0, 0, 0.0, 0.0)), "waiting": 0, "running": [], "queued": [],
                "alarms": (), "configured": [], "agents": Account().to_dict(), "place": None,
                "unreachable": [], "ended_early": None,
                "agent_calls": {"calls": 0, "unusable": [], "summary": ""}}  # fmt: skip
    record = StudyLedger(ledger, study.name)
    recorded = record.objective()
    if recorded is not None and recorded != metric:  # the recorded values belong to that metric
        facts |= {"metric": recorded, "not_comparable": record.counts().get("ok", 0)}
    else:
        facts["not_comparable"] = len(record.not_comparable())
    best = record.best()
    if then is not None and best is not None:
        from looplab.measure.run_metrics import tie_break_value

        facts["tie_break"]["best"] = tie_break_value(then, study_folder(lab, study.name) / best.id)
    if record.last_event("belief"):
        from looplab.decide.belief import recorded_belief
        from looplab.loop.flags import best_run

        belief = recorded_belief(record)
        facts["belief"] = belief.to_dict() if belief is not None else None
        if belief is not None and best is not None and study.judge is None:
            luckiest = best_run(study, record, best.conditions, study_folder(lab, study.name))
            facts["luckiest"] = asdict(luckiest) if luckiest is not None else None
    judged = _judged(study, record)
    totals = record.totals()
    running = record.runs(state="running")
    move = find_move(lab)
    return {
        **facts,
        "judge": {**asdict(judged), "headline": judged.headline, "standing": judged.standing} if judged else None,
        "engine": engine_pid(lab, study.name),
        "counts": record.counts(totals),
        "alarms": _alarms(record, judged),
        "configured": [
            {
                "seq": one.seq,
                "at": one.at,
                "hash": one.hash,
                "changes": one.describe(),
                "budget_only": one.is_budget_only,
                "sentence": one.sentence(f"at {_when(one.at)}"),
            }
            for one in record.configurations()
        ],
        "used": asdict(record.shared_usage(totals)),
        "agents": account_of(record).to_dict(),
        "agent_calls": _agent_calls(record),
        "ended_early": record.failed_because(),
        "waiting": record.count_waiting(),
        "best": asdict(best) if best else None,
        "running": [asdict(run) for run in running],
        "queued": [asdict(run) for run in record.runs(state="queued")],
        "place": move and move.text,
        "unreachable": [run.id for run in running if _is_unreachable(study_folder(lab, study.name) / run.id)],
    }


def _judged(study: StudyConfig, record: StudyLedger) -> Judged | None:
    if study.judge is None:
        return None
    from looplab.report.judged import judged_now

    return judged_now(study, record)


def _alarms(record: StudyLedger, judged: Judged | None) -> tuple[str, ...]:
    if judged is None and not record.alarms():
        return ()
    from looplab.report.facts import alarms_of

    return alarms_of(record, judged)


def _agent_calls(record: StudyLedger) -> dict[str, Any]:
    """Number of agent calls, and the latest ones without a usable answer."""
    calls = record.agent_calls()
    if not calls:
        return {"calls": 0, "unusable": [], "summary": ""}
    from looplab.report.facts import describe_calls, unusable_calls

    unusable = unusable_calls(calls)
    summary = describe_calls(calls, unusable) if unusable else ""
    return {"calls": len(calls), "unusable": [asdict(one) for one in unusable[-LATEST:]], "summary": summary}


def _is_unreachable(run_dir: Path) -> bool:
    from looplab.launch.local import Where, read_exit, read_process, where_is

    record_dir = record_folder(run_dir)
    return where_is(read_process(record_dir), record_dir) is Where.ELSEWHERE and read_exit(record_dir) is None


def _status_word(run: RunRow) -> str:
    return Role.IMPORTED if run.role == Role.IMPORTED else run.status or run.state


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _repeats(run: RunRow) -> str:
    return f"{run.role} of {run.twin}" if run.twin else ""


def show(folder: Path | None, name: str | None, run_name: str, json: bool) -> None:
    context = open_context(folder, name, reading=True)
    run = context.record.run(run_name)
    from looplab.report.facts import ARGUMENTS
    from looplab.report.judged import watched

    run_dir = context.outputs / run.id
    summary = run_folder.read_json(run_dir, "summary.json") if run.state == "ended" else {}
    changes = run_folder.read_changes(run_dir)
    about = run_folder.read_json(run_dir, "run.json")
    point = _point_of(context.record, run)
    evidence = context.record.verdicts().get(point.run.id if point else run.id)
    from looplab.decide.belief import recorded_belief

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
    when = _when(run.created)
    output.say(f"run {run.id} of {run.study}, round {run.round}, {when}")
    how = f" (exit code {run.exit_code})" if run.exit_code else f" (signal {run.signal})" if run.signal else ""
    duration = f" {'in' if run.state == 'ended' else 'for'} {format_seconds(run.seconds)}" if run.seconds else ""
    output.say(f"  {_status_word(run)}{how}{duration}")
    output.say(f"  by {run.proposer}: {run.reason}")
    output.say(f"  from {run.parent or run.base}" + (f", slot {run.slot}" if run.slot else ""))
    output.say(f"  {run_dir}")
    for what, words in (("flags of the call", about.get("call_edits")), (ARGUMENTS, about.get("extra"))):
        if words:
            output.say(f"  {what}: {shlex.join(map(str, words))}")
    if run.twin:
        output.say(f"  {_repeats(run)}, seed {run.seed}")
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
    for note in [*about.get("notes", []), *summary.get("notes", _recorded_notes(context, run))]:
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


def _recorded_notes(context: LabContext, run: RunRow) -> list[str]:
    """Return the notes in the ledger on a run that ended before it had a folder."""
    events = context.ledger.events(run.study, run.id)
    return [event.data["note"] for event in events if event.kind == "ended" and "note" in event.data]


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
