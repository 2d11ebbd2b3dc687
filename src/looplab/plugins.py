"""Plug-ins: what other packages add to looplab by entry points.

    [project.entry-points."looplab.sources"]
    mlflow = "looplab_mlflow:MlflowSource"

A plug-in is used where a lab file names it, and imported only then. It cannot replace what looplab itself provides.
`docs/extend.md` has the contract of each group.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from looplab.errors import LabError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PREFIX = "looplab."


_registered: dict[str, dict[str, Any]] = {}
"""Plug-ins of this process, by group and name."""


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=PREFIX + group)}


def names(group: str) -> list[str]:
    """Return the names of the available plug-ins of a group, such as `sources`."""
    return sorted({*_entry_points(group), *_registered.get(group, ())})


def register(group: str, name: str, plugin: Any) -> None:
    """Make a plug-in available in this process without installing a package, for tests and notebooks.

    The command line, and engines in other processes, do not know it.
    """
    _registered.setdefault(group, {})[name] = plugin


def make(group: str, name: str, *args: Any, **options: Any) -> Any:
    """Import a plug-in and call it.

    Args:
        args: What looplab passes to every plug-in of the group.
        options: The user's options from the lab file.

    Raises:
        LabError: It cannot be imported, or raises; usually because it does not accept its options.
    """
    factory = load(group, name)
    try:
        return factory(*args, **options)
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        shown = ", ".join(options) or "none"
        raise LabError(
            f"the plug-in {name!r} ({PREFIX}{group}) cannot be used: {type(error).__name__}: {error}",
            hint=f"check its options in the lab file (given: {shown})",
        ) from error


def load(group: str, name: str) -> Any:
    """Import a plug-in.

    Raises:
        LabError: There is none of this name, or it cannot be imported.
    """
    if name in _registered.get(group, ()):
        return _registered[group][name]
    entry = _entry_points(group).get(name)
    if entry is None:
        raise LabError(f"no plug-in {name!r} is installed for {PREFIX}{group}")
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever the package does when it is imported
        package = entry.dist.name if entry.dist is not None else entry.value
        raise LabError(
            f"the plug-in {name!r} of {package} cannot be imported: {type(error).__name__}: {error}",
            hint="update or uninstall the package",
        ) from error
