from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.config.edits import Edit, Op
from looplab.config.files import hash_config
from looplab.decide.base import Proposal
from looplab.decide.history import History
from looplab.decide.rules import RulesProposer, read_rules, resolve
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import Knob, KnobTable
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.measure.base import Curve
from looplab.measure.summary import Summariser, to_dict

CONFIG: dict[str, Any] = {
    "ot": {
        "lambda_ot": 0.1,
        "window_size": 10,
        "loss_config": {
            "reg": 0.3,
            "tau_src": 1.0,
            "tau_tgt": 1.0,
            "features": [{"weight_label": 0.0}, {"weight_label": 0.002}],
        },
    },
    "optimizer": {"lr": 1e-5},
    "policy": {"optimizer_lr": 1e-5},
    "batch_size": 8,
    "steps": 2000,
}
KNOBS = {
    "ot.lambda_ot": {"type": "float", "low": 0.02, "high": 1},
    "ot.window_size": {"type": "int", "low": 1, "high": 100},
    "ot.loss_config.reg": {"type": "float", "low": 0.02, "high": 2, "log": True},
    "ot.loss_config.tau_src": {"type": "float", "low": 0.05, "high": 10},
    "ot.loss_config.tau_tgt": {"type": "float", "low": 0.05, "high": 10},
    "ot.loss_config.features.*.weight_label": {"type": "float", "low": 0, "high": 0.02},
    "optimizer.lr": {"type": "float", "low": 1e-6, "high": 1e-2, "log": True},
    "policy.optimizer_lr": {"type": "float", "low": 1e-6, "high": 1e-2, "log": True},
    "batch_size": {"type": "int", "low": 1, "high": 64},
}
FIVE = """\
rules:
  - name: no mass
    when: "train.ot_pi_sum.last < 1e-3"
    edits:
      - ot.loss_config.reg@mul=1.6
      - ot.loss_config.tau_src@mul=2
      - ot.loss_config.tau_tgt@mul=2
      - ot.window_size@max=20
    clamp: {ot.loss_config.reg: [0.3, 1.0], ot.loss_config.tau_src: [0.5, 5], ot.loss_config.tau_tgt: [0.5, 5]}
    reason: the plan carries nothing
    hypothesis: more regularisation keeps the plan from underflow
    priority: 50
  - name: transport dominates
    when: "train.ot_pi_sum.last > 0.3 and train.ot_loss.pct > -10"
    edits: ["ot.loss_config.features.*.weight_label@mul=0.5", "ot.lambda_ot@add=-0.05"]
    priority: 40
  - name: plateau
    when: "train.l1_loss.n >= 2 and train.l1_loss.pct > -2"
    edits: ["policy.optimizer_lr@mul=1.4", "optimizer.lr@mul=1.4", "batch_size@add=4"]
    priority: 30
  - name: wild gradients
    when: "train.grad_norm.last > 100"
    edits: ["ot.loss_config.reg@mul=1.3", "policy.optimizer_lr@mul=0.7", "optimizer.lr@mul=0.7"]
    priority: 20
  - name: a little more
    when: true
    edits: ["ot.loss_config.reg@mul=1.2"]
"""
ONE = """\
rules:
  - name: raise reg
    when: "train.ot_pi_sum.last < 1e-3 and config.ot.loss_config.reg < 1"
    edits: ["ot.loss_config.reg@mul=1.6"]
    reason: the plan carries nothing
"""
FINE = {"train/ot_pi_sum": [0.1, 0.2], "train/ot_loss": [1.0, 0.5], "train/l1_loss": [1.0, 0.5]}
EMPTY = {**FINE, "train/ot_pi_sum": [1e-80, 2.6e-85]}


def make_guard(**changed: dict[str, Any]) -> Guard:
    knobs = {**KNOBS, **{name.replace("__", "."): spec for name, spec in changed.items()}}
    return Guard({path: Knob.make(path, spec) for path, spec in knobs.items()})


