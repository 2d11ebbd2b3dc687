"""Anchors: published to real git, real files and real commands, signed by the real ssh-keygen, and compared."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.conftest import PATIENCE_S

from looplab.config.lab import AnchorConfig
from looplab.errors import LabError
from looplab.ledger import anchors
from looplab.ledger.anchors import Anchor, Publication, Publisher, parse_anchors, publish
from looplab.ledger.ledger import GENESIS, Ledger, link
from looplab.ledger.proof import NO_ANCHOR, Proof, prove

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
SAVE = "import pathlib, sys; pathlib.Path('got').open('a').write(sys.stdin.read())"


class Place:
    """A lab's folder with its ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / ".looplab" / "ledger.db"
        self.ledger = Ledger(self.path)

    def grow(self, events: int = 3) -> None:
        for _ in range(events):
            with self.ledger.write():
                self.ledger.append_event("ended", "s", None, {"objective": 0.5})

    def publish(self, **config: object) -> Publication:
        return publish(self.ledger, self.folder, [AnchorConfig.model_validate(config)])

    def prove(
        self, *against: str, ledger_id: str | None = None, allowed: Path | None = None, **config: object
    ) -> Proof:
        configs = [AnchorConfig.model_validate(config)]
        return prove(self.ledger, self.folder, configs, against, ledger_id=ledger_id, allowed=allowed)

    def forge(self, seq: int) -> None:
        """Change an event and compute all hashes again."""
        with closing(sqlite3.connect(self.path)) as db, db:
            db.execute("UPDATE events SET data=json_set(data, '$.objective', 0.1) WHERE seq=?", (seq,))
            head = GENESIS
            for row in db.execute("SELECT seq, at, kind, study, run, data FROM events ORDER BY seq").fetchall():
                head = link(head, *row)
                db.execute("UPDATE events SET hash=? WHERE seq=?", (head, row[0]))
        self.path.with_name("journal.jsonl").unlink()
        self.ledger = Ledger(self.path, repair=True)
        self.ledger.complete_journal()
        self.ledger.note_head()
        assert self.ledger.first_broken_link() is None

    def kinds(self) -> list[str]:
        return [event.kind for event in self.ledger.events()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "lab").mkdir()
    place = Place(tmp_path / "lab")
    place.grow()
    return place


