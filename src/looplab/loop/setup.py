"""Everything that an engine needs before it starts, checked up front: study, base configs, guard, proposers, slots."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looplab import plugins
from looplab.config.edits import apply_edits
from looplab.config.files import hash_config, read_config
from looplab.config.lab import FIND_OBJECTIVE, RUN_FOLDER, LabConfig, SearchConfig, StudyConfig
from looplab.config.paths import Concrete, find, get, has, leaves, show
from looplab.decide.base import PluginProposer, Proposal, Proposer, ProposerContext
from looplab.decide.history import History
from looplab.decide.queue import QueueProposer
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem
from looplab.guard.knobs import Knob, show_value
from looplab.launch.base import Slot
from looplab.launch.command import check_templates, find_program
from looplab.launch.devices import DRIVERS, Devices
from looplab.launch.executors import remote_limit
from looplab.launch.slots import MAX_SLOTS, make_slots
from looplab.launch.tracking import find_keys, has_wandb_key, values_of, why_not_online, with_values, without
from looplab.ledger.roles import Origin
from looplab.ledger.view import RunRow, StudyView
from looplab.loop.fidelity import with_fidelity
from looplab.loop.flags import apply_options, edits_of_flags, hash_conditions
from looplab.runs import folder
from looplab.runs.capsule import Fingerprints, in_git
from looplab.runs.folder import hash_file
from looplab.runs.names import inside
from looplab.runs.redact import HIDDEN, hide_values, redact_argv, redact_env, remember
from looplab.watch.watcher import check as check_watch

if TYPE_CHECKING:
    from looplab.decide.agent import Ask
    from looplab.decide.search import SearchProposer

SEEDS = ("seed", "random_seed")
"""Names under which a config may have its random seed."""
FIRST_SEED = 1
"""Seed of the first run if the config has none and `{seed}` in the command or environment passes it."""
MAX_SEED = 1 << 62
"""Exclusive upper limit: the ledger stores 64 bits, and replicates count up from the seed of the first run."""
SEED_VARIABLE = "{seed}"
CALL_OPTIONS = ("flags", "wandb_online", "wandb_entity", "wandb_project", "decide", "variants")
"""Options of a single call that are recorded with the study's configuration if given."""
EARLIER = 5
"""Other studies of the lab that a search learns from, those with the newest runs."""
EARLIER_RUNS = 500
"""Newest runs of each of them that are read."""
ANSWER = "proposals/next_config.json"
"""File from which the autopilot reads its next config, unless an agent's `answer` names another one."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Command-line options of `looplab run`, stored with the study so that `resume` continues with the same ones."""

    cfgs: tuple[str, ...] = ()
    mode: str | None = None
    rounds: int | None = None
    runs: int | None = None
    continuous: bool = False
    concurrency: int | None = None
    gpus: tuple[str, ...] | None = None
    share: bool | None = None
    extra: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Flags that edit every config, such as `steps=2000`."""
    wandb_online: bool = False
    wandb_entity: str | None = None
    wandb_project: str | None = None
    decide: bool | None = None
    """Whether rules, search and agents propose runs; False: only people do. None: as configured."""
    variants: int | None = None
    """Maximum number of proposals that rules derive from one run; None: as configured."""
    again: bool = False
    """Run the base configs again even if they have been run before."""
    since_run: int = 0
    since_round: int = 0
    """Last run and round before the call; its `runs` and `rounds` are counted from there."""
    alone: bool = False
    """Run one config once, without a change to the conditions under which the study compares runs."""
    informal: bool = False
    """Run even if the requirements for a formal run are not met."""
    autopilot: bool = False
    """One proposal at a time."""
    asked_only: bool = False
    """Run only what was requested explicitly; start no round."""
    keep_going: bool = False
    """Continue even if no base config works."""
    stop_on_failure: bool = False
    """End the study when an agent gives up."""
    executor: str | None = None
    """Name of the executor; None: as configured."""
    seed: int | None = None
    """Seed of the first runs if it is not part of the config; None: the usual one."""
    jobs: int | None = None
    """Run submitted commands. The engine stays alive as long as the process with this pid (0: no such process)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunOptions:
        tuples = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{key: value for key, value in {**data, **tuples}.items() if key in cls.__slots__})


