"""What the bytes in the console's memory mean in Super Mario Bros., and how to get past what cannot be played.

Nothing here waits for ever: every loop has a greatest number of frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from looplab.errors import LabError

if TYPE_CHECKING:
    from .cores import Core

BUTTONS = ("A", "B", "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT")
"""From the lowest bit on, as the console's controller sends them."""
START = 1 << BUTTONS.index("START")

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
"""States of the player in which the game moves him: pipes, vines, walking into a castle, a new area."""
BOWSER, FLAGPOLE = 0x2D, 0x31
ON_POLE, NO_LIVES = 3, 0xFF
TITLE, WORLD_OVER = 0, 2
LONGER = frozenset((1, 2, 4, 7))
"""Worlds whose second stage has an area before it: Mario walks into a pipe."""
STATUS = ("small", "tall", "fireball")

MOST_START = 1_200
"""Frames until the game must have begun; it takes some 100."""
MOST_SKIP = 2_000
"""Frames that are skipped at most at once; the end of a stage, with its count of points, takes about 1,100."""


def x_position(ram: bytes) -> int:
    return ram[PAGE] << 8 | ram[X]


def y_position(ram: bytes) -> int:
    """Above the ground; the game counts from the top, and again above the screen."""
    return 255 - ram[Y] + (255 if ram[ALTITUDE] < 1 else 0)


def digits(ram: bytes, place: tuple[int, int]) -> int:
    """A number that the game keeps as one byte for each decimal."""
    number = 0
    for digit in ram[place[0] : place[0] + place[1]]:
        number = 10 * number + digit
    return number


def clock(ram: bytes) -> int:
    return 100 * ram[0x7F8] + 10 * ram[0x7F9] + ram[0x7FA]


def dying(ram: bytes) -> bool:
    """Dead, or about to be: also while he falls out of the world."""
    return ram[PLAYER] in (DYING, DEAD) or ram[ALTITUDE] > 1


def flag(ram: bytes) -> bool:
    """Whether the stage is won: on the flagpole, or at the axe of a castle."""
    if ram[MODE] == WORLD_OVER:
        return True
    # a vine puts FLOAT to 3, too, but there is neither flagpole nor Bowser around
    return ram[FLOAT] == ON_POLE and any(enemy in (BOWSER, FLAGPOLE) for enemy in ram[ENEMIES])


def info(ram: bytes) -> dict[str, int | bool | str]:
    return {
        "x_pos": x_position(ram),
        "y_pos": y_position(ram),
        "score": digits(ram, SCORE),
        "coins": digits(ram, COINS),
        "time": clock(ram),
        "life": ram[LIVES],
        "world": ram[WORLD] + 1,
        "stage": ram[STAGE] + 1,
        "flag_get": flag(ram),
        "status": STATUS[min(ram[SIZE], 2)],
    }


def begin(core: Core, world: int, stage: int) -> None:
    """From power-on to the first moment of a stage in which Mario can be moved."""
    area = stage + (world in LONGER and stage >= 2)
    for frame in range(MOST_START):
        ram = core.ram
        if clock(ram) and ram[PLAYER] == NORMAL:
            return
        if not clock(ram):  # what is to be loaded may still be changed
            for address, value in ((WORLD, world), (STAGE, stage), (AREA, area)):
                core.write(address, value - 1)
        core.write(PRELEVEL_TIMER, 0)
        core.step(START if ram[MODE] == TITLE and frame % 2 else 0)
    raise LabError(
        f"stage {world}-{stage} did not begin within {MOST_START} frames",
        hint="is the file of the game whole, and is it Super Mario Bros.?",
    )


def skip(core: Core, ram: bytes) -> bytes:
    """Past pipes and changes of area, at most MOST_SKIP frames; the memory then."""
    if 1 < ram[AREA_TIMER] < 255:
        core.write(AREA_TIMER, 1)
    for _ in range(MOST_SKIP):
        if ram[PLAYER] not in BUSY and ram[MODE] != WORLD_OVER:
            break
        core.write(PRELEVEL_TIMER, 0)
        core.step(0)
        ram = core.ram
    return ram


def next_life(core: Core) -> bytes:
    """Past the fall and the black screen after a death, to the next life or the end of the game; the memory then."""
    core.write(PLAYER, DEAD)
    lives = core.ram[LIVES]
    for _ in range(MOST_SKIP):
        core.step(0)
        ram = core.ram
        if ram[LIVES] == NO_LIVES or (ram[LIVES] != lives and ram[PLAYER] == NORMAL and not dying(ram)):
            break
        core.write(PRELEVEL_TIMER, 0)
    return core.ram
