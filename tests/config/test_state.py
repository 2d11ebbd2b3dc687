"""The place of the ledger: one for each lab, found by everybody, and never a second one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from looplab.config.lab import LabConfig
from looplab.config.state import StateConfig, claim_state_folder, home, state_folder
from looplab.errors import LabError
from looplab.pipeline.recording import open_record


@pytest.fixture(autouse=True)
def without_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOPLAB_STATE_DIR", raising=False)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    return tmp_path / "lab"


@pytest.fixture
def config(tmp_path: Path) -> StateConfig:
    return StateConfig(tmp_path / "local")


def claimed(lab: Path, config: StateConfig) -> Path:
    """Claim the place of the ledger, and create one there."""
    folder = claim_state_folder(lab, config)
    folder.mkdir(exist_ok=True)
    (folder / "ledger.db").touch()
    return folder


def test_without_a_setting_the_ledger_is_in_the_lab(lab: Path) -> None:
    assert StateConfig.of(lab, None) == StateConfig()
    assert claim_state_folder(lab, StateConfig()) == state_folder(lab) == home(lab)
    assert not home(lab).exists()


def test_the_setting_is_a_folder_with_a_folder_for_each_lab(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert StateConfig.of(lab, "../local") == StateConfig(lab / "../local", is_demanded=True)
    monkeypatch.setenv("LOOPLAB_STATE_DIR", str(tmp_path / "local"))
    config = StateConfig.of(lab, None)
    assert config == StateConfig(tmp_path / "local")
    other = tmp_path / "elsewhere" / "lab"
    other.mkdir(parents=True)
    places = {claimed(lab, config), claimed(other, config)}
    assert len(places) == 2
    assert all(place.parent == tmp_path / "local" for place in places)
    monkeypatch.setenv("LOOPLAB_STATE_DIR", "local")
    with pytest.raises(LabError, match="not an absolute path"):
        StateConfig.of(lab, None)


def test_a_claimed_place_is_found_without_the_setting(lab: Path, config: StateConfig, tmp_path: Path) -> None:
    assert not state_folder(lab, config).exists()
    folder = claimed(lab, config)
    assert state_folder(lab) == state_folder(lab, StateConfig(tmp_path / "other")) == folder
    assert claim_state_folder(lab, StateConfig()) == folder


def test_a_ledger_in_the_lab_stays_there(lab: Path, config: StateConfig, tmp_path: Path) -> None:
    claimed(lab, StateConfig())
    assert claim_state_folder(lab, config) == home(lab)
    demanded = StateConfig(tmp_path / "local", is_demanded=True)
    with pytest.raises(LabError, match="but the ledger of this lab is in") as raised:
        state_folder(lab, demanded)
    assert "--move-ledger" in (raised.value.hint or "")


def test_on_another_machine_it_is_said_where_the_ledger_is(lab: Path, config: StateConfig) -> None:
    folder = claimed(lab, config)
    shutil.rmtree(folder)  # as on a machine with another disk
    for attempt in (state_folder, claim_state_folder):
        with pytest.raises(LabError, match=f"is in {folder} on host {os.uname().nodename}"):
            attempt(lab, config)
    assert not folder.exists()


def test_a_moved_lab_keeps_its_ledger_and_a_copy_does_not_share_it(
    lab: Path, config: StateConfig, tmp_path: Path
) -> None:
    folder = claimed(lab, config)
    moved = lab.rename(tmp_path / "moved")
    assert state_folder(moved, config) == folder
    copied = Path(shutil.copytree(moved, tmp_path / "copied"))
    assert claim_state_folder(moved, config) == folder
    with pytest.raises(LabError, match=f"a copy of {moved}"):
        state_folder(copied, config)
    (home(copied) / "state").unlink()
    assert claimed(copied, config) != folder
    lab.mkdir()  # a new lab at the former place
    assert claimed(lab, config) not in (folder, state_folder(copied))


def test_a_lab_that_lost_its_pointer_does_not_get_a_second_ledger(lab: Path, config: StateConfig) -> None:
    folder = claimed(lab, config)
    (home(lab) / "state").unlink()
    for attempt in (state_folder, claim_state_folder):
        with pytest.raises(LabError, match="does not point to it"):
            attempt(lab, config)
    shutil.copyfile(folder / "lab.json", home(lab) / "state")  # what the message says
    assert state_folder(lab, config) == folder


def test_a_claim_that_was_interrupted_is_completed(lab: Path, config: StateConfig) -> None:
    folder = claim_state_folder(lab, config)
    (home(lab) / "state").unlink()
    assert claim_state_folder(lab, config) == folder
    (home(lab) / "state").unlink()
    (folder / "lab.json").unlink()
    assert claim_state_folder(lab, config) == folder


def test_of_claims_at_the_same_time_all_get_the_same_place(lab: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from looplab.config.state import StateConfig, claim_state_folder\n"
        "sys.stdin.read()\n"
        "print(claim_state_folder(Path(sys.argv[1]), StateConfig(Path(sys.argv[2]))))"
    )
    argv = [sys.executable, "-c", code, str(lab), str(tmp_path / "local")]
    claims = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    places = set()
    for claim in claims:
        assert claim.stdin is not None
        claim.stdin.close()
    for claim in claims:
        assert claim.stdout is not None
        places.add(claim.stdout.read().strip())
        assert claim.wait() == 0
    assert places == {str(state_folder(lab))}


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"dir": "/x"}), "\x00"])
def test_a_damaged_pointer_is_an_error_not_a_new_ledger(lab: Path, config: StateConfig, content: str) -> None:
    home(lab).mkdir()
    (home(lab) / "state").write_text(content)
    with pytest.raises(LabError):
        claim_state_folder(lab, config)


def test_a_pipeline_that_is_the_first_to_record_points_to_the_place_too(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPLAB_STATE_DIR", str(tmp_path / "local"))
    with open_record(LabConfig(lab, {}), "toy", print) as record:
        assert record is not None
    monkeypatch.delenv("LOOPLAB_STATE_DIR")
    assert state_folder(lab).parent == tmp_path / "local"
    assert (state_folder(lab) / "ledger.db").exists()
