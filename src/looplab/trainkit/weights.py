"""Strict loading of weights that ignores the prefixes of wrappers.

`torch.compile` adds `_orig_mod.` to every name, DistributedDataParallel `module.`. Both can occur anywhere in a name,
because submodules can be wrapped too. Names that differ only in these prefixes match.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from looplab.errors import LabError

_KINDS = ("missing", "unexpected", "shape")
_SHOWN = 8
"""Differences that an error message lists; the rest are counted."""


def clean(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the names of the unwrapped module: without `_orig_mod.` anywhere, and without a leading
    `module.` if all names have it."""
    names = {key: _uncompiled(key) for key in state}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    if len(set(names.values())) != len(names):
        raise LabError("two weights have the same name without _orig_mod. and module.")
    return {names[key]: value for key, value in state.items()}


def load_into(
    module: Any, state: Mapping[str, Any], allow: str | Collection[str] = (), source: object = None
) -> list[str]:
    """Load a state dict into a torch module; either may come from a compiled or wrapped module.

    Args:
        module: Unchanged if the weights do not fit.
        state: The weights.
        allow: Differences to accept: "missing" (only in the module), "unexpected" (only in the weights), "shape", or
            "partial" for all three. Weights that differ keep their value in the module.
        source: File to name in the error message.

    Returns:
        One line for each accepted difference.

    Raises:
        LabError: There are differences that `allow` does not accept. The message lists them.
    """
    allowed = {allow} if isinstance(allow, str) else set(allow)
    if unknown := allowed - {*_KINDS, "partial"}:
        raise LabError(f"allow takes missing, unexpected, shape or partial, not {', '.join(sorted(unknown))}")
    merged = module.state_dict()
    own, given = _match_names(merged, state)
    differences = []
    rejected = False
    for name in sorted({*own, *given}):
        here, there = own.get(name), given.get(name)
        ours, theirs = _shape(merged, here), _shape(state, there)
        if here is not None and there is not None and ours == theirs:
            merged[here] = state[there]
            continue
        kind = "missing" if there is None else "unexpected" if here is None else "shape"
        differences.append(f"{name} is {theirs} in the checkpoint, {ours} in the module")
        rejected = rejected or not allowed & {kind, "partial"}
    if rejected:
        rest = len(differences) - _SHOWN
        more = f"; and {rest} more" if rest > 0 else ""
        raise LabError(
            f"the weights do not fit the module: {'; '.join(differences[:_SHOWN])}{more}",
            file=None if source is None else str(source),
            hint='use weights of this model, or load only what fits with allow="partial"',
        )
    module.load_state_dict(merged)
    return differences


def _match_names(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the keys of both sides by comparable names: without the prefixes of all wrappers, or without `_orig_mod.`
    only if that is ambiguous, or unchanged if that is ambiguous too."""
    normalizations: tuple[Callable[[str], str], ...] = (_unwrapped, _uncompiled, str)
    for normalize in normalizations:
        named = [{normalize(key): key for key in side} for side in (ours, theirs)]
        if all(len(names) == len(side) for names, side in zip(named, (ours, theirs), strict=True)):
            break
    return named[0], named[1]


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in ("_orig_mod", "module"))


def _uncompiled(key: str) -> str:
    return ".".join(part for part in key.split(".") if part != "_orig_mod")


def _shape(state: Mapping[str, Any], key: str | None) -> object:
    """Return the shape of a weight. Values without a shape (a module's extra state) all compare equal."""
    return "missing" if key is None else tuple(getattr(state[key], "shape", ("not a tensor",)))
