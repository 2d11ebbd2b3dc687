"""A small experiment on the toy backend, for all tests of the method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looplab.recipes.esm.esm.config import EsmSettings, parse_settings
from looplab.recipes.esm.esm.files import write_json


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., EsmSettings]:
    """Settings for the toy, with dotted keys changed."""

    def make(changes: dict[str, Any] | None = None) -> EsmSettings:
        plain = {
            "model": {"backend": "toy"},
            "task": {"dataset": "tiny", "generator": {"kind": "addition2", "n_train": 40, "n_dev": 40, "n_test": 40}},
            "prompt": {"template": "tiny"},
            "decode": {"max_new_tokens": 64},
            "control_points": {"M": 4},
            "offline_mine": {"max_new_tokens": 64, "temperature": 1.0, "top_p": 1.0},
            "outputs": {"root_dir": str(tmp_path / "outputs"), "run_name": "toy"},
        }
        return parse_settings(plain).changed(changes or {})

    return make


@pytest.fixture
def config_file(toy: Callable[..., EsmSettings], tmp_path: Path) -> Callable[..., Path]:
    """The same as a file; JSON is YAML, too."""

    def make(changes: dict[str, Any] | None = None, name: str = "toy.yaml") -> Path:
        write_json(tmp_path / name, toy(changes).plain())
        return tmp_path / name

    return make
