"""init SCRIPT, try, objective: from somebody's training script to a study."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.cli.live import LiveScreen
from looplab.cli.running import TerminalSession
from looplab.config.files import read_document, write_atomic
from looplab.config.lab import LAB_FILE, RUN_FOLDER, LabConfig, ObjectiveConfig, StudyConfig, load_lab
from looplab.config.paths import show
from looplab.errors import LabError
from looplab.launch.base import Exit
from looplab.launch.local import stop_without_engine
from looplab.loop.events import AlarmRaised, EngineEvent, RunLaunched, Waiting
from looplab.loop.outcome import Ending
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions
from looplab.measure.discover import CURVES, kind_of
from looplab.measure.missing import explain_missing
from looplab.measure.run_metrics import RunMetrics
from looplab.measure.summary import Directions
from looplab.onboard.base import Script
from looplab.onboard.diagnose import FailedProgram, diagnose
from looplab.onboard.labfile import JUDGE, NO_OBJECTIVE, make_lab
from looplab.onboard.output_folder import give_new_folder, output_option, uses_out_dir
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import check_words, find_script, is_script, trainers_in
from looplab.onboard.sweeps import is_sweep, read_sweep
from looplab.onboard.trial import (
    MODE,
    SUFFIX,
    TRY_S,
    Comparison,
    ObjectiveGuess,
    Observation,
    compare,
    explain_written,
    files_below,
    kept_best,
    observe,
    own_modules,
    rank_objectives,
    script_of,
    try_study,
    writes_beside_itself,
    written_files,
)
from looplab.runs import folder as run_folder
from looplab.runs.clock import format_seconds

if TYPE_CHECKING:
    from rich.text import Text

Goal = Literal["min", "max"]
SHOWN = 12
"""Metrics that are listed."""
ASKED = 5
"""Guesses of the objective that are offered."""
RECENT = 5
"""Tries that are searched for the objective."""
MAX_COMMAND = 400
"""Characters of a command that are shown."""


def goal_of(smaller: bool, larger: bool) -> Goal | None:
    """Return the goal that two flags name; None: neither."""
    if smaller and larger:
        raise LabError("--min and --max cannot both be meant")
    return "min" if smaller else "max" if larger else None


# -- init


def wants(words: Sequence[str]) -> bool:
    """Return whether the words of `looplab init` are a script, a command or a sweep, rather than a recipe.

    Raises:
        LabError: They look like a script, but there is none, or it cannot be read.
    """
    if not words:
        return False
    if is_script(words) or is_sweep(Path(words[0])):
        return True
    from looplab.cli.recipes import names

    if words[0] not in names():
        check_words(words, Path.cwd())
    return False


def init(
    words: Sequence[str],
    objective: str | None,
    goal: Goal | None,
    name: str | None,
    json: bool,
    *,
    then_try: bool = False,
) -> None:
    """Write a lab for a script, in the current folder.

    Args:
        then_try: Whether a try follows, so that the next step need not be named.
    """
    folder = Path.cwd()
    if (folder / LAB_FILE).exists():
        raise LabError(
            f"{LAB_FILE} exists already in {folder}", hint="`looplab try` runs it; to begin again, move it away"
        )
    if is_sweep(Path(words[0])):
        sweep = read_sweep(Path(words[0]), folder)
        script, objective, goal = sweep.script, objective or sweep.metric, goal or sweep.goal
        found = sweep.interface
    else:
        sweep = None
        script = find_script(words, folder)
        interface = read_interface(script)
        if interface is None:
            problem, hint = _why_not_read(script)
            raise LabError(f"looplab does not see how {script.path.name} takes its settings{problem}", hint=hint)
        found = interface
    lab = make_lab(script, found, objective=objective, goal=goal, name=name, specs=sweep.knobs if sweep else None)
    taken = [file for file in lab.files if (folder / file).exists()]
    if taken:
        raise LabError(f"{taken[0]} exists already in {folder}", hint="move it away, or name the study: --name")
    for file, text in reversed(list(lab.files.items())):  # lab.yaml last
        write_atomic(folder / file, text.encode())
    load_lab(folder)  # what was written must be valid
    broken = _broken_import(script)
    if json:
        if then_try:
            return  # the try prints one document about everything
        output.print_json(
            {
                "lab": str(folder),
                "files": list(lab.files),
                "reader": found.reader,
                "knobs": list(lab.knobs),
                "seed": lab.seed,
                "objective": objective,
                "notes": [*lab.notes, *([broken] if broken else [])],
            }
        )
        return
    output.say(f"read {script.path.name} ({found.reader}): {len(found.settings)} settings")
    output.say(f"seed: {lab.seed}" if lab.seed else "seed: none found; without one, runs cannot be repeated and judged")
    output.say(f"knobs (edit {LAB_FILE}): {', '.join(lab.knobs) or 'none found'}")
    for note in lab.notes:
        output.say(note)
    if broken:
        output.say(broken)
    output.say(f"written: {', '.join(lab.files)}")
    if not then_try:
        output.say("next: looplab run" if objective else "objective: not known yet. Next: looplab try")


def _why_not_read(script: Script) -> tuple[str, str]:
    """Return why a script could not be understood, and what to do."""
    by_hand = "write lab.yaml by hand (docs/lab-file.md), or let the script read a config file"
    if script.python is None:
        return "", by_hand
    told = script.first_output
    found = diagnose(_failure(script, told.printed)) if told.problem and told.printed else None
    if found is None or found.kind in ("exception", "needs", "option", "value"):
        return (f": {told.problem}" if told.problem else ""), by_hand
    return f": {found.what}", found.remedy or by_hand


def _broken_import(script: Script) -> str | None:
    """Return a sentence if the script was read from its source alone, since it does not start here."""
    if script.python is None or "introspection" not in vars(script) or not script.introspection.problem:
        return None
    found = diagnose(_failure(script, script.introspection.printed))
    if found is None or found.kind not in ("package", "library", "syntax", "gpu", "memory"):
        return None
    return f"it does not start here: {found}"


def _failure(script: Script, printed: str) -> FailedProgram:
    return FailedProgram(printed, script=script.path.name, own=own_modules(script.folder))


def suggest_scripts(folder: Path) -> None:
    """Mention the scripts beside which a recipe was made: they may be what was meant."""
    found = trainers_in(folder)
    if found:
        output.say(f"for a lab of your own script: looplab init {found[0]}")


# -- try


class TrySession(TerminalSession):
    """A session of one run: the command is shown, then how far it is, and Ctrl-C stops the run at once."""

    def __init__(self, lab: LabConfig, study: StudyConfig, *, json: bool) -> None:
        super().__init__(lab, study, json=json)
        self._view = LiveScreen(self._draw)

    def _draw(self) -> Text:
        from rich.text import Text

        engine = self.engine
        run = next(iter(list(engine.running.values())), None) if engine is not None else None
        if engine is None or run is None:
            return Text("")
        metrics = engine.run_metrics.get(run.id)
        step = f"step {output.number(metrics.step, 7)}, " if metrics is not None and metrics.step is not None else ""
        limit = self.study.launch.timeout
        most = f" of at most {format_seconds(limit)}" if limit is not None else ""
        return Text(f"{step}{format_seconds(run.seconds)}{most}; Ctrl-C stops it", style="dim")

    def request_stop(self, *, drain: bool = False) -> None:
        super().request_stop(drain=False)

    @output.survives_reader
    def _show(self, event: EngineEvent) -> None:
        if self._json:
            return
        if isinstance(event, RunLaunched) and event.run is not None:
            run_dir = run_folder.study_folder(self.lab.folder, self.study.name) / event.run
            argv = run_folder.read_json(run_dir, "run.json", strict=False).get("argv")
            self._view.write(f"$ {shown_command(self.lab.folder, argv if isinstance(argv, list) else [])}\n")
        elif isinstance(event, AlarmRaised | Waiting):
            self._view.say(event.text, "yellow")


def shown_command(lab: Path, argv: Sequence[str], limit: int = MAX_COMMAND) -> str:
    """Return a command as it would be typed in the lab's folder, shortened."""
    prefix = f"{lab}{os.sep}"
    text = shlex.join(str(word).removeprefix(prefix) for word in argv)
    return text if len(text) <= limit else text[:limit].rpartition(" ")[0] + " …"


