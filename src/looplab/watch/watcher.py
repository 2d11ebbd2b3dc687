"""The watcher: shows every running run to every rule of the lab file's `watch:` list, and says which rules fire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from looplab.config.expression import compile_expression
from looplab.config.lab import AlertConfig, ObjectiveConfig, WatchRule
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.measure.base import Batch
from looplab.measure.summary import Directions, Goal
from looplab.watch.conditions import (
    BudgetUsed,
    Condition,
    Diverged,
    ExpressionCondition,
    Match,
    NotFinite,
    Plateau,
    PrunerCondition,
    RunSnapshot,
    Stalled,
    Timeout,
)

if TYPE_CHECKING:
    from looplab.watch.pruner import Pruner

__all__ = ["Alarm", "RunSnapshot", "Watcher", "check", "names"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that fired on a run, and what it asks for."""

    rule: str
    """The rule's name, or what it looks out for: `nan`, `stall 60 s`."""
    run_id: str
    stops: bool
    """Whether the run is to be ended."""
    requeue: tuple[str, ...]
    """Edits under which the run is to be tried again."""
    requeues: int
    """How often in a row, from one run to the next."""
    note: str | None
    alert: AlertConfig | None
    text: str
    """A sentence with the numbers: `step 320: train.ot_pi_sum = 2.6e-85 (step >= 300 and train.ot_pi_sum < 1e-6)`."""
    step: float | None
    """The step it fired at; none if there was no row yet."""
    values: Mapping[str, Any]
    """The numbers by name."""

    def plain(self) -> dict[str, Any]:
        """What an alert, or a record, tells of it; JSON has no word for NaN and infinity, they are texts."""
        return {
            "rule": self.rule,
            "run": self.run_id,
            "step": self.step,
            "text": self.text,
            "values": {name: _plain(value) for name, value in self.values.items()},
            "stops": self.stops,
            "requeue": list(self.requeue),
            "note": self.note,
        }


@dataclass(slots=True)
class _Watched:
    """What was seen of one run."""

    signs: list[Condition]
    """One for each rule."""
    fired: set[int] = field(default_factory=set)
    """The places of the rules that have fired."""
    measured: bool = False
    """Whether there was a row at all."""
    seconds: float = 0.0
    """How long it had run at the last look."""


class Watcher:
    """The rules of a study, and what each has seen of each running run. A rule fires at most once in a run."""

    def __init__(
        self, rules: Sequence[WatchRule], goal_of: Directions, objective: ObjectiveConfig | None = None
    ) -> None:
        self._rules = list(rules)
        self._names = names(rules)
        self._directions = goal_of
        self._objective = objective
        self._expressions = [None if rule.when is None else compile_expression(rule.when) for rule in rules]
        self._pruners = [None if rule.prune is None else self._pruner(rule) for rule in rules]
        self._runs: dict[str, _Watched] = {}

    def look(self, run: RunSnapshot, now: float) -> list[Alarm]:
        """The rules that fire now, in the order of the list. Also to be called when nothing is new, a few times a
        second, and once more when the run has ended: a quiet look is what closes a run's last step."""
        watched = self._watched(run.run_id)
        watched.measured = watched.measured or bool(run.batch)
        watched.seconds = now - run.started
        alarms = []
        for place, sign in enumerate(watched.signs):
            fired = place in watched.fired
            if fired and not isinstance(sign, PrunerCondition):
                continue  # a pruner learns from the whole run, also from one that it gave up and that was not stopped
            found = sign.look(run, now)
            if found is not None and not fired:
                watched.fired.add(place)
                alarms.append(self._alarm(place, run.run_id, found))
        return alarms

    def ended(self, run_id: str, value: float | None, rest: Batch | None = None) -> list[str]:
        """Forget a run that is over, after the pruners have learnt from it: `value` is its objective, `rest` the rows
        that no look has shown (all of them, for a run of an earlier engine). Says which rules could not be applied
        although the run has measured something: most often a metric's name is misspelt."""
        watched = self._watched(run_id)
        for sign in watched.signs:
            if isinstance(sign, PrunerCondition):
                sign.ended(value, rest or {})
            elif rest and sign.unable is not None:
                # The metric that it waited for may have come at the very end, as a last evaluation does.
                for batch in (rest, {}):
                    sign.look(RunSnapshot(run_id, batch, None, 0.0, watched.seconds), watched.seconds)
        self.forget(run_id)
        if not watched.measured:
            return []
        return [
            f"the watch rule {self._names[place]!r} could not be applied: {sign.unable}"
            for place, sign in enumerate(watched.signs)
            if sign.unable is not None and place not in watched.fired
        ]

    def recall(self, run_id: str, rule: str) -> None:
        """Say that a rule has fired in this run already, under an earlier engine; it does not fire again."""
        self._watched(run_id).fired.update(place for place, name in enumerate(self._names) if name == rule)

    def forget(self, run_id: str) -> None:
        """Let go of a run without learning from it."""
        self._runs.pop(run_id, None)

    def _watched(self, run_id: str) -> _Watched:
        watched = self._runs.get(run_id)
        if watched is None:
            signs = [self._sign(place, run_id) for place in range(len(self._rules))]
            watched = self._runs[run_id] = _Watched(signs)
        return watched

    def _alarm(self, place: int, run_id: str, found: Match) -> Alarm:
        rule = self._rules[place]
        return Alarm(
            rule=self._names[place],
            run_id=run_id,
            stops=rule.stops,
            requeue=tuple(rule.requeue),
            requeues=rule.requeues,
            note=rule.note,
            alert=rule.alert,
            text=found.text,
            step=found.step,
            values=found.values,
        )

    def _sign(self, place: int, run_id: str) -> Condition:
        rule, expression, pruner = self._rules[place], self._expressions[place], self._pruners[place]
        if expression is not None:
            return ExpressionCondition(expression, self._directions)
        if rule.diverge is not None:
            return Diverged(rule.diverge, self._goal(rule.diverge.metric))
        if rule.plateau is not None:
            return Plateau(rule.plateau, self._goal(rule.plateau.metric))
        if rule.stall is not None:
            return Stalled(rule.stall)
        if rule.timeout is not None:
            return Timeout(rule.timeout)
        if pruner is not None:
            return PrunerCondition(run_id, _pruned(rule, self._objective), pruner)
        if rule.budget:
            return BudgetUsed()
        return NotFinite(rule.nan if isinstance(rule.nan, list) else None)

    def _pruner(self, rule: WatchRule) -> Pruner:
        from looplab.watch.pruner import Pruner

        assert rule.prune is not None
        return Pruner(rule.prune, self._goal(_pruned(rule, self._objective)))

    def _goal(self, metric: str) -> Goal:
        objective = self._objective
        return objective.goal if objective and objective.metric == metric else self._directions.goal(metric)