@dataclass
class Lab:
    """A study that was never trained: rows in a real ledger, and run folders."""

    folder: Path
    study: StudyLedger

    def proposer(self, rules: str = ONE, guard: Guard | None = None, variants: int = 1) -> RulesProposer:
        """A new proposer, which knows only what is on disk."""
        file = self.folder / ("rules.py" if "def " in rules else "rules.yaml")
        file.write_text(rules)
        return RulesProposer(file, guard or make_guard(), History(self.study, self.folder / "out"), variants)

    def round(self) -> int:
        with self.study.ledger.write():
            return self.study.begin_round()

    def run(
        self,
        metrics: dict[str, list[float]] | None = None,
        config: dict[str, Any] | None = None,
        objective: float | None = 1.0,
        *,
        status: str = "ok",
        role: str = "trial",
        accepted: Proposal | None = None,
    ) -> RunRow:
        config = CONFIG if config is None else config
        id_ = None
        with self.study.ledger.write():
            if accepted is not None:
                id_ = self.study.propose(
                    accepted.proposer, accepted.edits, accepted.reason, parent=accepted.parent, source=accepted.source
                )
                assert id_ is not None
                config = make_guard().check(self.config(accepted.parent or ""), accepted.edits).config
            round_ = self.study.open_round() or self.study.begin_round()
            run = self.study.plan(
                round=round_, proposal=id_, proposer="x", parent=None, base="b", reason="",
                config_hash=hash_config(config), devices=1, plan=RunPlan(config), role=role,
            )  # fmt: skip
        return self.end(run, config, metrics, objective, status) if metrics is not None else run

    def end(
        self, run: RunRow, config: dict[str, Any], metrics: dict[str, list[float]], objective: float | None, status: str
    ) -> RunRow:
        summariser = Summariser()
        summariser.add({name: Curve(list(range(len(values))), values) for name, values in metrics.items()})
        where = self.folder / "out" / run.id
        (where / "record").mkdir(parents=True)
        (where / "record/run.json").write_text("{}")
        (where / "record/config.json").write_text(json.dumps(config))
        (where / "record/summary.json").write_text(json.dumps({"metrics": to_dict(summariser.result()), "steps": 2000}))
        with self.study.ledger.write():
            self.study.ended(
                run.id, status=status, code=0, signal=None, started=1.0, ended=61.0 + run.n, objective=objective,
                files={},
            )  # fmt: skip
        return self.study.run(run.id)

    def set_best(self, run: str, objective: float) -> None:
        with self.study.ledger.write():
            self.study.set_best(run, objective)

    def config(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / run / "record/config.json").read_text())
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    study = StudyLedger(Ledger(tmp_path / "ledger.db"), "s")
    study.open("eval/l1", "min")
    return Lab(tmp_path, study)


