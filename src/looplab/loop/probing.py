"""A probe: short runs of every setting of a sweep, to find the highest throughput that is stable on this machine.

A probe is a study of its own beside the real one, run by the same engine in one slot that has all cores and devices.
Its settings wait in the ledger's queue like the proposals of a person; how many runs a setting still needs is counted
anew each time, so a probe that was killed, or whose sweep was changed, goes on with what is missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from looplab.config import paths
from looplab.config.edits import Edit, Op
from looplab.config.lab import BudgetConfig, LabConfig, ObjectiveConfig, ProbeConfig, Require, StudyConfig, WatchRule
from looplab.decide.base import Proposal
from looplab.decide.queue import QueueProposer
from looplab.errors import LabError
from looplab.guard.knobs import KnobTable
from looplab.launch.base import Slot
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import RunRow, StudyLedger
from looplab.loop.decision import Decider, ProposalRejected, base_runs, decide_base
from looplab.loop.setup import Base, RunOptions, Setup, make_guard
from looplab.measure.discover import reader_of
from looplab.runs import folder

MODE = "probe"
STALLED = "stalled"
NOT_A_NUMBER = "not a number"
LEAST_ROWS = 4
"""Half of the rows are measured, and one value has no variation."""
MAX_CV = 0.2
"""The coefficient of variation up to which a throughput counts as stable."""
NEAR = 0.03
"""Settings that are this near to the fastest are as good, and the cheapest of them is chosen."""
MOST = 1000
"""Combinations of a sweep; more are a slip of the pen, or a matter for `search`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination of the sweep."""

    values: Mapping[str, Any]
    """The swept keys as the run really has them: normalised, and in the type of the config."""
    wanted: tuple[str, ...]
    """The edits as the sweep says them."""
    config_hash: str | None
    """None: it is not run."""
    skipped: str = ""
    """Why it is not run."""
    is_base: bool = False
    """Whether it is what the base config says."""

    @property
    def name(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.values.items())
        return f"{shown} (the base)".lstrip() if self.is_base else shown

    @property
    def edits(self) -> tuple[str, ...]:
        return tuple(str(Edit(key, Op.SET, value)) for key, value in self.values.items())

    @property
    def cost(self) -> tuple[float, tuple[float, ...]]:
        """What is cheaper sorts first: the smaller product of the values, then the smaller first values."""
        numbers = [
            float(v) if isinstance(v, int | float) and not isinstance(v, bool) else 1.0 for v in self.values.values()
        ]
        return math.prod(abs(n) or 1.0 for n in numbers), tuple(numbers)


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """What one run of a setting says."""

    run: str
    mean: float | None
    """Over the second half of its rows, when it has warmed up."""
    cv: float | None
    """Their standard deviation, as a share of the mean."""
    rows: int
    trouble: str
    """Why it tells nothing, or that it went wrong; empty if it is sound."""


@dataclass(frozen=True, slots=True)
class Result:
    """A setting with all that its runs say."""

    setting: Setting
    readings: tuple[ProbeReading, ...]
    mean: float | None
    """The median of the runs' means."""
    cv: float | None
    """The median of the runs' variations, or the variation between the runs where that is larger."""
    trouble: str
    """Why it is not stable; empty if it is."""
    missing: int
    """How many of its runs are still to be made."""

    @property
    def rows(self) -> int:
        return min((reading.rows for reading in self.readings), default=0)

    @property
    def stable(self) -> bool:
        return self.mean is not None and not self.trouble and not self.missing

    @property
    def status(self) -> str:
        if self.setting.skipped:
            return f"not run: {self.setting.skipped}"
        if self.missing:
            return f"{self.missing} run(s) to go" + (f"; {self.trouble}" if self.trouble else "")
        return "stable" if self.stable else self.trouble


@dataclass(frozen=True, slots=True)
class Advice:
    """The setting to use."""

    result: Result
    reason: str


# -- the study of a probe


class ProbeLab(LabConfig):
    """The lab of a probe's study: what is wrong in it is told at its place in the real study."""

    def __init__(self, lab: LabConfig, real: StudyConfig, probe: StudyConfig) -> None:
        super().__init__(lab.folder, {probe.name: probe})
        self._told: Callable[..., AbstractContextManager[None]] = lambda *keys: lab.at(real, *keys)

    def at(self, study: StudyConfig, *keys: str) -> Any:
        return self._told(*keys)


