"""Labs that are moved, copied or taken apart while an engine runs, and between two engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event

import pytest
from tests.loop.small_lab import EngineThread, make_lab

from looplab.errors import LabError
from looplab.ledger.ledger import Ledger
from looplab.ledger.study import StudyLedger
from looplab.loop.outcome import HaltError
from looplab.loop.place import PlaceMonitor, find_move, note_place
from looplab.loop.session import last_options, relative_to_lab


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / "lab").mkdir()
    return Ledger(tmp_path / "lab/.looplab/ledger.db")


def kinds(ledger: Ledger) -> list[str]:
    return [event.kind for event in ledger.events()]


# -- while an engine runs


def test_an_engine_whose_lab_is_renamed_stops_and_makes_nothing_at_the_old_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    gate = tmp_path / "gate"
    lab = make_lab(tmp_path / "lab", gate)
    engine = EngineThread(lab)
    engine.until_running()
    lab.rename(tmp_path / "moved")
    engine.join()
    assert isinstance(engine.error, HaltError)
    assert engine.error.exit_code != 0
    assert "the lab is no longer at" in engine.error.message
    assert not lab.exists()
    # The training goes on where the lab is now, and the next engine there adopts it.
    gate.touch()
    after = EngineThread(tmp_path / "moved")
    after.join()
    assert after.error is None
    ledger = Ledger(tmp_path / "moved/.looplab/ledger.db")
    assert [(run.state, run.status) for run in StudyLedger(ledger, "small").runs()] == [("ended", "ok")] * 2
    assert kinds(ledger).count("moved") == 1
    assert any("moved here from" in news.text for news in after.news)
    assert not lab.exists()


@pytest.mark.parametrize("name", ["ledger.db", "small.lock"])
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_an_engine_whose_ledger_or_lock_is_gone_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    gate = tmp_path / "gate"
    lab = make_lab(tmp_path / "lab", gate)
    engine = EngineThread(lab)
    engine.until_running()
    if how == "deleted":
        (lab / ".looplab" / name).unlink()
    else:
        shutil.copy(lab / ".looplab" / name, lab / "new")
        (lab / "new").replace(lab / ".looplab" / name)
    engine.join()
    gate.touch()
    assert isinstance(engine.error, HaltError)
    assert (lab / ".looplab" / name).exists() == (how == "replaced")


@pytest.mark.parametrize("name", ["outputs", "outputs/small"])
@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_an_engine_whose_outputs_are_gone_stops_and_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    gate = tmp_path / "gate"
    lab = make_lab(tmp_path / "lab", gate)
    engine = EngineThread(lab)
    engine.until_running()
    (lab / name).rename(tmp_path / "elsewhere")
    if how == "replaced":
        (lab / name).mkdir()
    engine.join()
    gate.touch()
    assert isinstance(engine.error, HaltError)
    assert f"{name} was moved or deleted" in engine.error.message
    if how == "moved":
        assert not (lab / name).exists()
        (tmp_path / "elsewhere").rename(lab / name)
        after = EngineThread(lab)
        after.join()
        assert after.error is None
        runs = StudyLedger(Ledger(lab / ".looplab/ledger.db"), "small").runs()
        assert [(run.state, run.status) for run in runs] == [("ended", "ok")] * 2


def test_a_replaced_ledger_halts_the_engine_even_if_a_write_notices_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPLAB_LOCK_DIR", str(tmp_path / "locks"))
    noticed = Event()
    is_replaced, lost = Ledger.is_replaced, PlaceMonitor.lost

    def look(ledger: Ledger) -> bool:
        if is_replaced(ledger):
            noticed.set()
        return noticed.is_set()

    monkeypatch.setattr(Ledger, "is_replaced", look)
    monkeypatch.setattr(PlaceMonitor, "lost", lambda place: lost(place) if noticed.is_set() else None)
    gate = tmp_path / "gate"
    lab = make_lab(tmp_path / "lab", gate)
    engine = EngineThread(lab)
    engine.until_running()
    shutil.copy(lab / ".looplab/ledger.db", lab / "new")
    (lab / "new").replace(lab / ".looplab/ledger.db")
    gate.touch()  # the end of the training is the next write
    engine.join()
    assert isinstance(engine.error, HaltError)
    assert "the ledger at" in engine.error.message
    assert "adopts them" in str(engine.error.hint)


def test_a_place_is_lost_when_something_else_is_put_there(ledger: Ledger) -> None:
    lab = ledger.path.parents[1]
    place = PlaceMonitor(lab, "s", ledger.path)
    assert place.lost() is None
    lab.rename(lab.with_name("moved"))
    assert "no longer at" in str(place.lost())
    lab.mkdir()
    assert "not the one that the engine started with" in str(place.lost())
    lab.rmdir()
    lab.touch()
    assert place.lost() is not None
    lab.unlink()
    lab.with_name("moved").rename(lab)
    assert place.lost() is None
    place.close()


# -- between two engines


def test_a_lab_that_stays_has_no_moves(ledger: Ledger) -> None:
    lab = ledger.path.parents[1]
    assert find_move(lab) is None
    for _ in range(2):
        assert note_place(lab, "s", ledger) is None
        assert find_move(lab) is None
    assert kinds(ledger) == []


def test_a_moved_lab_is_recorded_once(ledger: Ledger) -> None:
    lab = ledger.path.parents[1]
    note_place(lab, "s", ledger)
    moved = lab.rename(lab.with_name("moved"))
    move = find_move(moved)
    assert move is not None
    assert move.kind == "moved"
    ledger.close()
    there = Ledger(moved / ".looplab/ledger.db")
    for _ in range(2):
        note_place(moved, "s", there)
    assert kinds(there) == ["moved"]
    assert find_move(moved) is None


def test_a_copy_knows_that_it_is_one(ledger: Ledger) -> None:
    lab = ledger.path.parents[1]
    note_place(lab, "s", ledger)
    ledger.close()
    copy = Path(shutil.copytree(lab, lab.with_name("copy")))
    move = find_move(copy)
    assert move is not None
    assert move.kind == "copied"
    assert find_move(lab) is None
    copied = Ledger(copy / ".looplab/ledger.db")
    note_place(copy, "s", copied)
    assert kinds(copied) == ["copied"]
    copied.close()
    shutil.rmtree(lab)
    assert find_move(copy) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1, "path": [], "inode": "x"}', "\x00" * 100_000])
def test_a_damaged_place_is_written_again(ledger: Ledger, text: str) -> None:
    lab = ledger.path.parents[1]
    (lab / ".looplab/place").write_text(text)
    assert find_move(lab) is None
    note_place(lab, "s", ledger)
    assert find_move(lab) is None
    assert (lab / ".looplab/place").read_text() != text


# -- names of configs


def test_configs_are_named_by_their_path_inside_the_lab(tmp_path: Path) -> None:
    names = [str(tmp_path / "configs/a.json"), "/elsewhere/a.json", "configs/b.json"]
    assert relative_to_lab(tmp_path, names) == ("configs/a.json", "/elsewhere/a.json", "configs/b.json")


def test_configs_of_a_lab_that_was_moved_are_found_again(ledger: Ledger) -> None:
    lab = ledger.path.parents[1]
    (lab / "configs").mkdir()
    (lab / "configs/a.json").touch()
    text = '{"cfgs": ["/old/place/lab/configs/a.json", "/old/place/lab/configs/gone.json"]}'
    ledger.execute("INSERT INTO meta VALUES ('options:s', ?)", (text,))
    assert last_options(StudyLedger(ledger, "s"), lab).cfgs == ("configs/a.json", "/old/place/lab/configs/gone.json")
    with pytest.raises(LabError):
        last_options(StudyLedger(ledger, "t"), lab)


def test_a_folder_in_the_place_of_a_file_is_put_aside(ledger: Ledger) -> None:
    lab = ledger.path.parents[1]
    (lab / ".looplab" / "place").mkdir()
    note_place(lab, "s", ledger)
    assert (lab / ".looplab" / "place").is_file()


def test_a_study_folder_that_becomes_a_link_is_noticed(ledger: Ledger) -> None:
    lab = ledger.path.parents[1]
    (lab / "outputs/s").mkdir(parents=True)
    place = PlaceMonitor(lab, "s", ledger.path)
    assert place.lost() is None
    (lab / "outputs/s").rename(lab / "outputs/t")
    (lab / "outputs/s").symlink_to(lab / "outputs/t")
    assert "replaced by a link" in str(place.lost())
    again = PlaceMonitor(lab, "s", ledger.path)  # a person may keep outputs on another disk
    assert again.lost() is None
    place.close()
    again.close()
