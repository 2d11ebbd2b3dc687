"""A preview shows what the next engine plans first: the same runs, in the same order, whatever the study is like."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from looplab import plugins
from looplab.config.files import hash_config
from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.launch.base import Ended, ExecutorTraits, Exit, LaunchEvent, LaunchSpec, Place, Started
from looplab.ledger.catalogue import AgentAskedEvent
from looplab.ledger.ledger import Ledger, LedgerCopy
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.engine import Engine
from looplab.loop.preview import UNDRAWN, Preview, preview
from looplab.loop.setup import RunOptions, Setup, prepare

STUDY: dict[str, Any] = {
    "study": "toy",
    "launch": {"command": ["{python}", "train.py", "--id={run_id}", "--to={out_dir}", "--in={slot}", "{flags}"],
               "config": "flags"},
    "base": ["base.json"],
    "objective": {"metric": "score", "goal": "max"},
    "knobs": {"x": {"type": "int", "low": 0, "high": 30}, "y": {"choices": [1, 2, 3]}},
    "slots": {"count": 2, "gpus": "none", "cores": "none"},
}  # fmt: skip
RULES = """
rules:
  - {name: up, when: "score.last < 50", edits: ["x@add=4"], reason: more may be better}
  - {name: other, when: "config.x > 10", edits: ["y@set=3"], once: true}
"""
DECIDE = """
def decide(summary, history):
    return [{"edits": [f"x@set={len(history) % 31}"], "reason": f"{len(history)} runs have ended"}]
