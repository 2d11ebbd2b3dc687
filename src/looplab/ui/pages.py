"""The facts of the other pages: one run, a comparison, the judge, agents, versions, pipelines, the record."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from sys import intern
from typing import Any

from looplab.agents.base import Command, End, FileChange, Message, Output, Trouble
from looplab.agents.log import read_log
from looplab.config import paths
from looplab.errors import LabError
from looplab.ledger.feed import ChainCheck, StudyFeed, last_anchor, read_events
from looplab.ledger.ledger import Event, Ledger
from looplab.ledger.pipelines import read_rows
from looplab.ledger.versions import read_versions
from looplab.ledger.view import RunRow, StudyView
from looplab.measure.summary import from_dict
from looplab.report import wording
from looplab.report.compare import MISSING, differing
from looplab.report.html import short
from looplab.report.importance import LABEL, importance
from looplab.report.judged import mix_facts
from looplab.report.language import in_each
from looplab.report.overview import Need, judge_facts, overview_facts, study_overview, verdict_facts
from looplab.runs import folder
from looplab.ui.files import HeldOutFilter, ShownFile, list_files, read_file
from looplab.ui.model import CORE, LabModel, StudyModel
from looplab.untrusted import dump_json

MAX_TEXT = 4000
MAX_EVENTS_OF_RUN = 100
MAX_TRANSCRIPT = 600
MAX_COMPARED = 40
MAX_JUDGED = 600
CHAIN_S = 0.05
"""Seconds of checking the chain in one answer."""
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
SHOWN = (*PICTURES, ".md", ".txt", ".csv", ".tex", ".json")
NOTE = 600
"""Characters of a version's note that are shown at once."""
TABLES = 10
"""Number of the latest pipelines and suites whose first table is shown at once."""
LONGEST_TABLE = 20_000
"""Characters of such a table; longer ones are opened by a click."""
Pipelines = Callable[[Ledger, Path], tuple[list[dict[str, Any]], list[dict[str, Any]]]]


def _plain(value: Any, limit: int = MAX_TEXT) -> str:
    return wording.cut(wording.plain(str(value or "")), limit)


