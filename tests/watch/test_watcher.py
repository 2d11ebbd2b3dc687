"""The watch rules, alone: rows go in, alarms come out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf, isnan, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.config.lab import ObjectiveConfig, WatchRule
from looplab.errors import LabError
from looplab.guard import Guard, Knob
from looplab.measure.base import Batch, Curve
from looplab.measure.summary import Directions
from looplab.watch.conditions import Match, PluginCondition
from looplab.watch.watcher import Alarm, RunSnapshot, Watcher, check, names

Row = tuple[float, Mapping[str, float]]


def rule(**keys: Any) -> WatchRule:
    return WatchRule.model_validate(keys)


def batch_of(rows: Iterable[Row]) -> Batch:
    batch: Batch = {}
    for step, row in rows:
        for name, value in row.items():
            batch.setdefault(name, Curve()).add(step, value)
    return batch


class Running:
    """A run that writes rows and is looked at."""

    def __init__(self, *rules: WatchRule, objective: ObjectiveConfig | None = None, goals: Any = None) -> None:
        self.watcher = Watcher(rules, Directions(goals), objective)
        self.now = self.last_row = 1000.0
        self.step: float | None = None

    def look(self, *rows: Row, wait: float = 0.0, budget: str | None = None, run_id: str = "r1") -> list[Alarm]:
        self.now += wait
        if rows:
            self.last_row, self.step = self.now, rows[-1][0]
        snapshot = RunSnapshot(run_id, batch_of(rows), self.step, 1000.0, self.last_row, budget)
        return self.watcher.look(snapshot, self.now)

    def all(self, *rows: Row) -> list[Alarm]:
        """Everything in one look, and a quiet one after it."""
        return self.look(*rows) + self.look()


def curve(metric: str, values: Sequence[float], every: float = 1) -> list[Row]:
    return [(every * place, {metric: value}) for place, value in enumerate(values)]


# -- when


def test_a_rule_fires_with_a_sentence_that_has_the_numbers() -> None:
    run = Running(rule(when="step >= 300 and train.ot_pi_sum < 1e-6", requeue=["ot.reg@add=0.1"], note="collapsed"))
    assert run.look((310, {"train/ot_pi_sum": 0.5}), (320, {"train/ot_pi_sum": 2.6e-85})) == []
    (alarm,) = run.look()
    assert alarm.text == "step 320: train.ot_pi_sum = 2.6e-85 (step >= 300 and train.ot_pi_sum < 1e-6)"
    assert alarm.rule == "step >= 300 and train.ot_pi_sum < 1e-6"
    assert (alarm.step, alarm.values) == (320, {"step": 320, "train.ot_pi_sum": 2.6e-85})
    assert (alarm.run_id, alarm.stops, alarm.requeue, alarm.requeues) == ("r1", True, ("ot.reg@add=0.1",), 3)
    assert alarm.note == "collapsed"


def test_a_window_that_a_burst_jumps_over_is_not_missed() -> None:
    run = Running(rule(when="300 <= step <= 500 and train.ot_pi_sum < 1e-6"))
    rows = [(step, {"train/ot_pi_sum": 1e-9 if 400 <= step < 420 else 1.0}) for step in range(250, 601, 10)]
    (alarm,) = run.look(*rows)
    assert alarm.step == 400


def test_a_value_counts_until_the_next_one() -> None:
    run = Running(rule(when="step >= 300 and eval.loss > 5"))
    (alarm,) = run.look(
        (290, {"eval/loss": 9.0}), (299, {"loss": 1.0}), (305, {"loss": 1.0}), (310, {"eval/loss": 1.0})
    )
    assert alarm.step == 305


def test_a_step_is_looked_at_when_all_of_it_is_there() -> None:
    run = Running(rule(when="gap > eval.gap"))
    assert run.look((1, {"gap": 1.0, "eval/gap": 2.0})) == []
    assert run.look((2, {"gap": 3.0})) == []
    assert run.look((2, {"other": 0.0})) == []
    assert run.look((2, {"eval/gap": 4.0})) == []
    assert run.look((3, {"gap": 3.0})) == []
    assert run.look() == []


def test_a_rule_waits_for_a_name_that_is_missing() -> None:
    run = Running(rule(when="eval.acc < 0.5 and train.loss > 1"))
    assert run.all((1, {"train/loss": 9.0}), (2, {"train/loss": 9.0})) == []
    (alarm,) = run.all((3, {"eval/acc": 0.1}))
    assert alarm.step == 3


def test_a_rule_that_only_asks_whether_a_metric_is_there_is_looked_at_on_every_step() -> None:
    run = Running(rule(when="step >= 20 and not defined(eval.acc)"))
    (alarm,) = run.look(*curve("loss", [1, 1, 1, 1], every=10))
    assert alarm.text == "step 20 (step >= 20 and not defined(eval.acc))"


def test_fields_of_a_metric_are_those_known_at_that_step() -> None:
    run = Running(rule(when="loss > 2 * loss.best and loss.n >= 3", note="jumped"), rule(when="acc.best >= 0.9"))
    alarms = run.all(
        *[(i, {"loss": v, "acc": a}) for i, (v, a) in enumerate([(4, 0.1), (9, 0.9), (3, 0), (7, 0), (1, 0)])]
    )
    assert [(alarm.step, alarm.values.get("loss.best")) for alarm in alarms] == [(3, 3), (1, None)]


def test_time_passes_for_a_rule_on_seconds_without_new_rows() -> None:
    run = Running(rule(when="seconds > 60 and loss > 5"))
    assert run.all((1, {"loss": 9.0})) == []
    assert run.look(wait=59) == []
    (alarm,) = run.look(wait=2)
    assert alarm.text == "step 1: seconds = 61, loss = 9 (seconds > 60 and loss > 5)"


def test_a_rule_on_seconds_is_looked_at_while_other_metrics_come() -> None:
    run = Running(rule(when="seconds > 5 and not defined(loss)"))
    fired = [run.look((step, {"other": 1.0}), wait=1) for step in range(10)]
    assert sum(map(len, fired)) == 1


def test_no_comparison_with_nan_is_true() -> None:
    run = Running(rule(when="loss < 5"), rule(when="loss > 5"), rule(when="loss == loss"), rule(when="loss != loss"))
    assert [alarm.rule for alarm in run.all((1, {"loss": nan}))] == ["loss != loss"]


def test_metrics_that_are_called_step_or_seconds_do_not_hide_the_real_ones() -> None:
    run = Running(rule(when="step >= 300 and seconds < 1"))
    (alarm,) = run.all((300, {"step": 1.0, "seconds": 99.0}))
    assert alarm.step == 300


def test_a_trainer_that_restarts_repeats_its_steps() -> None:
    run = Running(rule(when="step <= 2 and loss > 5"))
    rows = [(step, {"loss": value, "acc": 0.0}) for step, value in [(1, 1.0), (2, 1.0), (3, 9.0), (1, 1.0), (2, 7.0)]]
    (alarm,) = run.all(*rows)
    assert (alarm.step, alarm.values["loss"]) == (2, 7.0)


def test_what_cannot_be_computed_is_reported_when_the_run_is_over_and_raises_nothing() -> None:
    run = Running(rule(when="1 / loss > 5"), rule(when="loss"), rule(when="los > 1"), rule(when="loss > 99"))
    assert run.all((1, {"loss": 0.0})) == []
    problems = run.watcher.ended("r1", None)
    assert len(problems) == 3
    assert "'1 / loss > 5' could not be applied: " in problems[0]
    assert "neither true nor false" in problems[1]
    assert problems[2] == "the watch rule 'los > 1' could not be applied: los was not measured"


def test_a_run_that_measured_nothing_does_not_complain_of_names() -> None:
    run = Running(rule(nan=["loss"]), rule(when="loss > 1"), rule(plateau={"metric": "loss", "over": 5}))
    run.look()
    assert run.watcher.ended("r1", None) == []


def test_a_metric_that_comes_at_the_very_end_was_not_missing() -> None:
    rules: list[dict[str, Any]] = [
        {"when": "eval.acc > 9"},
        {"nan": ["eval/acc"]},
        {"diverge": {"metric": "eval/acc"}},
        {"when": "oops > 1"},
    ]
    run = Running(*(rule(**keys) for keys in rules), rule(prune={"metric": "eval/acc"}))
    run.all((1, {"loss": 0.0}))
    (problem,) = run.watcher.ended("r1", None, batch_of([(2, {"eval/acc": 0.5})]))
    assert "oops" in problem


# -- nan


def test_nan_in_any_metric_is_found_with_its_first_step() -> None:
    run = Running(rule(nan=True))
    assert run.look((1, {"loss": 1.0, "acc": 1e308}), (2, {"loss": 1.0, "acc": 1e308})) == []
    (alarm,) = run.look((3, {"loss": 1.0, "acc": nan}), (4, {"loss": inf}))
    assert (alarm.rule, alarm.step, alarm.text) == ("nan", 3, "step 3: acc is NaN")
    assert isnan(alarm.values["acc"])
    json.dumps(alarm.plain(), allow_nan=False)


def test_nan_is_looked_for_in_the_named_metrics_only() -> None:
    run = Running(rule(nan=["train.loss", "acc"]))
    assert run.look((1, {"other": nan, "train/loss": 1.0})) == []
    (alarm,) = run.look((2, {"train/loss": -inf}))
    assert alarm.text == "step 2: train.loss is -infinity"


# -- diverge


@pytest.mark.parametrize(
    ("goal", "values", "at"),
    [
        ("min", [2.0, 1.0, 9.9, 10.1], 3),  # ten times the best
        ("min", [2.0, 1.0, nan, 1.0, inf], 4),  # NaN is not compared, infinity is worse than all
        ("min", [2.0, -inf, 19.0, 21.0], 3),  # what is not finite is never the best
        ("min", [-50.0, -6.0, -4.9], 2),  # a tenth of a negative best
        ("min", [2.0, 1e-9, 1e-6, 0.1], None),  # near 0, a small part of the range is not far
        ("min", [2.0, 1e-9, 1e-6, 0.21], 3),
        ("min", [2.0, 0.0, 0.1, 0.21], 3),
        ("min", [0.1, -0.1, 0.0, 0.1], 2),  # around 0
        ("min", [0.0, 0.0, 5.0], None),  # only zeros: there is no scale
        ("min", [0.0, 0.0, 5.0, 5.1], 3),
        ("min", [5.0], None),
        ("max", [0.5, 0.9, 0.1, 0.08], 3),
        ("max", [0.5, 0.9, 0.1, -inf], 3),
        ("max", [-100.0, -20.0, -199.0, -201.0], 3),
        ("max", [-500.0, 0.1, -40.0, -51.0], 3),  # a tenth of the range of 500
        ("max", [0.0, 0.0, -1.0], None),
    ],
)
def test_divergence_is_measured_from_the_best_value(goal: str, values: list[float], at: int | None) -> None:
    run = Running(rule(diverge={"metric": "m", "factor": 10}), goals={"m": goal})
    assert [alarm.step for alarm in run.look(*curve("m", values))] == ([] if at is None else [at])


def test_divergence_says_how_far_and_from_where() -> None:
    run = Running(rule(diverge={"metric": "acc", "factor": 2}), objective=ObjectiveConfig(metric="acc", goal="max"))
    (alarm,) = run.look(*curve("acc", [0.5, 0.9, 0.4], every=100))
    assert alarm.text == "step 200: acc = 0.4, more than 2 times worse than its best, 0.9 at step 100"
    assert alarm.rule == "diverge acc"


def test_divergence_does_not_look_at_the_first_steps() -> None:
    run = Running(rule(diverge={"metric": "loss", "after": 2}))
    assert run.look(*curve("loss", [0.001, 5.0, 6.0, 7.0])) == []


# -- plateau


def test_a_plateau_is_a_number_of_steps_without_progress() -> None:
    run = Running(rule(plateau={"metric": "loss", "over": 300, "least": 0.01}))
    (alarm,) = run.look(*curve("loss", [1.0, 0.5, 0.499, 0.498, 0.497, 0.1], every=100))
    assert alarm.text == "step 400: loss = 0.497 has not improved by 1 % on 0.5 at step 100, at least 300 steps ago"


def test_small_gains_add_up_to_progress() -> None:
    run = Running(rule(plateau={"metric": "acc", "over": 300, "least": 0.01}))
    assert run.look(*curve("acc", [0.5 + 0.003 * i for i in range(50)], every=100)) == []


def test_nan_is_not_progress() -> None:
    run = Running(rule(plateau={"metric": "loss", "over": 2}))
    assert [alarm.step for alarm in run.look(*curve("loss", [nan, 1.0, nan, -inf]))] == [3]


# -- time and budget


def test_a_run_stalls_when_no_row_comes() -> None:
    run = Running(rule(stall="60s"))
    assert run.look(wait=59) == []
    assert run.look((7, {"loss": 1.0}), wait=2) == []
    assert run.look(wait=59) == []
    (alarm,) = run.look(wait=2)
    assert (alarm.rule, alarm.text, alarm.step) == ("stall 60 s", "no new row for 61 s; the last was step 7", 7)


def test_a_run_that_never_wrote_a_row_stalls() -> None:
    (alarm,) = Running(rule(stall=60)).look(wait=60)
    assert alarm.text == "no new row for 60 s; there was none yet"
    assert alarm.step is None


def test_a_run_that_takes_too_long_is_stopped() -> None:
    run = Running(rule(timeout="1m"))
    assert run.look((1, {"loss": 1.0}), wait=59) == []
    (alarm,) = run.look((2, {"loss": 1.0}), wait=2)
    assert (alarm.rule, alarm.text, alarm.stops) == ("timeout 60 s", "it has run for 61 s; the limit is 60 s", True)


def test_an_exhausted_budget_is_reported_in_the_words_of_the_engine() -> None:
    run = Running(rule(budget=True))
    assert run.look() == []
    (alarm,) = run.look(budget="the study's 10 h of wall time are used")
    assert (alarm.rule, alarm.text) == ("budget", "the study's 10 h of wall time are used")


# -- prune


def test_a_run_that_is_clearly_worse_than_those_before_it_is_pruned() -> None:
    run = Running(rule(prune={"startup": 2}), objective=ObjectiveConfig(metric="loss", goal="min"))
    for name, level in (("r1", 1.0), ("r2", 2.0)):
        assert run.look(*curve("loss", [5.0, level, level], every=10), run_id=name) == []
        assert run.watcher.ended(name, level) == []
    assert run.look(*curve("loss", [5.0, 1.2, 1.2], every=10), run_id="good") == []
    (alarm,) = run.look(*curve("loss", [5.0, 9.0, 9.0], every=10), run_id="bad")
    assert (alarm.rule, alarm.step, alarm.values) == ("prune median", 10, {"loss": 9.0})
    assert "median 1.5 of 2 finished runs" in alarm.text
    assert run.look((30, {"loss": 9.0}), run_id="bad") == []


def test_a_pruner_learns_from_runs_that_no_look_has_shown() -> None:
    run = Running(rule(prune={"startup": 1, "metric": "acc"}))
    run.watcher.ended("earlier", 0.9, batch_of(curve("acc", [0.5, 0.8, 0.9])))
    (alarm,) = run.look(*curve("acc", [0.4]))
    assert alarm.step == 0


def test_a_pruner_learns_from_all_of_a_run_that_was_given_up_but_not_stopped() -> None:
    run = Running(rule(prune={"startup": 1}, note="poor"), objective=ObjectiveConfig(metric="loss", goal="min"))
    run.watcher.ended("first", 1.0, batch_of(curve("loss", [1.0])))
    (alarm,) = run.look((0, {"loss": 5.0}), run_id="poor")
    assert not alarm.stops
    assert run.look((1, {"loss": 5.0}), (2, {"loss": 2.0}), run_id="poor") == []
    run.watcher.ended("poor", 2.0)
    (alarm,) = run.look((2, {"loss": 3.0}))
    assert "median 2 of 1 finished runs" in alarm.text


def test_a_pruned_run_may_end_without_a_value() -> None:
    run = Running(rule(prune={"pruner": "threshold", "upper": 5.0, "metric": "loss", "warmup": 2}))
    (alarm,) = run.look(*curve("loss", [9.0, 9.0, 7.0, 1.0]))
    assert alarm.step == 2
    assert run.watcher.ended("r1", None) == []


# -- all of them


def test_every_rule_fires_once_in_a_run_and_again_in_another() -> None:
    run = Running(rule(when="loss > 1"), rule(nan=True), rule(stall=5, note="quiet"), rule(budget=True, stop=False))
    rows = [(1, {"loss": 2.0}), (2, {"loss": nan}), (3, {"loss": 2.0})]
    first = run.look(*rows, budget="used") + run.look(wait=6, budget="used")
    assert [(alarm.rule, alarm.stops) for alarm in first] == [
        ("loss > 1", True),
        ("nan", True),
        ("budget", False),
        ("stall 5 s", False),
    ]
    assert run.look(*rows, budget="used") + run.look(wait=60, budget="used") == []
    assert [alarm.run_id for alarm in run.look(*rows, run_id="r2")] == ["r2", "r2"]
    run.watcher.forget("r1")
    assert [alarm.rule for alarm in run.look(*rows)] == ["loss > 1", "nan"]


def test_what_fired_under_an_earlier_engine_does_not_fire_again() -> None:
    run = Running(rule(when="loss > 1"), rule(nan=True))
    run.watcher.recall("r1", "loss > 1")
    assert [alarm.rule for alarm in run.all((1, {"loss": 2.0}), (2, {"loss": nan}))] == ["nan"]


INVARIANT = (
    rule(when="3 <= step <= 6 and a < 0", name="window"),
    rule(when="a.mean > b and b.n >= 2", name="fields"),
    rule(when="step > 4 and not defined(b)", name="absent"),
    rule(nan=["a"]),
    rule(nan=True),
    rule(diverge={"metric": "a", "factor": 3}),
    rule(diverge={"metric": "b", "factor": 2, "after": 2}),
    rule(plateau={"metric": "a", "over": 3}),
    rule(plateau={"metric": "b", "over": 2, "least": 0.5}),
)
numbers = st.sampled_from([-2.0, -0.5, 0.0, 0.01, 0.5, 1.0, 4.0, 30.0, nan, inf])
rows_ = st.lists(
    st.tuples(st.integers(0, 9), st.dictionaries(st.sampled_from(["a", "b", "c"]), numbers, min_size=1)), max_size=14
).map(lambda rows: sorted(rows, key=lambda row: row[0]))


@given(rows=rows_, cuts=st.sets(st.integers(1, 13)))
def test_it_makes_no_difference_how_rows_are_cut_into_looks(rows: list[Row], cuts: set[int]) -> None:
    whole, pieces = Running(*INVARIANT), Running(*INVARIANT)
    edges = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    found = [alarm for start, end in pairwise(edges) for alarm in pieces.look(*rows[start:end])]
    found += pieces.look()

    def summarise(alarms: list[Alarm]) -> list[tuple[Any, ...]]:
        # Where several metrics are NaN at one step, which of them is named may differ.
        return sorted((a.rule, a.step, "" if a.rule == "nan" else a.text) for a in alarms)

    assert summarise(found) == summarise(whole.all(*rows))


@given(rows=rows_)
def test_a_window_fires_where_reading_the_rows_one_by_one_would(rows: list[Row]) -> None:
    known, expected = nan, None
    for step in sorted({step for step, _ in rows}):
        known = [known, *(row["a"] for at, row in rows if at == step and "a" in row)][-1]
        if expected is None and 3 <= step <= 6 and known < 0:
            expected = step
    fired = Running(rule(when="3 <= step <= 6 and a < 0")).all(*rows)
    assert [alarm.step for alarm in fired] == ([] if expected is None else [expected])


@given(values=st.lists(numbers, max_size=20), factor=st.floats(1.5, 100), unit=st.sampled_from([2.0**-40, 1.0, 1024.0]))
def test_divergence_depends_neither_on_the_unit_nor_on_which_way_is_better(
    values: list[float], factor: float, unit: float
) -> None:
    def fires(goal: str, values: list[float]) -> list[float | None]:
        run = Running(rule(diverge={"metric": "m", "factor": factor}), goals={"m": goal})
        return [alarm.step for alarm in run.look(*curve("m", values))]

    there = fires("min", values)
    assert fires("max", [-value for value in values]) == there
    assert fires("min", [value * unit for value in values]) == there


# -- the list of rules


def test_rules_without_a_name_are_named_after_their_condition() -> None:
    rules = [rule(nan=True), rule(stall="1m"), rule(stall="1m", note="again"), rule(name="mine", nan=["loss"])]
    assert names(rules) == ["nan", "watch 2: stall 60 s", "watch 3: stall 60 s", "mine"]


def test_names_are_unique() -> None:
    with pytest.raises(LabError, match="2 watch rules have the name 'x'"):
        check([rule(name="x", nan=True), rule(name="x", stall=5)])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prune": {}}, "no objective"),
        ({"prune": {"metric": "loss", "pruner": "threshold"}}, "no threshold"),
        ({"prune": {"metric": "loss", "pruner": "threshold", "lower": 2, "upper": 1}}, "nothing between 2 and 1"),
        ({"prune": {"metric": "loss", "pruner": "asha", "min_resource": 5, "max_resource": 2}}, "max_resource"),
        ({"when": "1 < 2"}, "reads no metric"),
        ({"when": "eval.secret.best > 1"}, "held out"),
        ({"plateau": {"metric": "eval/secret", "over": 5}}, "held out"),
        ({"when": "loss > 1", "requeue": ["train.lr@mul=0.5", "modle.size@mul=2"]}, "cannot requeue: .*modle"),
        ({"when": "loss > 1", "requeue": ["train.steps@set=2"]}, "cannot requeue: .*train.steps"),
    ],
)
def test_a_rule_that_could_never_work_is_rejected_at_the_start(keys: dict[str, Any], message: str) -> None:
    guard = Guard({"train.lr": Knob.make("train.lr", {"type": "float", "low": 0.0, "high": 1.0})})
    with pytest.raises(LabError, match=message):
        check([rule(**keys)], holdout="eval/secret", guard=guard, bases=[{"train": {"lr": 0.1, "steps": 9}}])


def test_a_rule_whose_requeue_may_leave_the_range_later_is_fine() -> None:
    guard = Guard({"train.lr": Knob.make("train.lr", {"type": "float", "low": 0.0, "high": 1.0})})
    rules = [rule(when="loss > 1", requeue=["train.lr@mul=100"]), rule(prune={}), rule(nan=True), rule(budget=True)]
    check(rules, objective=ObjectiveConfig(metric="loss", goal="min"), guard=guard, bases=[{"train": {"lr": 0.1}}])


def test_an_objective_without_its_quotes_is_an_error_of_the_rule() -> None:
    objective = ObjectiveConfig(metric="eval-logloss", goal="min")
    with pytest.raises(LabError, match="does not read eval-logloss"):
        check([rule(when="step > 2 and eval-logloss < 0.4")], objective=objective)
    check([rule(when="step > 2 and 'eval-logloss' < 0.4")], objective=objective)


@pytest.mark.parametrize("found", [5, "too high", Match(None, 1.0), SystemExit(7), RuntimeError("\ud83d")])
def test_a_condition_of_another_package_that_returns_something_else_is_reported_and_not_asked_again(found: Any) -> None:
    class Wrong:
        calls = 0

        def look(self, run: RunSnapshot, now: float) -> Any:
            self.calls += 1
            if isinstance(found, BaseException):
                raise found
            return found

    condition = PluginCondition(Wrong())
    run = RunSnapshot("1", {}, None, 0.0, 0.0)
    assert "AttributeError" in str(condition.unable)  # it has no `unable`
    assert [condition.look(run, 1.0), condition.look(run, 2.0)] == [None, None]
    assert "it failed: " in str(condition.unable)
    assert condition._condition.calls == 1
