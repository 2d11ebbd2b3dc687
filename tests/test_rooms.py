"""The import rule: a room imports only rooms above it, and the trainer's wing imports none of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import looplab

ROOT = Path(looplab.__file__).parent
ROOMS = (
    "config", "guard", "runs", "ledger", "launch", "measure", "watch", "judge", "agents", "decide", "report", "ui",
    "loop", "iterate", "pipeline", "onboard", "api", "testing", "cli",
)  # fmt: skip
WING = {"trainkit": {"trainkit"}, "rl": {"trainkit", "rl"}, "recipes": {"trainkit", "rl", "recipes"}}
TRAINS_ITSELF = {"api": {"trainkit"}}
"""The caller of ask and tell is the trainer."""
EVERYBODY = {"errors", "plugins", "signals", "untrusted"}


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
    assert folders == {*ROOMS, *WING}


def test_the_page_about_the_architecture_is_true() -> None:
    page = (Path(__file__).parents[1] / "docs/architecture.md").read_text()
    listed = re.findall(r"^  (\w+)/ ", page, re.MULTILINE)
    assert listed == [*ROOMS, *WING]
    for name in re.findall(r"\b(\w+/\w+\.py)\b", page):
        assert (ROOT / name).exists(), name
    sources = "\n".join(file.read_text() for file in ROOT.rglob("*.py"))
    for name in ("Session", "Engine", "Proposer", "Guard", "Proposal", "Ruling", "LaunchSpec", "Executor", "StudyLedger",
                 "RunMetrics", "Alarm", "EngineEvent"):  # fmt: skip
        assert re.search(rf"^class {name}\b", sources, re.MULTILINE), name
    assert "LaunchEvent = " in sources


def test_class_names_are_unique_in_the_package() -> None:
    homes: dict[str, list[str]] = {}
    for file in ROOT.rglob("*.py"):
        if "recipes" in file.parts:
            continue  # each recipe is a lab of its own
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_sql_is_written_in_the_ledger_only() -> None:
    statement = re.compile(r"\"(SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA) ")
    places = [
        str(file.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if room != "ledger" and statement.search(file.read_text())
    ]
    assert places == ["report/tables.py"]  # DuckDB, over tables that the ledger gave


RECIPE_WORDS = re.compile(
    r"act_?ot|\besm\b|drone|fish|mario|ot_pi|ot_cost|max_new_tokens|prompt_template|main_results|task\.dataset"
    r"|resume_mode|load-model-path|min_parallel_envs|CODEX_(?!HOME)|x_pos|[\u4e00-\u9fff]",
    re.IGNORECASE,
)
EXAMPLE = re.compile(r"looplab (init|recipe|stage|case)\b[^\"`]*")
"""Examples in help texts and hints may name a recipe."""


def test_the_core_knows_nothing_of_the_recipes() -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in {".py", ".js", ".css", ".html", ".c"}]
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in files
        if "recipes" not in file.relative_to(ROOT).parts
        for match in RECIPE_WORDS.finditer(EXAMPLE.sub("", file.read_text()))
    ]
    assert found == []