def _changes(changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the differences of two configs, each with what it was and what it is."""
    return [
        {"key": wording.plain(key)}
        | {side: wording.shown(wording.value(key, sides[side])) for side in ("old", "new") if side in sides}
        for key, sides in list(changes.items())[:400]
        if isinstance(sides, Mapping)
    ]


# -- now


def now_page(model: LabModel, name: str, *, since: int, window: float) -> dict[str, Any]:
    """Return the study at a glance.

    Args:
        since: Number of the last event that the person has seen; 0: none.
        window: Seconds that the lanes show.
    """
    record, study = model.view(name), model.study(name)
    now, engine = time.time(), model.engine(name)
    facts: dict[str, Any] = {"at": now, "seq": model.seq, "engine": engine, "problem": model.problem}
    needs = [] if model.problem is None else [Need("problem", text=model.problem)]
    if record is None:
        return {**facts, "counts": {}, "needs": [_need(Need("nothing yet"))]}
    found = study_overview(
        study.config, record, now=now, engine=engine, since=_time_of(model, since), window=window,
        judge=model.judged(name),
    )  # fmt: skip
    shown = overview_facts(found, record, study.live)
    return {**shown, **facts, "is_first": since == 0, "needs": [_need(one) for one in (*needs, *found.needs)]}


def _need(need: Need) -> dict[str, Any]:
    return {"kind": need.kind, "sentence": in_each(lambda: need.sentence)}


def _time_of(model: LabModel, seq: int) -> float:
    """Return the time of an event; 0: there is none with this number."""
    ledger = model.ledger
    if ledger is None or seq <= 0:
        return 0.0
    event = next(iter(ledger.events(after=seq - 1)), None)
    return event.at if event is not None else 0.0


# -- one run


def run_page(model: LabModel, name: str, run_name: str) -> dict[str, Any]:
    """Return everything about one run but its curves and its log."""
    record, study = model.view(name), model.study(name)
    if record is None:
        raise LabError("there are no runs yet")
    run = record.run(run_name)
    run_dir = study.outputs / run.id
    about = folder.read_json(run_dir, "run.json", strict=False)
    summary = folder.read_json(run_dir, "summary.json", strict=False) if run.state == "ended" else {}
    changes = folder.read_changes(run_dir, strict=False)
    plan = record.plan_of(run.id) if run.state == "planned" else None
    if plan is not None:
        changes = {"parent": dict(plan.diff_parent), "base": dict(plan.diff_base)}
    lead = study.lead_of(run.id)
    evidence = record.verdicts().get(lead)
    rival = (evidence or {}).get("champion")
    proposal = None
    if run.proposal is not None:
        with contextlib.suppress(LabError):
            proposal = record.proposal(run.proposal)
    extra = about.get("extra") if isinstance(about.get("extra"), list) else []
    return {
        "run": {
            **{key: value for key, value in asdict(run).items() if key not in ("config_hash", "pid")},
            "reason": _plain(run.reason),
            "proposer": _plain(run.proposer, 60),
            "role": str(run.role),
            "seconds": run.seconds,
        },
        "lead": lead,
        "hypothesis": _plain(proposal.hypothesis if proposal else about.get("hypothesis")),
        "edits": [_plain(edit, 300) for edit in (proposal.words if proposal else ())],
        "call": _call_of(proposal.source if proposal else None),
        "notes": [_plain(note) for note in (*about.get("notes", ()), *summary.get("notes", ()))],
        "arguments": wording.plain(shlex.join(map(str, extra or ()))) or None,
        "changes": _changes(changes.get("parent") or {}),
        "base_changes": _changes(changes.get("base") or {}),
        "config": _flat_config(record, run, run_dir),
        "metrics": _metrics(summary, study.hidden),
        "status": {key: summary.get(key) for key in ("seconds", "cpu_s", "max_rss_mb", "steps", "reason")},
        "verdict": None if evidence is None else verdict_facts(lead, evidence),
        "replicates": [
            {
                "run": one.id,
                "seed": one.seed,
                "value": short(one.objective),
                "of": first,
                "rival": first != lead,
                "role": str(one.role),
                "first": one.id == first,
            }
            for first in dict.fromkeys(filter(None, (lead, rival)))
            for one in _runs_of(record, study, first)
        ],
        "capsule": _capsule(run_dir),
        "files": list_files(run_dir),
        "folder": str(run_dir),
        "watched": [
            {
                "rule": _plain(one.get("rule"), 200),
                "text": _plain(one.get("text"), 400),
                "stops": bool(one.get("stops")),
            }
            for one in record.events_of("watched", run.id)
        ],
        "events": [
            _event(one, study) for one in read_events(record.ledger, study=name, run=run.id, limit=MAX_EVENTS_OF_RUN)
        ],
        "reproduce": f"looplab reproduce {run.id}" + (f" --study {name}" if len(model.lab.studies) > 1 else ""),
    }


def _call_of(source: str | None) -> str | None:
    """Return the agent's call that a proposal came from, by its source `agent:CALL:INDEX`."""
    parts = (source or "").split(":")
    return ":".join(parts[1:-1]) if len(parts) > 2 and parts[0] == "agent" else None


def _flat_config(record: StudyView, run: RunRow, run_dir: Path) -> list[tuple[str, str]]:
    try:
        config = record.config_of(run, run_dir)
    except LabError:
        return []
    return [
        (wording.plain(key), wording.cut(wording.shown(wording.value(key, value)), 300))
        for key, value in list(paths.flatten(config).items())[:1000]
    ]


def _metrics(summary: Mapping[str, Any], hidden: HeldOutFilter) -> list[dict[str, Any]]:
    try:
        found = from_dict(summary.get("metrics", {}))
    except (TypeError, ValueError, AttributeError):
        return []
    return [
        {"metric": wording.plain(name), "first": short(one.first), "last": short(one.last), "best": short(one.best),
         "best_step": short(one.best_step), "n": one.n, "nan": one.nan}
        for name, one in found.items()
        if not hidden.names(name)
    ]  # fmt: skip


def _runs_of(record: StudyView, study: StudyModel, lead: str) -> list[RunRow]:
    """Return the runs of a config, by its first run, without reading all runs of the study."""
    return [run for id_ in study.members(lead) if (run := record.find_run(id_)) is not None]


def _capsule(run_dir: Path) -> list[tuple[str, str]]:
    """Return what is needed to repeat the run, as names and texts."""
    capsule = folder.read_capsule(run_dir)
    argv = capsule.get("argv")
    lines: list[tuple[str, str]] = []
    if isinstance(argv, list):
        lines.append(("command", shlex.join(map(str, argv))))
    for key in ("cwd", "python", "code", "git", "machine", "seeds", "data", "packages_hash"):
        value = capsule.get(key)
        if value not in (None, "", [], {}):
            lines.append((key, value if isinstance(value, str) else dump_json(value)))
    packages = capsule.get("packages")
    if isinstance(packages, list):
        lines.append(("packages", f"{len(packages)}: " + ", ".join(map(str, packages[:400]))))
    return [(name, _plain(text)) for name, text in lines]


# -- several runs


def compare_page(model: LabModel, name: str, runs: Sequence[str]) -> dict[str, Any]:
    """Return the keys in which the configs of runs differ, and their metrics side by side."""
    record, study = model.view(name), model.study(name)
    if record is None:
        raise LabError("there are no runs yet")
    rows = [row for id_ in runs[:MAX_COMPARED] if (row := record.find_run(id_)) is not None]
    configs = []
    for row in rows:
        try:
            configs.append(record.config_of(row, study.outputs / row.id))
        except LabError:
            configs.append({})
    summaries = [folder.read_json(study.outputs / row.id, "summary.json", strict=False) for row in rows]
    metrics = [{one["metric"]: one for one in _metrics(summary, study.hidden)} for summary in summaries]
    names = list(dict.fromkeys(metric for one in metrics for metric in one))
    return {
        "runs": [row.id for row in rows],
        "config": [
            (wording.plain(key), [None if value is MISSING else wording.shown(value) for value in values])
            for key, values in list(differing(configs).items())[:400]
        ],
        "metrics": [
            (metric, [one[metric]["last"] if metric in one else None for one in metrics]) for metric in names[:200]
        ],
    }


def importance_page(model: LabModel, name: str) -> dict[str, Any]:
    """Return the share of the objective's variance that each knob explains by itself."""
    model.refresh(name)
    study = model.study(name)
    place = {column: n for n, column in enumerate(CORE)}
    knobs: dict[str, list[Any]] = {key: [] for key in study.knobs}
    objective: list[float | None] = []
    for row in study.rows:
        if row[place["role"]] not in ("base", "trial") or row[place["objective"]] is None:
            continue
        values = (study.cells.get(row[0]) or ((), (), ()))[1]
        objective.append(row[place["objective"]])
        for n, key in enumerate(study.knobs):
            value = values[n] if n < len(values) else None
            knobs[key].append(intern(value) if isinstance(value, str) else value)
    found = importance(knobs, objective)
    shares = [{"knob": one.knob, "share": short(one.share, 4), "clear": one.clear} for one in found.shares]
    return {"label": LABEL, "runs": found.runs, "note": found.note, "shares": shares, "complete": study.is_complete}


# -- the judge


def judge_page(model: LabModel, name: str) -> dict[str, Any]:
    """Return the account of the judge: verdicts with their evidence, alpha, noise, held-out reads, drift."""
    record, judge = model.view(name), model.judged(name)
    if record is None or judge is None:
        return {"judge": None}
    evidence, study = record.verdicts(), model.study(name)
    shown = [one for one in judge.judgements if one.run in evidence][-MAX_JUDGED:]
    entries = []
    for one in shown:
        facts = verdict_facts(one.run, evidence[one.run])
        first = record.find_run(one.run)
        entries.append(
            {**facts, "mean": short(one.mean), "sd": short(one.sd), "runs": one.runs, "is_base": one.run == judge.base,
             "paired": one.p is not None and first is not None and first.seed is not None}
        )  # fmt: skip
    feed = StudyFeed(record.ledger, name)
    reads = [
        {"seq": event.seq, "at": event.at, "run": event.run, "against": event.data.get("against")}
        for event in feed.events_of(("held-out read",), 0)
    ]  # the text of the event has the values, which the page never gets
    return {
        "judge": judge_facts(judge, record),
        "entries": entries,
        "reads": reads,
        "drift": [
            {"run": run.id, "at": run.ended, "value": short(run.objective), "of": id_, "role": str(run.role)}
            for id_ in dict.fromkeys(filter(None, (judge.base, judge.champion)))
            for run in _runs_of(record, study, id_)
            if run.objective is not None and run.ended is not None
        ],
        "restarts": [
            {"at": event.at, "why": _plain(event.data.get("why"), 300)}
            for event in feed.events_of(("judge restarted",), 0)
        ],
        "changes": [{"at": one.at, "text": _plain(one.describe(), 600), "budget_only": one.is_budget_only}
                    for one in record.configurations()[1:]],
    }  # fmt: skip


# -- agents


def agents_page(model: LabModel, name: str) -> dict[str, Any]:
    """Return the agent calls with the outcome of their proposals, and the record of each proposer."""
    record, engine = model.view(name), model.engine(name)
    if record is None:
        return {"calls": [], "proposers": [], "weights": [], "said": []}
    proposals: dict[str, list[dict[str, Any]]] = {}
    for row, _ in record.proposals_from("agent"):
        run = record.find_run(row.run) if row.run else None
        proposals.setdefault(_call_of(row.source) or "", []).append(
            {"edits": [_plain(edit, 200) for edit in row.words], "reason": _plain(row.reason, 600),
             "hypothesis": _plain(row.hypothesis, 600), "status": row.status, "run": row.run,
             "problems": [_plain(one.get("message", one), 300) for one in row.problems],
             "verdict": run.verdict if run else None, "objective": short(run.objective) if run else None,
             "state": run.status or run.state if run else None}
        )  # fmt: skip
    calls = []
    for call in record.agent_calls()[-500:]:
        answer = call["answer"] or {}
        calls.append(
            {"call": call["call"], "at": call["at"], "cli": call.get("cli"), "n": call.get("n"),
             "attempt": call.get("attempt"), "version": call.get("version"), "ended": answer.get("at"),
             "ok": answer.get("ok"), "why": _plain(answer.get("why"), 600), "seconds": answer.get("seconds"),
             "usage": answer.get("usage") or {}, "accepted": answer.get("accepted"),
             "refused": [_plain(one, 300) for one in answer.get("refused") or ()],
             "interrupted": bool(answer.get("interrupted")) or (not answer and engine is None),
             "void": _plain(answer.get("void"), 300) or None,
             "proposals": proposals.get(call["call"], [])}
        )  # fmt: skip
    mix = mix_facts(record)
    said = StudyFeed(record.ledger, name).events_of(("said",), 0)[-50:]
    return {
        "calls": calls[::-1],
        "proposers": [] if mix is None else [
            {"name": proposer, **{key: value for key, value in asdict(one).items() if key not in ("good", "bad")}}
            for proposer, one in sorted(mix.credit.items(), key=lambda item: -item[1].mean)
        ],
        "weights": [] if mix is None else [{"n": n, "weights": weights} for n, weights in mix.weights],
        "said": [{"at": event.at, "text": _plain(event.data.get("text"))} for event in said],
    }  # fmt: skip


def transcript(model: LabModel, name: str, call: str) -> dict[str, Any]:
    """Return the conversation of one call of an agent.

    Raises:
        LabError: There is no such call, or its log cannot be read.
    """
    record, hidden = model.view(name), model.study(name).hidden
    asked = next((one for one in record.agent_calls() if one["call"] == call), None) if record is not None else None
    if asked is None:
        raise LabError("there is no such call")
    path = _log_path(model.lab.folder, str(asked.get("log") or ""))
    items: list[dict[str, Any]] = []
    for event in read_log(path):
        if isinstance(event, Message):
            items.append({"kind": "message", "text": hidden.clean(_plain(event.text, 20_000))})
        elif isinstance(event, Command):
            items.append({"kind": "command", "text": hidden.clean(_plain(event.command, 4000))})
        elif isinstance(event, Output):
            items.append({"kind": "output", "text": hidden.clean(_plain(event.text, 4000)), "code": event.exit_code})
        elif isinstance(event, FileChange):
            items.append({"kind": "file", "text": f"{event.kind} {_plain(event.path, 300)}"})
        elif isinstance(event, Trouble):
            items.append({"kind": "trouble", "text": hidden.clean(_plain(event.text, 2000))})
        elif isinstance(event, End):
            items.append({"kind": "end", "text": hidden.clean(_plain(event.text, 20_000)), "ok": event.ok})
        if len(items) >= MAX_TRANSCRIPT:
            items.append({"kind": "trouble", "text": "the rest is not shown; see `looplab agent-log`"})
            break
    return {"call": call, "items": items}


def _log_path(lab: Path, log: str) -> Path:
    """Return the path of a log below `agent_runs`; a name that leads elsewhere is refused."""
    name = PurePath(log).name
    path = lab / "agent_runs" / name
    if not name.endswith(".jsonl") or path.is_symlink() or not path.is_file():
        raise LabError("the log of this call is not here")
    return path


# -- versions and pipelines


def versions_page(model: LabModel) -> list[dict[str, Any]]:
    """Return the versions of code with their notes and the names of their pictures."""
    ledger = model.ledger
    if ledger is None:
        return []
    found = []
    for row in read_versions(ledger):
        names = [one["name"] for one in list_files(model.lab.folder / row["folder"])] if row["folder"] else []
        found.append(
            {**{key: row[key] for key in ("version", "attempt", "state", "metric", "value", "verdict", "champion",
                                          "began", "ended", "folder", "revision")},
             "why": _plain(row["why"], 600),
             "note": _first_note(model, row["folder"], names),
             "notes": [name for name in names if name.endswith(".md")][:4],
             "pictures": [name for name in names if name.endswith(PICTURES)][:6]}
        )  # fmt: skip
    return found


def _first_note(model: LabModel, place: str, names: list[str]) -> str:
    """Return the beginning of the first note of a version; empty if there is none that may be shown."""
    with contextlib.suppress(LabError):
        for name in [name for name in names if name.endswith(".md")][:1]:
            return wording.cut(_read(model, place, name).content.decode().strip(), NOTE)
    return ""


def pipelines_page(model: LabModel, pipelines: Pipelines) -> dict[str, Any]:
    """Return the run folders of pipelines with their stages, the suites with their tables, and the cases."""
    ledger = model.ledger
    if ledger is None:
        return {"pipelines": [], "suites": [], "cases": []}
    runs, suites = pipelines(ledger, model.lab.folder)
    cases = [dict(row) for row in read_rows(ledger)["cases"].values()]
    for one in (*runs[-100:], *suites):
        files = list_files(model.lab.folder / one["folder"])
        one["files"] = [file["name"] for file in files if file["name"].endswith(SHOWN)][:60]
    for one in (*runs[-TABLES:], *suites[-TABLES:]):
        one["tables"] = _tables(model, one["folder"], one["files"])
    for stage in (stage for one in runs for stage in one["stages"]):
        stage["why"] = _plain(stage.get("why"), 600)
    return {"pipelines": runs[-100:], "suites": suites, "cases": cases[-200:]}


def _tables(model: LabModel, place: str, names: list[str]) -> list[dict[str, str]]:
    """Return the first text and the first table of a folder, best from a subfolder `tables`."""
    found = []
    for suffix in (".txt", ".csv"):
        fitting = [name for name in names if name.endswith(suffix)]
        ours = [name for name in fitting if "tables" in PurePath(name).parts] or (fitting if suffix == ".csv" else [])
        with contextlib.suppress(LabError):  # it may not be shown
            found += [{"name": name, "text": _read(model, place, name).content.decode()} for name in ours[:1]]
    return [one for one in found if len(one["text"]) <= LONGEST_TABLE]


def artifact(model: LabModel, place: str, name: str) -> ShownFile:
    """Return a file of a version, a suite or a pipeline, whose folder is in the ledger.

    Raises:
        LabError: It is not one of those folders, or the file may not be shown.
    """
    ledger = model.ledger
    if ledger is None:
        raise LabError("there is no ledger yet")
    rows = read_rows(ledger)
    known = {row["folder"] for row in read_versions(ledger)}
    known |= {row["folder"] for table in ("stages", "suites") for row in rows[table].values()}
    if place not in known or PurePath(place).is_absolute() or ".." in PurePath(place).parts:
        raise LabError("there is no such folder")
    return _read(model, place, name)


def _read(model: LabModel, place: str, name: str) -> ShownFile:
    root = model.lab.folder / place
    if not root.resolve().is_relative_to(model.lab.folder.resolve()):
        raise LabError("the folder is outside the lab")
    hidden = [HeldOutFilter(config) for config in model.lab.studies.values()]
    active = next((one for one in hidden if one.is_active), hidden[0] if hidden else None)
    if active is None:
        raise LabError("the lab has no study")
    return read_file(root, name, active)


# -- the record


def _event(event: Event, study: StudyModel | None) -> dict[str, Any]:
    data = event.data
    if event.kind == "held-out read":  # its text has the values, which the page never gets
        data = {key: value for key, value in data.items() if key != "text"}
    if event.kind in ("study configured", "options", "planned"):
        data = {key: value for key, value in data.items() if key not in ("configuration", "plan")}
    text = wording.cut(wording.plain(dump_json(data)), 1500)
    if study is not None:
        text = study.hidden.clean(text) if event.kind in ("said", "alarm", "watched") else text
    return {"seq": event.seq, "at": event.at, "kind": event.kind, "study": event.study, "run": event.run,
            "data": text, "hash": event.hash[:16]}  # fmt: skip


def record_page(
    model: LabModel, *, after: int, before: int | None, study: str | None, kind: str | None, limit: int
) -> dict[str, Any]:
    """Return events, the head, how much of the chain was checked, and the last anchor."""
    model.refresh()
    ledger = model.ledger
    if ledger is None:
        return {"events": [], "head": None, "chain": None, "anchor": None}
    until = time.monotonic() + CHAIN_S
    if model.chain.checked > ledger.head()[0]:  # the ledger was replaced
        model.chain = ChainCheck()
    while model.chain.advance(ledger) and time.monotonic() < until:
        pass
    events = read_events(ledger, after=after, before=before, study=study, kind=kind, limit=limit)
    models = {name: model.study(name) for name in model.studies()}
    seq, digest = ledger.head()
    return {
        "events": [_event(one, models.get(one.study)) for one in events],
        "head": {"ledger": ledger.id(), "seq": seq, "hash": digest},
        "chain": {"checked": model.chain.checked, "broken": model.chain.broken},
        "anchor": last_anchor(ledger),
        "path": str(ledger.path),
    }
