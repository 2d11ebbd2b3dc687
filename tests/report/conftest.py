"""Studies to report on, and a browser for their pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.report import making as studies
from tests.report.fixtures import judged, maker, making, open_browser  # noqa: F401 (fixtures)

from looplab.ledger.catalogue import MixEvent, ReproducedEvent


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A study of sixty runs, with everything that can happen in a night."""
    made = studies.make(tmp_path_factory.mktemp("full") / "lab")
    studies.fill(made, 60, points=40)
    return made


@pytest.fixture(scope="session")
def judged_full(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A study in which everything was judged, with a mix, a watch and a reproduction."""
    made = studies.make(tmp_path_factory.mktemp("judged") / "lab", studies.JUDGED)
    studies.fill_judged(made, 20)
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
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
