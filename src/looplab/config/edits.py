"""The edit language: `path@op=value`, for example `train.lr@mul=0.5` or `features.*.weight@set=0.1`.

Edits apply in order to a copy of the config. The type follows the config: an int stays an int, a float a float; only
`@new` changes a type. A path without a match is an error that names the nearest paths; only `set` and `new` add keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

from looplab.config import paths
from looplab.config.files import copy_document, plain, put, take_out
from looplab.config.paths import Concrete, show
from looplab.errors import LabError
from looplab.untrusted import UntrustedError, mend, mend_text


class EditError(LabError):
    """An edit that cannot be parsed or does not fit the config."""


class Op(StrEnum):
    """Operation of an edit."""

    SET = "set"
    MUL = "mul"
    ADD = "add"
    MAX = "max"
    MIN = "min"
    DEL = "del"
    APPEND = "append"
    NEW = "new"


_NUMERIC = frozenset({Op.MUL, Op.ADD, Op.MAX, Op.MIN})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_HEAD = re.compile(r"(?:[^\\=]|\\.|\\\Z)*", re.DOTALL)  # up to the first `=` that is not escaped
_DIGITS = re.compile(r"\d")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?")
"""A JSON number that needs no further check."""
_BARE_EQUALS = re.compile(r"\\.|=", re.DOTALL)

Types = Callable[[str], type | None]
"""Dotted path → its declared type (float, int, str or bool), or None."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change to a config. Parsing its text returns the same edit."""

    path: str
    """A dotted path; may contain `*`."""
    op: Op
    value: Any = None
    """Plain JSON data; None for `del`."""

    def __post_init__(self) -> None:
        # In the text, the first unescaped `=` ends the path.
        path = _BARE_EQUALS.sub(lambda found: r"\=" if found[0] == "=" else found[0], self.path)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "op", Op(self.op))
        if not path:
            raise EditError("an edit needs a path", hint="write `train.lr@set=0.1`")
        if self.op is Op.DEL and self.value is not None:
            raise EditError(f"`{path}@del` takes no value", hint=f"write `{path}@del`")
        _check_value(f"{path}@{self.op}", self.value)
        if self.op in _NUMERIC and not _is_number(self.value):
            raise EditError(f"`{self}`: `{self.op}` needs a number", hint=f"write `{path}@{self.op}=0.5`")

    def __str__(self) -> str:
        head = f"{self.path}@{self.op}"
        return head if self.op is Op.DEL else f"{head}={_value_text(self.value)}"


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """Combined effect of the edits on one place."""

    path: str
    """Dotted path of the place."""
    old: Any
    """Value before; None also if the place did not exist."""
    new: Any
    """Value after; None also if the place no longer exists."""
    added: bool = False
    """Whether the place did not exist before."""
    removed: bool = False
    """Whether the place no longer exists."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of applying edits."""

    config: dict[str, Any]
    """The new config, with the same container classes as the old one."""
    changes: tuple[ConfigChange, ...]
    """The differences, one per place, in the order in which the edits touched them."""
    notes: tuple[str, ...]
    """Notes for the user: a leaf was added, a number was rounded, an edit changed nothing."""


def parse_edit(text: str) -> Edit:
    """Parse `path@op=value`. A value that is not JSON is a bare string.

    Raises:
        EditError: The text is not an edit.
    """
    found = _HEAD.match(text)
    head = found[0] if found else ""
    value = text[len(head) + 1 :] if len(head) < len(text) else None
    path, at, word = head.rpartition("@")
    if not at:
        form = f"{head}@set={'VALUE' if value is None else value}"
        raise EditError(f"`{text}` does not say what to do: `@op` is missing", hint=f"write `{form}`; {_ops()}")
    if not path:
        raise EditError(f"`{text}` has no path before the `@`", hint="write `train.lr@set=0.1`")
    try:
        op = Op(word.strip())
    except ValueError:
        raise EditError(f"`{text}`: there is no op `{word}`", hint=_nearest_op(word)) from None
    if op is Op.DEL:
        if value is not None:
            raise EditError(f"`{text}`: `del` takes no value", hint=f"write `{path}@del`")
        return Edit(path, op)
    if value is None:
        raise EditError(f"`{text}` has no value", hint=f"write `{path}@{op}=VALUE`")
    return Edit(path, op, _parse_value(text, value.strip()))