def try_once(
    folder: Path | None,
    name: str | None,
    edits: Sequence[str],
    seed: int | None,
    seconds: float | None,
    yes: bool,
    json: bool,
    *,
    seeds: int = 1,
) -> None:
    """Run the base config once (or with several seeds), in a study of its own, and show what it measured."""
    lab = open_lab(folder)
    study = lab.study(name)
    setup = check_study(lab, study, RunOptions(informal=True))
    if seed is not None and setup.seed is None:
        raise LabError("no seed reaches the trainer", hint="name its key with `seed` in lab.yaml")
    if seconds is None:
        seconds = min(TRY_S, study.launch.timeout or TRY_S)
    base = setup.bases[0].config
    first = seed if seed is not None else setup.seed_of(base)
    script = script_of(lab, study.launch.command)
    observations: list[Observation] = []
    earlier: Observation | None = None
    for i in range(seeds):
        wanted = None if first is None or setup.seed is None or (seed is None and i == 0) else first + i
        one = [*edits, *([f"{show(setup.seed)}@set={wanted}"] if wanted is not None and setup.seed else [])]
        run, before = _run_trial(lab, try_study(lab, study, one, seconds), base, json=json)
        if run is not None and run.must_be_new and uses_out_dir(study.launch) and study.launch.output_dir == "run":
            give_new_folder(lab, study)
            if not json:
                output.say(f"its output folder must not exist: written to {LAB_FILE}: launch.output_dir: absent")
            lab = load_lab(lab.folder)
            study = lab.study(study.name)
            run, before = _run_trial(lab, try_study(lab, study, one, seconds), base, json=json)
        if run is None:
            sys.exit(130)
        observations.append(run)
        if i == 0:
            earlier = before
        if not json:
            _show_run(run, study, script)
            if run.must_be_new:
                output.say(_explain_new_folder(run, study, script))
        if run.status not in ("ok", "timeout"):
            break
    last = observations[-1]
    other = observations[-2] if len(observations) > 1 else earlier
    compared = compare(last, other) if other is not None and last.status == "ok" else None
    guesses = rank_objectives(last.metrics, last.settings, kept_best(script.modules) if script is not None else ())
    is_measured = last.status in ("ok", "timeout") and bool(last.metrics)
    chosen = study.objective
    if not json:
        if compared is not None and other is not None:
            output.say(explain_comparison(compared, last, other))
        elif setup.seed_route is None and is_measured:
            output.say("no seed reaches the trainer, so the judge cannot repeat a run: name its key with `seed`")
        if chosen is not None and is_measured:
            _show_objective(lab, study, chosen, last, command=_flags(lab, folder, name))
        elif is_measured and guesses:
            chosen = _choose(lab, study, guesses, yes=yes, command=_flags(lab, folder, name))
    elif chosen is None and yes and guesses and is_measured:
        chosen = _set_guess(lab, study, guesses[0])
    if json:
        output.print_json(
            {
                "study": study.name,
                "runs": [run.to_dict() for run in observations],
                "compared": None if compared is None else {"with": other.run if other else None, "result": compared},
                "candidates": [asdict(guess) for guess in guesses[:ASKED]],
                "objective": None if chosen is None else {"metric": chosen.metric, "goal": chosen.goal},
                "next": None
                if not is_measured
                else "looplab run"
                if chosen is not None
                else _objective_command(guesses[0], _flags(lab, folder, name))
                if guesses
                else None,
            }
        )
    if last.status == "stopped":
        sys.exit(130)
    if not is_measured:
        sys.exit(1)


