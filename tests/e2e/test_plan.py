"""`looplab plan`: what would be run, without a trace."""

from __future__ import annotations


def test_plan_of_a_new_lab_writes_nothing(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    before = lab.tree()
    out = lab("plan").out
    assert "configs/base.json" in out
    assert "train.lr 0.1 → 0.2" in out
    assert "nothing was written or started" in out
    assert lab.tree() == before


def test_plan_of_a_lab_that_has_run_writes_nothing(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", "--rounds", "1")
    before = lab.tree()
    lab("plan")
    lab("plan", "--json")
    assert lab.tree() == before


def test_plan_writes_nothing_while_an_engine_is_at_work(lab) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    runs = [path.name for path in lab.runs()]
    assert runs[0] in lab("plan").out
    assert [path.name for path in lab.runs()] == runs
    lab.open_gate()
    engine.ended()
    assert lab.ask("SELECT count(*) FROM runs") == [(1,)]


def test_plan_shows_what_would_be_rejected_and_why(lab) -> None:
    lab.queue("train.lr@set=7", "nothing.here@mul=2")
    lab.configure(slots={"count": 3, "gpus": "none"})
    out = lab("plan").out
    assert "would be rejected: train.lr@set=7: train.lr: 7 is above 1" in out
    assert "would be rejected: nothing.here@mul=2:" in out
    told = lab("plan", "--json").json()
    assert [rejected["edits"] for rejected in told["rejected"]] == [["train.lr@set=7"], ["nothing.here@mul=2"]]


def test_what_was_planned_is_what_is_run(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3", "train.lr@set=0.4")
    for round_ in (1, 2):
        told = lab("plan", "--json").json()
        lab("run", "--rounds", str(round_))
        run = [lab.read(path, "config.json") for path in lab.runs() if lab.read(path, "run.json")["round"] == round_]
        assert [entry["config"] for entry in told["runs"]] == run
    assert lab("plan", "--json").json()["runs"] == []


def test_plan_counts_what_the_budget_leaves(lab) -> None:
    lab.queue("train.lr@set=0.2", "train.lr@set=0.3")
    lab("run", "--runs", "1")
    assert "1 of 1 runs are used" in lab("plan", "--runs", "1").out
    assert len(lab("plan", "--runs", "2", "--json").json()["runs"]) == 1


def test_plan_says_when_nothing_is_left(lab) -> None:
    lab("run")
    assert "nothing is left to try" in lab("plan").out


def test_plan_takes_mode_and_configs_as_run_does(lab) -> None:
    lab.base("other.json", train={"lr": 0.7})
    (entry,) = lab("plan", "--mode", "quick", "--cfgs", "other.json", "--json").json()["runs"]
    assert (entry["base"], entry["config"]["steps"], entry["config"]["train"]["lr"]) == ("other.json", 1, 0.7)


def test_plan_names_the_slots(lab) -> None:
    told = lab("plan", "--gpus", "0,1", "--json").json()
    assert [(slot["name"], slot["devices"]) for slot in told["slots"]] == [("gpu0", ["0"]), ("gpu1", ["1"])]
