"""autopilot, say, pause, veto, agent-log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_context, open_for_reading, open_lab
from looplab.cli.running import run as run_study
from looplab.config.lab import LAB_FILE, LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import StudyView
from looplab.loop.decision import base_runs, decide_base
from looplab.loop.lock import engine_pid
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions
from looplab.runs.folder import point
from looplab.runs.redact import redact_text


def autopilot(
    folder: Path | None, name: str | None, options: RunOptions, runs: int, *, detach: bool, json: bool
) -> None:
    """Run `runs` proposals, one at a time; bases that were never run in this mode come first."""
    lab = open_lab(folder)
    study = lab.study(name)
    options = replace(options, autopilot=True)
    setup = check_study(lab, study, options)
    bases = [decide_base(setup, base).key for base in setup.bases]
    rounds = runs
    done: Mapping[str, object] = {}
    if lab.ledger_path.exists():
        with contextlib.closing(open_for_reading(lab)) as ledger:
            record = StudyLedger(ledger, study.name)
            rounds += record.usage().rounds
            done = base_runs(setup, record)
    rounds += sum(base not in done for base in bases)
    _note_no_agent(study)
    _link_runs(lab, study)
    run_study(folder, name, replace(options, rounds=rounds), execute=True, detach=detach, json=json)


def _note_no_agent(study: StudyConfig) -> None:
    """Warn that a study has no agent that could be asked."""
    if not any(entry.agent is not None or entry.plugin is not None for entry in study.proposers):
        output.warn(f"note: no proposer of study {study.name} is an agent; see `proposers` in {LAB_FILE}")


def _link_runs(lab: LabConfig, study: StudyConfig) -> None:
    """Link `runs` to the study's outputs, unless something else has that name."""
    link = lab.folder / "runs"
    if not link.exists() and not link.is_symlink():
        os.symlink(Path("outputs") / study.name, link)


def say(folder: Path | None, name: str | None, text: str, json: bool) -> None:
    context = open_context(folder, name, create=True)
    if not text.strip():
        raise LabError("the message is empty", hint='looplab say "try lower entropy"')
    context.record.say(text.strip())
    if json:
        output.print_json({"study": context.study.name, "said": text.strip()})
    else:
        output.say("the agent's next prompt will include this")
        _note_no_agent(context.study)


def pause(folder: Path | None, name: str | None, json: bool) -> None:
    context = open_context(folder, name)
    pid = engine_pid(context.lab.folder, context.study.name)
    if pid is None:
        raise LabError(f"no engine is running for study {context.study.name!r}", hint="so there is nothing to pause")
    context.record.command("pause")
    data = {"study": context.study.name, "engine": pid, "asked": "pause"}
    output.answer(json, data, "running trainings continue, and no new ones start; `looplab resume` ends the pause")


def veto(folder: Path | None, name: str | None, run: str, why: str, json: bool) -> None:
    from looplab.loop.judging import veto as invalidate

    context = open_context(folder, name)
    row = context.record.run(run)
    why = redact_text(why)
    with context.ledger.write():
        champion = invalidate(context.record, row, why)
        context.record.command("veto", run=row.id, why=why or "a person's veto")
    if champion is not None:
        point(context.outputs, "BEST", champion)
    done = f"run {row.id} is void and cannot be the best" + (f"; best is now {champion}" if champion else "")
    output.answer(json, {"run": row.id, "state": row.state, "best": champion}, done)


def agent_log(folder: Path | None, log: str | None, only: str | None, json: bool) -> None:
    from looplab.agents.base import Command, Message, Output
    from looplab.agents.log import final_message, read_log

    lab = open_lab(folder)
    path = _find_log(lab.folder, log)
    events = list(read_log(path))
    kinds = {"commands": Command, "outputs": Output, "messages": Message}
    if json:
        for event in events:
            kind = type(event).__name__.lower()
            if only is None or (only in kinds and isinstance(event, kinds[only])):
                output.print_line({"event": kind, **asdict(event)})
        if only == "final":
            output.print_line({"event": "final", "text": final_message(events)})
        return
    if only == "final":
        output.say(final_message(events))
        return
    for event in events:
        if only is not None and not isinstance(event, kinds[only]):
            continue
        if isinstance(event, Command):
            output.say(f"$ {event.command}")
        elif isinstance(event, Output):
            output.say(event.text.rstrip("\n") + (f"\n[exit {event.exit_code}]" if event.exit_code else ""))
        elif isinstance(event, Message):
            output.say(event.text)
        elif only is None:
            shown = ", ".join(f"{key} {value}" for key, value in asdict(event).items() if value not in (None, "", 0))
            output.say(f"[{type(event).__name__.lower()}: {shown}]")


def _find_log(lab: Path, log: str | None) -> Path:
    """Return the log of a call, by its path or by a prefix of its name; None: the newest."""
    if log is not None and Path(log).is_file():
        return Path(log)
    known = [path for folder in _log_folders(lab) for path in folder.glob("*.jsonl")]
    logs = [path for path in known if log is None or path.name.startswith(log)]
    found = sorted(logs, key=_age)
    if not found:
        raise LabError("no agent has been called in this lab yet" if log is None else f"there is no log {log!r}",
                       hint="logs are the .jsonl files in agent_runs/, or where iterate.yaml says")  # fmt: skip
    return found[-1]


def _log_folders(lab: Path) -> list[Path]:
    """Return the folders with agent logs: the default one, iterate.yaml's, and those of recorded calls."""
    from looplab.iterate import settings
    from looplab.ledger.versions import STUDY

    folders = {lab / "agent_runs"}
    if (lab / settings.FILE).exists():
        folders.add(lab / settings.load(lab).logs)
    with contextlib.suppress(LabError), contextlib.closing(open_for_reading(open_lab(lab))) as ledger:
        folders |= {Path(call["log"]).parent for call in StudyView(ledger, STUDY).events_of("agent asked")}
    return sorted(folders)


def _age(log: Path) -> tuple[str, int, int]:
    """Sort key: the second in the log's name, then its number within that second, then its last change."""
    name, _, number = log.stem.rpartition("-")
    is_numbered = number.isdecimal() and log.with_name(f"{name}.jsonl").exists()
    try:
        written = log.stat().st_mtime_ns
    except OSError:
        written = 0
    return log.name[: len("20260101-000000")], int(number) if is_numbered else 1, written