def probe_of(study: StudyConfig) -> ProbeConfig:
    if study.probe is None:
        raise LabError(
            f"study {study.name!r} does not say what to probe",
            hint="add to lab.yaml, for example: probe: {sweep: {vec.num_workers: [1, 2, 4]}, metric: sps}",
        )
    return study.probe


def probe_name(lab: LabConfig, study: StudyConfig, ledger: Ledger | None, fresh: bool) -> str:
    """The name of the study's latest probe (`drone.probe`, `drone.probe2`), or of the next one."""
    first = f"{study.name}.probe"
    names = {row["name"] for row in ledger.rows("SELECT name FROM studies")} if ledger is not None else set()
    number = 1
    while (f"{first}{number + 1}") in names:
        number += 1
    if fresh and first in names:
        number += 1
    name = first if number == 1 else f"{first}{number}"
    if name in lab.studies:
        raise LabError(f"the lab has a study {name!r}, which is the name of a probe of {study.name!r}",
                       hint="rename that study")  # fmt: skip
    return name


def probe_study(study: StudyConfig, name: str, mode: str | None) -> StudyConfig:
    """The study of a probe: as the real one is launched and guarded, but measured by its throughput alone."""
    probe = probe_of(study)
    if mode is not None and mode not in study.modes:
        known = ", ".join(study.modes) or "none"
        raise LabError(f"study {study.name!r} has no mode {mode!r}", hint=f"modes: {known}")
    combinations = math.prod(len(values) for values in probe.sweep.values())
    if combinations == 0:
        raise LabError("probe.sweep: a key has no values to try", hint="give each key a list of values")
    if combinations > MOST:
        raise LabError(f"probe.sweep has {combinations} combinations, more than {MOST}", hint="sweep fewer values")
    knobs = KnobTable(make_guard(study).knobs.values())
    for path in probe.sweep:
        if path in study.derive:
            raise LabError(f"probe.sweep: {path} is derived from other keys ({study.derive[path]})",
                           hint="sweep those instead")  # fmt: skip
    # A NaN in what the study does not watch (a mean before its first episode, say) says nothing about the speed.
    numbers = [rule.nan for rule in study.watch if rule.nan] or [[probe.metric]]
    watch = [WatchRule(name=STALLED, stall=probe.stall)]
    watch += [WatchRule(name=NOT_A_NUMBER + (f" {n}" if n else ""), nan=nan) for n, nan in enumerate(numbers)]
    wandb = study.track.wandb
    if wandb is not None and wandb.mode == "online":
        wandb = wandb.model_copy(update={"mode": "offline"})  # it may be what is measured from, but is not published
    return study.model_copy(
        update={
            "name": name,
            "launch": study.launch.model_copy(update={"timeout": probe.timeout}),
            "base": study.base[:1],
            "modes": {MODE: [*(study.modes[mode] if mode else ()), *probe.edits]},
            "objective": ObjectiveConfig(metric=probe.metric, goal="max", at="mean(10)"),
            # The person wrote the sweep, so its keys may change; what is said of them as knobs holds all the same.
            "knobs": {**study.knobs, **{path: {} for path in probe.sweep if knobs.owner(path) is None}},
            "holdout": None,
            "proposers": [],
            "warm_start": None,
            "watch": watch,
            "judge": None,
            "round_size": combinations * probe.repeats + 1,
            "budget": BudgetConfig(),
            "track": study.track.model_copy(update={"wandb": wandb}),
            "require": Require(gpu=study.require.gpu),
            "needs_exec": False,
        }
    )


def probe_options(options: RunOptions) -> RunOptions:
    return RunOptions(
        cfgs=options.cfgs[:1], mode=MODE, gpus=options.gpus, share=options.share, extra=options.extra,
        informal=options.informal, keep_going=True,
    )  # fmt: skip


def in_one_slot(setup: Setup) -> Setup:
    """One run at a time, since two would disturb each other; it has all that the study's slots have."""
    devices = tuple(dict.fromkeys(device for slot in setup.slots for device in slot.devices))
    cores: set[int] = set()
    if all(slot.cores for slot in setup.slots):  # a slot without cores of its own may use all
        cores = {core for slot in setup.slots for core in slot.cores}
    return replace(setup, slots=(Slot("all", devices, tuple(sorted(cores))),))


# -- its settings


