"""The emulators that can run the game, behind one small contract; the fastest that is installed comes first.

    fceumm   stable-retro's core: several times as fast as the others. It allows one emulator in a process, so all cores
             of a process share one and change places on it, which takes microseconds.
    nes-py   nes-py 8 (Python 3.11, 3.12) or 9. It cannot hand out its state: a snapshot is everything that was done
             since power-on, and restoring it means doing that again. As exact, but slow.

The game itself is not part of this project: it is the file in the user's installation of gym-super-mario-bros, or
one that the user names.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError

from . import game

Array = NDArray[np.uint8]

INSTALL = 'pip install stable-retro, then pip install --no-deps "gym-super-mario-bros>=7.4" for the game'
HEIGHT, WIDTH = 224, 240
"""The screen without the border of 8 pixels that televisions did not show."""
MODULES = {"fceumm": "stable_retro", "nes-py": "nes_py"}
"""The cores and the packages they need, fastest first."""
STEP, WRITE = 0, 1
"""Marks in the log of a core that replays."""


class Core(ABC):
    """A console with the game in it. Buttons are a byte as in `game.BUTTONS`."""

    name: ClassVar[str]

    def reset(self, world: int = 1, stage: int = 1) -> None:
        """To the first moment of a stage in which Mario can be moved: always the same, to the bit."""
        if (world, stage) not in self._starts:
            self.power_on()
            game.begin(self, world, stage)
            self._starts[world, stage] = self.snapshot()
        self.restore(self._starts[world, stage])

    @property
    @abstractmethod
    def _starts(self) -> dict[tuple[int, int], bytes]:
        """Snapshots of the beginnings that were met so far."""

    @abstractmethod
    def power_on(self) -> None: ...

    @abstractmethod
    def step(self, buttons: int) -> None:
        """One frame: a 60th of a second."""

    @property
    @abstractmethod
    def ram(self) -> bytes:
        """The console's 2048 bytes of memory, copied."""

    @abstractmethod
    def write(self, address: int, value: int) -> None:
        """Change one byte of the memory."""

    @property
    @abstractmethod
    def screen(self) -> Array:
        """What the last `step` has drawn: (224, 240, 3), a copy. To be taken before any other core is stepped."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """All that the next frames depend on, for a core of the same name in any process."""

    @abstractmethod
    def restore(self, state: bytes) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class _Console:
    """The one emulator of this process."""

    def __init__(self, rom: Path) -> None:
        retro = importlib.import_module("stable_retro")
        try:
            self.emulator: Any = retro.RetroEmulator(str(rom))
        except RuntimeError as error:
            raise LabError(
                f"stable-retro does not run {rom}: {error}",
                hint="it allows one emulator in a process; close the other one first",
            ) from error
        data = retro.data.GameData()
        self.emulator.configure_data(data)
        self.memory: Any = data.memory
        self.rom, self.data = rom, data
        self.fresh: bytes = self.emulator.get_state()
        self.starts: dict[tuple[int, int], bytes] = {}
        self.owner: Fceumm | None = None
        """Whose game is on the emulator."""
        self.drawn: Fceumm | None = None
        """Whose picture is on its screen: that is not part of a state."""
        self.users = 0


class Fceumm(Core):
    name = "fceumm"
    _shared: ClassVar[_Console | None] = None

    def __init__(self, rom: Path) -> None:
        console = Fceumm._shared
        if console is None:
            console = Fceumm._shared = _Console(rom)
        elif console.rom != rom:
            raise LabError(
                f"{console.rom} runs in this process, so {rom} cannot", hint="close its environments, or use workers"
            )
        console.users += 1
        self._console: _Console | None = console
        self._state = console.fresh
        """What this core is while another one is on the emulator."""

    @property
    def _starts(self) -> dict[tuple[int, int], bytes]:
        return self._here().starts

    def power_on(self) -> None:
        self.restore(self._here().fresh)

    def step(self, buttons: int) -> None:
        console = self._loaded()
        console.emulator.set_button_mask(_MASKS[buttons], 0)
        console.emulator.step()
        console.drawn = self

    @property
    def ram(self) -> bytes:
        blocks = self._loaded().memory.blocks
        return blocks[0] + blocks[1024]  # type: ignore[no-any-return]

    def write(self, address: int, value: int) -> None:
        self._loaded().memory.assign(address, "|u1", value)

    @property
    def screen(self) -> Array:
        console = self._here()
        if console.drawn is not self:
            raise LabError("the picture of this core's last frame is gone", hint="take it right after step()")
        return console.emulator.get_screen()  # type: ignore[no-any-return]

    def snapshot(self) -> bytes:
        console = self._here()
        return console.emulator.get_state() if console.owner is self else self._state

    def restore(self, state: bytes) -> None:
        console = self._here()
        if len(state) != len(console.fresh):
            raise LabError("this is no state of the fceumm core with this game", hint="restore it on its own core")
        self._state = state
        if console.owner is self:
            console.owner = None
        if console.drawn is self:
            console.drawn = None

    def close(self) -> None:
        console, self._console = self._console, None
        if console is None:
            return
        if console.owner is self:
            console.owner = None
        if console.drawn is self:
            console.drawn = None
        console.users -= 1
        if console.users == 0 and Fceumm._shared is console:
            Fceumm._shared = None

    def _loaded(self) -> _Console:
        """The emulator with this core on it."""
        console = self._here()
        if console.owner is not self:
            if console.owner is not None:
                console.owner._state = console.emulator.get_state()
            console.emulator.set_state(self._state)
            console.owner = self
        return console

    def _here(self) -> _Console:
        if self._console is None:
            raise LabError("this core is closed")
        return self._console


class NesPy(Core):
    name = "nes-py"

    def __init__(self, rom: Path) -> None:
        self._rom = rom
        with contextlib.redirect_stderr(io.StringIO()):  # gym's notice that it is not maintained
            self._package = importlib.import_module("nes_py")
            roms = importlib.import_module("nes_py._rom")
        # nes-py 8 computes sizes in the file with bytes of numpy, which overflow since NumPy 2
        if not hasattr(importlib.import_module("nes_py.nes_env"), "_native"):
            roms.ROM.header = property(lambda file: file.raw_data[:16].astype(np.int64))
        self._console: Any = None
        self._begin: dict[tuple[int, int], bytes] = {}
        self._log = bytearray()
        """Everything that was done since power-on."""
        self._kept = b""
        """The log up to where the console's one backup was taken."""
        self.power_on()

    @property
    def _starts(self) -> dict[tuple[int, int], bytes]:
        return self._begin

    def power_on(self) -> None:
        if self._console is not None:
            self._console.close()
        self._console = self._package.NESEnv(str(self._rom))
        missing = [
            name for name in ("_frame_advance", "_backup", "_restore", "ram") if not hasattr(self._console, name)
        ]
        if missing:
            raise LabError(f"this version of nes-py has no {', '.join(missing)}", hint="install nes-py 8 or 9")
        self._console.reset()
        self._console._backup()
        self._kept = b""
        self._log.clear()

    def step(self, buttons: int) -> None:
        self._log += bytes((STEP, buttons))
        self._console._frame_advance(buttons)

    @property
    def ram(self) -> bytes:
        return self._console.ram.tobytes()  # type: ignore[no-any-return]

    def write(self, address: int, value: int) -> None:
        self._log += bytes((WRITE, address >> 8, address & 255, value))
        self._console.ram[address] = value

    @property
    def screen(self) -> Array:
        return np.ascontiguousarray(self._console.screen[8 : 8 + HEIGHT, 8 : 8 + WIDTH])

    def snapshot(self) -> bytes:
        return bytes(self._log)

    def restore(self, state: bytes) -> None:
        if state.startswith(self._kept) and self._kept:
            self._console._restore()
            self._replay(state, len(self._kept))
        else:
            self.power_on()
            self._replay(state, 0)
            self._console._backup()
            self._kept = state
        self._log = bytearray(state)

    def close(self) -> None:
        if self._console is not None:
            self._console.close()
            self._console = None

    def _replay(self, log: bytes, at: int) -> None:
        while at < len(log):
            if log[at] == STEP:
                self._console._frame_advance(log[at + 1])
                at += 2
            else:
                self._console.ram[log[at + 1] << 8 | log[at + 2]] = log[at + 3]
                at += 4