def changed(**leaves: Any) -> dict[str, Any]:
    """The config with some leaves of `ot.loss_config` changed."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    config["ot"]["loss_config"].update(leaves)
    return config


def sets(proposal: Proposal) -> dict[str, Any]:
    """What a proposal sets; every edit must be a plain value."""
    found = {}
    for edit in proposal.edits:
        head, _, value = edit.partition("=")
        assert head.endswith("@set")
        found[head.removesuffix("@set")] = json.loads(value)
    return found


# --- firing


def test_a_rule_that_is_true_proposes_plain_values_from_the_run_and_names_its_numbers(lab: Lab) -> None:
    run = lab.run(EMPTY)
    (proposal,) = lab.proposer().propose(lab.study, 4)
    assert proposal.edits == ("ot.loss_config.reg@set=0.48",)
    assert proposal.parent == run.id
    assert proposal.source == f"rules:{run.id}:raise reg"
    assert proposal.reason == (
        "the plan carries nothing; rule 'raise reg': config.ot.loss_config.reg = 0.3, train.ot_pi_sum.last = 2.6e-85"
    )


def test_the_newest_round_comes_first_and_in_it_the_best_run(lab: Lab) -> None:
    runs = []
    for round_ in range(2):
        lab.round()
        for objective in (3.0, 1.0, None, 2.0):
            config = {**changed(reg=0.1 + len(runs) / 100), "steps": len(runs)}
            runs.append(lab.run(EMPTY, config, objective, status="ok" if objective else "failed"))
        lab.study.close_round(round_ + 1)
    proposer = lab.proposer()
    order = [runs[i].id for i in (5, 7, 4, 6, 1, 3, 0, 2)]
    assert [p.parent for p in proposer.propose(lab.study, 10)] == order
    assert [p.parent for p in proposer.propose(lab.study, 3)] == order[:3]


def test_replicates_are_not_looked_at(lab: Lab) -> None:
    lab.run(EMPTY, role="replicate")
    proposer = lab.proposer()
    assert proposer.propose(lab.study, 4) == []
    assert proposer.problem == "no run has ended yet"


def test_a_failed_run_can_be_the_reason(lab: Lab) -> None:
    lab.run({}, objective=None, status="failed")
    rule = "rules:\n  - {name: smaller, when: \"status == 'failed'\", edits: ['batch_size@mul=0.5']}\n"
    assert [sets(p) for p in lab.proposer(rule).propose(lab.study, 4)] == [{"batch_size": 4}]


def test_a_rule_sees_objective_best_steps_seconds_and_round(lab: Lab) -> None:
    run = lab.run(FINE, objective=0.5)
    lab.set_best(run.id, 0.5)
    when = "objective <= best.objective and steps == 2000 and seconds > 60 and round == 1 and defined(train.l1_loss)"
    rule = f"rules:\n  - {{name: r, when: '{when}', edits: ['batch_size@add=1']}}\n"
    assert len(lab.proposer(rule).propose(lab.study, 4)) == 1


def test_a_rule_about_the_best_run_is_asked_again_when_the_best_changes(lab: Lab) -> None:
    first = lab.run(FINE, objective=0.5)
    other = lab.run(FINE, {**CONFIG, "batch_size": 9}, objective=0.6)
    lab.set_best(other.id, 0.6)
    rule = "rules:\n  - {name: r, when: 'objective == best.objective', edits: ['batch_size@add=8']}\n"
    proposer = lab.proposer(rule)
    (proposal,) = proposer.propose(lab.study, 4)
    assert proposal.parent == other.id
    lab.set_best(first.id, 0.5)
    assert [p.parent for p in proposer.propose(lab.study, 4)] == [first.id]


def test_priority_then_the_order_of_the_file_decides_which_rule_acts(lab: Lab) -> None:
    lab.run(EMPTY)
    rules = "rules:\n" + "".join(
        f"  - {{name: {name}, when: true, edits: ['batch_size@set={value}'], priority: {priority}}}\n"
        for name, value, priority in (("a", 1, 0), ("b", 2, 5), ("c", 3, 5))
    )
    for variants, values in ((1, [2]), (2, [2, 3]), (3, [2, 3, 1]), (9, [2, 3, 1])):
        proposals = lab.proposer(rules, variants=variants).propose(lab.study, 10)
        assert [sets(p)["batch_size"] for p in proposals] == values


def test_a_run_leads_to_no_more_than_its_variants_over_several_questions(lab: Lab) -> None:
    lab.run(EMPTY)
    proposer = lab.proposer(FIVE, variants=2)
    (first,) = proposer.propose(lab.study, 1)
    lab.run(accepted=first)
    (second,) = proposer.propose(lab.study, 1)
    assert [first.source.rpartition(":")[2], second.source.rpartition(":")[2]] == ["no mass", "a little more"]  # type: ignore[union-attr]
    lab.run(accepted=second)
    assert proposer.propose(lab.study, 4) == []
    assert proposer.problem == "every finished run has already led to its proposals"


# --- the five rules of old


def test_the_five_rules_raise_what_should_rise(lab: Lab) -> None:
    lab.run(EMPTY, changed(tau_src=2.0, tau_tgt=4.0))
    (proposal,) = lab.proposer(FIVE).propose(lab.study, 4)
    assert sets(proposal) == {
        "ot.loss_config.reg": 0.48,
        "ot.loss_config.tau_src": 4.0,
        "ot.loss_config.tau_tgt": 5.0,
        "ot.window_size": 20,
    }
    assert proposal.hypothesis == "more regularisation keeps the plan from underflow"


def test_a_clamp_never_reverses_a_change(lab: Lab) -> None:
    lab.run(EMPTY, changed(reg=1.5, tau_src=8.0, tau_tgt=0.1))
    (proposal,) = lab.proposer(FIVE).propose(lab.study, 4)
    assert sets(proposal) == {"ot.loss_config.tau_tgt": 0.5, "ot.window_size": 20}


def test_lambda_keeps_its_floor_and_the_rule_goes_silent_there(lab: Lab) -> None:
    metrics = {**FINE, "train/ot_pi_sum": [0.4, 0.5], "train/ot_loss": [1.0, 0.99]}
    rules = FIVE.replace('"ot.loss_config.features.*.weight_label@mul=0.5", ', "").split("  - name: plateau")[0]
    proposer = lab.proposer(rules)
    values = []
    accepted = None
    for _ in range(6):
        lab.run(metrics, accepted=accepted)
        proposals = proposer.propose(lab.study, 1)
        if not proposals:
            break
        accepted = proposals[0]
        values.append(sets(accepted)["ot.lambda_ot"])
    assert values == [0.05, 0.02]
    assert "'transport dominates' changes nothing on run" in (proposer.problem or "")
    assert "ot.lambda_ot stays at 0.02 (it takes float, 0.02 … 1)" in (proposer.problem or "")


def test_every_feature_is_halved_and_what_stays_is_left_out(lab: Lab) -> None:
    lab.run({**FINE, "train/ot_pi_sum": [0.4, 0.5], "train/ot_loss": [1.0, 0.99]})
    (proposal,) = lab.proposer(FIVE).propose(lab.study, 1)
    assert sets(proposal) == {"ot.loss_config.features.1.weight_label": 0.001, "ot.lambda_ot": 0.05}


def test_a_single_value_is_not_a_plateau(lab: Lab) -> None:
    lab.run({**FINE, "train/l1_loss": [0.3], "train/grad_norm": [10.0]})
    (proposal,) = lab.proposer(FIVE).propose(lab.study, 1)
    assert proposal.source is not None
    assert proposal.source.endswith(":a little more")


def test_an_integer_stays_an_integer(lab: Lab) -> None:
    lab.run({**FINE, "train/l1_loss": [1.0, 0.99]})
    (proposal,) = lab.proposer(FIVE).propose(lab.study, 1)
    assert "batch_size@set=12" in proposal.edits


# --- silence


def test_missing_data_is_named_and_so_is_what_was_not_true(lab: Lab) -> None:
    a = lab.run({"train/l1_loss": [1.0, 0.5]})
    lab.run(FINE, {**CONFIG, "batch_size": 16})
    proposer = lab.proposer()
    assert proposer.propose(lab.study, 4) == []
    assert proposer.problem == (
        f"no rule fired: 'raise reg' needs train.ot_pi_sum.last, which run {a.id} did not measure; "
        "1 rule was not true for 1 run"
    )


def test_before_any_run_has_ended_the_problem_says_so(lab: Lab) -> None:
    lab.run()
    proposer = lab.proposer()
    assert proposer.propose(lab.study, 4) == []
    assert proposer.problem == "no run has ended yet"


def test_a_rule_that_compares_text_with_a_number_says_so(lab: Lab) -> None:
    run = lab.run(FINE)
    proposer = lab.proposer("rules:\n  - {name: r, when: status < 3, edits: ['batch_size@add=1']}\n")
    assert proposer.propose(lab.study, 4) == []
    assert f"'r' cannot be evaluated on run {run.id}" in (proposer.problem or "")


def test_what_the_guard_refuses_is_not_proposed_but_reported(lab: Lab) -> None:
    run = lab.run(EMPTY)
    proposer = lab.proposer(ONE.replace("ot.loss_config.reg@mul", "steps@mul"))
    assert proposer.propose(lab.study, 4) == []
    assert f"'raise reg' is refused on run {run.id}: steps is not a knob" in (proposer.problem or "")


def test_a_config_that_was_run_or_will_be_is_not_proposed_again(lab: Lab) -> None:
    lab.run(EMPTY)
    planned = lab.run(config=changed(reg=0.48))
    proposer = lab.proposer()
    assert proposer.propose(lab.study, 4) == []
    assert "to a config that was already tried or is planned" in (proposer.problem or "")
    lab.end(planned, changed(reg=0.48), FINE, 1.0, "ok")
    assert lab.proposer().propose(lab.study, 4) == []


def test_two_runs_that_lead_to_the_same_config_lead_to_one_proposal(lab: Lab) -> None:
    lab.run(EMPTY, objective=1.0)
    lab.run(EMPTY, objective=2.0)
    assert len(lab.proposer().propose(lab.study, 4)) == 1


# --- once, cooldown, and never twice


def test_a_rule_with_once_fires_once_in_the_study(lab: Lab) -> None:
    lab.run(EMPTY)
    lab.run(EMPTY, changed(reg=0.31))
    proposer = lab.proposer(ONE + "    once: true\n")
    (proposal,) = proposer.propose(lab.study, 4)
    lab.run(EMPTY, accepted=proposal)
    for again in (proposer, lab.proposer(ONE + "    once: true\n")):
        assert again.propose(lab.study, 4) == []
        assert again.problem == "no rule fired: 'raise reg' fires only once and has already fired (and 1 more)"


def test_a_rule_with_cooldown_waits_for_its_rounds(lab: Lab) -> None:
    proposer = lab.proposer(ONE.replace('< 1"', '< 9"') + "    cooldown: 2\n")
    fired, accepted = [], None
    for round_ in range(1, 8):
        lab.round()
        lab.run(EMPTY, accepted=accepted, config=changed(reg=0.3 + round_ / 1000))
        proposals = proposer.propose(lab.study, 4)
        accepted = proposals[0] if proposals else None
        if accepted is not None:
            assert len(proposals) == 1
            fired.append(round_)
            lab.run(EMPTY, accepted=accepted)
            accepted = None
        else:
            assert "cannot fire until round" in (proposer.problem or "")
        lab.study.close_round(round_)
    assert fired == [1, 4, 7]


def test_what_was_taken_is_never_taken_again_after_a_crash(lab: Lab) -> None:
    lab.run(EMPTY)
    (proposal,) = lab.proposer().propose(lab.study, 4)
    assert lab.proposer().propose(lab.study, 4) == [proposal]  # nothing was taken: it is proposed as before
    lab.run(accepted=proposal)
    assert lab.proposer().propose(lab.study, 4) == []
    assert lab.study.propose("rules", proposal.edits, "", source=proposal.source) is None


def test_when_a_proposal_is_refused_the_next_rule_has_its_turn(lab: Lab) -> None:
    lab.run(EMPTY)
    proposer = lab.proposer(FIVE)
    (first,) = proposer.propose(lab.study, 4)
    with lab.study.ledger.write():
        id_ = lab.study.propose("rules", first.edits, "", source=first.source)
        assert id_ is not None
        lab.study.reject(id_, [])
    assert [p.source for p in proposer.propose(lab.study, 4)] == [f"rules:{first.parent}:a little more"]


# --- the file


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("rules: 3", None, "list `rules:`"),
        ("rules: []\nother: 1", None, "nothing else"),
        ("rules:\n  - 3", 2, "rule 1"),
        ("rules:\n  - {when: true, edits: ['x@set=1']}", 2, "'name' is missing"),
        ("rules:\n  - name: a\n    when: true\n    edits: ['x@set=1']\n    whem: 1", 5, "unknown key 'whem'"),
        ("rules:\n  - name: a\n    edits: ['x@set=1']\n    when: 'x ='", 4, "when:"),
        ("rules:\n  - name: a\n    when: true\n    edits:\n      - x@set=1\n      - x=1", 6, "x@set=1"),
        ("rules:\n  - name: a\n    when: true\n    edits: []", 4, "edits"),
        ("rules:\n  - name: a\n    when: true\n    edits: [x@set=1]\n    clamp: {x: [2, 1]}", 5, "above the upper end"),
        ("rules:\n  - name: a\n    when: true\n    edits: [x@set=1]\n    cooldown: -1", 5, "cooldown"),
        ("rules:\n" + 2 * "  - {name: a, when: true, edits: [x@set=1]}\n", 3, "two rules have the name 'a'"),
    ],
)
def test_a_mistake_in_the_file_is_reported_with_its_line(
    tmp_path: Path, text: str, line: int | None, message: str
) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(LabError) as error:
        read_rules(file)
    assert message in str(error.value)
    assert error.value.file == str(file)
    assert error.value.line == line


def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_last_good_one(lab: Lab) -> None:
    lab.run(EMPTY)
    proposer = lab.proposer()
    assert sets(proposer.propose(lab.study, 1)[0]) == {"ot.loss_config.reg": 0.48}
    file = lab.folder / "rules.yaml"
    file.write_text(ONE.replace("1.6", "1.55"))
    assert sets(proposer.propose(lab.study, 1)[0]) == {"ot.loss_config.reg": 0.465}
    assert proposer.problem is None
    file.write_text("rules: nothing")
    assert sets(proposer.propose(lab.study, 1)[0]) == {"ot.loss_config.reg": 0.465}
    assert "list `rules:`" in (proposer.problem or "")
    file.unlink()
    assert len(proposer.propose(lab.study, 1)) == 1
    assert "the rules file does not exist" in (proposer.problem or "")
    file.write_text(ONE)
    assert sets(proposer.propose(lab.study, 1)[0]) == {"ot.loss_config.reg": 0.48}
    assert proposer.problem is None


def test_a_file_that_is_broken_from_the_start_is_the_problem(lab: Lab) -> None:
    lab.run(EMPTY)
    proposer = lab.proposer("rules:\n  - {name: a}\n")
    assert proposer.propose(lab.study, 1) == []
    assert (proposer.problem or "").startswith(f"{lab.folder / 'rules.yaml'}:2: rule 1:")


# --- rules.py

OWN = """\
from __future__ import annotations
from dataclasses import dataclass
from looplab.decide.base import Proposal

