"""Facts of a study, collected from its ledger and its run folders for all reports.

Curves are not read here: collecting a thousand runs takes a second or two. A file that cannot be read becomes a note,
never an error: reports matter most when something went wrong.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from looplab.config import paths
from looplab.config.lab import ObjectiveConfig, StudyConfig, TieBreak
from looplab.decide import pareto
from looplab.decide.belief import describe, describe_before, recorded_belief
from looplab.errors import LabError
from looplab.guard.knobs import Knob, KnobTable
from looplab.ledger.plan import RunPlan
from looplab.ledger.roles import Origin, Role
from looplab.ledger.view import ProposalRow, RunRow, StudyView, is_failed
from looplab.measure.discover import reader_of
from looplab.measure.run_metrics import further_values, sign_of
from looplab.measure.summary import Directions, MetricSummary, Summariser, from_dict, objective_value
from looplab.report import wording
from looplab.report.budget import BudgetFacts, budget_facts
from looplab.report.judged import (
    Judged,
    MixFacts,
    ReplicatedConfig,
    Reproduced,
    Watched,
    judged,
    mix_facts,
    points,
    reproduced,
    watched,
)
from looplab.runs import folder
from looplab.runs.logs import read_tail
from looplab.untrusted import UntrustedError, open_regular

FAILURES = ("failed", "timeout", "lost")
ARGUMENTS = "extra arguments"
"""Key under which extra arguments of the trainer, beyond launch.command, are shown."""
MAX_OTHER_KEYS = 48
"""Maximum number of keys shown that differ between runs but are not knobs."""
WIDE = 1000.0
"""Positive values that span at least this factor are drawn on a log scale."""
_HEAD_BYTES, _TAIL_BYTES = 1 << 17, 1 << 14
_LONGEST_NOTES = 4000
_WANDB = re.compile(rb"https://[^\s\"'<>()\x1b@]*wandb[^\s\"'<>()\x1b@]*/runs/[A-Za-z0-9_-]+")
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of one run."""

    row: RunRow
    knobs: dict[str, Any]
    """Value of every knob, by path; without keys that the run's config does not have."""
    changes: dict[str, dict[str, Any]]
    """Diff of its config against its parent's: `{"old": …, "new": …}` by path."""
    metrics: dict[str, MetricSummary]
    objective: float | None
    """Value of the study's current objective; None if not measured."""
    hypothesis: str = ""
    wandb: str | None = None
    """URL of the run at Weights & Biases, from its log; None if there is none."""
    notes: tuple[str, ...] = ()
    """Notes by looplab."""
    conclusion: str = ""
    """Conclusions of people and agents, from `notes.md` and `notes.txt` of the run folder."""
    into: str | None = None
    """The run that it repeats and is reported with; None if it does not repeat one."""
    mean: float | None = None
    """Mean objective over the run and its replicates (for a replicate: its own)."""
    sd: float | None = None
    """Standard deviation between those runs."""
    measured: int = 0
    """Number of those runs that measured the objective."""
    against_parent: float | None = None
    """Mean minus that of its parent; without a parent, minus that of the base's own run."""
    against_base: float | None = None
    """Mean minus that of its base."""

    @property
    def status(self) -> str:
        return Role.IMPORTED if self.is_imported else self.row.status or self.row.state

    @property
    def is_imported(self) -> bool:
        """Whether another tool ran it."""
        return self.row.role == Role.IMPORTED

    @property
    def is_failure(self) -> bool:
        return self.row.status in FAILURES and not self.is_imported

    @property
    def shown(self) -> str:
        """Its mean objective as text, with the standard deviation if it was repeated."""
        return wording.mean(self.mean, self.sd, self.measured)


@dataclass(frozen=True, slots=True)
class KnobFacts:
    """A config key that differs between runs, or is declared as a knob."""

    key: str
    kind: str
    """`number` or `category`."""
    log: bool
    """Whether it is drawn on a log scale."""
    declared: bool
    """Whether it is a knob of the study, not just a key that differs."""
    varies: bool


