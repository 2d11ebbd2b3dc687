"""Git in labs whose configuration is not ours: nothing of it runs, and what is not known is not called clean."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.runs import capsule as capsules
from looplab.runs import git as gitting
from looplab.runs.capsule import Capsules, doubt
from looplab.runs.git import git, isolated, require_commit


def run(folder: Path, *args: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    return subprocess.run(["git", *who, *args], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's own configuration, which is empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def lab(tmp_path: Path, home: Path) -> Path:
    folder = tmp_path / "lab"
    (folder / "outputs/s").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / ".gitignore").write_text("outputs/\n")
    run(folder, "init", "-q")
    run(folder, "add", "-A")
    run(folder, "commit", "-qm", "first")
    return folder


def code(lab: Path) -> dict[str, object]:
    return Capsules(lab, lab / "outputs/s").code()


def trap(lab: Path) -> str:
    """A program that leaves a trace."""
    program = lab.parent / "trap"
    program.write_text(f"#!/bin/sh\ntouch {lab.parent}/ran\ncat\n")
    program.chmod(0o755)
    return str(program)


CONFIGURED: dict[str, Callable[[Path], object]] = {
    "an external diff": lambda lab: run(lab, "config", "diff.external", trap(lab)),
    "a file system monitor": lambda lab: run(lab, "config", "core.fsmonitor", trap(lab)),
    "a file of the order that is missing": lambda lab: run(lab, "config", "diff.orderFile", "/missing"),
    "no prefix": lambda lab: run(lab, "config", "diff.noprefix", "true"),
    "colours": lambda lab: run(lab, "config", "color.ui", "always"),
    "a relative diff": lambda lab: run(lab, "config", "diff.relative", "true"),
    "no untracked files": lambda lab: run(lab, "config", "status.showUntrackedFiles", "no"),
    "a pager": lambda lab: run(lab, "config", "core.pager", trap(lab)),
}


@pytest.mark.parametrize("what", CONFIGURED)
def test_a_change_is_seen_whatever_is_configured_and_the_patch_applies(lab: Path, what: str) -> None:
    CONFIGURED[what](lab)
    (lab / "train.py").write_text("print(2)\n")
    (lab / "new.py").touch()
    found = code(lab)
    assert found["dirty"] is True
    assert found["untracked"] == ["new.py"]
    assert not (lab.parent / "ran").exists()
    patch = lab / "outputs/s" / str(found["patch"])
    run(lab, "checkout", "-q", "train.py")
    run(lab, "apply", str(patch))
    assert (lab / "train.py").read_text() == "print(2)\n"


def test_a_text_conversion_is_not_run(lab: Path) -> None:
    (lab / ".gitattributes").write_text("*.py diff=shown\n")
    run(lab, "add", "-A")
    run(lab, "commit", "-qm", "attributes")
    run(lab, "config", "diff.shown.textconv", trap(lab))
    run(lab, "config", "diff.shown.command", trap(lab))
    (lab / "train.py").write_text("print(2)\n")
    found = code(lab)
    assert found["dirty"] is True
    assert b"+print(2)" in (lab / "outputs/s" / str(found["patch"])).read_bytes()
    assert not (lab.parent / "ran").exists()


@pytest.mark.parametrize("kind", ["clean", "process"])
def test_a_changed_file_behind_a_filter_is_unknown_and_the_filter_is_not_run(lab: Path, kind: str) -> None:
    (lab / ".gitattributes").write_text("*.bin filter=large\n")
    (lab / "weights.bin").write_text("1")
    run(lab, "add", "-A")
    run(lab, "commit", "-qm", "weights")
    run(lab, "config", f"filter.large.{kind}", trap(lab))
    assert code(lab)["dirty"] is False
    (lab / "weights.bin").write_text("2")
    found = code(lab)
    assert (found["dirty"], found["patch"]) == (None, None)
    assert "weights.bin goes through a git filter" in str(doubt(found))
    assert not (lab.parent / "ran").exists()


def test_variables_of_git_are_ignored(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = lab.parent / "other"
    other.mkdir()
    run(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", trap(lab))
    (lab / "train.py").write_text("print(2)\n")
    found = code(lab)
    assert (len(str(found["commit"])), found["dirty"]) == (40, True)
    assert not (lab.parent / "ran").exists()


def test_a_diff_that_fails_is_unknown_not_clean(lab: Path) -> None:
    (lab / "train.py").write_text("print(2)\n")
    blob = run(lab, "rev-parse", "HEAD:train.py").strip()
    (lab / ".git/objects" / blob[:2] / blob[2:]).unlink()
    found = code(lab)
    assert (found["dirty"], found["patch"]) == (None, None)
    assert "git diff" in str(doubt(found))


def test_a_diff_that_takes_too_long_is_unknown_not_clean(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "bin").mkdir()
    slow = f'#!/bin/sh\nfor word; do [ "$word" = diff ] && exec sleep 60; done\nexec {real} "$@"\n'
    (tmp_path / "bin/git").write_text(slow)
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setattr(capsules, "GIT_S", 2.0)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    found = code(lab)
    assert found["dirty"] is None
    assert "took longer" in str(doubt(found))


@pytest.mark.skipif(os.getuid() != 0, reason="needs another owner")
def test_a_lab_that_git_does_not_trust_is_unknown(lab: Path) -> None:
    for path in (lab, lab / ".git"):
        os.chown(path, 65534, 65534)
    found = code(lab)
    assert (found["commit"], found["dirty"]) == (None, None)
    assert "dubious ownership" in str(doubt(found))


def test_a_lab_without_git_is_not_in_doubt(tmp_path: Path) -> None:
    found = Capsules(tmp_path, tmp_path).code()
    assert found == {"commit": None}
    assert doubt(found) is None


def test_a_repository_without_a_commit_is_unknown(tmp_path: Path, home: Path) -> None:
    run(tmp_path, "init", "-q")
    assert doubt(Capsules(tmp_path, tmp_path).code()) is not None


def test_untracked_files_beyond_the_named_ones_are_counted(lab: Path) -> None:
    for number in range(60):
        (lab / f"module_{number}.py").touch()
    found = code(lab)
    assert isinstance(found["untracked"], list)
    assert (len(found["untracked"]), found["untracked_count"]) == (50, 60)


def test_names_are_kept_as_they_are(lab: Path) -> None:
    (lab / 'a "name"\n中.py').touch()
    assert code(lab)["untracked"] == ['a "name"\n中.py']


def test_the_code_of_a_lab_below_the_top_is_its_own(lab: Path) -> None:
    (lab / "inner/outputs/s").mkdir(parents=True)
    (lab / "inner/a.py").write_text("1")
    run(lab, "add", "-A")
    run(lab, "commit", "-qm", "inner")
    (lab / "inner/a.py").write_text("2")
    (lab / "inner/b.py").touch()
    (lab / "train.py").write_text("print(2)\n")
    found = Capsules(lab / "inner", lab / "inner/outputs/s").code()
    patch = (lab / "inner/outputs/s" / str(found["patch"])).read_text()
    assert "a/inner/a.py" in patch
    assert "train.py" not in patch
    assert found["untracked"] == ["inner/b.py"]


# -- commands that change a work tree


def test_programs_of_the_repository_do_not_run_but_the_persons_own_do(lab: Path, home: Path) -> None:
    own = lab.parent / "own"
    own.write_text(f"#!/bin/sh\ntouch {lab.parent}/own-ran\ncat\n")
    own.chmod(0o755)
    (lab / ".gitattributes").write_text("*.own filter=own\n*.lab filter=lab\n*.both filter=both\n")
    run(lab, "config", "--global", "filter.own.clean", str(own))
    run(lab, "config", "--global", "filter.both.clean", str(own))
    for name in ("lab", "both"):
        run(lab, "config", f"filter.{name}.clean", trap(lab))
    (lab / "x.lab").write_text("1")
    git(lab, "add", "-A")
    assert not (lab.parent / "own-ran").exists()
    for name in ("own", "both"):
        (lab / f"x.{name}").write_text("1")
        git(lab, "add", "-A")
        assert (lab.parent / "own-ran").exists()
        (lab.parent / "own-ran").unlink()
    assert not (lab.parent / "ran").exists()


def test_a_filter_of_the_person_runs_no_program_that_the_repository_names(lab: Path, home: Path) -> None:
    """git-lfs runs the transfer agents and extensions that it finds in git's configuration."""
    lfs = lab.parent / "lfs"
    read = "for key in $(git config --name-only --get-regexp '^lfs'); do $(git config $key) </dev/null >/dev/null; done"
    lfs.write_text(f"#!/bin/sh\n{read}\ncat\n")
    lfs.chmod(0o755)
    (lab / ".gitattributes").write_text("*.bin filter=lfs\n")
    run(lab, "config", "--global", "filter.lfs.clean", str(lfs))
    for key in ("standalonetransferagent", "https://host.standalonetransferagent", "customtransfer.mine.path",
                "extension.mine.clean", "extension.mine.smudge"):  # fmt: skip
        run(lab, "config", f"lfs.{key}", trap(lab))
    (lab / "x.bin").write_text("1")
    git(lab, "add", "-A")
    assert not (lab.parent / "ran").exists()


