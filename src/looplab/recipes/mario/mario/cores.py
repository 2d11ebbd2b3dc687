"""The emulators that can run the game, behind one small interface; the fastest that can be used is the default.

    builtin  nes.c, compiled on first use. In all stages it computes what fceumm computes, to the bit (memory and
             picture), several times faster: without sound, and without drawing frames that nothing reads.
    fceumm   stable-retro's core. It allows one emulator per process, so all cores of a process share it by swapping
             their states, which takes microseconds.
    nes-py   nes-py 8 (Python 3.11, 3.12) or 9. It cannot export its state: a snapshot is the log of all inputs since
             power-on, and restoring it replays that log. Equally exact, but slow.

The game itself is not part of this project: it comes from the user's installation of gym-super-mario-bros, or from a
file that the user names.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from looplab.errors import LabError
from looplab.rl.native import load_library

from . import game

Array = NDArray[np.uint8]

GAME_PACKAGE = 'pip install --no-deps "gym-super-mario-bros>=7.4"'
INSTALL = f"install a C compiler, or pip install stable-retro; then {GAME_PACKAGE} for the game"
HEIGHT, WIDTH = 224, 240
"""Size of the screen without the border of 8 pixels that televisions did not show."""
SIZE = 84
"""Height and width of a greyscale image."""
MODULES = {"fceumm": "stable_retro", "nes-py": "nes_py"}
"""Cores that need a package, fastest first."""
CORES = ("builtin", *MODULES)
"""All cores, fastest first."""
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
    def step(self, buttons: int, draw: bool = True) -> None:
        """Advance one frame, 1/60 s, with these buttons held.

        Args:
            buttons: The buttons.
            draw: Whether the frame will probably be looked at. It can be in any case.
        """

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

    @property
    def picture(self) -> Array:
        """A copy of the last frame in the core's own form, for `grey`; read it like `screen`."""
        return self.screen

    def grey(self, picture: Array, earlier: Array | None = None) -> Array:
        """Return the 84×84 greyscale image of a picture, or of the pixel-wise maximum of two; see `to_grey`."""
        return to_grey(picture if earlier is None else np.maximum(earlier, picture))

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

    def step(self, buttons: int, draw: bool = True) -> None:
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

    def step(self, buttons: int, draw: bool = True) -> None:
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


class _Cartridge:
    """The game in the form that nes.c uses, shared by all consoles of this process."""

    def __init__(self, rom: Path) -> None:
        library = load_console()
        parts = read_cartridge(rom)
        if library is None or parts is None:
            raise LabError(
                "the builtin core cannot be used: there is no C compiler"
                if library is None
                else f"the builtin core cannot run {rom}: it is not a plain cartridge (mapper 0)",
                hint="use the core fceumm",
            )
        prg, patterns, vertical = parts
        self.memory = _aligned_bytes(library.nes_cartridge_size())
        library.nes_make_cartridge(self.memory.ctypes.data, prg, len(prg), patterns, vertical)
        self.starts: dict[tuple[int, int], bytes] = {}


class Builtin(Core):
    name = "builtin"
    _cartridges: ClassVar[dict[Path, _Cartridge]] = {}

    def __init__(self, rom: Path) -> None:
        if rom not in Builtin._cartridges:
            Builtin._cartridges[rom] = _Cartridge(rom)
        self._cartridge = Builtin._cartridges[rom]
        self._library = load_console()
        self._memory = _aligned_bytes(self._library.nes_console_size())
        self._console: int | None = self._memory.ctypes.data
        self._state_size: int = self._library.nes_state_size()
        self._ram = ctypes.create_string_buffer(2048)
        self._ram_address = ctypes.addressof(self._ram)
        self._step = self._library.nes_step
        self.power_on()

    @property
    def _starts(self) -> dict[tuple[int, int], bytes]:
        return self._cartridge.starts

    def power_on(self) -> None:
        self._library.nes_power_on(self._open_console(), self._cartridge.memory.ctypes.data)

    def step(self, buttons: int, draw: bool = True) -> None:
        if self._step(self._open_console(), buttons, draw):
            raise LabError("the game executed an instruction that the builtin core lacks", hint="use the core fceumm")

    @property
    def ram(self) -> bytes:
        self._library.nes_ram(self._open_console(), self._ram_address)
        return self._ram.raw

    def write(self, address: int, value: int) -> None:
        self._library.nes_write(self._open_console(), address, value)

    @property
    def picture(self) -> Array:
        picture = np.empty((HEIGHT, WIDTH), np.uint8)
        self._library.nes_picture(self._open_console(), picture.ctypes.data)
        return picture

    @property
    def screen(self) -> Array:
        return _COLOURS[self.picture]

    def grey(self, picture: Array, earlier: Array | None = None) -> Array:
        found = np.empty((SIZE, SIZE), np.uint8)
        one, two = picture.ctypes.data, (picture if earlier is None else earlier).ctypes.data
        self._library.nes_grey(one, two, _LUMA_OF_PAIRS.ctypes.data, found.ctypes.data)
        return found

    def snapshot(self) -> bytes:
        state = ctypes.create_string_buffer(self._state_size)
        self._library.nes_save(self._open_console(), ctypes.addressof(state))
        return _STATE_FORMAT + state.raw

    def restore(self, state: bytes) -> None:
        if not state.startswith(_STATE_FORMAT) or len(state) != len(_STATE_FORMAT) + self._state_size:
            raise LabError("this is not a state of the builtin core", hint="restore it on its own core")
        self._library.nes_load(self._open_console(), state[len(_STATE_FORMAT) :])

    def close(self) -> None:
        self._console = None

    def _open_console(self) -> int:
        if self._console is None:
            raise LabError("this core is closed")
        return self._console