@dataclass(frozen=True, slots=True)
class ParetoFacts:
    """The runs that no other run dominates."""

    metrics: tuple[str, ...]
    """The objectives, the first one first."""
    runs: tuple[tuple[str, tuple[float, ...]], ...]
    """Runs with their values, by the first objective."""
    hypervolume: float
    """Dominated volume, from a tenth of each range beyond the worst values."""
    measured: int
    """Runs that measured all objectives."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best run up to a certain one; in a study with a judge, the champion."""

    n: int
    """Number of the run at which it became the best."""
    run: str
    objective: float
    """For a champion, the mean over its runs."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Proposals that the guard refused for the same reason."""

    id: int
    """Id of the newest proposal."""
    times: int
    proposer: str
    edits: tuple[str, ...]
    why: str
    """All problems that the guard found."""
    reason: str
    """Why it was proposed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Runs that failed in the same way."""

    runs: tuple[str, ...]
    """Oldest first."""
    how: str
    """`failed, exit code 1`."""
    tail: str
    """Last lines of output of the newest run."""


@dataclass(frozen=True, slots=True)
class UnusableCall:
    """A call of an agent that failed, or whose answer was refused."""

    at: float
    call: str
    failed: bool
    """Whether the call failed; False: its answer was refused."""
    why: str


@dataclass(frozen=True, slots=True)
class StudyFacts:
    """Everything that a report contains."""

    study: str
    folder: Path
    """`outputs/<study>`"""
    at: float
    """Time of collection."""
    metric: str | None
    """Metric of the objective; None if the study has no objective."""
    goal: str
    moment: str
    """Value of the metric that is used: last, best, …"""
    tie_break: TieBreak | None
    """Metric that breaks ties between equal objectives."""
    runs: tuple[RunFacts, ...]
    """In order of their numbers."""
    best: RunFacts | None
    """The champion if the study has a judge, else the best measured run."""
    best_so_far: tuple[Best, ...]
    knobs: tuple[KnobFacts, ...]
    """Varying knobs first, declared ones before others."""
    budget: tuple[BudgetFacts, ...]
    rejected: tuple[Rejection, ...]
    """Oldest first."""
    waiting: int
    """Proposals in the queue."""
    calls: int
    """Calls of agents."""
    unusable_calls: tuple[UnusableCall, ...]
    """Oldest first."""
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]
    alarms: tuple[str, ...]
    """What a person must check before trusting the results."""
    judge: Judged | None
    """None if the study has no judge."""
    mix: MixFacts | None
    """Record of each proposer; None if there are no proposals."""
    watched: tuple[Watched, ...]
    reproduced: tuple[Reproduced, ...]
    beliefs: tuple[str, ...]
    """What the model of the search believes, in sentences; empty: there is none."""
    beliefs_before: tuple[str, ...]
    """What earlier studies predicted before the first run."""
    front: ParetoFacts | None
    """None if the study has one objective."""
    head: str
    """Head of the ledger's chain, `number:hash`, for `looplab verify --against`."""
    _places: dict[str, int] = field(repr=False)

    def run(self, id_: str | None) -> RunFacts | None:
        """Return the run with this id; None if there is none."""
        place = self._places.get(id_ or "")
        return None if place is None else self.runs[place]

    def rounds(self) -> dict[int, list[RunFacts]]:
        """Return the runs of each round, without replicates."""
        rounds: dict[int, list[RunFacts]] = {}
        for run in self.entries:
            rounds.setdefault(run.row.round, []).append(run)
        return rounds

    def sort_key(self, run: RunFacts) -> tuple[bool, float]:
        """Sort key: best first, runs without an objective last."""
        if run.mean is None:
            return True, 0.0
        return False, -run.mean if self.goal == "max" else run.mean

    def counts(self) -> dict[str, int]:
        """Return the number of runs by status."""
        return dict(Counter(run.status for run in self.runs))

    @property
    def entries(self) -> list[RunFacts]:
        """Runs without replicates and imports: one per config that was tried here."""
        return [run for run in self.runs if run.into is None and not run.is_imported]

    @property
    def imported(self) -> list[RunFacts]:
        """Runs of other tools, best first."""
        return sorted((run for run in self.runs if run.is_imported), key=self.sort_key)

    @property
    def measured(self) -> list[RunFacts]:
        """Entries with a measured objective."""
        return [run for run in self.entries if run.mean is not None]

    @property
    def varying(self) -> list[KnobFacts]:
        """Knobs with more than one value."""
        return [knob for knob in self.knobs if knob.varies]


