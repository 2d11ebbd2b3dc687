"""A lab file may contain anything: it is refused with its name, and neither memory nor time without bounds is used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions

STUDY: dict[str, Any] = {
    "study": "toy",
    "launch": {"command": ["{python}", "train.py"], "grace": 5, "timeout": "1h"},
    "base": "base.json",
    "objective": {"metric": "loss", "goal": "min"},
    "knobs": {"x": {"type": "float", "low": 0.5, "high": 4, "step": 0.5}},
    "constraints": ["x < 9"],
    "proposers": [{"queue": "queue.yaml"}],
    "slots": {"count": 2, "gpus": "none", "cores": ["0", "0-1"]},
    "budget": {"runs": 5, "wall": "1h"},
}
VALUES = st.recursive(
    st.sampled_from([None, True, 0, -1, 0.5, float("nan"), 10**30, 10**400, "", "\0", "\ud83d", "²", "{", "a" * 5_000])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [*([at] if at else []), *(place for key, value in below for place in places(value, (*at, key)))]


def check(folder: Path, study: Any, base: Any = None) -> None:
    (folder / "train.py").touch()
    (folder / "lab.yaml").write_text(json.dumps(study))
    (folder / "base.json").write_text(json.dumps({"x": 1.0} if base is None else base))
    (folder / "queue.yaml").write_text("proposals: [{edits: [x@set=2]}]")
    lab = load_lab(folder)
    check_study(lab, lab.study(None), RunOptions())


@given(place=st.sampled_from(places(STUDY)), value=VALUES)
@settings(max_examples=120)
def test_any_value_at_any_place_is_accepted_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], value: Any
) -> None:
    study = json.loads(json.dumps(STUDY))
    node = study
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    try:
        check(tmp_path_factory.mktemp("lab"), study)
    except LabError as error:
        str(error).encode()
    except OSError as error:
        assert error.strerror  # noqa: PT017 (names that are too long for the disk)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"knobs": {"x": {"type": ["float"]}}}, "type takes 'int', 'float'"),
        ({"slots": {"count": 10**9, "gpus": "none"}}, "slots"),
        ({"slots": {"gpus": "none", "cores": ["0-99999999999"]}}, "cores"),
        ({"slots": {"gpus": "none", "cores": ["²"]}}, "cores"),
        ({"budget": {"wall": 10**400}}, "duration"),
    ],
)
def test_values_that_no_machine_can_hold_are_rejected(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words) as error:
        check(tmp_path, {**STUDY, **changes})
    if "knobs" in changes:
        assert error.value.line == 1


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_base_config_that_is_not_a_file_is_rejected_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(LabError, match=r"not a file|leads out of the lab"):
        check(tmp_path, {**STUDY, "base": "odd.json"})


@pytest.mark.parametrize("seed", [10**30, 10**400, -(2**63), 2**62])
def test_a_seed_that_the_ledger_cannot_hold_is_rejected(tmp_path: Path, seed: int) -> None:
    with pytest.raises(LabError, match="seed"):
        check(tmp_path, STUDY, {"x": 1.0, "seed": seed})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("odd.yaml", "x: 0x" + "f" * 50_000),
        ("odd.yaml", "x: 0o" + "7" * 50_000),
        ("odd.toml", "x = 0x" + "f" * 50_000),
        ("odd.yaml", "x: 1\ny: [0x" + "f" * 5_000 + "]"),
    ],
)
def test_ints_that_cannot_be_written_down_are_rejected(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(LabError, match="digits"):
        check(tmp_path, {**STUDY, "base": name})
