"""Rules: what people know about their trainings, as `rules.yaml`, or as a `rules.py` with `decide(summary, history)`
or `decide(summary)`.

Each ended run is looked at, the newest round first, and leads to at most `variants` proposals that start from it. The
edits are worked out to plain values, moved into the rule's `clamp` and the knob's range: a rule cannot drive a knob
past its end, it only stops to fire there. What a rule makes of a run goes by the name `rules:<run>:<rule>` and is taken
only once. Where nothing fires, `problem` says why, rule by rule.
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

from pydantic import Field, ValidationError, field_validator

from looplab.config import paths
from looplab.config.edits import Edit, EditError, Op, apply_edits, parse_edit
from looplab.config.expression import Expression, ExpressionError, MissingName, compile_expression
from looplab.config.files import Document, canonical_json, read_document
from looplab.config.lab import EditText, ExpressionText, Section
from looplab.decide.base import Proposal
from looplab.decide.history import History, PastRun
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.guard.knobs import KnobTable, show_value
from looplab.ledger.study import IMPORTED, RunRow, StudyLedger
from looplab.measure.names import MetricNames
from looplab.measure.summary import to_dict

NAME = "rules"
ROLES = ("base", "trial")
"""Runs that rules look at; replicates only repeat them."""
DECIDE = "decide"
"""The function of a rules.py."""

Clamp = Mapping[str, tuple[float, float]]
"""Dotted path (it may hold `*`) → the interval that the edited value is moved into."""
Silences = dict[str, dict[str, str]]
"""Rule → run → why the rule leads to nothing there; no text where it is simply not true."""


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
    """Higher first; among equal ones the order of the file."""
    once: bool = False
    """At most once in the study."""
    cooldown: int = 0
    """For how many rounds it is silent after the round in which it fired."""


@dataclass(frozen=True, slots=True)
class RuleProposal:
    """What a rule, or the lab's own `decide`, wants to try from one run."""

    key: str
    """Its name, after that of the run."""
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
        self._broken: str | None = None  # what is wrong with the file
        self._failed: str | None = None  # what went wrong in the lab's own `decide`
        self._settled: dict[tuple[str, str], str] = {}  # run, rule → why it leads to nothing, where that is for good
        self._hashes: dict[str, str] = {}  # run → the hash of its config
        self._told: dict[str, dict[str, Any]] = {}  # run → what `decide` is told of it
        self._nothing_at: tuple[Any, ...] | None = None

    def close(self) -> None:
        """There is nothing to let go of."""

    def propose(self, study: StudyLedger, n: int) -> list[Proposal]:
        self._read_again()
        state = self._state(study)
        if n <= 0 or state == self._nothing_at:
            return []
        self._failed = None
        silences: Silences = {}
        ended = self._history.ended()
        proposals = self._look(study, ended, n, silences)
        nothing = None if proposals else self._why_nothing(ended, silences)
        self.problem = "; ".join(part for part in (self._broken, self._failed, nothing) if part) or None
        self._nothing_at = None if proposals else state
        return proposals

    def _read_again(self) -> None:
        """Read the file if it has changed; while it is broken, the last good one stays in use."""
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
                raise LabError("the rules are not there", file=self._file, hint="see proposers in lab.yaml")
            if self._file.suffix == ".py":
                self._decide = load_decide(self._file)
            else:
                self._rules = read_rules(self._file)
            self._broken = None
            self._settled.clear()
        except LabError as error:
            self._broken = str(error)

    def _state(self, study: StudyLedger) -> tuple[Any, ...]:
        """What an answer rests on: as long as it stands, nothing stays nothing."""
        sql = (
            "SELECT (SELECT count(*) FROM runs WHERE study=?1 AND state='ended'), (SELECT count(*) FROM runs WHERE"
            " study=?1), (SELECT best FROM studies WHERE name=?1), (SELECT max(n) FROM rounds WHERE study=?1)"
        )
        return (self._stamp, *study.ledger.rows(sql, (study.name,))[0])

    # -- from runs to proposals

    def _look(self, study: StudyLedger, ended: Sequence[PastRun], n: int, silences: Silences) -> list[Proposal]:
        view, known = _View.of(study, ended, silences), self._known_configs(study, ended)
        proposals: list[Proposal] = []
        for seen in view.in_order():
            made = view.fired.setdefault(seen.run.id, {})
            if sum(made.values()) >= self._variants:
                continue
            for draft in self._drafts(seen, view):
                proposal = self._made(seen, draft, known, silences)
                if proposal is None:
                    continue
                proposals.append(proposal)
                made[draft.key] = True
                view.last[draft.key] = view.round
                if len(proposals) == n:
                    return proposals
                if sum(made.values()) >= self._variants:
                    break
        return proposals

    def _known_configs(self, study: StudyLedger, ended: Sequence[PastRun]) -> set[str]:
        """Hashes of all configs that were run or will be."""
        for seen in ended:
            if seen.run.id not in self._hashes and seen.run.role != IMPORTED:
                self._hashes[seen.run.id] = _hash(seen.config)
        for run in (*study.runs(state="planned"), *study.runs(state="running")):
            if run.id not in self._hashes and (plan := study.plan_of(run.id)) is not None:
                self._hashes[run.id] = _hash(plan.config)
        return set(self._hashes.values())

    def _drafts(self, seen: PastRun, view: _View) -> Iterator[RuleProposal]:
        """What is wanted from a run, most wanted first, without what was made of it before."""
        run = seen.run.id
        if self._decide is not None:
            drafts = [] if (run, DECIDE) in self._settled else self._decided(self._decide, seen, view.ended)
            if drafts == []:
                self._settled[run, DECIDE] = view.silences.setdefault(DECIDE, {})[run] = ""
            yield from (draft for draft in drafts or () if draft.key not in view.fired[run])
            return
        names = None
        for rule in self._rules:
            if rule.name in view.fired[run]:
                continue
            why = self._settled.get((run, rule.name))
            if why is None:
                why = _rests(rule, view)
            if why is None:
                names = names or _names(seen, self._guard.with_defaults(seen.config), view.best)
                why = _untrue(rule, run, names)
                if why is not None and not any(name.split(".")[0] == "best" for name in rule.when.names):
                    self._settled[run, rule.name] = why
            if why is None and names is not None:
                yield RuleProposal(rule.name, rule.edits, rule.clamp, _grounds(rule, names), rule.hypothesis)
            else:
                view.silences.setdefault(rule.name, {})[run] = why or ""

    def _decided(
        self, decide: Callable[..., Any], seen: PastRun, ended: Sequence[PastRun]
    ) -> list[RuleProposal] | None:
        """What the lab's own `decide` wants from a run; None where it failed."""
        for other in ended:
            if other.run.id not in self._told:
                self._told[other.run.id] = summary_of(other)
        what = f"{DECIDE}() on run {seen.run.id}"
        try:
            history = [self._told[other.run.id] for other in ended]
            answer = decide(self._told[seen.run.id], *([history] if _takes_history(decide) else []))
            return [_draft(item) for item in answer or ()]
        except LabError as error:
            self._failed = str(LabError(f"{what}: {error.message}", file=self._file, hint=error.hint))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the lab's own code may raise anything)
            self._failed = str(_in_users_file(self._file, error, what))
        return None

    def _made(self, seen: PastRun, draft: RuleProposal, known: set[str], silences: Silences) -> Proposal | None:
        """The draft as a proposal, if it leads to a config that is new and allowed."""
        run = seen.run.id
        edits, stuck = resolve(self._guard.with_defaults(seen.config), draft.edits, draft.clamp, self._knobs)
        ruling = self._guard.check(seen.config, edits)
        if ruling.config is None:
            why = f"is refused on run {run}: " + "; ".join(problem.message for problem in ruling.problems)
        elif not ruling.changes:
            why = f"changes nothing on run {run}: " + "; ".join(stuck or ruling.notes)
        elif (digest := _hash(ruling.config)) in known:
            why = f"leads from run {run} to a config that was tried already, or will be"
        else:
            known.add(digest)
            texts, source = tuple(map(str, edits)), f"{NAME}:{run}:{draft.key}"
            return Proposal(texts, draft.reason, self.name, run, draft.hypothesis, source=source)
        self._settled[run, draft.key] = silences.setdefault(draft.key, {})[run] = why
        return None

    def _why_nothing(self, ended: Sequence[PastRun], silences: Silences) -> str | None:
        """Why no rule led to anything, with one example of each rule."""
        told = []
        false: set[str] = set()
        untrue = 0
        for name, by_run in silences.items():
            said = [why for why in by_run.values() if why]
            if said:
                label = DECIDE if self._decide is not None else name
                told.append(f"'{label}' {said[0]}" + (f" (and {len(said) - 1} more)" if len(said) > 1 else ""))
            if len(said) < len(by_run):
                untrue += 1
                false |= {run for run, why in by_run.items() if not why}
        if untrue and self._decide is not None:
            told.append(f"{DECIDE}() wanted nothing from {_count(len(false), 'run')}")
        elif untrue:
            told.append(
                f"{_count(untrue, 'rule')} {'was' if untrue == 1 else 'were'} not true for {_count(len(false), 'run')}"
            )
        if told:
            return f"no rule fired: {'; '.join(told)}"
        if self._broken is not None or self._failed is not None:
            return None  # that says it
        if not any(seen.run.role in ROLES for seen in ended):
            return "nothing has ended yet"
        return (
            "every ended run has led to its proposals already" if self._rules or self._decide else "there are no rules"
        )