def _run_trial(
    lab: LabConfig, trial: StudyConfig, base: Mapping[str, Any], *, json: bool
) -> tuple[Observation | None, Observation | None]:
    """Run a trial; return what it showed (None: it was stopped before it began), and the last successful one before."""
    options = RunOptions(mode=MODE, again=True, runs=1, informal=True, keep_going=True, decide=False)
    setup = check_study(lab, trial, options)
    stamps = files_below(lab.folder)
    with TrySession(lab, trial, json=json) as session:
        earlier = [run for run in session.record.runs(state="ended") if run.status == "ok"]
        known = {run.id for run in session.record.runs()}
        outputs = run_folder.study_folder(lab.folder, trial.name)
        # A try whose looplab was killed still runs, and nobody wants its result.
        stop_without_engine([outputs / run.id for run in session.record.runs_open()], trial.launch.grace)
        result = session.run(session.begin(setup))
        runs = [run for run in session.record.runs(state="ended") if run.id not in known]
    if not runs:
        if result.outcome.ending is Ending.STOPPED:
            return None, None
        raise LabError(f"nothing was run: {result.outcome.why}", hint=f"looplab status --study {trial.name}")
    wrote = written_files(stamps, files_below(lab.folder))
    before = observe(lab, trial, earlier[-1], base, ()) if earlier else None
    return observe(lab, trial, runs[-1], base, wrote), before


