"""All commands of looplab with their options. Their implementations are imported when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from looplab.cli.completion import complete_runs, complete_studies
from looplab.cli.help import EXAMPLES, GroupedCommands, add_examples

app = typer.Typer(
    name="looplab",
    cls=GroupedCommands,
    help="An autonomous lab for machine-learning training: run, measure, decide, judge, record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would take a third of the time of `--help`
    context_settings={"help_option_names": ["-h", "--help"]},
)

LabOption = Annotated[
    Path | None, typer.Option("--lab", help="The lab's folder (default: the lab that contains the current folder).")
]
StudyOption = Annotated[
    str | None, typer.Option("--study", help="The study, if the lab has several.", autocompletion=complete_studies)
]
Smaller = Annotated[bool, typer.Option("--min", help="Smaller is better (default: guessed from the metric's name).")]
Larger = Annotated[bool, typer.Option("--max", help="Larger is better.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunName = Annotated[
    str, typer.Argument(help="A run: its id, its number, LATEST or BEST.", autocompletion=complete_runs)
]
Cfgs = Annotated[list[Path] | None, typer.Option("--cfgs", help="Base configs, instead of those in lab.yaml.")]
Mode = Annotated[str | None, typer.Option("--mode", help="A mode of the study: edits on the base.")]
Rounds = Annotated[
    int | None, typer.Option("--rounds", min=1, help="Total number of rounds; with new --cfgs, counted from now on.")
]
Runs = Annotated[
    int | None, typer.Option("--runs", min=1, help="Total number of runs; with new --cfgs, counted from now on.")
]
Continuous = Annotated[
    bool, typer.Option("--continuous", help="Give each free slot the next proposal at once, without rounds.")
]
Concurrency = Annotated[int | None, typer.Option("--concurrency", min=1, help="Number of slots.")]
ExecutorOption = Annotated[
    str | None, typer.Option("--executor", help="Where runs start: local, slurm, ray, or the name of a plug-in.")
]
Gpus = Annotated[list[str] | None, typer.Option("--gpus", help="Devices: 0,1,2,3; `none` for none.")]
Share = Annotated[bool | None, typer.Option("--share/--no-share", help="Also use devices that other processes use.")]
Informal = Annotated[
    bool, typer.Option("--informal", help="Run even if the study's requirements (`require`) are not met.")
]
KeepGoing = Annotated[bool, typer.Option("--keep-going", help="Continue even if no base config works.")]
Extra = Annotated[
    list[str] | None,
    typer.Option("--extra", "--extra-args", help="An extra argument for the trainer; or put arguments after `--`."),
]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Edit the config key for the number of steps.")]
LogFreq = Annotated[int | None, typer.Option("--log-freq", min=0, help="Edit the config key log_freq.")]
EvalFreq = Annotated[int | None, typer.Option("--eval-freq", min=0, help="Edit the config key eval_freq.")]
WandbOnline = Annotated[bool, typer.Option("--wandb-online", help="Set track.wandb.mode to online for this call.")]
WandbEntity = Annotated[str | None, typer.Option("--wandb-entity", help="Set track.wandb.entity for this call.")]
WandbProject = Annotated[str | None, typer.Option("--wandb-project", help="Set track.wandb.project for this call.")]
Decide = Annotated[
    bool | None, typer.Option("--decide/--no-decide", help="Whether rules, search and agents decide on further runs.")
]
VariantsPerRun = Annotated[
    int | None,
    typer.Option("--variants-per-run", min=1, help="Maximum number of proposals that rules derive from one run."),
]
Again = Annotated[bool, typer.Option("--again", help="Rerun configs that were run before.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from looplab import __version__

        typer.echo(__version__)
        raise typer.Exit()


def _seconds(option: str, text: str) -> float:
    """Return the duration that an option names."""
    from looplab.config.lab import parse_duration
    from looplab.errors import LabError

    try:
        return parse_duration(text)
    except ValueError as error:
        raise LabError(f"{option}: {error}") from None


# -- making a lab


@app.command(context_settings={"ignore_unknown_options": True})
def init(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A script or its command, a sweep.yaml, a recipe, a folder with a lab, or a git URL."),
    ] = None,
    objective: Annotated[str | None, typer.Option("--objective", help="The metric to optimise.")] = None,
    smaller: Smaller = False,
    larger: Larger = False,
    name: Annotated[str | None, typer.Option("--name", help="The study (default: the script's name).")] = None,
    then_try: Annotated[bool, typer.Option("--try", help="Then run it once, as `looplab try` does.")] = False,
    json: Json = False,
) -> None:
    """Create a lab: for a training script, or from a recipe.

    The script is read, not changed: its options become the base config, and those that look like hyperparameters
    become knobs. `looplab init RECIPE FOLDER` copies a recipe.
    """
    from looplab.cli import onboarding, recipes
    from looplab.cli.objective import goal_of

    found = words or ["quickstart"]
    if onboarding.wants(found):
        onboarding.init(found, objective, goal_of(smaller, larger), name, json, then_try=then_try)
        if then_try:
            onboarding.try_once(None, None, json=json)
        return
    if words is None and not json:
        onboarding.suggest_scripts(Path.cwd())  # before the recipe adds scripts of its own
    recipes.init(found[0], Path(found[1]) if len(found) > 1 else None, json)


@app.command(context_settings={"allow_interspersed_args": False})
def recipe(
    name: Annotated[str, typer.Argument(help="Which recipe.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="The recipe's command, with options; omit it to list the commands.")
    ] = None,
) -> None:
    """Run a command that belongs to a recipe."""
    from looplab.cli import recipes

    recipes.command(name, words or [])


@app.command(name="try")
def try_(
    change: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, for this run only.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Another seed.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of runs, each with another seed.")] = 1,
    time: Annotated[
        str | None, typer.Option("--time", help="Stop the run after this time: 90s, 1h (default: 5m).")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Accept the guessed objective.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run the base config once and show what it measures.

    Also shows where it was measured and how noisy it is. The run belongs to no study, so nothing is compared with
    it. A long run is stopped; the metrics so far are shown.
    """
    from looplab.cli import onboarding
    from looplab.errors import LabError

    seconds = None if time is None else _seconds("--time", time)
    for word in change or []:
        if "=" not in word and "@" not in word:
            raise LabError(f"--set {word}: the value is missing", hint=f"write --set {word}=VALUE")
    edits = [word if "@" in word.partition("=")[0] else word.replace("=", "@set=", 1) for word in change or []]
    onboarding.try_once(lab, study, edits=edits, seed=seed, seeds=seeds, seconds=seconds, yes=yes, json=json)


