"""remeasure: ended runs are read again after the objective or the sources were corrected."""

from __future__ import annotations

import json
from typing import Any

import pytest

PRINTS = """\
import json, os
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
for step in range(1, 4):
    print(f"@ {step} quality={config['train']['lr'] * step}")
"""


@pytest.fixture
def unread(lab: Any) -> Any:
    """A study whose runs printed the objective in a form that nobody was told of."""
    lab.write("train.py", PRINTS)
    lab.configure(objective={"metric": "quality", "goal": "max"}, measure={"sources": ["jsonl"]})
    lab.queue("train.lr@set=0.3", "train.lr@set=0.2")
    lab("run", "--keep-going", code=1)
    assert lab.count(status="ok") == 3
    return lab


def values(lab: Any) -> list[float | None]:
    return [value for (value,) in lab.ask("SELECT objective FROM runs ORDER BY n")]


@pytest.mark.slow
def test_corrected_sources_give_ended_runs_their_objective(unread: Any) -> None:
    assert values(unread) == [None, None, None]
    unread("remeasure", code=1)  # nothing was corrected yet
    unread.configure(measure={"stdout": [r"@ (?P<step>\d+) quality=(?P<quality>\S+)"]})
    done = unread("remeasure")
    assert "3 runs read again, 3 changed" in done.out
    assert values(unread) == pytest.approx([0.3, 0.9, 0.6])
    assert (unread.outputs() / "BEST").read_text().strip() == unread.runs()[1].name
    assert unread("verify").code == 0
    assert "0.9" in unread("show", "BEST").out
    assert "0.9" in (unread.outputs() / "report.md").read_text()
    assert unread("query", "SELECT count(*) AS n FROM metrics WHERE metric='quality'", "--json").json() == [{"n": 9}]
    events = [
        json.loads(data) for (data,) in unread.ask("SELECT data FROM events WHERE kind='remeasured' ORDER BY seq")
    ]
    assert [(event["before"], round(event["objective"], 6)) for event in events] == [
        (None, 0.3),
        (None, 0.9),
        (None, 0.6),
    ]
    old = json.loads((unread.runs()[0] / "record" / "summary.1.json").read_text())
    assert old["objective"]["value"] is None
    again = unread("remeasure", "--json").json()
    assert again["changed"] == 0
    assert len(unread.ask("SELECT 1 FROM events WHERE kind='remeasured'")) == 3


@pytest.mark.slow
def test_a_run_whose_measurements_were_changed_is_not_read_again(lab: Any) -> None:
    lab.queue("train.lr@set=0.3")
    lab("run", "--concurrency", "1")
    before = values(lab)
    (lab.runs()[0] / "metrics.jsonl").write_text('{"step": 1, "loss": -50}\n')
    (lab.runs()[1] / "record" / "summary.json").write_text("{}")  # it is made again
    out = lab("remeasure").out
    assert "not read again: metrics.jsonl has changed since the run ended" in out
    assert values(lab) == before
    assert "metrics.jsonl: the file is not what it was" in lab("verify", code=1).out


def test_a_study_that_failed_fast_continues_after_its_objective_was_corrected(lab: Any) -> None:
    lab.configure(objective={"metric": "los", "goal": "min"}, proposers=[{"search": "random"}], budget={"runs": 4})
    lab("run", "--concurrency", "1", code=1)
    lab.configure(objective={"metric": "loss", "goal": "min"})
    lab("remeasure")
    lab("resume")
    assert lab.count(status="ok") == 4
    assert lab.count(role="base") == 1  # it was not run again


def test_the_judge_starts_over_with_the_new_values(lab: Any) -> None:
    lab.write(
        "train.py",
        "import json, os, random\n"
        "config = json.load(open(os.environ['LOOPLAB_CONFIG']))\n"
        "luck = random.Random(str(config['seed'])).gauss(0, 0.01)\n"
        "with open(os.environ['LOOPLAB_METRICS'], 'a') as file:\n"
        "    print(json.dumps({'step': 1, 'a': config['x'] + luck, 'b': luck - config['x']}), file=file)\n",
    )
    lab.write("configs/base.json", '{"x": 0.5, "seed": 3}')
    lab.configure(
        objective={"metric": "a", "goal": "max"}, judge={"baseline_seeds": 3, "replicates": 3, "max_replicates": 5}, round_size=4,
        knobs={"x": {"type": "float", "low": 0, "high": 1}, "seed": {"type": "int", "low": 0}}, budget={"rounds": 1},
    )  # fmt: skip
    lab.queue("x@set=0.9", "x@set=0.1")
    lab("run")
    (champion,) = lab.ask("SELECT id FROM runs WHERE verdict='keep' AND role='trial'")[0]
    lab.configure(objective={"metric": "b", "goal": "max"})
    lab("remeasure")
    verdicts = dict(lab.ask("SELECT id, verdict FROM runs WHERE verdict IS NOT NULL"))
    assert verdicts[champion] == "discard"
    assert "judge restarted" in {kind for (kind,) in lab.ask("SELECT kind FROM events")}
    assert lab("verify").code == 0
    lab("resume")
    assert lab("verify").code == 0


def test_a_running_engine_is_not_disturbed(lab: Any) -> None:
    lab.base(wait="gate")
    engine = lab.start("run")
    lab.until_at_work()
    assert "engine" in lab("remeasure", code=3).err
    lab.open_gate()
    engine.ended()


def test_reproduce_with_a_used_up_budget_says_so_and_leaves_nothing_queued(lab: Any) -> None:
    lab.configure(budget={"runs": 1})
    lab("run")
    assert "the budget of 1 run is used" in lab("reproduce", "1", code=2).err
    assert lab.ask("SELECT count(*) FROM proposals WHERE status='waiting'") == [(0,)]
    lab.configure(budget={"runs": 2})
    assert lab("reproduce", "1").code == 0
    assert lab.count() == 2


OTHER = """\
import json, os
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
with open(os.environ["LOOPLAB_METRICS"], "a") as file:
    for step in range(3):
        print(json.dumps({"step": step, "loss": config["train"]["lr"] - step, "other": 100 - config["train"]["lr"]}), file=file)
"""


@pytest.mark.slow
def test_values_of_another_objective_are_never_shown_or_compared(lab: Any) -> None:
    lab.write("train.py", OTHER)
    lab.queue("train.lr@set=0.3")
    lab("run")
    lab.configure(objective={"metric": "other", "goal": "max"})
    out = lab("status").out
    assert "2 runs were measured with a different objective" in out
    assert "other" not in out.replace("another", "")
    assert "remeasure" in lab("plan", code=2).err
    out = lab("run").out
    assert "2 runs are measured again" in out
    assert lab.count() == 2
    assert values(lab) == pytest.approx([99.9, 99.7])
    lab("verify")
    lab.configure(objective={"metric": "other", "goal": "max", "at": "first"})
    lab("propose", "--change", "train.lr@set=0.4")
    assert values(lab) == pytest.approx([99.9, 99.7])
    lab("run")
    assert values(lab) == pytest.approx([99.9, 99.7, 99.6])
    lab("verify")


def test_where_an_objective_is_on_the_curve_is_a_part_of_it(lab: Any) -> None:
    lab.write("train.py", OTHER)
    lab("run")
    assert values(lab) == pytest.approx([-1.9])
    lab.configure(objective={"metric": "loss", "goal": "min", "at": "first"})
    lab("run")
    assert values(lab) == pytest.approx([0.1])
    lab("reindex")
    lab("verify")