def study_facts(lab: Path, study: StudyConfig, record: StudyView) -> StudyFacts:
    """Collect the facts of a study as of now."""
    outputs = folder.study_folder(lab, study.name)
    table = KnobTable([Knob.make(path, spec) for path, spec in study.knobs.items()])
    files = [_Files.read(outputs / row.id, row, record) for row in record.runs()]
    declared: dict[str, Knob] = {}
    values: list[dict[str, Any]] = []
    for file in files:
        own: dict[str, Any] = {}
        for key, _, knob, value in table.present(file.config):
            declared.setdefault(key, knob)
            own[key] = wording.value(key, value)
        values.append(own)
    others, left_out = _other_keys(files, declared, table)
    for file, own in zip(files, values, strict=True):
        for key in others:
            found = paths.find(file.config, key)
            if found:
                own[key] = wording.value(key, paths.get(file.config, found[0]))
    notes = [f"{left_out} more keys differ between runs and are not listed"] if left_out else []
    runs = [_facts(study, outputs, file, own) for file, own in zip(files, values, strict=True)]
    notes += _apply_objective(study.objective, files, runs)
    notes += [
        wording.capitalised(wording.plain(one.sentence(f"at {wording.moment(one.at)}")))
        for one in record.configurations()[1:]
    ]
    ended_early = record.failed_because()
    if ended_early is not None:
        notes.append(f"The last engine ended early: {wording.plain(ended_early)}")
    calls = record.agent_calls()
    unusable = unusable_calls(calls)
    if unusable:
        notes.append(describe_calls(calls, unusable))
    tried = points([replace(run.row, objective=run.objective) for run in runs])
    runs = _with_differences(_with_points(runs, tried))
    goal = study.objective.goal if study.objective else "min"
    judge = judged(study, record, tried)
    places = {run.row.id: place for place, run in enumerate(runs)}
    if judge is not None:
        best_so_far = _champions(judge, runs, places)
        best = runs[places[judge.champion]] if judge.champion in places else None
    else:
        champion = record.best() or (runs[-1].row if runs else None)
        comparable = [run for run in runs if champion and run.row.conditions == champion.conditions]
        best_so_far = _best_so_far(comparable, goal)
        best = _best(record, runs, places, best_so_far)
    # Replicates differ only in their seed, which does not make it a knob.
    values = [own for own, run in zip(values, runs, strict=True) if run.into is None]
    knobs = [_knob(key, declared.get(key), values) for key in [*declared, *others]]
    knobs = [knob for knob in knobs if knob.varies or knob.declared]
    return StudyFacts(
        study=study.name,
        folder=outputs,
        at=time.time(),
        metric=study.objective.metric if study.objective else None,
        goal=goal,
        moment=study.objective.at if study.objective else "last",
        tie_break=study.objective.then if study.objective else None,
        runs=tuple(runs),
        best=best,
        best_so_far=tuple(best_so_far),
        knobs=tuple(sorted(knobs, key=lambda knob: not knob.varies)),
        budget=budget_facts(study, record),
        rejected=tuple(_rejections(record.proposals("rejected"))),
        waiting=record.count_waiting(),
        calls=len(calls),
        unusable_calls=tuple(unusable),
        failures=tuple(_failures(outputs, runs)),
        notes=tuple(notes),
        alarms=alarms_of(record, judge),
        judge=judge,
        mix=mix_facts(record),
        beliefs=_beliefs(study, record),
        beliefs_before=_beliefs_before(study, record),
        front=_front(study, outputs, [run.row for run in runs]),
        watched=watched(record),
        reproduced=reproduced(record),
        head="{}:{}".format(*record.ledger.head()),
        _places=places,
    )


