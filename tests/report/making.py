"""Synthetic studies: run folders and ledger rows, written with the same calls as the engine's."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config import paths
from looplab.config.files import dump_json
from looplab.config.lab import StudyConfig, load_lab
from looplab.launch.base import Exit
from looplab.ledger.ledger import Ledger
from looplab.ledger.plan import RunPlan
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.judging import StudyJudge, evidence_of
from looplab.measure.run_metrics import RunMetrics, summarise
from looplab.runs import folder

BASE: dict[str, Any] = {
    "train": {"learning_rate": 0.001, "batch_size": 64, "optimizer": "adamw", "weight_decay": 0.01, "warmup": True},
    "model": {"width": 256, "dropout": 0.1, "activation": "gelu"},
    "seed": 1,
    "data": {"path": "data/train.bin"},
}
LAB = """\
study: tiny
launch: {command: ["{python}", train.py]}
base: configs/base.json
objective: {metric: eval/loss, goal: min, at: last}
knobs:
  train.learning_rate: {type: float, low: 1e-6, high: 1, log: true}
  train.batch_size: {choices: [16, 32, 64, 128]}
  train.optimizer: {choices: [adamw, muon, sgd]}
  train.weight_decay: {type: float, low: 0, high: 0.3}
  train.warmup: {type: bool}
  model.width: {type: int, low: 32, high: 2048}
  model.dropout: {type: float, low: 0, high: 0.9}
  model.activation: {choices: [gelu, relu]}
budget: {runs: 400, wall: 10h}
"""
JUDGED = (
    LAB
    + """\
judge: {baseline_seeds: 4, replicates: 3, max_replicates: 6, confirm: false}
holdout: {metric: eval/secret, budget: 5}
"""
)
STARTED = time.time() - 86_400


@dataclass
class Maker:
    """A study that grows run by run."""

    lab: Path
    study: StudyConfig
    ledger: Ledger
    record: StudyLedger
    round: int = 0
    clock: float = STARTED

    @property
    def outputs(self) -> Path:
        return folder.study_folder(self.lab, self.study.name)

    def new_round(self) -> None:
        with self.ledger.write():
            if self.round:
                self.record.close_round(self.round)
            self.round = self.record.begin_round()

    def plan(
        self, config: dict[str, Any], parent: RunRow | None = None, proposer: str = "queue", reason: str = "why not",
        hypothesis: str = "", twin: RunRow | None = None, role: str | None = None,
    ) -> RunRow:  # fmt: skip
        """Plan a run; with a `twin`, a repetition of it under the config's seed."""
        if not self.round:
            self.new_round()
        parent_config = BASE if parent is None else folder.read_json(self.outputs / parent.id, "config.json")
        plan = RunPlan(
            config,
            diff_parent=paths.diff(parent_config, config),
            diff_base=paths.diff(BASE, config),
            hypothesis=hypothesis,
        )
        with self.ledger.write():
            return self.record.plan(
                round=self.round, proposal=None, proposer=proposer, parent=parent.id if parent else None,
                base="configs/base.json", reason=reason, config_hash=str(hash(json.dumps(config))), devices=1, plan=plan,
                role=role or ("base" if proposer == "base" else "replicate" if twin else "trial"),
                point=str(hash(json.dumps({key: value for key, value in config.items() if key != "seed"}))),
                seed=config.get("seed"), twin=twin.id if twin else None,
            )  # fmt: skip

    def launch(self, run: RunRow) -> Path:
        plan = self.record.plan_of(run.id)
        assert plan is not None
        about = {
            "id": run.id, "n": run.n, "hypothesis": plan.hypothesis, "notes": list(plan.notes),
            "changes": {"parent": plan.diff_parent, "base": plan.diff_base},
        }  # fmt: skip
        files = {"run.json": dump_json(about), "config.json": dump_json(plan.config)}
        run_dir = self.outputs / run.id
        hashes = folder.create(run_dir, files)
        with self.ledger.write():
            self.record.launched(run.id, "cpu0", hashes)
            self.record.started(run.id, 1, self.clock, host="here")
        return run_dir

    def end(
        self, run: RunRow, rows: list[dict[str, float]], log: str = "", code: int = 0, reason: str | None = None
    ) -> RunRow:
        run_dir = self.outputs / run.id
        (run_dir / "record/train.log").write_text(log)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        started, self.clock = self.clock, self.clock + 40 + 3 * len(rows) / 10
        exit_ = Exit(code, reason=reason, started=started, ended=self.clock)
        summary, status, objective = summarise(
            run, self.study, RunMetrics(self.study, run_dir), exit_, lab=run_dir, run_dir=run_dir
        )
        folder.write_json(run_dir / "record/summary.json", summary)
        best = self.record.best()
        with self.ledger.write():
            self.record.ended(
                run.id, status=status, code=code, signal=None, started=started, ended=self.clock, objective=objective,
                files={},
            )  # fmt: skip
            if objective is not None and (best is None or best.objective is None or objective < best.objective):
                self.record.set_best(run.id, objective)
        return self.record.run(run.id)

    def train(self, config: dict[str, Any] = BASE, losses: list[float] | None = None, **plan: Any) -> RunRow:
        """Plan, launch and end a run that measured these losses."""
        run = self.plan(config, **plan)
        self.launch(run)
        losses = [3 / (step + 1) for step in range(5)] if losses is None else losses
        return self.end(run, [{"step": step, "eval/loss": loss} for step, loss in enumerate(losses)])

    def fail(self, log: str, config: dict[str, Any] = BASE, **plan: Any) -> RunRow:
        run = self.plan(config, **plan)
        self.launch(run)
        return self.end(run, [], log, 1)

    def repeat(self, first: RunRow, losses: list[float]) -> list[RunRow]:
        """Add replicates of a run with these losses, each under the next seed."""
        config = folder.read_json(self.outputs / first.id, "config.json")
        return [
            self.train({**config, "seed": config["seed"] + n}, [3.0, loss], parent=first, proposer="judge", twin=first,
                       reason=f"replicate {n} of {len(losses)}")
            for n, loss in enumerate(losses, 1)
        ]  # fmt: skip

    def judge(self) -> None:
        """Let the study's judge evaluate all ended runs."""
        study_judge = StudyJudge(self.study, self.record, self.outputs)
        study_judge.load()
        with self.ledger.write():
            judgement = study_judge.evaluate()
            assert judgement is not None
            for run, verdict, evidence in evidence_of(judgement, None):
                self.record.judged(run, verdict, evidence, {})
            if judgement.champion is not None:
                self.record.set_best(judgement.champion, self.record.run(judgement.champion).objective or 0.0)

    def reject(self, edit: str, message: str, reason: str = "a try") -> None:
        with self.ledger.write():
            id_ = self.record.propose("agent", [edit], reason, parent="best")
            assert id_ is not None
            self.record.reject(id_, [{"key": edit.partition("@")[0], "rule": "knob range", "message": message}])


