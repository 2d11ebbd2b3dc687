"""Sealed files: every change is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.iterate import seal
from looplab.iterate.git import make_writable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "v1" / "artifacts").mkdir(parents=True)
    (tmp_path / "v1" / "train.py").write_text("1")
    (tmp_path / "v1" / "artifacts" / "policy").write_bytes(b"\0\1")
    (tmp_path / "evaluate.py").write_text("2")
    return tmp_path


PATHS = ["evaluate.py", "v1", "not-there"]


def changes(root: Path, before: dict[str, str]) -> list[str]:
    return seal.changes(before, seal.seal(root, PATHS))


def test_nothing_is_reported_if_nothing_changed(root: Path) -> None:
    before = seal.seal(root, PATHS)
    assert sorted(before) == ["evaluate.py", "v1/artifacts/policy", "v1/train.py"]
    assert changes(root, before) == []
    (root / "v1" / "__pycache__").mkdir()
    (root / "v1" / "__pycache__" / "train.pyc").write_text("x")
    assert changes(root, before) == []  # Python leaves these behind


def test_every_kind_of_change_is_reported(root: Path) -> None:
    before = seal.seal(root, PATHS)
    (root / "evaluate.py").write_text("3")
    (root / "v1" / "artifacts" / "policy").unlink()
    (root / "v1" / "new").write_text("")
    assert changes(root, before) == [
        "evaluate.py was changed", "v1/artifacts/policy was removed", "v1/new was added"
    ]  # fmt: skip


def test_a_link_in_the_place_of_a_file_or_folder_is_a_change(root: Path) -> None:
    before = seal.seal(root, PATHS)
    (root / "same").write_text("2")
    (root / "evaluate.py").unlink()
    (root / "evaluate.py").symlink_to("same")
    os.symlink("/etc", root / "v1" / "etc")
    assert changes(root, before) == ["evaluate.py was changed", "v1/etc was added"]


def test_read_only_files_can_be_removed_again(root: Path) -> None:
    seal.make_read_only(root, PATHS)
    assert (root / "v1").stat().st_mode & 0o222 == 0
    assert (root / "v1" / "train.py").stat().st_mode & 0o222 == 0
    assert (root / "evaluate.py").stat().st_mode & 0o222 == 0
    make_writable(root.parent, root.name)
    assert (root / "v1").stat().st_mode & 0o700 == 0o700


@given(st.dictionaries(st.text(min_size=1), st.text()), st.dictionaries(st.text(min_size=1), st.text()))
def test_two_lists_have_one_digest_only_if_nothing_changed(one: dict[str, str], other: dict[str, str]) -> None:
    assert (seal.digest(one) == seal.digest(other)) == (not seal.changes(one, other))
