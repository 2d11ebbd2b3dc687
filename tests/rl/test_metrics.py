"""The metrics schema: complete, documented, extensible, and convertible to Parquet."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from looplab.errors import LabError
from looplab.rl import metrics
from looplab.rl.metrics import (
    PHASE_TIMES,
    SCHEMA,
    MetricField,
    MetricsWriter,
    check_row,
    exact_rows,
    fields_by_name,
    to_parquet,
)
from looplab.trainkit.log import Logger

DOCS = Path(__file__).parents[2] / "docs" / "metrics-schema.md"


def test_the_docs_page_is_up_to_date() -> None:
    assert DOCS.read_text() == metrics.render_docs(), "run: python -m looplab.rl.metrics > docs/metrics-schema.md"


def test_every_field_is_declared_once_with_a_meaning_and_a_version() -> None:
    names = [field.name for field in SCHEMA]
    assert len(names) == len(set(names))
    assert all(field.meaning.endswith(".") and 1 <= field.since <= metrics.SCHEMA_VERSION for field in SCHEMA)
    known = {field.name: field for field in SCHEMA}
    assert set(PHASE_TIMES) <= known.keys()
    assert not any(known[name].exact for name in (*PHASE_TIMES, "time", "steps_per_second", "replay_sample_time_ms"))


def test_a_row_with_an_undeclared_field_or_a_wrong_type_is_refused() -> None:
    check_row({"entropy": 0.5, "episodes": 3.0, "model_compiled": True, "gpu_util_last": None, "value_loss": math.nan})
    check_row({"entropy": np.float32(0.5), "global_step": np.int64(3)})
    for row in ({"entrpy": 0.5}, {"entropy": "high"}, {"episodes": 1.5}, {"episodes": math.nan}, {"model_compiled": 2}):
        with pytest.raises(LabError, match=next(iter(row))):
            check_row(row)


LAP = MetricField("env_laps", "int", "laps", "Laps.", info="lap", reduce="count")


def test_a_recipe_declares_fields_of_its_own(tmp_path: Path) -> None:
    check_row({"env_laps": 1}, fields_by_name([LAP]))
    with pytest.raises(LabError, match="env_laps must be of type int"):
        check_row({"env_laps": 1.5}, fields_by_name([LAP]))
    with pytest.raises(LabError, match=r"extra_fields=\[MetricField\('env_laps', type, unit, meaning\)\]"):
        check_row({"env_laps": 1})
    with pytest.raises(LabError, match="'entropy' is declared twice"):
        fields_by_name([MetricField("entropy", "float", "", "Mine.")])
    with MetricsWriter(Logger(tmp_path / "metrics.jsonl"), extra_fields=[LAP]) as writer:
        writer.log({"env_laps": 3.0}, 1)
    to_parquet(tmp_path / "metrics.jsonl", tmp_path / "metrics.parquet", extra_fields=[LAP])
    assert str(pq.read_table(tmp_path / "metrics.parquet").schema.field("env_laps").type) == "int64"


def learner(kind: str, envs: Any) -> Any:
    from looplab.rl.impala import Impala, ImpalaSettings
    from looplab.rl.policies import make_policy
    from looplab.rl.ppo import Ppo, PpoSettings

    policy = make_policy(envs.single_observation_space, envs.single_action_space)
    return Ppo(policy, PpoSettings(epochs=2), 0) if kind == "ppo" else Impala(policy, ImpalaSettings())


@pytest.mark.parametrize("kind", ["ppo", "impala"])
def test_every_field_of_a_real_training_is_declared(tmp_path: Path, kind: str) -> None:
    from looplab.rl.replay import PrioritizedReplay
    from looplab.rl.runner import Runner, TrainingPlan

    torch.set_num_threads(1)

    def train(out: Path) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
        replay = PrioritizedReplay(entries=500) if kind == "impala" else None
        with MetricsWriter(Logger(out / "metrics.jsonl")) as writer:
            plan = TrainingPlan(total_steps=200, rollout=32, replay_batch=16)
            Runner(
                envs, learner(kind, envs), plan, out_dir=out, metrics=writer, seed=0, replay=replay, echo=lambda _: None
            ).run()
        envs.close()
        return exact_rows(out / "metrics.jsonl")

    one, other = train(tmp_path / "one"), train(tmp_path / "other")
    assert one == other
    assert len(one) >= 3
    assert "learn_ms" not in one[0]
    assert "learn_ms" in next(metrics.read_rows(tmp_path / "one" / "metrics.jsonl"))


def test_rows_are_written_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(Logger(tmp_path / "metrics.jsonl"), tensorboard=tmp_path / "board") as writer:
        for step in (10, 20):
            writer.log({"entropy": step / 100, "gpu_util_last": None}, step)
        with pytest.raises(LabError):
            writer.log({"entrpy": 1.0}, 30)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert events.Tags()["scalars"] == ["entropy"]
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("entropy")] == [(10, 0.1), (20, 0.2)]
    rows = list(metrics.read_rows(tmp_path / "metrics.jsonl"))
    assert [(row["step"], row["entropy"], len(row)) for row in rows] == [(10, 0.1, 3), (20, 0.2, 3)]


def test_rows_are_written_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    class Run:
        def log(self, row: dict[str, float], step: int) -> None:
            logged.append((row, step))

        def finish(self) -> None:
            logged.append("finished")

    class Fake:
        @staticmethod
        def init(**how: Any) -> Run:
            logged.append(how)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Fake)
    with MetricsWriter(Logger(tmp_path / "metrics.jsonl"), wandb={"mode": "offline"}) as writer:
        writer.log({"entropy": 1, "gpu_util_last": None}, 5)
    assert logged == [{"mode": "offline"}, ({"entropy": 1.0}, 5), "finished"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LabError, match="pip install"):
        MetricsWriter(Logger(tmp_path / "metrics.jsonl"), wandb={})


def write(path: Path, *rows: str) -> Path:
    path.write_text("".join(rows))
    return path


def test_parquet_has_the_types_of_the_schema_and_null_for_missing_values(tmp_path: Path) -> None:
    source = tmp_path / "metrics.jsonl"
    with Logger(source) as log:
        log.log({"episodes": 3.0, "entropy": math.nan, "model_compiled": True}, step=1)
        log.log({"entropy": math.inf, "own/name": 7, "zoo": "ape"}, step=2)
    assert to_parquet(source, tmp_path / "m.parquet") == 2
    table = pq.read_table(tmp_path / "m.parquet")
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds == {"step": "int64", "time": "double", "episodes": "int64", "entropy": "double",
                     "model_compiled": "bool", "own/name": "double", "zoo": "string"}  # fmt: skip
    columns = table.to_pydict()
    assert columns["step"] == [1, 2]
    assert columns["episodes"] == [3, None]
    assert columns["model_compiled"] == [True, None]
    assert columns["zoo"] == [None, "ape"]
    assert math.isnan(columns["entropy"][0])
    assert columns["entropy"][1] == math.inf
    assert table.schema.metadata[b"looplab.metrics.schema"] == str(metrics.SCHEMA_VERSION).encode()


def test_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    source = write(
        tmp_path / "m.jsonl", '{"step": 1, "entropy": 0.5}\n', '{"step": 2, "ent\n', '{"step": 3}\n', '{"step": 4, "e'
    )
    assert to_parquet(source, tmp_path / "m.parquet") == 2
    assert pq.read_table(tmp_path / "m.parquet").to_pydict() == {"step": [1, 3], "entropy": [0.5, None]}


def test_converting_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PARQUET_BATCH_ROWS", 7)  # several row groups
    rows = [json.dumps({"step": n, "time": n / 7, "entropy": n * 0.1}) + "\n" for n in range(50)]
    source = write(tmp_path / "m.jsonl", *rows)
    target = tmp_path / "m.parquet"
    contents = []
    for _ in range(2):
        assert to_parquet(source, target) == 50
        contents.append(target.read_bytes())
    assert contents[0] == contents[1]
    assert pq.read_table(target)["entropy"].to_pylist() == [n * 0.1 for n in range(50)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.jsonl", "m.parquet"]


def test_an_empty_file_becomes_an_empty_table_and_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert to_parquet(write(tmp_path / "m.jsonl", ""), tmp_path / "m.parquet") == 0
    assert pq.read_table(tmp_path / "m.parquet").num_rows == 0
    with pytest.raises(LabError):
        to_parquet(tmp_path / "nothing.jsonl", tmp_path / "n.parquet")
