"""The judge of a running study: ended runs go in; verdicts, a champion and run requests come out.

`Judge` itself is pure. This module stores its state in the ledger and reads the held-out metric for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import StudyConfig, parse_at
from looplab.judge.base import Candidate, HeldOut, Judgement, JudgeSettings, JudgeState, RunRequest, Score
from looplab.judge.judge import Judge
from looplab.judge.stats import paired
from looplab.launch.base import STOP
from looplab.ledger.configuration import Configuration
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.events import Note, VerdictGiven
from looplab.loop.flags import current_conditions
from looplab.loop.outbox import Outbox
from looplab.loop.setup import compared_changes
from looplab.measure.discover import reader_of
from looplab.measure.run_metrics import tie_break_value
from looplab.measure.summary import Directions, Summariser, objective_value
from looplab.runs import folder
from looplab.runs.code import code_differences, name_files

JUDGED = (*DECIDED, Role.REPLICATE, Role.CONFIRMATION, Role.CONTROL)
"""Roles of runs that the judge compares."""
Key = tuple[str, str | None]
"""Config hash without the seed (`RunRow.point`), and the run that the weights come from (None: no warm start)."""


@dataclass(slots=True)
class _Group:
    """All ended runs of one config with the same initial weights."""

    run: str
    n: int
    warm: str | None
    control: bool
    scores: list[tuple[int, Score]] = field(default_factory=list)


def judge_settings(study: StudyConfig) -> JudgeSettings:
    """Return the policy of the judge that the lab file describes; the study must have one."""
    judge, objective = study.judge, study.objective
    assert judge is not None
    assert objective is not None
    return JudgeSettings(
        goal=objective.goal, by=study.judge_rule or "test", alpha=judge.alpha, baseline_seeds=judge.baseline_seeds,
        replicates=judge.replicates, max_replicates=judge.max_replicates, min_effect=judge.min_effect.absolute,
        min_relative=judge.min_effect.relative, confirm=judge.confirm,
        then=objective.then.goal if objective.then else None,
        then_metric=objective.then.metric if objective.then else "",
    )  # fmt: skip


class StudyJudge:
    """Evaluates the ended runs of a study and keeps the state of its judge in the ledger."""

    def __init__(self, study: StudyConfig, record: StudyLedger, outputs: Path) -> None:
        self._study = study
        self._record = record
        self._outputs = outputs
        self._judge = Judge(judge_settings(study))
        self._groups: dict[Key, _Group] = {}
        self._costs: dict[str, float] = {}
        self._created: dict[str, float] = {}
        self._codes: dict[str, Mapping[str, Any]] = {}  # run id → the `code` entry of its capsule
        self._configured: tuple[str | None, list[Configuration]] = (None, [])
        self._new = True
        self._conditions = ""
        self.requests: tuple[RunRequest, ...] = ()

    @property
    def baseline_seeds(self) -> int:
        """Number of runs of the base before anything is judged."""
        settings = self._judge.settings
        return {"test": settings.baseline_seeds, "mean": settings.replicates}.get(settings.by, 1)

    def add_run(self, run: RunRow, fingerprint: str = "") -> None:
        """Add an ended run to the runs of its config.

        Runs under other conditions and runs that the judge does not compare are ignored, as are those that a person
        stopped: they say nothing about their config. A replicate that a watch rule stopped counts as a crash.

        Args:
            fingerprint: Hash of the data and the evaluator that the run used; empty if unknown.
        """
        if run.conditions != self._conditions:
            return
        if run.role not in JUDGED:
            return
        earlier = run.parent if run.role == Role.CONTINUATION else run.warm
        cost = (run.seconds or 0.0) * run.devices + self._costs.get(earlier or "", 0.0)
        self._costs[run.id] = cost
        if run.status == "stopped" and (run.role in DECIDED or self._was_stopped_by_person(run)):
            return  # a stopped trial has no valid result; a replicate is requested again
        self._created[run.id] = run.created
        group = self._groups.setdefault(
            (run.point, run.warm), _Group(run.id, run.n, run.warm, control=run.role == Role.CONTROL)
        )
        if run.n < group.n or (group.control and run.role != Role.CONTROL):
            group.run, group.n, group.control = run.id, run.n, run.role == Role.CONTROL
        then = self._study.objective.then if self._study.objective is not None else None
        tie = tie_break_value(then, self._outputs / run.id)
        again = run.role == Role.CONFIRMATION
        score = Score(run.id, run.seed, run.objective, cost, fingerprint, tie, order=run.n, again=again)
        group.scores.append((run.n, score))
        self._new = True

    def _was_stopped_by_person(self, run: RunRow) -> bool:
        return folder.read_json(self._outputs / run.id, "summary.json", strict=False).get("reason") == STOP

    def load(self) -> None:
        """Add all runs that ended before this engine started, under the current conditions of the study."""
        self._conditions = current_conditions(self._study, self._record)
        others = {run.id for run in self._record.not_comparable()}
        for run in self._record.runs(state="ended"):
            if run.id in others:
                continue  # measured by another objective, so not comparable
            summary = folder.read_json(self._outputs / run.id, "summary.json", strict=False)
            self.add_run(run, str(summary.get("fingerprint") or ""))

    def evaluate(self, open_runs: Iterable[RunRow] = ()) -> Judgement | None:
        """Judge all configs if a run was added since the last call, and store the judge's state.

        Must be called inside a transaction. A config whose first run is still open is skipped, since the first run is
        the one that a config is selected by. Until there is a base, so is every config that was decided on after one
        whose run is still open: the base is the first that works, not the first that ends.

        Args:
            open_runs: Planned and running runs of the study.

        Returns:
            The judgement, or None if there is no new run.
        """
        if not self._new:
            return None
        self._new = False
        first: dict[Key, int] = {}
        for run in open_runs:
            if run.role in DECIDED:
                first[run.point, run.warm] = min(run.n, first.get((run.point, run.warm), run.n))
        waiting = {key for key, n in first.items() if key in self._groups and n < self._groups[key].n}
        judge_state = self._judge_state()
        if first and judge_state.champion not in dict(judge_state.verdicts):
            oldest = min(first.values())
            waiting |= {
                key for key, group in self._groups.items() if group.n > oldest and group.run != judge_state.champion
            }
        candidates = [candidate for candidate in self._candidates() if (candidate.point, candidate.warm) not in waiting]
        judgement = self._judge.evaluate(judge_state, candidates, self._held_out if self._study.holdout else None)
        judgement = self._with_differences(judgement)
        self.requests = judgement.requests
        if judgement.state != judge_state:
            self._record.set_judge_state(judgement.state.as_dict())
        return judgement

    def close(self) -> Judgement:
        """Conclude all pending tests, because no more runs will follow."""
        judge_state = self._judge_state()
        judgement = self._with_differences(self._judge.close(judge_state, self._candidates()))
        if judgement.state != judge_state:
            self._record.set_judge_state(judgement.state.as_dict())
        return judgement

    def _judge_state(self) -> JudgeState:
        """Return the stored state, adjusted for runs that have become void since.

        A void run is not judged again. Its test is dropped, and the alpha of that test counts as spent.
        """
        stored = self._record.judge_state()
        judge_state = JudgeState.from_dict(stored) if stored else JudgeState()
        void = dict.fromkeys(self._record.void_runs(), "void")
        lost = [test for test in judge_state.tests if test.run in void]
        return replace(
            judge_state,
            tests=tuple(test for test in judge_state.tests if test not in lost),
            spent=judge_state.spent + sum(test.alpha for test in lost),
            verdicts=tuple({**dict(judge_state.verdicts), **void}.items()),
        )

    def _with_differences(self, judgement: Judgement) -> Judgement:
        """Return the judgement with differences in code and lab file noted in its verdicts.

        Both may explain a difference between champion and challenger that is not due to the config.
        """
        verdicts = []
        for evidence in judgement.verdicts:
            groups = {group.run: group for group in self._groups.values()}
            sides = [groups[run] for run in (evidence.champion, evidence.run) if run in groups]
            runs = [score.run for group in sides for _, score in sorted(group.scores, key=lambda item: item[0])]
            differences = []
            code = self._code_differences(runs)
            if code:
                differences.append(f"the code differs: {name_files(code)}")
            keys = self._lab_differences(runs)
            if keys:
                differences.append(f"lab.yaml differs: {name_files(keys)}")
            if differences:
                notes = " ".join(
                    f"{text[0].upper()}{text[1:]} between the runs that are compared." for text in differences
                )
                evidence = replace(evidence, why=f"{evidence.why} {notes}", flags=(*evidence.flags, *differences))
            verdicts.append(evidence)
        return replace(judgement, verdicts=tuple(verdicts))

    def _code_differences(self, runs: Sequence[str]) -> list[str]:
        """Return the source files in which any of these runs differs from the first one."""
        names: dict[str, None] = {}
        for run in runs:
            if run not in self._codes:
                self._codes[run] = folder.read_capsule(self._outputs / run).get("code") or {}
        distinct = {str(self._codes[run].get("files") or self._codes[run]): self._codes[run] for run in runs}
        first, *others = distinct.values() or [{}]
        for other in others:
            names |= dict.fromkeys(code_differences(self._outputs, first, other))
        return list(names)

    def _lab_differences(self, runs: Sequence[str]) -> list[str]:
        """Return the keys of the lab file that changed between the first and the last of these runs."""
        times = [self._created[run] for run in runs if run in self._created]
        if not times:
            return []
        current = self._record.configuration()
        if current != self._configured[0]:
            self._configured = (current, self._record.configurations())
        between = [one for one in self._configured[1][1:] if min(times) < one.at <= max(times)]
        return list(dict.fromkeys(key for one in between for key in compared_changes(one.changes)))

    def _candidates(self) -> list[Candidate]:
        """Return the configs with the scores of their runs, oldest first."""
        candidates = []
        for (point, warm), group in sorted(self._groups.items(), key=lambda item: item[1].n):
            scores = tuple(score for _, score in sorted(group.scores, key=lambda item: item[0]))
            candidates.append(Candidate(point, group.run, scores, warm, group.control))
        return candidates

    def _held_out(self, champion: Candidate, challenger: Candidate) -> HeldOut | None:
        """Read the held-out metric of both candidates and charge one look to its budget.

        Returns:
            Values by seed, or by index where runs have no seed; None if the budget is used up.
        """
        held_out = self._study.holdout
        assert held_out is not None
        asked = self._record.held_out_reads()
        if asked >= held_out.budget:
            return None
        values = [
            {
                n if score.seed is None else score.seed: value
                for n, score in enumerate(candidate.scores)
                if (value := self._read(score.run)) is not None
            }
            for candidate in (champion, challenger)
        ]
        self._record.ask_held_out(champion.run, challenger.run, asked + 1, self._said(champion, challenger, *values))
        return HeldOut(*values)

    def _said(
        self, champion: Candidate, challenger: Candidate, there: Mapping[int, float], here: Mapping[int, float]
    ) -> str:
        """Describe the paired comparison on the held-out metric.

        The challenger's first run is left out: it was selected for its score, so its value is biased.

        Args:
            there: Values of the champion by seed.
            here: Values of the challenger by seed.
        """
        first = challenger.scores[0].seed
        common = [key for key in here if key in there and key != (0 if first is None else first)]
        if len(common) < 2:
            return f"{challenger.run} and {champion.run} have too few held-out values in common."
        sign = 1.0 if self._judge.settings.goal == "max" else -1.0
        result = paired([sign * (here[key] - there[key]) for key in common])
        low, high = result.interval()
        word = "better" if result.effect >= 0 else "worse"
        return (
            f"Held out, {challenger.run} is {word} than {champion.run} by {abs(result.effect):.3g} "
            f"(95 % interval of the gain {low:.2g} to {high:.2g}, {result.n} pairs)."
        )

    def last_look(self) -> str | None:
        """Compare the most promising challenger with the champion on the held-out metric, at the end of a study.

        Done only if the held-out metric has not been read before. It changes no verdict.

        Returns:
            The comparison in words, or None if there is nothing to compare.
        """
        judge_state = self._record.judge_state()
        if self._study.holdout is None or judge_state is None or self._record.held_out_reads():
            return None
        candidates = {candidate.run: candidate for candidate in self._candidates()}
        champion = candidates.get(judge_state["champion"] or "")
        tested = [
            (evidence["effect"], run)
            for run, evidence in self._record.verdicts().items()
            if run in candidates and evidence.get("n", 0) > 1 and evidence.get("effect") is not None
        ]
        if champion is None or not tested:
            return None
        self._held_out(champion, candidates[max(tested)[1]])
        return self._record.held_out_text()

    def _read(self, run: str) -> float | None:
        """Return the held-out metric of a run, with its sign adapted to the objective's goal; None if not measured."""
        held_out = self._study.holdout
        assert held_out is not None
        goal = held_out.goal or (self._study.objective.goal if self._study.objective else "min")
        summariser = Summariser(Directions({held_out.metric: goal}), kept=parse_at(held_out.at) or 1)
        summariser.add(reader_of(self._study, self._outputs / run, with_held_out=True).poll(final=True))
        value = objective_value(summariser, held_out.metric, held_out.at)
        # The judge applies the objective's goal to both metrics.
        negate = self._study.objective is not None and goal != self._study.objective.goal
        return -value if negate and value is not None else value