@functools.cache
def load_console() -> Any:
    """Return the library of the builtin core; None if it cannot be compiled."""
    library = load_library(Path(__file__).with_name("nes.c"))
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.nes_make_cartridge.argtypes = [pointer, ctypes.c_char_p, number, ctypes.c_char_p, number]
    library.nes_step.argtypes = library.nes_write.argtypes = [pointer, number, number]
    library.nes_grey.argtypes = [pointer] * 4
    library.nes_load.argtypes = [pointer, ctypes.c_char_p]
    for name in ("ram", "picture", "save", "power_on"):
        getattr(library, f"nes_{name}").argtypes = [pointer, pointer]
    for name in ("make_cartridge", "write", "grey", "load", "ram", "picture", "save", "power_on"):
        getattr(library, f"nes_{name}").restype = None
    for name in ("step", "supported", "cartridge_size", "console_size", "state_size"):
        getattr(library, f"nes_{name}").restype = number
    return library if library.nes_supported() else None


def read_cartridge(rom: Path) -> tuple[bytes, bytes, bool] | None:
    """Return the program, the patterns and whether mirroring is vertical; None if the builtin core cannot run it."""
    data = rom.read_bytes()
    if len(data) < 16 or data[:4] != b"NES\x1a":
        return None
    program, patterns, flags, more_flags = data[4:8]
    start = 16 + (512 if flags & 4 else 0)
    end = start + 16384 * program
    plain = program in (1, 2) and patterns == 1 and not flags & 0xF8 and not more_flags & 0xF0
    if not plain or len(data) < end + 8192:
        return None
    return data[start:end], data[end : end + 8192], bool(flags & 1)


def _aligned_bytes(size: int) -> Array:
    """Return zeros that start at a cache line."""
    memory = np.zeros(size + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + size]


def find_core(rom: Path | None = None) -> str:
    """Return the name of the fastest core that can be used, for this game; LabError if there is none."""
    if load_console() is not None and (rom is None or read_cartridge(rom) is not None):
        return "builtin"
    for name, module in MODULES.items():
        if importlib.util.find_spec(module) is not None:
            return name
    raise LabError("no emulator is available: no C compiler, and neither stable-retro nor nes-py", hint=INSTALL)


def find_rom() -> Path:
    """Return the game's file in the package gym-super-mario-bros, without importing it; LabError if there is none."""
    spec = importlib.util.find_spec("gym_super_mario_bros")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted(Path(folder).rglob("super-mario-bros.nes"))
        if files:
            return files[0]
    raise LabError(
        "the game was not found: gym-super-mario-bros, which contains it, is not installed",
        hint=f"{GAME_PACKAGE}; or pass a .nes file of your own as rom",
    )


