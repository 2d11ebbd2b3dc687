"""From a proposal to a decision: the config that will run, or every reason against it. Writes nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from looplab.config.edits import apply_edits
from looplab.config.files import hash_config
from looplab.config.lab import WarmStartConfig
from looplab.config.paths import Concrete, diff, find, has
from looplab.decide.base import BEST, Proposal
from looplab.errors import LabError
from looplab.guard.guard import Problem
from looplab.ledger.plan import RunPlan
from looplab.ledger.roles import Origin, Role
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import CONDITIONS, RunRow
from looplab.loop.reproduce import place_of
from looplab.loop.setup import Base, Setup
from looplab.loop.warm_start import continued, find_checkpoint, resolve
from looplab.runs import folder
from looplab.runs.redact import HIDDEN, hide_values, redact_argv


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A run to be planned: its plan, its origin and its role."""

    plan: RunPlan
    config_hash: str
    point: str
    """The hash of the config without its seed."""
    seed: int | None
    proposer: str
    reason: str
    base: str
    """The base config at the root of its ancestry."""
    proposal: int | None = None
    parent: str | None = None
    """The run that it starts from; None: a base config."""
    role: Role = Role.TRIAL
    twin: str | None = None
    """The run that it repeats."""
    warm: str | None = None
    """The run, or the file, whose weights it starts from."""
    ineffective: tuple[str, ...] = ()
    """Why an edit of the proposal has no effect, if one has none; these are among the plan's notes."""
    key: str = ""
    """Name, content and conditions of a base config; empty for other runs."""

    @property
    def warning(self) -> str | None:
        """What a person should know before the run: edits without effect, and that it repeats another run."""
        if not self.ineffective:
            return None
        repeats = (f"it repeats run {self.twin}",) if self.twin is not None else ()
        return "; ".join((*self.ineffective, *repeats))


