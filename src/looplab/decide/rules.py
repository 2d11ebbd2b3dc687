"""Rules: people's knowledge of their trainings, as a `rules.yaml`, or as a `rules.py` with `decide(summary, history)`
or `decide(summary)`.

Each ended run, newest round first, leads to at most `variants` proposals whose parent it is. Edits are resolved to
plain values and clamped to the rule's `clamp` and the knob's range: a rule cannot drive a knob out of its range, it
just stops firing there. The source of a proposal is `rules:<run>:<rule>`, so each is made only once. If nothing fires,
`problem` says why, rule by rule.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType
from typing import Any

from pydantic import Field, field_validator

from looplab.config import paths
from looplab.config.edits import Edit, EditError, Op, apply_edits, parse_edit
from looplab.config.expression import Expression, ExpressionError, MissingName, compile_expression
from looplab.config.files import canonical_json, read_document
from looplab.config.lab import EditText, ExpressionText
from looplab.config.validation import Section, check_section
from looplab.decide.base import Proposal
from looplab.decide.history import History, PastRun
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import KnobTable, show_value
from looplab.ledger.roles import DECIDED, Role
from looplab.ledger.view import RunRow, StudyView
from looplab.measure.names import MetricNames
from looplab.measure.summary import to_dict

NAME = "rules"
DECIDE = "decide"
"""Name of the function in a rules.py."""

Clamp = Mapping[str, tuple[float, float]]
"""Dotted path (may contain `*`) → interval to which the edited value is clamped."""
NoProposalReasons = dict[str, dict[str, str]]
"""Rule → run → why the rule proposes nothing; an empty string if its condition is false."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a rules.yaml."""

    name: str
    when: Expression
    edits: tuple[Edit, ...]
    clamp: Clamp
    reason: str = ""
    hypothesis: str = ""
    priority: float = 0
    """Higher comes first; ties are broken by the order in the file."""
    once: bool = False
    """Whether it fires at most once in the study."""
    cooldown: int = 0
    """Number of rounds for which it does not fire after a round in which it fired."""


@dataclass(frozen=True, slots=True)
class RuleProposal:
    """What a rule, or the lab's own `decide`, proposes on one run."""

    key: str
    """Identifies it among the proposals on the same run."""
    edits: tuple[Edit, ...]
    clamp: Clamp
    reason: str
    hypothesis: str


