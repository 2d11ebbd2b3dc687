"""The guard: checks of a proposal before it may use a slot.

Edits are applied to the parent's config. Only knobs may change, within their ranges, and only where the trainer uses
them. Then normalisers correct values,
derived keys are computed, and constraints must hold. All problems are reported at once, each with the nearest legal
value if there is one, so that a proposer can correct them in one go. A null in the given config means "not set" and is
left alone; an edit may set null only if null is one of the choices.
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
"""Passes over normalisers and derived keys before they count as non-converging."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a config is rejected."""

    key: str
    """Dotted path of the key; for a constraint, its text."""
    value: Any
    """The rejected value; for a constraint, the values that it read."""
    rule: str
    """`edit`, `not a knob`, `knob range`, `not used`, `normalise`, `derive` or `constraint`."""
    message: str
    """What is wrong and what to do, for people and agents."""
    nearest: Any = None
    """The nearest legal value, or the most similar key; None: there is none."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Ruling:
    """Result of a check."""

    config: dict[str, Any] | None
    """The config to run; None: it is rejected."""
    changes: tuple[ConfigChange, ...]
    """Differences from the given config, by edits, normalisers and derived keys."""
    problems: tuple[Problem, ...]
    """All reasons to reject it."""
    notes: tuple[str, ...]
    """Notes for the user: rounding, normalising, edits without effect."""
    ineffective: tuple[str, ...] = ()
    """The notes that explain why an edit has no effect."""

    @property
    def ok(self) -> bool:
        return not self.problems


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
        self._normalise = [_make_rule("normalise", target, text) for target, text in normalise]
        self._derive = _topological_order(
            [_make_rule("derive", target, text) for target, text in (derive or {}).items()]
        )
        self._constraints = [_compile("constraint", text) for text in constraints]
        self.used_if = {
            knob.path: _compile("knob", knob.used_if, f"{knob.path}: if")
            for knob in self.knobs.values()
            if knob.used_if is not None
        }
        """Where a knob is used, by its path; without those that are used everywhere."""
        self._derived = {rule.target for rule in self._derive}
        for rule in self._normalise:
            if rule.target in self._derived:
                raise LabError(f"{rule.target} is both normalised and derived", hint="put the rounding into derive")
        # A normaliser that reads a derived key must not read the parent's old value.
        self._derive_first = any(_reads(rule.expression, self._derived) for rule in self._normalise)

    def check(self, parent: dict[str, Any], edits: Sequence[Edit | str]) -> Ruling:
        """Check a proposer's edits of its parent's config."""
        problems: list[Problem] = []
        given, added = self._knobs.with_defaults(parent)
        applied = self._apply(given, edits, problems)
        case = _Case(given, applied.config, problems, list(applied.notes), parent, added)
        self._check_changes(case, applied)
        ruling = self._finish(case, applied.changes)
        if ruling.changes or ruling.problems:
            return ruling
        nothing = "changes nothing"
        return replace(ruling, notes=(*ruling.notes, nothing), ineffective=(*ruling.ineffective, nothing))

    def admit(self, config: dict[str, Any]) -> Ruling:
        """Check a user's own config, in which keys other than knobs may have any value."""
        given, added = self._knobs.with_defaults(config)
        case = _Case(given, apply_edits(given, []).config, [], [], config, added)
        self._check_all(case, "")
        for path, condition in self.used_if.items():
            try:
                condition.evaluate(case.config)
            except ExpressionError as error:
                case.reject(_failure("knob", path, f"{path}: if {condition}", error))
        return self._finish(case, ())

    def is_knob(self, key: str) -> bool:
        """Return whether a proposal may change this key."""
        return self._knobs.owner(key) is not None

    def knob_values(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the value of every knob that the config has, by its concrete path."""
        return {key: value for key, _, _, value in self._knobs.present(config)}

    def takes_null(self, config: dict[str, Any], path: str) -> bool:
        """Return whether the knobs allow null there; a path without a knob is rejected elsewhere."""
        knob = self._knobs.meant_by(path)
        return knob is None or knob.check(None, _value_at(config, path))[1] is None

    def with_defaults(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with the defaults of missing knobs: the values that the trainer will use."""
        return self._knobs.with_defaults(config)[0]

    @property
    def derived(self) -> frozenset[str]:
        """Keys that are computed from others."""
        return frozenset(self._derived)

    @property
    def coupled_keys(self) -> frozenset[str]:
        """Keys that constraints, normalisers and derived keys read or set: whether a value is legal depends on them."""
        rules = [*self._normalise, *self._derive]
        names = {name for expression in (*self._constraints, *(rule.expression for rule in rules))
                 for name in expression.names}  # fmt: skip
        return frozenset(names | {rule.target for rule in rules})

    def inputs(self, problem: Problem) -> set[str]:
        """Return the keys that the problem's constraint or computed key reads, directly or indirectly.

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

    def _finish(self, case: _Case, edited: Sequence[ConfigChange]) -> Ruling:
        self._settle(case)
        self._check_all(case, "already in the parent")
        self._check_used(case, edited)
        for constraint in self._constraints:
            self._check_constraint(case, constraint)
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
        good = [self._allow_type_change(parent, edit) for edit in good]
        types = self._types(parent)
        try:
            return apply_edits(parent, good, types=types)
        except EditError:
            pass
        # Some do not fit: find them, and check the others without them.
        fitting: list[Edit] = []
        before = parent
        for edit in good:
            try:
                before = apply_edits(before, [edit], types=types).config
                fitting.append(edit)
            except EditError as error:
                problems.append(self._edit_problem(parent, edit, error))
        return apply_edits(parent, fitting, types=types)

    def _types(self, parent: dict[str, Any]) -> Callable[[str], type | None]:
        def declared(path: str) -> type | None:
            knob = self._knobs.of(path)
            return None if knob is None else knob.python_type(_value_at(parent, path))

        return declared

    def _allow_type_change(self, parent: dict[str, Any], edit: Edit) -> Edit:
        """Turn a `set` into `new` for a knob with choices of several types, so that it may change the type."""
        if edit.op is not Op.SET:
            return edit
        knob = self._knobs.meant_by(edit.path)
        if knob is None or knob.choices is None or knob.python_type() is not None:
            return edit
        return replace(edit, op=Op.NEW) if paths.find(parent, edit.path) else edit

    def _edit_problem(self, parent: dict[str, Any], edit: Edit, error: EditError) -> Problem:
        knob = self._knobs.meant_by(edit.path)
        if knob is None and not self._is_derived(edit.path):
            return self._not_a_knob(edit.path, edit.value)
        nearest = None
        if knob is not None and edit.op in (Op.SET, Op.NEW):
            nearest = knob.nearest(edit.value, _value_at(parent, edit.path))
        hint = "" if knob is None else f"; {edit.path} takes {knob.describe()}"
        return Problem(edit.path, edit.value, "edit", f"{error}{hint}", nearest)

    def _is_derived(self, path: str) -> bool:
        return paths.show(paths.parse(path)) in self._derived

    def _not_a_knob(self, key: str, value: Any) -> Problem:
        near = self._knobs.nearest(key)
        advice = f"nearest: {', '.join(near)}" if near else f"there are {len(self.knobs)} knobs, none like it"
        return Problem(key, value, "not a knob", f"{key} is not a knob; {advice}", near[0] if near else None)

    # --- knobs ---

    def _check_changes(self, case: _Case, applied: Applied) -> None:
        """Check that every changed leaf belongs to a knob and is legal."""
        checked: set[str] = set()
        for key, sides in _changed_leaves(case.given, applied).items():
            if key in self._derived:
                if "new" in sides:
                    case.edited_derived[key] = sides["new"]
                continue
            owner = self._knobs.owner(key)
            if owner is None:
                case.reject(self._not_a_knob(key, sides.get("new")))
            elif owner[0] not in checked:
                checked.add(owner[0])
                self._check_knob(case, *owner)

    def _check_knob(self, case: _Case, key: str, knob: Knob) -> None:
        like = _value_at(case.given, key)
        found = _find_first(case.config, key)
        if found is None:
            # Removing a key leaves its value to the trainer, as null does.
            if knob.check(None, like)[1] is not None:
                text = f"{key} may not be removed; it takes {knob.describe()}"
                case.reject(Problem(key, None, "knob range", text, like))
            return
        place, value = found
        coerced, problem = knob.check(value, like)
        if problem is None:
            case.put(place, value, coerced)
        else:
            case.reject(_out_of_range(key, value, knob, problem, knob.nearest(value, like), ""))

    def _check_used(self, case: _Case, edited: Sequence[ConfigChange]) -> None:
        """Check that the trainer uses the edited knobs."""
        for key in {change.path: None for change in edited} if self.used_if else ():
            owner = self._knobs.owner(key)
            condition = None if owner is None else self.used_if.get(owner[1].path)
            if condition is None or key in case.rejected:
                continue
            try:
                if condition.evaluate(case.config):
                    continue
            except ExpressionError as error:
                if not case.reads_rejected(condition):
                    case.reject(_failure("knob", key, f"{key}: if {condition}", error))
                continue
            read = ", ".join(f"{name}={show_value(v)}" for name, v in sorted(condition.values(case.config).items()))
            text = f"{key} is not used here, only if {condition}{': ' if read else ''}{read}; leave it as it is"
            case.reject(Problem(key, _value_at(case.config, key), "not used", text, _value_at(case.given, key)))

    def _check_all(self, case: _Case, unchanged: str) -> None:
        """Check every knob of the whole config, except those that already have a problem."""
        for key, place, knob, value in self._knobs.present(case.config):
            if value is None or key in case.rejected or key in case.doubtful:
                continue
            coerced, problem = knob.check(value, value)
            if problem is None:
                case.put(place, value, coerced)
                continue
            rule = case.computed.get(key)
            why = f"{rule.kind}d as {rule.expression}" if rule else unchanged
            case.reject(_out_of_range(key, value, knob, problem, knob.nearest(value, value), why))

    # --- computed keys and constraints ---

    def _settle(self, case: _Case) -> None:
        """Normalise and derive until nothing changes, so that checking the result again changes nothing."""
        rules = [*(self._derive if self._derive_first else ()), *self._normalise, *self._derive]
        for _ in range(MAX_PASSES):
            before = [_value_at(case.config, rule.target) for rule in rules]
            n_notes = len(case.notes)
            changed = [self._compute(case, rule) for rule in rules]
            if not any(changed):
                break
            after = [_value_at(case.config, rule.target) for rule in rules]
            if all(map(paths.same, before, after)):
                del case.notes[n_notes:]  # the changes cancelled out
                break
        else:
            rule = next(rule for rule, old, new in zip(rules, before, after, strict=True) if not paths.same(old, new))
            text = f"{rule.kind} {rule.target} = {rule.expression} does not converge: it changes the value each time"
            case.reject(Problem(rule.target, None, rule.kind, text))
        for rule in self._derive:
            if rule.target in case.edited_derived and rule.target not in case.failed:
                edited, derived = case.edited_derived[rule.target], _value_at(case.config, rule.target)
                if not _equal(edited, derived):
                    text = f"{rule.target} is derived: {show_value(edited)} → {show_value(derived)}: {rule.expression}"
                    case.notes.append(text)
                    case.ineffective.append(text)

    def _compute(self, case: _Case, rule: _Rule) -> bool:
        """Compute one key; return whether it changed."""
        if rule.target in case.failed:
            return False
        found = _find_first(case.config, rule.target)
        try:
            place = found[0] if found else _new_place(case.config, rule)
            old = found[1] if found else None
            # The type follows the given config, even if an edit has changed the derived key.
            like = _value_at(case.given, rule.target)
            value = self._typed(rule, rule.expression.evaluate(case.config), old if like is None else like)
        except (ExpressionError, _ComputeError) as error:
            if not case.reads_rejected(rule.expression):
                case.reject(_failure(rule.kind, rule.target, f"{rule.target} = {rule.expression}", error))
            case.failed.add(rule.target)
            return False
        if case.reads_rejected(rule.expression):
            case.doubtful.add(rule.target)
        if found and paths.same(old, value):
            return False
        if rule.kind == "normalise" and not _equal(old, value):
            case.notes.append(f"{rule.target} {show_value(old)} → {show_value(value)}: {rule.expression}")
        paths.set_(case.config, place, value)
        case.computed[rule.target] = rule
        return True

    def _typed(self, rule: _Rule, value: Any, like: Any) -> Any:
        """Return a computed value in the type of the key: an int stays an int."""
        if isinstance(value, float) and not math.isfinite(value):
            raise _ComputeError(f"its value would be {value}")
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
        raise _ComputeError(
            f"its value would be {show_value(value)}, but the key has {_NOUNS.get(kind, kind.__name__)}"
        )

    def _check_constraint(self, case: _Case, constraint: Expression) -> None:
        text = constraint.text
        try:
            if constraint.evaluate(case.config):
                return
        except ExpressionError as error:
            if not case.reads_rejected(constraint):
                case.reject(_failure("constraint", text, text, error))
            return
        values = constraint.values(case.config)
        read = ", ".join(f"{name}={show_value(value)}" for name, value in sorted(values.items()))
        case.reject(Problem(text, values, "constraint", f"{text} is false{': ' if read else ''}{read}"))


_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class _ComputeError(Exception):
    """A computed value that does not fit the config."""


class _Case:
    """State of the check of one config."""

    __slots__ = (
        "added", "computed", "config", "doubtful", "edited_derived", "failed", "given", "ineffective", "notes",
        "original", "problems", "rejected",
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
        """The original with the defaults of its missing keys (for a proposal: its parent); never changed."""
        self.original = original
        """The config as it was passed in."""
        self.added = added
        """Those defaults, by place."""
        self.config = config
        """The working copy."""
        self.problems = problems
        self.notes = notes
        self.ineffective: list[str] = []
        self.rejected: set[str] = set()
        """Keys with a problem; consequences of a problem are not reported."""
        self.doubtful: set[str] = set()
        """Keys computed from rejected ones."""
        self.failed: set[str] = set()
        """Keys that could not be computed."""
        self.computed: dict[str, _Rule] = {}
        """Keys that a rule changed."""
        self.edited_derived: dict[str, Any] = {}
        """Values that edits set for derived keys."""

    def reject(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.rejected.add(problem.key)

    def reads_rejected(self, expression: Expression) -> bool:
        bad = self.rejected | self.doubtful | self.failed
        return bool(bad) and _reads(expression, bad)

    def without_defaults(self) -> dict[str, Any]:
        """Return the config without unchanged defaults, which the trainer has anyway."""
        for place, default in self.added.items():
            if not paths.has(self.config, place):
                continue
            value = paths.get(self.config, place)
            if not _equal(value, default):
                shown = f"{show_value(default)} (its default) → {show_value(value)}"
                self.notes.append(f"{paths.show(place)} was not in the config: {shown}")
                continue
            paths.delete(self.config, place)
            for end in range(len(place) - 1, 0, -1):  # mappings that were created for it
                if paths.has(self.original, place[:end]) or paths.get(self.config, place[:end]):
                    break
                paths.delete(self.config, place[:end])
        return self.config

    def put(self, place: Concrete, old: Any, value: Any) -> None:
        if type(value) is not type(old):
            paths.set_(self.config, place, value)


def _compile(kind: str, text: str, name: str | None = None) -> Expression:
    try:
        return compile_expression(text)
    except ExpressionError as error:
        where = f"{kind} {name} = {text}" if name else f"{kind} {text}"
        raise LabError(f"{where}: {error.message}", hint=error.hint) from None


def _make_rule(kind: str, target: str, text: str) -> _Rule:
    segments = paths.parse(target)
    if any(not segment or paths.is_wildcard(segment) for segment in segments):
        raise LabError(f"{kind} {target}: the key must be a single key", hint="without `*`, as in train.batch_size")
    return _Rule(kind, paths.show(segments), segments, _compile(kind, text, target))


def _topological_order(rules: list[_Rule]) -> list[_Rule]:
    """Return derived keys in topological order: each after those that it reads."""
    by_target = {rule.target: rule for rule in rules}
    if len(by_target) < len(rules):
        raise LabError("a key is derived twice", hint="remove one")
    needs = {rule.target: [other for other in by_target if _reads(rule.expression, {other})] for rule in rules}
    try:
        return [by_target[target] for target in TopologicalSorter(needs).static_order()]
    except CycleError as error:
        cycle = " → ".join(reversed(error.args[1]))
        raise LabError(f"derived keys depend on each other: {cycle}", hint="break the cycle") from None


def _reads(expression: Expression, keys: set[str]) -> bool:
    """Return whether an expression reads one of the keys, a child of it, or a parent of it."""
    for key in keys:
        plain = key.replace("\\", "")
        for name in expression.names:
            if name == plain or name.startswith(f"{plain}.") or plain.startswith(f"{name}."):
                return True
    return False


def _find_first(config: dict[str, Any], key: str) -> tuple[Concrete, Any] | None:
    """Return the first place that matches a path, and its value; None if there is none."""
    segments = paths.parse(key)
    node: Any = config
    for segment in segments:
        if type(node) is not dict or segment not in node:
            places = paths.find_segments(config, segments)
            return (places[0], paths.get(config, places[0])) if places else None
        node = node[segment]
    return segments, node  # the common case: one plain key per segment


def _value_at(config: dict[str, Any], key: str) -> Any:
    """Return the value at a path; None also if there is none."""
    found = _find_first(config, key)
    return None if found is None else found[1]


def _new_place(config: dict[str, Any], rule: _Rule) -> Concrete:
    """Return where to add a key that the config lacks: in its existing parent."""
    parents = paths.find_parents(config, rule.target)
    if not parents:
        raise _ComputeError(f"{paths.show(rule.segments[:-1])} is not in the config")
    return (*parents[0], rule.segments[-1])


def _changed_leaves(given: dict[str, Any], applied: Applied) -> dict[str, dict[str, Any]]:
    """Return the leaves that the edits changed, with their old and new values."""
    leaves: dict[str, dict[str, Any]] = {}
    for change in applied.changes:
        if change.removed or isinstance(change.old, dict | list) or isinstance(change.new, dict | list):
            break
        leaves[change.path] = {"new": change.new} if change.added else {"old": change.old, "new": change.new}
    else:
        return leaves
    # Mappings or lists were added or removed, and list items may have moved: compare leaf by leaf.
    leaves = paths.diff(given, applied.config)
    return {key: sides for key, sides in leaves.items() if not _is_container_change(key, sides, leaves)}


def _is_container_change(key: str, sides: dict[str, Any], leaves: dict[str, dict[str, Any]]) -> bool:
    """Return whether a leaf was an empty container (or null) that got children, or is one that lost them."""
    (value, *others) = sides.values()
    return not others and value in (None, {}, []) and any(other.startswith(f"{key}.") for other in leaves)


def _out_of_range(key: str, value: Any, knob: Knob, problem: str, nearest: Any, why: str) -> Problem:
    text = f"{key}: {problem}"
    if why:
        text += f" ({why})"
    if knob.choices is None:
        text += f"; it takes {knob.describe()}"
    return Problem(key, value, "knob range", f"{text}; nearest: {show_value(nearest)}", nearest)


def _failure(kind: str, key: str, what: str, error: ExpressionError | _ComputeError) -> Problem:
    if isinstance(error, MissingName):
        nearest = error.nearest[0] if error.nearest else None
        near = f"; nearest: {', '.join(error.nearest)}" if error.nearest else ""
        return Problem(key, None, kind, f"{kind} {what}: {error.name} is missing in the config{near}", nearest)
    return Problem(key, None, kind, f"{kind} {what}: {error}")


def _equal(a: Any, b: Any) -> bool:
    """Like `paths.same`, but 1 equals 1.0."""
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return paths.same(a, b)
    return a == b


def _final_changes(case: _Case, edited: Sequence[ConfigChange]) -> tuple[ConfigChange, ...]:
    """Return the differences from the given config; a key that was edited and then computed is one change."""
    changes: list[ConfigChange] = []
    edits = [change for change in edited if change.path not in case.computed]
    for change in edits:
        new = None if change.removed else _value_at(case.config, change.path)
        if change.removed or change.added or not _equal(change.old, new):
            changes.append(change if new is change.new else replace(change, new=new))
    for key in case.computed:
        if any(key.startswith(f"{change.path}.") for change in edits):
            continue  # part of a larger change
        before, new = _find_first(case.given, key), _value_at(case.config, key)
        if before is None or not _equal(before[1], new):
            changes.append(ConfigChange(key, before[1] if before else None, new, added=before is None))
    return tuple(changes)