def alarms_of(record: StudyView, judge: Judged | None) -> tuple[str, ...]:
    """Return the alarms of the study and of its judge."""
    raised = tuple(wording.plain(alarm["text"]) for alarm in record.alarms())
    return raised + (judge.alarms if judge is not None else ())


def unusable_calls(calls: Sequence[Mapping[str, Any]]) -> list[UnusableCall]:
    """Return the agent calls that failed or whose answer was refused, oldest first."""
    found = []
    for call in calls:
        answer = call["answer"] or {}
        failed, refused = is_failed(call), answer.get("refused") or ()
        if failed or (refused and not answer.get("accepted")):
            why = str(answer["why"]) if failed else "; ".join(map(str, refused))
            found.append(UnusableCall(answer["at"], call["call"], failed, wording.cut(wording.plain(why), 600)))
    return found


def describe_calls(calls: Sequence[Mapping[str, Any]], unusable: Sequence[UnusableCall]) -> str:
    """Describe how many calls of agents were unusable, and why the last one was."""
    failed = sum(one.failed for one in unusable)
    last = unusable[-1]
    return (
        f"{failed} of {wording.plural(len(calls), 'agent call')} failed and {len(unusable) - failed} had a refused "
        f"answer; the last one, {last.call} at {wording.moment(last.at)}: {last.why}"
    )


@dataclass(slots=True)
class _Files:
    """Contents of a run's folder; for a planned run, of its plan."""

    row: RunRow
    about: dict[str, Any]
    config: dict[str, Any]
    changes: dict[str, Any]
    base_changes: dict[str, Any]
    summary: dict[str, Any]
    problems: list[str]

    @classmethod
    def read(cls, run_dir: Path, row: RunRow, record: StudyView) -> _Files:
        problems: list[str] = []

        def load(name: str, read: Callable[[], dict[str, Any]] | None = None) -> dict[str, Any]:
            try:
                return read() if read is not None else folder.read_json(run_dir, name)
            except (LabError, OSError) as error:
                problems.append(f"{name} cannot be read: {error}")
                return {}

        if row.state == "planned":
            plan = record.plan_of(row.id) or RunPlan({})
            return cls(row, plan.to_dict(), plan.config, dict(plan.diff_parent), dict(plan.diff_base), {}, [])
        changes = load("run.json", lambda: folder.read_changes(run_dir))
        summary = load("summary.json") if row.state == "ended" else {}
        about = load("run.json")
        config = load("config.json", lambda: record.config_of(row, run_dir)) if folder.is_run(run_dir) else {}
        return cls(row, about, config, changes.get("parent", {}), changes.get("base", {}), summary, problems)


def _other_keys(files: Sequence[_Files], declared: Mapping[str, Knob], table: KnobTable) -> tuple[list[str], int]:
    """Return keys that differ between runs but are not knobs, and the number of those left out."""
    keys: dict[str, None] = {}
    first: dict[str, Any] | None = None
    for file in files:
        keys.update(dict.fromkeys(file.base_changes))
        if file.row.proposer == Origin.BASE and file.config:
            if first is None:
                first = file.config
            else:
                keys.update(dict.fromkeys(paths.diff(first, file.config)))
    found = [key for key in keys if key not in declared and table.owner(key) is None]
    return found[:MAX_OTHER_KEYS], max(0, len(found) - MAX_OTHER_KEYS)