class RulesProposer:
    name = NAME
    thinking = False

    def __init__(self, file: Path, guard: Guard, history: History, variants: int = 1) -> None:
        self.problem: str | None = None
        self._file = file
        self._guard = guard
        self._knobs = KnobTable(guard.knobs.values())
        self._history = history
        self._variants = variants
        self._rules: tuple[Rule, ...] = ()
        self._decide: Callable[..., Any] | None = None
        self._stamp: tuple[int, int] | None = None
        self._file_error: str | None = None
        self._decide_error: str | None = None
        self._final: dict[tuple[str, str], str] = {}  # (run, rule) → why it will never propose anything
        self._hashes: dict[str, str] = {}  # run → the hash of its config
        self._summaries: dict[str, dict[str, Any]] = {}  # run → its summary for `decide`
        self._idle_state: tuple[Any, ...] | None = None  # the state in which nothing was proposed

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def propose(self, study: StudyView, n: int) -> list[Proposal]:
        self._reload()
        state = self._state(study)
        if n <= 0 or state == self._idle_state:
            return []
        self._decide_error = None
        reasons: NoProposalReasons = {}
        ended = self._history.ended()
        proposals = self._propose_on_runs(study, ended, n, reasons)
        nothing = None if proposals else self._explain_silence(ended, reasons)
        self.problem = "; ".join(part for part in (self._file_error, self._decide_error, nothing) if part) or None
        self._idle_state = None if proposals else state
        return proposals

    def _reload(self) -> None:
        """Reload the file if it has changed; while it is invalid, the last valid version stays in use."""
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size)
        except OSError:
            stamp = (0, 0)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            if stamp == (0, 0):
                raise LabError("the rules file does not exist", file=self._file, hint="see proposers in lab.yaml")
            if self._file.suffix == ".py":
                self._decide = load_decide(self._file)
            else:
                self._rules = read_rules(self._file)
            self._file_error = None
            self._final.clear()
        except LabError as error:
            self._file_error = str(error)

    def _state(self, study: StudyView) -> tuple[Any, ...]:
        """Return what the proposals depend on: while it is unchanged, a study without proposals gets none."""
        return (self._stamp, *study.progress())

    # -- from runs to proposals

    def _propose_on_runs(
        self, study: StudyView, ended: Sequence[PastRun], n: int, reasons: NoProposalReasons
    ) -> list[Proposal]:
        view, tried = _StudyView.read(study, ended, reasons), self._tried_configs(study, ended)
        proposals: list[Proposal] = []
        for past in view.in_order():
            fired = view.fired.setdefault(past.run.id, {})
            if sum(fired.values()) >= self._variants:
                continue
            for candidate in self._candidates(past, view):
                proposal = self._make_proposal(past, candidate, tried, reasons)
                if proposal is None:
                    continue
                proposals.append(proposal)
                fired[candidate.key] = True
                view.last[candidate.key] = view.round
                if len(proposals) == n:
                    return proposals
                if sum(fired.values()) >= self._variants:
                    break
        return proposals

    def _tried_configs(self, study: StudyView, ended: Sequence[PastRun]) -> set[str]:
        """Return the hashes of all configs that were run or are planned."""
        for past in ended:
            if past.run.id not in self._hashes and past.run.role != Role.IMPORTED:
                self._hashes[past.run.id] = _hash(past.config)
        for run in (run for state in ("planned", "queued", "running") for run in study.runs(state=state)):
            if run.id not in self._hashes and (plan := study.plan_of(run.id)) is not None:
                self._hashes[run.id] = _hash(plan.config)
        return set(self._hashes.values())

    def _candidates(self, past: PastRun, view: _StudyView) -> Iterator[RuleProposal]:
        """Yield what is proposed on a run, highest priority first, without what was proposed before."""
        run = past.run.id
        if self._decide is not None:
            candidates = [] if (run, DECIDE) in self._final else self._call_decide(self._decide, past, view.ended)
            if candidates == []:
                self._final[run, DECIDE] = view.reasons.setdefault(DECIDE, {})[run] = ""
            yield from (candidate for candidate in candidates or () if candidate.key not in view.fired[run])
            return
        names = None
        for rule in self._rules:
            if rule.name in view.fired[run]:
                continue
            why = self._final.get((run, rule.name))
            if why is None:
                why = _why_resting(rule, view)
            if why is None:
                names = names or _metric_names(past, self._guard.with_defaults(past.config), view.best)
                why = _why_not_fired(rule, run, names)
                if why is not None and not any(name.split(".")[0] == "best" for name in rule.when.names):
                    self._final[run, rule.name] = why
            if why is None and names is not None:
                yield RuleProposal(rule.name, rule.edits, rule.clamp, _reason(rule, names), rule.hypothesis)
            else:
                view.reasons.setdefault(rule.name, {})[run] = why or ""

    def _call_decide(
        self, decide: Callable[..., Any], past: PastRun, ended: Sequence[PastRun]
    ) -> list[RuleProposal] | None:
        """Return what the lab's own `decide` proposes on a run; None if it raised."""
        for other in ended:
            if other.run.id not in self._summaries:
                self._summaries[other.run.id] = summary_of(other)
        what = f"{DECIDE}() on run {past.run.id}"
        try:
            history = [self._summaries[other.run.id] for other in ended]
            answer = decide(self._summaries[past.run.id], *([history] if _takes_history(decide) else []))
            return [_parse_proposal(item) for item in answer or ()]
        except LabError as error:
            self._decide_error = str(LabError(f"{what}: {error.message}", file=self._file, hint=error.hint))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the lab's own code may raise anything)
            self._decide_error = str(_user_code_error(self._file, error, what))
        return None

    def _make_proposal(
        self, past: PastRun, candidate: RuleProposal, tried: set[str], reasons: NoProposalReasons
    ) -> Proposal | None:
        """Return a candidate as a proposal; None, with the reason in `reasons`, if its config is known or illegal."""
        run = past.run.id
        edits, unchanged = resolve(
            self._guard.with_defaults(past.config), candidate.edits, candidate.clamp, self._knobs
        )
        ruling = self._guard.check(past.config, edits)
        if ruling.config is None:
            why = f"is refused on run {run}: " + "; ".join(problem.message for problem in ruling.problems)
        elif not ruling.changes:
            why = f"changes nothing on run {run}: " + "; ".join(unchanged or ruling.notes)
        elif (digest := _hash(ruling.config)) in tried:
            why = f"leads from run {run} to a config that was already tried or is planned"
        else:
            tried.add(digest)
            texts, source = tuple(map(str, edits)), f"{NAME}:{run}:{candidate.key}"
            return Proposal(texts, candidate.reason, self.name, run, candidate.hypothesis, source=source)
        self._final[run, candidate.key] = reasons.setdefault(candidate.key, {})[run] = why
        return None

    def _explain_silence(self, ended: Sequence[PastRun], reasons: NoProposalReasons) -> str | None:
        """Return why nothing is proposed, with one example per rule; None if an error already explains it."""
        parts = []
        false_runs: set[str] = set()
        n_false = 0
        for name, by_run in reasons.items():
            texts = [why for why in by_run.values() if why]
            if texts:
                label = DECIDE if self._decide is not None else name
                parts.append(f"'{label}' {texts[0]}" + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""))
            if len(texts) < len(by_run):
                n_false += 1
                false_runs |= {run for run, why in by_run.items() if not why}
        n_runs = _count(len(false_runs), "run")
        if n_false and self._decide is not None:
            parts.append(f"{DECIDE}() proposed nothing for {n_runs}")
        elif n_false:
            parts.append(f"{_count(n_false, 'rule')} {'was' if n_false == 1 else 'were'} not true for {n_runs}")
        if parts:
            return f"no rule fired: {'; '.join(parts)}"
        if self._file_error is not None or self._decide_error is not None:
            return None
        if not any(past.run.role in DECIDED for past in ended):
            return "no run has ended yet"
        return (
            "every finished run has already led to its proposals"
            if self._rules or self._decide
            else "there are no rules"
        )