def find_settings(setup: Setup, probe: ProbeConfig) -> list[Setting]:
    """Every combination of the sweep, with what the guard says of it; the base is among them, or comes first."""
    base = setup.bases[0]
    base_hash = decide_base(setup, base).config_hash
    decider = Decider(setup, None)
    found: list[Setting] = []
    known: dict[str, Setting] = {}
    for values in product(*probe.sweep.values()):
        wanted = dict(zip(probe.sweep, values, strict=True))
        edits = tuple(str(Edit(path, Op.SET, value)) for path, value in wanted.items())
        try:
            decision = decider.decide(Proposal(edits, "", QueueProposer.name))
        except ProposalRejected as rejected:
            found.append(Setting(wanted, edits, None, str(rejected)))
            continue
        real = {path: _standing(decision.plan.config, path, value) for path, value in wanted.items()}
        twin = known.get(decision.config_hash)
        if twin is not None:
            found.append(Setting(wanted, edits, None, f"it comes to the same as {twin.name}"))
            continue
        setting = Setting(real, edits, decision.config_hash, is_base=decision.config_hash == base_hash)
        known[decision.config_hash] = setting
        found.append(setting)
    return found if base_hash in known else [_base_setting(base, probe, base_hash), *found]


def _base_setting(base: Base, probe: ProbeConfig, config_hash: str) -> Setting:
    values = {path: _standing(base.config, path, None) for path in probe.sweep if paths.find(base.config, path)}
    return Setting(values, (), config_hash, is_base=True)


def _standing(config: dict[str, Any], path: str, otherwise: Any) -> Any:
    """What stands at a swept path; where it stands for several places, the first."""
    places = paths.find(config, path)
    return paths.get(config, places[0]) if places else otherwise


# -- its runs


def says_something(outputs: Path, run: RunRow) -> bool:
    """Whether an ended run tells about its setting; one that a person or a power cut ended does not."""
    if run.status == "stopped":
        reason = folder.read_json(outputs / run.id, "summary.json", strict=False).get("reason") or ""
        return str(reason).startswith("watch: ")
    return run.status != "lost"


def queue_up(setup: Setup, ledger: Ledger, settings: Sequence[Setting], repeats: int) -> int:
    """Put every run that is missing in the ledger's queue, and take out what the sweep no longer has; gives how many
    runs are to be made. The caller holds the study's lock."""
    study = setup.study
    record = StudyLedger(ledger, study.name)
    outputs = folder.study_folder(setup.lab, study.name)
    assert study.objective is not None
    to_make = 0
    # Reads a file of every run, so before the transaction; the lock is held, so nothing changes meanwhile.
    done = [run.config_hash for run in record.runs(state="ended") if says_something(outputs, run)]
    with ledger.write():
        record.open(study.objective.metric, study.objective.goal)
        wanted = {setting.config_hash for setting in settings if setting.config_hash is not None}
        _withdraw(record, wanted)
        sources = [row.source for row in record.proposals() if row.source]
        waiting = [_hash_in(row.source) for row in record.proposals("waiting")]
        under_way = [run.config_hash for run in record.runs_open()]
        base = decide_base(setup, setup.bases[0])
        if base.key not in base_runs(setup, record):
            waiting.append(base.config_hash)  # the engine begins with it
        due: list[tuple[int, Setting, str]] = []
        for setting in settings:
            hash_ = setting.config_hash
            if hash_ is None:
                continue
            coming = under_way.count(hash_) + waiting.count(hash_)
            before = coming + done.count(hash_)
            taken = sum(1 for source in sources if _hash_in(source) == hash_)
            due += [(n, setting, f"probe:{hash_}:{taken + n - before + 1}") for n in range(before, repeats)]
            to_make += coming
        # All settings once, then all once more: if the machine is slower for a while, that shows between the repeats
        # of a setting, instead of making one setting look worse than another.
        for _, setting, source in sorted(due, key=lambda entry: entry[0]):
            record.propose(QueueProposer.name, setting.wanted, setting.name, source=source)
        to_make += len(due)
    return to_make


def _hash_in(source: str | None) -> str:
    _, _, rest = (source or "").partition(":")
    return rest.partition(":")[0]


def _withdraw(record: StudyLedger, wanted: set[str]) -> None:
    why = "the sweep does not have it any more"
    for row in record.proposals("waiting"):
        if _hash_in(row.source) not in wanted:
            record.reject(row.id, [{"key": "probe.sweep", "rule": "withdrawn", "message": why}])
    for run in record.runs(state="planned"):
        if run.config_hash not in wanted:
            record.ended(
                run.id, status="stopped", code=None, signal=None, started=None, ended=time.time(), objective=None,
                files={}, note=why,
            )  # fmt: skip


# -- what came of it