def run_git(where: Path, *args: str) -> str:
    env = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    env["GIT_COMMITTER_EMAIL"] = "a@b"
    return subprocess.run(["git", *args], cwd=where, env=env, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repo(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab lies in a folder of a repository, of a user without any configuration of git."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    run_git(tmp_path, "init", "--quiet", ".")
    (tmp_path / ".gitignore").write_text(".looplab\nhome\n")
    run_git(tmp_path, "add", ".gitignore")
    run_git(tmp_path, "commit", "--quiet", "-m", "start")
    return tmp_path


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def why(proof: Proof) -> str:
    (finding,) = proof.findings
    assert finding.what == "anchor"
    return finding.why


# -- the line


def test_an_anchor_is_a_line_that_can_be_read_again(place: Place) -> None:
    anchor = place.publish().anchor
    assert anchor.line == f"looplab-anchor v1 {place.ledger.id()} 3 {place.ledger.head()[1]} {anchor.at}"
    assert parse_anchors(anchor.line) == [anchor]


def test_anchors_are_found_in_a_mail_and_behind_a_torn_line(place: Place) -> None:
    anchor = place.publish().anchor
    signed = Anchor(4, "a" * 64, anchor.ledger, anchor.at, "U1NIU0lH+/=")
    text = f"> {anchor.line} (kept)\r\nlooplab-anchor v1 {anchor.ledger} 9 abc{signed.line}\n+{anchor.line}"
    assert parse_anchors(text) == [anchor, signed]
    assert parse_anchors("looplab-anchor v1 nonsense 0\nlooplab-anchor v2 " + anchor.line[18:]) == []


def test_a_ledger_has_an_id_of_its_own_that_a_copy_keeps(place: Place, tmp_path: Path) -> None:
    place.ledger.close()
    shutil.copy(place.path, tmp_path / "copy.db")
    copy, other = Ledger(tmp_path / "copy.db"), Ledger(tmp_path / "other.db")
    assert copy.id() == Ledger(place.path).id() != other.id()


def test_a_ledger_of_an_older_version_gets_its_id_with_its_first_anchor(place: Place) -> None:
    place.ledger.execute("DELETE FROM meta WHERE key='ledger'")
    assert place.ledger.id() is None
    assert place.publish().anchor.ledger == place.ledger.id()


def test_an_empty_ledger_has_nothing_to_anchor(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="nothing is recorded yet"):
        publish(Ledger(tmp_path / "ledger.db"), tmp_path, [])


# -- comparing


def test_without_anchors_nothing_is_proved_about_a_rewrite(place: Place) -> None:
    place.forge(2)
    assert place.prove().sentence == NO_ANCHOR
    assert place.prove(git=False, file="anchors.txt").sentence == NO_ANCHOR


def test_a_rewrite_lies_between_the_last_anchor_that_matches_and_the_first_that_does_not(place: Place) -> None:
    first = place.publish(file="anchors.txt").anchor
    place.grow()
    second = place.publish(file="anchors.txt").anchor
    place.grow()
    assert place.prove(file="anchors.txt").sentence == (
        "compared with 2 anchors up to event 7; later events are protected only against accidental change"
    )
    place.forge(5)
    place.publish(file="anchors.txt")  # a later anchor, of the rewritten chain, changes nothing
    told = place.prove(file="anchors.txt").findings[-1]
    assert told.where == "event 7"
    assert told.why == (
        f"event 7 is not the one that was anchored on {second.at}; the last anchor before it that matches is event 3,"
        " so the rewriting lies in 4–7"
    )
    assert "no anchor before it matches, so the rewriting lies in 1–7" in why(place.prove(second.line))
    assert place.prove(first.line).anchors == 1


def test_every_form_of_an_anchor_can_be_compared_with(place: Place, tmp_path: Path) -> None:
    anchor = place.publish().anchor
    file = tmp_path / "mail.txt"
    file.write_text(f"keep this:\n{anchor.line}\n")
    given = [anchor.hash, anchor.hash[:12], anchor.hash.upper(), f"3:{anchor.hash}", f"3:{anchor.hash[:12]}"]
    given += [anchor.line, str(file)]
    for one in given:
        assert (place.prove(one).up_to, place.prove(one).findings) == (3, []), one
    assert place.prove(*given).anchors == 1
    place.forge(1)
    for one in given:
        assert why(place.prove(one))
    assert "no event has this hash" in why(place.prove(anchor.hash))


@pytest.mark.parametrize("given", ["abc", "0:" + "a" * 64, "nowhere.txt", "looplab-anchor v1", "git", "git:refs/x"])
def test_what_is_not_an_anchor_is_an_error_and_not_a_match(place: Place, given: str) -> None:
    with pytest.raises(LabError, match=r"anchor"):
        place.prove(given)


def test_a_tail_that_was_cut_off_is_found(place: Place) -> None:
    place.publish(file="anchors.txt")
    place.grow()
    anchor = place.publish(file="anchors.txt").anchor
    place.ledger.execute("DELETE FROM events WHERE seq > 5")
    place.ledger.note_head()
    proof = place.prove(file="anchors.txt")
    assert proof.findings[-1].why == (
        f"the end is cut off: event 7 was anchored on {anchor.at}, the ledger ends at event 5; the last anchor before it"
        " that matches is event 3, so 4–7 are missing or rewritten"
    )
    assert "known by the hash" in why(place.prove(f"7:{anchor.hash}"))


def test_a_ledger_that_was_replaced_is_found(place: Place, tmp_path: Path) -> None:
    old = place.publish(file="anchors.txt").anchor
    place.ledger.close()
    for path in place.path.parent.iterdir():
        path.unlink()
    new = Place(place.folder)
    new.grow(5)
    file = str(place.folder / "anchors.txt")
    for proof in (new.prove(file="anchors.txt"), new.prove(old.line), new.prove(file)):
        assert f"than this one ({new.ledger.id()}): {old.ledger} up to event 3 on {old.at}" in why(proof)
    # Whoever can append to the file, but not change it, gains nothing by anchoring the new ledger, too.
    anchor = new.publish(file="anchors.txt").anchor
    assert "It was replaced, or they are of another lab" in why(new.prove(file))
    assert new.prove(file, ledger_id=anchor.ledger).findings == []
    assert "not " + old.ledger in new.prove(file, ledger_id=old.ledger).findings[0].why
    # In what the lab file names, which they could change, the anchors of other labs are only mentioned.
    proof = new.prove(file="anchors.txt")
    assert proof.findings == []
    assert "they were not compared" in proof.notes[0]


def test_anchors_that_the_chain_mentions_must_be_there(place: Place) -> None:
    place.publish(file="anchors.txt")
    (place.folder / "anchors.txt").unlink()
    assert "1 anchor(s) in the chain are missing here, the first of event 3" in why(place.prove(file="anchors.txt"))


# -- where they go


def test_an_anchor_is_recorded_after_it_was_published(place: Place) -> None:
    done = place.publish(file="anchors.txt", command=[sys.executable, "-c", SAVE])
    assert (place.folder / "anchors.txt").read_text() == done.anchor.line + "\n"
    assert (place.folder / "got").read_text() == done.anchor.line + "\n"
    *_, event = place.ledger.events()
    assert (event.kind, event.data["seq"], event.data["hash"]) == ("anchored", 3, done.anchor.hash)
    assert event.data["where"] == list(done.where)
    assert place.ledger.first_broken_link() is None


def test_what_cannot_be_published_is_recorded_and_the_rest_is_published(place: Place, tmp_path: Path) -> None:
    config = {"file": str(tmp_path / "not mounted" / "anchors.txt"), "command": [sys.executable, "-c", SAVE]}
    done = place.publish(**config, git=True)
    assert done.where == (f"command {sys.executable} -c {SAVE}",)
    assert "No such file or directory" in done.problems[f"file {config['file']}"]
    assert "not in a git repository with a commit" in done.problems["git"]
    assert place.kinds()[3:] == ["anchored", "anchor failed", "anchor failed"]
    assert not (tmp_path / "not mounted").exists()
    assert "Is a directory" in next(iter(place.publish(file=str(tmp_path)).problems.values()))


def test_a_command_that_fails_or_hangs_is_a_problem(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    done = place.publish(command=["sh", "-c", "echo no sk-abcdefghijklmnopqrstuvwx >&2; exit 3"])
    assert next(iter(done.problems.values())) == "sh failed with exit code 3: no ***"
    monkeypatch.setattr(anchors, "TIMEOUT_S", 0.2)
    assert "was killed after 0.2 s" in next(iter(place.publish(command=["sleep", "600"]).problems.values()))
    assert "cannot be started" in next(iter(place.publish(command=["no-such-program"]).problems.values()))


@needs_git
def test_a_git_note_touches_neither_work_tree_nor_index_and_starts_no_hook(place: Place, repo: Path) -> None:
    for name in ("reference-transaction", "post-commit", "post-rewrite"):
        (repo / ".git" / "hooks" / name).write_text(f"#!/bin/sh\ntouch {repo}/hooked\n")
        (repo / ".git" / "hooks" / name).chmod(0o755)
    (repo / "new.txt").write_text("mine")
    before = (repo / ".git" / "index").read_bytes(), run_git(repo, "rev-parse", "HEAD")
    shown = run_git(repo, "status", "--porcelain")
    (repo / "hooked").unlink(missing_ok=True)
    done = place.publish(git=True)
    assert done.where == ("git",)
    assert not (repo / "hooked").exists()
    assert run_git(repo, "notes", "--ref", "looplab", "show", "HEAD").strip() == done.anchor.line
    assert ((repo / ".git" / "index").read_bytes(), run_git(repo, "rev-parse", "HEAD")) == before
    assert run_git(repo, "status", "--porcelain") == shown


@needs_git
def test_a_rewrite_is_found_by_the_notes_of_git(place: Place, repo: Path) -> None:
    place.publish(git=True)
    run_git(repo, "commit", "--quiet", "--allow-empty", "-m", "next")
    place.grow()
    place.publish(git=True)
    assert place.prove("git").anchors == place.prove(git=True).anchors == 2
    place.forge(5)
    assert "the rewriting lies in 4–7" in why(place.prove("git"))
    # Whoever changes the notes, too, must rewrite their history: a clone that has fetched it still has the anchors.
    clone = repo.parent / "clone"
    run_git(repo.parent, "clone", "--quiet", str(repo), str(clone))
    run_git(clone, "fetch", "--quiet", "origin", "refs/notes/looplab:refs/notes/theirs")
    run_git(repo, "notes", "--ref", "looplab", "remove", "HEAD")
    assert "the rewriting lies in 4–7" in why(place.prove("git"))
    run_git(repo, "update-ref", "-d", "refs/notes/looplab")
    with pytest.raises(LabError, match="no anchor in 'git'"):
        place.prove("git")
    run_git(repo, "fetch", "--quiet", str(clone), "refs/notes/theirs:refs/notes/fetched")
    assert "the rewriting lies in 4–7" in why(place.prove("git:refs/notes/fetched"))


@needs_git
def test_a_command_that_pushes_finds_the_note_of_its_own_anchor(place: Place, repo: Path, tmp_path: Path) -> None:
    run_git(tmp_path, "init", "--quiet", "--bare", "server")
    done = place.publish(git=True, command=["git", "push", "--quiet", str(tmp_path / "server"), anchors.NOTES])
    assert done.problems == {}
    place.forge(1)
    run_git(repo, "update-ref", "-d", anchors.NOTES)
    run_git(repo, "fetch", "--quiet", str(tmp_path / "server"), f"{anchors.NOTES}:refs/notes/pushed")
    assert "the rewriting lies in 1–3" in why(place.prove("git:refs/notes/pushed"))


@needs_git
def test_a_note_shows_the_last_anchors_and_its_history_has_all(
    place: Place, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "SHOWN_IN_NOTE", 2)
    lines = [place.publish(git=True).anchor.line for _ in range(4)]
    assert run_git(repo, "notes", "--ref", "looplab", "show", "HEAD").splitlines() == lines[2:]
    assert place.prove("git").anchors == 4


@needs_git
def test_labs_of_one_repository_that_publish_at_once_lose_no_anchor(place: Place, repo: Path) -> None:
    def work(n: int) -> None:
        mine = Place(repo / f"lab{n}")
        mine.grow()
        for _ in range(4):
            assert mine.publish(git=True).problems == {}

    for n in range(3):
        (repo / f"lab{n}").mkdir()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(3):
        mine = Place(repo / f"lab{n}")
        proof = mine.prove("git", ledger_id=mine.ledger.id())
        assert (proof.anchors, proof.findings) == (4, [])


# -- signatures


@pytest.fixture
def keys(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, passphrase: str = "") -> Path:
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", str(tmp_path / name)]
        subprocess.run(argv, check=True)
        return tmp_path / name

    return make


def allow(keys: list[Path], options: str = "") -> Path:
    file = keys[0].with_name("allowed")
    file.write_text("".join(f"{key.name}@lab {options} {key.with_suffix('.pub').read_text()}" for key in keys))
    return file


@needs_ssh
def test_only_anchors_that_an_allowed_signer_signed_count(place: Place, keys: Callable[..., Path]) -> None:
    ann, bob = keys("ann"), keys("bob")
    place.publish(file="anchors.txt")
    signed = place.publish(file="anchors.txt", sign=str(ann))
    assert signed.problems == {}
    proof = place.prove(file="anchors.txt", allowed=allow([bob, ann]))
    assert (proof.anchors, proof.up_to, proof.findings) == (1, 4, [])
    assert proof.notes == ["1 anchor(s) without a signature were not counted"]
    assert "not signed by an allowed signer" in why(place.prove(file="anchors.txt", allowed=allow([bob])))
    assert "no anchor is signed" in why(place.prove(signed.anchor.hash, allowed=allow([ann])))
    assert "no anchor is signed" in why(place.prove(allowed=allow([ann])))
    assert "signatures were not checked" in place.prove(file="anchors.txt").notes[0]
    with pytest.raises(LabError, match="no such file of allowed signers"):
        place.prove(file="anchors.txt", allowed=place.folder / "nowhere")


@needs_ssh
def test_a_signature_holds_for_its_own_line_purpose_and_time(place: Place, keys: Callable[..., Path]) -> None:
    ann = keys("ann")
    anchor = place.publish(sign=str(ann)).anchor
    place.grow()
    other = Anchor(4, place.ledger.head()[1], anchor.ledger, anchor.at, anchor.signature)
    assert "not signed by an allowed signer" in place.prove(other.line, allowed=allow([ann])).findings[0].why
    assert place.prove(anchor.line, allowed=allow([ann], 'namespaces="looplab"')).findings == []
    assert place.prove(anchor.line, allowed=allow([ann], 'namespaces="git"')).findings
    # The key was retired after it had signed.
    later = f"{int((anchor.at or '')[:4]) + 1}0101"
    assert place.prove(anchor.line, allowed=allow([ann], f'valid-before="{later}"')).findings == []
    assert place.prove(anchor.line, allowed=allow([ann], 'valid-before="20200101"')).findings


@needs_ssh
def test_the_signature_is_what_ssh_keygen_itself_verifies(
    place: Place, keys: Callable[..., Path], tmp_path: Path
) -> None:
    ann = keys("ann")
    line = place.publish(sign=str(ann)).anchor.line
    text, signature = line.rsplit(" ", 1)
    (tmp_path / "sig").write_text(f"-----BEGIN SSH SIGNATURE-----\n{signature}\n-----END SSH SIGNATURE-----\n")
    argv = ["ssh-keygen", "-Y", "verify", "-n", "looplab", "-I", "ann@lab", "-f", str(allow([ann])), "-s"]
    done = subprocess.run([*argv, str(tmp_path / "sig")], input=f"{text}\n", text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@needs_ssh
def test_a_key_with_a_passphrase_is_a_problem_and_not_a_question(place: Place, keys: Callable[..., Path]) -> None:
    done = place.publish(file="anchors.txt", sign=str(keys("ann", "secret words")))
    assert "ssh-keygen failed" in done.problems["sign"]
    assert done.anchor.signature is None
    assert len(done.where) == 1, "it is published all the same"
    assert "sign" in place.publish(sign="no-such-key").problems


@needs_ssh
def test_a_key_that_only_the_ssh_agent_has_can_sign(
    place: Place, keys: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = keys("ann")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: subprocess.run(["ssh-add", "-q", str(ann)], stderr=subprocess.DEVNULL).returncode == 0)
        ann.unlink()
        line = place.publish(sign=str(ann.with_suffix(".pub"))).anchor.line
    finally:
        agent.terminate()
        agent.wait()
    assert place.prove(line, allowed=allow([ann])).findings == []


# -- the thread of an engine


def test_a_problem_is_reported_once_until_it_is_mended(place: Place) -> None:
    told: list[str] = []
    code = f"import pathlib, sys; {SAVE}; sys.exit(not pathlib.Path('mended').exists())"
    config = AnchorConfig(command=[sys.executable, "-c", code], every=0.01)
    publisher = Publisher(place.path, place.folder, config, told.append)
    got = place.folder / "got"
    wait_for(lambda: got.exists() and len(got.read_text().splitlines()) >= 3)
    (place.folder / "mended").touch()
    wait_for(lambda: "anchored" in place.kinds())
    publisher.close()
    assert place.kinds()[3:5] == ["anchor failed", "anchored"]
    assert len(told) == 1
    assert "failed with exit code 1" in told[0]


def test_while_nothing_happens_nothing_is_anchored_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    last_kind = anchors._last_kind
    monkeypatch.setattr(anchors, "_last_kind", lambda ledger: looks.append(last_kind(ledger)) or looks[-1])
    publisher = Publisher(place.path, place.folder, AnchorConfig(file="anchors.txt", every=0.01), pytest.fail)
    wait_for(lambda: looks.count("anchored") >= 5)
    assert place.kinds()[3:] == ["anchored"]
    place.grow(1)
    wait_for(lambda: place.kinds()[-1] == "anchored")
    publisher.close()
    assert len((place.folder / "anchors.txt").read_text().splitlines()) == 3
    assert place.prove(file="anchors.txt").anchors == 3


def test_an_engine_does_not_wait_long_for_a_target_that_hangs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "CLOSE_S", 0.1)
    os.mkfifo(place.folder / "gate")
    told: list[str] = []
    publisher = Publisher(place.path, place.folder, AnchorConfig(file="gate"), told.append)  # opening it blocks
    publisher.close()
    assert "`looplab anchor` publishes it" in told[0]
    os.close(os.open(place.folder / "gate", os.O_RDONLY))
    publisher._thread.join()
