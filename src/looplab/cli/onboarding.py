"""init SCRIPT and try: from an existing training script to a study."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.cli.live import LiveScreen
from looplab.cli.objective import ASKED, choose, lab_flags, objective_command, set_guess, show_objective
from looplab.cli.running import TerminalSession
from looplab.cli.trial_view import explain_comparison, explain_new_folder, show_run
from looplab.config.files import write_atomic
from looplab.config.lab import LAB_FILE, LabConfig, StudyConfig, load_lab
from looplab.config.paths import show
from looplab.errors import LabError
from looplab.launch.local import stop_without_engine
from looplab.loop.events import AlarmRaised, EngineEvent, RunLaunched, Waiting
from looplab.loop.outcome import Ending
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions
from looplab.onboard.base import Interface, Script
from looplab.onboard.diagnose import FailedProgram, diagnose
from looplab.onboard.introspect import NO_COMMAND_LINE
from looplab.onboard.labfile import make_lab
from looplab.onboard.objective import Goal, kept_best, kept_in_config, rank_objectives
from looplab.onboard.output_folder import give_new_folder, place_output, uses_out_dir
from looplab.onboard.readers import read_interface
from looplab.onboard.readers.config_file import RUNNER
from looplab.onboard.scripts import check_words, find_script, is_program, is_script, trainers_in
from looplab.onboard.sweeps import is_sweep, read_sweep
from looplab.onboard.trial import MODE, TRY_S, Observation, compare, observe, own_modules, script_of, try_study
from looplab.onboard.written import files_below, written_files
from looplab.runs import folder as run_folder
from looplab.runs.clock import format_seconds

if TYPE_CHECKING:
    from rich.text import Text

SHORT_S = 30.0
"""Maximum seconds of a run that is repeated if it wrote outside its folder."""
MAX_COMMAND = 400
"""Characters of a command that are shown."""


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
        if is_program(words[0], Path.cwd()):
            return True
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
            f"{LAB_FILE} already exists in {folder}", hint="`looplab try` runs it; to start over, move it away"
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
            raise LabError(f"looplab cannot tell how {script.name} takes its settings{problem}", hint=hint)
        found = interface
    shared = _shared_option(script, found, {"name": name, "objective": None if sweep else objective})
    lab = make_lab(script, found, objective=objective, goal=goal, name=name, specs=sweep.knobs if sweep else None)
    taken = [file for file in lab.files if (folder / file).exists()]
    if taken:
        raise LabError(f"{taken[0]} already exists in {folder}", hint="move it away, or name the study: --name")
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
                "is_seed_constant": lab.is_seed_constant,
                "objective": objective,
                "notes": [*lab.notes, *([broken] if broken else []), *([shared] if shared else [])],
            }
        )
        return
    output.say(f"read {script.name} ({found.reader}): {len(found.settings)} settings")
    if lab.seed is None and not lab.is_seed_constant:
        output.say("seed: none found; without one, runs cannot be repeated or judged")
    else:
        output.say(f"seed: {lab.seed or f'a constant of the script, which {RUNNER} sets; the file stays as it is'}")
    output.say(f"knobs (edit {LAB_FILE}): {', '.join(lab.ranges) or 'none found'}")
    for note in lab.notes:
        output.say(note)
    if broken:
        output.say(broken)
    if shared:
        output.say(shared)
    output.say(f"written: {', '.join(lab.files)}")
    if not then_try:
        output.say("next: looplab run" if objective else "objective: not known yet. Next: looplab try")


def _shared_option(script: Script, interface: Interface, given: Mapping[str, str | None]) -> str | None:
    """Return a sentence if an option that was typed belongs to looplab and to the script; None: none does.

    Raises:
        LabError: The script needs it.
    """
    own = {setting.name: setting for setting in interface.settings}
    for name, value in given.items():
        if value is not None and name in own and not own[name].positional:
            typed = [*script.argv, f"--{name}", value]
            apart = f"looplab init -- {shlex.join(typed)}"
            what = f"--{name} is an option of both looplab and {script.name}, and was read as looplab's"
            if own[name].required:
                raise LabError(what, hint=f"for {script.name}: {apart}")
            return f"{what}; for {script.name}: {apart}"
    return None


def _why_not_read(script: Script) -> tuple[str, str]:
    """Return why a script could not be understood, and what to do."""
    by_hand = "write lab.yaml by hand (docs/lab-file.md), or let the script read a config file"
    if script.python is None:
        return "", by_hand
    answer = script.first_output
    found = diagnose(_failure(script, answer.printed)) if answer.problem and answer.printed else None
    if answer.problem == NO_COMMAND_LINE and found is None:
        return (
            ": it has no options, and no constants that look like hyper-parameters",
            "give names to the numbers to be searched, such as LR = 0.1 at the top of the file",
        )
    if found is not None and found.kind == "exception":
        return f": {answer.problem}", f"if it fails without --help too, correct the script; else {by_hand}"
    if found is None or found.kind in ("needs", "option", "value"):
        return (f": {answer.problem}" if answer.problem else ""), by_hand
    return f": {found.what}", found.remedy or by_hand


def _broken_import(script: Script) -> str | None:
    """Return a sentence if only the script's source was read, since the script does not start."""
    if script.python is None or "introspection" not in vars(script) or not script.introspection.problem:
        return None
    found = diagnose(_failure(script, script.introspection.printed))
    if found is None or found.kind not in ("package", "library", "syntax", "gpu", "memory"):
        return None
    return f"it does not start: {found}"


