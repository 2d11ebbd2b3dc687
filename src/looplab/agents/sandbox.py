"""How an agent is confined to its folder: by the kernel (Landlock), by its own sandbox, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from looplab.agents.adapters import find_adapter
from looplab.agents.base import AgentSpec
from looplab.agents.confine import COMPLETE, landlock_version
from looplab.errors import LabError
from looplab.untrusted import real_path

SANDBOX_ARGUMENTS = ("-C", "--cd", "--add-dir", "-p", "--profile", "-s", "--sandbox", "--full-auto")
SANDBOX_SETTINGS = ("sandbox", "permission", "writable")


@dataclass(frozen=True, slots=True)
class Confinement:
    """How an agent is confined."""

    by: Literal["kernel", "own", "none"]
    """kernel: Landlock, set up by looplab; own: the sandbox of its program."""
    warning: str = ""
    """What the user must know; empty if the agent can change only its folders."""

    @property
    def is_complete(self) -> bool:
        """Whether the agent cannot change anything outside its folders."""
        return self.by != "none" and not self.warning


def confinement_of(spec: AgentSpec) -> Confinement:
    """Return how this agent is confined on this machine."""
    if spec.dangerous:
        why = "DANGEROUS: the agent runs without a sandbox and can do anything that this user can do"
        return Confinement("none", f"{why} (`dangerous: true`)")
    adapter = find_adapter(spec.cli)
    if adapter.confines_itself or spec.confines_itself:
        changed = [arg for arg in (*spec.extra_args, *spec.command[1:]) if _changes_sandbox(arg)]
        if not changed:
            return Confinement("own")
        what = f"the sandbox of {spec.cli} is changed by {changed[0]!r}"
        return Confinement("own", f"{what}: the agent may be able to write outside its folder")
    version = landlock_version()
    if version >= COMPLETE:
        return Confinement("kernel")
    if version:
        return Confinement("kernel", f"this kernel has Landlock {version}, which cannot stop the agent from truncating "
                                     "files outside its folder (Linux 6.2 can)")  # fmt: skip
    limited = adapter.asks_permission(spec)
    what = "only its own permissions restrict it" if limited else "it can change any of your files"
    return Confinement("none", f"the kernel has no Landlock, so the agent ({spec.cli}) is NOT confined: {what}")


def _changes_sandbox(arg: str) -> bool:
    name = arg.partition("=")[0]
    return name in SANDBOX_ARGUMENTS or any(word in arg for word in SANDBOX_SETTINGS)


def writable_folders(spec: AgentSpec, cwd: Path) -> list[Path]:
    """Return the folders that the agent's settings name, as full paths.

    Raises:
        LabError: A folder does not exist.
    """
    folders = [real_path(cwd / Path(name).expanduser()) for name in spec.writable]
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"`writable` names {folder}, which is not a folder", hint="see `writable`")
    return folders