class ProposalRejected(Exception):
    """The guard rejected a proposal, or it repeats a run."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.message for problem in problems))


def hash_point(
    config: Mapping[str, Any],
    seed: Concrete | None,
    warm: WarmStartConfig | None = None,
    conditions: str = "",
    *,
    config_hash: str | None = None,
) -> str:
    """Return the hash of a config without its seed and without the weights it starts from: runs of one point differ by
    chance only. Under other conditions it is another point.

    Args:
        config_hash: The hash of the config, if it is known.
    """
    places = [] if seed is None else [seed]
    if warm is not None:
        places += [place for key in (warm.mode, warm.source) for place in find(config, key)]
    for place in places:
        if has(config, place):
            config, config_hash = with_value(config, place, None), None
    return (config_hash or hash_config(config)) + (CONDITIONS + conditions if conditions else "")


def with_value(config: Mapping[str, Any], place: Concrete, value: Any) -> dict[str, Any]:
    """Return the config with another value in one place; only the path to it is copied."""
    changed: Any = dict(config)
    node = changed
    for part in place[:-1]:
        node[part] = node[part].copy()
        node = node[part]
    node[place[-1]] = value
    return changed  # type: ignore[no-any-return]


def base_key(setup: Setup, name: str | None, config: Mapping[str, Any], conditions: str) -> str:
    """Return the identity of a base config: its name, its content without W&B keys, and the conditions."""
    return f"{name}@{hash_config(setup.untracked(config))}" + (CONDITIONS + conditions if conditions else "")


def base_runs(setup: Setup, record: StudyLedger) -> dict[str, list[RunRow]]:
    """Return the runs of the base configs, oldest first, by their keys."""
    found = record.base_runs()
    if not any(base.tracked for base in setup.bases):
        return found
    by_key: dict[str, list[RunRow]] = {}
    outputs = folder.study_folder(setup.lab, setup.study.name)
    for key, runs in found.items():
        first = runs[0]
        try:
            config = record.config_of(first, outputs / first.id)
        except LabError:  # a run of an early version whose folder is gone
            by_key.setdefault(key, []).extend(runs)
        else:
            by_key.setdefault(base_key(setup, first.base, config, first.conditions), []).extend(runs)
    return {key: sorted(runs, key=lambda run: run.n) for key, runs in by_key.items()}


def decide_base(setup: Setup, base: Base) -> Decision:
    point = hash_point(setup.untracked(base.config), setup.seed, setup.study.warm_start, setup.conditions)
    extra = tuple(redact_argv(setup.options.extra))
    return Decision(
        plan=RunPlan(base.config, notes=base.notes, extra=extra, call_edits=setup.edits),
        config_hash=hash_config(base.config),
        point=point,
        seed=setup.seed_of(base.config),
        proposer=Origin.BASE,
        reason=f"base config {base.name}",
        base=base.name,
        role=Role.BASE,
        key=base_key(setup, base.name, base.config, setup.conditions),
    )


def decide_job(proposal: Proposal) -> Decision:
    """Decide on a submitted command, which is run unchanged.

    Raises:
        ProposalRejected: It cannot be read.
    """
    job = proposal.job
    if job is None:
        raise ProposalRejected((Problem("proposal", None, "job", "it is not a command"),))
    config = job.to_dict()
    point = hash_config({key: value for key, value in config.items() if key != "timeout"})
    plan = RunPlan(config, diff_base=diff({}, config), source=proposal.source, job=job, extra=())
    return Decision(
        plan=plan, config_hash=hash_config(config), point=point, seed=None, proposer=Origin.JOB, reason=proposal.reason,
        base=Origin.JOB, proposal=proposal.id,
    )  # fmt: skip


class Decider:
    """Turns proposals into decisions; remembers the configs of parents."""

    def __init__(self, setup: Setup, ledger: StudyLedger | None) -> None:
        self._setup = setup
        self._ledger = ledger
        self._outputs = folder.study_folder(setup.lab, setup.study.name)
        self._configs: dict[str, tuple[dict[str, Any], str]] = {}

    def decide(self, proposal: Proposal) -> Decision:
        """Decide on a proposal.

        Raises:
            ProposalRejected: With every reason.
        """
        origin = proposal.origin
        if origin is Origin.JOB:
            return decide_job(proposal)
        if origin is Origin.AGAIN and proposal.parent is not None and self._ledger is not None:
            return self._again(proposal, self._ledger.run(proposal.parent))
        if proposal.continues and proposal.parent is not None and self._ledger is not None:
            return self._continuation(proposal, self._ledger.run(proposal.parent))
        hidden = [edit for edit in proposal.edits if HIDDEN in edit]
        if hidden:
            why = "its value is a secret, which is not recorded: put it into the base config or the environment"
            raise ProposalRejected(tuple(Problem(edit.partition("@")[0], HIDDEN, "secret", why) for edit in hidden))
        parent, base, parent_config = self._origin(proposal)
        start_config = parent_config
        if parent is not None and self._setup.edits:  # a base has them already
            start_config = apply_edits(parent_config, self._setup.edits).config
        ruling = self._setup.guard.check(start_config, proposal.edits)
        if ruling.config is None or ruling.problems:
            raise ProposalRejected(ruling.problems)
        changed = diff(parent_config, ruling.config)
        warm = self._setup.study.warm_start
        whole = hash_config(ruling.config)
        untracked = self._setup.untracked(ruling.config)
        known_hash = whole if untracked is ruling.config else None
        point = hash_point(untracked, self._setup.seed, warm, self._setup.conditions, config_hash=known_hash)
        try:
            start = resolve(warm, ruling.config, self._setup.lab, self._outputs, self._ledger)
        except LabError as error:
            raise ProposalRejected((Problem(warm.source if warm else "", None, "warm start", str(error)),)) from None
        source = None if start is None else start["run"] or start["path"]
        # Without a judge, it does not matter whether a person repeats a run.
        matters = not origin.is_person or self._setup.study.judge is not None
        known = self._ledger.runs_of(point, source) if self._ledger is not None and matters else []
        if known and not origin.is_person:
            # A person may ask for anything once more; a program that does would only repeat itself.
            why = (
                self._describe_repeat(known, ruling.config)
                if changed
                else f"it changes nothing: it equals run {known[0]}"
            )
            why = "; ".join((why, *(text for text in ruling.ineffective if text not in why)))
            raise ProposalRejected((Problem("config", list(proposal.edits), "repeated", why),))
        plan = RunPlan(
            ruling.config,
            edits=proposal.edits,
            diff_parent=changed,
            diff_base=changed if parent is None else diff(base.config, ruling.config),
            notes=ruling.notes,
            hypothesis=proposal.hypothesis,
            source=proposal.source,
            start=start,
            extra=self._extra,
            call_edits=self._setup.edits,
            until=proposal.until,
        )
        return Decision(
            plan=plan,
            config_hash=whole,
            point=point,
            seed=self._setup.seed_of(ruling.config),
            proposer=proposal.proposer,
            reason=proposal.reason,
            base=base.name,
            proposal=proposal.id,
            parent=parent,
            role=Role.REPLICATE if known else Role.TRIAL,
            twin=known[0] if known else None,
            warm=source,
            ineffective=ruling.ineffective,
        )

    @cached_property
    def _extra(self) -> tuple[str, ...]:
        """The arguments of the call, without secrets."""
        return tuple(redact_argv(self._setup.options.extra))

    def _describe_repeat(self, known: Sequence[str], config: Mapping[str, Any]) -> str:
        """Describe how a config repeats earlier runs."""
        assert self._ledger is not None
        seed = self._setup.seed_of(config)
        exact = next((run for run in known if self._ledger.run(run).seed == seed), None)
        if exact is None:
            return f"only the seed differs from run {known[0]}: that is a repeat, not a change"
        return f"an exact repeat of run {exact}: the same config" + (" with the same seed" if seed is not None else "")

    def repeat(self, twin: RunRow, plan: RunPlan, seed: int | None, why: str, by: str = Origin.JUDGE) -> Decision:
        """Decide to run the same config again, with this seed; None: with its own seed, if any."""
        place = self._setup.seed
        config, _ = hide_values(self._setup.track(plan.config))
        if seed is None:
            seed = twin.seed
        elif place is not None:
            config = with_value(config, place, seed)
        base = self._setup.base(twin.base)
        repeated = RunPlan(
            config,
            diff_parent=diff(plan.config, config),
            diff_base=diff(base.config, config),
            start=plan.start,
            extra=plan.extra or (),
            call_edits=plan.call_edits,
        )
        return Decision(
            plan=repeated, config_hash=hash_config(config), point=twin.point, seed=seed, proposer=by, reason=why,
            base=base.name, parent=twin.id, role=Role.REPLICATE, twin=twin.id, warm=twin.warm,
        )  # fmt: skip

    def _again(self, proposal: Proposal, twin: RunRow) -> Decision:
        """Decide to repeat a run exactly, in the lab's state at that time."""
        decision = self.repeat(twin, self.plan_of(twin), twin.seed, proposal.reason, Origin.AGAIN)
        place = place_of(self._setup.lab, twin.id)
        plan = replace(decision.plan, source=proposal.source, place=str(place) if place else None)
        return replace(decision, role=Role.REPRODUCTION, proposal=proposal.id, plan=plan)

    def _continuation(self, proposal: Proposal, run: RunRow) -> Decision:
        """Decide on a run that starts from the checkpoint of another one, where that was stopped.

        Without edits it is the same training: its point and the weights that it began with are those of that run. With
        edits it is another config, which starts from that run's weights.

        Raises:
            ProposalRejected: There is no checkpoint, or the guard rejects the edits.
        """
        warm = self._setup.study.warm_start
        if warm is None:
            why = "the study has no warm_start, so no run can be continued"
            raise ProposalRejected((Problem("parent", run.id, "warm start", why),))
        plan = self.plan_of(run)
        try:
            path = find_checkpoint(warm, self._setup.lab, self._outputs, run, self._ledger)
            digest = folder.hash_file(path)
            if digest is None:
                raise LabError(f"{path} is not there")
        except (LabError, OSError) as error:
            raise ProposalRejected((Problem("parent", run.id, "warm start", str(error)),)) from None
        start = {"asked": run.id, "run": run.id, "path": str(path), "sha256": digest}
        config, _ = hide_values(self._setup.track(plan.config))
        config, point, source, role = copy.deepcopy(config), run.point, run.warm, Role.CONTINUATION
        if proposal.edits:
            ruling = self._setup.guard.check(config, proposal.edits)
            if ruling.config is None or ruling.problems:
                raise ProposalRejected(ruling.problems)
            config = copy.deepcopy(ruling.config)
            untracked = self._setup.untracked(config)
            point = hash_point(untracked, self._setup.seed, warm, self._setup.conditions)
            source, role = run.id, Role.TRIAL
        config = continued(warm, config, start)
        base = self._setup.base(run.base)
        return Decision(
            plan=RunPlan(
                config,
                edits=proposal.edits,
                diff_parent=diff(plan.config, config),
                diff_base=diff(base.config, config),
                source=proposal.source,
                start=start,
                extra=plan.extra or (),
                call_edits=plan.call_edits,
                until=proposal.until,
            ),
            config_hash=hash_config(config),
            point=point,
            seed=run.seed,
            proposer=proposal.proposer,
            reason=proposal.reason,
            base=base.name,
            proposal=proposal.id,
            parent=run.id,
            role=role,
            warm=source,
        )

    def control(self, champion: RunRow, source: RunRow, seed: int | None, why: str) -> Decision:
        """Decide on the champion's config, starting from the weights that another run started from."""
        warm = self._setup.study.warm_start
        plan = self.plan_of(champion)
        start = self.plan_of(source).start
        if warm is None or start is None:
            raise LabError(f"run {source.id} did not start from the weights of another run")
        config = continued(warm, copy.deepcopy(plan.config), start)
        decision = self.repeat(champion, replace(plan, config=config, start=start), seed, why)
        return replace(decision, role=Role.CONTROL, warm=source.warm)

    def plan_of(self, run: RunRow) -> RunPlan:
        """Return the plan of a run; once that is forgotten, its config and the weights that it started from."""
        assert self._ledger is not None
        plan = self._ledger.plan_of(run.id)
        if plan is not None:
            return plan
        path = folder.require(self._outputs / run.id)
        about = folder.read_json(path, "run.json", strict=False)
        return RunPlan(
            self._ledger.config_of(run, path),
            start=about.get("warm_start"),
            extra=tuple(about.get("extra", ())),
            call_edits=tuple(about.get("call_edits") or ()),
        )

    def _origin(self, proposal: Proposal) -> tuple[str | None, Base, dict[str, Any]]:
        """Return the run that the proposal starts from (None: a base config), its base, and its config."""
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
                path = folder.require(self._outputs / run.id)
                config, _ = hide_values(self._ledger.config_of(run, path))  # an early version has recorded secrets
                self._configs[run.id] = (config, run.base or "")
        except LabError as error:
            raise ProposalRejected((Problem("parent", proposal.parent, "parent", str(error)),)) from None
        config, base_name = self._configs[run.id]
        return run.id, self._setup.base(base_name), self._setup.track(config)