def names(rules: Sequence[WatchRule]) -> list[str]:
    """A name for each rule, none twice: its own, else what it looks out for, with its place in the list where two look
    out for the same."""
    said = [rule.name or _label(rule) for rule in rules]
    count = Counter(said)
    found = [
        name if rule.name or count[name] == 1 else f"watch {place}: {name}"
        for place, (name, rule) in enumerate(zip(said, rules, strict=True), 1)
    ]
    for name, times in Counter(found).items():
        if times > 1:
            raise LabError(f"{times} watch rules have the name {name!r}", hint="rename all but one")
    return found


def check(
    rules: Sequence[WatchRule],
    objective: ObjectiveConfig | None = None,
    holdout: str | None = None,
    guard: Guard | None = None,
    bases: Sequence[dict[str, Any]] = (),
) -> None:
    """Find, before the first run, what would fail in the middle of the night: raises LabError for the first rule that
    cannot work in this study."""
    for name, rule in zip(names(rules), rules, strict=True):
        _check_prune(name, rule, objective)
        if rule.when is not None and not compile_expression(rule.when).names:
            raise LabError(
                f"the watch rule {name!r} reads nothing, it is always the same",
                hint="write an expression over step, seconds and metrics",
            )
        if holdout is not None and _reads(rule, objective, holdout):
            raise LabError(
                f"the watch rule {name!r} reads {holdout}, which is held out", hint="only the judge may look at it"
            )
        if guard is not None and rule.requeue and bases:
            wrong = [_never(guard, base, rule.requeue) for base in bases]
            if all(wrong):
                raise LabError(f"the watch rule {name!r} cannot requeue: {wrong[0]}", hint="correct its edits")


def _check_prune(name: str, rule: WatchRule, objective: ObjectiveConfig | None) -> None:
    prune = rule.prune
    if prune is None:
        return
    _pruned(rule, objective)
    if prune.pruner == "threshold" and prune.lower is None and prune.upper is None:
        raise LabError(f"the watch rule {name!r} has no threshold", hint="give lower, upper or both")
    if prune.lower is not None and prune.upper is not None and prune.lower >= prune.upper:
        raise LabError(f"the watch rule {name!r} leaves nothing between {prune.lower:g} and {prune.upper:g}")
    if prune.max_resource is not None and prune.max_resource < prune.min_resource:
        raise LabError(f"the watch rule {name!r} has a max_resource below its min_resource, {prune.min_resource}")


def _pruned(rule: WatchRule, objective: ObjectiveConfig | None) -> str:
    """The metric that a pruner looks at."""
    if rule.prune is not None and rule.prune.metric is not None:
        return rule.prune.metric
    if objective is None:
        raise LabError(
            "a watch rule prunes, but the study has no objective", hint="say which metric: prune: {metric: …}"
        )
    return objective.metric


def _reads(rule: WatchRule, objective: ObjectiveConfig | None, metric: str) -> bool:
    """Whether the rule asks for this metric by name."""
    asked: list[str] = list(rule.nan) if isinstance(rule.nan, list) else []
    if rule.when is not None:
        asked += compile_expression(rule.when).names
    asked += [part.metric for part in (rule.diverge, rule.plateau) if part is not None]
    if rule.prune is not None:
        asked.append(_pruned(rule, objective))
    dotted = metric.replace("/", ".")
    return any(name == dotted or name.startswith(dotted + ".") for name in (n.replace("/", ".") for n in asked))


def _never(guard: Guard, base: dict[str, Any], edits: Sequence[str]) -> str | None:
    """Why these edits can never be made. Whether a value is in range depends on the run, and is asked then."""
    problems = guard.check(base, edits).problems
    return next((problem.message for problem in problems if problem.rule in ("edit", "not a knob")), None)


def _label(rule: WatchRule) -> str:
    if rule.when is not None:
        return rule.when
    if rule.diverge is not None or rule.plateau is not None:
        part = rule.diverge or rule.plateau
        return f"{rule.kind} {part.metric}" if part else rule.kind
    if rule.prune is not None:
        return f"prune {rule.prune.pruner}"
    seconds = rule.stall or rule.timeout
    if seconds is not None:
        return f"{rule.kind} {seconds:g} s"
    return f"nan {', '.join(rule.nan)}" if isinstance(rule.nan, list) else rule.kind


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value
