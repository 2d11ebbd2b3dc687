"""The guard: what a proposal must meet before it may take a slot.

Edits are applied to the parent's config; only knobs may change, within their ranges; then normalisers mend what can be
mended, derived keys are computed, and constraints must hold. Every problem is reported at once, with the nearest legal
value where there is one, so that a proposer can correct all of them in one go. A null that already stands in the config
means "not set" and is left alone; an edit may set null only where null is one of the choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from looplab.config import paths
from looplab.config.edits import Applied, ConfigChange, Edit, EditError, Op, apply_edits, parse_edit
from looplab.config.expression import Expression, ExpressionError, MissingName, compile_expression
from looplab.config.paths import Concrete
from looplab.errors import LabError
from looplab.guard.knobs import Knob, KnobTable, show_value

MAX_PASSES = 5
"""How often normalisers and derived keys are computed before they count as never settling."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a config is refused."""

    key: str
    """The dotted path it is about; for a constraint, its text."""
    value: Any
    """The value that was refused; for a constraint, the values it read."""
    rule: str
    """`edit`, `not a knob`, `knob range`, `normalise`, `derive` or `constraint`."""
    message: str
    """What is wrong and what to do, for people and agents."""
    nearest: Any = None
    """The nearest legal value, or the key that was probably meant."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the guard says."""

    config: dict[str, Any] | None
    """The config to run; None where there is a problem."""
    changes: tuple[ConfigChange, ...]
    """What differs from the config that was given: by edits, by normalisers, by derived keys."""
    problems: tuple[Problem, ...]
    """Every reason to refuse it."""
    notes: tuple[str, ...]
    """What was done silently otherwise: rounding, normalising, edits without effect."""
    ineffective: tuple[str, ...] = ()
    """Those of the notes that say why an edit has no effect."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> dict[str, Any]:
        """The config, or a GuardError that lists all problems."""
        if self.config is None:
            raise GuardError(self.problems)
        return self.config


class GuardError(LabError):
    """A config that was refused, with all the reasons."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [problem.message for problem in self.problems]
        super().__init__(
            lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} problems:", *(f"- {x}" for x in lines)])
        )


@dataclass(frozen=True, slots=True)
class _Rule:
    """A key that is computed from others."""

    kind: str
    """`normalise` or `derive`."""
    target: str
    segments: tuple[str, ...]
    expression: Expression


