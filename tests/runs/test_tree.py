"""Removing and copying where somebody has put links in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.runs import tree
from looplab.runs.names import check_name, inside


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder, with a victim next to it."""
    (tmp_path / "victim/sub").mkdir(parents=True)
    (tmp_path / "victim/sub/file").write_text("precious")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def victim_is_whole(place: Path) -> bool:
    return (place.parent / "victim/sub/file").read_text() == "precious"


def test_a_tree_is_removed_and_links_in_it_are_not_followed(place: Path) -> None:
    (place / "a/b").mkdir(parents=True)
    (place / "a/b/file").touch()
    (place / "a/link").symlink_to(place.parent / "victim")
    tree.remove(place, "a")
    assert list(place.iterdir()) == []
    assert victim_is_whole(place)


def test_a_link_itself_is_removed(place: Path) -> None:
    (place / "link").symlink_to(place.parent / "victim")
    tree.remove(place, "link")
    assert not os.path.lexists(place / "link")
    assert victim_is_whole(place)


def test_what_is_missing_is_nothing_to_remove(place: Path) -> None:
    tree.remove(place, "a")
    tree.remove(place, "a/b/c")


@pytest.mark.parametrize("act", [tree.remove, tree.make_writable])
def test_a_link_in_the_middle_is_an_error(place: Path, act: object) -> None:
    (place / "l").symlink_to(place.parent / "victim")
    assert callable(act)
    with pytest.raises(LabError, match="is a link or a file"):
        act(place, "l/sub")
    assert victim_is_whole(place)


@pytest.mark.parametrize("name", ["..", "../victim", "a/../../victim", "/etc", "", ".", "a\0b"])
def test_names_that_lead_out_are_errors(place: Path, name: str) -> None:
    for act in (tree.remove, tree.make_writable):
        with pytest.raises(LabError, match="does not name something inside"):
            act(place, name)
    with pytest.raises(LabError, match="does not name something inside"):
        tree.copy(place, place.parent / "target", name)
    assert victim_is_whole(place)


def test_a_copy_keeps_links_and_modes_and_leaves_pipes_out(place: Path) -> None:
    target = place.parent / "target"
    target.mkdir()
    (place / "a").mkdir()
    (place / "a/tool").write_text("x")
    (place / "a/tool").chmod(0o755)
    (place / "a/link").symlink_to(place.parent / "victim")
    os.mkfifo(place / "a/pipe")
    assert tree.copy(place, target, "a")
    assert (target / "a/tool").stat().st_mode & 0o777 == 0o755
    assert os.readlink(target / "a/link") == str(place.parent / "victim")
    assert not os.path.lexists(target / "a/pipe")
    assert not tree.copy(place, target, "missing")


def test_a_copy_does_not_read_or_write_through_links(place: Path) -> None:
    target = place.parent / "target"
    target.mkdir()
    (place / "l").symlink_to(place.parent / "victim")
    with pytest.raises(LabError, match="is a link or a file"):
        tree.copy(place, target, "l/sub/file")
    (place / "sub").mkdir()
    (place / "sub/file").write_text("evil")
    (target / "sub").symlink_to(place.parent / "victim/sub")
    with pytest.raises(LabError, match="is a link or a file"):
        tree.copy(place, target, "sub/file")
    (target / "sub").unlink()
    (target / "sub").mkdir()
    (target / "sub/file").symlink_to(place.parent / "victim/sub/file")
    assert tree.copy(place, target, "sub/file")
    assert (target / "sub/file").read_text() == "evil"
    assert victim_is_whole(place)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", ".hidden", "a\0b", "a\nb", "x" * 65, None, 3])
def test_what_cannot_name_a_folder_is_rejected(name: object) -> None:
    with pytest.raises(LabError, match="cannot be a run's name"):
        check_name(name, "a run's name")
    assert check_name("2026_a-b.c", "a run's name") == "2026_a-b.c"


@pytest.mark.parametrize("path", ["../x", "/etc", "a\0b", "loop/x"])
def test_a_path_that_is_none_is_an_error_in_words(place: Path, path: str) -> None:
    (place / "loop").symlink_to("loop")
    with pytest.raises(LabError, match="base"):
        inside(place, path, "base")
