r"""Dotted paths into configs: `train.lr`, `features.3.weight`, `features[3].weight`, `features.*.weight`.

A path is text, split at its dots; `\` escapes the next character, and `*` matches every child. Where a dict lacks the
key of one segment, segments joined by dots are tried, shortest first, so `observation.state.shape` also finds the key
`"observation.state"`. A concrete path is the tuple of keys and indices of one place in a config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

Concrete = tuple[str | int, ...]
"""Keys and list indices from the root of a config to one place in it."""


class _Any(str):
    """The wildcard segment `*`; a plain `"*"` is a key of that name."""

    __slots__ = ()


_ANY = _Any("*")
_TOKEN = re.compile(r"\\(?P<escaped>.)|\[(?P<index>\d+|\*)\](?=[.\[]|\Z)|(?P<dot>\.)|(?P<char>.)", re.DOTALL)
_EXACT = frozenset({str, int, bool, type(None)})
_SPECIAL = re.compile(r"[\\.\[=]")  # `=` is escaped so that a path can be part of an edit


@lru_cache(maxsize=4096)
def parse(path: str) -> tuple[str, ...]:
    """Return the segments of a path. A wildcard `*` differs from an escaped `*` only by its type."""
    if "\\" not in path and "[" not in path:
        return tuple(_ANY if part == "*" else part for part in path.split("."))
    segments: list[str] = []
    word = ""
    literal = False  # this segment has an escaped character
    open_ = True  # inside a segment; False right after `[3]`
    for token in _TOKEN.finditer(path):
        if (index := token["index"]) is not None:
            if open_ and (word or literal):
                segments.append(word)
            segments.append(_ANY if index == "*" else index)
            word, literal, open_ = "", False, False
        elif token["dot"]:
            if open_:
                segments.append(_ANY if word == "*" and not literal else word)
            word, literal, open_ = "", False, True
        elif (escaped := token["escaped"]) is not None:
            word, literal = word + escaped, True
        else:
            word += token["char"]
    if open_:
        segments.append(_ANY if word == "*" and not literal else word)
    return tuple(segments)


def show(concrete: Concrete) -> str:
    """Return the path as text that `find` resolves to the same place."""
    return ".".join(map(_show_part, concrete))


def _show_part(part: str | int) -> str:
    text = str(part)
    if text.isidentifier():  # most keys: nothing to escape
        return text
    return r"\*" if text == "*" else _SPECIAL.sub(r"\\\g<0>", text)


def is_wildcard(segment: str) -> bool:
    """Return whether a segment from `parse` matches every child."""
    return isinstance(segment, _Any)


def child(node: Any, text: str) -> str | int | None:
    """Return the key or index of the child of `node` named `text`, or None."""
    if isinstance(node, dict):
        if text in node:
            return text
        number = _parse_index(text)  # YAML allows numbers as keys
        return number if number is not None and number in node else None
    if isinstance(node, list):
        number = _parse_index(text)
        return number if number is not None and number < len(node) else None
    return None


def _parse_index(text: str) -> int | None:
    if text.isascii() and text.isdigit() and len(text) < 19 and (text == "0" or text[0] != "0"):
        return int(text)
    return None


def find(config: Any, path: str) -> list[Concrete]:
    """Return every existing place that matches the path, in the order of the config."""
    return find_segments(config, parse(path))


def find_segments(config: Any, segments: tuple[str, ...]) -> list[Concrete]:
    """Like `find`, for a path that is already split."""
    return _find(config, segments, 0, ())


def _find(node: Any, segments: tuple[str, ...], at: int, trail: Concrete) -> list[Concrete]:
    if at == len(segments):
        return [trail]
    if isinstance(segments[at], _Any):
        return [found for key in _keys(node) for found in _find(node[key], segments, at + 1, (*trail, key))]
    last = len(segments) if isinstance(node, dict) else at + 1
    for end in range(at + 1, last + 1):
        if isinstance(segments[end - 1], _Any):
            break
        key = child(node, ".".join(segments[at:end]))
        if key is not None and (found := _find(node[key], segments, end, (*trail, key))):
            return found
    return []


def _keys(node: Any) -> Iterable[str | int]:
    if isinstance(node, dict):
        return node
    return range(len(node)) if isinstance(node, list) else ()


def find_parents(config: Any, path: str) -> list[Concrete]:
    """Return the existing dicts in which the last segment of the path would be a new key; empty if it is `*`."""
    segments = parse(path)
    if isinstance(segments[-1], _Any):
        return []
    return [place for place in find_segments(config, segments[:-1]) if isinstance(get(config, place), dict)]


def get(config: Any, concrete: Concrete) -> Any:
    """Return the value at a place; raise KeyError or IndexError if it does not exist."""
    for part in concrete:
        config = config[part]
    return config


def has(config: Any, concrete: Concrete) -> bool:
    """Return whether a place exists."""
    node = config
    for part in concrete:
        if isinstance(node, dict):
            if part not in node:
                return False
        elif not (isinstance(node, list) and isinstance(part, int) and 0 <= part < len(node)):
            return False
        node = get(node, (part,))
    return True


def set_(config: Any, concrete: Concrete, value: Any) -> None:
    """Set the value of a place whose parent exists."""
    get(config, concrete[:-1])[concrete[-1]] = value


def delete(config: Any, concrete: Concrete) -> None:
    """Remove a place; later items of a list move up by one."""
    del get(config, concrete[:-1])[concrete[-1]]


def leaves(config: Any) -> Iterator[tuple[Concrete, Any]]:
    """Yield every scalar with its place; an empty dict or list below the root is a leaf, too."""
    if isinstance(config, dict | list):
        yield from _leaves(config, ())


def _leaves(node: dict[str, Any] | list[Any], trail: Concrete) -> Iterator[tuple[Concrete, Any]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list) and value:
            yield from _leaves(value, (*trail, key))
        else:
            yield (*trail, key), value


def flatten(config: Any) -> dict[str, Any]:
    """Return the leaves by dotted path."""
    return {show(place): value for place, value in leaves(config)}


def same(a: Any, b: Any) -> bool:
    """Return whether config data is equal: 1, 1.0 and true differ; NaN equals NaN; the order of keys is ignored."""
    if type(a) is type(b) and type(a) in _EXACT:
        return bool(a == b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, float) and isinstance(b, float) and (a == b or (a != a and b != b))
    return isinstance(a, bool) is isinstance(b, bool) and bool(a == b)


def diff(old: Any, new: Any) -> dict[str, dict[str, Any]]:
    """Return the changed leaves as `{"old": …, "new": …}`; a leaf of only one config has only that side."""
    changes: dict[str, dict[str, Any]] = {}
    if _diff_same_shape(old, new, (), changes):
        return changes
    changes = {}
    before = dict(leaves(old))
    after = dict(leaves(new))
    for place, value in before.items():
        if place not in after:
            changes[show(place)] = {"old": value}
        elif not same(value, after[place]):
            changes[show(place)] = {"old": value, "new": after[place]}
    for place, value in after.items():
        if place not in before:
            # A list index and a dict key with the same digits have the same text.
            changes.setdefault(show(place), {})["new"] = value
    return changes


def _diff_same_shape(old: Any, new: Any, trail: Concrete, changes: dict[str, dict[str, Any]]) -> bool:
    """Collect the changed leaves of two configs of the same shape, skipping shared objects.

    Returns:
        False if the shapes differ.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            return False
        pairs = [(key, value, new[key]) for key, value in old.items() if value is not new[key]]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(index, value, new[index]) for index, value in enumerate(old) if value is not new[index]]
    else:
        return False
    for key, before, after in pairs:
        if (before and isinstance(before, dict | list)) or (after and isinstance(after, dict | list)):
            if not _diff_same_shape(before, after, (*trail, key), changes):
                return False
        elif not same(before, after):
            changes[show((*trail, key))] = {"old": before, "new": after}
    return True


