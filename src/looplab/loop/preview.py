"""Preview of an engine's next actions.

The engine's own planner runs on a copy of the ledger: nothing is written or started, and no agent is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from looplab.decide.agent import Ask
from looplab.errors import LabError
from looplab.launch.base import Slot
from looplab.ledger.ledger import LedgerCopy
from looplab.ledger.plan import RunPlan
from looplab.ledger.rebuild import check_folders
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import ProposalRow, RunRow
from looplab.loop.decision import Decider, decide_base
from looplab.loop.events import EngineEvent
from looplab.loop.flags import switch_conditions
from looplab.loop.judging import StudyJudge, record_judgement
from looplab.loop.lock import engine_pid
from looplab.loop.planning import Planner
from looplab.loop.prepare import FilledCommand, Preparer
from looplab.loop.setup import Base, Setup
from looplab.report.wording import plural
from looplab.runs import folder

UNDRAWN = "xxxx"
"""Placeholder for the random suffix of a run id."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that would be started, or is unfinished."""

    row: RunRow
    plan: RunPlan
    """Plan from the ledger; empty if the ledger no longer has it."""
    slot: Slot
    """Slot of the run. If all slots are taken, the one it would get if they became free in order."""
    command: FilledCommand | None
    """Command with secrets hidden; None if it is unknown."""
    problem: str | None = None
    """Why the run could not be started; None if it could."""

    @property
    def argv(self) -> Sequence[str]:
        """Arguments of its command; empty if they are unknown."""
        return self.command.argv if self.command is not None else ()


@dataclass(frozen=True, slots=True)
class Preview:
    """What an engine would do next."""

    unfinished: tuple[PlannedRun, ...]
    """Planned and running runs of a stopped or running engine; they come first."""
    runs: tuple[PlannedRun, ...]
    """Runs that would be planned next, in this order."""
    rejected: tuple[ProposalRow, ...]
    asks: tuple[Ask, ...]
    """Agent calls that would be made; their answers are unknown."""
    undecided: int
    """Number of runs of the round that are planned later: while the first ones run, or after an agent's answer."""
    notes: tuple[str, ...]
    why_none: str | None
    """Why no run would be planned, in words; None if runs or agent calls are."""


def preview(setup: Setup, ledger: LedgerCopy) -> Preview:
    """Repeat on the copy what an engine does at its start, up to its first planning.

    Raises:
        DamagedError: An engine would refuse to start.
        LabError: Runs were measured by another objective.
    """
    ledger.check_end()
    if engine_pid(setup.lab, setup.study.name) is None:  # a running engine may be creating folders
        check_folders(ledger, setup.lab, setup.study.name)
    study = StudyLedger(ledger, setup.study.name)
    objective = setup.study.objective
    at = objective.at if objective else None
    lost = study.open(objective.metric if objective else None, objective.goal if objective else "min", at)
    if lost:
        raise LabError(
            f"{plural(lost, 'run was', 'runs were')} measured by another objective than that of lab.yaml, so "
            "it is not known what is next",
            hint="`looplab remeasure` reads them again, and `looplab run` begins with that",
        )
    switched = switch_conditions(setup, study)
    study.forget_plans()
    open_runs = study.runs_open()
    study_judge = None
    if setup.study.judge is not None:
        study_judge = StudyJudge(setup.study, study, folder.study_folder(setup.lab, setup.study.name))
        study_judge.load()
        with ledger.write():
            judgement = study_judge.evaluate(open_runs)
            if judgement is not None:
                record_judgement(study, judgement, study.configuration())
    news: list[EngineEvent] = []
    asks: list[Ask] = []
    planner = Planner(setup, study, Decider(setup, study), study_judge, news.append, lambda line: None, asks=asks)
    before, _ = ledger.head()
    planner.recover([run for run in open_runs if run.state == "planned"])
    for run in open_runs:  # they get free slots first; only base configs that are run again remain
        if run in planner.queue:
            planner.queue.remove(run)
    free = max(0, len(setup.slots) - len(open_runs))
    continuous = setup.options.continuous
    planner.refresh()
    with ledger.write():
        if free or not continuous:
            planner.plan(idle=not open_runs, free=free)
    if open_runs:
        planner.fill()
    planner.close()
    why = planner.why
    if not why and open_runs:
        waiting = study.count_waiting()
        why = "more are planned when a slot is free" if continuous else "the next round is planned when they have ended"
        why += f" ({plural(waiting, 'proposal is', 'proposals are')} waiting)" if waiting else ""
    placed = _place(setup, study, open_runs, planner.queue)
    rejected = [event.data["proposal"] for event in ledger.events(after=before) if event.kind == "rejected"]
    return Preview(
        unfinished=placed[: len(open_runs)],
        runs=placed[len(open_runs) :],
        rejected=tuple(study.proposal(number) for number in rejected),
        asks=tuple(asks),
        undecided=planner.undecided,
        notes=(*([switched] if switched else []), *(item.text for item in news if item.kind == "note")),
        why_none=None if planner.queue or asks else why,
    )


def base_command(setup: Setup, base: Base) -> FilledCommand:
    """Return the command of a run of the base config in the first slot, with secrets hidden."""
    decision = decide_base(setup, base)
    name = f"{1:04d}-{UNDRAWN}"
    return Preparer(setup).command(name, decision.plan, setup.slots[0], base=base.name, seed=decision.seed, round_=1)


def _place(
    setup: Setup, study: StudyLedger, unfinished: Sequence[RunRow], new: Sequence[RunRow]
) -> tuple[PlannedRun, ...]:
    """Return each run with its slot and command."""
    preparer = Preparer(setup)
    slots = {slot.name: slot for slot in setup.slots}
    taken = {run.slot for run in unfinished if run.state in ("queued", "running")}
    turns = itertools.cycle([slot for slot in setup.slots if slot.name not in taken] or setup.slots)
    ids = {run.id: f"{run.n:04d}-{UNDRAWN}" for run in new}
    placed = []
    for run in (*unfinished, *new):
        plan = study.plan_of(run.id)
        slot = (slots.get(run.slot or "") if run.state == "running" else None) or next(turns)
        row = replace(
            run,
            id=ids.get(run.id, run.id),
            parent=ids.get(run.parent or "", run.parent),
            twin=ids.get(run.twin or "", run.twin),
        )
        command = problem = None
        try:
            if plan is not None:
                command = preparer.command(row.id, plan, slot, base=row.base, seed=row.seed, round_=row.round)
        except LabError as error:
            problem = str(error)
        placed.append(PlannedRun(row, plan or RunPlan({}), slot, command, problem))
    return tuple(placed)