def edits_from_partial(partial: Mapping[str, Any], config: Any) -> list[Edit]:
    """Return a nested partial config as `set` edits, leaf by leaf.

    A list is one value, and so is a mapping whose place in the config is not a mapping. Keys such as `train.lr` are
    paths unless the config has a key of that name.
    """
    return _partial_edits(partial, config, ())


def apply_edits(config: Any, edits: Iterable[Edit | str], *, types: Types | None = None) -> Applied:
    """Apply edits in order to a copy of the config.

    Args:
        config: The config; not changed.
        edits: Edits or their texts.
        types: Declared types, which override the type of the config's value: a knob may be declared float where the
            config has the int 1. None: no types are declared.

    Raises:
        EditError: An edit cannot be parsed or does not fit the config.
    """
    session = _EditSession(config, types or (lambda path: None))
    for edit in [edits] if isinstance(edits, str) else edits:
        session.apply(parse_edit(edit) if isinstance(edit, str) else edit)
    return Applied(session.config, session.changes(), tuple(session.notes))


class _EditSession:
    """A config being edited, and what was touched."""

    def __init__(self, config: Any, types: Types) -> None:
        self.original = config
        self.config = _deep_copy(config)
        self.types = types
        self.notes: list[str] = []
        self.touched: dict[Concrete, None] = {}
        self.removed_items: dict[Concrete, Any] = {}  # removed from lists; other items may have their indices now
        self.shifted: set[Concrete] = set()  # lists whose items have moved

    def apply(self, edit: Edit) -> None:
        places = paths.find(self.config, edit.path)
        if places:
            changed = self._act(edit, places)
        elif edit.op is Op.SET:
            changed = self._add(edit)
        elif edit.op is Op.NEW:
            changed = self._add_with_parents(edit)
        else:
            raise self._no_match_error(edit)
        if not changed:
            self.notes.append(f"`{edit}` changed nothing")

    def _act(self, edit: Edit, places: list[Concrete]) -> bool:
        """Change existing places; return whether anything differs now."""
        if edit.op is Op.DEL:
            self._delete(places)
            return True
        changed = False
        for place in places:
            old = plain(paths.get(self.config, place))
            if edit.op is Op.APPEND:
                if not isinstance(old, list):
                    raise EditError(f"`{edit}`: {show(place)} is {_type_name(old)}, and `append` needs a list")
                self._put(edit, (*place, len(old)), edit.value)
                changed = True
                continue
            if edit.op is Op.NEW:
                new = edit.value
            else:
                new = self._fitted(edit, place, old) if edit.op is Op.SET else self._computed(edit, place, old)
            if not paths.same(old, new):
                self._put(edit, place, new)
                changed = True
        return changed

    def _fitted(self, edit: Edit, place: Concrete, old: Any) -> Any:
        """Return the value of a `set`, converted to the type of the place."""
        value = edit.value
        kind, declared = self._kind(place, old)
        if value is None or kind is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return _finite(edit, place, lambda: float(value))
        if kind is int and type(value) is float and value.is_integer():
            return int(value)
        if kind is int and type(value) is float and not declared:
            # JSON has one number type: people write 10 for 10.0, and 0.75 can only be meant literally.
            self.notes.append(f"{show(place)} was the int {old} and is now the float {value}")
            return value
        if kind is str and type(value) in (int, float, bool):
            text = json.dumps(value)
            self.notes.append(f"{show(place)} is text, so {text} became {json.dumps(text)}")
            return text
        held = (
            f"{show(place)} is declared {_TYPE_NAMES[kind]}"
            if declared
            else f"the config has {_TYPE_NAMES[kind]} at {show(place)}"
        )
        takes = ", which takes only true or false" if kind is bool else f", and this is {_type_name(value)}"
        hint = "give a value of that type" if declared else f"use `@new` to change the type: `{_as_new(edit)}`"
        raise EditError(f"`{edit}`: {held}{takes}", hint=hint)

    def _computed(self, edit: Edit, place: Concrete, old: Any) -> int | float:
        """Return the result of arithmetic, in the type of the place."""
        if not _is_number(old):
            raise EditError(f"`{edit}`: {show(place)} is {_type_name(old)}, and `{edit.op}` needs a number")
        kind, _ = self._kind(place, old)
        if old != old or old in (math.inf, -math.inf):
            return _finite(edit, place, lambda: float(_compute(edit.op, old, edit.value)))
        exact = _compute(edit.op, _fraction(old), _fraction(edit.value))
        if kind is not int:
            return _finite(edit, place, lambda: float(exact))
        if edit.op in (Op.MAX, Op.MIN):  # a bound that is not an int: the next int within it
            rounded: int = math.ceil(exact) if edit.op is Op.MAX else math.floor(exact)
        else:
            rounded = math.floor(abs(exact) + Fraction(1, 2)) * (1 if exact >= 0 else -1)
        if rounded != exact:
            shown = _finite(edit, place, lambda: float(exact))
            self.notes.append(f"{show(place)} is an int: `{edit.op}` gave {shown:.15g}, rounded to {rounded}")
        _finite(edit, place, lambda: float(rounded))
        return rounded

    def _kind(self, place: Concrete, old: Any) -> tuple[type | None, bool]:
        """Return the type that the place must keep, and whether it is declared rather than inferred."""
        declared = None if isinstance(old, dict | list) else self.types(show(place))
        if declared is not None:
            return declared, True
        return (None if old is None else type(old)), False

    def _add(self, edit: Edit) -> bool:
        """Apply a `set` to a missing path: add a leaf to every parent."""
        name = paths.parse(edit.path)[-1]
        parents = paths.find_parents(self.config, edit.path) if name else []
        if not parents:
            raise self._no_match_error(edit)
        for parent in parents:
            near = _near_sibling(name, paths.get(self.config, parent))
            if near is not None:
                raise EditError(
                    f"`{edit}`: there is no {show((*parent, name))}, but there is {show((*parent, near))}",
                    hint=f"correct the name, or use `@new` to add it: `{_as_new(edit)}`",
                )
        for parent in parents:
            place = (*parent, name)
            self._put(edit, place, self._fitted(edit, place, None))
            self.notes.append(f"{show(place)} was not in the config; added")
        return True

    def _add_with_parents(self, edit: Edit) -> bool:
        """Apply a `new` to a missing path: add it below the deepest part of the path that exists."""
        segments = paths.parse(edit.path)
        for end in range(len(segments) - 1, -1, -1):
            rest = segments[end:]
            if not rest[0] or paths.is_wildcard(rest[0]):
                break
            parents = paths.find_segments(self.config, segments[:end])
            for parent in parents:
                self._grow(edit, parent, rest)
            if parents:
                return True
        raise self._no_match_error(edit)

    def _grow(self, edit: Edit, parent: Concrete, rest: tuple[str, ...]) -> None:
        there = paths.get(self.config, parent)
        if there is not None and not isinstance(there, dict):
            hint = f"use `{show(parent)}@append=…` to add to it" if isinstance(there, list) else None
            raise EditError(f"`{edit}`: {show(parent)} is {_type_name(plain(there))} and takes no keys", hint=hint)
        value = edit.value
        for part in reversed(rest[1:]):
            value = {part: value}
        if there is None:  # null becomes a mapping
            self._put(edit, parent, {rest[0]: value})
        else:
            self._put(edit, (*parent, rest[0]), value, touched=(*parent, *rest))
        self.notes.append(f"{show((*parent, *rest))} was not in the config; added")

    def _put(self, edit: Edit, place: Concrete, value: Any, *, touched: Concrete | None = None) -> None:
        parent, key = paths.get(self.config, place[:-1]), place[-1]
        try:
            put(parent, key, _deep_copy(value))
        except (TypeError, ValueError) as error:  # TOML has no null, for example
            raise EditError(f"`{edit}`: the file's format cannot represent this at {show(place)}: {error}") from None
        self._touch(touched or place)

    def _touch(self, place: Concrete) -> None:
        """Record a change. An index into a list whose items have moved is ambiguous: record the whole list."""
        moved = next((place[:end] for end in range(len(place)) if place[:end] in self.shifted), place)
        self.touched[moved] = None

    def _delete(self, places: list[Concrete]) -> None:
        known = [*self.touched, *self.removed_items]
        shifted: set[Concrete] = set()
        old = [plain(paths.get(self.config, place)) for place in places]
        for place in reversed(places):  # last first, so that the others keep their index
            take_out(paths.get(self.config, place[:-1]), place[-1])
        for place, value in zip(places, old, strict=True):
            parent = place[:-1]
            if not isinstance(paths.get(self.config, parent), list):
                self._touch(place)
                continue
            shifted.add(parent)
            if any(place[:end] in self.shifted for end in range(len(place))):
                self._touch(place)
            elif any(other[: len(parent)] == parent for other in known):
                self._touch(parent)
            else:
                self.removed_items[place] = value
        self.shifted |= shifted

    def _no_match_error(self, edit: Edit) -> EditError:
        segments = paths.parse(edit.path)
        for parent in paths.find_segments(self.config, segments[:-1]) if edit.op is Op.SET else ():
            there = plain(paths.get(self.config, parent))
            if not isinstance(there, dict):
                return EditError(f"`{edit}`: {show(parent)} is {_type_name(there)} and takes no new keys")
        near = paths.nearest(self.config, edit.path)
        return EditError(
            f"`{edit}`: the config has no {edit.path}",
            hint=f"nearest: {', '.join(near)}" if near else "no similar path exists",
        )

    def changes(self) -> tuple[ConfigChange, ...]:
        """Return the differences between the original and the edited config."""
        known = {*self.touched, *self.removed_items}
        result: dict[Concrete, ConfigChange] = {}
        for place in [*self.touched, *self.removed_items]:
            if any(place[:end] in known for end in range(len(place))):
                continue  # part of a larger change
            if place in self.removed_items and place not in self.touched:
                result[place] = ConfigChange(show(place), self.removed_items[place], None, removed=True)
            elif (change := _change(self.original, self.config, place)) is not None:
                result[place] = change
        if type(self.config) is not dict:
            self._report_shared(result)
        return tuple(result.values())

    def _report_shared(self, changes: dict[Concrete, ConfigChange]) -> None:
        """Add places that changed along with an edited one because a YAML anchor shares them."""
        old, new = plain(self.original), plain(self.config)
        known = {tuple(map(str, place)) for place in (*changes, *self.shifted)}
        for place in dict.fromkeys(place for side in (old, new) for place, _ in paths.leaves(side)):
            names = tuple(map(str, place))
            if any(names[:end] in known for end in range(len(names) + 1)):
                continue
            if (change := _change(old, new, place)) is not None:
                changes[place] = change
                self.notes.append(f"{show(place)} changed too: the file shares it by an anchor")