def _show_run(run: Observation, study: StudyConfig, script: Script | None) -> None:
    """Print what a run showed: how it ended, what it measured, and what to know about it."""
    seconds = format_seconds(run.seconds)
    if run.status in ("timeout", "stopped"):
        head = f"stopped after {format_seconds(run.limit_s) if run.status == 'timeout' else seconds}"
        head += ": the metrics so far" if run.metrics else ""
    else:
        head = f"{run.status} in {seconds}"
    facts = []
    if run.peak_memory_mb is not None and run.status != "failed":
        facts.append(f"peak memory {_size(run.peak_memory_mb)}")
    if run.full_run_s is not None and run.seconds and abs(run.full_run_s - run.seconds) > 0.05 * run.seconds:
        facts.append(f"a full run takes about {format_seconds(run.full_run_s)}")
    output.say("; ".join([head, *facts]))
    if run.status == "failed":
        _show_failure(run)
    elif not run.metrics:
        output.say(explain_silence(run))
    if run.metrics:
        _show_metrics(run, study)
    if run.ended_by is not None:
        output.say(explain_stop(run))
    if run.wrote and not run.must_be_new:
        beside = script is not None and writes_beside_itself(script)
        output.say(explain_written(run.wrote, in_run_dir=study.launch.cwd == RUN_FOLDER, beside_script=beside))


def _explain_new_folder(run: Observation, study: StudyConfig, script: Script | None) -> str:
    """Return a sentence about an output folder that must not exist, with what to do."""
    made = [one.file for one in run.wrote if one.is_new and "/" in one.file]
    if run.diagnosis is not None and (named := re.search(r"its output (\S+) exists", run.diagnosis.what)):
        made = [os.path.relpath(named[1]) if os.path.isabs(named[1]) else named[1]]
    flag = output_option(read_interface(script), made) if script is not None and made else None
    if flag is not None:
        remedy = f'add {flag}, "{{out_dir}}" to launch.command, and output_dir: absent to launch, in {LAB_FILE}'
    elif study.launch.cwd != RUN_FOLDER:
        remedy = f"set launch.cwd: run in {LAB_FILE}, so that each run has its own"
    else:
        remedy = f"pass {{out_dir}} for it in launch.command, with launch.output_dir: absent, in {LAB_FILE}"
    place = f" ({made[0].partition('/')[0]})" if made else ""
    return f"its output folder{place} must not exist when it starts, so the next run would fail: {remedy}"


