"""A proposer: the middle of a knob's range, then the middles of both halves, and so on."""

from __future__ import annotations

from looplab.decide.base import Proposal, ProposerContext
from looplab.ledger.view import StudyView


class HalvingProposer:
    """Options: the knob."""

    def __init__(self, context: ProposerContext, knob: str) -> None:
        self.knob = context.guard.knobs[knob]

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        first = study.count_proposals("halving") + 1
        return [self.proposal(k) for k in range(first, first + n)]

    def proposal(self, k: int) -> Proposal:
        low, high = self.knob.low or 0.0, self.knob.high or 1.0
        share = int(f"{k:b}"[::-1], 2) / 2 ** k.bit_length()  # 1/2, 1/4, 3/4, 1/8, 5/8, …
        edit = f"{self.knob.path}@set={low + share * (high - low):.6g}"
        return Proposal((edit,), f"point {k} of the range", "halving", source=f"halving:{k}")