def _change(original: Any, config: Any, place: Concrete) -> ConfigChange | None:
    while place and not paths.has(original, place) and not paths.has(config, place):
        place = place[:-1]  # added and removed again; its new parents may still exist
    before, after = paths.has(original, place), paths.has(config, place)
    old = plain(paths.get(original, place)) if before else None
    new = plain(paths.get(config, place)) if after else None
    if not place or (before and after and paths.same(old, new)):
        return None
    return ConfigChange(show(place), old, new, added=not before, removed=not after)


def _partial_edits(partial: Mapping[str, Any], node: Any, trail: Concrete) -> list[Edit]:
    edits: list[Edit] = []
    for name, value in partial.items():
        key = paths.child(node, str(name))
        places = [(key,)] if key is not None else paths.find(node, str(name))
        for place in places or [(str(name),)]:
            there = paths.get(node, place) if places else None
            if isinstance(value, Mapping) and _addresses_children(value, there):
                edits += _partial_edits(value, there, (*trail, *place))
            else:
                edits.append(Edit(show((*trail, *place)), Op.SET, plain(value)))
    return edits


def _addresses_children(partial: Mapping[str, Any], there: Any) -> bool:
    """Return whether the keys of a partial mapping name children of `there`: keys of a mapping or items of a list."""
    if isinstance(there, list):
        return all(paths.find(there, str(name)) for name in partial)
    return isinstance(there, dict)