@dataclass(frozen=True, slots=True)
class _StudyView:
    """The facts of a study that rules depend on."""

    ended: Sequence[PastRun]
    fired: dict[str, dict[str, bool]]
    """Run → rules that fired on it → whether their proposal was accepted."""
    last: dict[str, int]
    """Rule → the last round in which it fired and its proposal was accepted."""
    round: int
    """The round that is being planned."""
    goal: str
    best: RunRow | None
    reasons: NoProposalReasons

    @classmethod
    def read(cls, study: StudyView, ended: Sequence[PastRun], reasons: NoProposalReasons) -> _StudyView:
        *_, round_ = study.progress()
        fired: dict[str, dict[str, bool]] = {}
        last: dict[str, int] = {}
        for proposal, in_round in study.proposals_from(NAME):
            _, run, key = (proposal.source or "").split(":", 2)
            accepted = fired.setdefault(run, {})[key] = proposal.status != "rejected"
            if accepted:
                last[key] = max(last.get(key, 0), in_round or round_)
        return cls(ended, fired, last, round_, study.goal(), study.best(), reasons)

    def in_order(self) -> list[PastRun]:
        """Return the runs that rules are evaluated on: newest round first, best run of a round first."""

        def sort_key(past: PastRun) -> tuple[float, float, int]:
            value = past.run.objective
            return -past.run.round, math.inf if value is None else -value if self.goal == "max" else value, past.run.n

        return sorted((past for past in self.ended if past.run.role in DECIDED), key=sort_key)


def _hash(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(config)).hexdigest()


def resolve(
    config: dict[str, Any], edits: Sequence[Edit], clamp: Clamp, knobs: KnobTable
) -> tuple[list[Edit], list[str]]:
    """Resolve edits to plain values inside `clamp` and the knobs' ranges.

    Returns:
        The resolved edits without those that change nothing, and a sentence for each value that stays as it is. Edits
        that do not fit the config are returned unchanged; the guard will reject them.
    """

    def declared_type(path: str) -> type | None:
        knob = knobs.of(path)
        matches = paths.find(config, path) if knob is not None else []
        return knob.python_type(paths.get(config, matches[0])) if knob is not None and matches else None

    try:
        applied = apply_edits(config, edits, types=declared_type)
    except EditError:
        return list(edits), []
    resolved, unchanged = [], []
    for change in applied.changes:
        if change.removed:
            resolved.append(Edit(change.path, Op.DEL))
            continue
        path, knob = paths.parse(change.path), knobs.of(change.path)
        value = change.new
        for pattern, interval in clamp.items():
            if paths.matches(pattern, path):
                value = _clamped(change.old, value, interval)
        if knob is not None:
            value = knob.nearest(value, change.old)
        if not change.added and _same(value, change.old):
            takes = f" (it takes {knob.describe()})" if knob is not None else ""
            unchanged.append(f"{change.path} stays at {show_value(change.old)}{takes}")
        else:
            # `set` keeps the type of the present value; choices may have several types.
            fits = (
                change.old is None or type(value) is type(change.old) or (_is_number(value) and _is_number(change.old))
            )
            resolved.append(Edit(change.path, Op.SET if fits and not change.added else Op.NEW, value))
    return resolved, unchanged


