"""What an engine needs before it begins: the study, its bases, its guard, its proposers, its slots, checked at once."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looplab.config.edits import apply_edits
from looplab.config.files import hash_config, read_config
from looplab.config.lab import RUN_FOLDER, LabConfig, SearchConfig, StudyConfig
from looplab.config.paths import Concrete, find, get, has, leaves, show
from looplab.decide.base import Proposal, Proposer
from looplab.decide.history import History
from looplab.decide.queue import QueueProposer
from looplab.errors import LabError
from looplab.guard.guard import Guard, Problem
from looplab.guard.knobs import Knob, show_value
from looplab.launch.base import Slot
from looplab.launch.command import check_templates, find_program
from looplab.launch.devices import Devices
from looplab.launch.slots import make_slots
from looplab.launch.tracking import find_keys, has_wandb_key, values_of, why_not_online, with_values, without
from looplab.ledger.study import RunRow
from looplab.loop.flags import apply_options, edits_of_flags, hash_conditions
from looplab.runs.capsule import Fingerprints, in_git
from looplab.runs.folder import hash_file
from looplab.runs.names import inside
from looplab.runs.redact import HIDDEN, hide_values, redact_argv, redact_env, remember
from looplab.watch.watcher import check as check_watch

if TYPE_CHECKING:
    from looplab.decide.agent import Ask

SEEDS = ("seed", "random_seed")
FIRST_SEED = 1
"""The seed of a first run where the config has none and `{seed}` in the command or the environment passes it."""
MAX_SEED = 1 << 62
"""The ledger holds 64 bits, and replicates count up from the seed of the first run."""
SEED_VARIABLE = "{seed}"
CALL_OPTIONS = ("flags", "wandb_online", "wandb_entity", "wandb_project", "decide", "variants")
"""Options of one call that are recorded with the study's configuration if they are given."""
ANSWER = "proposals/next_config.json"
"""Where people write what the autopilot tries next, unless an agent's `answer` says another file."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a person says on the command line; kept with the study, so that `resume` goes on in the same way."""

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
    """Edits of every config by their flags, such as `steps=2000`."""
    wandb_online: bool = False
    wandb_entity: str | None = None
    wandb_project: str | None = None
    decide: bool | None = None
    """False: only what people named or proposed is run."""
    variants: int | None = None
    """Proposals that one run may lead to by rules."""
    again: bool = False
    """Run the base configs once more, although they were run before."""
    since_run: int = 0
    since_round: int = 0
    """The last run and round before the call, from which its `runs` and `rounds` are counted."""
    alone: bool = False
    """One config, once: what the study compares stays as it is."""
    informal: bool = False
    """Run without what the study requires of a formal run."""
    autopilot: bool = False
    """One proposal at a time."""
    asked_only: bool = False
    """Run what was asked for by name, and begin no round."""
    keep_going: bool = False
    """Continue although no base config works."""
    stop_on_failure: bool = False
    """End the study when an agent gives up."""
    jobs: int | None = None
    """Run submitted commands; the number is the process as long as which the engine stays, 0 for none."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunOptions:
        tuples = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{key: value for key, value in {**data, **tuples}.items() if key in cls.__slots__})


NO_GIT = (
    "the lab is not in git: of its code only hashes are recorded, so changes are noticed but runs cannot be reproduced "
    "(`git init`, then commit)"
)
COMPARED = (
    "judge", "deterministic", "objective", "holdout", "measure", "seed", "evaluator", "data", "normalise", "derive",
    "warm_start", "launch.command", "launch.env", "launch.config", "launch.cwd",
)  # fmt: skip
"""Keys of the lab file on which it depends whether runs can be compared; the others decide what is run, and when."""


def compared_changes(changes: Iterable[str]) -> list[str]:
    """Return the keys of a lab file, from keys of the configuration, without those that do not affect comparisons."""
    keys = (key.removeprefix("study.") for key in changes if key.startswith("study."))
    return [key for key in keys if any(key == one or key.startswith(f"{one}.") for one in COMPARED)]


@dataclass(frozen=True, slots=True)
class Base:
    """A config that a person gave."""

    name: str
    """Its path inside the lab."""
    config: dict[str, Any]
    """With the mode's edits, normalised and derived: what a run of it really uses."""
    notes: tuple[str, ...] = ()
    secrets: Mapping[Concrete, Any] = field(default_factory=dict)
    """The values that are hidden in `config`, by their places. Only the config file of a running run has them."""
    tracked: Mapping[str, bool] = field(default_factory=dict)
    """The W&B keys that `track` writes, with whether the config file lacks them."""


