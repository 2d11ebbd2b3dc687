from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.report import labbook
from looplab.runs import folder
from looplab.runs.capsule import Capsules, Fingerprints, hash_tree, installed
from looplab.runs.durable import Syncer
from looplab.runs.names import inside, run_id


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    hashes = folder.create(tmp_path / "s" / "0001-abcd", {"run.json": b"{}", "config.json": b'{"x":1}'})
    run = tmp_path / "s" / "0001-abcd"
    assert [p.name for p in run.iterdir()] == ["record"]
    assert sorted(p.name for p in (run / "record").iterdir()) == ["config.json", "run.json"]
    assert hashes == folder.hash_files(run, ["record/run.json", "record/config.json", "record/missing.json"])
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["0001-abcd"]


def test_the_folder_of_a_study_that_was_moved_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        folder.create(tmp_path / "s" / "0001-abcd", {"run.json": b"{}", "config.json": b"{}"})
    with pytest.raises(FileNotFoundError):
        folder.keep_shared(tmp_path / "s", b"kept", "code", ".patch")
    with pytest.raises(FileNotFoundError):
        labbook.append(tmp_path / "s", "s", ["- line"])
    assert not (tmp_path / "s").exists()


def test_what_a_killed_engine_left_half_done_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "0001-abcd/record").mkdir(parents=True)
    (tmp_path / "0001-abcd/record/config.json").write_text("torn")
    assert folder.run_folders(tmp_path) == []
    folder.create(tmp_path / "0001-abcd", {"run.json": b"{}", "config.json": b'{"x":1}'})
    assert folder.run_folders(tmp_path) == [tmp_path / "0001-abcd"]
    assert (tmp_path / "0001-abcd/record/config.json").read_bytes() == b'{"x":1}'


def test_a_folder_that_never_started_is_brought_up_to_date(tmp_path: Path) -> None:
    folder.create(tmp_path / "r", {"run.json": b"old"})
    (tmp_path / "r" / "kept").write_text("kept")
    folder.create(tmp_path / "r", {"run.json": b"new"})
    assert (tmp_path / "r/record/run.json").read_bytes() == b"new"
    assert (tmp_path / "r" / "kept").exists()


@pytest.mark.parametrize("killed_after", ["", "0001-abcd", "0001-abcd/record"])
def test_a_folder_is_made_whole_wherever_its_maker_was_killed(tmp_path: Path, killed_after: str) -> None:
    (tmp_path / killed_after).mkdir(parents=True, exist_ok=True)
    folder.create(tmp_path / "0001-abcd", {"run.json": b"{}", "config.json": b'{"x":1}'})
    assert folder.run_folders(tmp_path) == [tmp_path / "0001-abcd"]
    assert folder.read_json(tmp_path / "0001-abcd", "config.json") == {"x": 1}


def test_files_of_the_trainer_are_not_taken_for_the_record(tmp_path: Path) -> None:
    folder.create(tmp_path / "r", {"run.json": b'{"n": 1}', "config.json": b'{"x":1}'})
    for name in ("run.json", "config.json", "summary.json"):
        (tmp_path / "r" / name).write_text('{"of": "the trainer"}')
    assert folder.read_json(tmp_path / "r", "config.json") == {"x": 1}
    assert folder.read_json(tmp_path / "r", "summary.json") == {}


def test_a_folder_of_an_early_version_has_its_record_at_the_top(tmp_path: Path) -> None:
    (tmp_path / "r/record").mkdir(parents=True)  # the trainer's
    for name, text in (("run.json", "{}"), ("config.json", '{"x":1}'), ("record/config.json", '{"of":"the trainer"}')):
        (tmp_path / "r" / name).write_text(text)
    assert folder.is_run(tmp_path / "r")
    assert folder.record_file(tmp_path / "r", "config.json") == tmp_path / "r/config.json"
    assert folder.read_json(tmp_path / "r", "config.json") == {"x": 1}


def test_a_changed_file_is_restored_and_what_was_there_is_kept(tmp_path: Path) -> None:
    files = {"run.json": b"{}", "config.json": b'{"x":1}', "capsule.json": b'{"y":1}'}
    run = tmp_path / "r"
    hashes = folder.create(run, files)
    contents = {"record/config.json": files["config.json"], "record/capsule.json": b"for want of the original"}
    assert folder.restore(run, hashes, contents) == []
    (run / "record/config.json").write_text("mine")
    (run / "record/capsule.json").unlink()
    changed = {change.name: change for change in folder.restore(run, hashes, contents)}
    assert list(changed) == ["record/config.json", "record/capsule.json"]
    assert [change.restored for change in changed.values()] == [True, False]
    assert changed["record/capsule.json"].found is None
    assert (run / "record/config.json").read_bytes() == files["config.json"]
    assert (run / "record/capsule.json").read_bytes() == b"for want of the original"
    assert [path.read_text() for path in (run / "record").glob("config.json.changed-*")] == ["mine"]


@pytest.mark.parametrize("spoil", ["deleted", "a file", "folders"])
def test_a_record_that_is_no_longer_a_folder_is_restored(tmp_path: Path, spoil: str) -> None:
    files = {"run.json": b"{}", "config.json": b'{"x":1}'}
    run = tmp_path / "r"
    hashes = folder.create(run, files)
    shutil.rmtree(run / "record")
    if spoil == "a file":
        (run / "record").write_text("mine")
    elif spoil == "folders":
        (run / "record/run.json/deep").mkdir(parents=True)
    changes = folder.restore(run, hashes, {f"record/{name}": content for name, content in files.items()})
    assert all(change.restored for change in changes)
    assert folder.restore(run, hashes, {}) == []


