"""Copies of run folders between machines without a shared disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.launch import mirror
from looplab.launch.mirror import Chunk, EngineMirror, NodeMirror, read_tree


class Pair:
    """A run folder on the engine's machine, and the same on a node."""

    def __init__(self, folder: Path, limit: int = 1 << 30) -> None:
        self.here = folder / "lab/r1"
        (self.here / "record").mkdir(parents=True)
        self.node = NodeMirror(folder / "node", limit)
        self.there = self.node.run_dir(self.here)
        self.there.mkdir(parents=True)
        self.engine = self.new_engine()

    def new_engine(self) -> EngineMirror:
        return EngineMirror(self.here, self.here / "record")

    def pull(self, *, final: bool = True, portions: int = 1000) -> list[str]:
        """Copy until there is nothing more; return what is left out."""
        skipped: list[str] = []
        for _ in range(portions):
            chunks, skipped = self.node.changes(self.here, self.engine.known, final=final)
            for chunk in chunks:
                self.engine.store(chunk)
            if not chunks:
                break
        return skipped

    def files(self, root: Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(mirror, "PORTION", 1000)
    return Pair(tmp_path)


def test_everything_comes_back_in_portions(pair: Pair) -> None:
    (pair.there / "a/b").mkdir(parents=True)
    (pair.there / "a/b/model.pt").write_bytes(os.urandom(5000))
    (pair.there / "metrics.jsonl").write_bytes(b"row\n" * 2000)
    (pair.there / "empty").touch()
    (pair.there / "run.sh").touch(mode=0o755)
    pair.pull()
    assert pair.files(pair.here) == pair.files(pair.there)
    assert os.access(pair.here / "run.sh", os.X_OK)
    assert not pair.node.changes(pair.here, pair.engine.known, final=True)[0]


def test_logs_grow_and_other_files_wait_until_they_are_complete(pair: Pair) -> None:
    (pair.there / "metrics.jsonl").write_text("1\n")
    (pair.there / "model.pt").write_text("half")
    pair.pull(final=False)
    with open(pair.there / "metrics.jsonl", "a") as file:
        file.write("2\n")
    pair.pull(final=False)
    assert (pair.here / "metrics.jsonl").read_text() == "1\n2\n"
    assert not (pair.here / "model.pt").exists()
    (pair.there / "metrics.jsonl").write_text("1\n")  # cut back to a checkpoint
    pair.pull()
    assert pair.files(pair.here) == pair.files(pair.there)


def test_the_next_engine_continues_a_copy(pair: Pair) -> None:
    (pair.there / "metrics.jsonl").write_bytes(os.urandom(2500))
    (pair.there / "old.pt").write_bytes(b"x" * 500)
    pair.pull(portions=2)
    size = (pair.here / "metrics.jsonl").stat().st_size
    assert 0 < size < 2500
    pair.engine = pair.new_engine()
    chunks, _ = pair.node.changes(pair.here, pair.engine.known, final=True)
    assert chunks[0].offset == size
    pair.pull()
    pair.engine.close()
    assert pair.files(pair.here) == pair.files(pair.there)


def test_a_prepared_folder_is_sent_once(pair: Pair) -> None:
    (pair.here / "record/config.json").write_text("{}")
    pair.engine = pair.new_engine()
    pair.node.write_tree(pair.there, read_tree(pair.here))
    assert pair.files(pair.there) == pair.files(pair.here)
    assert pair.node.changes(pair.here, pair.engine.known, final=True) == ([], [])


def test_too_much_stays_on_the_node_and_is_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path, limit=100)
    (pair.there / "large.pt").write_bytes(b"x" * 200)
    (pair.there / "small.pt").write_bytes(b"x" * 50)
    assert pair.pull() == ["large.pt"]
    assert set(pair.files(pair.here)) == {"small.pt"}