def _facts(study: StudyConfig, outputs: Path, file: _Files, knobs: dict[str, Any]) -> RunFacts:
    row = replace(file.row, reason=wording.plain(file.row.reason))
    run_dir = outputs / row.id
    notes = [*file.about.get("notes", ()), *file.summary.get("notes", ()), *file.problems]
    if file.about.get("formal") is False:
        notes.append("an informal run")
    extra = file.about.get("extra")
    extra = extra if isinstance(extra, list) else []
    metrics: dict[str, MetricSummary] = {}
    try:
        metrics = from_dict(file.summary.get("metrics", {}))
    except (TypeError, ValueError, AttributeError):
        notes.append("summary.json has no readable summaries")
    if row.state == "running":
        metrics = _measured_so_far(study, run_dir)
    return RunFacts(
        row=row,
        knobs=knobs,
        changes={
            **{
                key: {side: wording.value(key, value) for side, value in sides.items()}
                for key, sides in file.changes.items()
            },
            **({ARGUMENTS: {"new": wording.plain(shlex.join(map(str, extra)))}} if extra else {}),
        },
        metrics=metrics,
        objective=row.objective if study.objective else None,
        hypothesis=wording.plain(str(file.about.get("hypothesis") or "")),
        wandb=None if row.state == "planned" else find_wandb(folder.record_file(run_dir, "train.log")),
        notes=tuple(wording.plain(str(note)) for note in notes),
        conclusion=_conclusion(run_dir),
    )


def _measured_so_far(study: StudyConfig, run_dir: Path) -> dict[str, MetricSummary]:
    summariser = Summariser(Directions(study.goals), kept=1)
    summariser.add(reader_of(study, run_dir).poll())
    return summariser.result()


def _conclusion(run_dir: Path) -> str:
    """Return what people and agents wrote about the run, in its record or next to the trainer's files."""
    found = []
    for path in (folder.record_file(run_dir, "notes.md"), run_dir / "notes.txt"):
        try:
            with open_regular(path, follow=False) as file:
                found.append(wording.plain(file.read(_LONGEST_NOTES).decode("utf-8", "replace")).strip())
        except (OSError, UntrustedError):
            continue
    return "\n\n".join(filter(None, found))


def find_wandb(log: Path) -> str | None:
    """Return the first URL of a W&B run in the beginning or the end of a log."""
    try:
        with open_regular(log, follow=False) as file:
            found = _WANDB.search(file.read(_HEAD_BYTES))
            size = file.seek(0, 2)
            if found is None and size > _HEAD_BYTES:
                file.seek(max(_HEAD_BYTES, size - _TAIL_BYTES))
                found = _WANDB.search(file.read())
    except (OSError, UntrustedError):
        return None
    return wording.plain(found[0].decode(errors="replace")) if found else None


def _apply_objective(current: ObjectiveConfig | None, files: Sequence[_Files], runs: list[RunFacts]) -> list[str]:
    """Recompute the objective of runs recorded under an earlier one from their summaries; return notes."""
    recomputed = lost = 0
    for place, (file, run) in enumerate(zip(files, runs, strict=True)):
        by = file.summary.get("objective") or {}
        if current is None or not by or (by.get("metric"), by.get("at")) == (current.metric, current.at):
            continue
        if run.row.status != "ok" or run.is_imported:
            continue
        try:
            value = objective_value(run.metrics, current.metric, current.at)
        except LabError:  # mean(k) needs more than a summary has
            value = None
        recomputed += value is not None
        lost += value is None
        runs[place] = replace(run, objective=value)
    notes = []
    if recomputed:
        notes.append(
            f"{wording.plural(recomputed, 'run was', 'runs were')} recorded under another objective; "
            "this one was computed from their metrics"
        )
    if lost:
        notes.append(
            f"{wording.plural(lost, 'run was', 'runs were')} recorded under another objective and lack this one"
        )
    return notes


