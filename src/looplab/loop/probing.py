"""Throughput probes: short runs of every setting of a sweep, to find the fastest stable one on this machine.

A probe is a separate study, run by the same engine in a single slot that has all cores and devices. Its settings are
queued in the ledger like a person's proposals. Missing runs are counted on every start, so a probe that was killed, or
whose sweep was changed, continues with the runs that are missing.
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
from looplab.config.lab import (
    BudgetConfig,
    LabConfig,
    ObjectiveConfig,
    ProbeConfig,
    Require,
    StudyConfig,
    WatchRule,
    derived_study,
)
from looplab.decide.base import Proposal
from looplab.decide.queue import QueueProposer
from looplab.errors import LabError
from looplab.guard.knobs import KnobTable
from looplab.launch.base import Slot
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.decision import Decider, ProposalRejected, base_runs, decide_base
from looplab.loop.setup import Base, RunOptions, Setup, make_guard
from looplab.loop.watching import WATCHED
from looplab.measure.discover import reader_of
from looplab.report.wording import plural
from looplab.runs import folder

MODE = "probe"
INHERITED = ("flags", "normalise", "derive", "constraints", "seed", "deterministic", "mix", "probe", "slots", "measure",
             "anchor", "data", "evaluator", "keep_going", "pipeline", "stages", "case", "suite", "executor",
             "resources", "retry",
)  # fmt: skip
"""Fields that the study of a probe shares with the real study."""
STALLED = "stalled"
NOT_A_NUMBER = "not a number"
LEAST_ROWS = 4
"""Minimum number of rows: only the second half is used, and a variation needs two values."""
MAX_CV = 0.2
"""Coefficient of variation up to which a throughput counts as stable."""
NEAR = 0.03
"""Relative margin within which settings count as equally fast; the cheapest of them is chosen."""
MOST = 1000
"""Maximum number of combinations of a sweep; more are a mistake, or a case for `search`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination of the sweep."""

    values: Mapping[str, Any]
    """Values of the swept keys as the run uses them: normalised, and in the type of the config."""
    wanted: tuple[str, ...]
    """Edits as written in the sweep."""
    config_hash: str | None
    """None if the setting is not run."""
    skipped: str = ""
    """Why the setting is not run; empty if it is."""
    is_base: bool = False
    """Whether it equals the base config."""

    @property
    def name(self) -> str:
        """The values, in words."""
        shown = ", ".join(f"{key}={value}" for key, value in self.values.items())
        return f"{shown} (the base)".lstrip() if self.is_base else shown

    @property
    def edits(self) -> tuple[str, ...]:
        """Edits that turn the base config into this setting."""
        return tuple(str(Edit(key, Op.SET, value)) for key, value in self.values.items())

    @property
    def cost(self) -> tuple[float, tuple[float, ...]]:
        """Sort key, cheapest first: the product of the values, then the values themselves."""
        numbers = [
            float(v) if isinstance(v, int | float) and not isinstance(v, bool) else 1.0 for v in self.values.values()
        ]
        return math.prod(abs(n) or 1.0 for n in numbers), tuple(numbers)


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """Measured throughput of one run of a setting."""

    run: str
    mean: float | None
    """Mean over the second half of its rows, after the warm-up; None if not measured."""
    cv: float | None
    """Coefficient of variation of these rows; None if unknown."""
    rows: int
    trouble: str
    """Why the reading is unusable; empty if it is sound."""


@dataclass(frozen=True, slots=True)
class Result:
    """A setting with the readings of all its runs."""

    setting: Setting
    readings: tuple[ProbeReading, ...]
    mean: float | None
    """Median of the runs' means; None if there are none."""
    cv: float | None
    """Median coefficient of variation within the runs, or the one between the runs if that is larger."""
    trouble: str
    """Why the setting is not stable; empty if it is."""
    missing: int
    """Number of runs still to be made."""

    @property
    def rows(self) -> int:
        """Smallest number of rows of any of its runs."""
        return min((reading.rows for reading in self.readings), default=0)

    @property
    def stable(self) -> bool:
        """Whether all runs were made and the throughput is stable."""
        return self.mean is not None and not self.trouble and not self.missing

    @property
    def status(self) -> str:
        """The state of the setting, in words."""
        if self.setting.skipped:
            return f"not run: {self.setting.skipped}"
        if self.missing:
            return f"{plural(self.missing, 'run')} to go" + (f"; {self.trouble}" if self.trouble else "")
        return "stable" if self.stable else self.trouble


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended setting."""

    result: Result
    reason: str


# -- the study of a probe


class ProbeLab(LabConfig):
    """The lab of a probe; errors are reported with their position in the real study."""

    def __init__(self, lab: LabConfig, real: StudyConfig, probe: StudyConfig) -> None:
        super().__init__(lab.folder, {probe.name: probe})
        self._told: Callable[..., AbstractContextManager[None]] = lambda *keys: lab.at(real, *keys)

    def at(self, study: StudyConfig, *keys: str) -> Any:
        return self._told(*keys)


def probe_of(study: StudyConfig) -> ProbeConfig:
    """Return the probe settings of a study.

    Raises:
        LabError: The study has none.
    """
    if study.probe is None:
        raise LabError(
            f"study {study.name!r} has no `probe` section",
            hint="add to lab.yaml, for example: probe: {sweep: {vec.num_workers: [1, 2, 4]}, metric: sps}",
        )
    return study.probe


def probe_name(lab: LabConfig, study: StudyConfig, ledger: Ledger | None, fresh: bool) -> str:
    """Return the name of the study's latest probe (`<study>.probe`, `<study>.probe2`).

    Args:
        ledger: None if the lab has no ledger yet.
        fresh: Whether to return the name of a new probe instead.

    Raises:
        LabError: The lab has a study of that name.
    """
    first = f"{study.name}.probe"
    names = ledger.studies() if ledger is not None else set()
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
    """Return the study of a probe: launch and guard of the real one, with the throughput as its only objective.

    Args:
        mode: Mode of the real study to apply; None: no mode.

    Raises:
        LabError: The mode is unknown, or the sweep cannot be run.
    """
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
    # A NaN in a metric that the study does not watch, such as a mean before the first episode, is harmless here.
    numbers = [rule.nan for rule in study.watch if rule.nan] or [[probe.metric]]
    watch = [WatchRule(name=STALLED, stall=probe.stall)]
    watch += [WatchRule(name=NOT_A_NUMBER + (f" {n}" if n else ""), nan=nan) for n, nan in enumerate(numbers)]
    wandb = study.track.wandb
    if wandb is not None and wandb.mode == "online":
        wandb = wandb.model_copy(update={"mode": "offline"})  # a source of the metric, but probes are not published
    return derived_study(
        study,
        INHERITED,
        name=name,
        launch=study.launch.model_copy(update={"timeout": probe.timeout}),
        base=study.base[:1],
        modes={MODE: [*(study.modes[mode] if mode else ()), *probe.edits]},
        objective=ObjectiveConfig(metric=probe.metric, goal="max", at="mean(10)"),
        # Swept keys may change even if they are not knobs; if they are, their bounds still apply.
        knobs={**study.knobs, **{path: {} for path in probe.sweep if knobs.owner(path) is None}},
        holdout=None,
        proposers=[],
        warm_start=None,
        watch=watch,
        judge=None,
        round_size=combinations * probe.repeats + 1,
        budget=BudgetConfig(),
        track=study.track.model_copy(update={"wandb": wandb}),
        require=Require(gpu=study.require.gpu),
        needs_exec=False,
    )


def probe_options(options: RunOptions) -> RunOptions:
    """Return the options of the call that also apply to a probe."""
    return RunOptions(
        cfgs=options.cfgs[:1], mode=MODE, gpus=options.gpus, share=options.share, extra=options.extra,
        informal=options.informal, keep_going=True,
    )  # fmt: skip


def in_one_slot(setup: Setup) -> Setup:
    """Merge all slots into one, since concurrent runs would distort each other's throughput."""
    devices = tuple(dict.fromkeys(device for slot in setup.slots for device in slot.devices))
    cores: set[int] = set()
    if all(slot.cores for slot in setup.slots):  # a slot without assigned cores may use all
        cores = {core for slot in setup.slots for core in slot.cores}
    return replace(setup, slots=(Slot("all", devices, tuple(sorted(cores))),))