def test_links_are_not_copied_and_names_cannot_lead_out(pair: Pair, tmp_path: Path) -> None:
    (pair.there / "link").symlink_to("/etc/passwd")
    os.mkfifo(pair.there / "pipe")
    pair.pull()
    assert not os.listdir(pair.here / "record")
    assert os.listdir(pair.here) == ["record"]
    for name in ("../out.log", "/tmp/out.log"):
        with pytest.raises(LabError):
            pair.engine.store(Chunk(name, 0, b"x", 1, 1, 0o644))
    (tmp_path / "elsewhere").mkdir()
    (pair.here / "sub").symlink_to(tmp_path / "elsewhere")
    pair.engine.store(Chunk("sub/x.log", 0, b"x", 1, 1, 0o644))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_log_that_was_cut_back_and_has_grown_again_is_copied_as_it_is(pair: Pair) -> None:
    log = pair.there / "metrics.jsonl"
    log.write_text("".join(f"first {i}\n" for i in range(50)))
    pair.pull(final=False)
    log.write_text("".join(f"first {i}\n" for i in range(20)) + "".join(f"second {i}\n" for i in range(200)))
    pair.pull(final=False)
    assert pair.files(pair.here) == pair.files(pair.there)
    log.write_text("")
    pair.engine = pair.new_engine()
    pair.pull()
    assert pair.files(pair.here) == pair.files(pair.there)


@pytest.mark.parametrize("name", ["x", "x.log"])
def test_a_file_in_the_place_of_a_folder_is_named_and_does_not_stop_the_copy(pair: Pair, name: str) -> None:
    (pair.there / "a").write_text("a file")
    (pair.there / "b").mkdir()
    (pair.there / "b" / name).write_text("in a folder")
    pair.pull()
    (pair.there / "a").unlink()
    (pair.there / "a").mkdir()
    (pair.there / "a" / name).write_text("in a folder")
    (pair.there / "b" / name).unlink()
    (pair.there / "b").rmdir()
    (pair.there / "b").write_text("a file")
    (pair.there / "c").write_text("c")
    assert sorted(pair.pull(portions=20)) == [f"a/{name}", "b"]
    assert (pair.here / "c").read_text() == "c"


def test_a_folder_that_becomes_a_link_is_left_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (pair.there / "sub").mkdir()
    (pair.there / "sub/model.pt").write_text("x")
    list_files = NodeMirror._files

    def replaced(root: Path) -> list[tuple[str, os.stat_result]]:
        found = list(list_files(root))
        (pair.there / "sub").rename(pair.there / "moved")
        (pair.there / "sub").symlink_to("moved")
        return found

    monkeypatch.setattr(NodeMirror, "_files", staticmethod(replaced))
    assert pair.node.changes(pair.here, {}, final=True) == ([], [])


class CodeOnNode:
    """Frozen code on a node with several hosts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hosts = [NodeMirror(root, 1 << 30) for _ in range(2)]

    def start(self, host: int, run: str, code: str) -> None:
        self.hosts[host].hold_code(run, code)
        if not self.hosts[host].code(code).is_dir():
            self.hosts[host].write_code(code, {"files": [("train.py", 0o444, 0, b"")], "links": []})

    def hours_later(self) -> None:
        for path in (self.root / "code").iterdir():
            os.utime(path, (0, 0))

    def names(self) -> set[str]:
        return set(os.listdir(self.root / "code"))


@pytest.fixture
def node(tmp_path: Path) -> CodeOnNode:
    return CodeOnNode(tmp_path)


def test_code_that_no_run_has_used_for_long_is_removed_from_the_node(node: CodeOnNode) -> None:
    node.start(0, "r1", "tree-1")
    node.start(1, "r2", "tree-2")
    node.hosts[0].release_code("r1")
    node.hosts[1].prune_code()
    assert {"tree-1", "tree-2"} < node.names()  # the next run may have the same code
    node.hours_later()
    node.hosts[0].prune_code()
    assert node.names() == {"tree-2", "tree-2.lock"}  # another host has it in use
    node.start(0, "r3", "tree-1")
    assert (node.hosts[0].code("tree-1") / "train.py").exists()


def test_code_is_kept_until_its_last_run_has_ended(node: CodeOnNode) -> None:
    node.start(0, "r1", "tree-1")
    node.start(0, "r2", "tree-1")
    node.hosts[0].release_code("r1")
    node.hosts[0].release_code("r1")
    node.hours_later()
    for host in node.hosts:
        host.prune_code()
    assert node.names() == {"tree-1", "tree-1.lock"}


def test_leftovers_of_killed_hosts_are_removed(node: CodeOnNode) -> None:
    node.start(0, "r1", "tree-1")
    (node.root / "code/.tree-9-abcd").mkdir()  # half written
    (node.root / "code/tree-8").mkdir()  # of a version without locks
    (node.root / "code/tree-7.lock").touch()
    node.hosts[1].prune_code()
    assert {".tree-9-abcd", "tree-8", "tree-8.lock", "tree-7.lock"} < node.names()
    node.hours_later()
    node.hosts[1].prune_code()
    assert node.names() == {"tree-1", "tree-1.lock"}