def _clamped(old: Any, new: Any, interval: tuple[float, float]) -> Any:
    """Clamp a number to the interval, without ever reversing a change: an edit that raises a value that is already
    above the interval does not lower it."""
    if not _is_number(new):
        return new
    value = min(max(new, interval[0]), interval[1])
    if _is_number(old) and ((new > old > value) or (new < old < value)):
        return old
    return int(value) if isinstance(new, int) and float(value).is_integer() else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) if _is_number(a) and _is_number(b) else paths.same(a, b)


# --- names in conditions -------------------------------------------------------------------------------------------


class _Facts(dict[str, Any]):
    """Names that a condition may use in addition to metrics; `config.…` is looked up as a path."""

    def __missing__(self, name: str) -> Any:
        head, _, path = name.partition(".")
        matches = paths.find(self["config"], path) if head == "config" and path else ()
        if not matches:
            raise KeyError(name)
        return paths.get(self["config"], matches[0])


def _metric_names(past: PastRun, config: Mapping[str, Any], best: RunRow | None) -> MetricNames:
    run = past.run
    facts = {
        "objective": run.objective,
        "steps": past.steps,
        "seconds": run.seconds,
        "status": run.status,
        "round": run.round,
        "best.objective": best.objective if best else None,
        "config": config,
    }
    return MetricNames(past.metrics, _Facts({name: fact for name, fact in facts.items() if fact is not None}))


def _why_not_fired(rule: Rule, run: str, names: MetricNames) -> str | None:
    """Return why the condition does not hold: an empty string if it is false, else why it cannot be evaluated.

    None if it holds.
    """
    try:
        return None if rule.when.evaluate(names) else ""
    except MissingName as missing:
        lacks = "does not have" if missing.name.startswith("config.") else "did not measure"
        return f"needs {missing.name}, which run {run} {lacks}"
    except ExpressionError as error:
        return f"cannot be evaluated on run {run}: {' '.join(str(error).split())}"


def _why_resting(rule: Rule, view: _StudyView) -> str | None:
    """Return why a rule must not fire now (`once`, `cooldown`); None if it may."""
    last = view.last.get(rule.name)
    if last is None or not (rule.once or rule.cooldown):
        return None
    if rule.once:
        return "fires only once and has already fired"
    next_round = last + rule.cooldown + 1
    return f"fired in round {last} and cannot fire until round {next_round}" if view.round < next_round else None


def _reason(rule: Rule, names: MetricNames) -> str:
    """Return the rule's reason, with the values that made it fire."""
    values = {name: value for name, value in rule.when.values(names).items() if not isinstance(value, dict | list)}
    shown = ", ".join(
        f"{name} = {f'{value:.6g}' if isinstance(value, float) else show_value(value)}"
        for name, value in sorted(values.items())
    )
    return "; ".join(part for part in (rule.reason, f"rule '{rule.name}'" + (f": {shown}" if shown else "")) if part)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


# --- rules.yaml ----------------------------------------------------------------------------------------------------


class RuleSection(Section):
    """A rule as written in the file."""

    name: str = Field(min_length=1)
    when: ExpressionText
    edits: list[EditText] = Field(min_length=1)
    clamp: dict[str, tuple[float | None, float | None]] = Field(default_factory=dict)
    """Dotted path → [low, high]; null leaves a side open."""
    reason: str = ""
    hypothesis: str = ""
    priority: float = 0
    once: bool = False
    cooldown: int = Field(0, ge=0)

    @field_validator("when", mode="before")
    @classmethod
    def _bool_to_text(cls, value: Any) -> Any:
        return str(value).lower() if isinstance(value, bool) else value

    @field_validator("clamp")
    @classmethod
    def _check_clamp(cls, clamp: dict[str, tuple[float | None, float | None]]) -> Any:
        for path, (low, high) in clamp.items():
            if low is not None and high is not None and not low <= high:
                raise ValueError(f"{path}: the lower end {low} is above the upper end {high}")
        return clamp

    def to_rule(self) -> Rule:
        clamp = {
            path: (-math.inf if low is None else low, math.inf if high is None else high)
            for path, (low, high) in self.clamp.items()
        }
        edits = tuple(map(parse_edit, self.edits))
        reason, hypothesis = self.reason.strip(), self.hypothesis.strip()
        when = compile_expression(self.when)
        return Rule(self.name, when, edits, clamp, reason, hypothesis, self.priority, self.once, self.cooldown)


