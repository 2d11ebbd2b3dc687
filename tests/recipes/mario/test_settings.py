"""The settings of a Mario training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from looplab.errors import LabError
from looplab.recipes.mario.mario.settings import (
    FLAGS,
    VARIABLES,
    MarioSettings,
    add_flags,
    key_types,
    read_settings,
)


def flags(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(words))


def test_every_short_flag_and_variable_sets_a_known_key() -> None:
    assert set(FLAGS.values()) | set(VARIABLES.values()) <= set(key_types())


def test_flags_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"reward": {"distance_weight": 0.1, "scale_start": 0.3}, "train": {"gamma": 0.9}}))
    made = read_settings(
        path, flags("--reward-distance-weight", "0.5"), {"REWARD_DISTANCE_WEIGHT": "0.2", "REWARD_SCALE_START": "0.4"}
    )
    assert made.reward.distance_weight == 0.5
    assert made.reward.scale_start == 0.4
    assert made.train.gamma == 0.9


def test_the_short_flags_and_variables_are_known() -> None:
    made = read_settings(
        None,
        flags(
            "--scripted-sequence", "START:8,RIGHT+B:180", "--scripted-forward-frames", "9", "--forward-action-id", "3",
            "--enable-ram-x-parse", "--ram-x-high-addr", "0x6D", "--ram-x-low-addr", "0x86", "--overlap-collect",
            "--per-sample-interval", "8", "--parent-prewarm-all", "--worker-start-delay", "0.5",
            "--env-reset-timeout", "30", "--slow-step-trace-threshold", "4", "--slow-step-trace-window", "60",
        ),
        {"ACTION_TYPE": "extended", "DISABLE_OVERLAP": "1", "PROBE_FORWARD": "12"},
    )  # fmt: skip
    assert made.script.sequence == "START:8,RIGHT+B:180"
    assert (made.reward.ram_x_parse, made.reward.ram_x_high, made.reward.ram_x_low) == (True, 0x6D, 0x86)
    assert made.env.action_type == "extended"
    assert made.train.overlap_collect is True  # the flag overrides the variable
    assert made.script.probe_forward == 12
    assert made.vector.worker_start_delay == 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train": {"gama": 0.9}}, "train.gamma"),
        ({"train": {"total_steps": 1.5}}, "whole number"),
        ({"train": {"anneal": "maybe"}}, "bool"),
        ({"env": {"action_type": "all"}}, "right_only"),
        ({"train": {"gamma": None}}, "needs a value"),
        ({"train": 3}, "sections"),
    ],
)
def test_errors_name_the_key(config: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config))
    with pytest.raises(LabError, match=message):
        read_settings(path, {}, {})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"REWARD_SCALE_STRAT": "0.1"}, "REWARD_SCALE_START"),
        ({"ENABLE_TENSORBORD": "1"}, "ENABLE_TENSORBOARD"),
        ({"PER_SAMPLE": "2"}, "PER_SAMPLE_INTERVAL"),
        ({"PROBE_FORWARD": "20"}, "no script uses it"),
    ],
)
def test_variables_without_an_effect_are_errors(variables: dict[str, str], message: str) -> None:
    with pytest.raises(LabError, match=message):
        read_settings(None, {}, variables)


def test_variables_of_other_programs_are_ignored() -> None:
    other = {"PATH": "/bin", "PERL5LIB": "/lib", "LC_ALL": "C", "NUMBA_CACHE_DIR": "/tmp", "WORLDWIDE": "1"}
    assert read_settings(None, {}, other) == MarioSettings()


def test_settings_that_decide_nothing_may_change_between_resumes() -> None:
    free = read_settings(None, flags("--workers", "3", "--log-interval", "7", "--step-timeout", "9"), {})
    assert free.identity() == MarioSettings().identity()
    longer = flags("--total-steps", "7")
    assert read_settings(None, longer, {}).identity() != MarioSettings().identity()
    assert "train.total_steps" not in read_settings(None, {**longer, "train.anneal": False}, {}).identity()


def test_an_optional_key_can_be_unset(tmp_path: Path) -> None:
    assert read_settings(None, flags("--stagnation", "none"), {}).reward.stagnation is None


def test_the_base_config_is_valid() -> None:
    import looplab.recipes.mario.mario.settings as here

    base = Path(here.__file__).parent.parent / "configs" / "base.json"
    assert read_settings(base, {}, {}).train.algorithm == "ppo"
