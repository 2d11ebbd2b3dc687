"""What the live page may change: the commands of the same names, for a person in a browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.cli.editing import find_parent, preview_decision, queue_proposal
from looplab.cli.labs import LabContext, open_context
from looplab.cli.objective import set_objective
from looplab.config.edits import parse_edit
from looplab.decide.base import Proposal
from looplab.errors import LabError
from looplab.guard.knobs import Knob, KnobTable
from looplab.ledger.roles import Origin
from looplab.loop.lock import engine_pid
from looplab.measure.summary import Directions
from looplab.report import wording
from looplab.runs.folder import point
from looplab.runs.redact import redact_text
from looplab.ui.steering import Actor, Steering, edits_of, text_of


class LabSteering(Steering):
    """Does what a person asks on the page, as the commands of the same names do, and records who asked.

    Every action opens the ledger for itself: it is seldom, and the page's own connection can only read.
    """

    def __init__(self, lab: Path) -> None:
        self._lab = lab

    @contextlib.contextmanager
    def _context(self, study: str, *, create: bool = False, reading: bool = False) -> Iterator[LabContext]:
        context = open_context(self._lab, study, create=create, reading=reading)
        with contextlib.closing(context.ledger):
            yield context

    def act(self, study: str, action: str, arguments: Mapping[str, Any], actor: Actor) -> dict[str, Any]:
        does = {
            "pause": self._ask, "resume": self._ask, "drain": self._ask, "stop": self._ask, "stop run": self._stop_run,
            "propose": self._propose, "say": self._say, "veto": self._veto, "objective": self._objective,
        }  # fmt: skip
        with self._context(study, create=action in ("propose", "say")) as context:
            return {"action": action, **does[action](context, action, arguments, actor)}

    def _ask(self, context: LabContext, action: str, _: Mapping[str, Any], actor: Actor) -> dict[str, Any]:
        if engine_pid(context.lab.folder, context.study.name) is None:
            raise LabError(
                f"no engine is running for study {context.study.name!r}", hint="start it with `looplab resume`"
            )
        self._command(context, action, actor)
        done = {"pause": "no new runs start; running ones continue", "resume": "the study continues",
                "drain": "the engine exits when the running trainings have ended",
                "stop": "the engine stops its runs and exits"}  # fmt: skip
        return {"did": done[action]}

    def _stop_run(self, context: LabContext, action: str, arguments: Mapping[str, Any], actor: Actor) -> dict[str, Any]:
        run = context.record.run(text_of(arguments, "run", needed=True))
        if run.state != "running":
            raise LabError(f"run {run.id} is not running: it is {run.status or run.state}")
        if engine_pid(context.lab.folder, context.study.name) is None:
            raise LabError("no engine is running to stop it", hint=f"`looplab stop {run.id}`")
        self._command(context, action, actor, what="stop", run=run.id)
        return {"did": f"run {run.id} is being stopped"}

    def _command(
        self, context: LabContext, action: str, actor: Actor, *, what: str | None = None, run: str | None = None
    ) -> None:
        with context.ledger.write():
            context.record.command(what or action, run=run)
            context.record.steered(action, who=actor.who, where=actor.where, run=run)

    def _propose(self, context: LabContext, action: str, arguments: Mapping[str, Any], actor: Actor) -> dict[str, Any]:
        edits = [str(parse_edit(edit)) for edit in edits_of(arguments)]
        parent = find_parent(context, text_of(arguments, "parent") or "best")
        reason = text_of(arguments, "reason", needed=True)
        refused, warning = preview_decision(context, Proposal(tuple(edits), reason, Origin.PERSON, parent))
        if refused:
            raise LabError(f"the guard rejects it: {refused}")
        hypothesis = text_of(arguments, "hypothesis")
        with context.ledger.write():
            number = queue_proposal(context, edits, reason, parent=parent, hypothesis=hypothesis)
            context.record.steered(action, who=actor.who, where=actor.where)
        return {"did": f"proposal {number} is queued", "proposal": number, "warning": warning}

    def _say(self, context: LabContext, action: str, arguments: Mapping[str, Any], actor: Actor) -> dict[str, Any]:
        with context.ledger.write():
            context.record.say(text_of(arguments, "text", needed=True))
            context.record.steered(action, who=actor.who, where=actor.where)
        return {"did": "the agent's next prompt will include this"}

    def _veto(self, context: LabContext, action: str, arguments: Mapping[str, Any], actor: Actor) -> dict[str, Any]:
        from looplab.loop.judging import veto as invalidate

        run = context.record.run(text_of(arguments, "run", needed=True))
        why = redact_text(text_of(arguments, "why", needed=True))
        with context.ledger.write():
            champion = invalidate(context.record, run, why)
            context.record.command("veto", run=run.id, why=why)
            context.record.steered(action, who=actor.who, where=actor.where, run=run.id)
        if champion is not None:
            point(context.outputs, "BEST", champion)
        return {"did": f"run {run.id} is void" + (f"; best is now {champion}" if champion else "")}

    def _objective(
        self, context: LabContext, action: str, arguments: Mapping[str, Any], actor: Actor
    ) -> dict[str, Any]:
        if context.study.objective is not None:
            raise LabError("the study has an objective", hint="change it with `looplab objective`")
        metric = text_of(arguments, "metric", needed=True)
        goal = text_of(arguments, "goal") or Directions(context.study.measure.goals).goal(metric)
        if goal not in ("min", "max"):
            raise LabError("the goal is min or max")
        set_objective(context.lab, context.study, metric, "min" if goal == "min" else "max", None)
        with context.ledger.write():
            context.record.steered(action, who=actor.who, where=actor.where)
        return {"did": f"the objective is {metric} ({goal}); the next engine uses it"}

    def check(self, study: str, edits: Sequence[str], parent: str) -> dict[str, Any]:
        with self._context(study, reading=True) as context:
            try:
                parsed = tuple(str(parse_edit(edit)) for edit in edits)
                run = find_parent(context, parent)
            except LabError as error:
                return {"refused": str(error), "warning": None}
            refused, warning = preview_decision(context, Proposal(parsed, "", Origin.PERSON, run))
            return {"refused": refused and wording.plain(refused), "warning": warning and wording.plain(warning)}

    def form(self, study: str) -> dict[str, Any]:
        with self._context(study, reading=True) as context:
            best = context.record.best()
            parent = best or next(iter(next(iter(context.record.base_runs().values()), [])), None)
            config = context.record.config_of(parent, context.outputs / parent.id) if parent is not None else {}
            knobs = {path: Knob.make(path, spec) for path, spec in context.study.knobs.items()}
            present = KnobTable(list(knobs.values())).present(config)
            values = {key: wording.value(key, value) for key, _, _, value in present}
            return {
                "parent": parent.id if parent is not None else None,
                "knobs": [
                    {"key": key, "value": values.get(key), "rule": wording.plain(knob.describe()),
                     "choices": None if knob.choices is None else [wording.shown(one) for one in knob.choices]}
                    for key, knob in knobs.items()
                ],
            }  # fmt: skip