"""
SAMPLERS = ("random", "grid", "qmc", "auto", "tpe", "cmaes")

MARK = "instant.json"
"""In the folder of a run that was started: how it ended."""


class Killed(BaseException):
    """The engine ends here, as if it were killed."""


class InstantExecutor:
    """Keeps to the contract of an executor, as far as an engine in the same process can see."""

    def __init__(self, train: Callable[[dict[str, Any]], tuple[int, float | None]]) -> None:
        self._train = train
        """From a config to an exit code and a score."""
        self._events: deque[LaunchEvent] = deque()
        self.started = 0
        self.kill_at: int | None = None
        """After how many starts the engine is killed."""
        self.ended = 0
        self.on_end: Callable[[int], None] = lambda n: None
        """Called with the number of runs that have ended."""

    def start(self, spec: LaunchSpec, after: str | None = None) -> None:
        code, score = self._train(json.loads(Path(spec.env["LOOPLAB_CONFIG"]).read_text()))
        if score is not None:
            with open(spec.env["LOOPLAB_METRICS"], "a") as log:
                log.write(json.dumps({"step": 1, "score": score}) + "\n")
        now = time.time()
        (spec.run_dir / MARK).write_text(json.dumps({"code": code, "at": now}))
        self._events.append(Started(spec.run_id, Place("here"), now))
        self._events.append(Ended(spec.run_id, Exit(code, started=now, ended=now)))
        self.started += 1
        if self.started == self.kill_at:
            raise Killed

    def cancel(self, run_id: str) -> None:
        """It has ended already."""

    def stop(self, run_id: str, reason: str, grace: float) -> None:
        """It has ended already."""

    def adopt(self, run_id: str, run_dir: Path, record_dir: Path) -> bool:
        mark = run_dir / MARK
        if not mark.exists():
            return False
        how = json.loads(mark.read_text())
        self._events.append(Ended(run_id, Exit(how["code"], started=how["at"], ended=how["at"])))
        return True

    def poll(self, timeout: float) -> list[LaunchEvent]:
        if not self._events:
            time.sleep(min(timeout, 0.001))
            return []
        event = self._events.popleft()
        if isinstance(event, Ended):
            self.ended += 1
            self.on_end(self.ended)
        return [event]

    def wake(self) -> None:
        """Nobody waits long."""

    def close(self) -> None:
        """There is nothing to let go of."""


def train(config: dict[str, Any]) -> tuple[int, float | None]:
    """A noisy parabola over x; one config crashes."""
    if config["x"] == 13:
        return 3, None
    noise = (config["x"] * 31 + config["y"] * 7 + config.get("seed", 0) * 17) % 11 / 10
    return 0, 100.0 - (config["x"] - 17) ** 2 / 4 + config["y"] + noise


def write_lab(
    folder: Path, study: dict[str, Any], *, seed: bool = True, queue: list[dict[str, Any]] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "lab.yaml").write_text(json.dumps(study))
    for n, name in enumerate(study["base"]):
        (folder / name).write_text(json.dumps({"x": 3 + n, "y": 1, **({"seed": 1} if seed else {})}))
    (folder / "rules.yaml").write_text(RULES)
    (folder / "rules.py").write_text(DECIDE)
    if queue is not None:
        (folder / "queue.yaml").write_text(json.dumps({"proposals": queue}))
    return folder


def set_up(folder: Path, options: RunOptions) -> Setup:
    lab = load_lab(folder)
    return prepare(lab, lab.study(None), options)


def look(setup: Setup) -> Preview:
    """A preview, which must not touch a single file."""
    before = tree(setup.lab)
    ledger = LedgerCopy(setup.lab / ".looplab" / "ledger.db")
    found = preview(setup, ledger)
    ledger.close()
    assert tree(setup.lab) == before
    return found


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


class WatchedEngine(Engine):
    """Keeps what its first planning led to."""

    first: list[dict[str, Any]] | None = None
    rejected: list[int]

    def _plan(self) -> None:
        unfinished = bool(self._planner.queue or self.running or self._finished)
        before = self._ledger.head()[0]
        super()._plan()
        if self.first is None:
            self.rejected = [e.data["proposal"] for e in self._ledger.events(after=before) if e.kind == "rejected"]
            new = [] if unfinished else list(self._planner.queue)
            ids = {run.id: f"{run.n:04d}-{UNDRAWN}" for run in new}
            self.first = [facts(run, self.study.plan_of(run.id), ids) for run in new]


def facts(run: RunRow, plan: Any, ids: dict[str, str]) -> dict[str, Any]:
    row = replace(run, id=ids.get(run.id, run.id), parent=ids.get(run.parent or "", run.parent),
                  twin=ids.get(run.twin or "", run.twin), created=0.0)  # fmt: skip
    named = {name: getattr(row, name) for name in RunRow.__slots__}
    return {**named, "plan": plan}


def engine_life(setup: Setup, *, drain_after: int | None = None, kill_at: int | None = None) -> WatchedEngine:
    executor = InstantExecutor(train)
    executor.kill_at = kill_at
    ledger = Ledger(setup.lab / ".looplab" / "ledger.db")
    engine = WatchedEngine(setup, ledger, executor)
    if drain_after is not None:
        executor.on_end = lambda n: engine.request("drain") if n == drain_after else None
    try:
        engine.run()
    except Killed:
        pass
    finally:
        ledger.close()
    return engine


def check_agreement(setup: Setup, found: Preview, engine: WatchedEngine) -> None:
    """What was shown is what the engine has planned first."""
    assert engine.first is not None
    told = [facts(planned.row, planned.plan, {}) for planned in found.runs]
    assert [(t["n"], t["reason"]) for t in told] == [(t["n"], t["reason"]) for t in engine.first]
    assert told == engine.first
    assert [row.id for row in found.rejected] == engine.rejected
    if not told:
        assert found.why_none
    with_folder = {
        path.parents[1].name[:4]: path for path in (setup.lab / "outputs" / "toy").glob("[0-9]*/record/run.json")
    }
    for planned in found.runs[: len(setup.slots)]:
        path = with_folder.get(planned.row.id[:4])
        about = json.loads(path.read_text()) if path else {"slot": None}
        if about["slot"] == planned.slot.name:
            assert [word.replace(about["id"], planned.row.id) for word in about["argv"]] == list(planned.argv)


# -- studies of all kinds, at several points of their lives


def random_study(chance: random.Random) -> tuple[dict[str, Any], bool, list[dict[str, Any]]]:
    study = dict(STUDY)
    study["base"] = ["base.json", "other.json"][: chance.choice((1, 1, 2))]
    kinds = chance.sample(["queue", "rules", "decide", "search"], chance.randint(1, 3))
    proposers: dict[str, Any] = {
        "queue": {"queue": "queue.yaml"},
        "rules": {"rules": "rules.yaml", "variants": chance.randint(1, 2)},
        "decide": {"rules": "rules.py"},
        "search": {"search": {"sampler": chance.choice(SAMPLERS), "startup": 2, "seed": chance.randint(0, 9)}},
    }
    study["proposers"] = [proposers[kind] for kind in kinds]
    study["mix"] = chance.choice(("bandit", "order"))
    if chance.random() < 0.6:
        by = chance.choice(("test", "test", "ratchet"))
        study["judge"] = {
            "by": by,
            "baseline_seeds": chance.randint(2, 4),
            "replicates": 2,
            "max_replicates": chance.choice((2, 4)),
        }
    if chance.random() < 0.5:
        study["watch"] = [{"name": "slow", "when": "step > 5", "requeue": ["x@add=1"]}]
    if chance.random() < 0.5:
        study["round_size"] = chance.randint(1, 5)
    if chance.random() < 0.5:
        limits = {"runs": chance.randint(3, 14), "rounds": chance.randint(1, 4)}
        study["budget"] = dict(chance.sample(sorted(limits.items()), chance.randint(1, 2)))
    queue = [{"edits": [f"x@set={chance.randint(0, 40)}"], "reason": f"try {n}"} for n in range(chance.randint(0, 6))]
    return study, chance.random() < 0.8, queue


def ask_for_more(folder: Path, chance: random.Random) -> None:
    """What people, watch rules and `reproduce` may have put in the queue, and what submitted commands have used."""
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    record = StudyLedger(ledger, "toy")
    record.open("score", "max")
    ended = [run for run in record.runs(state="ended") if run.objective is not None]
    for n in range(chance.randint(0, 2)):
        record.propose(
            "person", [f"x@set={chance.randint(0, 40)}"], f"a wish {n}", parent=chance.choice((None, "best"))
        )
    for run in chance.sample(ended, min(len(ended), chance.randint(0, 2))):
        proposer = chance.choice(("watch", "again"))
        edits = ["x@set=29"] if proposer == "watch" else []
        record.propose(proposer, edits, f"{proposer} {run.id}", parent=run.id, source=f"{proposer}:{run.id}:1")
    if chance.random() < 0.2:
        jobs = StudyLedger(ledger, "toy.jobs")
        with ledger.write():
            round_ = jobs.open_round() or jobs.begin_round()
            jobs.plan(round=round_, proposal=None, proposer="job", parent=None, base="job", reason="", config_hash=hash_config({}),
                      devices=1, plan=RunPlan({}))  # fmt: skip
    ledger.close()


def random_options(folder: Path, chance: random.Random) -> RunOptions:
    ledger = LedgerCopy(folder / ".looplab" / "ledger.db")
    used = StudyLedger(ledger, "toy").usage()
    ledger.close()
    return RunOptions(
        rounds=chance.choice((None, None, used.rounds + 1, max(1, used.rounds))),
        runs=chance.choice((None, None, None, used.runs + chance.randint(1, 4))),
        continuous=chance.random() < 0.3,
        concurrency=chance.choice((None, 1, 3)),
        autopilot=chance.random() < 0.2,
    )


@pytest.mark.parametrize("seed", range(24))
def test_what_a_preview_shows_is_what_the_next_engine_plans_first(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    study, with_seed, queue = random_study(chance)
    folder = write_lab(tmp_path / "lab", study, seed=with_seed, queue=queue)
    for _ in range(4):
        if chance.random() < 0.6:
            ask_for_more(folder, chance)
        setup = set_up(folder, random_options(folder, chance))
        if setup.options.autopilot and chance.random() < 0.5:
            (folder / "proposals").mkdir(exist_ok=True)
            (folder / "proposals" / "next_config.json").write_text(json.dumps({"y": chance.randint(1, 4)}))
        found = look(setup)
        left = {planned.row.id for planned in found.unfinished}
        engine = engine_life(setup, drain_after=chance.randint(1, 6), kill_at=chance.choice((None, None, 2, 3)))
        if left:
            ledger = LedgerCopy(folder / ".looplab" / "ledger.db")
            runs = {
                run.id for run in StudyLedger(ledger, "toy").runs() if run.n <= max(p.row.n for p in found.unfinished)
            }
            assert left <= runs
            ledger.close()
        else:
            check_agreement(setup, found, engine)


# -- what deserves a test of its own


def judged_lab(folder: Path, **more: Any) -> Path:
    judge = {"baseline_seeds": 3, "replicates": 2, "max_replicates": 2}
    study = {**STUDY, "proposers": [{"queue": "queue.yaml"}], "judge": judge, "round_size": 4, **more}
    return write_lab(folder, study, queue=[{"edits": ["x@set=17"], "reason": "the best there is"}])


def test_replicates_that_a_drained_engine_owed_are_planned_by_the_next(tmp_path: Path) -> None:
    folder = judged_lab(tmp_path / "lab")
    engine_life(set_up(folder, RunOptions()), drain_after=4)  # the base with its three seeds, and the trial
    setup = set_up(folder, RunOptions())
    found = look(setup)
    assert not found.unfinished
    assert [(planned.row.role, planned.row.seed) for planned in found.runs] == [("replicate", 2), ("replicate", 3)]
    engine = engine_life(setup)
    check_agreement(setup, found, engine)
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    best = StudyLedger(ledger, "toy").best()
    assert best is not None
    assert (best.reason, best.verdict) == ("the best there is", "keep")


def test_a_judge_that_comes_later_judges_what_has_ended_before_anything_is_planned(tmp_path: Path) -> None:
    folder = judged_lab(tmp_path / "lab", judge=None)
    engine_life(set_up(folder, RunOptions()))
    judged_lab(folder)
    setup = set_up(folder, RunOptions())
    found = look(setup)
    assert [planned.row.proposer for planned in found.runs] == ["judge"] * 2
    check_agreement(setup, found, engine_life(setup))


def test_the_champion_may_be_run_again_under_another_name_while_an_engine_begins(tmp_path: Path) -> None:
    folder = judged_lab(tmp_path / "lab")
    engine_life(set_up(folder, RunOptions()))
    (folder / "renamed.json").write_text(json.dumps({"x": 17, "y": 1, "seed": 1}))
    setup = set_up(folder, RunOptions(cfgs=("renamed.json",)))
    engine_life(setup, kill_at=1)
    (unfinished,) = look(setup).unfinished
    assert unfinished.row.base == "renamed.json"
    engine_life(setup)
    assert not look(setup).unfinished


def test_an_agent_in_the_mix_is_not_asked(tmp_path: Path) -> None:
    agent = {"agent": {"cli": "command", "command": ["touch", str(tmp_path / "asked")]}}
    study = {**STUDY, "proposers": [{"search": {"sampler": "random"}}, agent], "round_size": 30}
    setup = set_up(write_lab(tmp_path / "lab", study), RunOptions())
    found = look(setup)
    (ask,) = found.asks
    assert {planned.row.proposer for planned in found.runs} == {"base", "search"}
    assert (ask.proposer, ask.cli) == ("agent", "command")
    assert ask.runs_at_most == 30 - len(found.runs) == found.undecided
    assert not (tmp_path / "asked").exists()


def test_an_answer_that_an_agent_gave_before_its_engine_died_is_planned(tmp_path: Path) -> None:
    agent = {"agent": {"cli": "command", "command": ["false"], "tries": 1}}
    folder = write_lab(tmp_path / "lab", {**STUDY, "proposers": [agent]})
    engine_life(set_up(folder, RunOptions()), drain_after=1)
    answer = json.dumps({"proposals": [{"edits": ["x@set=9"], "reason": "as I said"}]})
    (folder / "agent_runs").mkdir(exist_ok=True)
    (folder / "agent_runs" / "call.jsonl").write_text(json.dumps({"type": "looplab.end", "ok": True, "text": answer}))
    ledger = Ledger(folder / ".looplab" / "ledger.db")
    with ledger.write():
        StudyLedger(ledger, "toy").record_agent(
            AgentAskedEvent(call="call", log="call.jsonl", n=1, attempt=1, parent=None, cli="command")
        )
    ledger.close()
    found = look(set_up(folder, RunOptions()))
    assert [(planned.row.proposer, planned.plan.edits) for planned in found.runs] == [("agent", ("x@set=9",))]


def test_a_preview_while_runs_are_unfinished_says_when_more_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InstantExecutor, "traits", ExecutorTraits(prequeue_depth=1), raising=False)
    queue = [{"edits": [f"x@set={n}"], "reason": f"try {n}"} for n in range(10, 18)]
    folder = write_lab(
        tmp_path / "lab", {**STUDY, "proposers": [{"queue": "queue.yaml"}], "round_size": 5}, queue=queue
    )
    # Short runs are queued one behind the other: when the first ends, two more have been handed over.
    engine_life(set_up(folder, RunOptions(concurrency=1)), drain_after=1)
    found = look(set_up(folder, RunOptions(concurrency=1)))
    assert [planned.row.reason for planned in found.unfinished] == ["try 12", "try 13"]
    assert found.why_none == "the next round is planned when they have ended (4 proposals are waiting)"
    free = look(set_up(folder, RunOptions(concurrency=4, continuous=True)))
    assert [planned.row.reason for planned in free.runs] == ["try 14", "try 15"]
    assert [planned.slot.name for planned in (*free.unfinished, *free.runs)] == ["cpu0", "cpu1", "cpu2", "cpu3"]


def test_a_plug_in_cannot_have_a_name_that_looplab_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins._registered, "proposers", {"watch": lambda context: None})
    folder = write_lab(tmp_path / "lab", {**STUDY, "proposers": [{"watch": {}}]})
    with pytest.raises(LabError, match="cannot have the name 'watch'"):
        look(set_up(folder, RunOptions()))