@dataclass
class Limits:
    low: float

def decide(summary, history):
    if summary["train/ot_pi_sum"]["last"] < Limits(1e-3).low:
        return [
            {"edits": {"ot.loss_config.reg@mul": 100}, "reason": f"{len(history)} seen", "hypothesis": "h"},
            Proposal(("batch_size@mul=2",), "faster", "me"),
        ]
    return []
"""


def test_a_labs_own_decide_is_asked_and_held_to_the_same_limits(lab: Lab) -> None:
    run = lab.run(EMPTY)
    proposer = lab.proposer(OWN, variants=2)
    first, second = proposer.propose(lab.study, 4)
    assert (first.edits, first.reason, first.hypothesis) == (("ot.loss_config.reg@set=2.0",), "1 seen", "h")
    assert (second.edits, second.reason, second.proposer) == (("batch_size@set=16",), "faster", "rules")
    assert {p.parent for p in (first, second)} == {run.id}
    lab.run(accepted=first)
    assert lab.proposer(OWN, variants=2).propose(lab.study, 4) == [second]
    assert len(lab.proposer(OWN, variants=1).propose(lab.study, 4)) == 0


SUMMARY_ONLY = """\
from dataclasses import dataclass

@dataclass
class Decision:
    reason: str
    changes: dict

