"""SIGKILL at every step: a process that dies after a few events, again and again, until all versions are done."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from looplab.iterate import settings as reading
from looplab.iterate.overview import overview, verdict_of
from looplab.iterate.record import VersionLedger
from looplab.iterate.versions import IterateOptions, Iteration
from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger

_spec = importlib.util.spec_from_file_location("killed_project", Path(__file__).with_name("project.py"))
assert _spec is not None
assert _spec.loader is not None
project = importlib.util.module_from_spec(_spec)
sys.modules["killed_project"] = project
_spec.loader.exec_module(project)


class Mortal(VersionLedger):
    """Kills its process at the n-th event, before or after it is written."""

    def __init__(self, ledger: Ledger, events: int, before: bool) -> None:
        super().__init__(ledger)
        self.left = events
        self.before = before
        record, write = ledger.record, ledger.write

        def count(*args: Any, **data: Any) -> int:
            self.left -= 1
            if self.left == 0 and self.before:
                os.kill(os.getpid(), signal.SIGKILL)
            return record(*args, **data)

        @contextlib.contextmanager
        def die_after() -> Iterator[None]:
            with write():
                yield
            if self.left <= 0 and not ledger._db.in_transaction:
                os.kill(os.getpid(), signal.SIGKILL)

        ledger.record = count  # type: ignore[method-assign]
        ledger.write = die_after  # type: ignore[method-assign]


def life(folder: Path, events: int, before: bool) -> int:
    """Run one process; return its exit code, 0 or 1 like the command's, or -9."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            settings = reading.load(folder, {})
            spec = reading.make_spec(settings.agent, reading.Flags())
            versions = Mortal(Ledger(folder / ".looplab/ledger.db"), events, before)
            run = Iteration(
                folder,
                settings,
                versions,
                spec,
                reading.limits_of(settings.agent),
                IterateOptions(1),
                lambda line: None,
            )
            code = 0 if run.run(2, 4) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize(("events", "before"), [(4, True), (3, False)])
def test_killed_at_every_step_nothing_is_repeated_and_nothing_lost(tmp_path: Path, events: int, before: bool) -> None:
    folder, beside = project.make(tmp_path / "lab", tmp_path / "beside"), tmp_path / "beside"
    lives = 1
    while (code := life(folder, events, before)) == -signal.SIGKILL:
        lives += 1
        assert lives < 100
    assert code == 1  # v4 is void
    assert lives > 8
    done = [line.removesuffix(" after an interruption") for line in project.lines(beside / "calls")]
    assert done == ["v2", "v3", "v3 again", "v4"]
    ledger = Ledger(folder / ".looplab/ledger.db")
    facts = [{**asdict(row), "verdict": verdict_of(row)} for row in overview(VersionLedger(ledger).history())]
    project.check_whole_story(folder, json.loads(json.dumps(facts)))
    assert audit(ledger, folder).findings == ()
    kinds = [event.kind for event in ledger.events("iterate")]
    assert kinds.count("iterate began") == kinds.count("iterate ended") == 1
    assert kinds.count("version merged") == 2
    assert kinds.count("version judged") == 2
