"""looplab doctor: the machine, the disk, and what a lab lacks."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from looplab.cli import doctor
from looplab.config import disk


def found(done: Any) -> dict[tuple[str, str], dict[str, str]]:
    return {(entry["area"], entry["name"]): entry for entry in done.json()["findings"]}


def test_a_whole_lab_lacks_nothing(lab: Any) -> None:
    done = lab("doctor", "--json")
    assert done.json()["ok"] is True
    findings = found(done)
    assert findings["lab", "toy"]["found"] == "lacks nothing"
    assert findings["disk", "rename"]["level"] == "ok"
    assert findings["machine", "python"]["found"]
    assert findings["programs", "git"]["found"].startswith("git version")
    shown = lab("doctor").out
    assert "write-ahead log" in shown
    assert shown.endswith("all is well\n")


def test_what_a_lab_lacks_is_listed_with_what_to_do(lab: Any) -> None:
    lab.configure(data=["corpus.txt"])
    done = lab("doctor", "--json", code=1)
    finding = found(done)["lab", "toy"]
    assert (finding["found"], finding["level"]) == ("corpus.txt does not exist", "problem")
    (lab.folder / "corpus.txt").write_text("x")
    trainer = lab.folder / "train.py"
    trainer.write_text("import no_such_package.part\n" + trainer.read_text())
    done = lab("doctor", code=1)
    assert "the trainer imports no_such_package, which is missing" in done.out
    assert "1 problem" in done.out
    lab.configure(launch={"command": ["no-such-program"]})
    assert "is not on PATH" in found(lab("doctor", "--json", code=1))["lab", "toy"]["found"]


def test_a_search_without_an_objective_and_an_agent_without_its_program_are_problems(lab: Any, tmp_path: Path) -> None:
    python = {"command": [sys.executable, "train.py", "{config}"]}
    lab.configure(launch=python, objective=None, proposers=[{"search": "auto"}])
    finding = found(lab("doctor", "--json", code=1))["lab", "toy"]
    assert (finding["found"], finding["level"]) == ("search needs an objective", "problem")
    assert "`looplab objective METRIC` writes it" in finding["fix"]
    lab.configure(objective={"metric": "loss", "goal": "min"}, proposers=[{"agent": {"cli": "codex"}}])
    (tmp_path / "bin").mkdir()
    finding = found(lab("doctor", "--json", code=1, env={"PATH": str(tmp_path / "bin")}))["lab", "toy"]
    assert "codex" in finding["found"]
    assert "npm install -g @openai/codex" in finding["fix"]


def test_versions_need_a_repository_and_an_agent(lab: Any) -> None:
    lab.write(
        "iterate.yaml", "evaluate: {command: [score], metric: loss}\nagent: {cli: command, command: [no-such-agent]}\n"
    )
    done = lab("doctor", code=1)
    assert "no-such-agent" in done.out
    assert "git init" in done.out
    assert "2 problems" in done.out


def test_programs_that_are_missing_are_notes_and_no_problem(lab: Any, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "codex").write_text("#!/bin/sh\necho codex-cli 7.8.9\n")
    (programs / "codex").chmod(0o755)
    (programs / "git").symlink_to(str(shutil.which("git")))
    findings = found(lab("doctor", "--json", env={"PATH": str(programs)}))
    assert findings["programs", "codex"]["found"] == "codex-cli 7.8.9"
    assert findings["programs", "sbatch"]["level"] == findings["programs", "claude"]["level"] == "note"
    assert "npm install" in findings["programs", "claude"]["fix"]


def test_a_cluster_that_cannot_be_reached_is_a_problem_of_the_lab_that_uses_it(lab: Any, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    lab.configure(launch={"command": [sys.executable, "train.py", "{config}"]}, executor={"slurm": {}})
    findings = found(lab("doctor", "--json", code=1, env={"PATH": str(programs)}))
    assert findings["lab", "toy"]["level"] == "problem"
    assert findings["lab", "toy"]["found"] == "Slurm cannot be reached: sinfo is not on PATH"
    assert "scontrol ping" in findings["lab", "toy"]["fix"]
    assert findings["disk", "shared"]["level"] == "note"  # the disk of the tests is local
    (programs / "sinfo").write_text("#!/bin/sh\nexit 0\n")
    (programs / "sinfo").chmod(0o755)
    assert found(lab("doctor", "--json", env={"PATH": str(programs)}))["lab", "toy"]["found"] == "lacks nothing"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        lab.configure(executor={"ray": {"address": address, "folder": str(tmp_path)}})
        findings = found(lab("doctor", "--json", code=1))
    if find_spec("ray") is not None:
        assert f"cannot connect to the Ray cluster at {address}" in findings["lab", "toy"]["found"]
    assert ("disk", "shared") not in findings


def test_outside_a_lab_the_machine_is_checked(lab: Any) -> None:
    done = lab("doctor", "--json", cwd=lab.aside)
    assert done.json()["lab"] is None
    assert {entry["area"] for entry in done.json()["findings"]} == {"machine", "programs"}


def test_a_network_disk_is_named_with_its_cache_and_the_mode_of_the_ledger(
    lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOOPLAB_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.folder))
    monkeypatch.setattr(disk, "filesystem_type", lambda folder: 0x6969 if folder.is_relative_to(lab.folder) else 0)
    doctor.check_up(lab.folder, json=True)
    findings = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["findings"]}
    assert "a network disk (NFS)" in findings["kind"]["found"]
    assert "rollback journal" in findings["ledger"]["found"]
    assert "--move-ledger" in findings["ledger"]["fix"]
    assert "cache" in findings
    lab.configure(state_dir=str(lab.aside / "local"))
    doctor.check_up(lab.folder, json=True)
    findings = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["findings"]}
    assert "write-ahead log" in findings["ledger"]["found"]
