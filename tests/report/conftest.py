"""Studies to report on, and a browser for their pages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from looplab.ledger.catalogue import MixEvent, ReproducedEvent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"report_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MAKING, BROWSER = load("making"), load("browser")


@pytest.fixture
def making() -> ModuleType:
    return MAKING


@pytest.fixture
def maker(tmp_path: Path) -> Any:
    """A study without runs."""
    return MAKING.make(tmp_path / "lab")


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A study of sixty runs, with everything that can happen in a night."""
    made = MAKING.make(tmp_path_factory.mktemp("full") / "lab")
    MAKING.fill(made, 60, points=40)
    return made


@pytest.fixture
def judged(tmp_path: Path) -> Any:
    """A study with a judge, without runs."""
    return MAKING.make(tmp_path / "judged", MAKING.JUDGED)


@pytest.fixture(scope="session")
def judged_full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A study in which everything was judged, with a mix, a watch and a reproduction."""
    made = MAKING.make(tmp_path_factory.mktemp("judged") / "lab", MAKING.JUDGED)
    MAKING.fill_judged(made, 20)
    with made.ledger.write():
        for name in ("search", "agent", "rules"):
            made.record.propose(name, ["model.width@set=64"], "a try")
        for turn, search in enumerate((0.5, 0.7, 0.9)):
            shares = {"search": search, "agent": round(1 - search, 1)}
            made.ledger.record(MixEvent(weights=shares, chosen={"search": 3, "agent": 1 + turn}), "tiny")
        first = made.record.run("1").id
        made.record.watched(first, "grad_norm > 10", "grad_norm is 12.3 at step 40", True)
        event = ReproducedEvent(again="0099-aaaa", same=True, why="Exactly the same: 2.")
        made.ledger.record(event, "tiny", first)
    return made


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    program = BROWSER.find_chromium()
    if program is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    opened = BROWSER.Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
