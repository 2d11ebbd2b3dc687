"""Checks data against a pydantic model. Its mistakes become one LabError with file, line and the nearest name."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from looplab.config.files import Document
from looplab.errors import LabError

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value of a document."""
MAX_LISTED = 12
"""Maximum number of keys that the message about an unknown key lists."""


class Section(BaseModel):
    """Base of all sections of lab files: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, defer_build=True)
    SYNONYMS: ClassVar[Mapping[str, str]] = {}
    """Keys that people write by mistake, and the key that they mean."""


M = TypeVar("M", bound=BaseModel)


def check_section(
    model: type[M],
    data: Any,
    document: Document | None = None,
    *,
    at: Place = (),
    label: str = "",
    folder: Path | None = None,
    draft: bool = False,
) -> M:
    """Return the data as a section.

    Args:
        model: Class of the section.
        data: Plain data.
        document: File of the data; None: it is not in a file.
        at: Place of the data in the file.
        label: Text before the message, such as `rule 1: `.
        folder: Folder that relative paths must stay in; None: the folder of the file.
        draft: Whether the objective may still be missing where it will be needed.

    Raises:
        LabError: Something is wrong; names all mistakes and their lines.
    """
    file = document.path if document is not None else None
    try:
        return model.model_validate(data, context={"folder": folder or (file.parent if file else None), "draft": draft})
    except ValidationError as error:
        found: dict[Place, str] = {}
        for problem in error.errors():
            where = tuple(_keys_of_loc(problem["loc"]))
            if where not in found:  # each member of a union reports its own error: keep the first
                found[where] = _describe_problem(model, problem, where)
        (first, line), *others = [(text, line_of(document, at, where)) for where, text in found.items()]
        more = [f"; line {n}: {text}" if n not in (None, line) else f"; {text}" for text, n in others]
        raise LabError(label + first + "".join(more), file=file, line=line) from None
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # A value of a type that no check expects.
        raise LabError(f"{label}a value cannot be used: {error}", file=file, line=line_of(document, at, ())) from None


def line_of(document: Document | None, at: Place, where: Place) -> int | None:
    """Return the line of the deepest key of `where` that exists in the file.

    Looks below `at`, then at the top level, where the studies of a lab file have their common keys; falls back to the
    line of `at`.
    """
    if document is None:
        return None
    for start in (at, ()):
        for end in range(len(where), 0, -1):
            line = document.line_of((*start, *where[:end]))
            if line is not None:
                return line
    return document.line_of(at) if at else None


def _keys_of_loc(loc: Sequence[str | int]) -> Iterator[str | int]:
    """Yield the keys of a pydantic location without the types between them (`list[int]`, `function-after[…]`)."""
    for part in loc:
        if isinstance(part, int) or not re.fullmatch(r"[a-z-]+\[.*\]|int|float|str|list|function-\w+", part, re.DOTALL):
            yield part


_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} entry",
}


def _describe_problem(model: type[BaseModel], problem: Mapping[str, Any], where: Place) -> str:
    key = ".".join(str(part) for part in where)
    kind, value = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r}" + _suggest_key(model, where)
    if kind == "missing":
        return f"{key!r} is missing"
    if kind in _EXPECTED:
        message = f"takes {_EXPECTED[kind].format(**problem.get('ctx', {}))}, not {reprlib.repr(value)}"
        if kind == "literal_error":
            message += suggest(str(value), re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
        if kind == "string_type" and value is not None:
            message += "; put it in quotes" if not isinstance(value, dict) else ', as in "{config}" with its quotes'
        return f"{key} {message}" if key else message
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def _suggest_key(model: type[BaseModel], where: Place) -> str:
    models = _models_at(model, where[:-1])
    known = list(dict.fromkeys(field.alias or name for m in models for name, field in m.model_fields.items()))
    unknown = str(where[-1])
    meant = [m.SYNONYMS[unknown] for m in models if issubclass(m, Section) and unknown in m.SYNONYMS]
    listed = f"; known: {', '.join(known)}" if 0 < len(known) <= MAX_LISTED else ""
    return f", did you mean {meant[0]!r}?" if meant else suggest(unknown, known) or listed


def suggest(word: str, known: Sequence[str]) -> str:
    """Return `, did you mean 'x'?` with the most similar of the known words; empty if none is similar."""
    near = difflib.get_close_matches(word, known, 1)
    return f", did you mean {near[0]!r}?" if near else ""


def _models_at(annotation: Any, where: Place) -> list[type[BaseModel]]:
    """Return the models that a value at this place of a type may have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = [field for name, field in annotation.model_fields.items() if where[:1] in ((name,), (field.alias,))]
        return [m for field in fields for m in _models_at(field.annotation, where[1:])] if where else [annotation]
    rest = where[1:] if get_origin(annotation) in (dict, list) else where
    return [m for inner in get_args(annotation) for m in _models_at(inner, rest)]