class Guard:
    """The knobs and rules of one study."""

    def __init__(
        self,
        knobs: Mapping[str, Knob],
        normalise: Sequence[tuple[str, str]] = (),
        derive: Mapping[str, str] | None = None,
        constraints: Sequence[str] = (),
    ) -> None:
        self.knobs = dict(knobs)
        self._knobs = KnobTable(self.knobs.values())
        self._normalise = [_rule("normalise", target, text) for target, text in normalise]
        self._derive = _in_order([_rule("derive", target, text) for target, text in (derive or {}).items()])
        self._constraints = [_compiled("constraint", text) for text in constraints]
        self._derived = {rule.target for rule in self._derive}
        for rule in self._normalise:
            if rule.target in self._derived:
                raise LabError(f"{rule.target} is both normalised and derived", hint="put the rounding into derive")
        # A normaliser that reads a derived key must not read the one that the parent was given.
        self._derive_first = any(_reads(rule.expression, self._derived) for rule in self._normalise)

    def check(self, parent: dict[str, Any], edits: Sequence[Edit | str]) -> Ruling:
        """Judge a proposer's edits on its parent's config."""
        problems: list[Problem] = []
        given, added = self._knobs.with_defaults(parent)
        applied = self._apply(given, edits, problems)
        case = _Case(given, applied.config, problems, list(applied.notes), parent, added)
        self._judge_changes(case, applied)
        ruling = self._rule_on(case, applied.changes)
        if ruling.changes or ruling.problems:
            return ruling
        nothing = "changes nothing"
        return replace(ruling, notes=(*ruling.notes, nothing), ineffective=(*ruling.ineffective, nothing))

    def admit(self, config: dict[str, Any]) -> Ruling:
        """Judge a person's own config, in which anything may stand."""
        given, added = self._knobs.with_defaults(config)
        case = _Case(given, apply_edits(given, []).config, [], [], config, added)
        self._judge_all(case, "")
        return self._rule_on(case, ())

    def is_knob(self, key: str) -> bool:
        """Whether a proposal may change this key."""
        return self._knobs.owner(key) is not None

    def knob_values(self, config: dict[str, Any]) -> dict[str, Any]:
        """The value of every knob that is present, by its concrete path."""
        return {key: value for key, _, _, value in self._knobs.present(config)}

    def takes_null(self, config: dict[str, Any], path: str) -> bool:
        """Whether null may be set there, as far as the knobs say; a path that is not a knob's is refused elsewhere."""
        knob = self._knobs.meant_by(path)
        return knob is None or knob.judge(None, _value(config, path))[1] is None

    def with_defaults(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with the defaults of the knobs whose keys it lacks: what the trainer will use."""
        return self._knobs.with_defaults(config)[0]

    @property
    def derived(self) -> frozenset[str]:
        """The keys that are computed from others."""
        return frozenset(self._derived)

    def inputs(self, problem: Problem) -> set[str]:
        """The keys on which a refusal depends: those that the constraint or the computed key reads, however indirectly.

        Empty if the problem is not about a constraint or a computed key.
        """
        computed = {rule.target: rule.expression for rule in (*self._normalise, *self._derive)}
        constraints = {constraint.text: constraint for constraint in self._constraints}
        expression = constraints.get(problem.key) or computed.get(problem.key)
        if expression is None:
            return set()
        found: set[str] = {problem.key} if problem.key in computed else set()
        waiting = [expression]
        while waiting:
            read = waiting.pop()
            for name in read.names:
                if name not in found:
                    found.add(name)
                    waiting += [other for target, other in computed.items() if _reads(read, {target})]
        return found

    def _rule_on(self, case: _Case, edited: Sequence[ConfigChange]) -> Ruling:
        self._settle(case)
        self._judge_all(case, "in the parent already")
        for constraint in self._constraints:
            self._hold(case, constraint)
        config = None if case.problems else case.without_defaults()
        changes = _final_changes(case, edited)
        return Ruling(config, changes, tuple(case.problems), tuple(case.notes), tuple(case.ineffective))

    # --- edits ---

    def _apply(self, parent: dict[str, Any], edits: Sequence[Edit | str], problems: list[Problem]) -> Applied:
        good: list[Edit] = []
        for edit in [edits] if isinstance(edits, str) else edits:
            try:
                good.append(parse_edit(edit) if isinstance(edit, str) else edit)
            except EditError as error:
                problems.append(Problem(str(edit).partition("@")[0], None, "edit", str(error)))
        good = [self._freed(parent, edit) for edit in good]
        types = self._types(parent)
        try:
            return apply_edits(parent, good, types=types)
        except EditError:
            pass
        # Some do not fit: find out which, and judge the others without them.
        fitting: list[Edit] = []
        before = parent
        for edit in good:
            try:
                before = apply_edits(before, [edit], types=types).config
                fitting.append(edit)
            except EditError as error:
                problems.append(self._unfit(parent, edit, error))
        return apply_edits(parent, fitting, types=types)

    def _types(self, parent: dict[str, Any]) -> Callable[[str], type | None]:
        def declared(path: str) -> type | None:
            knob = self._knobs.of(path)
            return None if knob is None else knob.python_type(_value(parent, path))

        return declared

    def _freed(self, parent: dict[str, Any], edit: Edit) -> Edit:
        """A `set` follows the type in the config; between choices of several types it need not."""
        if edit.op is not Op.SET:
            return edit
        knob = self._knobs.meant_by(edit.path)
        if knob is None or knob.choices is None or knob.python_type() is not None:
            return edit
        return replace(edit, op=Op.NEW) if paths.find(parent, edit.path) else edit

    def _unfit(self, parent: dict[str, Any], edit: Edit, error: EditError) -> Problem:
        knob = self._knobs.meant_by(edit.path)
        if knob is None and not self._is_derived(edit.path):
            return self._not_a_knob(edit.path, edit.value)
        nearest = None
        if knob is not None and edit.op in (Op.SET, Op.NEW):
            nearest = knob.nearest(edit.value, _value(parent, edit.path))
        hint = "" if knob is None else f"; {edit.path} takes {knob.describe()}"
        return Problem(edit.path, edit.value, "edit", f"{error}{hint}", nearest)

    def _is_derived(self, path: str) -> bool:
        return paths.show(paths.parse(path)) in self._derived

    def _not_a_knob(self, key: str, value: Any) -> Problem:
        near = self._knobs.nearest(key)
        advice = f"nearest: {', '.join(near)}" if near else f"there are {len(self.knobs)} knobs, none like it"
        return Problem(key, value, "not a knob", f"{key} is not a knob; {advice}", near[0] if near else None)

    # --- knobs ---

    def _judge_changes(self, case: _Case, applied: Applied) -> None:
        """Every leaf that the edits changed must be a knob's, and legal."""
        judged: set[str] = set()
        for key, sides in _changed_leaves(case.given, applied).items():
            if key in self._derived:
                if "new" in sides:
                    case.edited_derived[key] = sides["new"]
                continue
            owner = self._knobs.owner(key)
            if owner is None:
                case.refuse(self._not_a_knob(key, sides.get("new")))
            elif owner[0] not in judged:
                judged.add(owner[0])
                self._judge_one(case, *owner)

    def _judge_one(self, case: _Case, key: str, knob: Knob) -> None:
        like = _value(case.given, key)
        found = _first(case.config, key)
        if found is None:
            # To take a key out is to leave its value to the trainer, as a null does.
            if knob.judge(None, like)[1] is not None:
                text = f"{key} may not be taken out; it takes {knob.describe()}"
                case.refuse(Problem(key, None, "knob range", text, like))
            return
        place, value = found
        stands, problem = knob.judge(value, like)
        if problem is None:
            case.put(place, value, stands)
        else:
            case.refuse(_out_of_range(key, value, knob, problem, knob.nearest(value, like), ""))

    def _judge_all(self, case: _Case, unchanged: str) -> None:
        """Every knob of the whole config, except where something was said already."""
        for key, place, knob, value in self._knobs.present(case.config):
            if value is None or key in case.refused or key in case.doubtful:
                continue
            stands, problem = knob.judge(value, value)
            if problem is None:
                case.put(place, value, stands)
                continue
            rule = case.computed.get(key)
            why = f"{rule.kind}d as {rule.expression}" if rule else unchanged
            case.refuse(_out_of_range(key, value, knob, problem, knob.nearest(value, value), why))

    # --- computed keys and constraints ---

    def _settle(self, case: _Case) -> None:
        """Normalise and derive until nothing changes, so that ruling on the result again would change nothing."""
        rules = [*(self._derive if self._derive_first else ()), *self._normalise, *self._derive]
        for _ in range(MAX_PASSES):
            before = [_value(case.config, rule.target) for rule in rules]
            noted = len(case.notes)
            changed = [self._compute(case, rule) for rule in rules]
            if not any(changed):
                break
            after = [_value(case.config, rule.target) for rule in rules]
            if all(map(paths.same, before, after)):
                del case.notes[noted:]  # there and back again
                break
        else:
            rule = next(rule for rule, old, new in zip(rules, before, after, strict=True) if not paths.same(old, new))
            text = f"{rule.kind} {rule.target} = {rule.expression} never settles: it changes the value each time"
            case.refuse(Problem(rule.target, None, rule.kind, text))
        for rule in self._derive:
            if rule.target in case.edited_derived and rule.target not in case.failed:
                wanted, found = case.edited_derived[rule.target], _value(case.config, rule.target)
                if not _equal(wanted, found):
                    text = f"{rule.target} is derived: {show_value(wanted)} → {show_value(found)}: {rule.expression}"
                    case.notes.append(text)
                    case.ineffective.append(text)

    def _compute(self, case: _Case, rule: _Rule) -> bool:
        """Compute one key; whether it changed."""
        if rule.target in case.failed:
            return False
        found = _first(case.config, rule.target)
        try:
            place = found[0] if found else _new_place(case.config, rule)
            old = found[1] if found else None
            # The type is that of the given config: an edit of a derived key does not change it either.
            like = _value(case.given, rule.target)
            value = self._typed(rule, rule.expression.evaluate(case.config), old if like is None else like)
        except (ExpressionError, _Unfit) as error:
            if not case.reads_refused(rule.expression):
                case.refuse(_failure(rule.kind, rule.target, f"{rule.target} = {rule.expression}", error))
            case.failed.add(rule.target)
            return False
        if case.reads_refused(rule.expression):
            case.doubtful.add(rule.target)
        if found and paths.same(old, value):
            return False
        if rule.kind == "normalise" and not _equal(old, value):
            case.notes.append(f"{rule.target} {show_value(old)} → {show_value(value)}: {rule.expression}")
        paths.set_(case.config, place, value)
        case.computed[rule.target] = rule
        return True

    def _typed(self, rule: _Rule, value: Any, like: Any) -> Any:
        """A computed value in the type of the key: an int stays an int."""
        if isinstance(value, float) and not math.isfinite(value):
            raise _Unfit(f"its value would be {value}")
        knob = self._knobs.of(rule.target)
        kind = knob.python_type(like) if knob else None
        if kind is None and like is not None and not isinstance(like, dict | list):
            kind = type(like)
        if kind is None or type(value) is kind:
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is int and number:
            return int(math.copysign(math.floor(abs(value) + 0.5), value)) if isinstance(value, float) else value
        if kind is float and number:
            return float(value)
        raise _Unfit(f"its value would be {show_value(value)}, but the key holds {_NOUNS.get(kind, kind.__name__)}")

    def _hold(self, case: _Case, constraint: Expression) -> None:
        text = constraint.text
        try:
            if constraint.evaluate(case.config):
                return
        except ExpressionError as error:
            if not case.reads_refused(constraint):
                case.refuse(_failure("constraint", text, text, error))
            return
        values = constraint.values(case.config)
        read = ", ".join(f"{name}={show_value(value)}" for name, value in sorted(values.items()))
        case.refuse(Problem(text, values, "constraint", f"{text} is false{': ' if read else ''}{read}"))


_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class _Unfit(Exception):
    """A computed value that has no place in the config."""


class _Case:
    """One config on its way through the guard."""

    __slots__ = (
        "added", "computed", "config", "doubtful", "edited_derived", "failed", "given", "ineffective", "notes",
        "original", "problems", "refused",
    )  # fmt: skip

    def __init__(
        self,
        given: dict[str, Any],
        config: dict[str, Any],
        problems: list[Problem],
        notes: list[str],
        original: dict[str, Any],
        added: Mapping[Concrete, Any],
    ) -> None:
        self.given = given
        """As it came, with the defaults of keys that it lacked: the parent of a proposal; never touched."""
        self.original = original
        """As it came."""
        self.added = added
        """These defaults, by their places."""
        self.config = config
        """The copy that is worked on."""
        self.problems = problems
        self.notes = notes
        self.ineffective: list[str] = []
        self.refused: set[str] = set()
        """Keys that have a problem; what follows from one is not reported again."""
        self.doubtful: set[str] = set()
        """Keys computed from refused ones."""
        self.failed: set[str] = set()
        """Keys that could not be computed."""
        self.computed: dict[str, _Rule] = {}
        """Keys that a rule changed."""
        self.edited_derived: dict[str, Any] = {}
        """What edits wanted for keys that are derived."""

    def refuse(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.refused.add(problem.key)

    def reads_refused(self, expression: Expression) -> bool:
        bad = self.refused | self.doubtful | self.failed
        return bool(bad) and _reads(expression, bad)

    def without_defaults(self) -> dict[str, Any]:
        """The config without the defaults that nothing has changed: the trainer has them anyway."""
        for place, default in self.added.items():
            if not paths.has(self.config, place):
                continue
            value = paths.get(self.config, place)
            if not _equal(value, default):
                shown = f"{show_value(default)} (its default) → {show_value(value)}"
                self.notes.append(f"{paths.show(place)} was not in the config: {shown}")
                continue
            paths.delete(self.config, place)
            for end in range(len(place) - 1, 0, -1):  # mappings that were made for it
                if paths.has(self.original, place[:end]) or paths.get(self.config, place[:end]):
                    break
                paths.delete(self.config, place[:end])
        return self.config

    def put(self, place: Concrete, old: Any, value: Any) -> None:
        if type(value) is not type(old):
            paths.set_(self.config, place, value)


def _compiled(kind: str, text: str, name: str | None = None) -> Expression:
    try:
        return compile_expression(text)
    except ExpressionError as error:
        where = f"{kind} {name} = {text}" if name else f"{kind} {text}"
        raise LabError(f"{where}: {error.message}", hint=error.hint) from None


def _rule(kind: str, target: str, text: str) -> _Rule:
    segments = paths.parse(target)
    if any(not segment or paths.is_wildcard(segment) for segment in segments):
        raise LabError(f"{kind} {target}: the key must be one key", hint="without `*`, as in train.batch_size")
    return _Rule(kind, paths.show(segments), segments, _compiled(kind, text, target))


def _in_order(rules: list[_Rule]) -> list[_Rule]:
    """Derived keys so that each comes after those it reads."""
    by_target = {rule.target: rule for rule in rules}
    if len(by_target) < len(rules):
        raise LabError("a key is derived twice", hint="leave one out")
    needs = {rule.target: [other for other in by_target if _reads(rule.expression, {other})] for rule in rules}
    try:
        return [by_target[target] for target in TopologicalSorter(needs).static_order()]
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        raise LabError(f"derived keys need each other: {circle}", hint="break the circle") from None


def _reads(expression: Expression, keys: set[str]) -> bool:
    """Whether an expression reads one of the keys, or something in it, or something that holds it."""
    for key in keys:
        plain = key.replace("\\", "")
        for name in expression.names:
            if name == plain or name.startswith(f"{plain}.") or plain.startswith(f"{name}."):
                return True
    return False


def _first(config: dict[str, Any], key: str) -> tuple[Concrete, Any] | None:
    """Where a path leads, and what stands there."""
    segments = paths.parse(key)
    node: Any = config
    for segment in segments:
        if type(node) is not dict or segment not in node:
            places = paths.find_segments(config, segments)
            return (places[0], paths.get(config, places[0])) if places else None
        node = node[segment]
    return segments, node  # nearly always: plain keys, one for each segment


def _value(config: dict[str, Any], key: str) -> Any:
    """What stands at a path; None where nothing does."""
    found = _first(config, key)
    return None if found is None else found[1]


def _new_place(config: dict[str, Any], rule: _Rule) -> Concrete:
    """Where a key that is not in the config goes: into the mapping that is there."""
    parents = paths.find_parents(config, rule.target)
    if not parents:
        raise _Unfit(f"{paths.show(rule.segments[:-1])} is not in the config")
    return (*parents[0], rule.segments[-1])


def _changed_leaves(given: dict[str, Any], applied: Applied) -> dict[str, dict[str, Any]]:
    """Which leaves the edits changed, with their old and new values."""
    leaves: dict[str, dict[str, Any]] = {}
    for change in applied.changes:
        if change.removed or isinstance(change.old, dict | list) or isinstance(change.new, dict | list):
            break
        leaves[change.path] = {"new": change.new} if change.added else {"old": change.old, "new": change.new}
    else:
        return leaves
    # Whole parts came or went, and items of a list may have moved: compare leaf by leaf.
    leaves = paths.diff(given, applied.config)
    return {key: sides for key, sides in leaves.items() if not _only_holds(key, sides, leaves)}


def _only_holds(key: str, sides: dict[str, Any], leaves: dict[str, dict[str, Any]]) -> bool:
    """Whether a leaf was an empty place (null, no items) that others came into, or is one that they left."""
    (value, *others) = sides.values()
    return not others and value in (None, {}, []) and any(other.startswith(f"{key}.") for other in leaves)


def _out_of_range(key: str, value: Any, knob: Knob, problem: str, nearest: Any, why: str) -> Problem:
    text = f"{key}: {problem}"
    if why:
        text += f" ({why})"
    if knob.choices is None:
        text += f"; it takes {knob.describe()}"
    return Problem(key, value, "knob range", f"{text}; nearest: {show_value(nearest)}", nearest)


def _failure(kind: str, key: str, what: str, error: ExpressionError | _Unfit) -> Problem:
    if isinstance(error, MissingName):
        nearest = error.nearest[0] if error.nearest else None
        near = f"; nearest: {', '.join(error.nearest)}" if error.nearest else ""
        return Problem(key, None, kind, f"{kind} {what}: {error.name} is missing in the config{near}", nearest)
    return Problem(key, None, kind, f"{kind} {what}: {error}")


def _equal(a: Any, b: Any) -> bool:
    """As `paths.same`, but 1 and 1.0 are no change."""
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return paths.same(a, b)
    return a == b


def _final_changes(case: _Case, edited: Sequence[ConfigChange]) -> tuple[ConfigChange, ...]:
    """What differs from the config that was given; a key that was edited and then computed is one change."""
    changes: list[ConfigChange] = []
    edits = [change for change in edited if change.path not in case.computed]
    for change in edits:
        new = None if change.removed else _value(case.config, change.path)
        if change.removed or change.added or not _equal(change.old, new):
            changes.append(change if new is change.new else replace(change, new=new))
    for key in case.computed:
        if any(key.startswith(f"{change.path}.") for change in edits):
            continue  # part of a larger change
        before, new = _first(case.given, key), _value(case.config, key)
        if before is None or not _equal(before[1], new):
            changes.append(ConfigChange(key, before[1] if before else None, new, added=before is None))
    return tuple(changes)
