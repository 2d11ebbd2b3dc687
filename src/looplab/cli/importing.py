"""import: add recorded runs of other tools to a study."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer

from looplab.cli import output
from looplab.cli.labs import open_for_reading, open_lab
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.importing import (
    Imported,
    complete_imports,
    count_knobs,
    fit_config,
    import_run,
    known_sources,
)
from looplab.loop.lock import StudyLock
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions, Setup
from looplab.measure.foreign import ForeignRun, Unreadable, read_folder, read_optuna, run_folders
from looplab.report import labbook
from looplab.report.wording import plural
from looplab.runs.durable import Syncer
from looplab.runs.folder import study_folder
from looplab.untrusted import clean_line, real_path

SHOWN = 6
"""Number of sources named in the lab book."""


def import_runs(
    folder: Path | None,
    name: str | None,
    folders: Sequence[Path],
    *,
    optuna: str | None,
    optuna_study: str | None,
    mapping: Sequence[str],
    dry_run: bool,
    json: bool,
) -> None:
    if not folders and optuna is None:
        raise LabError("nothing to import", hint="name folders with runs, or an Optuna storage with --optuna")
    lab = open_lab(folder)
    study = lab.study(name)
    setup = check_study(lab, study, RunOptions(informal=True))
    mapped = dict(map(_parse_mapping, mapping))
    found, unreadable = _read_runs(setup, folders, optuna, optuna_study, mapped)
    outputs = study_folder(lab.folder, study.name)
    done: list[Imported] = []
    known: list[tuple[str, str, bool]] = []
    if dry_run:
        by_digest: dict[str, str] = {}
        by_path: dict[str, str] = {}
        if lab.ledger_path.exists():
            by_digest, by_path = known_sources(StudyLedger(open_for_reading(lab), study.name), outputs)
        for run in found:
            if run.digest in by_digest or run.source in by_path:
                known.append(_earlier_import(run, by_digest, by_path))
            else:
                fitted = fit_config(run, setup.bases[0], setup.guard, mapped)
                done.append(Imported(run.source, "", run.objective, fitted, (*run.notes, *fitted.notes)))
    else:
        path = lab.claim_ledger()
        with StudyLock(lab.folder, study.name):
            record = StudyLedger(Ledger(path), study.name)
            objective = study.objective
            record.open(objective.metric if objective else None, objective.goal if objective else "min")
            complete_imports(record, outputs)
            by_digest, by_path = known_sources(record, outputs)
            for run in found:
                if run.digest in by_digest or run.source in by_path:
                    known.append(_earlier_import(run, by_digest, by_path))
                    continue
                fitted = fit_config(run, setup.bases[0], setup.guard, mapped)
                done.append(import_run(setup, record, run, fitted))
                by_digest[run.digest] = by_path[run.source] = done[-1].run
            if done:
                _note_in_book(outputs, study.name, done)
                Syncer(outputs).close()
            record.ledger.close()
    _print_result(setup, done, known, unreadable, dry_run=dry_run, json=json)
    if not done and not known:
        raise typer.Exit(1)


def _parse_mapping(text: str) -> tuple[str, str]:
    theirs, sign, ours = text.partition("=")
    if not (theirs and sign and ours):
        raise LabError(f"--map {text!r} is not a pair of names", hint="for example: --map lr=train.learning_rate")
    return theirs, ours


def _read_runs(
    setup: Setup, folders: Sequence[Path], optuna: str | None, optuna_study: str | None, mapped: dict[str, str]
) -> tuple[list[ForeignRun], list[Unreadable]]:
    found: dict[str, ForeignRun] = {}
    unreadable: dict[str, Unreadable] = {}
    count = count_knobs(setup.guard, mapped)
    for root in folders:
        if not root.is_dir():
            unreadable[str(root)] = Unreadable(str(root), "no such folder")
            continue
        paths = run_folders(real_path(root))
        if not paths:
            unreadable[str(root)] = Unreadable(str(root), "no runs found in it")
        for path in paths:
            run = read_folder(path, setup.study, mapped, count)
            if isinstance(run, Unreadable):
                unreadable[run.source] = run
            else:
                found[run.source] = run
    if optuna is not None:
        trials, without = read_optuna(optuna, optuna_study, setup.study)
        found |= {run.source: run for run in trials}
        unreadable |= {one.source: one for one in without}
    return list(found.values()), list(unreadable.values())


def _earlier_import(run: ForeignRun, by_digest: dict[str, str], by_path: dict[str, str]) -> tuple[str, str, bool]:
    """Return its source, the run it was imported as, and whether it has changed since."""
    same = by_digest.get(run.digest)
    return run.source, same or by_path[run.source], same is None


def _note_in_book(outputs: Path, study: str, done: Sequence[Imported]) -> None:
    sources = ", ".join(clean_line(one.source, 200) for one in done[:SHOWN])
    more = f" and {len(done) - SHOWN} more" if len(done) > SHOWN else ""
    runs = f"runs {done[0].run} to {done[-1].run}" if len(done) > 1 else f"run {done[0].run}"
    labbook.append(outputs, study, [labbook.line(time.time(), f"imported {runs}", f"{sources}{more}", "imported", "")])


def _print_result(
    setup: Setup,
    done: Sequence[Imported],
    known: Sequence[tuple[str, str, bool]],
    unreadable: Sequence[Unreadable],
    *,
    dry_run: bool,
    json: bool,
) -> None:
    if json:
        output.print_json(
            {
                "study": setup.study.name,
                "dry_run": dry_run,
                "imported": [one.as_dict() for one in done],
                "known": [{"source": source, "run": run, "changed": changed} for source, run, changed in known],
                "unreadable": [{"source": one.source, "why": one.why} for one in unreadable],
            }
        )
        return
    metric = setup.study.objective.metric if setup.study.objective else "objective"
    if done:
        rows = [
            (one.run or "-", output.number(one.objective), str(len(one.fitted.known)), _use_by_search(one), one.source)
            for one in done
        ]
        output.table(("run", metric, "knobs known", "used by search", "from"), rows)
        for one in done:
            for note in one.notes:
                output.say(f"note on {one.run or one.source}: {note}")
    for source, run, changed in known:
        output.say(f"{source}: already imported as run {run}" + ("; it has changed since" if changed else ""))
    for skipped in unreadable:
        output.say(f"not imported: {skipped.source}: {skipped.why}")
    verb = "would be imported" if dry_run else "imported"
    output.say(f"{plural(len(done), 'run')} {verb}, {len(known)} already known, {len(unreadable)} unreadable")


def _use_by_search(one: Imported) -> str:
    if one.objective is None:
        return "no: no objective"
    if not one.fitted.known:
        return "no: sets no knob"
    return "no: illegal here" if one.fitted.illegal else "yes"