# -- its settings


def find_settings(setup: Setup, probe: ProbeConfig) -> list[Setting]:
    """Return every combination of the sweep, checked by the guard; the base config is included, or prepended."""
    base = setup.bases[0]
    base_hash = decide_base(setup, base).config_hash
    decider = Decider(setup, None)
    settings: list[Setting] = []
    known: dict[str, Setting] = {}
    for values in product(*probe.sweep.values()):
        swept = dict(zip(probe.sweep, values, strict=True))
        edits = tuple(str(Edit(path, Op.SET, value)) for path, value in swept.items())
        try:
            decision = decider.decide(Proposal(edits, "", QueueProposer.name))
        except ProposalRejected as rejected:
            settings.append(Setting(swept, edits, None, str(rejected)))
            continue
        real = {path: _standing(decision.plan.config, path, value) for path, value in swept.items()}
        twin = known.get(decision.config_hash)
        if twin is not None:
            settings.append(Setting(swept, edits, None, f"the same as {twin.name}"))
            continue
        setting = Setting(real, edits, decision.config_hash, is_base=decision.config_hash == base_hash)
        known[decision.config_hash] = setting
        settings.append(setting)
    return settings if base_hash in known else [_base_setting(base, probe, base_hash), *settings]


def _base_setting(base: Base, probe: ProbeConfig, config_hash: str) -> Setting:
    """Return the setting of the base config itself."""
    values = {path: _standing(base.config, path, None) for path in probe.sweep if paths.find(base.config, path)}
    return Setting(values, (), config_hash, is_base=True)


