"""The emulators: one contract for all that are installed, and clear errors if none is."""

from __future__ import annotations

import importlib.util
import shutil
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
RIGHT, LEFT, DOWN, A, B, START = 128, 64, 32, 1, 2, 8
needs_game = pytest.mark.skipif(not GAME, reason="gym-super-mario-bros, which brings the game, is not installed")
needs_fceumm = pytest.mark.skipif(
    not GAME or importlib.util.find_spec("stable_retro") is None, reason="stable-retro or the game is not installed"
)
needs_builtin = pytest.mark.skipif(cores.load_console() is None, reason="there is no C compiler")


@pytest.fixture(params=list(cores.CORES))
def core(request: Any) -> Iterator[Core]:
    module = cores.MODULES.get(request.param)
    if not GAME or (cores.load_console() if module is None else importlib.util.find_spec(module)) is None:
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
@needs_builtin
@pytest.mark.parametrize("world", range(1, 9))
def test_all_stages_of_a_world_start_and_the_builtin_core_plays_them_as_fceumm_does(world: int) -> None:
    core, reference = make_core("builtin"), make_core("fceumm")
    for stage in range(1, 5):
        rng = np.random.default_rng(10 * world + stage)
        buttons = np.repeat(rng.choice([RIGHT, RIGHT | A, RIGHT | B, RIGHT | A | B, LEFT, DOWN], 40), 7)
        for each in (core, reference):
            each.reset(world, stage)
            found = game.read_info(each.ram)
            assert (found["world"], found["stage"], found["x_pos"]) == (world, stage, 40)
            assert found["time"] in (300, 400)
        for number, held in enumerate(buttons.tolist()):
            core.step(held, draw=number % 3 == 0)
            reference.step(held)
            assert core.ram == reference.ram
            if number % 5 == 0:
                assert (core.screen == reference.screen).all()
    core.close()
    reference.close()


@needs_game
@needs_builtin
def test_a_frame_can_be_looked_at_whether_it_was_drawn_or_not() -> None:
    eager, lazy = make_core("builtin"), make_core("builtin")
    for core in (eager, lazy):
        core.reset(1, 1)
    for _ in range(40):
        eager.step(RIGHT, draw=True)
        lazy.step(RIGHT, draw=False)
        lazy.write(0x7FF, 1)  # after the frame: it does not change what the frame showed
        eager.write(0x7FF, 1)
        assert (eager.picture == lazy.picture).all()
        assert eager.snapshot() == lazy.snapshot()


@needs_builtin
def test_the_greyscale_image_of_two_pictures_is_that_of_their_brighter_pixels(tmp_path: Path) -> None:
    core = make_core("builtin", write_rom(tmp_path, b""))
    rng = np.random.default_rng(0)
    for _ in range(5):
        one, two = rng.integers(64, size=(2, cores.HEIGHT, cores.WIDTH), dtype=np.uint8)
        colours = cores._COLOURS
        assert (core.grey(one) == cores.to_grey(colours[one])).all()
        assert (core.grey(one, two) == cores.to_grey(np.maximum(colours[one], colours[two]))).all()


def write_rom(folder: Path, program: bytes, mapper: int = 0) -> Path:
    """Write a cartridge whose program starts at 0x8000; all its interrupts return at once."""
    code = bytearray(program.ljust(32768, b"\xea"))
    code[0x7000] = 0x40
    code[0x7FFA:] = bytes([0x00, 0xF0, 0x00, 0x80, 0x00, 0xF0])
    path = folder / "own.nes"
    path.write_bytes(b"NES\x1a" + bytes([2, 1, 1 | mapper << 4, 0]) + bytes(8) + bytes(code) + bytes(8192))
    return path


ARITHMETIC = bytes.fromhex(
    "78 d8 a9 00 85 00 85 01 85 10 85 11 85 12"  # for the operands $00 and $01: sums at $10 and $11, and flags at $12
    "18 a5 00 65 01 08 45 10 2a 85 10 68 45 12 2a 85 12"  # CLC, ADC: rotate the result and the flags into them
    "38 a5 00 e5 01 08 45 11 2a 85 11 68 45 12 6a 85 12"  # SEC, SBC
    "a5 00 c5 01 08 68 45 12 2a 85 12"  # CMP
    "e6 00 d0 cf e6 01 d0 cb"  # all pairs
    "a9 2a 85 20 4c 47 80"
)


def arithmetic() -> tuple[int, int, int]:
    """Return what ARITHMETIC computes, from the definitions of the instructions."""
    total = difference = flags = 0
    carry = 0

    def nz(value: int) -> int:
        return (value & 0x80) | (2 if value == 0 else 0)

    def rotate(value: int, carry: int) -> tuple[int, int]:
        return (value << 1 | carry) & 255, value >> 7

    for b in range(256):
        for a in range(256):
            value = (a + b) & 255
            carry = a + b >> 8
            p = 0x34 | nz(value) | carry | (0x40 if ~(a ^ b) & (a ^ value) & 0x80 else 0)
            total, carry = rotate(value ^ total, carry)
            flags, carry = rotate(p ^ flags, carry)
            value = (a - b) & 255
            carry = int(a >= b)
            p = 0x34 | nz(value) | carry | (0x40 if (a ^ b) & (a ^ value) & 0x80 else 0)
            difference, carry = rotate(value ^ difference, carry)
            rotated = p ^ flags
            flags, carry = rotated >> 1 | carry << 7, rotated & 1
            overflow = p & 0x40
            p = 0x34 | nz((a - b) & 255) | int(a >= b) | overflow
            flags, carry = rotate(p ^ flags, int(a >= b))
    return total, difference, flags