def _near_sibling(name: str, siblings: dict[Any, Any]) -> str | None:
    """Return a key so similar to the new name that the name is probably a typo. `layer2` next to `layer1` is not."""
    from difflib import SequenceMatcher

    normalised = _normalise(name)
    matcher = SequenceMatcher(b=name.lower(), autojunk=False)
    best, best_ratio = None, 0.8
    for sibling in map(str, siblings):
        other = _normalise(sibling)
        if other == normalised:
            return sibling
        if _DIGITS.sub("", other) == _DIGITS.sub("", normalised):
            continue
        matcher.set_seq1(sibling.lower())
        bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # from cheap to exact
        if all(bound() >= best_ratio for bound in bounds):
            best, best_ratio = sibling, matcher.ratio()
    return best


def _normalise(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _compute(op: Op, old: Any, value: Any) -> Any:
    if op is Op.MUL:
        return old * value
    if op is Op.ADD:
        return old + value
    return max(old, value) if op is Op.MAX else min(old, value)


def _fraction(number: int | float) -> Fraction:
    """Return the exact value of the printed digits: 10 × 0.35 is 3.5, and 0.1 × 3 is 0.3."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _finite(edit: Edit, place: Concrete, compute: Callable[[], float]) -> float:
    try:
        result = compute()
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise EditError(f"`{edit}`: {show(place)} would become {result}, which is not a finite number")
    return result


_TYPE_NAMES = {dict: "a mapping", list: "a list", str: "text", bool: "a bool", int: "an int", float: "a float"}


def _type_name(value: Any) -> str:
    return "null" if value is None else _TYPE_NAMES[type(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_new(edit: Edit) -> str:
    return f"{edit.path}@new={_value_text(edit.value)}"


def _ops() -> str:
    return f"the ops are {', '.join(Op)}"


def _nearest_op(word: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word.strip().lower(), list(Op), 1, 0.5)
    return f"did you mean `{near[0]}`? {_ops()}" if near else _ops()


def _check_value(where: str, value: Any) -> None:
    """Reject values that JSON cannot represent."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise EditError(f"`{where}`: the key {key!r} in its value is not text")
            _check_value(where, item)
    elif isinstance(value, list):
        for item in value:
            _check_value(where, item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise EditError(f"`{where}`: a value must be finite, not {value}")
    elif value is not None and not isinstance(value, str | int):
        raise EditError(f"`{where}`: a {type(value).__name__} cannot be the value of an edit")


def _value_text(value: Any) -> str:
    if isinstance(value, str) and _is_bare(value):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _is_bare(text: str) -> bool:
    """Return whether a string needs no quotes to be parsed as the same string."""
    if not text or not text.isprintable() or text != text.strip() or text[0] in '"[{':
        return False
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def _parse_value(edit: str, text: str) -> Any:
    if (plain_number := _NUMBER.fullmatch(text)) is not None:
        return float(text) if plain_number[1] else int(text)

    def number(digits: str) -> float:
        if math.isinf(float(digits)):
            raise EditError(f"`{edit}`: {digits} is beyond what a float can hold")
        return float(digits)

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise EditError(f"`{edit}`: its value has a duplicate key")
        return dict(pairs)

    def refuse(word: str) -> None:
        raise ValueError(word)  # NaN and Infinity are bare strings here, not numbers

    try:
        return mend(json.loads(text, parse_float=number, parse_constant=refuse, object_pairs_hook=mapping))
    except UntrustedError as error:
        raise EditError(f"`{edit[:60]}…`: its value {error}") from None
    except RecursionError:
        raise EditError(f"`{edit[:60]}…`: its value is nested too deeply") from None
    except ValueError:
        return mend_text(text)


def _deep_copy(value: Any) -> Any:
    """Return a deep copy: fast for plain data, with comments for documents that keep them."""
    kind = type(value)
    if kind is dict:
        return {key: _deep_copy(item) for key, item in value.items()}
    if kind is list:
        return [_deep_copy(item) for item in value]
    if kind in _SCALARS:
        return value
    return copy_document(value)
