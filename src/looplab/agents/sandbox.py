"""What keeps an agent from writing outside its folder: the kernel (Landlock), the agent's own sandbox, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from looplab.agents.base import AgentSpec
from looplab.agents.confine import COMPLETE, landlock_version
from looplab.errors import LabError
from looplab.untrusted import real_path

SANDBOX_ARGUMENTS = ("-C", "--cd", "--add-dir", "-p", "--profile", "-s", "--sandbox", "--full-auto")
SANDBOX_SETTINGS = ("sandbox", "permission", "writable")


@dataclass(frozen=True, slots=True)
class Confinement:
    """What holds an agent."""

    by: Literal["kernel", "own", "none"]
    """kernel: Landlock, set up by looplab; own: the sandbox of codex."""
    warning: str = ""
    """What a person must know about it; empty where nothing but its folders can be changed."""

    @property
    def is_complete(self) -> bool:
        """Whether a change outside of its folders cannot be the agent's."""
        return self.by != "none" and not self.warning


def confinement_of(spec: AgentSpec) -> Confinement:
    """Return what holds this agent on this machine."""
    if spec.dangerous:
        why = "DANGEROUS: the agent runs without a sandbox and may do anything that this user may do"
        return Confinement("none", f"{why} (`dangerous: true`)")
    if spec.cli == "codex" or spec.confines_itself:
        changed = [arg for arg in (*spec.extra_args, *spec.command[1:]) if _changes_sandbox(arg)]
        if not changed:
            return Confinement("own")
        return Confinement("own", f"codex's own sandbox is changed by {changed[0]!r}: the agent may be able to write "
                                  "outside its folder")  # fmt: skip
    version = landlock_version()
    if version >= COMPLETE:
        return Confinement("kernel")
    if version:
        return Confinement("kernel", f"this kernel has Landlock {version}, which does not keep the agent from emptying "
                                     "files outside its folder (Linux 6.2 does)")  # fmt: skip
    limited = spec.cli == "claude" and "Bash" not in spec.allowed_tools
    what = "its own permissions are all that holds it" if limited else "it can change any file of yours"
    return Confinement("none", f"without Landlock in the kernel the agent ({spec.cli}) is NOT confined: {what}")


def _changes_sandbox(arg: str) -> bool:
    name = arg.partition("=")[0]
    return name in SANDBOX_ARGUMENTS or any(word in arg for word in SANDBOX_SETTINGS)


def state_of(spec: AgentSpec, env: Mapping[str, str]) -> list[Path]:
    """Return the folders and files in which the agent's program keeps sessions and credentials; missing folders are
    made, as it would do itself."""
    if spec.cli != "claude" or not env.get("HOME"):
        return []
    folder = Path(env.get("CLAUDE_CONFIG_DIR") or Path(env["HOME"], ".claude"))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return []
    settings = Path(env["HOME"], ".claude.json")
    return [folder, settings] if settings.is_file() else [folder]


def writable_folders(spec: AgentSpec, cwd: Path) -> list[Path]:
    """Return the folders that the agent's settings name, as full paths.

    Raises:
        LabError: There is no such folder.
    """
    folders = [real_path(cwd / Path(name).expanduser()) for name in spec.writable]
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"the agent is to write to {folder}, which is not a folder", hint="see `writable`")
    return folders
