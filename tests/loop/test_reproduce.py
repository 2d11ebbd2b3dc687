"""Capsules that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop import reproduce
from looplab.runs import folder

GOOD: dict[str, Any] = {"program": "/usr/bin/python3", "argv": ["python3"], "machine": {}, "code": {"commit": "0" * 40}}
ODD: dict[str, tuple[Any, str]] = {
    "empty": ({}, "program is missing"),
    "a list": ([], "not an object"),
    "null": (None, "not an object"),
    "a number as program": ({**GOOD, "program": 7}, "program"),
    "a text as machine": ({**GOOD, "machine": "fast"}, "machine"),
    "a list as code": ({**GOOD, "code": [1]}, "code is not an object"),
    "an option as commit": ({**GOOD, "code": {"commit": "--help"}}, "not the hash of a commit"),
    "a list as commit": ({**GOOD, "code": {"commit": ["0" * 40]}}, "not the hash of a commit"),
    "a patch outside": ({**GOOD, "code": {"commit": None, "patch": "../../x.patch"}}, "not the name of a shared file"),
    "packages outside": ({**GOOD, "python": {"packages": "/etc/passwd"}}, "not the name of a shared file"),
    "data outside": ({**GOOD, "data": {"../victim.txt": "x"}}, "leads out"),
    "data of the machine": ({**GOOD, "data": {"/etc/passwd": "x"}}, "leads out"),
    "an untracked file outside": ({**GOOD, "code": {"commit": None, "untracked": ["a/../../b"]}}, "leads out"),
    "a number as untracked file": ({**GOOD, "code": {"commit": None, "untracked": [3]}}, "leads out"),
    "a NUL in a name": ({**GOOD, "data": {"a\0b": "x"}}, "leads out"),
}


def with_capsule(capsule: object) -> bytes:
    """The content of `run.json`."""
    return json.dumps({"capsule": capsule}).encode()


def launched(root: Path, content: bytes) -> tuple[StudyLedger, Path]:
    record = StudyLedger(Ledger(root / ".looplab/ledger.db"), "s")
    outputs = root / "outputs/s"
    outputs.mkdir(parents=True)
    hashes = folder.create(outputs / "0001-aaaa", {"run.json": content, "config.json": b"{}"})
    with record.ledger.write():
        record.launched("0001-aaaa", "cpu0", hashes)
    return record, outputs


@pytest.mark.parametrize("what", ODD)
def test_an_odd_capsule_is_an_error_in_words(tmp_path: Path, what: str) -> None:
    capsule, said = ODD[what]
    record, outputs = launched(tmp_path, with_capsule(capsule))
    with pytest.raises(LabError, match=said):
        reproduce.read_capsule(record, outputs, "0001-aaaa")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"{}"])
def test_what_is_not_json_is_an_error_in_words(tmp_path: Path, content: bytes) -> None:
    record, outputs = launched(tmp_path, content)
    with pytest.raises(LabError, match="is not a capsule"):
        reproduce.read_capsule(record, outputs, "0001-aaaa")


def test_a_good_capsule_is_returned(tmp_path: Path) -> None:
    record, outputs = launched(tmp_path, with_capsule(GOOD))
    assert reproduce.read_capsule(record, outputs, "0001-aaaa") == GOOD


def test_the_capsule_of_an_early_version_is_a_file_of_its_own(tmp_path: Path) -> None:
    record, outputs = launched(tmp_path, b"{}")
    files = {"run.json": b"{}", "config.json": b"{}", "capsule.json": json.dumps(GOOD).encode()}
    hashes = folder.create(outputs / "0002-bbbb", files)
    with record.ledger.write():
        record.launched("0002-bbbb", "cpu0", hashes)
    assert reproduce.read_capsule(record, outputs, "0002-bbbb") == GOOD == folder.read_capsule(outputs / "0002-bbbb")
    (outputs / "0002-bbbb/record/capsule.json").write_text(json.dumps({**GOOD, "program": "/tmp/trap"}))
    with pytest.raises(LabError, match=r"capsule\.json has changed since run"):
        reproduce.read_capsule(record, outputs, "0002-bbbb")


def test_a_capsule_that_the_chain_does_not_know_is_not_used(tmp_path: Path) -> None:
    record, outputs = launched(tmp_path, with_capsule(GOOD))
    record.ledger.execute("DELETE FROM events")
    with pytest.raises(LabError, match="the chain does not say"):
        reproduce.read_capsule(record, outputs, "0001-aaaa")


def test_a_capsule_that_is_a_pipe_or_gone_is_an_error_in_words(tmp_path: Path) -> None:
    import os

    record, outputs = launched(tmp_path, with_capsule(GOOD))
    path = outputs / "0001-aaaa/record/run.json"
    path.unlink()
    with pytest.raises(LabError, match="there is no run folder"):
        reproduce.read_capsule(record, outputs, "0001-aaaa")
    os.mkfifo(path)
    with pytest.raises(LabError, match="cannot be read"):
        reproduce.read_capsule(record, outputs, "0001-aaaa")
