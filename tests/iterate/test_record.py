"""The table of versions: what it says, that `verify` compares it and the code, and that it is rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.iterate.test_versions import FORGED, Lab, project

from looplab.ledger.audit import audit
from looplab.ledger.ledger import Ledger
from looplab.ledger.rebuild import reindex
from looplab.ledger.versions import read_versions


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def versions(lab: Lab) -> list[dict[str, Any]]:
    return read_versions(Ledger(lab.folder / ".looplab/ledger.db"))


def findings(lab: Lab) -> list[str]:
    return [f"{one.where}: {one.why}" for one in audit(Ledger(lab.folder / ".looplab/ledger.db"), lab.folder).findings]


def test_the_table_has_every_attempt_with_its_code_metric_and_verdict(lab: Lab) -> None:
    agent = (lab.beside / "agent.py").read_text()
    lab.agent("\nsys.exit(1)\n")
    lab.go(2, retries=0)
    (lab.beside / "agent.py").write_text(agent)
    history = lab.go(2)
    base, failed, merged = versions(lab)
    assert (base["version"], base["attempt"], base["state"]) == (1, 0, "baseline")
    assert (failed["attempt"], failed["state"], failed["verdict"], failed["champion"]) == (1, "failed", "crash", 0)
    assert failed["branch"] == "looplab/v2-failed-1"
    assert (merged["state"], merged["verdict"], merged["champion"]) == ("merged", "keep", 1)
    assert merged["folder"] == "experiments/v2"
    assert merged["code"] == project.git(lab.folder, "rev-parse", "HEAD:experiments/v2").strip()
    attempt = history.last(2)
    assert attempt is not None
    assert attempt.measured is not None
    assert (merged["value"], merged["revision"]) == (attempt.measured.value, attempt.commit)
    assert findings(lab) == []


def test_verify_finds_code_that_is_not_what_was_judged(lab: Lab) -> None:
    lab.go(2)
    assert findings(lab) == []
    (lab.folder / "experiments/v2/artifacts/note").write_text("a new file is not part of the version")
    assert findings(lab) == []
    (lab.folder / "experiments/v2/train.py").write_text("# better")
    (found,) = findings(lab)
    assert found == "v2: its code is not what was judged: experiments/v2/train.py"
    project.git(lab.folder, "commit", "-qam", "improved afterwards")
    assert findings(lab) == [found]
    (lab.folder / ".git").rename(lab.beside / "git")
    (found,) = findings(lab)
    assert found.startswith("versions: their code cannot be compared")


def test_verify_finds_a_changed_table_and_reindex_restores_it(lab: Lab) -> None:
    lab.go(2)
    before = versions(lab)
    ledger = Ledger(lab.folder / ".looplab/ledger.db")
    with ledger.write():
        ledger.execute("UPDATE versions SET champion = 1 - champion")
    ledger.close()
    assert len(findings(lab)) == 2
    reindex(lab.folder / ".looplab/ledger.db", lab.folder)
    assert versions(lab) == before
    assert findings(lab) == []


def test_a_forged_champion_is_not_in_the_table(lab: Lab) -> None:
    lab.free_agent(FORGED)
    lab.go(2, retries=0)
    base, forger = versions(lab)
    assert (base["champion"], forger["champion"], forger["state"]) == (1, 0, "void")
    assert findings(lab) == []
    before = versions(lab)
    reindex(lab.folder / ".looplab/ledger.db", lab.folder)
    assert versions(lab) == before
