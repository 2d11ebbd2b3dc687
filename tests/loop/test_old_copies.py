"""An old copy of the ledger is put back, at whatever moment it was made: `reindex` brings it up to date."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.loop.test_preview import (
    InstantExecutor,
    RunOptions,
    WatchedEngine,
    ask_for_more,
    engine_life,
    random_study,
    set_up,
    train,
    write_lab,
)

from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.rebuild import reindex


def findings(folder: Path) -> list[str]:
    with closing(Ledger(folder / ".looplab" / "ledger.db", repair=True)) as ledger:
        return [f"{one.what}: {one.where}: {one.why}" for one in audit(ledger, folder).findings]


def copy_database(path: Path, to: Path) -> None:
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


@pytest.mark.parametrize("seed", range(12))
def test_after_a_reindex_of_an_old_copy_the_record_is_whole(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    study, with_seed, queue = random_study(chance)
    study["judge"] = {"baseline_seeds": 2, "replicates": 2, "max_replicates": chance.choice((2, 4))}
    folder = write_lab(tmp_path / "lab", study, seed=with_seed, queue=queue)
    path = folder / ".looplab" / "ledger.db"
    copies: list[Path] = []

    def copy_now(n: int) -> None:
        copies.append(tmp_path / f"copy-{len(copies)}.db")
        copy_database(path, copies[-1])

    for _ in range(2):
        ask_for_more(folder, chance)
        executor = InstantExecutor(train)
        ledger = Ledger(path)
        engine = WatchedEngine(set_up(folder, RunOptions()), ledger, executor)

        def at_end(n: int, engine: WatchedEngine = engine) -> None:
            copy_now(n)
            if n == 5:
                engine.request("drain")

        executor.on_end = at_end
        engine.run()
        ledger.close()
        copy_now(0)
    assert findings(folder) == []
    for copy in chance.sample(copies, min(3, len(copies))):
        other = tmp_path / copy.stem
        shutil.copytree(folder, other)
        for old in (other / ".looplab").glob("ledger.db*"):
            old.unlink()
        shutil.copyfile(copy, other / ".looplab" / "ledger.db")
        reindex(other / ".looplab" / "ledger.db", other)
        assert findings(other) == []
        engine_life(set_up(other, RunOptions()), drain_after=4)
        assert findings(other) == []