@dataclass(frozen=True, slots=True)
class _View:
    """A study as rules see it when they are asked."""

    ended: Sequence[PastRun]
    fired: dict[str, dict[str, bool]]
    """Run → the rules that made a proposal of it, and whether that was not refused."""
    last: dict[str, int]
    """Rule → the last round in which it fired, unless what it proposed was refused."""
    round: int
    """The round that is decided on."""
    goal: str
    best: RunRow | None
    silences: Silences

    @classmethod
    def of(cls, study: StudyLedger, ended: Sequence[PastRun], silences: Silences) -> _View:
        sql = "SELECT goal, (SELECT coalesce(max(n), 0) FROM rounds WHERE study=name) FROM studies WHERE name=?"
        goal, round_ = study.ledger.one(sql, (study.name,)) or ("min", 0)
        fired: dict[str, dict[str, bool]] = {}
        last: dict[str, int] = {}
        sql = "SELECT source, status, round FROM proposals WHERE study=? AND source >= ? AND source < ?"
        for row in study.ledger.rows(sql, (study.name, f"{NAME}:", f"{NAME};")):
            _, run, key = row["source"].split(":", 2)
            stands = fired.setdefault(run, {})[key] = row["status"] != "rejected"
            if stands:
                last[key] = max(last.get(key, 0), row["round"] or round_)
        return cls(ended, fired, last, round_, goal or "min", study.best(), silences)

    def in_order(self) -> list[PastRun]:
        """The newest round first, in it the best run first."""

        def place(seen: PastRun) -> tuple[float, float, int]:
            value = seen.run.objective
            return -seen.run.round, math.inf if value is None else -value if self.goal == "max" else value, seen.run.n

        return sorted((seen for seen in self.ended if seen.run.role in ROLES), key=place)


