"""Moving the ledger: killed at any moment, the lab has one ledger with all its events, and the move can be repeated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from looplab.config.state import StateConfig, home, new_folder, state_folder
from looplab.errors import LabError
from looplab.ledger import moving
from looplab.ledger.ledger import DamagedError, Ledger


def fill(path: Path, events: int = 3) -> Ledger:
    ledger = Ledger(path)
    for n in range(events):
        with ledger.write():
            ledger.append_event("a", "s", None, {"n": n})
    return ledger


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab").mkdir()
    fill(home(tmp_path / "lab") / "ledger.db").close()
    return tmp_path / "lab"


def move(lab: Path, config: StateConfig) -> Path:
    target = new_folder(lab, config)
    moving.move_ledger(lab, state_folder(lab), target)
    return target


def kinds(folder: Path) -> list[str]:
    ledger = Ledger.open_readonly(folder / "ledger.db")
    assert ledger.first_broken_link() is None
    return [event.kind for event in ledger.events()]


def test_a_ledger_moves_away_and_back(lab: Path, tmp_path: Path) -> None:
    config = StateConfig(tmp_path / "local")
    target = move(lab, config)
    assert state_folder(lab) == target
    assert kinds(target) == ["a", "a", "a", "ledger moved"]
    fill(target / "ledger.db", 1).close()
    assert move(lab, StateConfig()) == home(lab) == state_folder(lab)
    assert kinds(home(lab)) == ["a", "a", "a", "ledger moved", "a", "ledger moved"]
    assert move(lab, config) == target
    assert len(kinds(target)) == 7


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("step", ["_copy", "set_pointer", "sync_folder", "_put_aside", "LedgerMovedEvent"])
@pytest.mark.parametrize("after", [False, True])
def test_a_move_that_is_killed_leaves_one_ledger(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool, back: bool
) -> None:
    config = StateConfig(tmp_path / "local")
    if back:
        move(lab, config)
        config = StateConfig()
    real = getattr(moving, step)

    def killed(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(moving, step, killed)
        move(lab, config)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert kinds(state_folder(lab)).count("a") == 3
    with Ledger(state_folder(lab) / "ledger.db", create=False).write():
        pass
    target = new_folder(lab, config)
    if state_folder(lab) != target:
        move(lab, config)
    assert state_folder(lab) == target
    assert kinds(target).count("a") == 3


def test_a_writer_that_had_the_ledger_open_does_not_write_to_the_old_file(lab: Path, tmp_path: Path) -> None:
    writer = fill(home(lab) / "ledger.db", 1)
    move(lab, StateConfig(tmp_path / "local"))
    with pytest.raises(DamagedError, match="replaced"), writer.write():
        pass


def test_a_damaged_ledger_is_not_moved(lab: Path, tmp_path: Path) -> None:
    (home(lab) / "ledger.db").write_bytes(b"no database" * 1000)
    with pytest.raises(LabError):
        move(lab, StateConfig(tmp_path / "local"))
    assert state_folder(lab) == home(lab)
