"""Prompts for the agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.iterate import prompt
from looplab.iterate.gates import GateFinding
from looplab.iterate.settings import IterateConfig


def settings(**more: object) -> IterateConfig:
    evaluate = {"command": ["{python}", "evaluate.py"], "metric": "survival_rate"}
    smoke = {"command": ["{python}", "{version}/train.py", "--smoke"]}
    defaults = {"evaluate": evaluate, "smoke": smoke, "frozen": ["evaluate.py"], "artifacts": ["artifacts/plots/*.png"]}
    return IterateConfig.model_validate({**defaults, **more})


def test_the_prompt_says_what_to_read_to_write_and_to_leave_alone(tmp_path: Path) -> None:
    text = prompt.make(settings(instructions=["Use 128 ponds.", "Be quick."]), 3, 2, tmp_path, submit=True)
    for words in (
        "version v3", "SOP.md", "experiments/v2/dev_v2.md", "experiments/v3/dev_v3.md", "3. Train. Use 128 ponds. Be quick.\n",
        "Plan, Observations, Runs, Results, Learning", "`uv venv venv` if it is missing", "`uv pip install`",
        "looplab submit -- python experiments/v3/train.py ...`", "evaluate.py are read-only",
        "experiments/v3/artifacts/plots/*.png", "survival_rate (max)", "`git status --short`", '"v3 done"',
        "`{python} experiments/v3/train.py --smoke` succeeds within 180 s",
    ):  # fmt: skip
        assert words in text, words


def test_what_is_turned_off_is_not_mentioned(tmp_path: Path) -> None:
    text = prompt.make(settings(venv=False, smoke=None), 1, None, tmp_path, submit=False)
    for word in ("venv", "submit", "smoke", "dev_v0", "v0"):
        assert word not in text, word


def test_a_lab_may_have_a_template_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "ask.md").write_text('Make {version} {"json": 1} after{previous}.')
    own = settings(prompt="ask.md")
    assert prompt.make(own, 3, 1, tmp_path, submit=False) == (
        'Make experiments/v3 {"json": 1} after and experiments/v1/dev_v1.md.'
    )
    with pytest.raises(LabError, match="template cannot be read"):
        prompt.make(settings(prompt="gone.md"), 3, 1, tmp_path, submit=False)


def test_a_retry_names_what_stops_and_not_what_passed(tmp_path: Path) -> None:
    findings = [
        GateFinding(True, "files", "fine"),
        GateFinding(False, "smoke", "it broke"),
        GateFinding(False, "schedule", "late", True),
    ]
    text = prompt.make_retry(findings, 3)
    assert text.startswith("v3 did not pass its checks:\n- smoke: it broke\nFix")
    assert "fine" not in text
    assert "late" not in text