def edited(**changes: Any) -> dict[str, Any]:
    """Return the base with some leaves changed: `edited(model__width=64)`."""
    config = json.loads(json.dumps(BASE))
    for key, value in changes.items():
        paths.set_(config, tuple(key.split("__")), value)
    return config


def make(lab: Path, text: str = LAB) -> Maker:
    (lab / "configs").mkdir(parents=True, exist_ok=True)
    (lab / "lab.yaml").write_text(text)
    (lab / "configs/base.json").write_text(json.dumps(BASE))
    loaded = load_lab(lab)
    study = next(iter(loaded.studies.values()))
    ledger = Ledger(loaded.ledger_path)
    record = StudyLedger(ledger, study.name)
    record.open(study.objective.metric if study.objective else None, study.objective.goal if study.objective else "min")
    folder.make_study_folder(folder.study_folder(lab, study.name))
    return Maker(lab, study, ledger, record)


TRACEBACK = """\
step 20 loss 2.31
Traceback (most recent call last):
  File "train.py", line 212, in <module>
    main()
  File "train.py", line 180, in main
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {mb} MiB.
"""
REASONS = {
    "search": ["TPE, expected improvement", "TPE, start-up draw"],
    "agent": [
        "the loss plateaus after warm-up; a larger rate with more decay should leave it",
        "muon made the last three leaders, the others are all adamw",
        "width has not been tried above 512 at this rate",
    ],
    "rules": ["grad_norm below 0.1 for 200 steps: rate x1.5"],
}


