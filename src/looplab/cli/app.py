"""All commands of looplab, with their options. What they do is imported when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="looplab",
    help="An autonomous laboratory for machine-learning training: run, measure, decide, judge, record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a third of the time of `--help` would be spent on importing what draws it
    context_settings={"help_option_names": ["-h", "--help"]},
)

LabOption = Annotated[
    Path | None, typer.Option("--lab", help="The lab's folder; else the one you are in.", show_default=False)
]
StudyOption = Annotated[
    str | None, typer.Option("--study", help="Which study, where the lab has several.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunName = Annotated[str, typer.Argument(help="A run: its id, its number, LATEST or BEST.")]
Cfgs = Annotated[
    list[Path] | None, typer.Option("--cfgs", help="Base configs, instead of those in lab.yaml.", show_default=False)
]
Mode = Annotated[str | None, typer.Option("--mode", help="A mode of the study: edits on the base.", show_default=False)]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", min=1, help="Rounds in total; with new --cfgs, from now on.", show_default=False),
]
Runs = Annotated[
    int | None,
    typer.Option("--runs", min=1, help="Runs in total; with new --cfgs, from now on.", show_default=False),
]
Continuous = Annotated[bool, typer.Option("--continuous", help="A free slot gets the next proposal at once.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", min=1, help="How many slots.", show_default=False)]
Gpus = Annotated[
    list[str] | None, typer.Option("--gpus", help="Devices: 0,1,2,3; `none` for none.", show_default=False)
]
Share = Annotated[bool | None, typer.Option("--share/--no-share", help="Use devices that others use too.")]
Informal = Annotated[bool, typer.Option("--informal", help="Run without what the study requires.")]
KeepGoing = Annotated[bool, typer.Option("--keep-going", help="Continue although no base config works.")]
Extra = Annotated[
    list[str] | None,
    typer.Option(
        "--extra", "--extra-args", help="An argument for the trainer; so is all that follows `--`.", show_default=False
    ),
]
Steps = Annotated[
    int | None, typer.Option("--steps", min=1, help="Edit: the config's key for steps.", show_default=False)
]
LogFreq = Annotated[
    int | None, typer.Option("--log-freq", min=0, help="Edit: the config's key log_freq.", show_default=False)
]
EvalFreq = Annotated[
    int | None, typer.Option("--eval-freq", min=0, help="Edit: the config's key eval_freq.", show_default=False)
]
WandbOnline = Annotated[bool, typer.Option("--wandb-online", help="track.wandb.mode: online, for this call.")]
WandbEntity = Annotated[
    str | None, typer.Option("--wandb-entity", help="track.wandb.entity, for this call.", show_default=False)
]
WandbProject = Annotated[
    str | None, typer.Option("--wandb-project", help="track.wandb.project, for this call.", show_default=False)
]
Decide = Annotated[
    bool | None,
    typer.Option(
        "--decide/--no-decide", help="Whether rules, search and agents decide on further runs.", show_default=False
    ),
]
VariantsPerRun = Annotated[
    int | None,
    typer.Option("--variants-per-run", min=1, help="Proposals that a run leads to by rules.", show_default=False),
]
Again = Annotated[bool, typer.Option("--again", help="Run the configs once more that were run before.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from looplab import __version__

        typer.echo(__version__)
        raise typer.Exit()


# -- making a lab


@app.command()
def init(
    recipe: Annotated[str, typer.Argument(help="Which recipe to start from.")] = "quickstart",
    folder: Annotated[Path | None, typer.Argument(help="Where; else a folder of the recipe's name.")] = None,
    json: Json = False,
) -> None:
    """Make a lab from a recipe."""
    from looplab.cli import recipes

    recipes.init(recipe, folder, json)


@app.command(context_settings={"allow_interspersed_args": False})
def recipe(
    name: Annotated[str, typer.Argument(help="Which recipe.")],
    words: Annotated[list[str] | None, typer.Argument(help="Its command, with options; none lists them.")] = None,
) -> None:
    """A command of a recipe itself, such as `looplab recipe esm fetch-model`."""
    from looplab.cli import recipes

    recipes.command(name, words or [])


@app.command()
def demo(folder: Annotated[Path, typer.Argument(help="Where the demo's lab goes.")] = Path("demo")) -> None:
    """Make the quickstart lab and run its study, start to end."""
    from looplab.cli import recipes

    recipes.demo(folder)


@app.command()
def check(
    cfgs: Cfgs = None, mode: Mode = None, lab: LabOption = None, study: StudyOption = None, json: Json = False
) -> None:
    """Check the lab file, configs and queue.

    Shows the knobs with their ranges and the values in the base configs, and the command of each base. Writes nothing.
    """
    from looplab.cli import editing

    editing.check(lab, study, cfgs, mode, json)


# -- running


@app.command()
def run(
    cfgs: Cfgs = None,
    mode: Mode = None,
    rounds: Rounds = None,
    runs: Runs = None,
    continuous: Continuous = False,
    concurrency: Concurrency = None,
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
    Stops with exit code 1 if no base config works, since nothing could be compared, or if a config of --cfgs was not
    run. Runs with other --steps or other arguments for the trainer are not compared with each other.
    """
    from looplab.cli import running

    options = running.make_options(
        cfgs=cfgs, mode=mode, rounds=rounds, runs=runs, continuous=continuous, concurrency=concurrency, gpus=gpus,
        share=share, informal=informal, extra=extra, keep_going=keep_going, again=again, decide=decide,
        flags={"steps": steps, "log-freq": log_freq, "eval-freq": eval_freq}, variants=variants_per_run,
        wandb_online=wandb_online, wandb_entity=wandb_entity, wandb_project=wandb_project,
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
    resume: Annotated[bool, typer.Option("--resume", help="With the options of the last `run`.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Show what `run` would do next; write nothing.

    The engine's own planner decides, on a copy of the ledger. No agent is asked. A rules.py is executed.
    """
    from looplab.cli import planning, running

    options = running.make_options(
        cfgs=cfgs, mode=mode, rounds=rounds, runs=runs, continuous=continuous, concurrency=concurrency, gpus=gpus,
        share=share, informal=informal, extra=extra, keep_going=keep_going, again=again, decide=decide,
        flags={"steps": steps, "log-freq": log_freq, "eval-freq": eval_freq}, variants=variants_per_run,
        wandb_online=wandb_online, wandb_entity=wandb_entity, wandb_project=wandb_project,
    )  # fmt: skip
    planning.plan(lab, study, options, resume=resume, commands=commands, json=json)


@app.command()
def resume(
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background; see `attach`.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Go on after a stop or a crash.

    With the options of the last `run`; trainings that are still alive are adopted.
    """
    from looplab.cli import running

    running.resume(lab, study, detach, json)


@app.command()
def attach(lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """Watch a study that runs in the background.

    Ctrl-C leaves it running.
    """
    from looplab.cli import running

    running.attach(lab, study, json)


@app.command()
def stop(
    run: Annotated[str | None, typer.Argument(help="Only this run.", show_default=False)] = None,
    drain: Annotated[bool, typer.Option("--drain", help="Let what runs end; start nothing more.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Stop a study now, or drain it, or stop one run.

    Now: SIGTERM to each training and all its processes, SIGKILL after launch.grace.
    """
    from looplab.cli import running

    running.stop(lab, study, run, drain, json)


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Annotated[
        list[str] | None, typer.Argument(help="After `--`: a program and its arguments. No shell.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What it is for.", show_default=False)] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="End it after this time: 90, 30m, 2h.", show_default=False)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run it anew, whatever became of the last call.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for its end.")] = False,
    serve: Annotated[int | None, typer.Option("--serve", hidden=True)] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run a command in the study's slots: looplab submit -- python train.py

    It waits for a slot, gets its device, a run folder, the study's limits and budget; what it prints is streamed, and
    its exit code is passed on (124: timeout). It goes on if you leave or are killed: the same call attaches to it, or
    tells how it ended. Its environment is the engine's with launch.env, not yours.
    """
    from looplab.cli import submitting

    if serve is not None:
        submitting.serve(lab, study, serve)
        return
    submitting.check_dashes(command or [])
    submitting.submit(lab, study, command or [], label=name, timeout=timeout, again=again, detach=detach, json=json)


@app.command()
def autopilot(
    runs: Annotated[int, typer.Option("--runs", min=1, help="So many proposals, one after the other.")] = 1,
    mode: Annotated[str | None, typer.Option("--mode", help="A mode of the study, such as quick or full.")] = None,
    gpus: Annotated[list[str] | None, typer.Option("--gpus", help="Devices, such as 0,1.")] = None,
    informal: Annotated[bool, typer.Option("--informal", help="Without what a formal run requires.")] = False,
    stop_on_failure: Annotated[
        bool, typer.Option("--stop-on-failure", help="End, with exit code 1, when the agent gives up.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background; see `attach`.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Propose, check, train, measure, judge, write down; again and again.

    Whoever the study's proposers are, a coding agent above all. People steer it with `say`, `pause`, `veto` and
    proposals/next_config.json. A call of the agent that fails is repeated; when the agent gives up, the other
    proposers or a search fill in, and it is asked again for the next proposal.
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
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever was measured before.")] = False,
    exec_: Annotated[bool, typer.Option("--exec", help="Really run, where the study asks for this word.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Find the setting with the highest stable throughput on this machine.

    Runs every combination of the lab file's probe: for a short while, one at a time. Exit code 1: none was stable.
    """
    from looplab.cli import probing, running

    options = running.make_options(cfgs=cfgs, mode=mode, gpus=gpus, share=share, informal=informal, extra=extra)
    probing.probe(lab, study, options, fresh=fresh, execute=exec_, json=json)


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What the agent should know.")],
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Tell the agent something; it reads it with its next question."""
    from looplab.cli import steering

    steering.say(lab, study, text, json)


@app.command()
def pause(lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """Start nothing more for now; `resume` goes on."""
    from looplab.cli import steering

    steering.pause(lab, study, json)


@app.command()
def veto(
    run: Annotated[str, typer.Argument(help="A run: id, number, LATEST, BEST.")],
    why: Annotated[str, typer.Option("--why", help="Why.")] = "",
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Do not believe a run: it is stopped if it runs, and never the best."""
    from looplab.cli import steering

    steering.veto(lab, study, run, why, json)


@app.command("agent-log")
def agent_log(
    log: Annotated[str | None, typer.Argument(help="A log in agent_runs; the newest if not said.")] = None,
    only: Annotated[
        str | None, typer.Option("--only", help="commands, outputs, messages, or final.", show_default=False)
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """What an agent did: its words, its commands, what they printed."""
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
    """Put a proposal in the study's queue."""
    from looplab.cli import editing

    editing.propose(lab, study, change, reason, hypothesis, parent, json)


@app.command("import")
def import_(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders with recorded runs.", show_default=False)
    ] = None,
    optuna: Annotated[
        str | None,
        typer.Option("--optuna", help="An Optuna storage: sqlite:///x.db, or a journal file.", show_default=False),
    ] = None,
    optuna_study: Annotated[
        str | None, typer.Option("--optuna-study", help="Which of its studies.", show_default=False)
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", help="THEIRS=OURS: another name of a metric or a config key.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be imported.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Make recorded runs of other tools runs of a study.

    Search, rules and agents use them; the judge does not, and no budget counts them. What was imported before is not
    imported again. Exit code 1: nothing could be imported.
    """
    from looplab.cli import importing

    importing.import_runs(
        lab, study, folders or [], optuna=optuna, optuna_study=optuna_study, mapping=map_ or [], dry_run=dry_run,
        json=json,
    )  # fmt: skip


@app.command()
def edit(
    base: Annotated[Path | None, typer.Argument(help="The config to start from.")] = None,
    base_cfg: Annotated[Path | None, typer.Option("--base-cfg", help="The same as BASE.", show_default=False)] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; recorded with the variant.")] = "",
    change: Annotated[
        list[str] | None, typer.Option("--change", "--changes", help="An edit: path@op=value. Several may follow.")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out-dir", help="Where the variant goes.", show_default=False)
    ] = None,
    run: Annotated[bool, typer.Option("--run", "--exec", help="Run it at once, and nothing else.")] = False,
    extra: Extra = None,
    steps: Steps = None,
    log_freq: LogFreq = None,
    eval_freq: EvalFreq = None,
    informal: Informal = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Write one variant of a config.

    Its name is `<stem>_<6 chars>`; its parent and the reason are recorded.
    """
    from looplab.cli import editing

    flags = {"steps": steps, "log-freq": log_freq, "eval-freq": eval_freq}
    alone = {"extra": extra or [], "informal": informal}
    editing.edit(base or base_cfg, change or [], flags, reason, out_dir, run, alone, lab, study, json)


# -- looking


@app.command()
def status(lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """Where the lab's studies stand."""
    from looplab.cli import looking

    looking.status(lab, study, json)


@app.command()
def show(run: RunName = "LATEST", lab: LabOption = None, study: StudyOption = None, json: Json = False) -> None:
    """One run: its origin, its changes, its measurements."""
    from looplab.cli import looking

    looking.show(lab, study, run, json)


@app.command()
def logs(
    run: RunName = "LATEST",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the log grows.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """What a run printed."""
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
    """How two configs differ."""
    from looplab.cli import looking

    looking.diff(lab, study, a, b, json)


@app.command()
def reproduce(
    run: RunName = "BEST",
    tolerance: Annotated[float | None, typer.Option(help="What counts as the same; the noise if not said.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the code that was checked out.")] = False,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run a run once more from its capsule and compare.

    Its code is checked out beside the lab if it is another than today's. Exit code 1: not reproduced.
    """
    from looplab.cli import reproducing

    reproducing.reproduce(lab, study, run, tolerance, keep, json)


@app.command()
def remeasure(
    runs: Annotated[list[str] | None, typer.Argument(help="Runs to read again; all if none is named.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Read ended runs again after `measure` or `objective` was corrected.

    Nothing is run. Each changed run is an event; its old summary is kept. The best run is worked out again, and a judge
    starts over with the new values. Exit code 1: no run has the objective.
    """
    from looplab.cli import reproducing

    reproducing.remeasure(lab, study, runs or [], json)


@app.command()
def report(
    to: Annotated[Path | None, typer.Option("--to", help="Write them to this folder instead.")] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Write the study's reports again: Markdown, HTML, plots.

    They are also written when an engine has done its work.
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
    """Runs side by side: configs, metrics, curves."""
    from looplab.cli import reporting

    reporting.compare(lab, study, runs, html, json)


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help="A SELECT over runs, metrics, proposals, verdicts, knobs, events.")],
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Ask in SQL about all runs of the lab."""
    from looplab.cli import querying

    querying.query(lab, sql, json, csv)


@app.command()
def export(
    csv: Annotated[Path | None, typer.Option("--csv", help="Into this folder, as CSV.", show_default=False)] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", help="Into this folder, as Parquet.", show_default=False)
    ] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Write all tables to files."""
    from looplab.cli import querying

    querying.export(lab, csv, parquet, study, json)


# -- what others left

analyze = typer.Typer(help="Summarise runs that looplab did not make.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(analyze, name="analyze")
Entity = Annotated[str, typer.Option("--entity", help="The W&B entity.")]
Project = Annotated[str, typer.Option("--project", help="The W&B project.")]
OutJson = Annotated[Path | None, typer.Option("--out-json", help="Also write the summaries here.", show_default=False)]


@analyze.command("offline")
def analyze_offline(
    outputs_root: Annotated[Path, typer.Option("--outputs-root", help="Where the run folders are.")] = Path("outputs"),
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest first.")] = 100,
    out_json: OutJson = None,
    json: Json = False,
) -> None:
    """Folders on this disk: W&B, TensorBoard, CSV, logs."""
    from looplab.cli import analysing

    analysing.offline(outputs_root, limit, out_json, json)


@analyze.command("wandb")
def analyze_wandb(
    entity: Entity,
    project: Project,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest first.")] = 100,
    out_json: OutJson = None,
    json: Json = False,
) -> None:
    """Runs on a W&B server (needs WANDB_API_KEY)."""
    from looplab.cli import analysing

    analysing.wandb(entity, project, limit, out_json, json)


@app.command("fetch-config")
def fetch_config(
    entity: Entity,
    project: Project,
    run: Annotated[list[str], typer.Option("--run", help="The id of a W&B run; may be given several times.")],
    out_dir: Annotated[Path, typer.Option("--out-dir", help="Where fromwandb_<ID>.json goes.")] = Path("."),
    json: Json = False,
) -> None:
    """Fetch the configs of W&B runs as base configs."""
    from looplab.cli import analysing

    analysing.fetch_config(entity, project, run, out_dir, json)


# -- versions of code


@app.command()
def iterate(
    start: Annotated[str, typer.Argument(help="The first version to make; or `status`: what became of them.")],
    end: Annotated[int | None, typer.Argument(help="The last one; START if not said.", show_default=False)] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(help="After `--`: further arguments of the agent.", show_default=False)
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="codex, claude or command, instead of iterate.yaml's.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The agent's model.", show_default=False)] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", min=0, help="How often it may mend what a gate refused.")
    ] = None,
    continue_on_failure: Annotated[
        bool, typer.Option("--continue-on-failure", help="Go on with the next version when one fails.")
    ] = False,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Have an agent write the next versions of the code: looplab iterate 2 4

    Each in a git worktree of its own; gates, the frozen evaluation and a test against the champion decide. Killed, the
    same command goes on where it was. Exit code 1: a version failed.
    """
    from looplab.cli import iterating

    iterating.iterate(lab, start, end, agent, model, retries, continue_on_failure, extra or [], json)


@app.command()
def tour(
    out: Annotated[
        Path | None, typer.Option("--out", help="Where; else outputs/tour.html.", show_default=False)
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """One page over all versions: metrics, verdicts, what changed, what was learned."""
    from looplab.cli import iterating

    iterating.tour(lab, out, json)


# -- pipelines


Config = Annotated[Path, typer.Option("--config", help="The config.", show_default=False)]
RunId = Annotated[
    str | None, typer.Option("--run-id", help="Which run: its name, or `latest`; else see below.", show_default=False)
]
NewRun = Annotated[bool, typer.Option("--new", help="A new one, whatever is there.")]
Edits = Annotated[
    list[str] | None, typer.Option("--edit", help="An edit on the config: path@op=value.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Run stages again that are complete and unchanged.")]


@app.command()
def stage(
    config: Config,
    stages: Annotated[list[str] | None, typer.Argument(help="Which stages; all if none is named.")] = None,
    run_id: RunId = None,
    new: NewRun = False,
    edit: Edits = None,
    force: Force = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="The run folder itself, outside of any root.", show_default=False)
    ] = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run stages of a pipeline: mine, select, memory, eval.

    What is complete and unchanged is skipped, what was cut off is resumed. Without --run-id, later stages go on with
    the latest run, and first stages resume a run that was cut off, or begin a new one. Ctrl-C stops the stage.
    """
    from looplab.cli import staging

    staging.stage(lab, study, config, stages or [], run_id, new, edit or [], force, run_dir, json)


@app.command()
def suite(
    config: Annotated[Path, typer.Option("--config", help="The suite's file.", show_default=False)],
    gpus: Gpus = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="How many slots.", show_default=False)] = None,
    suite_id: Annotated[str | None, typer.Option("--id", help="The suite's id.", show_default=False)] = None,
    new: NewRun = False,
    force: Force = False,
    share: Share = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Run the same stages over several datasets, one a slot.

    The same command again goes on where it was cut off. Ctrl-C begins nothing more, a second Ctrl-C stops.
    """
    from looplab.cli import staging

    staging.suite(lab, study, config, gpus, slots, suite_id, new, force, share, json)


@app.command()
def case(
    config: Config,
    run_id: RunId = None,
    example_ids: Annotated[str | None, typer.Option("--example-ids", help="0,6", show_default=False)] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1, show_default=False)] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="greedy,esm", show_default=False)] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="What its files are called.", show_default=False)] = None,
    edit: Edits = None,
    lab: LabOption = None,
    study: StudyOption = None,
    json: Json = False,
) -> None:
    """Look at a few examples closely; prints the files that were made."""
    from looplab.cli import staging

    said = {"example_ids": example_ids, "max_new_tokens": max_new_tokens, "methods": methods, "tag": tag}
    staging.case(lab, study, config, run_id, edit or [], said, json)


# -- the record


@app.command()
def verify(
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Anchors: HASH, NUMBER:HASH, an anchor line, a file of them, git or git:REF, or a copy of the journal "
            "or of the ledger.",
            show_default=False,
        ),
    ] = None,
    ledger_id: Annotated[
        str | None,
        typer.Option(help="Which ledger is expected, where there are anchors of several.", show_default=False),
    ] = None,
    allowed_signers: Annotated[
        Path | None,
        typer.Option(help="Count only anchors that someone in this file signed (see ssh-keygen).", show_default=False),
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Check the record: chain, tables, files of the runs, anchors.

    The chain alone shows accidental damage and careless edits. A deliberate rewrite, by someone who computed all hashes
    again, is found by comparing with anchors: those of the lab file, or --against others. Exit code 1: not whole.
    """
    from looplab.cli import record

    record.verify(lab, against or [], ledger_id, allowed_signers, json)


@app.command()
def doctor(
    secrets: Annotated[
        bool, typer.Option("--secrets", help="Look for recorded secrets (the only check so far).")
    ] = False,
    scrub: Annotated[bool, typer.Option("--scrub", help="Take secrets out of files; the record says so.")] = False,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Look for secrets in the ledger and in files of runs, agents and logs.

    A secret is the value of a variable or of a config key with such a name, or a text of a known shape. Values are not
    printed. Exit code 1: some were found. The chain of the ledger is never changed.
    """
    from looplab.cli import doctor as doctoring

    doctoring.find_secrets(lab, scrubs=scrub, json=json)


@app.command()
def anchor(
    file: Annotated[
        Path | None,
        typer.Option(help="Append it to this file, instead of where the lab file says.", show_default=False),
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Publish the head of the record, and print it.

    Kept where nobody who can write the lab can change it, the line shows later, with `verify --against`, whether
    anything recorded so far was rewritten.
    """
    from looplab.cli import record

    record.anchor(lab, file, json)


@app.command()
def reindex(lab: LabOption = None, json: Json = False) -> None:
    """Repair the ledger: bring back its events from the journal, and rebuild its tables from them and the run folders.

    Nothing is deleted; a damaged ledger is put aside.
    """
    from looplab.cli import record

    record.reindex(lab, json)


@app.command()
def restore(
    backup: Annotated[
        Path | None, typer.Argument(help="A file of .looplab/backups; without it the newest one that is intact.")
    ] = None,
    lab: LabOption = None,
    json: Json = False,
) -> None:
    """Put the ledger aside and take a backup for it, brought up to date from the journal and the run folders."""
    from looplab.cli import record

    record.restore(lab, backup, json)