NO_GIT = (
    "the lab is not in git: only hashes of its code are recorded, so runs can be reproduced only while the code is "
    "unchanged (`git init`, then commit)"
)
COMPARED = (
    "judge", "deterministic", "objective", "holdout", "measure.sources", "measure.aliases", "measure.stdout",
    "measure.goals", "seed", "evaluator", "data", "normalise", "derive", "warm_start",
    "launch.command", "launch.env", "launch.config", "launch.cwd", "launch.links",
)  # fmt: skip
"""Keys of the lab file that affect whether runs are comparable; all others only decide what is run, and when."""


def compared_changes(changes: Iterable[str]) -> list[str]:
    """Return the changed lab-file keys that affect whether runs are comparable.

    Args:
        changes: Changed keys of the resolved configuration, such as `study.judge.alpha`.
    """
    keys = (key.removeprefix("study.") for key in changes if key.startswith("study."))
    return [key for key in keys if any(key == one or key.startswith(f"{one}.") for one in COMPARED)]


@dataclass(frozen=True, slots=True)
class Base:
    """A base config of the study."""

    name: str
    """Path relative to the lab."""
    config: dict[str, Any]
    """The config as a run uses it: with the mode's edits, normalised, and with derived keys."""
    notes: tuple[str, ...] = ()
    secrets: Mapping[Concrete, Any] = field(default_factory=dict)
    """Values that are hidden in `config`, by path. Only the config file of a running run contains them."""
    tracked: Mapping[str, bool] = field(default_factory=dict)
    """W&B keys that `track` writes; True if the config file lacks the key."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The checked inputs of an engine."""

    lab: Path
    study: StudyConfig
    options: RunOptions
    guard: Guard
    bases: tuple[Base, ...]
    slots: tuple[Slot, ...]
    devices: Devices
    share: bool
    seed: Concrete | None
    """Path of the random seed in the config; None if the config has none that reaches the trainer."""
    prints: Fingerprints
    """Fingerprints of the data and the evaluator; runs with different ones are not comparable."""
    notes: tuple[str, ...] = field(default=())
    edits: tuple[str, ...] = ()
    """Edits that the flags of this call make to every config."""
    conditions: str = ""
    """Hash of the extra arguments and the number of steps; only runs with equal conditions are compared."""

    @property
    def keep_going(self) -> bool:
        """Whether the study continues even if no base config works."""
        return self.options.keep_going or self.study.keep_going

    @property
    def watches(self) -> bool:
        """Whether running runs may be stopped because of their metrics."""
        stops = any(
            one.pbt is not None or (one.search is not None and one.search.fidelity is not None)
            for one in self.study.proposers
        )
        return stops or bool(self.study.watch)

    def is_unusable(self, run: RunRow) -> bool:
        """Return whether a run has ended without a result that others can be compared with."""
        if run.state != "ended":
            return False
        if run.status == "ok":
            return self.study.objective is not None and run.objective is None
        return run.status in ("failed", "timeout", "lost")

    @property
    def seed_route(self) -> str | None:
        """How the seed reaches the trainer, in words; None if it does not."""
        if self.seed is not None:
            return f"{show(self.seed)} in the config"
        launch = self.study.launch
        if any(SEED_VARIABLE in part for part in launch.command):
            return f"{SEED_VARIABLE} in launch.command"
        return next((f"{SEED_VARIABLE} in launch.env.{k}" for k, v in launch.env.items() if SEED_VARIABLE in v), None)

    def seed_of(self, config: Mapping[str, Any]) -> int | None:
        """Return the seed of a run of this config; None if no seed reaches the trainer.

        Raises:
            LabError: The seed is too large.
        """
        if self.seed is None:
            first = FIRST_SEED if self.options.seed is None else self.options.seed
            return first if self.seed_route is not None else None
        value: Any = get(config, self.seed) if has(config, self.seed) else None
        if not _is_whole(value):
            return None
        if abs(value) >= MAX_SEED:
            raise LabError(
                f"{show(self.seed)}: the seed {show_value(value)} is too large", hint="it must be below 2^62"
            )
        return int(value)

    def base(self, name: str | None) -> Base:
        """Return the base config with this name, or the first one if there is none."""
        for base in self.bases:
            if base.name == name:
                return base
        return self.bases[0]

    def reveal(self, config: dict[str, Any], base: Base) -> dict[str, Any]:
        """Return a config from the ledger with its secrets filled in from the base config."""
        if not base.secrets:
            return config
        revealed = copy.deepcopy(config)
        for place, value in base.secrets.items():
            if has(revealed, place) and get(revealed, place) == HIDDEN:
                get(revealed, place[:-1])[place[-1]] = value
        return revealed

    def track(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with the W&B keys that the lab file sets now, whatever an earlier run used."""
        return with_values(config, values_of(self.study.track.wandb, config))

    def untracked(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the config without the W&B keys that `track` writes, since they do not affect training."""
        return without(config, list(values_of(self.study.track.wandb, config)))

    @property
    def round_size(self) -> int:
        """Number of runs in a round."""
        if self.options.autopilot:
            return 1
        return self.study.round_size or max(len(self.slots), len(self.bases))


def make_guard(study: StudyConfig) -> Guard:
    """Return the guard for the knobs and constraints of a study."""
    knobs = {path: Knob.make(path, spec) for path, spec in study.knobs.items()}
    return Guard(knobs, [(n.set, n.to) for n in study.normalise], study.derive, study.constraints)


def base_paths(lab: Path, study: StudyConfig, options: RunOptions) -> dict[str, Path]:
    """Return the files of the base configs by name, in order.

    Raises:
        LabError: There is no base config, one is named twice, or one is outside the lab.
    """
    names = options.cfgs or tuple(study.base)
    if not names:
        raise LabError(f"study {study.name!r} has no base config", hint="name one in lab.yaml (base:) or with --cfgs")
    files = [inside(lab, name, "base config") for name in names]
    shown = [str(path.relative_to(lab.resolve())) for path in files]
    twice = {name for name in shown if shown.count(name) > 1}
    if twice:
        raise LabError(f"a base config is named twice: {', '.join(sorted(twice))}")
    return dict(zip(shown, files, strict=True))


def load_bases(
    lab: Path, study: StudyConfig, options: RunOptions, guard: Guard, more_edits: Sequence[str] = ()
) -> tuple[Base, ...]:
    """Read the base configs, in order, with the edits of the mode and `more_edits` applied.

    Raises:
        LabError: The mode is unknown, or the guard rejects a config.
    """
    paths = base_paths(lab, study, options)
    if options.mode is not None and options.mode not in study.modes:
        known = ", ".join(study.modes) or "none"
        raise LabError(f"study {study.name!r} has no mode {options.mode!r}", hint=f"modes: {known}")
    edits = [*(study.modes[options.mode] if options.mode else ()), *more_edits]
    bases = []
    for shown, path in paths.items():
        try:
            applied = apply_edits(read_config(path), edits)
        except LabError as error:
            raise LabError(f"{shown}: {error.message}" if error.file is None else error.message,
                           file=error.file, line=error.line, hint=error.hint) from None  # fmt: skip
        ruling = guard.admit(applied.config)
        if ruling.config is None or ruling.problems:
            raise LabError(f"{shown}: " + "; ".join(problem.message for problem in ruling.problems))
        config, notes, tracked = _tracked(study, guard, ruling.config)
        config, secrets = hide_values(config)
        remember({}, map(str, secrets.values()))
        bases.append(Base(shown, config, (*applied.notes, *ruling.notes, *notes), secrets, tracked))
    return tuple(bases)


def _tracked(
    study: StudyConfig, guard: Guard, config: dict[str, Any]
) -> tuple[dict[str, Any], list[str], dict[str, bool]]:
    """Set the W&B keys of a config to the values from `track`.

    Returns:
        The config, notes about the changes, and the W&B keys (True: the config did not have the key before).

    Raises:
        LabError: A W&B key is also a knob.
    """
    wandb = study.track.wandb
    values = values_of(wandb, config)
    taken = [show(place) for place in values if guard.is_knob(show(place))]
    if taken:
        raise LabError(f"{', '.join(taken)}: track.wandb writes it, so it cannot be a knob", hint="remove one of them")
    written = [
        f"{show(place)} to {show_value(value)}"
        for place, value in values.items()
        if not has(config, place) or get(config, place) != value
    ]
    notes = [f"track.wandb sets {', '.join(written)}"] if written else []
    table = next((place[:-1] for place in values if len(place) > 1), None)
    lacking = [what for what in ("enable", "mode") if what not in find_keys(wandb, config)]
    if table is not None and lacking:
        keys = " and ".join(show((*table, what)) for what in lacking)
        notes.append(
            f"{keys}: not in the config, so track.wandb reaches the trainer only through the environment; "
            "if it has such a key, add it, or name it in track.wandb.keys"
        )
    return with_values(config, values), notes, {show(place): not has(config, place) for place in values}


def with_executor(study: StudyConfig, options: RunOptions) -> StudyConfig:
    """Return the study with the executor that the call names.

    Raises:
        LabError: There is no such executor.
    """
    name = options.executor
    if name is None:
        return study
    if name not in study.executor.names():
        raise LabError(f"there is no executor {name!r}", hint=f"installed: {', '.join(study.executor.names())}")
    return study.model_copy(update={"executor": study.executor.model_copy(update={"use": name})})


def plan_slots(study: StudyConfig, options: RunOptions, devices: Devices) -> tuple[Slot, ...]:
    """Return the slots of an engine; options of the call take precedence over the lab file."""
    settings = study.slots
    gpus: Sequence[str]
    if options.gpus is not None:
        gpus = options.gpus
    elif isinstance(settings.gpus, list):
        gpus = [str(gpu) for gpu in settings.gpus]
    else:
        gpus = devices.ids() if settings.gpus == "auto" else []
    cores: str | list[list[int]]
    cores = settings.cores if isinstance(settings.cores, str) else [parse_cores(share) for share in settings.cores]
    count = options.concurrency or settings.count
    return tuple(make_slots(gpus=gpus, per_gpu=settings.per_gpu, count=count, cores=cores))


def study_slots(study: StudyConfig, options: RunOptions, devices: Devices) -> tuple[Slot, ...]:
    """Return the slots of an engine with the executor of the study. An executor that chooses the places itself has as
    many as it may have runs at a time."""
    limit = remote_limit(study.executor)
    if limit is None:
        return plan_slots(study, options, devices)
    name, count = study.executor.name, options.concurrency or study.slots.count or limit
    if count > MAX_SLOTS:
        raise LabError(f"more than {MAX_SLOTS:,} slots are not supported")
    needed = ("?",) * (study.resources.devices or 0)
    return tuple(Slot(f"{name}{i}", devices=needed, fixed=False) for i in range(count))


def parse_cores(share: str | list[int]) -> list[int]:
    """Return the core numbers in a list such as `[0, 1]` or a string such as `0-3,8`."""
    if not isinstance(share, str):
        return list(share)
    cores: list[int] = []
    for part in share.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", part)
        if match is None:
            raise LabError(f"slots.cores: {share!r} is not a list of cores", hint="write 0-3 or 0,2,4")
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cores


def missing_for_formal(
    study: StudyConfig, slots: Sequence[Slot], devices: Devices, bases: Sequence[Base] = (), extra: Sequence[str] = ()
) -> list[str]:
    """Return the unmet requirements for a formal run, in words."""
    missing = []
    if study.require.gpu:
        known = set(devices.ids()) if devices.present else set()
        other_vendor = any(Path(name).exists() for name in DRIVERS[1:])
        if not all(slot.devices or not slot.fixed for slot in slots):
            missing.append("a GPU for every slot (name them with --gpus or slots.gpus)")
        elif not known and not other_vendor and slots[0].fixed:
            missing.append("a GPU (no driver answers on this machine)")
    if study.require.wandb == "online":
        for base in bases:
            why = why_not_online(study.track.wandb, study.launch, base.config, extra)
            if why is not None:
                missing.append(f"W&B online (track.wandb.mode: online); {base.name}: {why}")
        if not has_wandb_key({**os.environ, **study.launch.env}):
            missing.append("a W&B key (set WANDB_API_KEY, or `wandb login`)")
    return missing


def prepare(lab: LabConfig, study: StudyConfig, options: RunOptions) -> Setup:
    """Check everything that can be checked before anything is written or started.

    Raises:
        LabError: A check failed, or a requirement for a formal run is not met.
    """
    study, option_notes = apply_options(study, options)
    study = with_executor(study, options)
    guard = make_guard(study)
    flags = []
    if options.flags:
        configs = {name: read_config(path) for name, path in base_paths(lab.folder, study, options).items()}
        with lab.at(study, "flags"):
            flags = edits_of_flags(study.flags, options.flags, configs)
    edits = tuple(flag.edit for flag in flags)
    bases = load_bases(lab.folder, study, options, guard, edits)
    devices = Devices()
    slots = study_slots(study, options, devices)
    missing = missing_for_formal(study, slots, devices, bases, options.extra)
    if missing and not options.informal:
        raise LabError(
            f"study {study.name!r} requires for a formal run: {'; '.join(missing)}",
            hint="--informal runs without it and records that",
        )
    with lab.at(study, "launch", "cwd"):
        cwd = find_cwd(lab.folder, study.launch.cwd)
    with lab.at(study, "launch", "command"):
        check_templates(study.launch.command, study.launch.env, {base.name: base.config for base in bases})
    if "{" not in study.launch.command[0]:
        find_program(study.launch.command[0], cwd, study.launch.env)
    prints = find_prints(lab, study)
    share = study.slots.share if options.share is None else options.share
    notes = tuple(f"{base.name}: {note}" for base in bases for note in base.notes)
    if not in_git(lab.folder):
        notes += (NO_GIT,)
    if (absent := devices.why_missing(slots)) is not None:
        notes += (absent,)
    notes = (*(flag.describe() for flag in flags), *option_notes, *notes)
    with lab.at(study, "proposers"):
        study, fidelity_notes = with_fidelity(study)
    notes += fidelity_notes
    with lab.at(study, "watch"):
        held_out = study.holdout.metric if study.holdout is not None else None
        check_watch(study.watch, study.objective, held_out, guard, [base.config for base in bases])
    seed = find_seed(study, bases[0])
    setup = Setup(
        lab.folder, study, options, guard, bases, slots, devices, share, seed, prints, notes, edits,
        hash_conditions(options.extra, flags),
    )  # fmt: skip
    for base in bases:
        setup.seed_of(base.config)
    return setup


def resolved_configuration(setup: Setup) -> dict[str, Any]:
    """Return all settings that determine which runs are planned and how they are judged, with defaults but no secrets.

    Devices and slots are left out: they affect the speed of a study, not its results.
    """
    study = setup.study.model_dump(mode="json", by_alias=True, exclude={"slots", "resources", "retry"})
    study["launch"]["command"] = redact_argv(study["launch"]["command"])
    study["launch"]["env"] = redact_env(study["launch"]["env"])
    given = setup.options
    options = {
        "mode": given.mode, "rounds": given.rounds, "runs": given.runs, "continuous": given.continuous,
        "extra": redact_argv(given.extra), "informal": given.informal, "autopilot": given.autopilot,
        **{name: value for name in CALL_OPTIONS if (value := getattr(given, name)) not in (None, False, ())},
    }  # fmt: skip
    files = [entry.rules or (entry.agent and entry.agent.prompt) for entry in setup.study.proposers]
    return {
        "study": study,
        "options": options,
        "bases": {base.name: hash_config(base.config) for base in setup.bases},
        "files": {name: hash_file(setup.lab / name) for name in files if name},
        "fingerprint": setup.prints.digest(),
    }


def find_cwd(lab: Path, cwd: str) -> Path:
    """Return the folder that the paths in a command are relative to.

    This is the trainer's working directory, or the lab if the trainer starts in its run folder.

    Raises:
        LabError: The folder does not exist, or is outside the lab.
    """
    folder = inside(lab, "." if cwd == RUN_FOLDER else cwd, "launch.cwd")
    if not folder.is_dir():
        raise LabError(f"launch.cwd: the lab has no folder {cwd}", hint=f"`cwd: {RUN_FOLDER}` is the run folder")
    return folder


def find_prints(lab: LabConfig, study: StudyConfig) -> Fingerprints:
    """Return the fingerprints of the study's data and evaluator.

    Raises:
        LabError: One of the files does not exist.
    """
    files = []
    for what in ("data", "evaluator"):
        for name in getattr(study, what):
            path = inside(lab.folder, name, what)
            if not path.exists():
                raise LabError(f"{what}: {name} does not exist", file=lab.folder / "lab.yaml")
            files.append(path)
    return Fingerprints(lab.folder, files)


def find_seed(study: StudyConfig, base: Base) -> Concrete | None:
    """Return the path of the seed in the config; None if the config has none that reaches the trainer.

    The key that the lab file names takes precedence; otherwise the least nested key with a name from `SEEDS` is used.
    A key that is left out of the trainer's flags or variables does not reach the trainer.

    Raises:
        LabError: The key that the lab file names is not a single integer.
    """
    if study.seed is not None:
        places = find(base.config, study.seed)
        if len(places) != 1 or not _is_whole(get(base.config, places[0])):
            raise LabError(f"seed: {study.seed} is not an integer in {base.name}", hint="name the key of the seed")
        return places[0]
    named = [path for path, value in leaves(base.config) if str(path[-1]).lower() in SEEDS and _is_whole(value)]
    nearest = min(named, key=len, default=None)
    if nearest is None or _reaches(study, nearest):
        return nearest
    return None


def _reaches(study: StudyConfig, seed: Concrete) -> bool:
    """Return whether the value of this key reaches the trainer, through the config, `{seed}` or `{config.KEY}`."""
    launch = study.launch
    templates = (*launch.command, *launch.env.values())
    words = (SEED_VARIABLE, f"{{config.{show(seed)}}}")
    return not launch.config.leaves_out(seed) or any(word in text for text in templates for word in words)


def _is_whole(value: Any) -> bool:
    """Return whether a value is an integer; bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def unsearched(setup: Setup) -> set[str]:
    """Return the keys that are excluded from a search: the seed, and those of the warm start."""
    warm = setup.study.warm_start
    keys = {show(setup.seed)} if setup.seed is not None else set()
    return keys | ({warm.mode, warm.source} if warm is not None else set())


def agent_warnings(study: StudyConfig, lab: Path) -> list[str]:
    """Return a warning for each agent that can write outside its folder on this machine."""
    agents = [entry.agent for entry in study.proposers if entry.agent is not None]
    if not agents:
        return []
    from looplab.agents.run import spec_of
    from looplab.agents.sandbox import confinement_of

    return [warning for agent in agents if (warning := confinement_of(spec_of(agent, lab)).warning)]


def make_proposers(
    setup: Setup,
    history: History,
    outputs: Path,
    left: Callable[[], str],
    wake: Callable[[], None],
    asks: list[Ask] | None = None,
    *,
    check: Callable[[Proposal], Sequence[Problem]] | None = None,
    report: Callable[[str, str, str], None] = lambda call, why, outcome: None,
    tell: Callable[[str, str], None] = lambda kind, text: None,
) -> tuple[Proposer, ...]:
    """Return the proposers in the order in which they are polled; people always come first.

    Args:
        left: Returns the remaining budget, in words.
        wake: Called by a proposer when its proposals are ready.
        asks: Collects the agent calls of a preview, which calls no agent and changes no files; None: a real run.
        check: Returns why a proposal would be rejected.
        report: Called for every failed agent call and every rejected answer.
        tell: Called with messages about agents for people: kind (`note` or `alarm`) and text.
    """
    if setup.options.jobs is not None:
        from looplab.loop.submitting import JobQueue

        return (JobQueue(setup.options.jobs),)
    study = setup.study
    base = setup.bases[0].config
    people: list[Proposer] = []
    others: list[Proposer] = []
    answers = [ANSWER] if setup.options.autopilot else []
    for entry in study.proposers:
        if setup.options.decide is False and entry.queue is None:
            continue
        if entry.rules is not None:
            from looplab.decide.rules import RulesProposer

            file = inside(setup.lab, entry.rules, "rules")
            others.append(RulesProposer(file, setup.guard, history, entry.variants))
        elif entry.search is not None:
            if study.objective is None:
                raise LabError(
                    "search needs an objective: name the metric to optimise",
                    file=setup.lab / "lab.yaml",
                    hint=FIND_OBJECTIVE,
                )
            goal = study.objective.goal
            search = make_search(setup, entry.search, history)
            others.append(search)
            if entry.search.fidelity is not None:
                from looplab.decide.fidelity import FidelityProposer

                can_continue = study.warm_start is not None
                others[-1] = FidelityProposer(
                    entry.search.fidelity, search, history, goal=goal, can_continue=can_continue
                )
        elif entry.pbt is not None:
            from looplab.decide.pbt import PbtProposer

            assert study.objective is not None  # checked with the lab file
            others.append(
                PbtProposer(entry.pbt, setup.guard, base, history, goal=study.objective.goal, fixed=unsearched(setup))
            )
        elif entry.agent is not None:
            from looplab.decide.agent import AgentProposer, UnaskedAgent

            answers.append(entry.agent.answer)
            alone = sum("queue" not in one.model_fields_set for one in study.proposers) == 1
            known = (entry.agent, study, setup.guard, setup.lab, outputs, history, base, left, wake)
            named: Any = {
                "check": check,
                "report": report,
                "tell": tell,
                "search": partial(agent_search, setup, history),
            }
            if alone:
                named["stand_in"] = lambda: make_stand_in(setup, history, check)
            others.append(AgentProposer(*known, **named) if asks is None else UnaskedAgent(*known, asks=asks, **named))
        elif entry.plugin is not None:
            if Origin.of(entry.plugin) is not Origin.PROPOSER:
                raise LabError(f"a proposer cannot have the name {entry.plugin!r}, which is reserved")
            objective = study.objective
            context = ProposerContext(
                lab=setup.lab,
                guard=setup.guard,
                base=base,
                metric=objective.metric if objective else None,
                goal=objective.goal if objective else "min",
                ended=history.ended,
                wake=wake,
            )
            made = plugins.make("proposers", entry.plugin, context, **entry.options)
            others.append(PluginProposer(entry.plugin, made))
        else:
            queue = inside(setup.lab, entry.queue, "queue") if entry.queue else None
            people.append(QueueProposer(queue, background=asks is None))
    if not any(isinstance(proposer, QueueProposer) for proposer in people):
        people.insert(0, QueueProposer())
    if answers:
        from looplab.decide.next_config import NextConfig

        # An agent may have left anything at this path, even a symlink; the file is opened without following links.
        files = {inside(setup.lab, Path(answer).parent, "answer") / Path(answer).name for answer in answers}
        people += [NextConfig(file, outputs, base, guard=setup.guard, clears=asks is None) for file in sorted(files)]
    if len(others) > 1 and study.mix == "bandit":
        from looplab.decide.mix import Mix

        others = [Mix(others, seed=0, patient=not setup.options.continuous)]
    return (*people, *others)


def make_search(setup: Setup, settings: SearchConfig, history: History) -> SearchProposer:
    """Return a search over the knobs of a study, which has an objective."""
    from looplab.decide.search import SearchProposer

    objective = setup.study.objective
    assert objective is not None
    earlier = partial(earlier_studies, setup, history.study)
    return SearchProposer(
        settings, setup.guard, setup.bases[0].config, objective.goal, history, unsearched(setup),
        objective=objective, earlier=earlier,
    )  # fmt: skip


def earlier_studies(setup: Setup, study: StudyView) -> list[tuple[str, History]]:
    """Return other studies of the lab whose runs were measured by the same objective, those with the newest runs first.

    Whether they have the same knobs shows when their configs are read.
    """
    objective = setup.study.objective
    found = []
    for name in study.ledger.studies():
        view = StudyView(study.ledger, name)
        latest = view.runs(state="ended", limit=1)
        if name == study.name or objective is None or not latest:
            continue
        if (view.objective(), view.goal()) == (objective.metric, objective.goal):
            outputs = folder.study_folder(setup.lab, name)
            found.append((latest[0].created, name, History(view, outputs, setup.conditions, newest=EARLIER_RUNS)))
    return [(name, history) for _, name, history in sorted(found, reverse=True, key=lambda one: one[:2])[:EARLIER]]


def agent_search(setup: Setup, history: History) -> SearchProposer | None:
    """Return the search whose model an agent sees; None without an objective, knobs to search or packages."""
    if setup.study.objective is None:
        return None
    entries = (entry.search for entry in setup.study.proposers)
    settings = next((one for one in entries if one is not None and one.sampler == "auto"), SearchConfig())
    with contextlib.suppress(LabError):
        search = make_search(setup, settings, history)
        return search if search.axes else None
    return None


def make_stand_in(
    setup: Setup, history: History, check: Callable[[Proposal], Sequence[Problem]] | None
) -> Proposer | None:
    """Return a search that proposes in place of a failing agent if no other proposer is configured.

    Returns:
        The proposer, or None if there is nothing to search or the required packages are not installed.
    """
    from looplab.decide.search import SearchProposer
    from looplab.decide.stand_in import StandIn

    samplers: tuple[Literal["auto", "random"], ...] = ("auto", "random") if setup.study.objective else ("random",)
    for sampler in samplers:
        with contextlib.suppress(LabError):
            base, fixed = setup.bases[0].config, unsearched(setup)
            settings = SearchConfig(sampler=sampler)
            search = (
                make_search(setup, settings, history)
                if setup.study.objective is not None
                else SearchProposer(settings, setup.guard, base, "min", history, fixed)
            )
            return StandIn(search, setup.guard, history, check or (lambda proposal: ())) if search.axes else None
    return None
