"""What an engine needs before it begins: the study, its bases, its guard, its proposers, its slots, checked at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplab.config.edits import apply_edits
from looplab.config.files import read_config
from looplab.config.lab import Lab, Study
from looplab.config.paths import Concrete, find, get, leaves
from looplab.decide.base import Proposer
from looplab.decide.history import History
from looplab.decide.queue import QueueProposer
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob
from looplab.launch.base import Slot
from looplab.launch.command import check_templates, find_program
from looplab.launch.devices import Devices
from looplab.launch.slots import make_slots
from looplab.launch.tracking import has_wandb_key
from looplab.runs.capsule import Prints
from looplab.runs.names import inside
from looplab.watch.watcher import check as check_watch

if TYPE_CHECKING:
    from looplab.decide.agent import Ask

SEEDS = ("seed", "random_seed")
ANSWER = "proposals/next_config.json"
"""Where people write what the autopilot tries next, unless an agent's `answer` says another file."""


@dataclass(frozen=True, slots=True)
class Options:
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
    informal: bool = False
    """Run without what the study requires of a formal run."""
    autopilot: bool = False
    """One proposal at a time."""
    asked_only: bool = False
    """Run what was asked for by name, and begin no round."""
    jobs: int | None = None
    """Run submitted commands; the number is the process as long as which the engine stays, 0 for none."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Options:
        tuples = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{key: value for key, value in {**data, **tuples}.items() if key in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Base:
    """A config that a person gave."""

    name: str
    """Its path inside the lab."""
    config: dict[str, Any]
    """With the mode's edits, normalised and derived: what a run of it really uses."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    lab: Path
    study: Study
    options: Options
    guard: Guard
    bases: tuple[Base, ...]
    slots: tuple[Slot, ...]
    devices: Devices
    share: bool
    seed: Concrete | None
    """Where the config holds the random seed."""
    prints: Prints
    """The data and what measures: runs under other ones cannot be compared."""
    notes: tuple[str, ...] = field(default=())

    def base(self, name: str | None) -> Base:
        return next((base for base in self.bases if base.name == name), self.bases[0])

    @property
    def round_size(self) -> int:
        if self.options.autopilot:
            return 1
        return self.study.round_size or max(len(self.slots), len(self.bases))


def make_guard(study: Study) -> Guard:
    knobs = {path: Knob.make(path, spec) for path, spec in study.knobs.items()}
    return Guard(knobs, [(n.set, n.to) for n in study.normalise], study.derive, study.constraints)


def load_bases(lab: Path, study: Study, options: Options, guard: Guard) -> tuple[Base, ...]:
    """The base configs, in order; every problem of every one of them is told at once."""
    names = options.cfgs or tuple(study.base)
    if not names:
        raise LabError(f"study {study.study!r} has no base config", hint="name one in lab.yaml (base:) or with --cfgs")
    if options.mode is not None and options.mode not in study.modes:
        known = ", ".join(study.modes) or "none"
        raise LabError(f"study {study.study!r} has no mode {options.mode!r}", hint=f"modes: {known}")
    edits = study.modes[options.mode] if options.mode else ()
    bases = []
    for name in names:
        path = inside(lab, name, "base config")
        shown = str(path.relative_to(lab.resolve()))
        try:
            applied = apply_edits(read_config(path), edits)
        except LabError as error:
            raise LabError(f"{shown}: {error.message}" if error.file is None else error.message,
                           file=error.file, line=error.line, hint=error.hint) from None  # fmt: skip
        ruling = guard.admit(applied.config)
        if ruling.config is None or ruling.problems:
            raise LabError(f"{shown}: " + "; ".join(problem.message for problem in ruling.problems))
        bases.append(Base(shown, ruling.config, (*applied.notes, *ruling.notes)))
    twice = {base.name for base in bases if [b.name for b in bases].count(base.name) > 1}
    if twice:
        raise LabError(f"a base config is named twice: {', '.join(sorted(twice))}")
    return tuple(bases)


def plan_slots(study: Study, options: Options, devices: Devices) -> tuple[Slot, ...]:
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
        first, dash, last = part.partition("-")
        if not first.strip().isdigit() or (dash and not last.strip().isdigit()):
            raise LabError(f"slots.cores: {share!r} is no list of cores", hint="write 0-3 or 0,2,4")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def missing_for_formal(study: Study, slots: Sequence[Slot], devices: Devices) -> list[str]:
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
        wandb = study.track.wandb
        if wandb is None or wandb.mode != "online":
            missing.append("W&B online (track.wandb.mode: online)")
        if not has_wandb_key({**os.environ, **study.launch.env}):
            missing.append("a W&B key (set WANDB_API_KEY, or `wandb login`)")
    return missing


