"""The watcher: apply every rule of the lab file's `watch:` list to every running run, and report which rules fire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from looplab import plugins
from looplab.config.expression import compile_expression, unquoted
from looplab.config.lab import AlertConfig, ObjectiveConfig, WatchRule
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.measure.base import Batch
from looplab.measure.summary import Directions, Goal
from looplab.watch.conditions import (
    BudgetUsed,
    Condition,
    ConditionContext,
    Diverged,
    ExpressionCondition,
    Match,
    NotFinite,
    Plateau,
    PluginCondition,
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
    """A rule that fired on a run, and the actions it asks for."""

    rule: str
    """The rule's name, or a label of its condition: `nan`, `stall 60 s`."""
    run_id: str
    stops: bool
    """Whether to stop the run."""
    requeue: tuple[str, ...]
    """Edits with which to run its config again; empty: do not."""
    requeues: int
    """Maximum number of consecutive requeues, from one run to the next."""
    note: str | None
    """Note to attach to the run."""
    alert: AlertConfig | None
    """Where to send an alert."""
    text: str
    """A sentence with the numbers: `step 320: train.loss = 12.5 (step >= 300 and train.loss > 10)`."""
    step: float | None
    """Step at which it fired; None: no row yet."""
    values: Mapping[str, Any]
    """The numbers by name."""

    def plain(self) -> dict[str, Any]:
        """Return the payload of an alert or event; NaN and infinity become strings, which JSON can represent."""
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
    """State of the rules for one run."""

    conditions: list[Condition]
    """One per rule."""
    fired: set[int] = field(default_factory=set)
    """Indices of the rules that have fired."""
    measured: bool = False
    """Whether any row has been seen."""
    seconds: float = 0.0
    """Run time at the last look."""


class Watcher:
    """The rules of a study and their state for each running run. A rule fires at most once per run."""

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
        """Return an alarm for each rule that fires now, in the order of the list.

        Call it a few times per second, also without new rows, and once more when the run has ended: a look without new
        rows completes the run's last step.
        """
        watched = self._watched(run.run_id)
        watched.measured = watched.measured or bool(run.batch)
        watched.seconds = now - run.started
        alarms = []
        for index, condition in enumerate(watched.conditions):
            fired = index in watched.fired
            if fired and not isinstance(condition, PrunerCondition):
                continue  # a pruner learns from the whole run, even if it gave it up and it was not stopped
            match = condition.look(run, now)
            if match is not None and not fired:
                watched.fired.add(index)
                alarms.append(self._alarm(index, run.run_id, match))
        return alarms

    def ended(self, run_id: str, value: float | None, rest: Batch | None = None) -> list[str]:
        """Let the pruners learn from a finished run, then forget it.

        Args:
            run_id: The finished run.
            value: Its objective; None: it has none.
            rest: Rows that no look has seen; for a run of an earlier engine, all of them.

        Returns:
            A sentence for each rule that could not be applied although the run logged metrics; the usual cause is a
            misspelt metric name.
        """
        watched = self._watched(run_id)
        for condition in watched.conditions:
            if isinstance(condition, PrunerCondition):
                condition.ended(value, rest or {})
            elif rest and condition.unable is not None:
                # The missing metric may appear only at the very end, for example from a final evaluation.
                for batch in (rest, {}):
                    condition.look(RunSnapshot(run_id, batch, None, 0.0, watched.seconds), watched.seconds)
        self.forget(run_id)
        if not watched.measured:
            return []
        return [
            f"the watch rule {self._names[index]!r} could not be applied: {condition.unable}"
            for index, condition in enumerate(watched.conditions)
            if condition.unable is not None and index not in watched.fired
        ]

    def recall(self, run_id: str, rule: str) -> None:
        """Mark a rule as already fired for this run by an earlier engine, so that it does not fire again."""
        self._watched(run_id).fired.update(index for index, name in enumerate(self._names) if name == rule)

    def forget(self, run_id: str) -> None:
        """Drop the state of a run without learning from it."""
        self._runs.pop(run_id, None)

    def _watched(self, run_id: str) -> _Watched:
        watched = self._runs.get(run_id)
        if watched is None:
            conditions = [self._condition(index, run_id) for index in range(len(self._rules))]
            watched = self._runs[run_id] = _Watched(conditions)
        return watched

    def _alarm(self, index: int, run_id: str, match: Match) -> Alarm:
        rule = self._rules[index]
        return Alarm(
            rule=self._names[index],
            run_id=run_id,
            stops=rule.stops,
            requeue=tuple(rule.requeue),
            requeues=rule.requeues,
            note=rule.note,
            alert=rule.alert,
            text=match.text,
            step=match.step,
            values=match.values,
        )

    def _condition(self, index: int, run_id: str) -> Condition:
        rule, expression, pruner = self._rules[index], self._expressions[index], self._pruners[index]
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
        if rule.plugin is not None:
            objective = self._objective.metric if self._objective is not None else None
            context = ConditionContext(run_id, self._directions, objective)
            return PluginCondition(plugins.make("conditions", rule.plugin, context, **rule.options))
        return NotFinite(rule.nan if isinstance(rule.nan, list) else None)

    def _pruner(self, rule: WatchRule) -> Pruner:
        from looplab.watch.pruner import Pruner

        assert rule.prune is not None
        return Pruner(rule.prune, self._goal(_pruned(rule, self._objective)))

    def _goal(self, metric: str) -> Goal:
        objective = self._objective
        return objective.goal if objective and objective.metric == metric else self._directions.goal(metric)


