"""The objective of a study: chosen after a try, or named by `looplab objective`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.config.files import read_document, write_atomic
from looplab.config.lab import LAB_FILE, LabConfig, ObjectiveConfig, StudyConfig, load_lab
from looplab.errors import LabError
from looplab.launch.base import Exit
from looplab.measure.missing import explain_missing
from looplab.measure.run_metrics import RunMetrics
from looplab.measure.summary import Directions
from looplab.onboard.labfile import JUDGE, NO_OBJECTIVE, flow
from looplab.onboard.objective import Goal, ObjectiveGuess, explain_choice
from looplab.onboard.trial import SUFFIX, Observation
from looplab.runs import folder as run_folder

ASKED = 5
"""Guesses of the objective that are offered."""
CLOSE = 0.5
"""Largest score difference at which the second guess is also shown."""
RECENT = 5
"""Tries that are searched for the objective."""


def goal_of(smaller: bool, larger: bool) -> Goal | None:
    """Return the goal that two flags name; None: neither."""
    if smaller and larger:
        raise LabError("give --min or --max, not both")
    return "min" if smaller else "max" if larger else None


def lab_flags(folder: Path | None, name: str | None) -> str:
    """Return the options that a further command needs to mean the same lab and study."""
    words = [] if folder is None else ["--lab", str(folder)]
    return shlex.join([*words, *([] if name is None else ["--study", name])])


def objective_command(guess: ObjectiveGuess, flags: str) -> str:
    return f"looplab objective {shlex.quote(guess.metric)} --{guess.goal} {flags}".rstrip()


def choose(
    lab: LabConfig, study: StudyConfig, guesses: Sequence[ObjectiveGuess], *, yes: bool, command: str
) -> ObjectiveConfig | None:
    """Ask for the objective, or take the first guess; return it, or None if there is none."""
    best: ObjectiveGuess | None = guesses[0]
    if not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            output.say(f"likely objective: {guesses[0].metric} ({guesses[0].goal}; {guesses[0].why})")
            _name_other(guesses, command)
            output.say(f"next: {objective_command(guesses[0], command)}")
            return None
        best = _ask(guesses[:ASKED])
    if best is None:
        output.say("no objective set. Next: looplab objective METRIC --min or --max")
        return None
    chosen = set_guess(lab, study, best)
    output.say(f"objective: {best.metric} ({best.goal}), written to {LAB_FILE}")
    if not best.is_goal_known:
        goal: Goal = "max" if best.goal == "min" else "min"
        other = objective_command(replace(best, goal=goal), command)
        better = "larger" if goal == "max" else "smaller"
        output.say(f"the direction is a guess; if {better} is: {other}")
    if best is guesses[0]:
        _name_other(guesses, command, asked=not yes)
    output.say(f"next: looplab run {command}".rstrip())
    return chosen


def _name_other(guesses: Sequence[ObjectiveGuess], command: str, *, asked: bool = False) -> None:
    """Name the second guess if it is almost as likely as the first: many scripts print a loss and an accuracy.

    Args:
        asked: Whether a person has chosen, who has read why the first comes first.
    """
    if _is_close(guesses):
        other = guesses[1]
        if not asked:
            output.say(_explain(guesses))
        output.say(f"almost as likely: {other.metric} ({other.goal}): {objective_command(other, command)}")


def _is_close(guesses: Sequence[ObjectiveGuess]) -> bool:
    """Return whether the second guess is almost as likely as the first."""
    return len(guesses) > 1 and guesses[0].score - guesses[1].score <= CLOSE


def _explain(guesses: Sequence[ObjectiveGuess]) -> str:
    """Return one line that says why the first guess comes before the second."""
    return f"{guesses[0].metric} rather than {guesses[1].metric}: {explain_choice(guesses[0], guesses[1])}"


def _ask(guesses: Sequence[ObjectiveGuess]) -> ObjectiveGuess | None:
    """Ask which metric counts; Enter takes the first."""
    output.say("Which metric should be optimised?")
    output.table(
        ("", "metric", "better", "why"),
        [
            (str(i), guess.metric, "smaller" if guess.goal == "min" else "larger", guess.why)
            for i, guess in enumerate(guesses, 1)
        ],
    )
    if _is_close(guesses):
        output.say(_explain(guesses))
    by_name = {guess.metric: guess for guess in guesses}
    choices = "number" if len(guesses) > 1 else "1"
    choices += " (Enter: 1, n: none)"
    while True:
        try:
            answer = input(f"{choices}: ").strip()
        except EOFError:
            output.say()
            return None
        if answer in by_name:
            return by_name[answer]
        if answer.lower() in ("n", "no", "none", "0"):
            return None
        if not answer:
            return guesses[0]
        if answer.isdigit() and 1 <= int(answer) <= len(guesses):
            return guesses[int(answer) - 1]


def set_guess(lab: LabConfig, study: StudyConfig, guess: ObjectiveGuess) -> ObjectiveConfig:
    set_objective(lab, study, guess.metric, guess.goal, None)
    return ObjectiveConfig(metric=guess.metric, goal=guess.goal)


def show_objective(
    lab: LabConfig, study: StudyConfig, chosen: ObjectiveConfig, run: Observation, *, command: str
) -> None:
    """Print what a run measured for a known objective."""
    tried = last_try(lab, study)
    if tried is not None and tried[0] == run.run and tried[1] is not None:
        output.say(f"objective: {chosen.metric} ({chosen.goal}) {output.number(tried[1], 6)}")
        output.say(f"next: looplab run {command}".rstrip())
        return
    run_dir = run_folder.study_folder(lab.folder, run.study) / run.run
    names = [metric.name for metric in run.metrics]
    output.say(explain_missing(chosen.metric, names, run_dir=run_dir, lab=lab.folder, since=None))


def objective(
    folder: Path | None, name: str | None, metric: str, goal: Goal | None, at: str | None, json: bool
) -> None:
    """Write the objective of a study to its lab file, and show what the last try measured."""
    lab = open_lab(folder, draft=True)
    study = lab.study(name)
    chosen: Goal = goal or Directions(study.measure.goals).goal(metric)
    set_objective(lab, study, metric, chosen, at)
    lab = load_lab(lab.folder)
    study = lab.study(study.name)
    tried = last_try(lab, study)
    if json:
        output.print_json(
            {
                "study": study.name,
                "metric": metric,
                "goal": chosen,
                "at": at or "last",
                "tried": None if tried is None else {"run": tried[0], "value": tried[1]},
            }
        )
        return
    output.say(f"objective: {metric} ({chosen}), written to {LAB_FILE}")
    if tried is not None:
        run, value, names = tried
        if value is not None:
            output.say(f"the last run ({run}) measured: {output.number(value, 6)}")
        else:
            near = get_close_matches(metric, names, n=2, cutoff=0.5)
            known = f"did you mean {' or '.join(near)}?" if near else f"it measured {', '.join(names[:8]) or 'nothing'}"
            output.say(f"the last run ({run}) did not measure {metric}; {known}")
            if near:
                output.say(f"next: looplab objective {shlex.quote(near[0])} {lab_flags(folder, name)}".rstrip())
                return
    output.say("next: looplab run; or, for runs that have ended, looplab remeasure")


def last_try(lab: LabConfig, study: StudyConfig) -> tuple[str, float | None, list[str]] | None:
    """Return the last try that measured the objective, else the last one: its name, the value, and the names of its
    metrics. Without tries, the runs of the study are searched; None: there are none either."""
    return _last_of(lab, study, SUFFIX) or _last_of(lab, study, "")


def _last_of(lab: LabConfig, study: StudyConfig, suffix: str) -> tuple[str, float | None, list[str]] | None:
    outputs = run_folder.study_folder(lab.folder, study.name + suffix)
    latest = run_folder.pointed(outputs, "LATEST")
    if latest is None or not outputs.is_dir():
        return None
    others = sorted((path.name for path in outputs.iterdir() if path.name[:1].isdigit()), reverse=True)
    found = None
    for name in [latest, *(other for other in others if other != latest)][:RECENT]:
        if not (outputs / name).is_dir():
            continue
        exit_ = run_folder.read_json(outputs / name, "exit.json", strict=False)
        metrics = RunMetrics(study, outputs / name)
        metrics.finish(Exit.from_dict(exit_) if exit_ else Exit(None))
        here = (name, metrics.objective(), sorted(metrics.summariser.result()))
        if here[1] is not None:
            return here
        found = found or here
    return found


def set_objective(lab: LabConfig, study: StudyConfig, metric: str, goal: Goal, at: str | None) -> None:
    """Write an objective to the lab file, replacing the placeholder line."""
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
    before = path.read_bytes()
    lines = before.decode().split("\n")
    places = [i for i, line in enumerate(lines) if line.startswith((NO_OBJECTIVE, "objective: {"))]
    if len(places) == 1 and (target is data or "objective" not in target):
        lines[places[0]] = f"objective: {flow(entry)}"
    else:
        target["objective"] = entry
        lines = document.with_data(data).text().split("\n")
    text = "\n".join(JUDGE if line == f"# {JUDGE}" else line for line in lines)
    write_atomic(path, text.encode())
    try:
        load_lab(lab.folder)
    except LabError:
        write_atomic(path, before)
        raise