def read_rules(path: Path) -> tuple[Rule, ...]:
    """Return the rules of a file in the order in which they are evaluated.

    Raises:
        LabError: The file is not valid.
    """
    document = read_document(path)
    data = document.plain()
    listed: Any = data.get("rules")
    if not isinstance(listed, list) or len(data) > 1:
        raise LabError("a rules file must contain a list `rules:` and nothing else", file=path)
    rules: list[Rule] = []
    for i, entry in enumerate(listed):
        rule = check_section(RuleSection, entry, document, at=("rules", i), label=f"rule {i + 1}: ").to_rule()
        if any(other.name == rule.name for other in rules):
            line = document.line_of(("rules", i))
            raise LabError(f"two rules have the name {rule.name!r}", file=path, line=line, hint="rename one")
        rules.append(rule)
    return tuple(sorted(rules, key=lambda rule: -rule.priority))


# --- rules.py ------------------------------------------------------------------------------------------------------


class _UncachedLoader(SourceFileLoader):
    """Compiles the source on each load: the bytecode cache misses changes within one second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_decide(path: Path) -> Callable[..., Any]:
    """Return the `decide` function of a lab's own Python file.

    Raises:
        LabError: The file cannot be loaded (with the line), or has no such function.
    """
    name = f"looplab_lab_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    loader = _UncachedLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up here
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _user_code_error(path, error, "the rules cannot be loaded") from error
    decide = getattr(module, DECIDE, None)
    if not callable(decide):
        raise LabError(f"there is no function `{DECIDE}(summary, history)`", file=path)
    function: Callable[..., Any] = decide
    return function


def _takes_history(decide: Callable[..., Any]) -> bool:
    """Return whether `decide` has a second parameter; with one parameter it is called without the history."""
    try:
        parameters = inspect.signature(decide).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) != 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _user_code_error(path: Path, error: BaseException, what: str) -> LabError:
    """Return an error raised by the lab's own file, with the line in that file that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return LabError(f"{what}: {type(error).__name__}{f': {message}' if message else ''}", file=path, line=line)


def summary_of(past: PastRun) -> dict[str, Any]:
    """Return a run as `decide` gets it: its metrics by name (first, last, best, delta, pct, n, …), and its facts."""
    run = past.run
    facts = {
        "run": run.id,
        "round": run.round,
        "role": run.role,
        "status": run.status,
        "objective": run.objective,
        "steps": past.steps,
        "seconds": run.seconds,
        "config": deepcopy(past.config),
    }
    return {**to_dict(past.metrics), **facts}


def _parse_proposal(item: Any) -> RuleProposal:
    """Parse a proposal that `decide` returned; its key is a hash of its edits."""
    if isinstance(item, Proposal):
        item = {"edits": item.edits, "reason": item.reason, "hypothesis": item.hypothesis}
    elif not isinstance(item, Mapping) and hasattr(item, "changes"):  # an object with `changes` and `reason`
        item = {"edits": item.changes, "reason": getattr(item, "reason", "")}
    keys = ("edits", "reason", "hypothesis")
    if not isinstance(item, Mapping) or "edits" not in item or not set(item) <= set(keys):
        raise LabError(f"{show_value(item)} is not a proposal", hint=f"return dictionaries with {', '.join(keys)}")
    edits = _parse_edits(item["edits"])
    key = hashlib.sha256("\n".join(map(str, edits)).encode()).hexdigest()[:16]
    return RuleProposal(
        key, edits, {}, str(item.get("reason") or "decided by rules.py"), str(item.get("hypothesis") or "")
    )


def _parse_edits(raw: Any) -> tuple[Edit, ...]:
    """Parse edits given as strings, or as a mapping such as {"a.b@mul": 1.5}; {"a.b": 1.5} sets the value."""
    if isinstance(raw, Mapping):
        edits = []
        for head, value in raw.items():
            path, sign, op = str(head).rpartition("@")
            if not sign:
                path, op = str(head), Op.SET.value
            if op not in set(Op):
                raise EditError(f"{head!r}: there is no op {op!r}", hint=f"there are {', '.join(Op)}")
            edits.append(Edit(path, Op(op), value))
        return tuple(edits)
    if not isinstance(raw, list | tuple) or not all(isinstance(text, str) for text in raw):
        raise EditError(f"{show_value(raw)} are not edits", hint="as in ['train.lr@mul=0.5'] or {'train.lr@mul': 0.5}")
    return tuple(map(parse_edit, raw))
