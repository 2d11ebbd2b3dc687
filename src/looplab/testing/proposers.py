"""The contract of proposers: see `looplab.decide.base`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from looplab import plugins
from looplab.api.define import Float, Int, create_study
from looplab.api.study import Study
from looplab.decide.base import ExternalProposer, ProposerContext
from looplab.ledger.view import ProposalRow

TRAINER = """import json, os
config = json.load(open(os.environ["LOOPLAB_CONFIG"]))
print(f"loss: {(config['x'] - 0.3) ** 2 + config['n'] / 100}")
"""


class ProposerContract:
    """What every proposer guarantees. Subclasses define `make_proposer`.

    It proposes for a study with the knobs `x` (0 to 1) and `n` (1 to 9), whose objective `loss` is minimised.
    """

    name = "under_test"
    n_runs = 6
    """Runs that it can propose at least, with the base run."""

    def make_proposer(self, context: ProposerContext) -> ExternalProposer:
        """Return the proposer, as the entry point does."""
        raise NotImplementedError

    @pytest.fixture
    def study(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
        monkeypatch.setitem(plugins._registered, "proposers", {self.name: self.make_proposer})
        (tmp_path / "train.py").write_text(TRAINER)
        return create_study(
            tmp_path,
            trainer=["{python}", "-I", "-S", "train.py"],
            base={"x": 0.9, "n": 5},
            knobs={"x": Float(0, 1), "n": Int(1, 9)},
            metric="loss",
            goal="min",
            proposers=[{self.name: {}}],
            launch={"config": "file"},
            slots={"count": 2, "gpus": "none"},
        )

    def _proposed(self, study: Study) -> list[ProposalRow]:
        failures: list[dict[str, Any]] = study._read(lambda record: record.events_of("proposer failed"), [])
        assert not failures
        proposals: list[ProposalRow] = study._read(lambda record: record.proposals(), [])
        return [row for row in proposals if row.proposer == self.name]

    def test_its_proposals_are_run(self, study: Study) -> None:
        study.run(runs=self.n_runs)
        proposals = self._proposed(study)
        assert len(study.runs) == self.n_runs
        assert len(proposals) >= self.n_runs - 1
        assert all(proposal.reason for proposal in proposals)

    def test_the_guard_allows_what_it_proposes(self, study: Study) -> None:
        study.run(runs=self.n_runs)
        assert not [proposal for proposal in self._proposed(study) if proposal.status == "rejected"]

    def test_another_engine_continues_where_the_first_ended(self, study: Study) -> None:
        for n in range(1, self.n_runs + 1):
            study.run(runs=n)
        assert len(study.runs) == self.n_runs
        configs = [tuple(sorted(run.config().items())) for run in study.runs]
        assert len(set(configs)) > 1