def test_hooks_merge_drivers_and_smudge_filters_do_not_run(lab: Path) -> None:
    program = trap(lab)
    for hook in ("post-checkout", "post-merge", "pre-commit", "commit-msg", "post-commit", "reference-transaction"):
        (lab / ".git/hooks").mkdir(exist_ok=True)
        (lab / ".git/hooks" / hook).symlink_to(program)
    run(lab, "config", "merge.mine.driver", program)
    run(lab, "config", "filter.mine.smudge", program)
    (lab / ".gitattributes").write_text("*.py merge=mine filter=mine\n")
    git(lab, "add", "-A")
    git(lab, *gitting.NOBODY, "commit", "-qm", "attributes")
    git(lab, "worktree", "add", "-q", "-b", "other", "--", str(lab.parent / "tree"), "HEAD")
    (lab.parent / "tree/train.py").write_text("print(3)\n")
    git(lab.parent / "tree", *gitting.NOBODY, "commit", "-qam", "three")
    (lab / "train.py").write_text("print(4)\n")
    git(lab, *gitting.NOBODY, "commit", "-qam", "four")
    with pytest.raises(LabError, match="CONFLICT"):
        git(lab, *gitting.NOBODY, "merge", "-m", "both", "other")
    assert not (lab.parent / "ran").exists()