@dataclass(frozen=True, slots=True)
class Setup:
    lab: Path
    study: StudyConfig
    options: RunOptions
    guard: Guard
    bases: tuple[Base, ...]
    slots: tuple[Slot, ...]
    devices: Devices
    share: bool
    seed: Concrete | None
    """The key of the random seed in the config; None where the config has none that reaches the trainer."""
    prints: Fingerprints
    """The data and what measures: runs under other ones cannot be compared."""
    notes: tuple[str, ...] = field(default=())
    edits: tuple[str, ...] = ()
    """What the flags of this call change in every config."""
    conditions: str = ""
    """Runs are compared only with runs of the same conditions: arguments of the trainer, number of steps."""

    @property
    def keep_going(self) -> bool:
        """Whether the study continues although no base config works."""
        return self.options.keep_going or self.study.keep_going

    def is_unusable(self, run: RunRow) -> bool:
        """Whether a run has ended and nothing can be compared with it."""
        if run.state != "ended":
            return False
        if run.status == "ok":
            return self.study.objective is not None and run.objective is None
        return run.status in ("failed", "timeout", "lost")

    @property
    def seed_route(self) -> str | None:
        """How a seed reaches the trainer, in words; None: not at all."""
        if self.seed is not None:
            return f"{show(self.seed)} in the config"
        launch = self.study.launch
        if any(SEED_VARIABLE in part for part in launch.command):
            return f"{SEED_VARIABLE} in launch.command"
        return next((f"{SEED_VARIABLE} in launch.env.{k}" for k, v in launch.env.items() if SEED_VARIABLE in v), None)

    def seed_of(self, config: Mapping[str, Any]) -> int | None:
        """The seed that a run of this config gets; None where no seed reaches the trainer."""
        if self.seed is None:
            return FIRST_SEED if self.seed_route is not None else None
        value: Any = get(config, self.seed) if has(config, self.seed) else None
        if not _is_whole(value):
            return None
        if abs(value) >= MAX_SEED:
            raise LabError(
                f"{show(self.seed)}: the seed {show_value(value)} is too large", hint="it must be below 2^62"
            )
        return int(value)

    def base(self, name: str | None) -> Base:
        for base in self.bases:
            if base.name == name:
                return base
        return self.bases[0]

    def reveal(self, config: dict[str, Any], base: Base) -> dict[str, Any]:
        """Return a config of the ledger as the trainer gets it: with the secrets that the base config has now."""
        if not base.secrets:
            return config
        revealed = copy.deepcopy(config)
        for place, value in base.secrets.items():
            if has(revealed, place) and get(revealed, place) == HIDDEN:
                get(revealed, place[:-1])[place[-1]] = value
        return revealed

    def track(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with the W&B keys as the lab file says them now, whatever an earlier run was told."""
        return with_values(config, values_of(self.study.track.wandb, config))

    def untracked(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the config without the W&B keys that `track` writes: where a run is logged does not change it."""
        return without(config, list(values_of(self.study.track.wandb, config)))

    @property
    def round_size(self) -> int:
        if self.options.autopilot:
            return 1
        return self.study.round_size or max(len(self.slots), len(self.bases))


def make_guard(study: StudyConfig) -> Guard:
    knobs = {path: Knob.make(path, spec) for path, spec in study.knobs.items()}
    return Guard(knobs, [(n.set, n.to) for n in study.normalise], study.derive, study.constraints)


def base_paths(lab: Path, study: StudyConfig, options: RunOptions) -> dict[str, Path]:
    """The files of the base configs by their names, in order."""
    names = options.cfgs or tuple(study.base)
    if not names:
        raise LabError(f"study {study.name!r} has no base config", hint="name one in lab.yaml (base:) or with --cfgs")
    found = [inside(lab, name, "base config") for name in names]
    shown = [str(path.relative_to(lab.resolve())) for path in found]
    twice = {name for name in shown if shown.count(name) > 1}
    if twice:
        raise LabError(f"a base config is named twice: {', '.join(sorted(twice))}")
    return dict(zip(shown, found, strict=True))


def load_bases(
    lab: Path, study: StudyConfig, options: RunOptions, guard: Guard, more_edits: Sequence[str] = ()
) -> tuple[Base, ...]:
    """The base configs, in order, with the edits of the mode and `more_edits`."""
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
    """The config with its W&B keys as `track` says them, notes about it, and the keys with whether they are new."""
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
            f"{keys}: not in the config, so track.wandb reaches the trainer there by the environment alone; "
            "if it has such a key, add it, or name it in track.wandb.keys"
        )
    return with_values(config, values), notes, {show(place): not has(config, place) for place in values}


