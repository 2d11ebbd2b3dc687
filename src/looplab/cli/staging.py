"""stage, suite, case."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab import signals
from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.cli.live import LiveScreen
from looplab.config.lab import LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.launch.devices import Devices
from looplab.launch.local import LocalExecutor
from looplab.loop.setup import RunOptions, plan_slots
from looplab.pipeline.case import TAG, run_case
from looplab.pipeline.driver import StopRequest, drive
from looplab.pipeline.folder import RunFolder
from looplab.pipeline.plan import choose_run, make_plan, pick_stages, read_call_config
from looplab.pipeline.recording import open_record
from looplab.pipeline.runner import HERE, StageRun
from looplab.pipeline.suite import Suite, make_runs, make_suite
from looplab.report.wording import plural
from looplab.runs.clock import format_seconds
from looplab.runs.names import inside

if TYPE_CHECKING:
    from rich.console import RenderableType

FAILED, INTERRUPTED = 1, 130


def _open_study(folder: Path | None, name: str | None) -> tuple[LabConfig, StudyConfig]:
    """Return the lab and the study; without a name, the only study with stages."""
    lab = open_lab(folder)
    staged = [study for study in lab.studies.values() if study.stages]
    return lab, staged[0] if name is None and len(staged) == 1 else lab.study(name)


@contextlib.contextmanager
def _executor(stop_request: StopRequest, *, drains: bool) -> Iterator[LocalExecutor]:
    """Yield an executor, with Ctrl-C, SIGTERM and SIGHUP turned into stop requests."""
    executor = LocalExecutor()
    terminals = output.terminals()

    def interrupted(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            output.mute(*terminals)
        else:
            gently = drains and number == signal.SIGINT and not stop_request.drain
            stop_request.hurry = stop_request.stop and number == signal.SIGINT
            stop_request.stop = stop_request.stop or not gently
        stop_request.drain = True
        executor.wake()

    with contextlib.closing(executor), signals.handled(interrupted):
        yield executor


def _resilient_writers(screen: LiveScreen) -> tuple[Any, Any]:
    """Return `say` and `write`, made to survive a closed pipe: `looplab stage … | head` must not end a stage."""
    return output.survives_reader(lambda text: screen.say(text, "bold")), output.survives_reader(screen.write)


# -- stage


def stage(
    folder: Path | None, name: str | None, *, config: Path, stages: Sequence[str], run_id: str | None, new: bool,
    edits: Sequence[str], force: bool, run_dir: Path | None, json: bool,
) -> None:  # fmt: skip
    lab, study = _open_study(folder, name)
    called = pick_stages(study, stages)
    plan = make_plan(lab, study, read_call_config(lab.folder, config, edits), str(config), called, edits)
    if run_dir is not None:
        run = RunFolder(inside(lab.folder, run_dir.absolute(), "--run-dir"))
    else:
        run = choose_run(plan, run_id, new=new)
    stop_request = StopRequest()
    stage_run = StageRun(plan, run, "stage", force=force, pointed=run_dir is None)
    with (
        _executor(stop_request, drains=False) as executor,
        LiveScreen(lambda: _draw_stage(stage_run), json=json) as screen,
    ):
        stage_run.say, stage_run.write = _resilient_writers(screen)
        stage_run.say(f"run {run.name}   {run.path}")
        signals.warn_ctrl_c(stage_run.say, f"SIGTERM (`kill {os.getpid()}`)")
        with open_record(lab, study.name, stage_run.say) as stage_run.record:
            drive_one(stage_run, executor, stop_request)
    if json:
        output.print_json(_as_dict(stage_run))
    elif stage_run.state == "complete":
        fresh = [done for done in stage_run.done if done.how == "complete"]
        more = "" if fresh or run_dir is not None else " (--new for a new run, --force to run again)"
        output.say(f"{', '.join(called)}: complete{more}   {run.path}")
    else:
        output.warn(f"looplab: {stage_run.error}   see {run.log}")
    if stage_run.state != "complete":
        sys.exit(INTERRUPTED if stop_request.drain else FAILED)


def check_config(folder: Path | None, name: str | None, config: Path, edits: Sequence[str], json: bool) -> None:
    """Show whether a config of the pipeline is valid; as JSON, the config with all defaults."""
    lab, study = _open_study(folder, name)
    plan = make_plan(lab, study, read_call_config(lab.folder, config, edits), str(config), (), edits)
    if json:
        output.print_json({"config": plan.config, "checked": study.pipeline.resolve is not None})
    elif study.pipeline.resolve is not None:
        output.say(f"{config}: valid")
    else:
        output.say(f"{config}: readable; `pipeline.resolve` in lab.yaml names no program to check it")


def drive_one(stage_run: StageRun, executor: LocalExecutor, stop_request: StopRequest) -> None:
    """Run one pipeline here; bad input is reported before anything runs."""
    stage_run.slot = HERE
    stage_run.open()
    drive([stage_run], [HERE], executor, stop_request)


def _draw_stage(stage_run: StageRun) -> RenderableType:
    from rich.text import Text

    if stage_run.stage is None:
        return Text("")
    return Text(
        f"{stage_run.stage}  {format_seconds(time.time() - stage_run.since)}  {stage_run.run.path}", style="cyan"
    )


def _as_dict(stage_run: StageRun) -> dict[str, Any]:
    return {
        "run": stage_run.run.name,
        "folder": str(stage_run.run.path),
        "status": stage_run.state,
        "error": stage_run.error or None,
        "stages": [{"stage": d.stage, "how": d.how, "why": d.why, "seconds": d.seconds} for d in stage_run.done],
        "tail": stage_run.tail() if stage_run.state == "failed" else [],
    }


# -- suite


def suite(
    folder: Path | None, name: str | None, *, config: Path, gpus: Sequence[str] | None, slots: int | None,
    suite_id: str | None, new: bool, force: bool, share: bool | None, json: bool,
) -> None:  # fmt: skip
    lab, study = _open_study(folder, name)
    made = make_suite(lab, study, config, suite_id, new=new)
    devices = Devices()
    places = plan_slots(study, RunOptions(concurrency=slots, gpus=_devices(gpus, made)), devices)
    stop_request = StopRequest()
    shared = study.slots.share if share is None else share
    runs: list[StageRun] = []
    with (
        made.lock(),
        _executor(stop_request, drains=True) as executor,
        LiveScreen(lambda: _draw_suite(runs), json=json) as screen,
        open_record(lab, study.name, lambda text: screen.say(text)) as record,
    ):
        say, _ = _resilient_writers(screen)
        signals.warn_ctrl_c(say, f"SIGTERM (`kill {os.getpid()}`)")
        began = made.begin(record)
        runs += make_runs(made, lambda job, text: say(f"{job}: {text}"), force=force, record=record)
        say(f"suite {made.id}: {plural(len(runs), 'dataset')}, {plural(len(places), 'slot')}   {made.folder}")
        if (absent := devices.why_missing(places)) is not None:
            say(f"note: {absent}")

        def closed(run: StageRun) -> None:
            if run.state == "failed":
                say(f"{run.name}: failed: {run.error}")
                for line in run.tail():
                    say(f"{run.name} | {line}")
            made.collect([other.name for other in runs if other.state == "complete"])

        announced: set[str] = set()

        def tick() -> None:
            message = (
                "stopping the running stages"
                if stop_request.stop
                else "no new stages start; Ctrl-C again stops the running ones"
            )
            if stop_request.drain and message not in announced:
                announced.add(message)
                say(f"suite {made.id}: {message}")

        why_busy = None if shared else devices.why_busy
        drive(runs, places, executor, stop_request, why_busy=why_busy, on_wait=say, tick=tick, closed=closed)
        result = made.end(runs, record, began)
    if json:
        output.print_json(result)
    else:
        _table(runs)
        for path in result["tables"]:
            output.say(path)
    if stop_request.drain:
        output.warn("interrupted; the same command continues from here")
        sys.exit(INTERRUPTED)
    if any(run.state != "complete" for run in runs):
        sys.exit(FAILED)


def _devices(gpus: Sequence[str] | None, made: Suite) -> tuple[str, ...] | None:
    """Return the devices of `--gpus 0,1`, else of the suite's `gpus`; None: those of the lab file."""
    value = gpus or made.settings.gpus
    if value is None:
        return None
    listed = [value] if isinstance(value, str) else [str(part) for part in value]
    named = [gpu.strip() for part in listed for gpu in part.split(",") if gpu.strip()]
    return () if named == ["none"] else tuple(named)