def _show_failure(run: Observation) -> None:
    if run.diagnosis is not None:
        output.say(str(run.diagnosis))
    if not run.last_line:
        output.say("it printed nothing")
        return
    if run.diagnosis is None or run.last_line not in run.diagnosis.what:
        output.say(f"its last line: {run.last_line}")
    if run.diagnosis is None or run.diagnosis.kind == "exception":
        output.say(f"all that it printed: looplab logs {run.run} --study {run.study}")


def _rate(value: float | None) -> str:
    return f"{value:.0f}" if value is not None and value >= 10 else output.number(value, 2)


def _size(megabytes: float) -> str:
    return f"{megabytes / 1024:.1f} GB" if megabytes >= 1024 else f"{megabytes:.0f} MB"


def explain_silence(run: Observation) -> str:
    """Return a sentence about a run that measured nothing, with what to do."""
    if run.status == "stopped":
        return "it has measured nothing yet"
    said = f"its last line: {run.last_line}" if run.last_line else "it printed nothing"
    if run.status == "timeout":
        return f"it has measured nothing so far ({said}). Give it longer: looplab try --time 30m"
    elsewhere = [one.file for one in run.wrote if kind_of(os.path.basename(one.file)) in CURVES]
    if elsewhere:
        return f"it measured nothing in its run folder, but wrote {elsewhere[0]}"
    return (
        f"it measured nothing that looplab can read ({said}). Let it print `name: value`, or write metrics.jsonl, CSV, "
        "TensorBoard or W&B files; measure.stdout in lab.yaml describes a format of its own"
    )


def explain_stop(run: Observation) -> str:
    """Return a sentence about how a run ended when its time was over."""
    after = format_seconds(run.ended_after_s)
    if run.ended_by == "SIGKILL":
        return f"it did not end on SIGTERM and was killed after {after} (launch.grace)"
    if run.ended_by == "itself":
        return f"it ended by itself {after} after SIGTERM"
    return f"SIGTERM ended it within {after}"


def _show_metrics(run: Observation, study: StudyConfig) -> None:
    objective = study.objective.metric if study.objective is not None else None
    hidden = study.holdout.metric if study.holdout is not None else None
    metrics = [metric for metric in run.metrics if metric.name != hidden]
    ranked = {guess.metric: i for i, guess in enumerate(rank_objectives(metrics, run.settings))}
    rows = sorted(metrics, key=lambda metric: (metric.name != objective, ranked.get(metric.name, len(metrics))))
    output.table(
        ("metric", "in", "points", "per min", "first", "last", "noise"),
        [
            (
                metric.name,
                metric.source,
                str(metric.points),
                _rate(metric.per_minute) if metric.points > 1 else "-",
                output.number(metric.first, 5),
                output.number(metric.last, 5),
                "-" if metric.noise is None else f"{100 * metric.noise:.0f}%",
            )
            for metric in rows[:SHOWN]
        ],
    )
    if len(rows) > SHOWN:
        output.say(f"and {len(rows) - SHOWN} more: looplab show {run.run} --study {run.study}")


def explain_comparison(result: Comparison, run: Observation, other: Observation) -> str:
    """Return a sentence about what two runs say about the script."""
    changed = sorted(
        name for name in {*run.settings, *other.settings} if run.settings.get(name) != other.settings.get(name)
    )
    names = ", ".join(f"{name} {_value(other, name)} → {_value(run, name)}" for name in changed[:3])
    if result == "same config, same numbers":
        return f"the same config as {other.run}, and exactly the same numbers: it is reproducible"
    if result == "same config, other numbers":
        return (
            f"the same config as {other.run}, and other numbers: it is not seeded, or not deterministic; "
            "a single run says little"
        )
    if result == "no difference":
        return (
            f"{names}: the same numbers as {other.run}, to the last digit. The change does not reach the trainer: "
            "does the script use it?"
        )
    return f"{names}: other numbers than {other.run}, so the change reaches the trainer"