def test_a_configuration_that_changes_in_the_same_moment_is_not_used(lab: Path) -> None:
    (lab / ".gitattributes").write_text("*.py filter=late\n")
    run(lab, "add", "-A")
    run(lab, "commit", "-qm", "attributes")
    (lab / "train.py").write_text("print(2)\n")
    with isolated(lab, timeout=20) as (commit, env):
        run(lab, "config", "filter.late.clean", trap(lab))
        assert "+print(2)" in git(lab, "diff", *gitting.PLAIN_DIFF, commit, env=env)
    assert not (lab.parent / "ran").exists()


@pytest.mark.parametrize("text", ["--help", "HEAD", "main", "0" * 39, "g" * 40, "", None, 7, "0" * 40 + "\n"])
def test_only_a_full_hash_is_a_commit(text: object) -> None:
    with pytest.raises(LabError, match="not the hash"):
        require_commit(text)


# -- files that git was told to ignore, and other places it looks


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_a_change_that_git_was_told_to_ignore_is_seen(lab: Path, flag: str) -> None:
    (lab / "gone.py").write_text("1")
    run(lab, "add", "-A")
    run(lab, "commit", "-qm", "two")
    run(lab, "update-index", flag, "train.py", "gone.py")
    (lab / "gone.py").unlink()
    assert code(lab)["dirty"] is (flag == "--assume-unchanged")  # the other is as in a sparse checkout
    (lab / "train.py").write_text("print(2)\n")
    found = code(lab)
    assert found["dirty"] is True
    assert "+print(2)" in (lab / "outputs/s" / str(found["patch"])).read_text()
    assert run(lab, "ls-files", "-v", "train.py")[0] in "hS"  # its own index stays as it is


def test_a_change_in_the_second_of_the_commit_is_seen_later(lab: Path) -> None:
    """Git compares seconds, sizes and inodes; files as new as the index, it reads. A copy of the index must be as old."""
    run(lab, "update-index", "--assume-unchanged", "train.py")
    index = lab / ".git/index"
    for n in itertools.count():
        text = f"print({10 + n % 80})\n"
        (lab / "train.py").write_text(text)
        run(lab, "update-index", "--no-assume-unchanged", "train.py")
        run(lab, "commit", "-qam", text)
        run(lab, "update-index", "--assume-unchanged", "train.py")
        committed = os.stat(lab / "train.py")
        (lab / "train.py").write_text("print(99)\n")
        changed = os.stat(lab / "train.py")
        times = (committed.st_mtime, committed.st_ctime, changed.st_mtime, changed.st_ctime, index.stat().st_mtime)
        if len(set(map(int, times))) == 1:
            break
    while int(time.time()) == int(changed.st_mtime):
        time.sleep(0.01)
    found = code(lab)
    assert "+print(99)" in (lab / "outputs/s" / str(found["patch"])).read_text()


@pytest.fixture
def nested(lab: Path) -> Path:
    """A lab with a submodule; the configuration of the submodule names a filter that leaves a trace."""
    other = lab.parent / "other"
    other.mkdir()
    (other / "lib.py").write_text("print(1)\n")
    run(other, "init", "-q")
    run(other, "add", "-A")
    run(other, "commit", "-qm", "first")
    run(lab, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "sub")
    run(lab, "commit", "-qm", "submodule")
    run(lab / "sub", "config", "filter.late.clean", trap(lab))
    info = lab / ".git/modules/sub/info"
    info.mkdir(exist_ok=True)
    return lab


def test_changes_inside_of_a_submodule_are_unknown_not_clean(nested: Path) -> None:
    assert doubt(code(nested)) is None
    (nested / "sub/lib.py").write_text("print(2)\n")
    found = code(nested)
    assert "the submodule sub has uncommitted changes" in str(doubt(found))
    assert found["dirty"] is None