COLUMNS = ("dataset", "status", "slot", "stage", "time", "what")


def _row(run: StageRun) -> tuple[str, ...]:
    running = run.state == "running"
    spent = time.time() - run.since if running else sum(done.seconds or 0.0 for done in run.done)
    what = f"waiting: {run.blocked}" if run.blocked else run.error
    if not what:
        what = ", ".join(f"{done.stage} {done.how}" for done in run.done)
    started = run.state != "waiting"
    return (run.name, run.state, run.slot.name if started else "-", run.stage or "-",
            format_seconds(spent) if started else "-", what)  # fmt: skip


def _table(runs: Sequence[StageRun]) -> None:
    output.table(COLUMNS, [_row(run) for run in runs])


def _draw_suite(runs: Sequence[StageRun]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, no_wrap=name != "what", max_width=60)
    for run in runs:
        last = run.tail(1) if run.state == "running" else []
        cells = _row(run)
        what = last[0][:60] if last and not run.blocked else cells[-1]
        table.add_row(*(Text(cell, style=output.COLOURS.get(cell, "")) for cell in (*cells[:-1], what)))
    return table


# -- case


def case(
    folder: Path | None, name: str | None, *, config: Path, run_id: str | None, edits: Sequence[str],
    tag: str | None, words: Sequence[str], json: bool,
) -> None:  # fmt: skip
    options = {**_case_options(words), **({TAG: tag} if tag is not None else {})}
    lab = open_lab(folder)
    with_case = [study for study in lab.studies.values() if study.case is not None]
    study = with_case[0] if name is None and len(with_case) == 1 else lab.study(name)
    if study.case is None:
        raise LabError(f"study {study.name!r} has no case", file=lab.folder / "lab.yaml", hint="see `case` in the docs")
    plan = make_plan(lab, study, read_call_config(lab.folder, config, edits), str(config), (), edits)
    run = choose_run(plan, run_id)
    with open_record(lab, study.name, output.warn) as record:
        code, files = run_case(plan, run, options, quiet=json, record=record)
    if json:
        output.print_json({"run": run.name, "exit_code": code, "files": [str(path) for path in files]})
    for path in files if not json else ():
        output.say(str(path))
    if code:
        output.warn(f"looplab: the case ended with {'signal' if code < 0 else 'exit code'} {abs(code)}")
        interrupted = [ending for number in signals.ENDING for ending in (-number, 128 + number)]
        sys.exit(INTERRUPTED if code in interrupted else FAILED)
    if not files and not json:
        output.warn(f"the case wrote no file matching {', '.join(study.case.outputs)} in {run.path}")


def _case_options(words: Sequence[str]) -> dict[str, str]:
    """Return `--some-name value` and `--some-name=value` as {"some_name": "value"}."""
    options = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not name:
            raise LabError(f"unexpected argument {word!r}", hint="write options of a case as --name value")
        given = value if equals else next(rest, None)
        if given is None:
            raise LabError(f"{flag} needs a value")
        options[name] = given
    return options
