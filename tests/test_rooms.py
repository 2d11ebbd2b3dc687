"""The import rule: a room imports only rooms above it, and the trainer's wing imports none of them."""

from __future__ import annotations

import ast
from pathlib import Path

import looplab

ROOT = Path(looplab.__file__).parent
ROOMS = (
    "config", "guard", "runs", "ledger", "launch", "measure", "watch", "judge", "agents", "decide", "report", "loop",
    "iterate", "pipeline", "api", "cli",
)  # fmt: skip
WING = {"trainkit": {"trainkit"}, "rl": {"trainkit", "rl"}, "recipes": {"trainkit", "rl", "recipes"}}
TRAINS_ITSELF = {"api": {"trainkit"}}
"""The caller of ask and tell is the trainer."""
EVERYBODY = {"errors", "signals", "untrusted"}


def imports(file: Path) -> set[str]:
    """The rooms (or top-level modules) of looplab that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "looplab" else [node.module]
            )
        found |= {name.split(".")[1] for name in names if name.startswith("looplab.")}
    return found - EVERYBODY - {"__version__"}


def test_a_room_imports_only_rooms_above_it() -> None:
    wrong = []
    for place, room in enumerate(ROOMS):
        for file in (ROOT / room).rglob("*.py"):
            below = imports(file) - set(ROOMS[: place + 1]) - TRAINS_ITSELF.get(room, set())
            wrong += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(below)]
    assert not wrong


def test_the_trainers_wing_knows_nothing_of_the_rooms() -> None:
    wrong = []
    for room, allowed in WING.items():
        for file in (ROOT / room).rglob("*.py"):
            wrong += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(imports(file) - allowed)]
    assert not wrong


def test_every_folder_is_a_room_of_the_plan() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert folders <= {*ROOMS, *WING}