def _value(run: Observation, name: str) -> str:
    return output.cell(run.settings[name]) if name in run.settings else "-"


# -- the objective


def _flags(lab: LabConfig, folder: Path | None, name: str | None) -> str:
    """Return the options that a further command needs to mean the same lab and study."""
    words = [] if folder is None else ["--lab", str(folder)]
    return shlex.join([*words, *([] if name is None else ["--study", name])])


def _objective_command(guess: ObjectiveGuess, flags: str) -> str:
    return f"looplab objective {shlex.quote(guess.metric)} --{guess.goal} {flags}".rstrip()


def _choose(
    lab: LabConfig, study: StudyConfig, guesses: Sequence[ObjectiveGuess], *, yes: bool, command: str
) -> ObjectiveConfig | None:
    """Ask for the objective, or take the first guess; return it, or None if there is none."""
    best: ObjectiveGuess | None = guesses[0]
    if not yes:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            output.say(f"looks like the objective: {guesses[0].metric} ({guesses[0].goal}; {guesses[0].why})")
            output.say(f"next: {_objective_command(guesses[0], command)}")
            return None
        best = _ask(guesses[:ASKED])
    if best is None:
        output.say("no objective was written. Next: looplab objective METRIC --min or --max")
        return None
    chosen = _set_guess(lab, study, best)
    output.say(f"objective: {best.metric} ({best.goal}), written to {LAB_FILE}")
    if not best.is_goal_known:
        other = _objective_command(replace(best, goal="max"), command)
        output.say(f"whether smaller or larger is better is a guess; if larger is: {other}")
    output.say(f"next: looplab run {command}".rstrip())
    return chosen


def _ask(guesses: Sequence[ObjectiveGuess]) -> ObjectiveGuess | None:
    """Ask which metric counts; Enter takes the first."""
    output.say("Which metric counts?")
    output.table(
        ("", "metric", "better", "why"),
        [
            (str(i), guess.metric, "smaller" if guess.goal == "min" else "larger", guess.why)
            for i, guess in enumerate(guesses, 1)
        ],
    )
    by_name = {guess.metric: guess for guess in guesses}
    choices = "number" if len(guesses) > 1 else "1"
    choices += " (Enter takes 1, n for none)"
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


def _set_guess(lab: LabConfig, study: StudyConfig, guess: ObjectiveGuess) -> ObjectiveConfig:
    set_objective(lab, study, guess.metric, guess.goal, None)
    return ObjectiveConfig(metric=guess.metric, goal=guess.goal)


def _show_objective(
    lab: LabConfig, study: StudyConfig, chosen: ObjectiveConfig, run: Observation, *, command: str
) -> None:
    """Print what a run measured for an objective that is known already."""
    tried = _last_try(lab, study)
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
    lab = open_lab(folder)
    study = lab.study(name)
    chosen: Goal = goal or Directions(study.measure.goals).goal(metric)
    set_objective(lab, study, metric, chosen, at)
    lab = load_lab(lab.folder)
    study = lab.study(study.name)
    tried = _last_try(lab, study)
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
            output.say(f"the last try ({run}) measured: {output.number(value, 6)}")
        else:
            near = get_close_matches(metric, names, n=2, cutoff=0.5)
            known = f"did you mean {' or '.join(near)}?" if near else f"it measured {', '.join(names[:8]) or 'nothing'}"
            output.say(f"the last try ({run}) did not measure {metric}; {known}")
    output.say("next: looplab run; or, for runs that have ended, looplab remeasure")


def _last_try(lab: LabConfig, study: StudyConfig) -> tuple[str, float | None, list[str]] | None:
    """Return the last try that measured the objective, else the last one: its name, the value, and the names of its
    metrics; None: there was no try."""
    outputs = run_folder.study_folder(lab.folder, study.name + SUFFIX)
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
