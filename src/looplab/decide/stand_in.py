"""The stand-in for an agent that gave up: a search over the knobs, else small steps from the champion.

A search changes all knobs at once. If constraints leave little of the space, or a draw needs weights that do not exist,
all of its proposals may be refused; a small change of one knob is then still legal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from looplab.config.edits import Edit, Op
from looplab.decide.axes import Axis
from looplab.decide.base import BEST, Proposal
from looplab.decide.history import History
from looplab.decide.search import SearchProposer
from looplab.guard.guard import Guard, Problem
from looplab.ledger.view import StudyView

MAX_DRAWS = 64
"""Number of steps that are tried before giving up."""
STEP = 0.1
"""Standard deviation of a step, as a share of the axis."""


class StandIn:
    name = SearchProposer.name
    thinking = False

    def __init__(
        self, search: SearchProposer, guard: Guard, history: History, check: Callable[[Proposal], Sequence[Problem]]
    ) -> None:
        """`check` returns why a proposal would be rejected."""
        self.problem: str | None = None
        self._search = search
        self._guard = guard
        self._history = history
        self._check = check

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        proposals = [one for one in self._search.propose(study, n) if not self._check(one)]
        self.problem = self._search.problem
        return proposals or self._step(study)

    def close(self) -> None:
        self._search.close()

    def _step(self, study: StudyView) -> list[Proposal]:
        """Return a change of one knob of the champion, drawn with the number of proposals so far as the seed."""
        rng = random.Random(study.count_proposals(self.name))  # noqa: S311 (no secret)
        best = study.best()
        past = next((one for one in reversed(self._history.ended()) if best and one.run.id == best.id), None)
        values = self._guard.knob_values(past.config) if past is not None else {}
        for _ in range(MAX_DRAWS):
            axis = rng.choice(self._search.axes)
            value = _draw_near(axis, values.get(axis.path, axis.base), rng)
            reason = f"a step of {axis.path} from the champion, since the search has nothing to propose"
            proposal = Proposal((str(Edit(axis.path, Op.SET, value)),), reason, self.name, BEST)
            if not self._check(proposal):
                return [proposal]
        return []


def _draw_near(axis: Axis, value: object, rng: random.Random) -> object:
    """Draw a value of the knob near the given one; any choice if the choices have no order."""
    param = axis.to_param(value)
    if param is None or (axis.choices and not axis.ordered):
        return axis.to_value(axis.from_unit(rng.random()))
    u = min(1.0, max(0.0, axis.to_unit(param) + rng.gauss(0.0, STEP)))
    return axis.to_value(axis.from_unit(u))
