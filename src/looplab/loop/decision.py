"""From a proposal to a decision: which config would really run, or why not. Writes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looplab.config.files import canonical_json
from looplab.config.paths import diff
from looplab.decide.base import BEST, Proposal
from looplab.errors import LabError
from looplab.guard.guard import Problem
from looplab.ledger.study import StudyLedger
from looplab.loop.setup import Base, Setup
from looplab.runs import folder


@dataclass(frozen=True, slots=True)
class Decision:
    """A run that may be: its config and where it comes from."""

    proposer: str
    reason: str
    hypothesis: str
    proposal: int | None
    source: str | None
    parent: str | None
    base: str
    edits: tuple[str, ...]
    config: dict[str, Any]
    config_hash: str
    diff_parent: dict[str, Any]
    diff_base: dict[str, Any]
    notes: tuple[str, ...]

    def body(self) -> dict[str, Any]:
        """What is kept until the run's folder is there."""
        return {
            "proposer": self.proposer,
            "reason": self.reason,
            "hypothesis": self.hypothesis,
            "source": self.source,
            "parent": self.parent,
            "base": self.base,
            "edits": list(self.edits),
            "config": self.config,
            "diff_parent": self.diff_parent,
            "diff_base": self.diff_base,
            "notes": list(self.notes),
        }


class Rejected(Exception):
    """The guard said no."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))


def hash_config(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(config)).hexdigest()[:16]


def decide_base(base: Base) -> Decision:
    return Decision(
        "base", f"base config {base.name}", "", None, None, None, base.name, (), base.config, hash_config(base.config),
        {}, {}, base.notes,
    )  # fmt: skip


class Decider:
    """Turns proposals into decisions; remembers the configs of parents."""

    def __init__(self, setup: Setup, ledger: StudyLedger | None) -> None:
        self._setup = setup
        self._ledger = ledger
        self._configs: dict[str, tuple[dict[str, Any], str]] = {}

    def decide(self, proposal: Proposal) -> Decision:
        """The decision, or `Rejected` with every reason."""
        parent, base, parent_config = self._origin(proposal)
        ruling = self._setup.guard.check(parent_config, proposal.edits)
        if ruling.config is None or ruling.problems:
            raise Rejected(ruling.problems)
        changed = diff(parent_config, ruling.config)
        return Decision(
            proposal.proposer, proposal.reason, proposal.hypothesis, proposal.id, proposal.source, parent, base.name,
            proposal.edits, ruling.config, hash_config(ruling.config), changed,
            changed if parent is None else diff(base.config, ruling.config), ruling.notes,
        )  # fmt: skip

    def _origin(self, proposal: Proposal) -> tuple[str | None, Base, dict[str, Any]]:
        """The run that the proposal starts from (None: a base), its base, and its config."""
        name = proposal.parent
        if name == BEST:
            best = self._ledger.best() if self._ledger else None
            name = best.id if best else None
        if name is None:
            base = self._setup.bases[0]
            return None, base, base.config
        for base in self._setup.bases:
            if name == base.name:
                return None, base, base.config
        try:
            if self._ledger is None:
                raise LabError(f"there is no run {name!r} yet")
            run = self._ledger.run(name)
            if run.id not in self._configs:
                path = folder.study_folder(self._setup.lab, self._setup.study.study) / run.id
                config = folder.read_json(folder.require(path), "config.json")
                self._configs[run.id] = (config, run.base or "")
        except LabError as error:
            raise Rejected((Problem("parent", proposal.parent, "parent", str(error)),)) from None
        config, base_name = self._configs[run.id]
        return run.id, self._setup.base(base_name), config
