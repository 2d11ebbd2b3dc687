"""Frozen code: what is copied, what is linked, and when a tree goes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.runs import frozen
from looplab.runs.frozen import FrozenCode


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    lab = tmp_path / "lab"
    (lab / "pkg").mkdir(parents=True)
    (lab / "data").mkdir()
    (lab / "outputs/s").mkdir(parents=True)
    (lab / "train.py").write_text("old")
    (lab / "run.sh").write_text("#!/bin/sh\n")
    (lab / "run.sh").chmod(0o755)
    (lab / "pkg/a.py").write_text("a")
    (lab / "pkg/table.csv").write_text("1,2")
    (lab / "data/x").write_text("data")
    return lab


NAMES = ("train.py", "run.sh", "pkg/a.py")


def code_of(lab: Path) -> FrozenCode:
    return FrozenCode(lab, lab / "outputs/s")


def test_code_is_copied_and_everything_else_is_linked(lab: Path) -> None:
    tree = code_of(lab).freeze(NAMES)
    (lab / "train.py").write_text("new")
    (lab / "pkg/a.py").unlink()
    (lab / "pkg/table.csv").write_text("3,4")
    assert (tree.path / "train.py").read_text() == "old"
    assert (tree.path / "pkg/a.py").read_text() == "a"
    assert (tree.path / "pkg/table.csv").read_text() == "3,4"
    assert (tree.path / "data/x").read_text() == "data"
    assert os.access(tree.path / "run.sh", os.X_OK)
    assert os.readlink(tree.path / "data") == str(lab / "data")


def test_a_lab_without_code_has_a_tree_of_links(lab: Path) -> None:
    assert (code_of(lab).freeze([]).path / "data/x").read_text() == "data"


def test_one_state_of_the_code_has_one_tree(lab: Path) -> None:
    code = code_of(lab)
    first, second = code.freeze(NAMES), code_of(lab).freeze(NAMES)
    assert first.path == second.path
    (lab / "train.py").write_text("new")
    assert code.freeze(NAMES).path != first.path
    (lab / "train.py").write_text("old")
    assert code.freeze(NAMES).path == first.path


def test_what_is_added_to_the_lab_later_is_in_the_tree_too(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "LINKS_S", 0.0)
    code = code_of(lab)
    code.freeze(NAMES)
    (lab / "weights").mkdir()
    assert (code.freeze(NAMES).path / "weights").is_dir()


def test_links_are_not_followed_out_of_the_lab(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("outside")
    (lab / "out.py").symlink_to(tmp_path / "secret.py")
    (lab / "up.py").symlink_to("../secret.py")
    (lab / "same.py").symlink_to("train.py")
    (lab / "alias").symlink_to("pkg")
    (lab / ".env").write_text("KEY=1")
    tree = code_of(lab).freeze([*NAMES, "out.py", "up.py", "same.py", ".env", "alias/a.py"])
    assert set(tree.files) == set(NAMES)
    assert os.readlink(tree.path / "out.py") == str(lab / "out.py")
    assert (tree.path / "up.py").read_text() == "outside"  # as in the lab, and no copy
    assert os.readlink(tree.path / ".env") == str(lab / ".env")
    (lab / "train.py").write_text("new")
    assert (tree.path / "same.py").read_text() == "old"
    assert (tree.path / "alias/a.py").resolve() == (tree.path / "pkg/a.py").resolve()


def test_paths_of_code_are_moved_and_others_are_not(lab: Path) -> None:
    tree = code_of(lab).freeze(NAMES)
    words = [f"{lab}/run.sh", f"{lab}/train.py", f"--script={lab}/pkg/a.py"]
    moved = [f"{tree.path}/run.sh", f"{tree.path}/train.py", f"--script={tree.path}/pkg/a.py"]
    others = [f"{lab}/data/x", "train.py", "/bin/sh", f"{lab}/new.txt", "a=b"]
    assert tree.moved_argv([*words, *others]) == [*moved, *others]
    assert tree.moved(lab) == tree.path
    assert tree.moved_search_path([str(lab), f"{lab}/data", "/usr/lib"]) == [str(tree.path), f"{lab}/data", "/usr/lib"]


def test_a_damaged_tree_is_made_again_by_the_next_engine(lab: Path) -> None:
    path = code_of(lab).freeze(NAMES).path
    (path / "train.py").chmod(0o644)
    (path / "train.py").write_text("")  # as after a crash of the machine
    assert code_of(lab).open(f"_shared/{path.name}.json") is None
    code = code_of(lab)
    again = code.freeze(NAMES)
    assert (again.path / "train.py").read_text() == "old"
    (damaged,) = (lab / "outputs/s/_shared").glob("tree-*.damaged-*")
    assert code.prune([again.name]) == [f"_shared/{damaged.name}/train.py"]  # a run may have written it
    (damaged / "train.py").unlink()
    assert code.prune([again.name]) == []
    assert not damaged.exists()
    assert again.path.is_dir()


def test_a_file_that_cannot_be_read_does_not_stop_the_engine(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of(lab)
    tree = code.freeze(NAMES)
    (tree.path / "train.py").unlink()
    monkeypatch.chdir(tree.path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("train.py")
    assert code.prune([]) == [f"_shared/{tree.path.name}/train.py"]


def test_a_tree_goes_when_nobody_needs_it_unless_a_run_has_written_into_it(lab: Path) -> None:
    code = code_of(lab)
    first = code.freeze(NAMES)
    (lab / "train.py").write_text("new")
    second = code.freeze(NAMES)
    (lab / "outputs/s/_shared/.tree-0123").mkdir()  # of an engine that was killed
    (second.path / "pkg/__pycache__").mkdir()
    (second.path / "pkg/__pycache__/a.pyc").touch()
    (first.path / "result.pt").touch()
    assert code.prune([second.name]) == [f"_shared/{first.path.name}/result.pt"]
    assert second.path.is_dir()
    assert code.prune([]) == [f"_shared/{first.path.name}/result.pt"]
    assert not second.path.exists()
    (first.path / "result.pt").unlink()
    assert code.prune([]) == []
    third = code.freeze(NAMES)
    (third.path / "run.sh").chmod(0o755)
    (third.path / "run.sh").write_text("a log that looked like a program")
    assert code.prune([]) == [f"_shared/{third.path.name}/run.sh"]
    assert [path.name for path in (lab / "outputs/s/_shared").iterdir() if path.is_dir()] == [third.path.name]
    assert (lab / "data/x").exists()


def test_code_that_is_too_large_is_refused_in_words(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "MAX_TOTAL", 3)
    with pytest.raises(LabError, match="the code is larger than"):
        code_of(lab).freeze(NAMES)


def test_a_manifest_with_another_hash_is_not_used(lab: Path) -> None:
    code = code_of(lab)
    tree = code.freeze(NAMES)
    (lab / "outputs/s" / tree.name).write_text("{}")
    assert code_of(lab).open(tree.name) is None
    assert code_of(lab).open("../../etc/passwd") is None
    assert code_of(lab).open(None) is None