@app.command()
def objective(
    metric: Annotated[str, typer.Argument(help="The metric to optimise.")],
    smaller: Smaller = False,
    larger: Larger = False,
    at: Annotated[str | None, typer.Option("--at", help="first, last, best or mean(5).")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Write the objective to the lab file."""
    from looplab.cli import objective as objectives

    objectives.objective(lab, study, metric, objectives.goal_of(smaller, larger), at, json)


@app.command()
def demo(folder: Annotated[Path, typer.Argument(help="The folder of the demo's lab.")] = Path("demo")) -> None:
    """Create the quickstart lab and run its study."""
    from looplab.cli import recipes

    recipes.demo(folder)


@app.command()
def check(
    cfgs: Cfgs = None,
    mode: Mode = None,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Repair what changed since the lab was written; calls its scripts with `--help`."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix: show the changes and write nothing.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="Check this pipeline config instead, as `stage` would use it.")
    ] = None,
    edit: Edits = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Check the lab file, configs and queue.

    Shows the knobs with their ranges and base values, and the command of each base config. Writes nothing without
    --fix, which repairs lab.yaml and base configs: renamed or removed settings of the script, ranges that exclude
    the base value, changed flag formats, a moved script, seed or metric. It changes only what is certain, shows
    every change, and restores the files if the lab does not pass its checks afterwards.
    """
    from looplab.cli import editing, mending

    if dry_run and not fix:
        raise typer.BadParameter("--dry-run works only with --fix", param_hint="--dry-run")
    if edit and config is None:
        raise typer.BadParameter("--edit works only with --config", param_hint="--edit")
    if config is not None:
        from looplab.cli import staging

        staging.check_config(lab, study, config, edit or [], json)
        return
    mended = mending.fix(lab, study, dry_run=dry_run, json=json) if fix else None
    if not dry_run:
        editing.check(lab, study, cfgs, mode, json, mended=mended)


# -- running


@app.command()
def run(
    cfgs: Cfgs = None,
    mode: Mode = None,
    rounds: Rounds = None,
    runs: Runs = None,
    continuous: Continuous = False,
    concurrency: Concurrency = None,
    executor: ExecutorOption = None,
    gpus: Gpus = None,
    share: Share = None,
    informal: Informal = False,
    extra: Extra = None,
    steps: Steps = None,
    log_freq: LogFreq = None,
    eval_freq: EvalFreq = None,
    decide: Decide = None,
    variants_per_run: VariantsPerRun = None,
    wandb_online: WandbOnline = False,
    wandb_entity: WandbEntity = None,
    wandb_project: WandbProject = None,
    again: Again = False,
    keep_going: KeepGoing = False,
    exec_: Annotated[bool, typer.Option("--exec", help="Required to start runs if the study sets needs_exec.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background; see `attach`.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run a study on your slots until its budget is used.

    Continues where an earlier engine stopped. Ctrl-C drains (running trainings may finish), a second Ctrl-C stops.
    Stops with exit code 1 if no base config works, since nothing could be compared, or if a config of --cfgs was
    not run. Runs with different --steps or trainer arguments are not compared with each other.
    """
    from looplab.cli import running

    options = running.make_options(
        cfgs=cfgs, mode=mode, rounds=rounds, runs=runs, continuous=continuous, concurrency=concurrency, gpus=gpus,
        share=share, informal=informal, extra=extra, keep_going=keep_going, again=again, decide=decide,
        flags={"steps": steps, "log-freq": log_freq, "eval-freq": eval_freq}, variants=variants_per_run,
        wandb_online=wandb_online, wandb_entity=wandb_entity, wandb_project=wandb_project, executor=executor,
    )  # fmt: skip
    running.run(lab, study, options, execute=exec_, detach=detach, json=json)


@app.command()
def plan(
    cfgs: Cfgs = None,
    mode: Mode = None,
    rounds: Rounds = None,
    runs: Runs = None,
    continuous: Continuous = False,
    concurrency: Concurrency = None,
    executor: ExecutorOption = None,
    gpus: Gpus = None,
    share: Share = None,
    informal: Informal = False,
    extra: Extra = None,
    keep_going: KeepGoing = False,
    steps: Steps = None,
    log_freq: LogFreq = None,
    eval_freq: EvalFreq = None,
    decide: Decide = None,
    variants_per_run: VariantsPerRun = None,
    wandb_online: WandbOnline = False,
    wandb_entity: WandbEntity = None,
    wandb_project: WandbProject = None,
    again: Again = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print the command, folder and environment of every run.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Use the options of the last `run`.")] = False,
    power: Annotated[
        bool, typer.Option("--power", help="Instead, show which improvements the judge can detect.")
    ] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Show what `run` would do next; write nothing.

    Uses the engine's own planner on a copy of the ledger. Agents are not called; a rules.py is executed.
    """
    from looplab.cli import planning, running

    if power:
        planning.show_power(lab, study, runs, json)
        return
    options = running.make_options(
        cfgs=cfgs, mode=mode, rounds=rounds, runs=runs, continuous=continuous, concurrency=concurrency, gpus=gpus,
        share=share, informal=informal, extra=extra, keep_going=keep_going, again=again, decide=decide,
        flags={"steps": steps, "log-freq": log_freq, "eval-freq": eval_freq}, variants=variants_per_run,
        wandb_online=wandb_online, wandb_entity=wandb_entity, wandb_project=wandb_project, executor=executor,
    )  # fmt: skip
    planning.plan(lab, study, options, resume=resume, commands=commands, json=json)


@app.command()
def resume(
    executor: ExecutorOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background; see `attach`.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Continue after a stop or a crash.

    Uses the options of the last `run`, and adopts trainings that are still alive.
    """
    from looplab.cli import running

    running.resume(lab, study, detach, json, executor=executor)


@app.command()
def attach(lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """Watch a study that runs in the background.

    Ctrl-C leaves it running.
    """
    from looplab.cli import running

    running.attach(lab, study, json)


@app.command()
def stop(
    run: Annotated[str | None, typer.Argument(help="Only this run.")] = None,
    drain: Annotated[bool, typer.Option("--drain", help="Let running trainings finish and start no new ones.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Stop a study, drain it, or stop one run.

    Stopping sends SIGTERM to each training and all its processes, and SIGKILL after launch.grace.
    """
    from looplab.cli import running

    running.stop(lab, study, run, drain, json)


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[
        list[str] | None, typer.Argument(help="After `--`: a program and its arguments. No shell.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="A name that says what it is for.")] = None,
    timeout: Annotated[str | None, typer.Option("--timeout", help="Stop it after this time: 90, 30m, 2h.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run it again, however the last call ended.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait until it ends.")] = False,
    serve: Annotated[int | None, typer.Option("--serve", hidden=True)] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run a command in the study's slots.

    The command waits for a slot and gets its device, a run folder, and the study's limits and budget. Its output is
    streamed and its exit code is returned (124: timeout). It keeps running if you leave or are killed: the same
    call attaches to it, or reports how it ended. Its environment is the engine's with launch.env, not yours.
    """
    from looplab.cli import submitting

    if serve is not None:
        submitting.serve(lab, study, serve)
        return
    submitting.check_dashes(command or [])
    submitting.submit(lab, study, command or [], label=name, timeout=timeout, again=again, detach=detach, json=json)


@app.command()
def autopilot(
    runs: Annotated[int, typer.Option("--runs", min=1, help="Proposals to try, one after the other.")] = 1,
    mode: Annotated[str | None, typer.Option("--mode", help="A mode of the study, such as quick or full.")] = None,
    gpus: Annotated[list[str] | None, typer.Option("--gpus", help="Devices, such as 0,1.")] = None,
    informal: Annotated[
        bool, typer.Option("--informal", help="Run even if the study's requirements (`require`) are not met.")
    ] = False,
    stop_on_failure: Annotated[
        bool,
        typer.Option("--stop-on-failure", help="Stop with exit code 1 if the agent still fails after all retries."),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background; see `attach`.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Let an agent make proposals, one after the other.

    Uses all proposers of the study. Each proposal is checked, trained, measured, judged and recorded. Steer with
    `say`, `pause`, `veto` and proposals/next_config.json. A failed agent call is retried; after the last retry, the
    other proposers or a search fill in, and the agent is called again for the next proposal.
    """
    from dataclasses import replace

    from looplab.cli import running, steering

    options = running.make_options(mode=mode, gpus=gpus, informal=informal)
    options = replace(options, stop_on_failure=stop_on_failure)
    steering.autopilot(lab, study, options, runs, detach=detach, json=json)


@app.command()
def probe(
    cfgs: Cfgs = None,
    mode: Mode = None,
    gpus: Gpus = None,
    share: Share = None,
    informal: Informal = False,
    extra: Extra = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over and ignore earlier measurements.")] = False,
    exec_: Annotated[bool, typer.Option("--exec", help="Required to start runs if the study sets needs_exec.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Find the fastest stable setting on this machine.

    Runs every combination in the lab file's `probe` briefly, one at a time, and recommends the stable one with the
    highest throughput. Exit code 1: no setting was stable.
    """
    from looplab.cli import probing, running

    options = running.make_options(cfgs=cfgs, mode=mode, gpus=gpus, share=share, informal=informal, extra=extra)
    probing.probe(lab, study, options, fresh=fresh, execute=exec_, json=json)


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="The message.")],
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Send a message to the agent, for its next prompt."""
    from looplab.cli import steering

    steering.say(lab, study, text, json)


@app.command()
def pause(lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """Start no new runs until `resume`."""
    from looplab.cli import steering

    steering.pause(lab, study, json)


@app.command()
def veto(
    run: Annotated[str, typer.Argument(help="A run: id, number, LATEST, BEST.")],
    why: Annotated[str, typer.Option("--why", "--reason", help="Why.")] = "",
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Invalidate a run: stop it and exclude it from promotion."""
    from looplab.cli import steering

    steering.veto(lab, study, run, why, json)


@app.command("agent-log")
def agent_log(
    log: Annotated[str | None, typer.Argument(help="A log in agent_runs (default: the newest).")] = None,
    only: Annotated[str | None, typer.Option("--only", help="commands, outputs, messages, or final.")] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Show an agent's messages, commands and their output."""
    from looplab.cli import steering

    if only not in (None, "commands", "outputs", "messages", "final"):
        raise typer.BadParameter("--only takes commands, outputs, messages or final")
    steering.agent_log(lab, log, only, json)


@app.command()
def propose(
    change: Annotated[list[str], typer.Option("--change", help="An edit: path@op=value. Several may follow.")],
    reason: Annotated[str, typer.Option("--reason", help="Why.")] = "",
    hypothesis: Annotated[str, typer.Option("--hypothesis", help="What you expect.")] = "",
    parent: Annotated[str, typer.Option("--parent", help="A run, `best`, or `base`.")] = "best",
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Add a proposal to the study's queue."""
    from looplab.cli import editing

    editing.propose(lab, study, change=change, reason=reason, hypothesis=hypothesis, parent=parent, json=json)


@app.command("import")
def import_(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders with recorded runs.")] = None,
    optuna: Annotated[
        str | None, typer.Option("--optuna", help="An Optuna storage: sqlite:///x.db, or a journal file.")
    ] = None,
    optuna_study: Annotated[str | None, typer.Option("--optuna-study", help="Which of its studies.")] = None,
    map_: Annotated[
        list[str] | None, typer.Option("--map", help="THEIRS=OURS: rename a metric or a config key.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be imported.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Import runs that other tools recorded.

    Search, rules and agents use them; the judge does not, and they count towards no budget. Runs that were imported
    before are skipped. Exit code 1: nothing could be imported.
    """
    from looplab.cli import importing

    importing.import_runs(
        lab, study, folders or [], optuna=optuna, optuna_study=optuna_study, mapping=map_ or [], dry_run=dry_run,
        json=json,
    )  # fmt: skip


@app.command()
def edit(
    base: Annotated[Path | None, typer.Argument(help="The config to start from.")] = None,
    base_cfg: Annotated[Path | None, typer.Option("--base-cfg", help="The same as BASE.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="The reason, recorded with the variant.")] = "",
    change: Annotated[
        list[str] | None, typer.Option("--change", "--changes", help="An edit: path@op=value. Several may follow.")
    ] = None,
    out_dir: Annotated[Path | None, typer.Option("--out-dir", help="The folder for the variant.")] = None,
    run: Annotated[bool, typer.Option("--run", "--exec", help="Run the variant at once, and nothing else.")] = False,
    extra: Extra = None,
    steps: Steps = None,
    log_freq: LogFreq = None,
    eval_freq: EvalFreq = None,
    informal: Informal = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Write a variant of a config.

    The variant is named `<stem>_<6 chars>`; its parent and the reason are recorded.
    """
    from looplab.cli import editing

    flags = {"steps": steps, "log-freq": log_freq, "eval-freq": eval_freq}
    run_options = {"extra": extra or [], "informal": informal}
    editing.edit(
        lab, study, base=base or base_cfg, changes=change or [], flags=flags, reason=reason, out_dir=out_dir, run=run,
        run_options=run_options, json=json,
    )  # fmt: skip


# -- looking


@app.command()
def status(lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """Show the state of the lab's studies."""
    from looplab.cli import status as states

    states.status(lab, study, json)


@app.command()
def top(
    study: Annotated[str | None, typer.Argument(help="The study (default: the running one).")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    since: Annotated[str, typer.Option("--since", help="Show events of this period: 30m, 12h, 2d.")] = "12h",
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Show a study live: champion, slots, queue, budgets, verdicts, alarms.

    Read-only. In a pipe it prints one frame.
    """
    from looplab.cli import top as screen

    screen.top(lab, study, once=once, json=json, since_s=_seconds("--since", since))


@app.command()
def show(run: RunName = "LATEST", lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """Show one run: its origin, its changes and its metrics."""
    from looplab.cli import looking

    looking.show(lab, study, run, json)


@app.command()
def logs(
    run: RunName = "LATEST",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing as the log grows.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Print a run's output."""
    from looplab.cli import looking

    looking.logs(lab, study, run, follow, lines, json)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="A run or a config file.")],
    b: Annotated[str, typer.Argument(help="A run or a config file.")],
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Show how two configs differ."""
    from looplab.cli import looking

    looking.diff(lab, study, a, b, json)


@app.command()
def reproduce(
    run: RunName = "BEST",
    tolerance: Annotated[float | None, typer.Option(help="Difference that counts as equal (default: noise).")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checked-out code.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run a run again from its capsule and compare.

    If the run's code differs from the current code, it is checked out next to the lab. Exit code 1: not reproduced.
    """
    from looplab.cli import reproducing

    reproducing.reproduce(lab, study, run, tolerance, keep, json)


@app.command()
def remeasure(
    runs: Annotated[list[str] | None, typer.Argument(help="Runs to re-read (default: all).")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Re-read the metrics of finished runs.

    Use it after correcting `measure` or `objective`. Nothing is run. Each changed run is recorded as an event, and
    its old summary is kept. The best run is determined again, and the judge starts over with the new values. Exit
    code 1: no run has the objective.
    """
    from looplab.cli import reproducing

    reproducing.remeasure(lab, study, runs or [], json)


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 0,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Let the page pause, stop, propose, veto.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="Another host name of the page, behind a proxy.")
    ] = None,
    token: Annotated[
        str | None, typer.Option("--token", help="The token (default: $LOOPLAB_UI_TOKEN, else a random one).")
    ] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="A file with the token.")] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write self-contained pages to this folder instead of serving.")
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Serve the live page of a lab, or write it as files.

    Read-only, unless --allow-control is given. The printed URL always includes a token, even on this machine.
    """
    if export is not None:
        from looplab.cli import reporting

        reporting.export_pages(lab, export, json)
        return
    from looplab.cli import serving

    serving.ui(
        lab, host=host, port=port, token=token, token_file=token_file, allow_host=allow_host or [],
        allow_control=allow_control, open_browser=not (no_open or json), json=json,
    )  # fmt: skip


@app.command()
def report(
    to: Annotated[Path | None, typer.Option("--to", help="Write them to this folder instead.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Write the study's reports: Markdown, HTML and plots.

    An engine also writes them, while it runs and when it ends.
    """
    from looplab.cli import reporting

    reporting.report(lab, study, to, json)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more runs.")],
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the curves.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Compare runs side by side: configs, metrics and curves."""
    from looplab.cli import reporting

    reporting.compare(lab, study, runs, html, json)


@app.command()
def query(
    sql: Annotated[
        str,
        typer.Argument(
            help="A SELECT over runs, metrics, proposals, verdicts, knobs, events; stages, suites, cases; versions."
        ),
    ],
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Query all runs of the lab with SQL."""
    from looplab.cli import querying

    querying.query(lab, sql, json, csv)


@app.command()
def export(
    csv: Annotated[Path | None, typer.Option("--csv", help="Write CSV files to this folder.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="Write Parquet files to this folder.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Write all tables to CSV or Parquet files."""
    from looplab.cli import querying

    querying.export(lab, csv, parquet, study, json)


# -- runs of other tools

analyze = typer.Typer(
    help="Summarise runs of other tools.",
    epilog=f"Example: {EXAMPLES['analyze']}",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(analyze, name="analyze")
Entity = Annotated[str, typer.Option("--entity", help="The W&B entity.")]
Project = Annotated[str, typer.Option("--project", help="The W&B project.")]
OutJson = Annotated[Path | None, typer.Option("--out-json", help="Also write the summaries here.")]


@analyze.command("offline")
def analyze_offline(
    outputs_root: Annotated[
        Path, typer.Option("--outputs-root", help="The folder that contains the run folders.")
    ] = Path("outputs"),
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many, the newest first.")] = 100,
    out_json: OutJson = None,
    json: Json = False,
) -> None:
    """Summarise folders on this disk: W&B, TensorBoard, CSV, logs."""
    from looplab.cli import analysing

    analysing.offline(outputs_root, limit, out_json, json)


@analyze.command("wandb")
def analyze_wandb(
    entity: Entity,
    project: Project,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many, the newest first.")] = 100,
    out_json: OutJson = None,
    json: Json = False,
) -> None:
    """Summarise runs on a W&B server (needs WANDB_API_KEY)."""
    from looplab.cli import analysing

    analysing.wandb(entity, project, limit, out_json, json)


@app.command("fetch-config")
def fetch_config(
    entity: Entity,
    project: Project,
    run: Annotated[list[str], typer.Option("--run", help="The id of a W&B run; may be given several times.")],
    out_dir: Annotated[Path, typer.Option("--out-dir", help="The folder for fromwandb_<ID>.json.")] = Path("."),
    json: Json = False,
) -> None:
    """Fetch the configs of W&B runs as base configs."""
    from looplab.cli import analysing

    analysing.fetch_config(entity, project, run, out_dir, json)


# -- versions of code


@app.command()
def iterate(
    start: Annotated[str, typer.Argument(help="The first version to write; or `status`, to list the versions.")],
    end: Annotated[int | None, typer.Argument(help="The last version (default: START).")] = None,
    extra: Annotated[
        list[str] | None, typer.Option("--extra", help="Extra arguments for the agent; or put them after `--`.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="codex, claude or command, instead of iterate.yaml's.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The agent's model.")] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", min=0, help="How often the agent may retry after a gate fails.")
    ] = None,
    continue_on_failure: Annotated[
        bool, typer.Option("--continue-on-failure", help="Continue with the next version when one fails.")
    ] = False,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Have an agent write the next versions of the code.

    Each version has its own git worktree; gates, the frozen evaluation and a test against the champion decide.
    After a kill, the same command continues. Exit code 1: a version failed.
    """
    from looplab.cli import iterating

    iterating.iterate(
        lab, start, end, agent=agent, model=model, retries=retries, continue_on_failure=continue_on_failure,
        extra=extra or [], json=json,
    )  # fmt: skip


@app.command()
def tour(
    out: Annotated[Path | None, typer.Option("--out", help="The file (default: outputs/tour.html).")] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Write one page about all versions and their verdicts."""
    from looplab.cli import iterating

    iterating.tour(lab, out, json)


# -- pipelines


Config = Annotated[Path, typer.Option("--config", help="The config.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="The run: its name, or `latest`.")]
NewRun = Annotated[bool, typer.Option("--new", help="Always start a new run.")]
Edits = Annotated[list[str] | None, typer.Option("--edit", help="An edit on the config: path@op=value.")]
Force = Annotated[bool, typer.Option("--force", help="Also run stages that are complete and unchanged.")]


@app.command()
def stage(
    config: Config,
    stages: Annotated[list[str] | None, typer.Argument(help="The stages (default: all).")] = None,
    run_id: RunId = None,
    new: NewRun = False,
    edit: Edits = None,
    force: Force = False,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Use this run folder, outside any root.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run stages of a pipeline, as declared in the lab file.

    Complete and unchanged stages are skipped, interrupted ones are resumed. Without --run-id, later stages continue
    the latest run, and first stages resume an interrupted run or start a new one. Ctrl-C stops the stage.
    """
    from looplab.cli import staging

    staging.stage(
        lab, study, config=config, stages=stages or [], run_id=run_id, new=new, edits=edit or [], force=force,
        run_dir=run_dir, json=json,
    )  # fmt: skip


@app.command()
def suite(
    config: Annotated[Path, typer.Option("--config", help="The suite's file.")],
    gpus: Gpus = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Number of slots.")] = None,
    suite_id: Annotated[str | None, typer.Option("--id", help="The suite's id.")] = None,
    new: NewRun = False,
    force: Force = False,
    share: Share = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run the same stages over several datasets, one per slot.

    After an interruption, the same command continues. Ctrl-C starts no more stages, a second Ctrl-C stops running
    ones.
    """
    from looplab.cli import staging

    staging.suite(
        lab, study, config=config, gpus=gpus, slots=slots, suite_id=suite_id, new=new, force=force, share=share,
        json=json,
    )  # fmt: skip


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def case(
    context: typer.Context,
    config: Config,
    run_id: RunId = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Name of the files that it writes.")] = None,
    edit: Edits = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Examine a few examples closely; prints the files it wrote.

    Each {name} in case.command of the lab file is also an option: --name VALUE.
    """
    from looplab.cli import staging

    staging.case(lab, study, config=config, run_id=run_id, edits=edit or [], tag=tag, words=context.args, json=json)


# -- the record


@app.command()
def verify(
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Anchors: HASH, NUMBER:HASH, an anchor line, a file of them, git or git:REF, or a copy of the journal "
            "or of the ledger."
        ),
    ] = None,
    ledger_id: Annotated[str | None, typer.Option(help="The expected ledger, if there are anchors of several.")] = None,
    allowed_signers: Annotated[
        Path | None, typer.Option(help="Accept only anchors signed by someone in this file (see ssh-keygen).")
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Check the record: chain, tables, files of the runs, anchors.

    The chain alone detects accidental damage and careless edits. A deliberate rewrite, by someone who recomputed
    all hashes, is detected by comparing with anchors: those of the lab file, or others with --against. Exit code 1:
    damaged or rewritten.
    """
    from looplab.cli import record

    record.verify(lab, against or [], ledger_id, allowed_signers, json)


@app.command()
def doctor(
    secrets: Annotated[bool, typer.Option("--secrets", help="Search for recorded secrets.")] = False,
    scrub: Annotated[bool, typer.Option("--scrub", help="Remove secrets from files, and record that.")] = False,
    move_ledger: Annotated[
        bool, typer.Option("--move-ledger", help="Move the ledger to the folder in state_dir or LOOPLAB_STATE_DIR.")
    ] = False,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Check the machine and the lab, and say what is missing.

    Shows devices, cores, memory, the disk and its file system, and the versions of Python, Ray, Slurm, W&B and
    agents; tests whether the lab's disk supports what looplab needs; and lists what each study lacks. Exit code 1:
    there is a problem. With --secrets it instead searches the ledger and the files of runs, agents and logs. A
    secret is the value of a variable or config key whose name says so, or text of a known format. Values are not
    printed. Exit code 1: secrets were found. The ledger's chain is never changed.
    """
    from looplab.cli import doctor as doctoring

    if move_ledger:
        doctoring.move_ledger(lab, json)
    elif secrets or scrub:
        doctoring.find_secrets(lab, scrubs=scrub, json=json)
    else:
        doctoring.check_up(lab, json)


@app.command()
def anchor(
    file: Annotated[Path | None, typer.Option(help="Append it to this file instead of the lab file's targets.")] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Publish the head of the record, and print it.

    Keep the line where nobody who can write to the lab can change it: `verify --against` then shows whether
    anything recorded so far was rewritten.
    """
    from looplab.cli import record

    record.anchor(lab, file, json)


@app.command()
def reindex(lab: LabOption = None, json: Json = False) -> None:
    """Repair the ledger from the journal and the run folders.

    Recovers events from the journal and rebuilds the tables from them. Deletes nothing; a damaged ledger is moved
    aside.
    """
    from looplab.cli import record

    record.reindex(lab, json)


@app.command()
def restore(
    backup: Annotated[
        Path | None, typer.Argument(help="A file in .looplab/backups (default: the newest intact one).")
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Replace the ledger with a backup.

    The backup is brought up to date from the journal and the run folders. The old ledger is moved aside.
    """
    from looplab.cli import record

    record.restore(lab, backup, json)


add_examples(app)
