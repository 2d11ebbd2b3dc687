"""The emulators: one contract for all that are installed, and clear errors if none is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from looplab.errors import LabError
from looplab.recipes.mario.mario import cores, game
from looplab.recipes.mario.mario.cores import Core, make_core

GAME = importlib.util.find_spec("gym_super_mario_bros") is not None
RIGHT, A, B, START = 128, 1, 2, 8
needs_game = pytest.mark.skipif(not GAME, reason="gym-super-mario-bros, which brings the game, is not installed")
needs_fceumm = pytest.mark.skipif(
    not GAME or importlib.util.find_spec("stable_retro") is None, reason="stable-retro or the game is not installed"
)


@pytest.fixture(params=list(cores.MODULES))
def core(request: Any) -> Iterator[Core]:
    if not GAME or importlib.util.find_spec(cores.MODULES[request.param]) is None:
        pytest.skip(f"{request.param} or the game is not installed")
    made = make_core(request.param)
    yield made
    made.close()


def play(core: Core, frames: int, seed: int = 0) -> list[tuple[bytes, bytes]]:
    results = []
    for buttons in np.random.default_rng(seed).choice([0, RIGHT, RIGHT | B, RIGHT | A, RIGHT | A | B], size=frames):
        core.step(int(buttons))
        results.append((core.ram, core.screen.tobytes()))
    return results


def test_a_stage_starts_when_mario_can_be_moved(core: Core) -> None:
    core.reset(1, 1)
    found = game.read_info(core.ram)
    assert (found["world"], found["stage"], found["x_pos"], found["time"]) == (1, 1, 40, 400)
    for _ in range(30):
        core.step(RIGHT)
    assert game.x_position(core.ram) > 60
    assert core.screen.shape == (cores.HEIGHT, cores.WIDTH, 3)
    assert core.screen.dtype == np.uint8
    assert core.screen.any()


def test_every_button_works(core: Core) -> None:
    results = {}
    for place, name in enumerate(game.BUTTONS):
        core.reset(1, 1)
        for _ in range(8):
            core.step(1 << place)
        ram = core.ram
        results[name] = (game.x_position(ram) - 40, game.y_position(ram) > 79, ram[0x6FC] | ram[0x0A], ram[0x776] & 1)
    assert results["RIGHT"][0] > 0 > results["LEFT"][0]
    assert results["A"][1]
    assert [results[name][2] for name in ("A", "B", "UP", "DOWN", "LEFT", "RIGHT")] == [0x80, 0x40, 8, 4, 2, 1]
    assert [results[name][3] for name in ("START", "SELECT", "B")] == [1, 0, 0]  # START pauses


def test_a_reset_is_the_same_every_time(core: Core) -> None:
    core.reset(1, 1)
    first = play(core, 40)
    core.reset(1, 1)
    assert play(core, 40) == first


def test_a_restored_core_continues_exactly(core: Core) -> None:
    core.reset(1, 1)
    play(core, 60)
    state = core.snapshot()
    first = play(core, 60, seed=1)
    core.restore(state)
    assert core.snapshot() == state
    assert play(core, 60, seed=1) == first


def test_a_core_restored_in_another_process_continues_exactly(core: Core, tmp_path: Path) -> None:
    core.reset(1, 1)
    play(core, 60)
    (tmp_path / "state").write_bytes(core.snapshot())
    frames = play(core, 60, seed=1)
    code = """if True:
        import sys
        from looplab.recipes.mario.mario.cores import make_core
        core = make_core(sys.argv[1])
        core.restore(open(sys.argv[2], "rb").read())
        for buttons in bytes.fromhex(sys.argv[3]):
            core.step(buttons)
            sys.stdout.buffer.write(core.ram + core.screen.tobytes())
    """
    buttons = np.random.default_rng(1).choice([0, RIGHT, RIGHT | B, RIGHT | A, RIGHT | A | B], size=60)
    argv = [sys.executable, "-c", code, core.name, str(tmp_path / "state"), buttons.astype(np.uint8).tobytes().hex()]
    assert subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout == b"".join(map(b"".join, frames))


def test_cores_of_one_process_do_not_disturb_each_other(core: Core) -> None:
    core.reset(1, 1)
    alone = play(core, 30, seed=1)
    other = make_core(core.name)
    try:
        core.reset(1, 1)
        other.reset(1, 2)
        results = []
        for buttons in np.random.default_rng(1).choice([0, RIGHT, RIGHT | B, RIGHT | A, RIGHT | A | B], size=30):
            other.step(RIGHT | A)
            core.step(int(buttons))
            results.append((core.ram, core.screen.tobytes()))
        assert results == alone
        assert game.read_info(other.ram)["stage"] == 2
    finally:
        other.close()


@needs_fceumm
@pytest.mark.parametrize("world", range(1, 9))
def test_all_stages_of_a_world_start(world: int) -> None:
    core = make_core("fceumm")
    for stage in range(1, 5):
        core.reset(world, stage)
        found = game.read_info(core.ram)
        assert (found["world"], found["stage"], found["x_pos"]) == (world, stage, 40)
        assert found["time"] in (300, 400)
    core.close()


@needs_fceumm
def test_the_emulator_is_released_with_the_last_core_and_can_be_reopened() -> None:
    first, second = make_core("fceumm"), make_core("fceumm")
    first.close()
    second.reset(1, 1)
    second.close()
    second.close()
    with pytest.raises(LabError, match="closed"):
        second.step(0)
    again = make_core("fceumm")
    again.reset(1, 1)
    again.close()


@needs_fceumm
def test_the_screen_of_another_core_is_never_returned() -> None:
    core, other = make_core("fceumm"), make_core("fceumm")
    core.reset(1, 1)
    with pytest.raises(LabError, match="the screen of this core"):
        _ = core.screen
    core.step(0)
    assert core.screen.any()
    other.step(0)
    with pytest.raises(LabError, match="right after step"):
        _ = core.screen
    core.close()
    other.close()


@needs_fceumm
def test_a_state_of_another_core_is_refused() -> None:
    core = make_core("fceumm")
    with pytest.raises(LabError, match="not a state of the fceumm core"):
        core.restore(b"something")
    core.close()


@needs_fceumm
def test_a_game_that_never_starts_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    rom_bytes = bytearray(cores.find_rom().read_bytes())
    rom_bytes[16 : 16 + 32768] = b"\xea" * 32768  # nothing but NOPs
    rom_bytes[16 + 32764 : 16 + 32766] = b"\x00\x80"
    (tmp_path / "broken.nes").write_bytes(rom_bytes)
    core = make_core("fceumm", tmp_path / "broken.nes")
    try:
        with pytest.raises(LabError, match="1-1 did not start within"):
            core.reset(1, 1)
    finally:
        core.close()


@needs_fceumm
def test_two_games_in_one_process_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.nes").write_bytes(cores.find_rom().read_bytes())
    core = make_core("fceumm")
    with pytest.raises(LabError, match="this process already runs"):
        make_core("fceumm", tmp_path / "other.nes")
    core.close()


def test_without_an_emulator_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LabError, match="neither stable-retro nor nes-py") as caught:
        make_core()
    assert "pip install stable-retro" in str(caught.value)
    with pytest.raises(LabError, match="needs the package nes-py"):
        make_core("nes-py")


def test_without_the_game_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden = {"gym_super_mario_bros": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: hidden.get(name, real("json")))
    with pytest.raises(LabError, match="the game was not found") as caught:
        make_core("fceumm")
    assert "--no-deps" in str(caught.value)
    assert "gym-super-mario-bros" in str(caught.value)


def test_the_fastest_core_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json"))
    assert cores.find_core() == "fceumm"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "stable_retro" else real("json"))
    assert cores.find_core() == "nes-py"


def test_an_unknown_core_or_file_is_named() -> None:
    with pytest.raises(LabError, match="'mame' is not a core"):
        make_core("mame")


@needs_fceumm
def test_a_missing_file_is_named() -> None:
    with pytest.raises(LabError, match=r"nowhere\.nes"):
        make_core("fceumm", "nowhere.nes")


@needs_game
def test_the_game_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from looplab.recipes.mario.mario.cores import find_rom; print(find_rom());"
        "sys.exit(any(name in sys.modules for name in ('gym_super_mario_bros', 'nes_py', 'gym')))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert Path(found.strip()).read_bytes()[:4] == b"NES\x1a"