def fill(maker: Maker, runs: int, seed: int = 0, points: int = 120) -> None:
    """Make a study like a night of search: improving, with crashes, divergence and timeouts."""
    chance = random.Random(seed)
    best: tuple[float, dict[str, Any]] | None = None
    for n in range(runs):
        if n % 8 == 0:
            maker.new_round()
        if n == 0:
            config, proposer, reason = json.loads(json.dumps(BASE)), "base", "base config configs/base.json"
        else:
            proposer = chance.choices(["search", "agent", "rules"], [6, 3, 1])[0]
            reason = chance.choice(REASONS[proposer])
            config = json.loads(json.dumps(best[1] if best and chance.random() < 0.6 else BASE))
            _change(config, chance)
        parent = maker.record.best() if n and chance.random() < 0.6 else None
        run = maker.plan(config, parent, proposer, reason)
        maker.launch(run)
        value = _quality(config) + chance.gauss(0, 0.02)
        fate = chance.random()
        if n and fate < 0.05:
            maker.end(run, _curve(chance, value, config, points // 4), TRACEBACK.format(mb=chance.randrange(4000)), 1)
        elif n and fate < 0.07:
            maker.end(run, _curve(chance, value, config, points // 2), "still slow\n", 143, "timeout")
        else:
            url = f"wandb: View run at https://wandb.ai/lab/tiny/runs/{run.id.replace('-', '')}\n"
            maker.end(run, _curve(chance, value, config, points), url if n % 2 else "")
            if best is None or value < best[0]:
                best = (value, config)
        if n % 13 == 5:
            maker.reject("train.learning_rate@set=4", "train.learning_rate: 4 is above 1; the nearest legal value is 1")


def _change(config: dict[str, Any], chance: random.Random) -> None:
    for _ in range(chance.randint(1, 3)):
        match chance.randrange(7):
            case 0 | 1:
                config["train"]["learning_rate"] = float(f"{10 ** chance.uniform(-5, -0.5):.3g}")
            case 2:
                config["train"]["batch_size"] = chance.choice([16, 32, 64, 128])
            case 3:
                config["train"]["optimizer"] = chance.choice(["adamw", "muon", "sgd"])
            case 4:
                config["model"]["width"] = chance.choice([64, 128, 256, 512, 1024])
            case 5:
                config["model"]["dropout"] = round(chance.uniform(0, 0.5), 2)
            case _:
                config["train"]["weight_decay"] = round(chance.uniform(0, 0.2), 3)
    config["seed"] = chance.randrange(5)


def _quality(config: dict[str, Any]) -> float:
    rate = math.log10(config["train"]["learning_rate"])
    optimizer = {"adamw": 0.05, "muon": 0.0, "sgd": 0.35}[config["train"]["optimizer"]]
    return 1.1 + 0.18 * (rate + 2.6) ** 2 + optimizer + 0.12 * abs(math.log2(config["model"]["width"] / 512))


def _curve(chance: random.Random, value: float, config: dict[str, Any], points: int) -> list[dict[str, float]]:
    rows = []
    for step in range(points):
        part = step / max(1, points - 1)
        fall = math.exp(-5 * part) - math.exp(-5)
        loss = value + (4 - value) * fall + chance.gauss(0, 0.02)
        rows.append(
            {
                "step": step * 50,
                "train/loss": loss - 0.1 * part + chance.gauss(0, 0.05),
                "eval/loss": value if part == 1 else loss,
                "eval/accuracy": 1 / (1 + loss),
                "grad_norm": abs(chance.gauss(1, 0.2)) * (20 if chance.random() < 0.01 else 1),
                "lr": config["train"]["learning_rate"] * (1 - part),
            }
        )
    return rows


def fill_judged(maker: Maker, challengers: int, seed: int = 0) -> None:
    """Make a study in which the base and some challengers were replicated and judged."""
    chance = random.Random(seed)
    base = maker.train(BASE, [3.0, 2.0], proposer="base", reason="base config configs/base.json")
    maker.repeat(base, [2.0 + chance.gauss(0, 0.02) for _ in range(7)])
    maker.judge()
    for n in range(challengers):
        if n % 6 == 0:
            maker.new_round()
        gain = chance.choice([-0.3, -0.1, 0.0, 0.0, 0.02, 0.3 if n > 3 else 0.05])
        config = edited(model__width=32 + n, model__dropout=round(chance.uniform(0, 0.5), 2))
        by = chance.choice(["search", "agent", "rules"])
        first = maker.train(config, [3.0, 2.0 - gain + chance.gauss(0, 0.02)], proposer=by, reason=REASONS[by][0])
        maker.judge()
        if maker.record.run(first.id).verdict is None:
            maker.repeat(first, [2.0 - gain + chance.gauss(0, 0.02) for _ in range(7)])
            maker.judge()
