from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from looplab.config.lab import load_lab
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import JOBS_SUFFIX
from looplab.report.facts import StudyFacts, find_wandb, study_facts
from looplab.runs.logs import read_tail


def facts_of(maker: Any) -> StudyFacts:
    return study_facts(maker.lab, maker.study, maker.record)


def test_a_run_is_reported_with_its_change_and_its_gain_against_parent_and_base(making: Any, maker: Any) -> None:
    base = maker.train(losses=[3.0, 2.0], proposer="base")
    child = maker.train(making.edited(model__width=512), [3.0, 1.5], reason="wider")
    grandchild = maker.train(making.edited(model__width=1024), [3.0, 1.75], parent=child)
    facts = facts_of(maker)
    assert [(run.objective, run.against_parent, run.against_base) for run in facts.runs] == [
        (2.0, None, None),
        (1.5, -0.5, -0.5),
        (1.75, 0.25, -0.25),
    ]
    assert facts.runs[1].changes == {"model.width": {"old": 256, "new": 512}}
    assert facts.runs[2].changes == {"model.width": {"old": 512, "new": 1024}}
    assert facts.best is not None
    assert facts.best.row.id == child.id
    assert [(best.run, best.objective) for best in facts.best_so_far] == [(base.id, 2.0), (child.id, 1.5)]
    assert facts.run(grandchild.id) is facts.runs[2]
    assert facts.runs[0].metrics["eval/loss"].last == 2.0


def test_knobs_are_those_declared_and_whatever_else_differs(making: Any, maker: Any) -> None:
    maker.train(proposer="base")
    maker.train(making.edited(model__width=512, seed=7, data__path="data/other.bin"))
    maker.train(making.edited(train__learning_rate=0.1, seed=7))
    knobs = {knob.key: knob for knob in facts_of(maker).knobs}
    assert {key for key, knob in knobs.items() if knob.varies} == {
        "train.learning_rate", "model.width", "seed", "data.path",
    }  # fmt: skip
    assert knobs["train.learning_rate"].log
    assert not knobs["seed"].declared
    assert knobs["data.path"].kind == "category"
    assert not knobs["train.warmup"].varies
    assert knobs["train.warmup"].declared


@pytest.mark.parametrize(
    ("values", "log"),
    [([16, 32, 64, 128], True), ([1, 2, 3, 4], False), ([0, 10, 100], False), ([0.002, 5.0], True), ([5, 7], False)],
)
def test_values_that_grow_by_factors_get_a_log_scale(making: Any, maker: Any, values: list[float], log: bool) -> None:
    for value in values:
        maker.train(making.edited(model__width=value))
    assert next(knob for knob in facts_of(maker).knobs if knob.key == "model.width").log is log


def test_running_and_planned_runs_are_reported_too(making: Any, maker: Any) -> None:
    running = maker.plan(making.edited(model__width=64))
    (maker.launch(running) / "metrics.jsonl").write_text('{"step": 0, "eval/loss": 3}\n{"step": 1, "eval/loss": 2}\n')
    maker.plan(making.edited(model__width=128), hypothesis="it will do better")
    now, next_ = facts_of(maker).runs
    assert (now.status, now.objective, now.metrics["eval/loss"].last) == ("running", None, 2.0)
    assert (next_.status, next_.changes, next_.hypothesis) == (
        "planned", {"model.width": {"old": 256, "new": 128}}, "it will do better",
    )  # fmt: skip


def test_a_study_without_runs_or_objective_has_its_facts_all_the_same(making: Any, tmp_path: Path) -> None:
    text = making.LAB.replace("objective: {metric: eval/loss, goal: min, at: last}\n", "")
    made = making.make(tmp_path / "lab", text)
    assert facts_of(made).runs == ()
    made.train()
    facts = facts_of(made)
    assert (facts.metric, facts.best, facts.best_so_far, facts.runs[0].objective) == (None, None, (), None)