def read_results(setup: Setup, record: StudyLedger, settings: Sequence[Setting], repeats: int) -> list[Result]:
    outputs = folder.study_folder(setup.lab, setup.study.name)
    readings: dict[str, list[ProbeReading]] = {}
    for run in record.runs(state="ended"):
        if says_something(outputs, run):
            readings.setdefault(run.config_hash, []).append(_read(setup.study, outputs / run.id, run))
    return [judge_setting(setting, readings.get(setting.config_hash or "", ()), repeats) for setting in settings]


def _read(study: StudyConfig, run_dir: Path, run: RunRow) -> ProbeReading:
    assert study.objective is not None
    metric = study.objective.metric
    batch = reader_of(study, run_dir).poll(final=run.signal is None)
    values = batch[metric].values if metric in batch else []
    mean, cv, trouble = judge_rows(values, metric)
    if not values and batch:
        trouble += f"; it measured {', '.join(sorted(batch)[:5])}"
    return ProbeReading(run.id, mean, cv, len(values), _how_it_ended(study, run_dir, run) or trouble)


def _how_it_ended(study: StudyConfig, run_dir: Path, run: RunRow) -> str:
    if run.status == "ok":
        return ""
    if run.status == "timeout":
        return f"not done after {study.launch.timeout:g} s"
    if run.status == "stopped":
        return str(folder.read_json(run_dir, "summary.json", strict=False).get("reason", "")).removeprefix("watch: ")
    notes = folder.read_json(run_dir, "summary.json", strict=False).get("notes") or []
    how = f"signal {run.signal}" if run.signal is not None else f"exit code {run.exit_code}"
    return f"failed: {'; '.join(map(str, notes)) or how}"


def judge_rows(values: Sequence[float], metric: str) -> tuple[float | None, float | None, str]:
    """Mean and variation of the second half of a run's rows, and why they cannot be told where they cannot."""
    late = [value for value in values[len(values) // 2 :] if math.isfinite(value)]
    mean = fmean(late) if late else None
    if mean is None:
        return None, None, f"no {metric} in its rows" if values else f"{metric} was not measured"
    if mean <= 0:
        return mean, None, f"a {metric} of {mean:g}"
    if len(values) < LEAST_ROWS or len(late) < 2:
        return mean, None, f"too short to tell: {len(values)} row(s) of {metric}, {LEAST_ROWS} are needed"
    return mean, stdev(late) / mean, ""


def judge_setting(setting: Setting, readings: Sequence[ProbeReading], repeats: int) -> Result:
    """One verdict from all runs of a setting: a single one that went wrong is enough to distrust it, but one that was
    only uneven is not, where the median is even."""
    missing = max(0, repeats - len(readings)) if setting.config_hash is not None else 0
    means = [reading.mean for reading in readings if reading.mean is not None]
    cvs = [reading.cv for reading in readings if reading.cv is not None]
    mean = median(means) if means else None
    cv = median(cvs) if cvs else None
    bad = [reading for reading in readings if reading.trouble]
    trouble = ""
    if bad:
        trouble = bad[0].trouble + (f" ({len(bad)} of {len(readings)} runs)" if len(readings) > 1 else "")
    elif cv is not None and mean:
        if len(means) > 1 and (between := stdev(means) / mean) > cv:
            cv = between
        trouble = f"varies by {cv:.0%}" if cv > MAX_CV else ""
    return Result(setting, tuple(readings), mean, cv, trouble, missing)


def advise(results: Sequence[Result], metric: str) -> Advice | None:
    """The fastest of the stable settings; where others are as fast within a small margin, the cheapest of those."""
    stable = [result for result in results if result.stable and result.mean is not None]
    if not stable:
        return None
    fastest = max(stable, key=_speed)
    near = [result for result in stable if _speed(result) >= (1 - NEAR) * _speed(fastest)]
    chosen = min(near, key=lambda result: (result.setting.cost, -_speed(result)))
    reason = f"{rate(_speed(chosen))} {metric}, ± {chosen.cv or 0:.0%}: "
    if chosen is fastest:
        reason += f"the fastest of {len(stable)} stable setting(s)"
    else:
        reason += f"the cheapest within {NEAR:.0%} of the fastest, {fastest.setting.name} ({rate(_speed(fastest))})"
    base = next((result for result in results if result.setting.is_base), None)
    if base is not None and base is not chosen and base.stable:
        gain = _speed(chosen) / _speed(base)
        reason += f"; {gain:.2f} times the base"
        if abs(gain - 1) <= max(chosen.cv or 0, base.cv or 0):
            reason += ", which is no more than they vary"
    return Advice(chosen, reason)


def _speed(result: Result) -> float:
    return result.mean or 0.0


def rate(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
