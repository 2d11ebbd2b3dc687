"""probe."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_for_reading, open_lab
from looplab.cli.running import TerminalSession
from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import LabConfig, ProbeConfig, StudyConfig
from looplab.errors import BusyError
from looplab.launch.local import is_running, read_process
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop import probing
from looplab.loop.lock import engine_pid
from looplab.loop.outcome import Ending
from looplab.loop.probing import Advice, Result, Setting
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions, Setup, make_guard
from looplab.report.wording import plural
from looplab.runs.clock import format_seconds
from looplab.runs.folder import record_file, record_folder, study_folder

BUSY = 0.3
"""Load per core above which other programs disturb the measurement."""


def probe(
    folder: Path | None, name: str | None, options: RunOptions, *, fresh: bool, execute: bool, json: bool
) -> None:
    lab = open_lab(folder)
    study = lab.study(name)
    config = probing.probe_of(study)
    ledger = open_for_reading(lab) if lab.ledger_path.exists() else None
    with contextlib.closing(ledger) if ledger is not None else contextlib.nullcontext():
        last = probing.probe_name(lab, study, ledger, fresh=False)
        _require_idle(lab, study, last, ledger, fresh)
        probe_name = probing.probe_name(lab, study, ledger, fresh)
    slots, setup = _prepare(lab, study, probe_name, options)
    settings = probing.find_settings(setup, config)
    if study.needs_exec and not execute:
        _show_settings(settings, json)
        return
    with TerminalSession(lab, setup.study, json=json) as session:
        runs_left = probing.queue_up(setup, session.ledger, settings, config.repeats)
        if not json:
            _announce(setup, config, settings, runs_left, slots)
        outcome = session.drive(setup) if runs_left else None
        results = probing.read_results(setup, session.record, settings, config.repeats)
    done = not any(result.missing for result in results)
    advice = probing.advise(results, config.metric) if done else None
    written = _write_advice(lab, study, advice) if advice is not None else None
    _print_results(lab, study, setup, results, advice, written, done, json)
    if outcome is not None and outcome.ending is Ending.STOPPED:
        sys.exit(130)
    if done and advice is None:
        sys.exit(1)


def _prepare(lab: LabConfig, study: StudyConfig, name: str, options: RunOptions) -> tuple[int, Setup]:
    """Return the study's number of slots, and the setup of the probe, which uses one."""
    with lab.at(study, "probe"):
        probe_study = probing.probe_study(study, name, options.mode)
        setup = check_study(probing.ProbeLab(lab, study, probe_study), probe_study, probing.probe_options(options))
        return len(setup.slots), probing.in_one_slot(setup)


def _require_idle(lab: LabConfig, study: StudyConfig, last: str, ledger: Ledger | None, fresh: bool) -> None:
    """Refuse to measure while runs of the study or an earlier probe use this machine.

    Raises:
        BusyError: An engine or a run is active.
    """
    pid = engine_pid(lab.folder, study.name)
    if pid is not None:
        raise BusyError(
            f"study {study.name!r} is running (pid {pid}) and would disturb the measurement",
            hint="wait until it ends, or use `looplab stop --drain`",
        )
    pid = engine_pid(lab.folder, last)
    if pid is not None:
        raise BusyError(f"a probe of study {study.name!r} is running (pid {pid})", hint="wait until it ends")
    if fresh and ledger is not None:
        for run in StudyLedger(ledger, last).runs_open():
            if _may_be_alive(study_folder(lab.folder, last) / run.id):
                raise BusyError(
                    f"run {run.id} of the last probe is still running",
                    hint="it ends at its timeout; `looplab probe` without --fresh continues with it",
                )


def _may_be_alive(run_dir: Path) -> bool:
    """Return whether the run may be alive, judging by its folder: an engine killed while it started a run may not have
    recorded that, and its supervisor may not have written process.json yet."""
    record = record_folder(run_dir)
    if not (record / "train.log").exists() or (record / "exit.json").exists():
        return False
    return read_process(record) is None or is_running(run_dir, record)