def veto(record: StudyLedger, run: RunRow, why: str) -> str | None:
    """Declare a run void on behalf of a person; must be called inside a transaction.

    Returns:
        The id of the run that is best instead; None if there is none, or if the vetoed run was not the best.
    """
    reason = why or "a person's veto"
    before = record.best()
    evidence = {"run": run.id, "why": reason, "verdict": "void", "flags": ["veto"]}
    record.judged(run.id, "void", {**evidence, "configuration": record.configuration()}, {})
    if before is None or before.id != run.id:
        return None
    void = {run_id for run_id, evidence in record.verdicts().items() if evidence["verdict"] == "void"}
    heirs = [record.run(run_id) for run_id in record.bests() if run_id not in void]
    heir = next((one for one in reversed(heirs) if one.conditions == run.conditions), None)
    record.set_best(heir.id if heir else None, heir.objective if heir else None)
    stored = record.judge_state()
    if stored is not None:
        judge_state = JudgeState.from_dict(stored)
        verdicts = tuple((one, "void" if one == run.id else verdict) for one, verdict in judge_state.verdicts)
        record.set_judge_state(replace(judge_state, champion=heir.id if heir else None, verdicts=verdicts).as_dict())
    return heir.id if heir else None


class SummaryWriter:
    """Adds verdicts to the summaries of runs.

    The new content is hashed inside the transaction that records the verdict, and written after the commit.
    """

    def __init__(self, outputs: Path) -> None:
        self._outputs = outputs
        self._due: list[tuple[Path, str, bytes]] = []

    def add(self, run_id: str, evidence: Mapping[str, object]) -> dict[str, str]:
        """Prepare the summary of a run with its verdict.

        Returns:
            The SHA-256 that the file will have, by its path in the run folder; empty if nothing changes.
        """
        run_dir = self._outputs / run_id
        summary = folder.read_json(run_dir, "summary.json", strict=False)
        if not summary or summary.get("verdict") == evidence:
            return {}
        content = dump_json({**summary, "verdict": dict(evidence)}, finite=True)
        name = folder.record_name(run_dir, "summary.json")
        self._due.append((run_dir, name, content))
        return {name: folder.hash_bytes(content)}

    def write(self) -> None:
        """Write the prepared summaries; call it after the transaction is committed."""
        due, self._due = self._due, []
        for run_dir, name, content in due:
            try:
                if not folder.is_linked(run_dir):  # `verify` reports a linked folder
                    write_atomic(run_dir / name, content, sync=False)
            except OSError as error:  # a missing or damaged run folder, which `verify` reports
                if folder.concerns_lab(error, self._outputs):
                    raise


