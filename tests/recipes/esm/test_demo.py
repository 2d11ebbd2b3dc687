"""The demo: a gain where there is something to steer, none where there is not, and an honest last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import looplab
from looplab.errors import LabError
from looplab.recipes.esm.esm import demo

RECIPE = Path(looplab.__file__).parent / "recipes" / "esm"


def last_line(*tokenizer: str) -> dict[str, float]:
    command = [sys.executable, str(RECIPE / "run.py"), "demo", *tokenizer]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_toy_is_mended_where_it_can_be_and_nowhere_else(tmp_path: Path) -> None:
    found = last_line("--backend", "toy", "--quick", "--run-dir", str(tmp_path))
    assert found["ci_low"] > 0.1
    assert found["no_memory"] == found["greedy"]
    assert abs(found["random_direction"] - found["greedy"]) < 0.1
    assert found["unsteerable_ci_low"] <= 0 <= found["unsteerable_ci_high"]
    assert found["test_reads"] == 1
    assert (tmp_path / "steerable" / "test_reads.jsonl").is_file()


def test_a_missing_model_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"tiny\.train"):
        demo.show(tmp_path, "transformers", tmp_path, quick=True)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tiny_model_is_mended_where_it_can_be_and_nowhere_else() -> None:
    pytest.importorskip("transformers")
    found = last_line()
    assert found["ci_low"] > 0
    assert found["no_memory_identical"]
    assert found["unsteerable_ci_low"] <= 0.01