def _show_settings(settings: list[Setting], json: bool) -> None:
    output.warn("this study starts runs only with --exec. It would try these settings:")
    if json:
        output.print_json({"settings": [{"values": s.values, "skipped": s.skipped or None} for s in settings]})
        return
    output.table(("setting", "status"), [(s.name, f"not run: {s.skipped}" if s.skipped else "-") for s in settings])


def _announce(setup: Setup, config: ProbeConfig, settings: list[Setting], runs_left: int, slots: int) -> None:
    runnable = sum(1 for setting in settings if setting.config_hash is not None)
    at_most = format_seconds(runs_left * (config.timeout + setup.study.launch.grace))
    output.say(
        f"probe of {plural(runnable, 'setting')}, {len(settings) - runnable} skipped: {plural(runs_left, 'run')}, "
        f"one at a time, at most {at_most}"
        if runs_left
        else f"{plural(runnable, 'setting has', 'settings have')} been measured; --fresh measures them again"
    )
    if slots > 1:
        slot = setup.slots[0]
        has = f"cores {','.join(map(str, slot.cores))}" if slot.cores else "all cores"
        has += f" and devices {','.join(slot.devices)}" if slot.devices else ""
        output.say(f"note: each run has {has} to itself here, while the study shares them among {slots} slots")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if runs_left and load > BUSY * cores:
        output.say(
            f"note: other programs are running on this machine (load {load:.1f} on {plural(cores, 'core')}) and "
            "disturb the measurement; probe when it is idle, or set probe.repeats to 3 or more to see by how much"
        )


def _write_advice(lab: LabConfig, study: StudyConfig, advice: Advice) -> Path:
    """Write the advice as a queue entry; return its path."""
    name = "probe.json" if len(lab.studies) == 1 else f"{study.name}.probe.json"
    path = lab.folder / "proposals" / name
    path.parent.mkdir(exist_ok=True)
    entry = {"edits": list(advice.result.setting.edits), "reason": f"probe: {advice.reason}"}
    write_atomic(path, dump_json(entry))
    return path


def _print_results(
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
                "settings": [_as_dict(result) for result in results],
                "recommended": None if advice is None else _as_dict(advice.result) | {"reason": advice.reason},
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
        output.say("the probe is not done: `looplab probe` continues it")
    elif advice is None:
        output.say("no setting is stable" + _remedy(results))
    else:
        edits = advice.result.setting.edits
        output.say(f"recommended: {' '.join(edits)}")
        output.say(f"  {advice.reason}")
        if len(advice.result.readings) == 1:
            output.say("  one run per setting is only a hint; set probe.repeats to see how much runs vary")
        output.say(f"  written to {written}")
        _say_how_to_use(study, setup, edits)
    failed = next((reading for result in results for reading in result.readings if "failed" in reading.trouble), None)
    if failed is not None:
        log = record_file(study_folder(lab.folder, setup.study.name) / failed.run, "train.log")
        output.say(f"output of a failed run: {log}")


def _remedy(results: list[Result]) -> str:
    readings = [reading for result in results for reading in result.readings]
    if readings and all(reading.trouble.startswith("not done") for reading in readings):
        return ": make the runs shorter (probe.edits), or give them more time (probe.timeout)"
    if readings and all(reading.rows == 0 for reading in readings):
        return ": name the metric that the trainer measures (probe.metric)"
    return ""


def _say_how_to_use(study: StudyConfig, setup: Setup, edits: tuple[str, ...]) -> None:
    refused = make_guard(study).check(setup.bases[0].config, edits).problems
    not_knobs = [problem.key for problem in refused if problem.rule == "not a knob"]
    if not_knobs:
        output.say(f"  {', '.join(not_knobs)} is not a knob of the study: set it in {setup.bases[0].name} by hand")
        return
    words = ["looplab", "propose", "--study", study.name, "--parent", "base", "--change", *edits]
    output.say(f"  try it: {shlex.join(words)}")


def _as_dict(result: Result) -> dict[str, Any]:
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