def test_what_cannot_be_read_is_a_note_and_never_an_error(making: Any, maker: Any) -> None:
    run = maker.train()
    (maker.outputs / run.id / "record/run.json").write_text("{broken")
    (maker.outputs / run.id / "record/summary.json").write_text('{"metrics": {"eval/loss": {"first": 1}}}')
    gone = maker.train(making.edited(seed=2))
    for path in (maker.outputs / gone.id).rglob("*"):
        if path.is_file():
            path.unlink()
    found = facts_of(maker).runs
    assert any("run.json" in note for note in found[0].notes)
    assert any("summary.json" in note for note in found[0].notes)
    assert found[1].metrics == {}


def test_another_objective_is_recomputed_for_old_runs_or_missing(making: Any, maker: Any) -> None:
    maker.train(losses=[1.0, 4.0])
    maker.train(making.edited(seed=2), [2.0, 3.0])
    for at, found in (("best", [1.0, 2.0]), ("mean(2)", [None, None])):
        (maker.lab / "lab.yaml").write_text(making.LAB.replace("at: last", f"at: {at}"))
        study = load_lab(maker.lab).study(None)
        facts = study_facts(maker.lab, study, maker.record)
        assert [run.objective for run in facts.runs] == found
        assert any("another objective" in note for note in facts.notes)
        assert (facts.best and facts.best.objective) == (1.0 if at == "best" else None)


def test_failures_that_end_alike_are_one_with_the_newest_log(making: Any, maker: Any) -> None:
    for megabytes in (10, 2000):
        maker.fail(making.TRACEBACK.format(mb=megabytes), making.edited(seed=megabytes))
    maker.fail("assertion failed\n", making.edited(seed=3))
    failures = facts_of(maker).failures
    assert [len(failure.runs) for failure in failures] == [2, 1]
    assert failures[0].how == "failed, exit code 1"
    assert "2000 MiB" in failures[0].tail


def test_the_same_refusal_is_reported_once_with_its_count(maker: Any) -> None:
    for _ in range(3):
        maker.reject("model.width@set=9999", "9999 is above 2048")
    maker.reject("nonsense@set=1", "not a knob")
    assert [(found.times, found.why) for found in facts_of(maker).rejected] == [
        (3, "9999 is above 2048"),
        (1, "not a knob"),
    ]


def test_secrets_and_terminal_codes_do_not_come_into_the_facts(making: Any, maker: Any) -> None:
    key = "sk-" + "a1B2" * 8
    maker.train(making.edited(data__path=f"https://me:hunter22@host/{key}"), reason=f"with {key} \x1b[31mred\x1b[0m")
    config = making.edited(seed=4)
    config["wandb"] = {"api_key": "0123456789"}
    maker.train(config)
    maker.fail(f"token {key}\n  10%\r 50%\r 100% \x1b[1mdone\x1b[0m\r\n", making.edited(seed=2))
    facts = facts_of(maker)
    found = repr(facts)
    assert key not in found
    assert "hunter22" not in found
    assert "0123456789" not in found
    assert facts.runs[0].row.reason == "with *** red"
    assert facts.failures[0].tail == "token ***\n 100% done"


@pytest.mark.parametrize(
    ("log", "url"),
    [
        ("wandb: 🚀 View run at \x1b[34mhttps://wandb.ai/me/p/runs/ab12\x1b[0m\n", "https://wandb.ai/me/p/runs/ab12"),
        ("see https://wandb.corp.example/t/p/runs/x-1?a=b)", "https://wandb.corp.example/t/p/runs/x-1"),
        ("https://wandb.ai/me/p https://example.com/runs/1", None),
        ("javascript:https//wandb.ai/runs/1 http://wandb.ai/a/b/runs/c", None),
        ("x" * 300_000 + "\nhttps://wandb.ai/me/p/runs/late\n", "https://wandb.ai/me/p/runs/late"),
    ],
)
def test_the_address_of_a_run_at_wandb_is_found_in_its_log(tmp_path: Path, log: str, url: str | None) -> None:
    (tmp_path / "train.log").write_text(log)
    assert find_wandb(tmp_path / "train.log") == url