@needs_builtin
def test_the_builtin_core_adds_subtracts_and_compares_all_bytes(tmp_path: Path) -> None:
    rom = write_rom(tmp_path, ARITHMETIC)
    core = make_core("builtin", rom)
    for _ in range(400):
        core.step(0, draw=False)
        if core.ram[0x20] == 0x2A:
            break
    assert core.ram[0x20] == 0x2A
    assert tuple(core.ram[0x10:0x13]) == arithmetic()


ARM_DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **names) { /* plays, and prints a hash of all memories and pictures */
    static uint8_t rom[65536], picture[SHOWN_LINES * SHOWN_WIDTH];
    FILE *file = count == 2 ? fopen(names[1], "rb") : NULL;
    if (!file || !fread(rom, 1, sizeof rom, file)) return 1;
    static Cartridge cartridge;
    static Console console;
    nes_make_cartridge(&cartridge, rom + 16, 32768, rom + 16 + 32768, 1);
    nes_power_on(&console, &cartridge);
    uint32_t hash = 0, chance = 1;
    for (int i = 0; i < 1200; i++) {
        chance = chance * 1664525u + 1013904223u;
        nes_step(&console, i < 200 ? i / 7 % 2 * 8 : (chance >> 24 & 3) | 0x80, i & 1);
        if (i % 3 == 0) nes_picture(&console, picture);
        for (int j = 0; j < 2048; j++) hash = hash * 31 + console.state.ram[j];
        for (unsigned j = 0; j < sizeof picture; j++) hash = hash * 31 + picture[j];
    }
    printf("%08x", hash);
    return 0;
}
"""
ARM_TOOLS = [shutil.which(name) for name in ("gcc", "aarch64-linux-gnu-gcc", "qemu-aarch64")]


@pytest.mark.slow
@needs_builtin
@pytest.mark.skipif(None in ARM_TOOLS, reason="gcc, gcc-aarch64-linux-gnu or qemu-user is not installed")
def test_the_builtin_core_computes_the_same_on_arm(tmp_path: Path) -> None:
    native_compiler, arm_compiler, emulator = map(str, ARM_TOOLS)
    rom = str(cores.find_rom() if GAME else write_rom(tmp_path, ARITHMETIC))
    source = Path(cores.__file__).with_name("nes.c")
    (tmp_path / "driver.c").write_text(f'#include "{source}"\n{ARM_DRIVER}')
    hashes = []
    for compiler, start in ((native_compiler, []), (arm_compiler, [emulator])):
        program = str(tmp_path / Path(compiler).name)
        subprocess.run(
            [compiler, "-O3", "-std=gnu99", "-static", str(tmp_path / "driver.c"), "-o", program], check=True
        )
        hashes.append(subprocess.run([*start, program, rom], check=True, stdout=subprocess.PIPE).stdout)
    assert hashes[0] == hashes[1] != b"00000000"


@needs_builtin
def test_an_instruction_that_the_builtin_core_lacks_is_an_error(tmp_path: Path) -> None:
    core = make_core("builtin", write_rom(tmp_path, b"\x02"))
    with pytest.raises(LabError, match="an instruction that the builtin core lacks"):
        core.step(0)


@needs_builtin
def test_other_cartridges_are_left_to_the_other_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rom = write_rom(tmp_path, b"", mapper=1)
    with pytest.raises(LabError, match="not a plain cartridge"):
        make_core("builtin", rom)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json"))
    assert cores.find_core(rom) == "fceumm"
    (tmp_path / "short.nes").write_bytes(rom.read_bytes()[:2000])
    assert cores.read_cartridge(tmp_path / "short.nes") is None


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
@needs_builtin
@pytest.mark.parametrize("name", ["builtin", "fceumm"])
def test_a_state_of_another_core_is_refused(name: str) -> None:
    core, other = make_core(name), make_core("fceumm" if name == "builtin" else "builtin")
    for state in (b"something", other.snapshot()):
        with pytest.raises(LabError, match=f"not a state of the {name} core"):
            core.restore(state)
    core.close()
    other.close()


@needs_fceumm
@needs_builtin
@pytest.mark.parametrize("name", ["builtin", "fceumm"])
def test_a_game_that_never_starts_is_an_error_and_not_a_hang(name: str, tmp_path: Path) -> None:
    rom_bytes = bytearray(cores.find_rom().read_bytes())
    rom_bytes[16 : 16 + 32768] = b"\xea" * 32768  # nothing but NOPs
    rom_bytes[16 + 32764 : 16 + 32766] = b"\x00\x80"
    (tmp_path / "broken.nes").write_bytes(rom_bytes)
    core = make_core(name, tmp_path / "broken.nes")
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
    monkeypatch.setattr(cores, "load_console", lambda: None)
    with pytest.raises(LabError, match="no C compiler, and neither stable-retro nor nes-py") as caught:
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
    monkeypatch.setattr(cores, "load_console", lambda: "a library")
    assert cores.find_core() == "builtin"
    monkeypatch.setattr(cores, "load_console", lambda: None)
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