def test_versions_do_not_run_programs_of_submodules(nested: Path) -> None:
    from looplab.iterate.git import Repo

    (nested / ".git/modules/sub/info/attributes").write_text("*.py filter=late\n")
    (nested / "sub/lib.py").write_text("print(2)\n")
    repo = Repo(nested)
    assert repo.unsaved(["."]) == []
    tree = repo.add_tree(nested / ".looplab/tree", "other", repo.head())
    run(tree.path, "-c", "protocol.file.allow=always", "submodule", "update", "--init", "-q")
    inner = Path(run(tree.path / "sub", "rev-parse", "--path-format=absolute", "--git-dir").strip())
    run(tree.path / "sub", "config", "filter.late.clean", trap(nested))
    (inner / "info").mkdir(exist_ok=True)
    (inner / "info/attributes").write_text("*.py filter=late\n")
    (tree.path / "sub/lib.py").write_text("print(3)\n")
    (tree.path / "train.py").write_text("print(3)\n")
    commit = tree.commit("other", "three")
    assert run(nested, "diff", "--name-only", "HEAD", commit) == "train.py\n"
    assert not (nested.parent / "ran").exists()


def test_changes_of_the_repository_outside_of_the_lab_are_named(lab: Path) -> None:
    (lab / "inner/outputs/s").mkdir(parents=True)
    (lab / "inner/a.py").write_text("1")
    run(lab, "add", "-A")
    run(lab, "commit", "-qm", "inner")
    inner = Capsules(lab / "inner", lab / "inner/outputs/s")
    assert "elsewhere" not in inner.code()
    (lab / "train.py").write_text("print(2)\n")
    assert inner.code()["elsewhere"] == ["train.py"]
    assert inner.code()["dirty"] is False


@pytest.mark.parametrize("what", ["rev-parse", "worktree", "diff-tree"])
def test_a_partial_clone_fetches_nothing_by_a_program_of_the_repository(lab: Path, what: str) -> None:
    tree = run(lab, "rev-parse", "HEAD^{tree}").strip()
    for key, value in {
        "core.repositoryformatversion": "1", "extensions.partialclone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": str(lab), "remote.origin.uploadpack": trap(lab), "protocol.file.allow": "always",
    }.items():  # fmt: skip
        run(lab, "config", key, value)
    (lab / ".git/objects" / tree[:2] / tree[2:]).unlink()
    asked = {
        "rev-parse": ("--verify", "HEAD^{tree}"),
        "worktree": ("add", "--detach", "--", str(lab.parent / "tree"), "HEAD"),
        "diff-tree": ("-r", "HEAD", "HEAD"),
    }
    with pytest.raises(LabError, match="not allowed"):
        git(lab, what, *asked[what])
    assert not (lab.parent / "ran").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"remote.origin.receivepack": "{trap}"},
        {"push.gpgSign": "true", "gpg.format": "ssh", "gpg.ssh.defaultKeyCommand": "{trap}"},
        {"remote.origin.pushurl": "ext::{trap}", "protocol.ext.allow": "always"},
        {"credential.helper": "!{trap}", "core.sshCommand": "{trap}", "remote.origin.pushurl": "ssh://localhost/x"},
        {"remote.origin.vcs": "{trap}"},
    ],
)
def test_a_push_runs_no_program_of_the_repository(lab: Path, settings: dict[str, str]) -> None:
    from looplab.iterate.git import Repo

    remote = lab.parent / "remote.git"
    run(lab, "init", "-q", "--bare", str(remote))
    run(remote, "config", "receive.certNonceSeed", "seed")
    run(lab, "config", "remote.origin.url", str(remote))
    run(lab, "config", "push.default", "current")
    for key, value in settings.items():
        run(lab, "config", key, value.replace("{trap}", trap(lab)))
    Repo(lab).push()
    assert not (lab.parent / "ran").exists()


@pytest.mark.parametrize("elsewhere", ["/", "victim"])
def test_a_work_tree_elsewhere_is_rejected(lab: Path, elsewhere: str) -> None:
    from looplab.iterate.git import Repo

    (lab.parent / "victim").mkdir()
    run(lab, "config", "core.worktree", str(lab.parent / elsewhere))
    (lab / "train.py").write_text("print(2)\n")
    assert "the work tree of the git repository is" in str(doubt(code(lab)))
    with pytest.raises(LabError, match="the work tree of the git repository is"):
        Repo(lab)


def test_a_repository_without_a_commit_is_explained_in_one_line(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    with pytest.raises(LabError, match="its repository has no commit yet") as raised, isolated(tmp_path, timeout=60.0):
        pass
    assert len(str(raised.value).splitlines()) == 1