def _hash(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(config)).hexdigest()


def resolve(
    config: dict[str, Any], edits: Sequence[Edit], clamp: Clamp, knobs: KnobTable
) -> tuple[list[Edit], list[str]]:
    """The edits as plain values inside `clamp` and the knobs' ranges, without those that change nothing; and what is
    stuck where it stands. Edits that do not fit the config are left for the guard to refuse."""

    def declared(path: str) -> type | None:
        knob = knobs.of(path)
        places = paths.find(config, path) if knob is not None else []
        return knob.python_type(paths.get(config, places[0])) if knob is not None and places else None

    try:
        applied = apply_edits(config, edits, types=declared)
    except EditError:
        return list(edits), []
    resolved, stuck = [], []
    for change in applied.changes:
        if change.removed:
            resolved.append(Edit(change.path, Op.DEL))
            continue
        place, knob = paths.parse(change.path), knobs.of(change.path)
        value = change.new
        for pattern, interval in clamp.items():
            if paths.matches(pattern, place):
                value = _clamped(change.old, value, interval)
        if knob is not None:
            value = knob.nearest(value, change.old)
        if not change.added and _same(value, change.old):
            takes = f" (it takes {knob.describe()})" if knob is not None else ""
            stuck.append(f"{change.path} stays at {show_value(change.old)}{takes}")
        else:
            # `set` keeps to the type that stands there; between choices of several types, it need not.
            fits = (
                change.old is None or type(value) is type(change.old) or (_is_number(value) and _is_number(change.old))
            )
            resolved.append(Edit(change.path, Op.SET if fits and not change.added else Op.NEW, value))
    return resolved, stuck


