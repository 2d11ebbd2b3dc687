"""Changes of nested configs by dotted name: set, delete, move and rename, also where other parts mention the name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from looplab.config import paths
from looplab.config.edits import parse_edit
from looplab.config.files import put, take_out
from looplab.config.paths import Concrete


def set_item(node: Any, key: str, value: Any) -> None:
    node[key] = value


def set_value(data: Any, key: str, value: Any) -> None:
    """Set a dotted key, and create the tables above it."""
    *above, last = paths.parse(key)
    for part in above:
        if part not in data:
            put(data, part, {})
        data = data[part]
    put(data, last, value)


def delete(data: Any, key: str) -> None:
    found = paths.find(data, key)
    if len(found) == 1:
        take_out_place(data, found[0])


def take_out_place(data: Any, place: Concrete) -> None:
    """Delete a place, and the tables above it that become empty."""
    for depth in range(len(place), 0, -1):
        parent = paths.get(data, place[: depth - 1])
        take_out(parent, place[depth - 1])
        if parent or depth == 1:
            return


def move(data: Any, key: str, new: str) -> None:
    """Rename a dotted key of a config; within one table it keeps its position."""
    found = paths.find(data, key)
    if len(found) != 1:
        return
    place = found[0]
    target = paths.parse(new)
    if tuple(map(str, place[:-1])) == target[:-1]:
        rename_key(paths.get(data, place[:-1]), str(place[-1]), target[-1])
        return
    value = paths.get(data, place)
    take_out_place(data, place)
    set_value(data, new, value)


def rename_key(mapping: Any, old: str, new: str) -> None:
    """Rename a key of a mapping, which keeps its position and its comment."""
    if hasattr(mapping, "ca"):
        at = list(mapping).index(old)
        comment = mapping.ca.items.pop(old, None)
        value = mapping[old]
        del mapping[old]
        mapping.insert(at, new, value)
        if comment is not None:
            mapping.ca.items[new] = comment
        return
    items = [(new if key == old else key, value) for key, value in mapping.items()]
    for key in list(mapping):
        del mapping[key]
    for key, value in items:
        mapping[key] = value


def renamed(node: Any, old: str, new: str, section: str) -> Any:
    """Return a section of the lab file in which a key has its new name."""
    word = re.compile(rf"(?<![\w.`-]){re.escape(old)}(?![\w.`-])")
    quoted = f"`{new}`" if "-" in new else new

    def rename(text: str, where: tuple[str, ...]) -> str:
        if section in ("constraints", "normalise", "derive"):
            return word.sub(quoted, text.replace(f"`{old}`", quoted))
        if section == "modes":
            edit = parse_edit(text)
            return str(replace(edit, path=new)) if edit.path == old else text
        if section == "launch":
            if where[:1] == ("config",):
                return new if text == old and where[1:2] in (("store_true",), ("skip",)) else text
            return text.replace(f"{{config.{old}}}", f"{{config.{new}}}")
        return new if text == old else text

    def walk(node: Any, where: tuple[str, ...]) -> Any:
        if isinstance(node, str):
            changed = rename(str(node), where)
            return node if changed == node else changed
        if isinstance(node, dict):
            for key in list(node):
                node[key] = walk(node[key], (*where, str(key)))
            if old in node and (section == "derive" or where == ("config", "names")):
                rename_key(node, old, new)
        elif isinstance(node, list):
            for index, item in enumerate(node):
                node[index] = walk(item, where)
        return node

    return walk(node, ())