def find_core() -> str:
    """The name of the fastest core whose package is installed."""
    for name, module in MODULES.items():
        if importlib.util.find_spec(module) is not None:
            return name
    raise LabError("there is no emulator for the game: neither stable-retro nor nes-py is installed", hint=INSTALL)


def find_rom() -> Path:
    """The game, as the package gym-super-mario-bros brings it; the package itself is not imported."""
    spec = importlib.util.find_spec("gym_super_mario_bros")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted(Path(folder).rglob("super-mario-bros.nes"))
        if files:
            return files[0]
    raise LabError(
        "the game is not here: gym-super-mario-bros, which brings it, is not installed",
        hint=f"{INSTALL}; or name a .nes file of your own with rom",
    )


def make_core(name: str = "auto", rom: str | Path | None = None) -> Core:
    """A core with the game in it: "fceumm", "nes-py", or "auto" for the fastest that there is."""
    wanted = find_core() if name == "auto" else name
    if wanted not in MODULES:
        raise LabError(f"{name!r} is no core", hint=f"known are auto, {', '.join(MODULES)}")
    if importlib.util.find_spec(MODULES[wanted]) is None:
        raise LabError(f"the core {wanted} needs the package {MODULES[wanted].replace('_', '-')}", hint=INSTALL)
    file = find_rom() if rom is None else Path(rom).resolve()
    if not file.is_file():
        raise LabError("there is no such file", file=file, hint="rom must be a .nes file")
    try:
        return Fceumm(file) if wanted == "fceumm" else NesPy(file)
    except ImportError as error:
        others = [other for other in MODULES if other != wanted and importlib.util.find_spec(MODULES[other])]
        hint = f"choose the core {others[0]}, or reinstall it" if others else INSTALL
        raise LabError(f"the core {wanted} is installed but cannot be loaded: {error}", hint=hint) from error


_ORDER = ("B", "", "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT", "A")
"""Of the buttons in stable-retro."""
_MASKS = [
    np.array([bool(name) and buttons >> game.BUTTONS.index(name) & 1 for name in _ORDER], np.uint8)
    for buttons in range(256)
]