def _with_points(runs: Sequence[RunFacts], found: Mapping[str, ReplicatedConfig]) -> list[RunFacts]:
    """Set mean and standard deviation over replicates."""
    leads = {row.id: lead for lead, point in found.items() for row in (*point.runs, *point.copies)}
    done = []
    for run in runs:
        lead = leads[run.row.id]
        if lead != run.row.id:
            done.append(replace(run, into=lead, mean=run.objective, measured=int(run.objective is not None)))
        else:
            point = found[lead]
            done.append(replace(run, mean=point.mean, sd=point.sd, measured=len(point.values)))
    return done


def _with_differences(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Set the differences from parent and base."""
    leads = {run.row.id: run.into or run.row.id for run in runs}
    means = {run.row.id: run.mean for run in runs}
    conditions = {run.row.id: run.row.conditions for run in runs}
    bases: dict[tuple[str | None, str], float] = {}
    for run in runs:
        if run.row.proposer == Origin.BASE and run.mean is not None:
            bases.setdefault((run.row.base, run.row.conditions), run.mean)
    done = []
    for run in runs:
        if run.into is not None:  # it is part of the mean
            done.append(run)
            continue
        base = None if run.row.proposer == Origin.BASE else bases.get((run.row.base, run.row.conditions))
        parent = means.get(leads.get(run.row.parent, "")) if run.row.parent else base
        if conditions.get(run.row.parent or run.row.id) != run.row.conditions:
            parent = None  # trained under other conditions
        mine = run.mean
        done.append(
            replace(
                run,
                against_parent=None if mine is None or parent is None else mine - parent,
                against_base=None if mine is None or base is None else mine - base,
            )
        )
    return done


def _best_so_far(runs: Sequence[RunFacts], goal: str) -> list[Best]:
    steps: list[Best] = []
    for run in runs:
        value = run.mean
        if value is None or run.into is not None or run.is_imported:
            continue
        if not steps or (value > steps[-1].objective if goal == "max" else value < steps[-1].objective):
            steps.append(Best(run.row.n, run.row.id, value))
    return steps


def _champions(judge: Judged, runs: Sequence[RunFacts], places: Mapping[str, int]) -> list[Best]:
    """Return the champions in order, each from the run whose end promoted it; the base from its own run."""
    steps: list[Best] = []
    for one in judge.judgements:
        if one.verdict != "keep" or one.mean is None or one.run not in places:
            continue
        ended = [run.row.n for run in runs if run.row.ended is not None and run.row.ended <= one.at]
        n = max(ended, default=1) if steps else runs[places[one.run]].row.n
        steps.append(Best(n, one.run, one.mean))
    return steps


def _beliefs(study: StudyConfig, record: StudyView) -> tuple[str, ...]:
    belief = recorded_belief(record)
    return () if belief is None or study.objective is None else tuple(describe(belief, study.objective.metric))


def _beliefs_before(study: StudyConfig, record: StudyView) -> tuple[str, ...]:
    before = record.last_data("belief before")
    if before is None or study.objective is None:
        return ()
    try:
        return tuple(describe_before(before, study.objective.metric))
    except (KeyError, TypeError, ValueError):  # of another version
        return ()


def _front(study: StudyConfig, outputs: Path, runs: Sequence[RunRow]) -> ParetoFacts | None:
    """Return the Pareto front of the measured runs; the objective is the metric itself, without prices."""
    objective = study.objective
    if objective is None or not objective.pareto:
        return None
    goals = [objective.goal, *(one.goal for one in objective.pareto)]
    found: list[tuple[str, tuple[float, ...]]] = []
    for run in runs:
        if run.objective is None or run.status != "ok" or run.verdict == "void" or run.role == Role.IMPORTED:
            continue
        further = further_values(objective, folder.read_json(outputs / run.id, "summary.json", strict=False))
        known = [value for value in further if value is not None]
        if len(known) < len(further):
            continue
        value = run.objective
        for one, amount in zip(objective.pareto, known, strict=True):
            value -= sign_of(one.goal) * sign_of(objective.goal) * (one.price or 0.0) * amount
        found.append((run.id, (value, *known)))
    points = [pareto.signed(values, goals) for _, values in found]
    if not points:
        return None
    front = sorted((found[i] for i in pareto.pareto_front(points)), key=lambda one: one[1][0])
    volume = pareto.hypervolume([pareto.signed(values, goals) for _, values in front], pareto.reference_point(points))
    metrics = (objective.metric, *(one.metric for one in objective.pareto))
    return ParetoFacts(metrics, tuple(front), volume, len(found))


def _best(
    record: StudyView, runs: Sequence[RunFacts], places: Mapping[str, int], best_so_far: Sequence[Best]
) -> RunFacts | None:
    """Return the ledger's best run, unless it was chosen by another objective."""
    try:
        recorded = record.best()
    except LabError:  # its run is gone from the ledger
        recorded = None
    place = places.get(recorded.id) if recorded else None
    if recorded is not None and place is not None and runs[place].objective == recorded.objective is not None:
        return runs[place]
    return runs[places[best_so_far[-1].run]] if best_so_far else None


def _knob(key: str, knob: Knob | None, values: Sequence[Mapping[str, Any]]) -> KnobFacts:
    found = [own[key] for own in values if key in own]
    numbers = [value for value in found if isinstance(value, int | float) and not isinstance(value, bool)]
    present = [value for value in found if value is not None]
    kind = "number" if numbers and len(numbers) == len(present) else "category"
    log = kind == "number" and min(numbers) > 0 and ((knob is not None and knob.log) or _grows_by_factors(numbers))
    distinct = {(type(value).__name__, value) for value in found} | ({()} if len(found) < len(values) else set())
    return KnobFacts(key, kind, log, knob is not None, len(distinct) > 1)


def _grows_by_factors(numbers: Sequence[float]) -> bool:
    """Return whether positive values belong on a log scale: 16, 32, 64, 128; or a factor of a thousand."""
    values = sorted(set(numbers))
    if values[-1] >= WIDE * values[0]:
        return True
    if not 3 <= len(values) <= 12:
        return False
    steps = [high - low for low, high in pairwise(values)]
    factors = [high / low for low, high in pairwise(values)]
    return max(steps) >= 2 * min(steps) and max(factors) <= 1.3 * min(factors)


def _rejections(proposals: Sequence[ProposalRow]) -> list[Rejection]:
    groups: dict[tuple[str, tuple[str, ...], str], list[ProposalRow]] = {}
    for proposal in proposals:
        why = "; ".join(str(problem.get("message", problem)) for problem in proposal.problems)
        groups.setdefault((proposal.proposer, proposal.words, why), []).append(proposal)
    found = [
        Rejection(
            id=same[-1].id,
            times=len(same),
            proposer=proposer,
            edits=tuple(map(wording.plain, edits)),
            why=wording.plain(why),
            reason=wording.plain(same[-1].reason),
        )
        for (proposer, edits, why), same in groups.items()
    ]
    return sorted(found, key=lambda rejection: rejection.id)


def _failures(outputs: Path, runs: Sequence[RunFacts]) -> list[Failure]:
    """Group failures by how they ended and by their last line of output, ignoring numbers in it."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for run in runs:
        if run.is_failure:
            tail = read_tail(folder.record_file(outputs / run.row.id, "train.log"))
            last = _NUMBERS.sub("#", tail.rpartition("\n")[2])
            groups.setdefault((how_it_ended(run.row), last), []).append((run.row.id, tail))
    return [Failure(tuple(id_ for id_, _ in group), how, group[-1][1]) for (how, _), group in groups.items()]


def how_it_ended(row: RunRow) -> str:
    """Return the status with signal or exit code."""
    status = row.status or row.state
    if row.signal is not None:
        return f"{status}, signal {row.signal}"
    if row.status == "failed" and row.exit_code is not None:
        return f"{status}, exit code {row.exit_code}"
    return status