def prepare(lab: Lab, study: Study, options: Options) -> Setup:
    """Check everything that can be checked before anything is written or started."""
    guard = make_guard(study)
    bases = load_bases(lab.folder, study, options, guard)
    devices = Devices()
    slots = plan_slots(study, options, devices)
    missing = missing_for_formal(study, slots, devices)
    if missing and not options.informal:
        raise LabError(
            f"study {study.study!r} requires of a formal run: {'; '.join(missing)}",
            hint="--informal runs without, and says so",
        )
    cwd = inside(lab.folder, study.launch.cwd, "launch.cwd")
    check_templates(study.launch.command, study.launch.env)
    if "{" not in study.launch.command[0]:
        find_program(study.launch.command[0], cwd, study.launch.env)
    prints = find_prints(lab, study)
    share = study.slots.share if options.share is None else options.share
    notes = tuple(f"{base.name}: {note}" for base in bases for note in base.notes)
    with lab.at(study, "watch"):
        held_out = study.holdout.metric if study.holdout is not None else None
        check_watch(study.watch, study.objective, held_out, guard, [base.config for base in bases])
    seed = find_seed(study, bases[0])
    return Setup(lab.folder, study, options, guard, bases, slots, devices, share, seed, prints, notes)


def find_prints(lab: Lab, study: Study) -> Prints:
    """The data and what measures; an error if some of it is missing."""
    printed = []
    for what in ("data", "evaluator"):
        for name in getattr(study, what):
            path = inside(lab.folder, name, what)
            if not path.exists():
                raise LabError(f"{what}: {name} does not exist", file=lab.folder / "lab.yaml")
            printed.append(path)
    return Prints(lab.folder, printed)


def find_seed(study: Study, base: Base) -> Concrete | None:
    """Where the config holds its seed: where the lab file says, else at the key of that name nearest to the top."""
    if study.seed is not None:
        found = find(base.config, study.seed)
        if len(found) != 1 or not _is_whole(get(base.config, found[0])):
            raise LabError(f"seed: {study.seed} is no whole number in {base.name}", hint="name the key of the seed")
        return found[0]
    named = [path for path, value in leaves(base.config) if str(path[-1]).lower() in SEEDS and _is_whole(value)]
    return min(named, key=len) if named else None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def make_proposers(
    setup: Setup,
    history: History,
    outputs: Path,
    left: Callable[[], str],
    wake: Callable[[], None],
    asks: list[Ask] | None = None,
) -> tuple[Proposer, ...]:
    """The proposers in the order in which they are asked: people always come first.

    Args:
        left: Returns what the budget leaves, in words.
        wake: Called by a proposer that has finished thinking.
        asks: For a preview, which calls no agent and leaves all files as they are: where it notes the calls.
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
        if entry.rules is not None:
            from looplab.decide.rules import RulesProposer

            file = inside(setup.lab, entry.rules, "rules")
            others.append(RulesProposer(file, setup.guard, history, entry.variants))
        elif entry.search is not None:
            from looplab.decide.search import SearchProposer

            if study.objective is None:
                raise LabError("search needs an objective: say which metric counts", file=setup.lab / "lab.yaml")
            others.append(SearchProposer(entry.search, setup.guard, base, study.objective.goal, history))
        elif entry.agent is not None:
            from looplab.decide.agent import AgentProposer, UnaskedAgent

            answers.append(entry.agent.answer)
            known = (entry.agent, study, setup.guard, setup.lab, outputs, history, base, left)
            others.append(AgentProposer(*known, wake) if asks is None else UnaskedAgent(*known, asks))
        else:
            people.append(QueueProposer(inside(setup.lab, entry.queue, "queue") if entry.queue else None))
    if not any(isinstance(proposer, QueueProposer) for proposer in people):
        people.insert(0, QueueProposer())
    if answers:
        from looplab.decide.next_config import NextConfig

        files = {inside(setup.lab, answer, "answer") for answer in answers}
        people += [NextConfig(file, outputs, base, clears=asks is None) for file in sorted(files)]
    if len(others) > 1 and study.mix == "bandit":
        from looplab.decide.mix import Mix

        others = [Mix(others, seed=0, patient=not setup.options.continuous)]
    return (*people, *others)
