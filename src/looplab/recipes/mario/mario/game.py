"""The memory map of Super Mario Bros., and how to skip what cannot be played.

Every loop is bounded by a number of frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from looplab.errors import LabError

if TYPE_CHECKING:
    from .cores import Core

BUTTONS = ("A", "B", "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT")
"""From the lowest bit, as the console's controller sends them."""
START = 1 << BUTTONS.index("START")

# Addresses; those of SCORE, COINS and CLOCK with their number of decimal digits.
PAGE, X = 0x6D, 0x86
PLAYER = 0x0E
ALTITUDE, Y = 0xB5, 0x3B8
ENEMIES = slice(0x16, 0x1B)
FLOAT = 0x1D
WORLD, STAGE, AREA = 0x75F, 0x75C, 0x760
LIVES, SIZE, MODE = 0x75A, 0x756, 0x770
SCORE, COINS, CLOCK = (0x7DE, 6), (0x7ED, 2), (0x7F8, 3)
PRELEVEL_TIMER, AREA_TIMER = 0x7A0, 0x6DE

DEAD, NORMAL, DYING = 0x06, 0x08, 0x0B
BUSY = frozenset((0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x07))
"""Player states in which the game moves Mario: pipes, vines, walking into a castle, a new area."""
BOWSER, FLAGPOLE = 0x2D, 0x31
ON_POLE, NO_LIVES = 3, 0xFF
TITLE, WORLD_OVER = 0, 2
WORLDS_WITH_PIPE_AREA = frozenset((1, 2, 4, 7))
"""Worlds in which an area precedes the second stage: Mario walks into a pipe."""
STATUS = ("small", "tall", "fireball")

MAX_START_FRAMES = 1_200
"""Frames until the game must have started; it takes about 100."""
MAX_SKIPPED_FRAMES = 2_000
"""Maximum frames of one skip; the end of a stage, with its count of points, takes about 1,100."""


def x_position(ram: bytes) -> int:
    return ram[PAGE] << 8 | ram[X]


def y_position(ram: bytes) -> int:
    """Height in pixels; the game counts from the top, and starts over above the screen."""
    return 255 - ram[Y] + (255 if ram[ALTITUDE] < 1 else 0)


def read_decimal(ram: bytes, location: tuple[int, int]) -> int:
    """Return a number that the game stores as one byte per decimal digit."""
    address, count = location
    number = 0
    for digit in ram[address : address + count]:
        number = 10 * number + digit
    return number


def clock(ram: bytes) -> int:
    return 100 * ram[0x7F8] + 10 * ram[0x7F9] + ram[0x7FA]


def is_dying(ram: bytes) -> bool:
    """Return whether Mario is dead or dying, including falling out of the world."""
    return ram[PLAYER] in (DYING, DEAD) or ram[ALTITUDE] > 1


def stage_won(ram: bytes) -> bool:
    """Return whether the stage is won: on the flagpole, or at the axe of a castle."""
    if ram[MODE] == WORLD_OVER:
        return True
    # A vine also sets FLOAT to 3, but without a flagpole or Bowser on the screen.
    return ram[FLOAT] == ON_POLE and any(enemy in (BOWSER, FLAGPOLE) for enemy in ram[ENEMIES])


def read_info(ram: bytes) -> dict[str, int | bool | str]:
    """Return the info of a step."""
    return {
        "x_pos": x_position(ram),
        "y_pos": y_position(ram),
        "score": read_decimal(ram, SCORE),
        "coins": read_decimal(ram, COINS),
        "time": clock(ram),
        "life": ram[LIVES],
        "world": ram[WORLD] + 1,
        "stage": ram[STAGE] + 1,
        "flag_get": stage_won(ram),
        "status": STATUS[min(ram[SIZE], 2)],
    }


def start_stage(core: Core, world: int, stage: int) -> None:
    """Advance from power-on to the first frame of a stage in which Mario can be moved."""
    area = stage + (world in WORLDS_WITH_PIPE_AREA and stage >= 2)
    for frame in range(MAX_START_FRAMES):
        ram = core.ram
        if clock(ram) and ram[PLAYER] == NORMAL:
            return
        if not clock(ram):  # the stage to load can still be changed
            for address, value in ((WORLD, world), (STAGE, stage), (AREA, area)):
                core.write(address, value - 1)
        core.write(PRELEVEL_TIMER, 0)
        core.step(START if ram[MODE] == TITLE and frame % 2 else 0, draw=False)
    raise LabError(
        f"stage {world}-{stage} did not start within {MAX_START_FRAMES} frames",
        hint="check that the file is Super Mario Bros. and complete",
    )


def skip_transition(core: Core, ram: bytes) -> bytes:
    """Skip pipes and changes of area, up to MAX_SKIPPED_FRAMES frames; return the memory then."""
    if 1 < ram[AREA_TIMER] < 255:
        core.write(AREA_TIMER, 1)
    for _ in range(MAX_SKIPPED_FRAMES):
        if ram[PLAYER] not in BUSY and ram[MODE] != WORLD_OVER:
            break
        core.write(PRELEVEL_TIMER, 0)
        core.step(0, draw=False)
        ram = core.ram
    return ram


def skip_death(core: Core) -> bytes:
    """Skip the death animation to the next life or the end of the game; return the memory then."""
    core.write(PLAYER, DEAD)
    lives = core.ram[LIVES]
    for _ in range(MAX_SKIPPED_FRAMES):
        core.step(0, draw=False)
        ram = core.ram
        if ram[LIVES] == NO_LIVES or (ram[LIVES] != lives and ram[PLAYER] == NORMAL and not is_dying(ram)):
            break
        core.write(PRELEVEL_TIMER, 0)
    return core.ram
