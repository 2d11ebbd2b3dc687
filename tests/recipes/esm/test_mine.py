"""Mining: contrast by the rules, candidates that do not depend on batches, kills that cost nothing but time."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import PATIENCE_S

import looplab
from looplab.errors import LabError
from looplab.recipes.esm.esm import files, mine
from looplab.recipes.esm.esm.backends.toy import ToyBackend
from looplab.recipes.esm.esm.config import EsmSettings, MineSettings
from looplab.recipes.esm.esm.data import Example, splits
from looplab.recipes.esm.esm.mine import MinedRollout

RUN = Path(looplab.__file__).parent / "recipes" / "esm" / "run.py"
LAYERS = (0, 3)


def quiet(text: str) -> None:
    pass


def rollout(k: int, correct: bool, reward: float, *states: float) -> MinedRollout:
    made = [np.full((len(LAYERS), 4), state, np.float32) for state in states]
    return MinedRollout(k, "", 10, None, correct, reward, made)


def test_a_pair_is_the_difference_of_the_means_at_one_point() -> None:
    several = [rollout(0, True, 1.0, 1, 2), rollout(1, True, 0.8, 3, 4), rollout(2, False, -0.2, 9)]
    found = list(mine.contrast_pairs(several, MineSettings(), LAYERS))
    assert [(pair.m, pair.layer) for pair in found] == [(1, 0), (1, 3)]  # the wrong one has no second point
    pair = found[0]
    assert pair.right.tolist() == [2.0] * 4
    assert pair.wrong.tolist() == [9.0] * 4
    assert pair.quality == pytest.approx(0.9 + 0.2)
    assert (pair.n_pos, pair.n_neg) == (2, 1)


def test_positives_are_the_best_correct_and_negatives_the_worst_incorrect_rollouts() -> None:
    several = [rollout(k, k < 4, (k < 4) - k / 100, 1.0) for k in range(8)]
    right, wrong = mine.contrast(several, MineSettings(K_pos=2, K_neg=2))
    assert [one.k for one in right] == [0, 1]
    assert [one.k for one in wrong] == [7, 6]


def test_equal_states_have_no_direction() -> None:
    several = [rollout(0, True, 1.0, 5, 5), rollout(1, False, 0.0, 5, 7)]
    assert {pair.m for pair in mine.contrast_pairs(several, MineSettings(), LAYERS)} == {2}


def test_a_question_without_contrast_is_skipped_unless_configured() -> None:
    several = [rollout(0, True, 1.0, 1), rollout(1, True, 0.9, 2)]
    assert not list(mine.contrast_pairs(several, MineSettings(), LAYERS))
    assert list(mine.contrast_pairs(several, MineSettings(require_correct_and_incorrect=False), LAYERS))


def test_questions_with_too_few_correct_rollouts_are_skipped() -> None:
    several = [rollout(0, True, 1.0, 1), rollout(1, False, 0.0, 2)]
    assert list(mine.contrast_pairs(several, MineSettings(min_correct_rollouts=1), LAYERS))
    assert not list(mine.contrast_pairs(several, MineSettings(min_correct_rollouts=2), LAYERS))


def test_the_reference_solution_replaces_missing_correct_rollouts() -> None:
    several = [rollout(0, False, 0.0, 1), rollout(-1, True, 1.0, 3)]
    assert not list(mine.contrast_pairs(several, MineSettings(), LAYERS))
    for source in ("gold", "rollout_or_gold"):
        assert list(mine.contrast_pairs(several, MineSettings(pos_source=source), LAYERS))


def test_rollouts_of_a_question_do_not_depend_on_its_neighbours(toy: Callable[..., EsmSettings]) -> None:
    settings = toy()
    examples = splits(settings.task).train[:6]
    together = mine.sample_rollouts(ToyBackend(), settings, examples, LAYERS)
    for place, example in enumerate(examples):
        alone = mine.sample_rollouts(ToyBackend(), settings, [example], LAYERS)[0]
        assert [one.text for one in alone] == [one.text for one in together[place]]
        assert len({one.text for one in alone}) > 1


def test_hidden_states_equal_those_of_a_fresh_prefill(toy: Callable[..., EsmSettings]) -> None:
    settings = toy()
    example = splits(settings.task).train[0]
    one = mine.sample_rollouts(ToyBackend(), settings, [example], LAYERS)[0][0]
    prefix = example.question + "\n\n" + one.text[: one.text.index("\n\n") + 2]
    fresh = ToyBackend().start_session([prefix], [0]).hidden_states([0], LAYERS)[0]
    assert np.allclose(one.states[0], fresh)


def test_a_reference_solution_is_read_segment_by_segment(toy: Callable[..., EsmSettings]) -> None:
    settings = toy({"offline_mine.pos_source": "gold"})
    example = Example(
        "x", "2 and 3 and 4 birds. How many?", "9", "number", solution="Mind: slow.\n\n2+3=5\n\n5+4=9\n\n#### 9"
    )
    found = mine.sample_rollouts(ToyBackend(), settings, [example], LAYERS)[0]
    gold = next(one for one in found if one.k == -1)
    assert len(gold.states) == 3
    fresh = ToyBackend().start_session([example.question + "\n\nMind: slow.\n\n"], [0]).hidden_states([0], LAYERS)[0]
    assert np.allclose(gold.states[0], fresh)


def test_the_candidates_are_the_best_pairs_and_ties_go_by_order(
    toy: Callable[..., EsmSettings], tmp_path: Path
) -> None:
    settings = toy({"offline_mine.keep_top_C": 7, "offline_mine.eta0": 0.0, "offline_mine.candidate_layers": [1, 3]})
    examples = splits(settings.task).train
    counts = mine.run(settings, ToyBackend(), examples, tmp_path, quiet)
    rows = files.read_jsonl(tmp_path / "mine" / "candidates.jsonl")
    assert counts["kept"] == 7
    assert len(rows) == 14  # each pair from its wrong and its right side
    assert {row["vector_path"] for row in rows if row["entry_type"] == "right"} == {None}
    order = {example.id: place for place, example in enumerate(examples)}
    ranks = [(-r["quality"], order[r["example_id"]], r["control_point_m"], r["layer"]) for r in rows[::2]]
    assert ranks == sorted(ranks)
    keys = files.read_arrays(tmp_path / "mine" / "keys.safetensors")
    vectors = files.read_arrays(tmp_path / "mine" / "vectors.safetensors")
    wrong, right = rows[0]["tool_id"], rows[1]["tool_id"]
    assert np.allclose(vectors[wrong], keys[right] - keys[wrong])


def test_a_complete_run_is_not_repeated(toy: Callable[..., EsmSettings], tmp_path: Path) -> None:
    settings = toy()
    examples = splits(settings.task).train[:8]
    first = mine.run(settings, ToyBackend(), examples, tmp_path, quiet)
    messages: list[str] = []
    assert mine.run(settings, ToyBackend(), examples, tmp_path, messages.append) == first
    assert messages == ["mine: already complete"]


def test_another_run_does_not_mix_into_the_folder(toy: Callable[..., EsmSettings], tmp_path: Path) -> None:
    examples = splits(toy().task).train[:8]
    mine.run(toy(), ToyBackend(), examples, tmp_path, quiet)
    with pytest.raises(LabError, match="other settings"):
        mine.run(toy({"seed": 1}), ToyBackend(), examples, tmp_path, quiet)


RESULTS = ("rollouts.jsonl", "candidates.jsonl", "keys.safetensors", "vectors.safetensors", "meta.json")


def start(config: Path, run_dir: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(RUN), "mine", "--config", str(config), "--run-dir", str(run_dir)]
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def test_a_killed_run_resumes_and_ends_with_the_same_bytes(config_file: Callable[..., Path], tmp_path: Path) -> None:
    config = config_file({"task.generator.n_train": 80, "offline_mine.batch_size_examples": 2})
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    assert start(config, whole, tmp_path / "whole.log").wait(PATIENCE_S) == 0
    size = (whole / "mine" / "rollouts.jsonl").stat().st_size
    rng = random.Random(0)
    kills = 0
    for share in sorted(rng.random() * 0.9 for _ in range(4)):
        process = start(config, killed, log)
        grown = killed / "mine" / "rollouts.jsonl"
        while process.poll() is None and (not grown.exists() or grown.stat().st_size < share * size):
            time.sleep(0.0005)
        os.kill(process.pid, signal.SIGKILL)
        kills += process.wait(PATIENCE_S) == -signal.SIGKILL
        torn = grown.read_bytes()
        grown.write_bytes(torn[: len(torn) - rng.randrange(50)])  # as if the last write had been cut
    assert start(config, killed, log).wait(PATIENCE_S) == 0
    assert kills >= 2
    for name in RESULTS:
        assert (killed / "mine" / name).read_bytes() == (whole / "mine" / name).read_bytes(), name
    lines = files.read_jsonl(killed / "mine" / "rollouts.jsonl")
    assert len({(line["example_id"], line["k"]) for line in lines}) == len(lines) == 80 * 8
    batches = re.findall(r"batch (\d+)/40", log.read_text())
    assert len(batches) == len(set(batches)), "a batch that was complete was mined again"