def _clamped(old: Any, new: Any, interval: tuple[float, float]) -> Any:
    """Move a number into the interval. That never turns a change round: what should rise does not fall because it
    stands above the interval already."""
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


# --- what a rule sees ----------------------------------------------------------------------------------------------


class _Facts(dict[str, Any]):
    """What a rule may name beside metrics; `config.…` is looked up as a path."""

    def __missing__(self, name: str) -> Any:
        head, _, path = name.partition(".")
        places = paths.find(self["config"], path) if head == "config" and path else ()
        if not places:
            raise KeyError(name)
        return paths.get(self["config"], places[0])


def _names(seen: PastRun, config: Mapping[str, Any], best: RunRow | None) -> MetricNames:
    run = seen.run
    facts = {
        "objective": run.objective,
        "steps": seen.steps,
        "seconds": run.seconds,
        "status": run.status,
        "round": run.round,
        "best.objective": best.objective if best else None,
        "config": config,
    }
    return MetricNames(seen.metrics, _Facts({name: fact for name, fact in facts.items() if fact is not None}))


def _untrue(rule: Rule, run: str, names: MetricNames) -> str | None:
    """None where the rule is true; else why it cannot be computed, or no text where it is false."""
    try:
        return None if rule.when.evaluate(names) else ""
    except MissingName as missing:
        lacks = "does not have" if missing.name.startswith("config.") else "did not measure"
        return f"needs {missing.name}, which run {run} {lacks}"
    except ExpressionError as error:
        return f"cannot be computed on run {run}: {' '.join(str(error).split())}"


def _rests(rule: Rule, view: _View) -> str | None:
    """Why a rule must not fire now, whatever it would say."""
    last = view.last.get(rule.name)
    if last is None or not (rule.once or rule.cooldown):
        return None
    if rule.once:
        return "has fired, and does so once"
    again = last + rule.cooldown + 1
    return f"fired in round {last} and rests until round {again}" if view.round < again else None


def _grounds(rule: Rule, names: MetricNames) -> str:
    """The rule's reason, with the numbers that made it fire."""
    values = {name: value for name, value in rule.when.values(names).items() if not isinstance(value, dict | list)}
    read = ", ".join(
        f"{name} = {f'{value:.6g}' if isinstance(value, float) else show_value(value)}"
        for name, value in sorted(values.items())
    )
    return "; ".join(part for part in (rule.reason, f"rule '{rule.name}'" + (f": {read}" if read else "")) if part)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


# --- rules.yaml ----------------------------------------------------------------------------------------------------


class RuleLines(Section):
    """A rule as it stands in the file."""

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
    def _always(cls, value: Any) -> Any:
        return str(value).lower() if isinstance(value, bool) else value

    @field_validator("clamp")
    @classmethod
    def _in_order(cls, clamp: dict[str, tuple[float | None, float | None]]) -> Any:
        for path, (low, high) in clamp.items():
            if low is not None and high is not None and not low <= high:
                raise ValueError(f"{path}: the low end {low} is above the high end {high}")
        return clamp

    def rule(self) -> Rule:
        clamp = {
            path: (-math.inf if low is None else low, math.inf if high is None else high)
            for path, (low, high) in self.clamp.items()
        }
        edits = tuple(map(parse_edit, self.edits))
        reason, hypothesis = self.reason.strip(), self.hypothesis.strip()
        when = compile_expression(self.when)
        return Rule(self.name, when, edits, clamp, reason, hypothesis, self.priority, self.once, self.cooldown)


