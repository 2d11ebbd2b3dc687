"""status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.agents.account import Account, account_of
from looplab.cli import output
from looplab.cli.labs import find_study, open_for_reading, open_lab, open_record
from looplab.cli.looking import describe_repeat, run_status, utc_time
from looplab.config.lab import StudyConfig
from looplab.ledger.ledger import GENESIS, Ledger, has_ledger
from looplab.ledger.roles import Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.versions import read_versions
from looplab.ledger.view import JOBS_SUFFIX, BudgetUsage
from looplab.loop.lock import engine_pid
from looplab.loop.place import find_move
from looplab.pipeline.overview import pipelines_of
from looplab.report.wording import plural
from looplab.runs.clock import format_seconds
from looplab.runs.folder import record_folder, run_folders, study_folder

if TYPE_CHECKING:  # slow imports, which most calls do not need
    from looplab.report.judged import Judged

LATEST = 8
"""Runs in the table, and unusable agent calls in the JSON."""
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
        output.say(f"study {study.name}: {_describe_engine(facts['engine'])}")
        if ledger is None or not facts["counts"]:
            _show_study_without_runs(study_folder(lab.folder, study.name), facts)
        else:
            _show_study(facts)
            _show_runs(StudyLedger(ledger, study.name), facts)
    _show_pipelines(pipelines, suites)
    _show_versions(versions)
    if not (studies or versions):
        output.say("nothing is recorded yet; see `looplab iterate`")


def _show_study_without_runs(outputs: Path, facts: Mapping[str, Any]) -> None:
    folders = len(list(run_folders(outputs)))
    if folders and facts["engine"] is None:
        output.say(f"  {plural(folders, 'run folder')} but no runs in the ledger; `looplab reindex` rebuilds it\n")
        return
    waiting = f"; {plural(facts['waiting'], 'proposal')} waiting" if facts["waiting"] else ""
    output.say(f"  no runs yet{waiting}; `looplab plan` shows what would run, `looplab run` runs it\n")


def _show_study(facts: Mapping[str, Any]) -> None:
    """Print what a study has used, its result, and what a person should know."""
    used, agents = facts["used"], Account.from_dict(facts["agents"])
    output.say("  " + ", ".join(f"{number} {state}" for state, number in sorted(facts["counts"].items())))
    output.say(
        f"  used: {plural(used['rounds'], 'round')}, {plural(used['runs'], 'run')}, "
        f"wall clock {format_seconds(used['wall'])}, device hours {used['device_hours']:.3g}"
        + (f", agents: {agents.tokens:,} tokens and ${agents.usd:.2f}" if agents.calls else "")
        + (f"; {plural(facts['waiting'], 'proposal')} waiting" if facts["waiting"] else "")
    )
    _show_result(facts)
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
        output.say(f"  run {run_id} was started on another host or in another container; it may still be running there")
    for change in facts["configured"][1:]:
        output.say(f"  {change['sentence']}")
    for alarm in facts["alarms"]:
        output.say(f"  ALARM: {alarm}")


def _show_result(facts: Mapping[str, Any]) -> None:
    """Print the state of the judge, or the best run, and what the model believes."""
    judged, best, ties, luckiest = facts["judge"], facts["best"], facts["tie_break"], facts["luckiest"]
    if judged:
        output.say(f"  {judged['headline']}")
        for test in judged["tests"]:
            output.say(
                f"  under test: {test['run']}, {plural(test['runs'], 'run')}, {plural(test['look'], 'look')} so far"
            )
    elif best:
        output.say(
            f"  best: {best['id']} with {facts['metric']} = {output.number(best['objective'])}"
            + (f" (ties by {ties['metric']} = {output.number(ties['best'])})" if ties else "")
        )
        if luckiest and luckiest["id"] != best["id"]:
            output.say(f"  luckiest run: {luckiest['id']} with {output.number(luckiest['objective'])}")
    if facts["belief"]:
        from looplab.decide.belief import StudyBelief, describe_best

        output.say(f"  {describe_best(StudyBelief.from_dict(facts['belief']), str(facts['metric']))}")


def _show_runs(record: StudyLedger, facts: Mapping[str, Any]) -> None:
    """Print the table of the unfinished and the latest runs."""
    is_judged = bool(facts["judge"])
    unfinished = record.runs(state="queued") + record.runs(state="running")
    recent = record.runs(limit=RECENT if is_judged else LATEST)
    repeats = (Role.REPLICATE, Role.CONFIRMATION) if is_judged else ()
    ideas = [run for run in recent if run.role not in repeats]
    rows = {run.id: run for run in unfinished + ideas[-LATEST:]}
    output.table(
        (
            *("run", "round", "by", "slot", "status", facts["metric"] or "objective"),
            *(("verdict",) if is_judged else ()),
            *("time", "why"),
        ),
        [
            (
                run.id,
                str(run.round),
                run.proposer,
                run.slot or "-",
                "unknown" if run.id in facts["unreachable"] else run_status(run),
                output.number(run.objective),
                *((run.verdict or describe_repeat(run) or "-",) if is_judged else ()),
                format_seconds(run.seconds),
                run.reason,
            )
            for run in rows.values()
        ],
    )
    count = sum(facts["counts"].values())
    if count > len(rows):
        left_out = ", without replicates that have ended" if len(ideas) < len(recent) else ""
        output.say(f"  the latest {len(rows)} of {count} runs{left_out}; all of them: `looplab ui`, `looplab report`")
    output.say()
    if not facts["engine"] and any(facts["counts"].get(state) for state in ("planned", "queued", "running")):
        output.say("  unfinished runs: `looplab resume` adopts those still alive and continues\n")


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
                "sentence": one.sentence(f"at {utc_time(one.at)}"),
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