def record_judgement(
    record: StudyLedger,
    judgement: Judgement,
    configuration: str | None,
    files: Callable[[str, Mapping[str, object]], Mapping[str, str]] = lambda run, evidence: {},
) -> RunRow | None:
    """Record the new verdicts and the champion; must be called inside a transaction.

    Args:
        configuration: Hash of the study's configuration, stored with the verdicts.
        files: Returns the new hashes of a run's files that contain its verdict.

    Returns:
        The champion if it has changed, else None.
    """
    for run, verdict, evidence in evidence_of(judgement, configuration):
        record.judged(run, verdict, evidence, files(run, evidence))
    best = record.best() if judgement.champion is not None else None
    if judgement.champion is None or (best is not None and best.id == judgement.champion):
        return None
    champion = record.run(judgement.champion)
    if champion.objective is not None:
        record.set_best(champion.id, champion.objective)
    return champion


def evidence_of(judgement: Judgement, configuration: str | None) -> list[tuple[str, str, dict[str, object]]]:
    """Return the new verdicts as tuples of run id, verdict and evidence."""
    return [
        (e.run, e.verdict.value, {**asdict(e), "verdict": e.verdict.value, "configuration": configuration})
        for e in judgement.verdicts
    ]


class VerdictRecorder:
    """Records and reports verdicts: in the ledger, in the summaries, in the lab book, to listeners."""

    def __init__(self, record: StudyLedger, outputs: Path, outbox: Outbox) -> None:
        self.configuration: str | None = None
        """Hash of the study's configuration, which verdicts refer to."""
        self._record = record
        self._outbox = outbox
        self._summaries = SummaryWriter(outputs)

    def record(self, judgement: Judgement) -> RunRow | None:
        """Record a judgement; return the champion if it has changed. Inside a transaction."""
        champion = record_judgement(self._record, judgement, self.configuration, self._summaries.add)
        for run_id, verdict, evidence in evidence_of(judgement, self.configuration):
            self._outbox.tell(VerdictGiven(f"run {run_id}: {verdict}. {evidence['why']}", run_id, verdict=verdict))
            self._outbox.log(f"judged {run_id}", str(evidence["why"]), verdict)
        for test in judgement.opened:
            self._outbox.tell(Note(f"run {test.run} earns replicates (test {test.number}, alpha {test.alpha:.3g})"))
        for alarm in judgement.alarms:
            self._outbox.alarm(alarm)
        return champion

    def discard_stopped(self, run: RunRow, rule: str) -> RunRow:
        """Discard a trial that a watch rule stopped: it has no result, and is not tried again."""
        evidence = {
            "run": run.id,
            "verdict": "discard",
            "why": f"Stopped by the watch rule {rule!r}.",
            "flags": ["stopped"],
            "configuration": self.configuration,
        }
        self._record.judged(run.id, "discard", evidence, self._summaries.add(run.id, evidence))
        return replace(run, verdict="discard")

    def complete_summaries(self) -> None:
        """Write the verdicts that are missing in summaries."""
        for run_id, evidence in self._record.verdicts().items():
            self._summaries.add(run_id, {key: value for key, value in evidence.items() if key != "at"})
        self._summaries.write()

    def write_summaries(self) -> None:
        """Write the summaries of recorded verdicts; after the commit."""
        self._summaries.write()
