"""probe."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.cli.running import TerminalSession
from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import LabConfig, ProbeConfig, StudyConfig
from looplab.errors import BusyError
from looplab.launch.local import is_running, read_process
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop import probing
from looplab.loop.engine import Ending
from looplab.loop.lock import engine_pid
from looplab.loop.probing import Advice, Result, Setting
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions, Setup, make_guard
from looplab.runs.folder import record_file, record_folder, study_folder

BUSY = 0.3
"""The load for each core above which something else is at work."""


def probe(
    folder: Path | None, name: str | None, options: RunOptions, *, fresh: bool, execute: bool, json: bool
) -> None:
    lab = open_lab(folder)
    study = lab.study(name)
    wanted = probing.probe_of(study)
    known = Ledger(lab.ledger_path) if lab.ledger_path.exists() else None
    with contextlib.closing(known) if known is not None else contextlib.nullcontext():
        last = probing.probe_name(lab, study, known, fresh=False)
        _check_free(lab, study, last, known, fresh)
        probe_name = probing.probe_name(lab, study, known, fresh)
    slots, setup = _prepare(lab, study, probe_name, options)
    settings = probing.find_settings(setup, wanted)
    if study.needs_exec and not execute:
        _show_settings(settings, json)
        return
    with TerminalSession(lab, setup.study, json=json) as session:
        to_make = probing.queue_up(setup, session.ledger, settings, wanted.repeats)
        if not json:
            _say_what_comes(setup, wanted, settings, to_make, slots)
        outcome = session.drive(setup) if to_make else None
        results = probing.read_results(setup, session.record, settings, wanted.repeats)
    done = not any(result.missing for result in results)
    advice = probing.advise(results, wanted.metric) if done else None
    written = _write(lab, study, advice) if advice is not None else None
    _tell(lab, study, setup, results, advice, written, done, json)
    if outcome is not None and outcome.ending is Ending.STOPPED:
        sys.exit(130)
    if done and advice is None:
        sys.exit(1)


def _prepare(lab: LabConfig, study: StudyConfig, name: str, options: RunOptions) -> tuple[int, Setup]:
    """How many runs the study would have at a time, and the setup of the probe, which has one."""
    with lab.at(study, "probe"):
        made = probing.probe_study(study, name, options.mode)
        setup = check_study(probing.ProbeLab(lab, study, made), made, probing.probe_options(options))
        return len(setup.slots), probing.in_one_slot(setup)


def _check_free(lab: LabConfig, study: StudyConfig, last: str, ledger: Ledger | None, fresh: bool) -> None:
    """What is measured beside other work is not the speed of this machine."""
    pid = engine_pid(lab.folder, study.name)
    if pid is not None:
        raise BusyError(
            f"study {study.name!r} is at work (pid {pid}), and would disturb what is measured",
            hint="let it end, or `looplab stop --drain`",
        )
    pid = engine_pid(lab.folder, last)
    if pid is not None:
        raise BusyError(f"a probe of study {study.name!r} is at work (pid {pid})", hint="let it end")
    if fresh and ledger is not None:
        for run in StudyLedger(ledger, last).runs_open():
            if _may_be_alive(study_folder(lab.folder, last) / run.id):
                raise BusyError(
                    f"run {run.id} of the last probe is still at work",
                    hint="it ends at its timeout; `looplab probe` without --fresh goes on with it",
                )


def _may_be_alive(run_dir: Path) -> bool:
    """By its folder: an engine that was killed at the start of a run may have had no time to put that in the ledger,
    nor the supervisor to write down which process it is."""
    record = record_folder(run_dir)
    if not (record / "train.log").exists() or (record / "exit.json").exists():
        return False
    return read_process(record) is None or is_running(run_dir, record)


def _show_settings(settings: list[Setting], json: bool) -> None:
    output.warn("this study runs only with --exec; this is what would be tried:")
    if json:
        output.print_json({"settings": [{"values": s.values, "skipped": s.skipped or None} for s in settings]})
        return
    output.table(("setting", "status"), [(s.name, f"not run: {s.skipped}" if s.skipped else "-") for s in settings])


def _say_what_comes(setup: Setup, wanted: ProbeConfig, settings: list[Setting], to_make: int, slots: int) -> None:
    runnable = sum(1 for setting in settings if setting.config_hash is not None)
    at_most = output.seconds(to_make * (wanted.timeout + setup.study.launch.grace))
    output.say(
        f"probe of {runnable} setting(s), {len(settings) - runnable} not run: {to_make} run(s) to make, one at a time, "
        f"at most {at_most}"
        if to_make
        else f"all {runnable} setting(s) have been measured; --fresh measures them again"
    )
    if slots > 1:
        slot = setup.slots[0]
        has = f"core(s) {','.join(map(str, slot.cores))}" if slot.cores else "all cores"
        has += f" and device(s) {','.join(slot.devices)}" if slot.devices else ""
        output.say(f"note: a run has {has} to itself here, while the study has {slots} slots to share them")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if to_make and load > BUSY * cores:
        output.say(
            f"note: other programs are at work on this machine (load {load:.1f} on {cores} core(s)), and disturb what "
            "is measured; probe when it is idle, or set probe.repeats to 3 or more to see how much"
        )


def _write(lab: LabConfig, study: StudyConfig, advice: Advice) -> Path:
    """The advice as an entry of a queue."""
    name = "probe.json" if len(lab.studies) == 1 else f"{study.name}.probe.json"
    path = lab.folder / "proposals" / name
    path.parent.mkdir(exist_ok=True)
    entry = {"edits": list(advice.result.setting.edits), "reason": f"probe: {advice.reason}"}
    write_atomic(path, dump_json(entry))
    return path


def _tell(
    lab: LabConfig, study: StudyConfig, setup: Setup, results: list[Result], advice: Advice | None,
    written: Path | None, done: bool, json: bool,
) -> None:  # fmt: skip
    assert setup.study.objective is not None
    metric = setup.study.objective.metric
    if json:
        output.print_line(
            {
                "probe": setup.study.name,
                "done": done,
                "settings": [_plain(result) for result in results],
                "recommended": None if advice is None else _plain(advice.result) | {"reason": advice.reason},
                "written": written and str(written),
            }
        )
        return
    output.say()
    fastest_first = sorted(results, key=lambda result: (not result.stable, -(result.mean or 0.0)))
    output.table(
        ("setting", metric, "±", "rows", "status"),
        [
            (
                result.setting.name + (" *" if advice is not None and result is advice.result else ""),
                probing.rate(result.mean) if result.mean is not None else "-",
                f"{result.cv:.1%}" if result.cv is not None else "-",
                str(result.rows) if result.readings else "-",
                result.status,
            )
            for result in fastest_first
        ],
    )
    output.say()
    if not done:
        output.say("the probe is not done: `looplab probe` goes on")
    elif advice is None:
        output.say("no setting is stable" + _remedy(results))
    else:
        edits = advice.result.setting.edits
        output.say(f"recommended: {' '.join(edits)}")
        output.say(f"  {advice.reason}")
        if len(advice.result.readings) == 1:
            output.say("  one run a setting is a hint: what changes between runs is seen only with probe.repeats")
        output.say(f"  written to {written}")
        _say_how_to_use(study, setup, edits)
    failed = next((reading for result in results for reading in result.readings if "failed" in reading.trouble), None)
    if failed is not None:
        log = record_file(study_folder(lab.folder, setup.study.name) / failed.run, "train.log")
        output.say(f"what a failed run printed: {log}")


def _remedy(results: list[Result]) -> str:
    readings = [reading for result in results for reading in result.readings]
    if readings and all(reading.trouble.startswith("not done") for reading in readings):
        return ": make the runs shorter (probe.edits), or give them more time (probe.timeout)"
    if readings and all(reading.rows == 0 for reading in readings):
        return ": name the metric that the trainer measures (probe.metric)"
    return ""


def _say_how_to_use(study: StudyConfig, setup: Setup, edits: tuple[str, ...]) -> None:
    refused = make_guard(study).check(setup.bases[0].config, edits).problems
    foreign = [problem.key for problem in refused if problem.rule == "not a knob"]
    if foreign:
        output.say(f"  {', '.join(foreign)} is no knob of the study: set it in {setup.bases[0].name} by hand")
        return
    words = ["looplab", "propose", "--study", study.name, "--parent", "base", "--change", *edits]
    output.say(f"  try it: {shlex.join(words)}")


def _plain(result: Result) -> dict[str, Any]:
    return {
        "values": dict(result.setting.values),
        "edits": list(result.setting.edits),
        "base": result.setting.is_base,
        "mean": result.mean,
        "cv": result.cv,
        "rows": result.rows,
        "stable": result.stable,
        "status": result.status,
        "runs": [reading.run for reading in result.readings],
    }
