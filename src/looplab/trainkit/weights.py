"""Weights into a module, whatever it was wrapped in when they were saved, and never silently only some of them.

`torch.compile(module)` puts `_orig_mod.` before every name, DistributedDataParallel `module.`; both may be anywhere in
a name, because a part of a model can be wrapped too. What is the same but for these fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from looplab.errors import LabError

_KINDS = ("missing", "unexpected", "shape")
_SHOWN = 8
"""Differences that a message names; the rest are counted."""


def clean(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights by the names of the bare module: without any `_orig_mod.`, and without the `module.` that all of
    them begin with."""
    names = {key: _uncompiled(key) for key in state}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    if len(set(names.values())) != len(names):
        raise LabError("two weights have the same name once _orig_mod. and module. are taken away")
    return {names[key]: value for key, value in state.items()}


def load_into(
    module: Any, state: Mapping[str, Any], allow: str | Collection[str] = (), source: object = None
) -> list[str]:
    """Put weights into a torch module, compiled or not, from one that was compiled or not; gives the differences.

    Any difference is a LabError that lists them and leaves the module as it was, unless `allow` names its kind:
    "missing" (in the weights), "unexpected" (not in the module), "shape", or "partial" for all three. `source` is the
    file that a message shall name.
    """
    allowed = {allow} if isinstance(allow, str) else set(allow)
    if unknown := allowed - {*_KINDS, "partial"}:
        raise LabError(f"allow takes missing, unexpected, shape or partial, not {', '.join(sorted(unknown))}")
    merged = module.state_dict()
    own, given = _matching(merged, state)
    differences = []
    refused = False
    for name in sorted({*own, *given}):
        here, there = own.get(name), given.get(name)
        ours, theirs = _form(merged, here), _form(state, there)
        if here is not None and there is not None and ours == theirs:
            merged[here] = state[there]
            continue
        kind = "missing" if there is None else "unexpected" if here is None else "shape"
        differences.append(f"{name} is {theirs} in it, {ours} here")
        refused = refused or not allowed & {kind, "partial"}
    if refused:
        rest = len(differences) - _SHOWN
        more = f"; and {rest} more" if rest > 0 else ""
        raise LabError(
            f"the weights do not fit the network: {'; '.join(differences[:_SHOWN])}{more}",
            file=None if source is None else str(source),
            hint='name weights of this network, or take what fits with allow="partial"',
        )
    module.load_state_dict(merged)
    return differences


def _matching(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Both sides' keys by a name they can be compared by: without any wrapper's part where that stays unambiguous, else
    without the compiler's alone, else as they are."""
    ways: tuple[Callable[[str], str], ...] = (_bare, _uncompiled, str)
    for way in ways:
        named = [{way(key): key for key in side} for side in (ours, theirs)]
        if all(len(names) == len(side) for names, side in zip(named, (ours, theirs), strict=True)):
            break
    return named[0], named[1]


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in ("_orig_mod", "module"))


def _uncompiled(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def _form(state: Mapping[str, Any], key: str | None) -> object:
    """The shape; a thing without a shape (a module's extra state) fits any other such thing."""
    return "missing" if key is None else tuple(getattr(state[key], "shape", ("no tensor",)))