def matches(pattern: str, concrete: Concrete) -> bool:
    """Return whether a pattern matches this place: `*` is one key or index, joined segments are a key with dots."""
    return _matches(parse(pattern), concrete)


def _matches(segments: tuple[str, ...], concrete: Concrete) -> bool:
    if not concrete or not segments:
        return not concrete and not segments
    if isinstance(segments[0], _Any):
        return _matches(segments[1:], concrete[1:])
    text = str(concrete[0])
    for end in range(1, len(segments) + 1):
        if isinstance(segments[end - 1], _Any):
            return False
        if ".".join(segments[:end]) == text and _matches(segments[end:], concrete[1:]):
            return True
    return False


def nearest(config: Any, path: str, n: int = 3) -> list[str]:
    """Return existing paths that are most similar to a missing one, best first.

    The right name in the wrong place counts as similar, too.
    """
    from difflib import SequenceMatcher

    segments = parse(path)
    name = segments[-1]
    starred = any(map(is_wildcard, segments))
    whole = SequenceMatcher(b=path.lower(), autojunk=False)
    tail = SequenceMatcher(b=name.lower(), autojunk=False)
    scores: dict[str, float] = {}
    for place in _places(config, ()):
        # For a path with `*`, one path represents all items of a list.
        text = ".".join("*" if starred and isinstance(part, int) else _show_part(part) for part in place)
        if text in scores:
            continue
        whole.set_seq1(text.lower())
        tail.set_seq1(str(place[-1]).lower())
        by_path = whole.ratio()
        by_name = 0.0 if is_wildcard(name) else tail.ratio()
        scores[text] = max(by_path, 0.9 * by_name + 0.1 * by_path)
    close = [text for text, score in scores.items() if score >= 0.6]
    return sorted(close, key=lambda text: -scores[text])[:n]


def _places(node: Any, trail: Concrete) -> Iterator[Concrete]:
    if trail:
        yield trail
    for key in _keys(node):
        yield from _places(node[key], (*trail, key))
