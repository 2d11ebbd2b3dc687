"""doctor: check the machine and the lab; move the ledger; find secrets and remove them from files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_for_reading, open_lab
from looplab.config.files import read_config
from looplab.config.lab import ITERATE_FILE, LabConfig, find_lab
from looplab.config.paths import show
from looplab.config.state import LEDGER, has_files, new_folder, state_folder
from looplab.errors import BusyError, LabError
from looplab.ledger import ledger as ledgers
from looplab.ledger import moving
from looplab.ledger.leaks import SecretFinder, find_leaks, scrub
from looplab.ledger.ledger import Ledger
from looplab.ledger.view import JOBS_SUFFIX
from looplab.loop import checkup
from looplab.loop.lock import StudyLock, engine_pid
from looplab.runs.redact import SHORTEST, hide_values


def check_up(folder: Path | None, json: bool) -> None:
    """Show what the machine has, how the lab's disk behaves, and what the lab lacks; outside a lab, only the machine.

    Exits with code 1 if there is a problem.
    """
    findings = list(checkup.check_machine())
    lab = None
    if folder is not None or _is_in_lab():
        lab = open_lab(folder)
        findings += [*checkup.check_lab_disk(lab), *checkup.check_studies(lab), *_check_versions(lab)]
    problems = [finding for finding in findings if finding.level == "problem"]
    if json:
        listed = [asdict(finding) for finding in findings]
        output.print_json({"lab": str(lab.folder) if lab else None, "findings": listed, "ok": not problems})
    else:
        rows = [(one.area, one.name, one.level, one.found, one.fix) for one in findings]
        output.table(("", "what", "state", "found", "what to do"), rows)
        output.say()
        if lab is None:
            output.say("not in a lab: only the machine was checked")
        count = len(problems)
        output.say(f"{count} problem{'s' * (count != 1)}" if problems else "all is well")
    if problems:
        sys.exit(1)


def _check_versions(lab: LabConfig) -> Iterator[checkup.Finding]:
    """Yield what `looplab iterate` lacks, if the lab has an iterate.yaml."""
    if not (lab.folder / ITERATE_FILE).exists():
        return
    from looplab.iterate import settings
    from looplab.iterate.git import Repo

    lacks: list[checkup.Finding] = []
    try:
        read = settings.load(lab.folder)
        lacks += checkup.check_agent(
            ITERATE_FILE, settings.make_spec(read.agent, settings.read_flags(os.environ, read.environment))
        )
        Repo(lab.folder)
    except LabError as error:
        lacks.append(
            checkup.Finding("lab", ITERATE_FILE, error.message, "problem", error.hint or "see `looplab iterate`")
        )
    yield from lacks or [checkup.Finding("lab", ITERATE_FILE, "lacks nothing")]


def _is_in_lab() -> bool:
    try:
        find_lab(Path.cwd())
    except LabError:
        return False
    return True


def move_ledger(folder: Path | None, json: bool) -> None:
    """Move the ledger to where lab.yaml or LOOPLAB_STATE_DIR want it; into the lab if neither names a folder."""
    lab = open_lab(folder)
    source, target = state_folder(lab.folder), new_folder(lab.folder, lab.state)
    if source != target and not has_files(source):
        raise LabError("this lab has no ledger yet", hint="the first `looplab run` creates it there")
    if source != target:
        with contextlib.closing(ledgers.open_for_reading(source / LEDGER)) as ledger:
            studies = {*lab.studies, *ledger.studies()}
        with contextlib.ExitStack() as locks:
            for study in sorted(studies | {study + JOBS_SUFFIX for study in lab.studies}):
                locks.enter_context(StudyLock(lab.folder, study))
            moving.move_ledger(lab.folder, source, target)
    data = {"ledger": str(target / LEDGER), "moved": source != target}
    output.answer(json, data, f"the ledger is {'now' if source != target else 'already'} in {target}")


def find_secrets(folder: Path | None, *, scrubs: bool, json: bool) -> None:
    lab = open_lab(folder)
    if scrubs:
        _refuse_while_running(lab)
    ledger = None
    if lab.ledger_path.exists():
        ledger = Ledger(lab.ledger_path) if scrubs else open_for_reading(lab)
    finder = _finder(lab)
    leaks = list(find_leaks(ledger, lab.folder, finder))
    rewritten = scrub(ledger, lab.folder, leaks) if scrubs and ledger is not None else {}
    left = [leak for leak in leaks if leak.where not in rewritten]
    if json:
        found = [{**asdict(leak), "scrubbed": leak.where in rewritten} for leak in leaks]
        output.print_json({"secrets": found, "files": rewritten, "clean": not left})
    else:
        for leak in leaks:
            done = " (removed)" if leak.where in rewritten else ""
            output.say(f"{leak.what}: {leak.where}: {leak.why}{done}")
        for line in _advice({leak.what for leak in left}, scrubs=scrubs):
            output.say(line)
        if not left:
            output.say("no secrets are left" if leaks else "no secrets were found")
    if left:
        sys.exit(1)


def _advice(left: set[str], *, scrubs: bool) -> list[str]:
    lines = []
    if "file" in left and not scrubs:
        lines.append("`looplab doctor --secrets --scrub` removes them from the files")
    if "binary" in left:
        lines.append("binary files are not rewritten; delete them if you do not need them")
    if left & {"event", "table"}:
        lines.append(
            "secrets in the ledger cannot be removed without breaking its hash chain: revoke them, and do not publish "
            "the ledger"
        )
    return lines


def _finder(lab: LabConfig) -> SecretFinder:
    """Return a finder that knows the secrets of the environment, the lab file and the base configs."""
    env = dict(os.environ)
    values: dict[str, str] = {}
    for study in lab.studies.values():
        env |= study.launch.env
        for name in study.base:
            with contextlib.suppress(LabError, OSError):
                _, secrets = hide_values(read_config(lab.folder / name))
                values |= {f"{show(path)} in {name}": str(value) for path, value in secrets.items()}
    return SecretFinder(env, {label: value for label, value in values.items() if len(value) >= SHORTEST})


def _refuse_while_running(lab: LabConfig) -> None:
    for name in lab.studies:
        for study in (name, name + JOBS_SUFFIX):
            pid = engine_pid(lab.folder, study)
            if pid is not None:
                raise BusyError(
                    f"an engine is running for study {study!r} (pid {pid}) and is writing these files",
                    hint="stop it first",
                )