def _standing(config: dict[str, Any], path: str, otherwise: Any) -> Any:
    """Return the value at a swept path, or at its first match if it has wildcards; `otherwise` if there is none."""
    places = paths.find(config, path)
    return paths.get(config, places[0]) if places else otherwise


# -- its runs


def says_something(outputs: Path, run: RunRow) -> bool:
    """Return whether an ended run is evidence about its setting: not if a person stopped it, or if it was lost."""
    if run.status == "stopped":
        reason = folder.read_json(outputs / run.id, "summary.json", strict=False).get("reason") or ""
        return str(reason).startswith(WATCHED)
    return run.status != "lost"


def queue_up(setup: Setup, ledger: Ledger, settings: Sequence[Setting], repeats: int) -> int:
    """Queue all missing runs, and withdraw those that the sweep no longer contains.

    The caller holds the study's lock.

    Args:
        repeats: Number of runs of each setting.

    Returns:
        The number of runs still to be made.
    """
    study = setup.study
    record = StudyLedger(ledger, study.name)
    outputs = folder.study_folder(setup.lab, study.name)
    assert study.objective is not None
    to_make = 0
    # Done before the transaction, since it reads a file of every run; the lock prevents changes in between.
    done = [run.config_hash for run in record.runs(state="ended") if says_something(outputs, run)]
    with ledger.write():
        record.open(study.objective.metric, study.objective.goal)
        hashes = {setting.config_hash for setting in settings if setting.config_hash is not None}
        _withdraw(record, hashes)
        sources = [row.source for row in record.proposals() if row.source]
        waiting = [_hash_in(row.source) for row in record.proposals("waiting")]
        under_way = [run.config_hash for run in record.runs_open()]
        base = decide_base(setup, setup.bases[0])
        if base.key not in base_runs(setup, record):
            waiting.append(base.config_hash)  # the engine starts with it
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
        # Repeats are interleaved: a temporary slowdown of the machine then shows as variation between the repeats of a
        # setting, and does not bias one setting against another.
        for _, setting, source in sorted(due, key=lambda entry: entry[0]):
            record.propose(QueueProposer.name, setting.wanted, setting.name, source=source)
        to_make += len(due)
    return to_make


def _hash_in(source: str | None) -> str:
    """Return the config hash in a proposal's source, `probe:<hash>:<n>`; empty if there is none."""
    _, _, rest = (source or "").partition(":")
    return rest.partition(":")[0]


def _withdraw(record: StudyLedger, wanted: set[str]) -> None:
    """Reject waiting proposals and stop planned runs whose config hash is not in `wanted`."""
    why = "no longer in the sweep"
    for row in record.proposals("waiting"):
        if _hash_in(row.source) not in wanted:
            record.reject(row.id, [{"key": "probe.sweep", "rule": "withdrawn", "message": why}])
    for run in record.runs(state="planned"):
        if run.config_hash not in wanted:
            record.ended(
                run.id, status="stopped", code=None, signal=None, started=None, ended=time.time(), objective=None,
                files={}, note=why,
            )  # fmt: skip