def test_the_last_complete_lines_of_a_long_log_are_reported(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("".join(f"line {i} {'x' * 40}\n" for i in range(5000)))
    lines = read_tail(tmp_path / "train.log", 5).splitlines()
    assert [line.split()[1] for line in lines] == ["4995", "4996", "4997", "4998", "4999"]
    assert read_tail(tmp_path / "missing.log") == ""


def test_the_notes_of_a_person_are_reported(maker: Any) -> None:
    run = maker.train()
    (maker.outputs / run.id / "record/notes.md").write_text("# Conclusion\nwarm-up is not needed\n")
    assert facts_of(maker).runs[0].conclusion == "# Conclusion\nwarm-up is not needed"


def test_notes_next_to_the_trainers_files_are_reported_too(maker: Any, tmp_path: Path) -> None:
    run = maker.train()
    (maker.outputs / run.id / "notes.txt").write_text("slower than it looks\n")
    assert facts_of(maker).runs[0].conclusion == "slower than it looks"
    (maker.outputs / run.id / "record/notes.md").write_text("believed\n")
    assert facts_of(maker).runs[0].conclusion == "believed\n\nslower than it looks"
    (maker.outputs / run.id / "notes.txt").unlink()
    (tmp_path / "elsewhere").write_text("not of this run\n")
    (maker.outputs / run.id / "notes.txt").symlink_to(tmp_path / "elsewhere")
    assert facts_of(maker).runs[0].conclusion == "believed"


def test_the_budget_is_reported_with_its_limits(making: Any, maker: Any) -> None:
    maker.train()
    assert {part.name: part.shown for part in facts_of(maker).budget}["runs"] == "1 of 400"


def test_a_budget_that_an_earlier_call_exceeded_does_not_read_as_a_share(maker: Any) -> None:
    for _ in range(2):
        maker.train()
    maker.record.configure({"options": {"runs": 1}})
    assert {part.name: part.shown for part in facts_of(maker).budget}["runs"] == "2 (budget 1)"


def test_a_larger_budget_is_not_a_change_of_rules(maker: Any) -> None:
    maker.train()

    def configure(budget: int, rounds: int | None, alpha: float = 0.05) -> str:
        study = {"budget": {"rounds": budget}, "judge": {"alpha": alpha}}
        maker.record.configure({"study": study, "options": {"rounds": rounds, "runs": None}})
        return maker.record.configurations()[-1].sentence("today")

    configure(3, None)
    assert configure(3, 4) == "budget: rounds 3 → 4, by --rounds (today)"
    assert configure(3, None) == "budget: rounds 4 → 3, by lab.yaml (today)"
    assert configure(5, None) == "budget: rounds 3 → 5, by lab.yaml (today)"
    changed = configure(5, 6, alpha=0.4)
    assert changed == ("the configuration was changed today: judge.alpha 0.05 → 0.4; budget: rounds 5 → 6, by --rounds")
    assert any("Budget: rounds 3 → 4, by --rounds (at " in note for note in facts_of(maker).notes)


def test_limits_of_the_command_line_are_reported_instead_and_submitted_commands_apart(maker: Any) -> None:
    maker.train()
    jobs = StudyLedger(maker.record.ledger, maker.study.name + JOBS_SUFFIX)
    with jobs.ledger.write():
        jobs.plan(round=jobs.begin_round(), proposal=None, proposer="job", parent=None, base="job", reason="",
                  config_hash="0", devices=1, plan=RunPlan({}))  # fmt: skip

    def shown() -> tuple[str, str]:
        parts = {part.name: part.shown for part in facts_of(maker).budget}
        return parts["rounds"], parts["runs"]

    assert shown() == ("1", "2 of 400")
    maker.record.configure({"options": {"rounds": 3, "runs": 7}})
    assert shown() == ("1 of 3", "1 of 7 (and 1 submitted)")