@pytest.mark.parametrize("size", [0, 1, folder.READ_BYTES - 1, folder.READ_BYTES, 2 * folder.READ_BYTES + 1])
def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(content)
    assert folder.hash_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_what_is_not_a_file_has_no_hash_and_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert folder.hash_file(tmp_path / "pipe") is None
    assert folder.hash_file(tmp_path / "loop") is None
    assert folder.hash_file(tmp_path / "zero") is None
    assert folder.hash_file(tmp_path) is None
    assert folder.hash_file(tmp_path / "missing") is None
    assert folder.hash_file(tmp_path / "pipe" / "below") is None


def test_only_a_file_with_exactly_these_bytes_has_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert folder.has_content(tmp_path / "file", b"content")
    assert not any(folder.has_content(tmp_path / "file", other) for other in (b"conten", b"contents", b"Content"))
    assert not any(folder.has_content(tmp_path / name, b"content") for name in ("pipe", "zero", "missing", "file/x"))
    assert not folder.has_content(tmp_path, b"content")


@pytest.mark.parametrize("what", ["pipe", "folder", "link", "no record"])
def test_a_note_for_a_run_that_spoilt_its_notes_is_left_out(tmp_path: Path, what: str) -> None:
    record = tmp_path / "run" / folder.RECORD
    record.mkdir(parents=True)
    if what == "pipe":
        os.mkfifo(record / "notes.md")
    elif what == "folder":
        (record / "notes.md").mkdir()
    elif what == "link":
        (record / "notes.md").symlink_to("/dev/full")
    else:
        record.rmdir()
    folder.add_note(tmp_path / "run", "noted")


def test_a_folder_in_place_of_a_record_file_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "summary.json" / "inner").mkdir(parents=True)
    digest = folder.write_json(tmp_path / "summary.json", {"a": 1})
    assert folder.hash_file(tmp_path / "summary.json") == digest
    assert [path.name.partition(".changed-")[0] for path in tmp_path.glob("*.changed-*")] == ["summary.json"]


@pytest.mark.parametrize("content", ["[1]", "{", "folder", "pipe"])
def test_a_record_file_that_is_not_ours_is_an_error_or_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / folder.RECORD / "summary.json"
    path.parent.mkdir()
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(content)
    assert folder.read_json(tmp_path, "summary.json", strict=False) == {}
    with pytest.raises(LabError):
        folder.read_json(tmp_path, "summary.json")


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


def test_a_link_that_leads_out_of_the_lab_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "link").symlink_to(tmp_path)
    with pytest.raises(LabError):
        inside(tmp_path / "lab", "link/other", "base")


def test_run_ids_sort_by_age() -> None:
    assert run_id(7).startswith("0007-")
    assert run_id(12345).startswith("12345-")


def test_a_capsule_names_code_program_machine_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

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
    capsule = Capsules(lab, study, Fingerprints(lab, [lab / "data"])).make(
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

    assert any(entry.startswith("pytest==") for entry in installed(sys.path))


def test_the_last_sync_is_done_before_the_process_exits(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from looplab.runs.durable import Syncer\n"
        "def sync(self): time.sleep(0.3); Path(sys.argv[1], 'synced').touch()\n"
        "Syncer._sync = sync\n"
        "syncer = Syncer(Path(sys.argv[1])); syncer.close(); syncer.close(); print(Path(sys.argv[1], 'synced').exists())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"  # `close` does not wait for it
    assert (tmp_path / "synced").exists()


def test_a_sync_follows_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = threading.Semaphore(0)
    monkeypatch.setattr(Syncer, "_sync", lambda self: syncs.release())
    syncer = Syncer(tmp_path)
    syncer.request()
    assert syncs.acquire(timeout=60)
    syncer.close()
    syncer.wait()
    assert syncs.acquire(timeout=60)


def test_the_changes_of_a_run_of_an_early_version_are_read_from_their_own_file(tmp_path: Path) -> None:
    assert folder.read_changes(tmp_path) == {}
    early, now = ({"parent": {}, "base": {"lr": {"old": 1, "new": new}}} for new in (2, 3))
    folder.create(tmp_path / "run", {"run.json": b"{}", "config_diff.json": json.dumps(early).encode()})
    assert folder.read_changes(tmp_path / "run") == early
    (tmp_path / "run/record/run.json").write_text(json.dumps({"changes": now}))
    assert folder.read_changes(tmp_path / "run") == now


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"notes": 5}'),
        ("run.json", '{"devices": {}}'),
        ("run.json", '{"edits": "x"}'),
        ("run.json", '{"changes": {"base": 3}}'),
        ("run.json", '{"changes": {"parent": {"x": 1}}}'),
        ("config_diff.json", '{"base": 3}'),
        ("config_diff.json", '{"parent": {"x": 1}}'),
        ("summary.json", '{"notes": 1.5}'),
        ("summary.json", '{"objective": {"value": "x"}}'),
        ("summary.json", '{"metrics": {"loss": {"first": "x", "n": 1}}}'),
        ("summary.json", '{"steps": []}'),
        ("summary.json", "[]"),
    ],
)
def test_a_file_of_the_record_that_has_another_form_is_an_error_in_words(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "run.json").write_text("{}")
    (tmp_path / "record" / name).write_text(text)
    with pytest.raises(LabError, match="is not what looplab wrote"):
        folder.read_json(tmp_path, name)
    assert folder.read_json(tmp_path, name, strict=False) == {}