def read_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a file, in the order in which they are asked."""
    document = read_document(path)
    data = document.plain()
    listed: Any = data.get("rules")
    if not isinstance(listed, list) or len(data) > 1:
        raise LabError("a rules file holds a list `rules:`, and nothing else", file=path)
    rules: list[Rule] = []
    for i, entry in enumerate(listed):
        try:
            rule = RuleLines.model_validate(entry).rule()
        except ValidationError as error:
            raise _wrong(document, i, error) from None
        if any(other.name == rule.name for other in rules):
            line = document.line_of(("rules", i))
            raise LabError(f"two rules have the name {rule.name!r}", file=path, line=line, hint="rename one")
        rules.append(rule)
    return tuple(sorted(rules, key=lambda rule: -rule.priority))


def _wrong(document: Document, index: int, error: ValidationError) -> LabError:
    """The first mistake in a rule, with its line."""
    problem = error.errors()[0]
    where = tuple(part for part in problem["loc"] if isinstance(part, int) or part in RuleLines.model_fields)
    lines = (document.line_of(("rules", index, *where[:end])) for end in range(len(where), -1, -1))
    line = next((line for line in lines if line is not None), None)
    key, said, hint = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, "), None
    if problem["type"] == "extra_forbidden":
        line = document.line_of(("rules", index, *problem["loc"])) or line
        said, hint = f"unknown key {key!r}", f"known: {', '.join(RuleLines.model_fields)}"
    elif problem["type"] == "missing":
        said = f"{key!r} is missing"
    else:
        said = f"{key}: {said}" if key else said
    return LabError(f"rule {index + 1}: {said}", file=document.path, line=line, hint=hint)


# --- rules.py ------------------------------------------------------------------------------------------------------


class _Fresh(SourceFileLoader):
    """Reads the source each time: the cache of compiled files tells a newer one only by the second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_decide(path: Path) -> Callable[..., Any]:
    """The `decide` of a lab's own Python file; whatever is wrong with the file is a LabError with its line."""
    name = f"looplab_lab_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    loader = _Fresh(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _in_users_file(path, error, "the rules cannot be loaded") from error
    decide = getattr(module, DECIDE, None)
    if not callable(decide):
        raise LabError(f"there is no function `{DECIDE}(summary, history)`", file=path)
    found: Callable[..., Any] = decide
    return found


def _takes_history(decide: Callable[..., Any]) -> bool:
    """Whether `decide` has a second parameter; one that knows only `summary` is called without the history."""
    try:
        parameters = inspect.signature(decide).parameters.values()
    except (TypeError, ValueError):  # a callable that does not tell
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) != 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _in_users_file(path: Path, error: BaseException, what: str) -> LabError:
    """An error in the lab's own file, with the line of that file where it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return LabError(f"{what}: {type(error).__name__}{f': {said}' if said else ''}", file=path, line=line)


def summary_of(seen: PastRun) -> dict[str, Any]:
    """A run as `decide` is told of it: its metrics by name (first, last, best, delta, pct, n, …), and its own facts."""
    run = seen.run
    own = {
        "run": run.id,
        "round": run.round,
        "role": run.role,
        "status": run.status,
        "objective": run.objective,
        "steps": seen.steps,
        "seconds": run.seconds,
        "config": deepcopy(seen.config),
    }
    return {**to_dict(seen.metrics), **own}


def _draft(item: Any) -> RuleProposal:
    """What `decide` returned, as a draft; its key is what it changes."""
    if isinstance(item, Proposal):
        item = {"edits": item.edits, "reason": item.reason, "hypothesis": item.hypothesis}
    elif not isinstance(item, Mapping) and hasattr(item, "changes"):  # an object with `changes` and `reason`
        item = {"edits": item.changes, "reason": getattr(item, "reason", "")}
    known = ("edits", "reason", "hypothesis")
    if not isinstance(item, Mapping) or "edits" not in item or not set(item) <= set(known):
        raise LabError(f"{show_value(item)} is no proposal", hint=f"return dictionaries with {', '.join(known)}")
    edits = _edits(item["edits"])
    key = hashlib.sha256("\n".join(map(str, edits)).encode()).hexdigest()[:16]
    return RuleProposal(
        key, edits, {}, str(item.get("reason") or "decided by rules.py"), str(item.get("hypothesis") or "")
    )


def _edits(given: Any) -> tuple[Edit, ...]:
    """Edits from texts, or from a mapping such as {"a.b@mul": 1.5}, where {"a.b": 1.5} sets the value."""
    if isinstance(given, Mapping):
        edits = []
        for head, value in given.items():
            path, sign, op = str(head).rpartition("@")
            if not sign:
                path, op = str(head), Op.SET.value
            if op not in set(Op):
                raise EditError(f"{head!r}: there is no op {op!r}", hint=f"there are {', '.join(Op)}")
            edits.append(Edit(path, Op(op), value))
        return tuple(edits)
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise EditError(f"{show_value(given)} are no edits", hint="as in ['train.lr@mul=0.5'] or {'train.lr@mul': 0.5}")
    return tuple(map(parse_edit, given))
