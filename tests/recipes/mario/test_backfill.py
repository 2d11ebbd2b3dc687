"""Reconstruction of missing step counts: from known factors only, with an audit field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

import looplab.recipes.mario.backfill as script
from looplab.errors import LabError
from looplab.recipes.mario.backfill import AUDIT, backfill


def old_checkpoint(path: Path, update: int = 8000, step: int | None = 0, envs: int | None = 10, **more: Any) -> Path:
    """Write the JSON file of an old checkpoint."""
    content: dict[str, Any] = {"version": 1, "world": 1, "name": "Märio"}
    if envs is not None:
        content["vector_env"] = {"num_envs": envs, "base_seed": 42}
    content |= {"save_state": {"global_step": step, "global_update": update, "type": "checkpoint"}, **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False))
    return path


def state(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())["save_state"]
    return content


def metrics(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"update": 9, "global_st')


def test_the_step_is_the_product_and_the_audit_field_explains_it(tmp_path: Path) -> None:
    path = old_checkpoint(tmp_path / "run" / "a.json")
    before = path.read_bytes()
    (result,) = backfill(tmp_path, rollout_steps=128)
    assert (result.path, result.step) == (path, 8000 * 10 * 128)
    assert state(path)["global_step"] == 10_240_000
    audit = state(path)[AUDIT]
    assert audit.pop("at").endswith("Z")
    assert audit == {
        "formula": "global_step = global_update × num_envs × rollout_steps",
        "global_update": 8000,
        "num_envs": 10,
        "rollout_steps": 128,
        "from": {"num_envs": "vector_env.num_envs", "rollout_steps": "--rollout-steps"},
        "before": 0,
    }
    assert (tmp_path / "run" / "a.json.bak").read_bytes() == before
    assert "Märio" in path.read_text()
    after = path.read_bytes()
    assert backfill(tmp_path, rollout_steps=64) == []  # nothing left to do
    assert path.read_bytes() == after
    assert (tmp_path / "run" / "a.json.bak").read_bytes() == before


def test_nothing_is_assumed(tmp_path: Path) -> None:
    path = old_checkpoint(tmp_path / "a.json", envs=None)
    before = path.read_bytes()
    (result,) = backfill(tmp_path)
    assert result.step is None
    assert "cannot find num_envs and rollout_steps (pass --num-envs and --rollout-steps)" in result.explanation
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.json"]


def test_a_step_reconstructed_from_an_assumption_is_reconstructed_again(tmp_path: Path) -> None:
    path = old_checkpoint(
        tmp_path / "a.json",
        step=5_120_000,
        reconstructed_step_source={"method": "assumed_rollout_steps", "rollout_steps": 64},
    )
    (result,) = backfill(tmp_path)
    assert result.step is None
    (result,) = backfill(tmp_path, rollout_steps=128)
    assert result.step == state(path)["global_step"] == 10_240_000
    assert state(path)[AUDIT]["before"] == 5_120_000


def test_factors_come_from_the_file_or_the_nearest_metrics(tmp_path: Path) -> None:
    own = old_checkpoint(tmp_path / "own" / "a.json", 5, config={"train": {"rollout_steps": 32}})
    named = old_checkpoint(tmp_path / "named" / "deep" / "a.json", 5, envs=None)
    metrics(tmp_path / "named" / "metrics.jsonl", {"num_envs": 4, "rollout_steps": 16})
    grown = old_checkpoint(tmp_path / "grown" / "a.json", 5)
    metrics(
        tmp_path / "grown" / "metrics.jsonl",
        {"update": 100, "global_step": 64_640},
        {"monitor": {}},
        {"update": 200, "global_step": 128_640},
    )
    alone = old_checkpoint(tmp_path / "alone" / "a.json", 5, envs=None)
    metrics(
        tmp_path / "alone" / "metrics.jsonl",
        {"update": 1, "global_step": 512},
        {"update": 2, "global_step": 1024},
        {"update": 1, "global_step": 512},
    )
    steps = {result.path: result.step for result in backfill(tmp_path)}
    assert steps == {own: 5 * 10 * 32, named: 5 * 4 * 16, grown: 5 * 640, alone: 5 * 512}
    assert state(grown)[AUDIT]["rollout_steps"] == 64
    assert state(alone)[AUDIT]["steps_per_update"] == 512


@pytest.mark.parametrize(
    ("given", "row", "message"),
    [
        ({"num_envs": 16, "rollout_steps": 8}, {}, "the sources of num_envs disagree: 10 from vector_env.num_envs, 16 from --num-envs"),
        ({"rollout_steps": 8}, {"rollout_steps": 9}, "the sources of rollout_steps disagree"),
        ({"rollout_steps": 8}, {"update": 2, "global_step": 200}, "an update has 100 steps according to"),
        ({}, {"update": 2, "global_step": 105}, "an update has 5 steps according to"),
    ],
)  # fmt: skip
def test_where_two_sources_disagree_the_file_is_left_alone(
    tmp_path: Path, given: dict[str, int], row: dict[str, Any], message: str
) -> None:
    path = old_checkpoint(tmp_path / "a.json")
    metrics(tmp_path / "metrics.jsonl", {"update": 1, "global_step": 100}, row)
    before = path.read_bytes()
    (result,) = backfill(tmp_path, **given)
    assert result.step is None
    assert message in result.explanation
    assert path.read_bytes() == before


def test_files_with_a_step_and_other_files_are_not_touched(tmp_path: Path) -> None:
    old_checkpoint(tmp_path / "counted.json", step=77)
    old_checkpoint(tmp_path / "new.json", update=0)
    (tmp_path / "torn.json").write_text('{"save_state": {')
    (tmp_path / "list.json").write_text("[1]")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert backfill(tmp_path, 1, 1) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_counts_at_the_top_level_are_found_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"global_update": 3, "num_envs": 2, "rollout_steps": 5}')
    backfill(tmp_path)
    assert json.loads((tmp_path / "a.json").read_text())["global_step"] == 30


def test_dry_run_prints_what_the_script_then_does(tmp_path: Path) -> None:
    old_checkpoint(tmp_path / "a.json")
    old_checkpoint(tmp_path / "b.json", envs=None)

    def command(*flags: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, script.__file__, str(tmp_path), "--rollout-steps", "128", *flags]
        return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)

    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    dry = command("--dry-run")
    assert "a.json: global_step would be 10,240,000" in dry.stdout
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before
    half = command()
    assert half.returncode == 2
    assert "cannot find num_envs (pass --num-envs)" in half.stderr
    assert "1 of 2 checkpoints" in half.stdout
    rest = command("--num-envs", "4")
    assert rest.returncode == 0, rest.stderr
    assert state(tmp_path / "b.json")["global_step"] == 8000 * 4 * 128
    assert state(tmp_path / "a.json")["global_step"] == 8000 * 10 * 128


def test_a_missing_folder_and_a_factor_below_one_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no such folder"):
        backfill(tmp_path / "missing")
    with pytest.raises(LabError, match="num_envs must be at least 1"):
        backfill(tmp_path, num_envs=0)
