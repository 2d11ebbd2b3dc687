from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from looplab.runs.capsule import Capsules, clean_patch

TOKEN = "ghp_0123456789abcdefghij0123456789"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    lab = tmp_path / "repository" / "lab"
    lab.mkdir(parents=True)
    (lab / ".env").write_text("DB_PASS=old-password\n")
    (lab / "train.py").write_text("lr = 1\n")
    (lab / "upload.py").write_text(f"a = 1\ntoken = '{TOKEN}'\nb = 2\n")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(lab.parent))
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    return lab


def test_a_changed_file_for_secrets_is_left_out_of_the_patch_and_named(lab: Path, tmp_path: Path) -> None:
    (lab / ".env").write_text("DB_PASS=new-password\n")
    (lab / "train.py").write_text("lr = 2\n")
    code = Capsules(lab, tmp_path).code()
    assert code["dirty"]
    assert code["left_out"] == {"lab/.env": hashlib.sha256((lab / ".env").read_bytes()).hexdigest()}
    assert "redacted" not in code
    patch = (tmp_path / code["patch"]).read_text()
    assert "+lr = 2" in patch
    assert "password" not in patch
    subprocess.run(["git", "checkout", "-q", "."], cwd=lab, check=True)
    subprocess.run(["git", "apply", str(tmp_path / code["patch"])], cwd=lab.parent, check=True)
    assert (lab / "train.py").read_text() == "lr = 2\n"


def test_a_tree_in_which_only_such_a_file_changed_is_dirty_without_a_patch(lab: Path, tmp_path: Path) -> None:
    (lab / ".env").unlink()
    code = Capsules(lab, tmp_path).code()
    assert (code["dirty"], code["patch"], code["left_out"]) == (True, None, {"lab/.env": None})


def test_a_token_in_a_changed_file_is_hidden_and_the_capsule_says_so(lab: Path, tmp_path: Path) -> None:
    (lab / "upload.py").write_text(f"a = 3\ntoken = '{TOKEN}'\nb = 2\n")
    (lab / "train.py").write_text("lr = 2\n")
    code = Capsules(lab, tmp_path).code()
    assert code["redacted"] == ["lab/upload.py"]
    patch = (tmp_path / code["patch"]).read_text()
    assert TOKEN not in patch
    assert "+a = 3" in patch
    assert "+lr = 2" in patch


@pytest.mark.parametrize(
    "patch", [b"", b"no patch at all", b"diff --git ", b"diff --git a/x b/x\n", b"\xff\ndiff --git \xff"]
)
def test_any_bytes_are_taken_as_a_patch(patch: bytes, tmp_path: Path) -> None:
    assert clean_patch(patch, tmp_path).patch == patch
