"""iterate, iterate status, tour."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from looplab import signals
from looplab.agents.account import account_of
from looplab.agents.adapters import find_adapter
from looplab.cli import output
from looplab.cli.labs import open_for_reading
from looplab.config.files import write_atomic
from looplab.config.lab import LabConfig, read_state_dir
from looplab.errors import LabError
from looplab.iterate import settings as reading
from looplab.iterate.overview import VersionFacts, gates_in_words, overview, verdict_of
from looplab.iterate.record import VersionLedger
from looplab.iterate.tour import number_with_interval
from looplab.iterate.tour import tour as make_tour
from looplab.iterate.versions import IterateOptions, Iteration
from looplab.ledger.ledger import Ledger
from looplab.ledger.versions import STUDY
from looplab.loop.lock import StudyLock
from looplab.report.wording import plural


def iterate(
    folder: Path | None, start: str, end: int | None, *, agent: str | None, model: str | None, retries: int | None,
    continue_on_failure: bool, extra: list[str], json: bool,
) -> None:  # fmt: skip
    if start == "status":
        status(folder, json)
        return
    first, last = _range(start, end)
    lab = reading.find_folder(folder, os.environ)
    settings = reading.load(lab)
    if agent is not None:
        find_adapter(agent)  # raises if there is none
    overrides = {key: value for key, value in (("cli", agent), ("model", model)) if value is not None}
    chosen = (
        reading.VersionAgent.model_validate({**settings.agent.model_dump(), **overrides})
        if overrides
        else settings.agent
    )
    spec = reading.make_spec(chosen, reading.read_flags(os.environ, settings.environment), extra)
    options = IterateOptions(settings.retries if retries is None else retries, continue_on_failure)
    path = _lab_of(lab).claim_ledger()
    with StudyLock(lab, STUDY), contextlib.closing(Ledger(path)) as ledger:
        record = VersionLedger(ledger)
        say = output.survives_reader(output.warn if json else output.say)
        run = Iteration(lab, settings, record, spec, reading.limits_of(chosen), options, say)
        signals.warn_ctrl_c(say, f"SIGTERM (`kill {os.getpid()}`)")
        try:
            with signals.handled(_interrupt):
                ok = run.run(first, last)
        except KeyboardInterrupt:
            output.survives_reader(output.warn)("interrupted; the same command continues from here")
            sys.exit(130)
        if json:
            _print_json(record)
        else:
            _print_table(record)
    if not ok:
        sys.exit(1)


def _interrupt(number: int, frame: object) -> None:
    if number == signal.SIGHUP:  # the shell and the kernel may both send it; the second must not interrupt the cleanup
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _range(start: str, end: int | None) -> tuple[int, int]:
    if not start.isdigit() or int(start) < 1:
        raise LabError(f"{start!r} is not a version", hint="looplab iterate START END, or looplab iterate status")
    first = int(start)
    last = first if end is None else end
    if last < first:
        raise LabError(f"the last version ({last}) is before the first ({first})")
    return first, last


def status(folder: Path | None, json: bool) -> None:
    with contextlib.closing(_open_ledger(folder)[1]) as ledger:
        (_print_json if json else _print_table)(VersionLedger(ledger))


def _open_ledger(folder: Path | None) -> tuple[Path, Ledger]:
    lab = reading.find_folder(folder, os.environ)
    if not _lab_of(lab).ledger_path.exists():
        raise LabError("there are no versions yet", hint="start with `looplab iterate 2 3`")
    return lab, open_for_reading(_lab_of(lab))


def _lab_of(folder: Path) -> LabConfig:
    """Return the lab of versions, which may also have studies."""
    return LabConfig(folder, {}, state_dir=read_state_dir(folder))


def _print_table(record: VersionLedger) -> None:
    history = record.history()
    output.table(
        ("version", "state", "attempts", "gates", "metric", "verdict", "branch"),
        [_row(facts) for facts in overview(history)],
    )
    account = account_of(record.study)
    if account.calls:
        cost = f", ${account.usd:.2f}" if account.usd else ""
        output.say(f"{plural(account.calls, 'agent call')}, {account.tokens} tokens{cost}")


def _row(facts: VersionFacts) -> tuple[str, ...]:
    mark = " *" if facts.champion else ""
    return (f"v{facts.version}{mark}", facts.state, str(facts.attempts), gates_in_words(facts),
            number_with_interval(facts), verdict_of(facts), facts.branch or "-")  # fmt: skip


def _print_json(record: VersionLedger) -> None:
    history = record.history()
    versions = [{**asdict(facts), "verdict": verdict_of(facts)} for facts in overview(history)]
    output.print_json(
        {"versions": versions, "champion": history.champion, "alpha_spent": history.spent,
         "agents": account_of(record.study).to_dict()}
    )  # fmt: skip


def tour(folder: Path | None, out: Path | None, json: bool) -> None:
    lab, ledger = _open_ledger(folder)
    with contextlib.closing(ledger):
        page = make_tour(lab, reading.load(lab), overview(VersionLedger(ledger).history()))
    path = out or lab / "outputs" / "tour.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page.encode("utf-8", "replace"))
    output.answer(json, {"page": str(path)}, f"wrote {path}")