def make_core(name: str = "auto", rom: str | Path | None = None) -> Core:
    """Return a core that runs the game.

    Args:
        name: "builtin", "fceumm", "nes-py", or "auto" for the fastest that can be used.
        rom: The game's file; None for the one of gym-super-mario-bros.

    Raises:
        LabError: The core or the game is missing.
    """
    if name not in ("auto", *CORES):
        raise LabError(f"{name!r} is not a core", hint=f"known are auto, {', '.join(CORES)}")
    if name in MODULES and importlib.util.find_spec(MODULES[name]) is None:
        raise LabError(f"the core {name} needs the package {MODULES[name].replace('_', '-')}", hint=INSTALL)
    if name == "auto":
        find_core()  # without any, what is missing is an emulator and not the game
    file = find_rom() if rom is None else Path(rom).resolve()
    if not file.is_file():
        raise LabError("this file does not exist", file=file, hint="rom must be a .nes file")
    core = find_core(file) if name == "auto" else name
    classes: dict[str, Callable[[Path], Core]] = {"builtin": Builtin, "fceumm": Fceumm, "nes-py": NesPy}
    try:
        return classes[core](file)
    except ImportError as error:
        alternatives = [other for other in MODULES if other != core and importlib.util.find_spec(MODULES[other])]
        hint = f"use the core {alternatives[0]}, or reinstall it" if alternatives else INSTALL
        raise LabError(f"the core {core} is installed but cannot be loaded: {error}", hint=hint) from error


def to_grey(screen: Array) -> Array:
    """Downsample a 224×240 colour screen to 84×84 greyscale; each pixel is the mean of the area it covers.

    8 rows become 3, and 20 columns become 7. All products and sums are integers below 2²⁴, which float32 represents
    exactly: the result is the same to the bit on every machine, whatever the order of additions in BLAS.
    """
    groups = screen.reshape(HEIGHT // 8, 8, WIDTH * 3).astype(np.uint16)
    rows = np.empty((HEIGHT // 8, 3, WIDTH * 3), np.float32)
    rows[:, 0] = 3 * (groups[:, 0] + groups[:, 1]) + 2 * groups[:, 2]
    rows[:, 1] = 3 * (groups[:, 3] + groups[:, 4]) + groups[:, 2] + groups[:, 5]
    rows[:, 2] = 3 * (groups[:, 6] + groups[:, 7]) + 2 * groups[:, 5]
    sums = rows.reshape(-1, 60) @ _COLUMN_WEIGHTS
    return (sums * (1 / (8 * 20 * 256)) + 0.5).astype(np.uint8).reshape(SIZE, SIZE)


_LUMA = np.array([77, 150, 29])
"""Weights of red, green and blue in greyscale, in 256ths."""


def _column_weights() -> NDArray[np.float32]:
    """Return the weight of each of 20 columns, in three colours, in each of 7: area share times luma weight."""
    columns = np.arange(20)[:, None]
    wide = np.arange(7)[None, :]
    share = np.clip(np.minimum(7 * columns + 7, 20 * wide + 20) - np.maximum(7 * columns, 20 * wide), 0, None)
    weighted = share[:, None, :] * _LUMA[None, :, None]
    return np.asarray(weighted.reshape(60, 7), np.float32)


_COLUMN_WEIGHTS = _column_weights()

_COLOURS = np.frombuffer(
    bytes.fromhex(
        "707470 201888 0000a8 400098 880070 a80010 a00000 780800 "
        "402c00 004400 005000 003c10 183c58 000000 000000 000000 "
        "b8bcb8 0070e8 2038e8 8000f0 b800b8 e00058 d82800 c84c08 "
        "887000 009400 00a800 009038 008088 000000 000000 000000 "
        "f8fcf8 38bcf8 5894f8 4088f8 f078f8 f874b0 f87460 f89838 "
        "f0bc38 80d010 48dc48 58f898 00e8d8 787878 000000 000000 "
        "f8fcf8 a8e4f8 c0d4f8 d0c8f8 f8c4f8 f8c4d8 f8bcb0 f8d8a8 "
        "f8e4a0 e0fca0 a8f0b8 b0fcc8 98fcf0 c0c4c0 000000 000000"
    ),
    np.uint8,
).reshape(64, 3)
"""Red, green and blue of the console's colours, as the fceumm core shows them."""
_LUMA_OF_PAIRS = np.ascontiguousarray(np.maximum(_COLOURS[:, None], _COLOURS[None, :]) @ _LUMA, np.uint16)
"""[64, 64]: luma, in 256ths, of the brighter of two colours in each of red, green and blue."""
_STATE_FORMAT = b"nes1"
"""First bytes of a snapshot of the builtin core; changes with the struct State of nes.c."""

_RETRO_BUTTONS = ("B", "", "SELECT", "START", "UP", "DOWN", "LEFT", "RIGHT", "A")
"""Order of the buttons in stable-retro."""
_RETRO_MASKS = [
    np.array([bool(name) and buttons >> game.BUTTONS.index(name) & 1 for name in _RETRO_BUTTONS], np.uint8)
    for buttons in range(256)
]
