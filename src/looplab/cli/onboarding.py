"""init SCRIPT, try, objective: from somebody's training script to a study."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.cli.running import TerminalSession
from looplab.config.files import read_document, write_atomic
from looplab.config.lab import LAB_FILE, LabConfig, StudyConfig, load_lab
from looplab.errors import LabError
from looplab.ledger.view import RunRow
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions
from looplab.measure.summary import Directions
from looplab.onboard.labfile import JUDGE, NO_OBJECTIVE, make_lab
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script, is_script
from looplab.onboard.sweeps import is_sweep, read_sweep
from looplab.onboard.trial import MODE, rank_objectives, try_study
from looplab.runs import folder as run_folder
from looplab.runs.clock import format_seconds

Goal = Literal["min", "max"]
SHOWN = 12
"""Metrics that are listed."""


def goal_of(smaller: bool, larger: bool) -> Goal | None:
    """Return the goal that two flags name; None: neither."""
    if smaller and larger:
        raise LabError("--min and --max cannot both be meant")
    return "min" if smaller else "max" if larger else None


def wants(words: Sequence[str]) -> bool:
    """Return whether the words of `looplab init` are a script, a command or a sweep, rather than a recipe."""
    return bool(words) and (is_script(words) or is_sweep(Path(words[0])))


def init(words: Sequence[str], objective: str | None, goal: Goal | None, name: str | None, json: bool) -> None:
    """Write a lab for a script, in the current folder."""
    folder = Path.cwd()
    if (folder / LAB_FILE).exists():
        raise LabError(f"{LAB_FILE} exists already in {folder}", hint="move it away, or edit it")
    if is_sweep(Path(words[0])):
        sweep = read_sweep(Path(words[0]), folder)
        script, objective, goal = sweep.script, objective or sweep.metric, goal or sweep.goal
        found = sweep.interface
    else:
        sweep = None
        script = find_script(words, folder)
        interface = read_interface(script)
        if interface is None:
            problem = script.introspection.problem if script.python is not None else None
            raise LabError(
                f"looplab does not see how {script.path.name} takes its settings" + (f": {problem}" if problem else ""),
                hint="write lab.yaml by hand (docs/lab-file.md), or let the script read a config file",
            )
        found = interface
    lab = make_lab(script, found, objective=objective, goal=goal, name=name, specs=sweep.knobs if sweep else None)
    taken = [file for file in lab.files if (folder / file).exists()]
    if taken:
        raise LabError(f"{taken[0]} exists already in {folder}", hint="move it away, or name the study: --name")
    for file, text in reversed(list(lab.files.items())):  # lab.yaml last
        write_atomic(folder / file, text.encode())
    load_lab(folder)  # what was written must be valid
    if json:
        output.print_json(
            {
                "lab": str(folder),
                "files": list(lab.files),
                "reader": found.reader,
                "knobs": list(lab.knobs),
                "seed": lab.seed,
                "objective": objective,
                "notes": list(lab.notes),
            }
        )
        return
    output.say(f"read {script.path.name} ({found.reader}): {len(found.settings)} settings")
    output.say(f"seed: {lab.seed}" if lab.seed else "seed: none found; without one, runs cannot be repeated and judged")
    output.say(f"knobs (edit {LAB_FILE}): {', '.join(lab.knobs) or 'none found'}")
    for note in lab.notes:
        output.say(note)
    output.say(f"written: {', '.join(lab.files)}")
    output.say("next: looplab run" if objective else "objective: not known yet. Next: looplab try")


def try_once(
    folder: Path | None,
    name: str | None,
    edits: Sequence[str],
    seed: int | None,
    seconds: float | None,
    yes: bool,
    json: bool,
) -> None:
    """Run the base config once, in a study of its own, and show what it measured."""
    lab = open_lab(folder)
    study = lab.study(name)
    setup = check_study(lab, study, RunOptions(informal=True))
    if seed is not None:
        if setup.seed is None:
            raise LabError("no seed reaches the trainer", hint="name its key with `seed` in lab.yaml")
        edits = [*edits, f"{'.'.join(map(str, setup.seed))}@set={seed}"]
    trial = try_study(lab, study, edits, seconds)
    setup = check_study(
        lab, trial, RunOptions(mode=MODE, again=True, runs=1, informal=True, keep_going=True, decide=False)
    )
    with TerminalSession(lab, trial, json=json) as session:
        before = [run for run in session.record.runs(state="ended") if run.status == "ok"]
        session.run(session.begin(setup))
        run = session.record.runs()[-1]
    metrics = _metrics(lab, trial, run)
    candidates = rank_objectives(metrics)
    if json:
        output.print_json(
            {
                "run": run.id,
                "status": run.status,
                "seconds": run.seconds,
                "metrics": sorted(metrics),
                "candidates": [vars_of(candidate) for candidate in candidates[:5]],
            }
        )
    else:
        _show(run, metrics)
        _compare(lab, trial, run, before, metrics)
    if run.status not in ("ok", "timeout"):
        sys.exit(1)
    if study.objective is None and candidates:
        best = candidates[0]
        if yes or _agrees(best.metric, best.goal, best.why, json):
            set_objective(lab, study, best.metric, best.goal, None)  # type: ignore[arg-type]
            output.say(f"objective: {best.metric} ({best.goal}), written to {LAB_FILE}. Next: looplab run")
        elif not json:
            output.say(f"looks like the objective: {best.metric} ({best.goal}; {best.why})")
            output.say(f"next: looplab objective {best.metric} --{best.goal}")


def _metrics(lab: LabConfig, trial: StudyConfig, run: RunRow) -> dict[str, Any]:
    found = run_folder.read_json(lab.folder / "outputs" / trial.name / run.id, "summary.json").get("metrics")
    return found if isinstance(found, dict) else {}


def vars_of(candidate: Any) -> dict[str, Any]:
    """Return a candidate as a dict."""
    return {"metric": candidate.metric, "goal": candidate.goal, "why": candidate.why}


def _agrees(metric: str, goal: str, why: str, json: bool) -> bool:
    if json or not sys.stdin.isatty() or not sys.stdout.isatty():
        return False
    answer = input(f"objective: {metric}, {goal} ({why})? [Y/n] ")
    return answer.strip().lower() in ("", "y", "yes")


def _show(run: RunRow, metrics: Mapping[str, Mapping[str, Any]]) -> None:
    output.say(f"{run.status} in {format_seconds(run.seconds)}; measured {len(metrics)} metrics")
    rows = sorted(metrics.items(), key=lambda item: -int(item[1].get("n") or 0))
    if rows:
        output.table(
            ("metric", "points", "first", "last"),
            [
                (name, str(one.get("n", "-")), output.number(one.get("first"), 6), output.number(one.get("last"), 6))
                for name, one in rows[:SHOWN]
            ],
        )
    if len(rows) > SHOWN:
        output.say(f"and {len(rows) - SHOWN} more: looplab show {run.id} --study {run.study}")


def _compare(
    lab: LabConfig, trial: StudyConfig, run: RunRow, before: Sequence[RunRow], metrics: Mapping[str, Any]
) -> None:
    """Say whether another seed or another setting made a difference."""
    for earlier in reversed(before):
        if earlier.id == run.id:
            continue
        old = _metrics(lab, trial, earlier)
        shared = [name for name in metrics if name in old]
        if not shared:
            return
        same = all(metrics[name].get("last") == old[name].get("last") for name in shared)
        what = "another seed" if earlier.seed != run.seed else "the same seed"
        if earlier.config_hash == run.config_hash:
            output.say(
                "the same config and seed: "
                + ("exactly the same numbers" if same else "other numbers: it is not reproducible")
            )
        elif same:
            output.say(
                f"{what}, and the same numbers to the last digit as {earlier.id}: the change does not reach the trainer"
            )
        else:
            output.say(f"{what}, other numbers than {earlier.id}: the change reaches the trainer")
        return


def objective(
    folder: Path | None, name: str | None, metric: str, goal: Goal | None, at: str | None, json: bool
) -> None:
    """Write the objective of a study to its lab file."""
    lab = open_lab(folder)
    study = lab.study(name)
    chosen: Goal = goal or Directions(study.measure.goals).goal(metric)
    set_objective(lab, study, metric, chosen, at)
    if json:
        output.print_json({"study": study.name, "metric": metric, "goal": chosen, "at": at or "last"})
    else:
        output.say(f"objective: {metric} ({chosen}), written to {LAB_FILE}")
        output.say("next: looplab run; or, for runs that have ended, looplab remeasure")


def set_objective(lab: LabConfig, study: StudyConfig, metric: str, goal: Goal, at: str | None) -> None:
    """Write an objective to the lab file, in place of the line that said that there is none."""
    path = lab.folder / LAB_FILE
    document = read_document(path)
    data = document.data
    target = (
        data
        if "studies" not in data
        else next((one for one in data["studies"] if one.get("study") == study.name), data)
    )
    entry: dict[str, Any] = {"metric": metric, "goal": goal}
    if at is not None:
        entry["at"] = at
    target["objective"] = entry
    text = document.with_data(data).text()
    lines = [line for line in text.split("\n") if not line.startswith(NO_OBJECTIVE)]
    text = "\n".join(JUDGE if line == f"# {JUDGE}" else line for line in lines)
    before = path.read_bytes()
    write_atomic(path, text.encode())
    try:
        load_lab(lab.folder)
    except LabError:
        write_atomic(path, before)
        raise