def names(rules: Sequence[WatchRule]) -> list[str]:
    """Return a unique name for each rule: its own, else a label of its condition, numbered where labels repeat."""
    labels = [rule.name or _label(rule) for rule in rules]
    count = Counter(labels)
    unique = [
        label if rule.name or count[label] == 1 else f"watch {number}: {label}"
        for number, (label, rule) in enumerate(zip(labels, rules, strict=True), 1)
    ]
    for name, times in Counter(unique).items():
        if times > 1:
            raise LabError(f"{times} watch rules have the name {name!r}", hint="rename all but one")
    return unique


def check(
    rules: Sequence[WatchRule],
    objective: ObjectiveConfig | None = None,
    holdout: str | None = None,
    guard: Guard | None = None,
    bases: Sequence[dict[str, Any]] = (),
) -> None:
    """Check the rules before the first run.

    Args:
        rules: The rules of the study.
        objective: The study's objective; None: it has none.
        holdout: The held-out metric, which no rule may read; None: there is none.
        guard: Checks the edits of `requeue`; None: they are not checked.
        bases: The base configs that the edits are tried on.

    Raises:
        LabError: A rule cannot work in this study.
    """
    for name, rule in zip(names(rules), rules, strict=True):
        _check_prune(name, rule, objective)
        if rule.plugin is not None:
            context = ConditionContext("", Directions(), objective.metric if objective is not None else None)
            plugins.make("conditions", rule.plugin, context, **rule.options)
        if rule.alert is not None and rule.alert.plugin is not None:
            plugins.make("alerts", rule.alert.plugin, **rule.alert.options)
        if rule.when is not None and not compile_expression(rule.when).names:
            raise LabError(
                f"the watch rule {name!r} reads no metric: its value never changes",
                hint="write an expression over step, seconds and metrics",
            )
        if rule.when is not None and objective is not None:
            wrong = unquoted(compile_expression(rule.when), (objective.metric,))
            if wrong is not None:
                raise LabError(f"the watch rule {name!r} does not read {wrong}", hint=f"quote the name: '{wrong}'")
        if holdout is not None and _reads(rule, objective, holdout):
            raise LabError(
                f"the watch rule {name!r} reads {holdout}, which is held out", hint="only the judge may read it"
            )
        if guard is not None and rule.requeue and bases:
            problems = [_impossible_edit(guard, base, rule.requeue) for base in bases]
            if all(problems):
                raise LabError(f"the watch rule {name!r} cannot requeue: {problems[0]}", hint="correct its edits")


def _check_prune(name: str, rule: WatchRule, objective: ObjectiveConfig | None) -> None:
    prune = rule.prune
    if prune is None:
        return
    _pruned(rule, objective)
    if prune.pruner == "threshold" and prune.lower is None and prune.upper is None:
        raise LabError(f"the watch rule {name!r} has no threshold", hint="set lower, upper or both")
    if prune.lower is not None and prune.upper is not None and prune.lower >= prune.upper:
        raise LabError(f"the watch rule {name!r} leaves nothing between {prune.lower:g} and {prune.upper:g}")
    if prune.max_resource is not None and prune.max_resource < prune.min_resource:
        raise LabError(f"the watch rule {name!r} has a max_resource below its min_resource, {prune.min_resource}")


def _pruned(rule: WatchRule, objective: ObjectiveConfig | None) -> str:
    """Return the metric that a pruner compares."""
    if rule.prune is not None and rule.prune.metric is not None:
        return rule.prune.metric
    if objective is None:
        raise LabError(
            "a watch rule prunes, but the study has no objective", hint="name the metric: prune: {metric: …}"
        )
    return objective.metric


def _reads(rule: WatchRule, objective: ObjectiveConfig | None, metric: str) -> bool:
    """Return whether the rule reads this metric by name."""
    asked: list[str] = list(rule.nan) if isinstance(rule.nan, list) else []
    if rule.when is not None:
        asked += compile_expression(rule.when).names
    asked += [config.metric for config in (rule.diverge, rule.plateau) if config is not None]
    if rule.prune is not None:
        asked.append(_pruned(rule, objective))
    dotted = metric.replace("/", ".")
    return any(name == dotted or name.startswith(dotted + ".") for name in (n.replace("/", ".") for n in asked))


def _impossible_edit(guard: Guard, base: dict[str, Any], edits: Sequence[str]) -> str | None:
    """Return why these edits can never be applied; None if they can. Ranges depend on the run and are checked then."""
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