def _failure(script: Script, printed: str) -> FailedProgram:
    return FailedProgram(printed, script=script.name, own=own_modules(script.folder))


def suggest_scripts(folder: Path) -> None:
    """Mention the scripts next to a new recipe: the user may have meant one of them."""
    found = trainers_in(folder)
    if found:
        output.say(f"for a lab of your own script: looplab init {found[0]}")


# -- try


class TrySession(TerminalSession):
    """A session of one run: shows the command, then the progress; Ctrl-C stops the run at once."""

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
        elif isinstance(event, Waiting) or (isinstance(event, AlarmRaised) and event.run is not None):
            self._view.say(event.text, "yellow")


def shown_command(lab: Path, argv: Sequence[str]) -> str:
    """Return a command as it would be typed in the lab's folder, shortened."""
    prefix = f"{lab}{os.sep}"
    text = shlex.join(str(word).removeprefix(prefix) for word in argv)
    return text if len(text) <= MAX_COMMAND else text[:MAX_COMMAND].rpartition(" ")[0] + " …"


def try_once(
    folder: Path | None,
    name: str | None,
    *,
    edits: Sequence[str] = (),
    seed: int | None = None,
    seeds: int = 1,
    seconds: float | None = None,
    yes: bool = False,
    json: bool,
) -> None:
    """Run the base config once (or with several seeds), in a separate study, and show what it measured."""
    lab = open_lab(folder, draft=True)
    study = lab.study(name)
    setup = check_study(lab, study, RunOptions(informal=True))
    if seed is not None and setup.seed_route is None:
        raise LabError("no seed reaches the trainer", hint="name its key with `seed` in lab.yaml")
    if seconds is None:
        seconds = min(TRY_S, study.launch.timeout or TRY_S)
    base = setup.bases[0].config
    first = seed if seed is not None else setup.seed_of(base)
    script = script_of(lab, study.launch.command)
    observations: list[Observation] = []
    earlier: Observation | None = None
    for i in range(seeds):
        wanted = None if first is None or (seed is None and i == 0) else first + i
        one = [*edits, *([f"{show(setup.seed)}@set={wanted}"] if wanted is not None and setup.seed else [])]
        run, before = _run_trial(lab, try_study(lab, study, one, seconds), base, wanted, json=json)
        if run is not None and run.must_be_new and uses_out_dir(study.launch) and study.launch.output_dir == "run":
            give_new_folder(lab, study)
            if not json:
                output.say(f"its output folder must not exist: written to {LAB_FILE}: launch.output_dir: absent")
            lab = load_lab(lab.folder, draft=True)
            study = lab.study(study.name)
            run, before = _run_trial(lab, try_study(lab, study, one, seconds), base, wanted, json=json)
        if run is None:
            sys.exit(130)
        is_short = (run.seconds or 0) < SHORT_S
        matters = not run.metrics or run.must_be_new or run.measured_elsewhere
        if run.wrote and run.status == "ok" and (matters or is_short):
            run = _with_own_output(lab, study, script, run, one, seconds, base, wanted, json=json)
            lab = load_lab(lab.folder, draft=True)
            study = lab.study(study.name)
        observations.append(run)
        if i == 0:
            earlier = before
        if not json:
            show_run(run, study, script)
            if run.must_be_new:
                output.say(explain_new_folder(run, study, script))
        if run.status not in ("ok", "timeout"):
            break
    last = observations[-1]
    other = observations[-2] if len(observations) > 1 else earlier
    compared = compare(last, other) if other is not None and last.status == "ok" else None
    kept = [*kept_in_config(last.settings), *(kept_best(script.modules) if script is not None else ())]
    guesses = rank_objectives(last.metrics, last.settings, kept)
    is_measured = last.status in ("ok", "timeout") and bool(last.metrics)
    chosen = study.objective
    if not json:
        if compared is not None and other is not None:
            output.say(explain_comparison(compared, last, other))
        elif setup.seed_route is None and is_measured:
            output.say("no seed reaches the trainer, so the judge cannot repeat a run: name its key with `seed`")
        if chosen is not None and is_measured:
            show_objective(lab, study, chosen, last, command=lab_flags(folder, name))
        elif is_measured and guesses:
            chosen = choose(lab, study, guesses, yes=yes, command=lab_flags(folder, name))
    elif chosen is None and yes and guesses and is_measured:
        chosen = set_guess(lab, study, guesses[0])
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
                else objective_command(guesses[0], lab_flags(folder, name))
                if guesses
                else None,
            }
        )
    if last.status == "stopped":
        sys.exit(130)
    if not is_measured:
        sys.exit(1)