def decide(summary):
    if summary["train/ot_pi_sum"]["last"] < 1e-3:
        return [Decision("mass too low", {"ot.loss_config.reg@mul": 1.5, "batch_size": 16, "ot.window_size@max": 20})]
    return []
"""


def test_a_decide_that_knows_only_the_summary_works(lab: Lab) -> None:
    lab.run(EMPTY)
    proposer = lab.proposer(SUMMARY_ONLY)
    (proposal,) = proposer.propose(lab.study, 4)
    assert proposer.problem is None
    assert proposal.reason == "mass too low"
    assert set(proposal.edits) == {"ot.loss_config.reg@set=0.45", "batch_size@set=16", "ot.window_size@set=20"}


@pytest.mark.parametrize("head", ["summary, history", "summary, history=None", "*seen", "summary, *rest"])
def test_a_decide_that_can_take_the_history_gets_it(lab: Lab, head: str) -> None:
    lab.run(EMPTY)
    lab.run(FINE)
    body = f"def decide({head}):\n    history = [v for k, v in locals().items()][-1]\n"
    body += "    while isinstance(history, tuple): history = history[-1]\n"
    body += "    return [{'edits': ['batch_size@set=20'], 'reason': str(len(history))}]\n"
    (proposal, *_) = lab.proposer(body).propose(lab.study, 4)
    assert proposal.reason == "2"


def test_a_decide_that_proposes_nothing_is_reported(lab: Lab) -> None:
    lab.run(FINE)
    proposer = lab.proposer(OWN)
    assert proposer.propose(lab.study, 4) == []
    assert proposer.problem == "no rule fired: decide() proposed nothing for 1 run"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def decide(summary, history):\n    x = 1\n    return summary['nothing']\n", ":3: decide() on run"),
        ("def decide(summary, history):\n    raise SystemExit(3)\n", ":2: decide() on run"),
        ("def decide(summary, history)\n    return []\n", ":1: the rules cannot be loaded: SyntaxError"),
        ("import nowhere_at_all\ndef decide(s, h): ...\n", ":1: the rules cannot be loaded: ModuleNotFoundError"),
        ("def other(): ...\n", "no function `decide(summary, history)`"),
        ("def decide(s, h): return [3]\n", "3 is not a proposal"),
        ("def decide(s, h): return [{'edits': ['batch_size=1']}]\n", "`@op` is missing"),
        ("def decide(s, h): return [{'edits': {'batch_size@maxx': 1}}]\n", "there is no op 'maxx'"),
    ],
)
def test_an_error_in_a_labs_own_rules_is_a_problem_and_not_a_crash(lab: Lab, source: str, message: str) -> None:
    lab.run(EMPTY)
    proposer = lab.proposer(source)
    assert proposer.propose(lab.study, 4) == []
    assert message in (proposer.problem or "")
    assert str(lab.folder / "rules.py") in (proposer.problem or "")


def test_a_decide_that_fails_on_one_run_is_still_asked_about_the_others(lab: Lab) -> None:
    lab.run({}, objective=None, status="failed")
    lab.run(EMPTY)
    proposer = lab.proposer(OWN)
    assert len(proposer.propose(lab.study, 4)) == 1
    assert "KeyError: 'train/ot_pi_sum'" in (proposer.problem or "")


def test_a_repaired_rules_py_is_used_at_once(lab: Lab) -> None:
    lab.run(EMPTY)
    proposer = lab.proposer("def decide(s, h): return [{'edits': ['batch_size@set=1']}]\n")
    assert sets(proposer.propose(lab.study, 1)[0]) == {"batch_size": 1}
    (lab.folder / "rules.py").write_text("def decide(s, h): return [{'edits': ['batch_size@set=20']}]\n")
    assert sets(proposer.propose(lab.study, 1)[0]) == {"batch_size": 20}


# --- no rule can ever leave a range

OPS = st.sampled_from([Op.SET, Op.MUL, Op.ADD, Op.MAX, Op.MIN])
NUMBERS = st.one_of(st.floats(-1e6, 1e6, allow_nan=False), st.integers(-1000, 1000))
SPECS = st.one_of(
    st.tuples(NUMBERS, NUMBERS).map(lambda ends: {"type": "float", "low": min(ends), "high": max(ends)}),
    st.tuples(st.integers(-50, 50), st.integers(0, 90), st.integers(1, 7)).map(
        lambda t: {"type": "int", "low": t[0], "high": t[0] + t[1], "step": t[2]}
    ),
    st.lists(st.integers(-20, 20), min_size=1, max_size=5, unique=True).map(lambda found: {"choices": found}),
)


@settings(max_examples=300, deadline=None)
@given(
    spec=SPECS,
    start=NUMBERS,
    edits=st.lists(st.tuples(OPS, NUMBERS), min_size=1, max_size=4),
    clamp=st.one_of(st.none(), st.tuples(NUMBERS, NUMBERS).map(lambda ends: (float(min(ends)), float(max(ends))))),
)
def test_no_rule_can_ever_leave_a_knobs_range(
    spec: dict[str, Any], start: float, edits: list[tuple[Op, float]], clamp: tuple[float, float] | None
) -> None:
    knob = Knob.make("a.x", spec)
    config = {"a": {"x": knob.nearest(start), "y": 1}}
    asked = [Edit("a.x", op, value) for op, value in edits]
    guard = Guard({"a.x": knob})
    resolved, stuck = resolve(config, asked, {} if clamp is None else {"a.*": clamp}, KnobTable([knob]))
    ruling = guard.check(config, resolved)
    if ruling.config is None:  # only what no config could take: a fraction for a whole number, say
        assert resolved == asked
        return
    value = ruling.config["a"]["x"]
    assert knob.problem(value) is None
    assert ruling.config["a"]["y"] == 1
    assert resolved or stuck or value == config["a"]["x"]
