"""doctor: the place of the ledger; secrets in a lab, and their removal from files."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import asdict
from pathlib import Path

from looplab.cli import output
from looplab.cli.labs import open_for_reading, open_lab
from looplab.config.files import read_config
from looplab.config.lab import LabConfig
from looplab.config.paths import show
from looplab.config.state import LEDGER, has_files, new_folder, state_folder
from looplab.errors import BusyError, LabError
from looplab.ledger import ledger as ledgers
from looplab.ledger import moving
from looplab.ledger.leaks import SecretFinder, find_leaks, scrub
from looplab.ledger.ledger import Ledger
from looplab.ledger.view import JOBS_SUFFIX
from looplab.loop.lock import StudyLock, engine_pid
from looplab.runs.disk import existing, network_disk, refuse_network_disk
from looplab.runs.redact import SHORTEST, hide_values


def move_ledger(folder: Path | None, json: bool) -> None:
    """Move the ledger to where lab.yaml or LOOPLAB_STATE_DIR want it; into the lab if neither names a folder."""
    lab = open_lab(folder)
    source, target = state_folder(lab.folder), new_folder(lab.folder, lab.state)
    if source != target and not has_files(source):
        raise LabError("this lab has no ledger yet", hint="the first `looplab run` creates it in its place")
    if source != target:
        refuse_network_disk(existing(target))
        with contextlib.closing(ledgers.open_for_reading(source / LEDGER)) as ledger:
            studies = {*lab.studies, *ledger.studies()}
        with contextlib.ExitStack() as locks:
            for study in sorted(studies | {study + JOBS_SUFFIX for study in lab.studies}):
                locks.enter_context(StudyLock(lab.folder, study))
            moving.move_ledger(lab.folder, source, target)
    if json:
        output.print_json({"ledger": str(target / LEDGER), "moved": source != target})
    else:
        output.say(f"the ledger is {'now' if source != target else 'already'} in {target}")


def find_secrets(folder: Path | None, *, scrubs: bool, json: bool) -> None:
    lab = open_lab(folder)
    disk = network_disk(existing(lab.ledger_path.parent))
    if disk is not None:
        output.warn(
            f"the ledger is on a network disk ({disk}), where it can be damaged and two engines can run at once: name "
            "a local folder (state_dir in lab.yaml, or LOOPLAB_STATE_DIR), then `looplab doctor --move-ledger`"
        )
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
        place = {"path": str(lab.ledger_path), "network_disk": disk}
        output.print_json({"ledger": place, "secrets": found, "files": rewritten, "clean": not left})
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
        lines.append("binary files are not rewritten: delete them if they are not needed")
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
                    f"an engine is running for study {study!r} (pid {pid}) and writes these files", hint="stop it first"
                )