# -- its results


def read_results(setup: Setup, record: StudyLedger, settings: Sequence[Setting], repeats: int) -> list[Result]:
    """Return the result of every setting from its ended runs."""
    outputs = folder.study_folder(setup.lab, setup.study.name)
    readings: dict[str, list[ProbeReading]] = {}
    for run in record.runs(state="ended"):
        if says_something(outputs, run):
            readings.setdefault(run.config_hash, []).append(_read(setup.study, outputs / run.id, run))
    return [judge_setting(setting, readings.get(setting.config_hash or "", ()), repeats) for setting in settings]


def _read(study: StudyConfig, run_dir: Path, run: RunRow) -> ProbeReading:
    """Return the throughput of an ended run, or why it has none."""
    assert study.objective is not None
    metric = study.objective.metric
    batch = reader_of(study, run_dir).poll(final=run.signal is None)
    values = batch[metric].values if metric in batch else []
    mean, cv, trouble = judge_rows(values, metric)
    if not values and batch:
        trouble += f"; it measured {', '.join(sorted(batch)[:5])}"
    return ProbeReading(run.id, mean, cv, len(values), _how_it_ended(study, run_dir, run) or trouble)


def _how_it_ended(study: StudyConfig, run_dir: Path, run: RunRow) -> str:
    """Return how a run failed, in words; empty if it succeeded."""
    if run.status == "ok":
        return ""
    if run.status == "timeout":
        return f"not done after {study.launch.timeout:g} s"
    if run.status == "stopped":
        return str(folder.read_json(run_dir, "summary.json", strict=False).get("reason", "")).removeprefix(WATCHED)
    notes = folder.read_json(run_dir, "summary.json", strict=False).get("notes") or []
    how = f"signal {run.signal}" if run.signal is not None else f"exit code {run.exit_code}"
    return f"failed: {'; '.join(map(str, notes)) or how}"


def judge_rows(values: Sequence[float], metric: str) -> tuple[float | None, float | None, str]:
    """Return mean and coefficient of variation of the second half of a run's rows, and a problem (empty if none).

    Mean and variation are None if they cannot be computed.
    """
    late = [value for value in values[len(values) // 2 :] if math.isfinite(value)]
    mean = fmean(late) if late else None
    if mean is None:
        return None, None, f"no {metric} in its rows" if values else f"{metric} was not measured"
    if mean <= 0:
        return mean, None, f"a {metric} of {mean:g}"
    if len(values) < LEAST_ROWS or len(late) < 2:
        return mean, None, f"too short to measure: {plural(len(values), 'row')} of {metric}, {LEAST_ROWS} are needed"
    return mean, stdev(late) / mean, ""


def judge_setting(setting: Setting, readings: Sequence[ProbeReading], repeats: int) -> Result:
    """Combine the runs of a setting into one result.

    A single failed run makes the setting unstable. A single uneven one does not, if the median variation is low.
    """
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
    """Return the cheapest stable setting within the margin `NEAR` of the fastest; None if no setting is stable."""
    stable = [result for result in results if result.stable and result.mean is not None]
    if not stable:
        return None
    fastest = max(stable, key=_speed)
    near = [result for result in stable if _speed(result) >= (1 - NEAR) * _speed(fastest)]
    chosen = min(near, key=lambda result: (result.setting.cost, -_speed(result)))
    reason = f"{rate(_speed(chosen))} {metric}, ± {chosen.cv or 0:.0%}: "
    if chosen is fastest:
        reason += f"the fastest of {plural(len(stable), 'stable setting')}"
    else:
        reason += f"the cheapest within {NEAR:.0%} of the fastest, {fastest.setting.name} ({rate(_speed(fastest))})"
    base = next((result for result in results if result.setting.is_base), None)
    if base is not None and base is not chosen and base.stable:
        gain = _speed(chosen) / _speed(base)
        reason += f"; {gain:.2f} times the base"
        if abs(gain - 1) <= max(chosen.cv or 0, base.cv or 0):
            reason += ", which is within their variation"
    return Advice(chosen, reason)


def _speed(result: Result) -> float:
    """Return the mean throughput; 0 if not measured."""
    return result.mean or 0.0


def rate(value: float) -> str:
    """Format a throughput."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
