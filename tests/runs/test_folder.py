from __future__ import annotations

from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.runs import folder
from looplab.runs.capsule import Capsules, Prints, hash_tree, installed
from looplab.runs.durable import Syncer
from looplab.runs.names import inside, run_id


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    hashes = folder.create(tmp_path / "s" / "0001-abcd", {"run.json": b"{}", "config.json": b'{"x":1}'})
    assert sorted(p.name for p in (tmp_path / "s" / "0001-abcd").iterdir()) == ["config.json", "run.json"]
    assert hashes == folder.hash_files(tmp_path / "s" / "0001-abcd", ["run.json", "config.json", "missing.json"])
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["0001-abcd"]


def test_what_a_killed_engine_left_half_done_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "0001-abcd").mkdir()
    (tmp_path / "0001-abcd" / "config.json").write_text("torn")
    assert folder.run_folders(tmp_path) == []
    folder.create(tmp_path / "0001-abcd", {"run.json": b"{}", "config.json": b'{"x":1}'})
    assert folder.run_folders(tmp_path) == [tmp_path / "0001-abcd"]
    assert (tmp_path / "0001-abcd" / "config.json").read_bytes() == b'{"x":1}'


def test_a_folder_that_never_started_is_brought_up_to_date(tmp_path: Path) -> None:
    folder.create(tmp_path / "r", {"run.json": b"old"})
    (tmp_path / "r" / "kept").write_text("kept")
    folder.create(tmp_path / "r", {"run.json": b"new"})
    assert (tmp_path / "r" / "run.json").read_bytes() == b"new"
    assert (tmp_path / "r" / "kept").exists()


def test_sweeping_spares_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".tmp-1-2").write_text("")
    folder.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".hydra"]


def test_pointers(tmp_path: Path) -> None:
    assert folder.pointed(tmp_path, "BEST") is None
    folder.point(tmp_path, "BEST", "0001-abcd")
    assert (tmp_path / "BEST").read_text() == "0001-abcd\n"
    assert folder.pointed(tmp_path, "BEST") == "0001-abcd"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x"])
def test_paths_stay_inside_the_lab(tmp_path: Path, path: str) -> None:
    with pytest.raises(LabError, match="leads out of the lab"):
        inside(tmp_path, path, "base")
    assert inside(tmp_path, "a/../b", "base") == tmp_path.resolve() / "b"


def test_a_link_that_leads_out_of_the_lab_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "link").symlink_to(tmp_path)
    with pytest.raises(LabError):
        inside(tmp_path / "lab", "link/other", "base")


def test_run_ids_sort_by_age() -> None:
    assert run_id(7).startswith("0007-")
    assert run_id(12345).startswith("12345-")


def test_a_capsule_names_code_program_machine_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    lab, study = tmp_path / "lab", tmp_path / "lab" / "outputs" / "s"
    study.mkdir(parents=True)
    (lab / "train.py").write_text("print(1)\n")
    (lab / ".gitignore").write_text("outputs\n")
    for argv in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *argv], cwd=lab, check=True)
    (lab / "train.py").write_text("print(2)\n")
    (lab / "data").write_text("1,2,3")
    capsule = Capsules(lab, study, Prints(lab, [lab / "data"])).make(
        [sys.executable, "train.py"], sys.executable, {"X": "1"}, {"seed": 3}
    )
    assert len(capsule["code"]["commit"]) == 40
    assert capsule["code"]["dirty"]
    assert b"+print(2)" in (study / capsule["code"]["patch"]).read_bytes()
    assert capsule["env"]["WANDB_API_KEY"] == "***"
    assert capsule["seeds"] == {"seed": 3}
    assert capsule["data"] == {"data": hash_tree(lab / "data")}
    assert "pytest==" in (study / capsule["python"]["packages"]).read_text()


def test_installed_reads_names_and_versions() -> None:
    import sys

    assert any(entry.startswith("pytest==") for entry in installed(sys.path))


def test_the_syncer_comes_to_an_end(tmp_path: Path) -> None:
    syncer = Syncer(tmp_path)
    syncer.request()
    syncer.close()
