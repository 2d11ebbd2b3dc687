"""A proposer: steps of one knob from the best run, alternating between up and down, smaller each time."""

from __future__ import annotations

from looplab.decide.base import Proposal, ProposerContext
from looplab.ledger.view import StudyView


class StepProposer:
    """Options: the knob, and the first step."""

    def __init__(self, context: ProposerContext, knob: str, step: float = 0.5) -> None:
        self.knob, self.step = context.guard.knobs[knob].path, step

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        first = study.count_proposals("step")
        return [
            Proposal(
                edits=(f"{self.knob}@add={self.step * (-1) ** k / (1 + k // 2):.6g}",),
                reason=f"step {k + 1}",
                proposer="step",
                parent="best",
                source=f"step:{k}",
            )
            for k in range(first, first + n)
        ]
