"""Knobs: the config keys that proposals may change, with their types and legal values."""

from __future__ import annotations

import builtins
import copy
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from looplab.config import paths
from looplab.config.paths import Concrete
from looplab.config.validation import Section, check_section
from looplab.errors import LabError

Kind = Literal["int", "float", "bool", "str"]

_PYTHON: dict[str, builtins.type] = {"int": int, "float": float, "bool": bool, "str": str}
MAX_CACHED = 4_096
"""Maximum number of paths in the cache of a knob table."""

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)] | Annotated[int, Field(strict=True)]


class KnobSection(Section):
    """A knob's entry in the lab file."""

    SYNONYMS: ClassVar[Mapping[str, str]] = {
        "min": "low", "max": "high", "values": "choices", "options": "choices", "scale": "log", "dtype": "type",
        "when": "if", "condition": "if",
    }  # fmt: skip

    type: Kind | None = None
    """None: the type of the choices, or else of the value in the config."""
    low: Number | None = None
    """Smallest legal value; None: no limit."""
    high: Number | None = None
    """Largest legal value; None: no limit."""
    log: bool = Field(False, strict=True)
    """Whether a search samples on a log scale; does not affect which values are legal."""
    step: Number | None = Field(None, gt=0)
    """Spacing of the legal values, from `low` or from 0; None: any value."""
    choices: tuple[Any, ...] | None = Field(None, min_length=1)
    """The only legal values; None: not restricted to a list."""
    default: Any = None
    """Value that the trainer uses if the config lacks the key; unknown if it is not set."""
    used_if: str | None = Field(None, alias="if")
    """Expression over the config that is true where the trainer uses the key; None: it always does."""

    @field_validator("low", "high", "step")
    @classmethod
    def _whole(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None or info.data.get("type") != "int":
            return value
        if not _is_whole(value):
            raise ValueError(f"an int needs a whole number, not {show_value(value)}")
        return int(value)

    @field_validator("choices")
    @classmethod
    def _coerced_choices(cls, choices: tuple[Any, ...] | None, info: ValidationInfo) -> tuple[Any, ...]:
        if choices is None:
            raise ValueError("null is not a list")
        kind = info.data.get("type")
        checked = [(c, None) if c is None else Knob("", kind).check(c) for c in choices]
        for _, problem in checked:
            if problem:
                raise ValueError(f"a choice does not fit{f' the type {kind}' if kind else ''}: {problem}")
        return tuple(choice for choice, _ in checked)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        limits = [key for key in ("low", "high", "step") if getattr(self, key) is not None] + ["log"] * self.log
        if self.type in ("bool", "str") and limits:
            raise ValueError(f"{limits[0]} is for numbers, but the type is {self.type}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {show_value(self.low)} is above high {show_value(self.high)}")
        if self.log and (self.low is None or self.low <= 0):
            raise ValueError("log needs a low above 0")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other; remove one")
        if self.choices is not None and limits:
            raise ValueError(f"choices and {limits[0]} exclude each other; remove one")
        return self


@dataclass(frozen=True, slots=True)
class Knob:
    """The legal values of one key; the fields are those of its entry in the lab file."""

    path: str
    """Dotted path; `*` matches every child."""
    type: Kind | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    used_if: str | None = None
    has_default: bool = False

    @classmethod
    def make(cls, path: str, spec: Mapping[str, Any]) -> Knob:
        """Build a knob from its entry in a lab file; raise LabError if the entry is invalid."""
        if not path or "" in paths.parse(path):
            raise LabError(f"{path!r} is not a path for a knob", hint="as in train.learning_rate")
        label = f"knob {path}: "
        section = check_section(KnobSection, spec, label=label)
        knob = cls(path=path, has_default="default" in section.model_fields_set, **dict(section))
        if not knob.has_default:
            return knob
        if paths.is_wildcard(paths.parse(path)[-1]):
            raise LabError(f"{label}a path that ends in `*` cannot have a default", hint="name the keys")
        default, problem = knob.check(knob.default, knob.default)
        if default is None and (knob.choices is None or None not in knob.choices):
            problem = "null is not a value; remove the default, or make null one of the choices"
        if problem is not None or isinstance(default, dict | list):
            raise LabError(f"{label}its default is not legal: {problem or 'it is not a single value'}")
        return replace(knob, default=default)

    def python_type(self, like: Any = None) -> builtins.type | None:
        """Return the Python type of its values if the config has the value `like`; None: any type."""
        return _PYTHON.get(self._kind(like) or "")

    def problem(self, value: Any, like: Any = None) -> str | None:
        """Return why a value is not legal, or None. `like`, the config's value, matters only without a type."""
        return self.check(value, like)[1]

    def check(self, value: Any, like: Any = None) -> tuple[Any, str | None]:
        """Return a value in the knob's type and why it is not legal, or None.

        1 becomes 1.0 for a float, and 3.0 becomes 3 for an int.
        """
        if self.choices is not None:
            for choice in self.choices:
                if choice == value and isinstance(choice, bool) == isinstance(value, bool):
                    return choice, None
            return value, f"{show_value(value)} is not one of {', '.join(map(show_value, self.choices))}"
        kind = self._kind(like)
        if kind in ("int", "float", "number"):
            return self._check_number(value, kind, like)
        if kind == "bool" and not isinstance(value, bool):
            return value, f"{show_value(value)} is not true or false"
        if kind == "str" and not isinstance(value, str):
            return value, f"{show_value(value)} is not text"
        if kind is None and not _all_finite(value):
            return value, f"{show_value(value)} is not finite"
        return value, None

    def nearest(self, value: Any, like: Any = None) -> Any:
        """Return the nearest legal value; any legal value if none is near."""
        coerced, problem = self.check(value, like)
        if problem is None:
            return coerced
        if self.choices is not None:
            return _nearest_choice(self.choices, value)
        kind = self._kind(like)
        if kind == "bool":
            return value.strip().lower() in {"true", "yes", "on", "1"} if isinstance(value, str) else value == 1
        if kind == "str":
            return str(value) if value is not None else like if isinstance(like, str) else ""
        if kind is None:
            return None
        return self._nearest_number(_as_number(value), kind)

    def describe(self) -> str:
        """Return a short description of the legal values for prompts and messages: `float, 1e-06 … 1, log`."""
        default = [f"default {show_value(self.default)}"] if self.has_default else []
        default += [f"only if {self.used_if}"] if self.used_if is not None else []
        if self.choices is not None:
            return ", ".join([f"one of {', '.join(map(show_value, self.choices))}", *default])
        parts: list[str] = [self.type] if self.type else []
        if self.low is not None or self.high is not None:
            parts.append(self._range())
        if self.step is not None:
            parts.append(f"in steps of {self.step:g}")
        if self.log:
            parts.append("log")
        return ", ".join([*(parts or ["any value of its type"]), *default])

    def _range(self) -> str:
        if self.low is None:
            return f"at most {show_value(self.high)}"
        return (
            f"at least {show_value(self.low)}"
            if self.high is None
            else f"{show_value(self.low)} … {show_value(self.high)}"
        )

    def _kind(self, like: Any) -> str | None:
        """Return `int`, `float`, `bool` or `str`; `number`: int or float; None: any type."""
        if self.type is not None:
            return self.type
        if self.choices is not None:
            kinds = {builtins.type(choice) for choice in self.choices}
            if kinds == {int, float}:
                return "float"
            return next(iter(kinds)).__name__ if len(kinds) == 1 and kinds <= set(_PYTHON.values()) else None
        limits = [limit for limit in (self.low, self.high, self.step) if limit is not None]
        if limits or (isinstance(like, int | float) and not isinstance(like, bool)):
            if isinstance(like, int) and not isinstance(like, bool):
                # A learning rate of 1 in the config is not an int if its range begins at 1e-6.
                return "int" if all(_is_whole(limit) for limit in limits) else "float"
            return "float" if isinstance(like, float) else "number"
        return builtins.type(like).__name__ if isinstance(like, bool | str) else None

    def _check_number(self, value: Any, kind: str, like: Any) -> tuple[Any, str | None]:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value, f"{show_value(value)} is not a {'whole number' if kind == 'int' else 'number'}"
        if isinstance(value, float) and not math.isfinite(value):
            return value, f"{show_value(value)} is not finite"
        if kind == "int" and isinstance(value, float):
            if not value.is_integer():
                why = (
                    ""
                    if self.type
                    else f" (the config has {show_value(like)}; to allow it, give the knob `type: float`)"
                )
                return value, f"{show_value(value)} is not a whole number{why}"
            value = int(value)
        elif isinstance(value, int):
            if math.isinf(_as_number(value)):
                return value, "the number is too large"
            value = float(value) if kind == "float" else value
        if self.low is not None and value < self.low:
            return value, f"{show_value(value)} is below {show_value(self.low)}"
        if self.high is not None and value > self.high:
            return value, f"{show_value(value)} is above {show_value(self.high)}"
        if self.step is not None and not self._on_grid(value):
            start = "" if self.low is None else f" from {show_value(self.low)}"
            return value, f"{show_value(value)} is not in steps of {show_value(self.step)}{start}"
        return value, None

    def _on_grid(self, value: float) -> bool:
        assert self.step is not None
        start = self.low or 0
        if isinstance(value, int) and isinstance(start, int) and isinstance(self.step, int):
            return (value - start) % self.step == 0
        times = (value - start) / self.step
        return not math.isfinite(times) or math.isclose(times, round(times), rel_tol=1e-12, abs_tol=1e-9)

    def _nearest_number(self, number: float, kind: str) -> Any:
        if math.isnan(number):
            number = 0
        if math.isinf(number):
            end = self.high if number > 0 else self.low
            number = 0 if end is None else end
        if self.low is not None:
            number = max(number, self.low)
        if self.high is not None:
            number = min(number, self.high)
        if self.step is not None:
            return self._nearest_on_grid(number, kind)
        if kind != "int":
            return float(number) if kind == "float" else number
        whole = round(number)
        if self.low is not None:
            whole = max(whole, math.ceil(self.low))
        return whole if self.high is None else min(whole, math.floor(self.high))

    def _nearest_on_grid(self, number: float, kind: str) -> Any:
        assert self.step is not None
        start = self.low or 0
        times = (number - start) / self.step
        if not math.isfinite(times):
            return number
        near = round(times)
        for count in (near, near - 1, near + 1):  # the last grid point below `high` may be one less
            exact = start + count * self.step
            for candidate in (float(f"{exact:.12g}"), exact):  # 0.3 rather than 0.1 * 3
                coerced, problem = self._check_number(candidate, kind, None)
                if problem is None:
                    return coerced
        return number


class KnobTable:
    """Lookup of the knob of a path."""

    def __init__(self, knobs: Iterable[Knob]) -> None:
        self._exact: dict[str, Knob] = {}
        self._all: list[tuple[Knob, str, tuple[str, ...], bool]] = []
        for knob in knobs:
            segments = paths.parse(knob.path)
            starred = any(map(paths.is_wildcard, segments))
            key = knob.path if starred else paths.show(segments)
            self._all.append((knob, key, segments, starred))
            if not starred:
                if key in self._exact:
                    raise LabError(f"two knobs for {key}", hint="remove one")
                self._exact[key] = knob
        self._cache: dict[str, tuple[str, Knob] | None] = {}
        self._with_default = [entry for entry in self._all if entry[0].has_default]

    def with_defaults(self, config: dict[str, Any]) -> tuple[dict[str, Any], dict[Concrete, Any]]:
        """Return the config with the defaults of missing knobs, and the added values by place.

        The config is never changed; if nothing is missing, it is returned itself.
        """
        added: dict[Concrete, Any] = {}
        filled = config
        for knob, _, segments, starred in self._with_default:
            if not starred and paths.find_segments(config, segments):
                continue
            for place in _missing_places(config, knob.path, segments, starred):
                if self.of(paths.show(place)) is knob:
                    filled = copy.deepcopy(config) if filled is config else filled
                    _put_with_parents(filled, place, knob.default)
                    added[place] = knob.default
        return filled, added

    def of(self, key: str) -> Knob | None:
        """Return the knob of exactly this concrete path, or None."""
        owner = self.owner(key)
        return owner[1] if owner is not None and owner[0] == key else None

    def owner(self, key: str) -> tuple[str, Knob] | None:
        """Return the knob of a concrete path or of its nearest parent, with the path of the knob's value, or None."""
        if key not in self._cache:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[key] = self._find_owner(paths.parse(key))
        return self._cache[key]

    def _find_owner(self, segments: tuple[str, ...]) -> tuple[str, Knob] | None:
        for end in range(len(segments), 0, -1):
            knob = self._match(segments[:end])
            if knob is not None:
                return paths.show(segments[:end]), knob
        return None

    def _match(self, segments: tuple[str, ...]) -> Knob | None:
        exact = self._exact.get(paths.show(segments))
        if exact is not None:
            return exact
        # Exact knobs before those with a `*`, which are more general.
        for with_star in (False, True):
            for knob, _, _, starred in self._all:
                if starred is with_star and paths.matches(knob.path, segments):
                    return knob
        return None

    def meant_by(self, path: str) -> Knob | None:
        """Return the knob that the path of an edit addresses, or None; the path may contain `*`."""
        return self._match(paths.parse(path))

    def present(self, config: dict[str, Any]) -> Iterator[tuple[str, Concrete, Knob, Any]]:
        """Yield every knob's value in a config as (path, place, knob, value)."""
        seen: set[str] = set()
        for knob, key, segments, starred in self._all:
            if not starred:
                node: Any = config
                for segment in segments:
                    if type(node) is not dict or segment not in node:
                        break
                    node = node[segment]
                else:  # the common case: one plain key per segment
                    yield key, segments, knob, node
                    continue
            for place in paths.find_segments(config, segments):
                shown = paths.show(place)
                if shown in seen or (starred and self.of(shown) is not knob):
                    continue
                seen.add(shown)
                yield shown, place, knob, paths.get(config, place)

    def nearest(self, path: str) -> list[str]:
        """Return the knobs most similar to a path; if none is, some of its siblings."""
        tree: dict[str, Any] = {}
        for _, _, segments, _ in self._all:
            node = tree
            for segment in segments:
                node = node.setdefault(str(segment), {})
        known = {key for _, key, _, _ in self._all}
        names = (name.replace(r"\*", "*") for name in paths.nearest(tree, path, 12))
        near = [name for name in names if name in known][:3]
        prefix = path.rpartition(".")[0] + "."
        return near or [key for _, key, _, _ in self._all if key.startswith(prefix)][:3]


def show_value(value: Any) -> str:
    """Return a value as it is written in a config file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, int) and value.bit_length() > 1_024:
        return "a very large number"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}…"


def _missing_places(config: dict[str, Any], path: str, segments: tuple[str, ...], starred: bool) -> Iterator[Concrete]:
    """Yield the places where a missing knob would be added: in existing mappings, or in new ones."""
    parents = paths.find_parents(config, path)
    yield from ((*parent, segments[-1]) for parent in parents if segments[-1] not in paths.get(config, parent))
    if parents or starred:
        return
    for end in range(len(segments) - 2, -1, -1):
        for place in paths.find_segments(config, segments[:end]):
            if type(paths.get(config, place)) is dict and segments[end] not in paths.get(config, place):
                yield (*place, *segments[end:])
            return


def _put_with_parents(config: dict[str, Any], place: Concrete, value: Any) -> None:
    node: Any = config
    for part in place[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
    node[place[-1]] = value


def _is_whole(number: float) -> bool:
    return isinstance(number, int) or number.is_integer()


def _all_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_all_finite, value.values()))
    return all(map(_all_finite, value)) if isinstance(value, list | tuple) else True


def _as_number(value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return math.nan
    return int(value) if isinstance(value, int) else number


def _nearest_choice(choices: tuple[Any, ...], value: Any) -> Any:
    number = _as_number(value)
    numeric = [choice for choice in choices if isinstance(choice, int | float) and not isinstance(choice, bool)]
    if numeric and not math.isnan(number):
        if math.isinf(number):
            return max(numeric) if number > 0 else min(numeric)
        return min(numeric, key=lambda choice: abs(choice - number))
    texts = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(value).lower(), [text.lower() for text in texts], n=1, cutoff=0.0)
    lowered = [text.lower() for text in texts]
    return choices[lowered.index(close[0])] if close else choices[0]