def plan_slots(study: StudyConfig, options: RunOptions, devices: Devices) -> tuple[Slot, ...]:
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


def parse_cores(share: str | list[int]) -> list[int]:
    """`[0, 1]`, or a text such as `0-3,8`."""
    if not isinstance(share, str):
        return list(share)
    cores: list[int] = []
    for part in share.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", part)
        if found is None:
            raise LabError(f"slots.cores: {share!r} is not a list of cores", hint="write 0-3 or 0,2,4")
        cores.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cores


def missing_for_formal(
    study: StudyConfig, slots: Sequence[Slot], devices: Devices, bases: Sequence[Base] = (), extra: Sequence[str] = ()
) -> list[str]:
    """What the study requires and this run would not have."""
    missing = []
    if study.require.gpu:
        known = set(devices.ids()) if devices.present else set()
        other_vendor = any(Path(name).exists() for name in ("/dev/kfd", "/dev/accel/accel0"))
        if not all(slot.devices for slot in slots):
            missing.append("a GPU for every slot (name them with --gpus or slots.gpus)")
        elif not known and not other_vendor:
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
    """Check everything that can be checked before anything is written or started."""
    study, told = apply_options(study, options)
    guard = make_guard(study)
    flags = []
    if options.flags:
        configs = {name: read_config(path) for name, path in base_paths(lab.folder, study, options).items()}
        with lab.at(study, "flags"):
            flags = edits_of_flags(study.flags, options.flags, configs)
    edits = tuple(flag.edit for flag in flags)
    bases = load_bases(lab.folder, study, options, guard, edits)
    devices = Devices()
    slots = plan_slots(study, options, devices)
    missing = missing_for_formal(study, slots, devices, bases, options.extra)
    if missing and not options.informal:
        raise LabError(
            f"study {study.name!r} requires of a formal run: {'; '.join(missing)}",
            hint="--informal runs without, and says so",
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
    notes = (*(flag.describe() for flag in flags), *told, *notes)
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
    """Return everything that decides what is run and what is believed, defaults included, without secrets.

    Which devices and how many slots are used is left out: it changes how fast a study is, not what it finds."""
    study = setup.study.model_dump(mode="json", by_alias=True, exclude={"slots"})
    study["launch"]["command"] = redact_argv(study["launch"]["command"])
    study["launch"]["env"] = redact_env(study["launch"]["env"])
    said = setup.options
    options = {
        "mode": said.mode, "rounds": said.rounds, "runs": said.runs, "continuous": said.continuous,
        "extra": redact_argv(said.extra), "informal": said.informal, "autopilot": said.autopilot,
        **{name: value for name in CALL_OPTIONS if (value := getattr(said, name)) not in (None, False, ())},
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
    """Return the folder from which the names in a command are found: the one that the trainer starts in, and the lab
    for a trainer that starts in its run folder."""
    folder = inside(lab, "." if cwd == RUN_FOLDER else cwd, "launch.cwd")
    if not folder.is_dir():
        raise LabError(f"launch.cwd: the lab has no folder {cwd}", hint=f"`cwd: {RUN_FOLDER}` is the run folder")
    return folder


def find_prints(lab: LabConfig, study: StudyConfig) -> Fingerprints:
    """The data and what measures; an error if some of it is missing."""
    printed = []
    for what in ("data", "evaluator"):
        for name in getattr(study, what):
            path = inside(lab.folder, name, what)
            if not path.exists():
                raise LabError(f"{what}: {name} does not exist", file=lab.folder / "lab.yaml")
            printed.append(path)
    return Fingerprints(lab.folder, printed)


def find_seed(study: StudyConfig, base: Base) -> Concrete | None:
    """The key of the seed in the config: the one that the lab file names, else the key of that name nearest to the
    top. None if it does not reach the trainer, because the key is left out of the flags or variables."""
    if study.seed is not None:
        found = find(base.config, study.seed)
        if len(found) != 1 or not _is_whole(get(base.config, found[0])):
            raise LabError(f"seed: {study.seed} is no whole number in {base.name}", hint="name the key of the seed")
        return found[0]
    named = [path for path, value in leaves(base.config) if str(path[-1]).lower() in SEEDS and _is_whole(value)]
    nearest = min(named, key=len, default=None)
    if nearest is None or _reaches(study, nearest):
        return nearest
    return None


def _reaches(study: StudyConfig, seed: Concrete) -> bool:
    """Whether the value of this key is passed on, by the config or by `{seed}`."""
    launch = study.launch
    templates = (*launch.command, *launch.env.values())
    return not launch.config.leaves_out(seed) or any(SEED_VARIABLE in text for text in templates)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def unsearched(setup: Setup) -> set[str]:
    """The keys that a search leaves alone: the seed, which changes nothing but luck, and where weights come from."""
    warm = setup.study.warm_start
    keys = {show(setup.seed)} if setup.seed is not None else set()
    return keys | ({warm.mode, warm.source} if warm is not None else set())


def agent_warnings(study: StudyConfig, lab: Path) -> list[str]:
    """Which agents of a study can write outside their folders on this machine, in words."""
    agents = [entry.agent for entry in study.proposers if entry.agent is not None]
    if not agents:
        return []
    from looplab.agents.sandbox import confinement_of
    from looplab.decide.agent import spec_of

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
    """The proposers in the order in which they are asked: people always come first.

    Args:
        left: Returns what the budget leaves, in words.
        wake: Called by a proposer that has finished thinking.
        asks: For a preview, which calls no agent and leaves all files as they are: where it notes the calls.
        check: Returns why a proposal would be rejected.
        report: Told of every call of an agent that failed and every answer that was refused.
        tell: Gets what people must know of agents: its kind (`note` or `alarm`) and a sentence.
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
            from looplab.decide.search import SearchProposer

            if study.objective is None:
                raise LabError("search needs an objective: say which metric counts", file=setup.lab / "lab.yaml")
            goal = study.objective.goal
            others.append(SearchProposer(entry.search, setup.guard, base, goal, history, unsearched(setup)))
        elif entry.agent is not None:
            from looplab.decide.agent import AgentProposer, UnaskedAgent

            answers.append(entry.agent.answer)
            alone = sum("queue" not in one.model_fields_set for one in study.proposers) == 1
            known = (entry.agent, study, setup.guard, setup.lab, outputs, history, base, left, wake)
            named: Any = {"check": check, "report": report, "tell": tell}
            if alone:
                named["stand_in"] = lambda: make_stand_in(setup, history, check)
            others.append(AgentProposer(*known, **named) if asks is None else UnaskedAgent(*known, asks=asks, **named))
        else:
            queue = inside(setup.lab, entry.queue, "queue") if entry.queue else None
            people.append(QueueProposer(queue, background=asks is None))
    if not any(isinstance(proposer, QueueProposer) for proposer in people):
        people.insert(0, QueueProposer())
    if answers:
        from looplab.decide.next_config import NextConfig

        # The file itself may be anything that an agent has left there, a link too; it is opened without following it.
        files = {inside(setup.lab, Path(answer).parent, "answer") / Path(answer).name for answer in answers}
        people += [NextConfig(file, outputs, base, guard=setup.guard, clears=asks is None) for file in sorted(files)]
    if len(others) > 1 and study.mix == "bandit":
        from looplab.decide.mix import Mix

        others = [Mix(others, seed=0, patient=not setup.options.continuous)]
    return (*people, *others)


def make_stand_in(
    setup: Setup, history: History, check: Callable[[Proposal], Sequence[Problem]] | None
) -> Proposer | None:
    """A search that proposes while an agent fails, where no other proposer is configured; None where nothing can be
    searched, or the packages for it are not installed."""
    from looplab.decide.search import SearchProposer
    from looplab.decide.stand_in import StandIn

    goal = setup.study.objective.goal if setup.study.objective is not None else "min"
    samplers: tuple[Literal["auto", "random"], ...] = ("auto", "random") if setup.study.objective else ("random",)
    for sampler in samplers:
        with contextlib.suppress(LabError):
            base, fixed = setup.bases[0].config, unsearched(setup)
            search = SearchProposer(SearchConfig(sampler=sampler), setup.guard, base, goal, history, fixed)
            return StandIn(search, setup.guard, history, check or (lambda proposal: ())) if search.axes else None
    return None
