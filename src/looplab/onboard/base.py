"""Data types: a script, its settings, and how they reach it (`Interface`); the contract of readers.

A reader knows one way in which scripts take settings (argparse, Hydra, globals, …). It looks at the source text first
and never runs the script by itself: `Script.introspect` does, with `--help` and under a time limit.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from looplab.onboard.introspect import Introspection, introspect
from looplab.untrusted import read_bounded

MAX_SOURCE = 4 << 20
"""Bytes of the largest source file that is read."""

Kind = Literal["int", "float", "bool", "str", "list", "unknown"]


class _Missing:
    """The type of `MISSING`."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
"""Default of a setting that must be given, or whose default is not known."""


@dataclass(frozen=True, slots=True)
class ScriptSetting:
    """One value that a script takes."""

    name: str
    """As the script's users write it, without dashes: `learning-rate`, `optimizer.lr`."""
    kind: Kind
    default: Any = MISSING
    choices: tuple[Any, ...] | None = None
    help: str = ""
    required: bool = False
    positional: bool = False
    boolean: Literal["switch", "present", "value", "empty"] | None = None
    """How a bool is written: `--x`/`--no-x`, `--x` or nothing, `--x True`, `--x True` or `--x ""`."""
    spread: bool = False
    """Whether a list is written as several words: `--layers 64 64`."""
    flag: str | None = None
    """The flag as it is written, if it is not `--<name>`."""


@dataclass(frozen=True, slots=True)
class Interface:
    """How a script takes its settings."""

    reader: str
    """`argparse`, `hydra`, …"""
    settings: tuple[ScriptSetting, ...]
    command: tuple[str, ...]
    """`launch.command` with placeholders."""
    rendering: Mapping[str, Any] = field(default_factory=dict)
    """`launch.config`; empty: looplab's defaults."""
    env: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, Any] | None = None
    """The base config if it is nested or comes from a file; None: the defaults of the settings."""
    notes: tuple[str, ...] = ()
    """What a person should know, as sentences."""


@dataclass(frozen=True)
class Script:
    """A training script and how it is called."""

    folder: Path
    """Where it is called from, and where the lab will be."""
    argv: tuple[str, ...]
    """The command: `python tools/train.py --data data`."""
    path: Path
    """The script itself."""
    python: str | None
    """The interpreter; None: not a Python script."""
    module: str | None = None
    """`python -m MODULE`."""
    arguments: tuple[str, ...] = ()
    """What follows the script in the command."""

    @cached_property
    def text(self) -> str:
        """Its source."""
        return read_bounded(self.path, MAX_SOURCE).decode("utf-8", "replace")

    @cached_property
    def tree(self) -> ast.Module | None:
        """Its syntax tree; None if it is not Python, or not valid."""
        if self.python is None:
            return None
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError):
            return None

    @cached_property
    def modules(self) -> tuple[ast.Module, ...]:
        """Its syntax tree and those of the modules of the same project that it imports, nearest first."""
        from looplab.onboard.source import project_modules

        return project_modules(self)

    @cached_property
    def imports(self) -> frozenset[str]:
        """Top-level names of the packages that it and its project's modules import."""
        from looplab.onboard.source import imported_packages

        return frozenset().union(*map(imported_packages, self.modules)) if self.modules else frozenset()

    @cached_property
    def introspection(self) -> Introspection:
        """What `--help` says; the script is started for that, once."""
        return introspect(self)

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command without what follows the script."""
        return self.argv[: len(self.argv) - len(self.arguments)]


class InterfaceReader(Protocol):
    """Knows one way in which scripts take settings (entry point group `looplab.readers`)."""

    name: str

    def read(self, script: Script) -> Interface | None:
        """Return how a script takes its settings; None if it does not take them in this way."""
        ...


def flag_rendering(settings: Sequence[ScriptSetting], *, separator: str = "space") -> dict[str, Any]:
    """Return `launch.config` for settings that are flags, and nothing that is a default anyway."""
    flags = [setting for setting in settings if not setting.positional]
    rendering: dict[str, Any] = {"as": "flags", "case": "as_written"}  # the keys are written as the flags are
    kinds = {setting.boolean for setting in flags if setting.boolean is not None}
    common = next((kind for kind in ("switch", "value", "empty", "present") if kind in kinds), "switch")
    if common != "switch":
        rendering["booleans"] = common
    present = [setting.name for setting in flags if setting.boolean == "present"]
    if present and common != "present":
        rendering["store_true"] = present
    if any(setting.spread for setting in flags):
        rendering["lists"] = "spread"
    if separator != "space":
        rendering["separator"] = separator
    return rendering