def _with_own_output(
    lab: LabConfig,
    study: StudyConfig,
    script: Script | None,
    run: Observation,
    edits: Sequence[str],
    seconds: float | None,
    base: Mapping[str, Any],
    seed: int | None,
    *,
    json: bool,
) -> Observation:
    """Let a trainer that wrote into the lab write to its run folder, and run it again; the lab file stays as it was if
    that does not work. Return what the run showed that counts."""
    path = lab.folder / LAB_FILE
    before = path.read_bytes()
    changed = place_output(lab, study, script, [one.file for one in run.wrote if one.is_new])
    if changed is None:
        return run
    lab = load_lab(lab.folder, draft=True)
    study = lab.study(study.name)
    if not json:
        written = ", ".join(one.file for one in run.wrote[:2])
        output.say(f"it wrote {written} into the lab; with a folder of its own for each run:")
    again, _ = _run_trial(lab, try_study(lab, study, edits, seconds), base, seed, json=json)
    # What is printed does not count beside a table or an event file, so that there may be fewer metrics.
    is_poorer = again is not None and len(again.metrics) < len(run.metrics) and not run.measured_elsewhere
    if again is None or again.status != "ok" or again.wrote or not again.metrics or is_poorer:
        write_atomic(path, before)
        if not json:
            output.say("that did not work, so lab.yaml was restored")
        return run
    if not json:
        output.say(f"written to {LAB_FILE}: {changed}")
    return again


def _run_trial(
    lab: LabConfig, trial: StudyConfig, base: Mapping[str, Any], seed: int | None, *, json: bool
) -> tuple[Observation | None, Observation | None]:
    """Run a trial; return what it showed (None: it was stopped before it began), and the last successful one before.

    Args:
        seed: The seed of the run if it is not part of the config; None: the usual one.
    """
    options = RunOptions(mode=MODE, again=True, runs=1, informal=True, keep_going=True, decide=False, seed=seed)
    setup = check_study(lab, trial, options)
    stamps = files_below(lab.folder)
    with TrySession(lab, trial, json=json) as session:
        earlier = [run for run in session.record.runs(state="ended") if run.status == "ok"]
        known = {run.id for run in session.record.runs()}
        outputs = run_folder.study_folder(lab.folder, trial.name)
        # A try whose looplab was killed still runs, and its result is not needed.
        stop_without_engine([outputs / run.id for run in session.record.runs_open()], trial.launch.grace)
        result = session.run(session.begin(setup))
        runs = [run for run in session.record.runs(state="ended") if run.id not in known]
    if not runs:
        if result.outcome.ending is Ending.STOPPED:
            return None, None
        raise LabError(f"nothing ran: {result.outcome.why}", hint=f"looplab status --study {trial.name}")
    wrote = written_files(stamps, files_below(lab.folder))
    before = observe(lab, trial, earlier[-1], base, ()) if earlier else None
    return observe(lab, trial, runs[-1], base, wrote), before
