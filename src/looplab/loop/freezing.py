"""The code of runs that wait in a queue: which frozen tree a run gets, and which trees are still needed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.runs import folder
from looplab.runs.capsule import STALE_S, Capsules
from looplab.runs.frozen import FrozenCode, FrozenTree

TRIES = 3
ASK_S = 20.0
ASK_PATH = "import json, sys; print(json.dumps(sys.path[1:]))"


@dataclass(frozen=True, slots=True)
class FrozenState:
    """A state of the code."""

    code: Mapping[str, Any]
    """The `code` entry of the capsule, with the name of the tree as `frozen`."""
    tree: FrozenTree


class Freezer:
    """Freezes the code of one study.

    Args:
        lab: The lab.
        outputs: The folder of the study.
        capsules: Tells whether the code has changed.
    """

    def __init__(self, lab: Path, outputs: Path, capsules: Capsules) -> None:
        self._outputs = outputs
        self._capsules = capsules
        self._code = FrozenCode(lab, outputs)
        self._known: dict[tuple[Any, ...], FrozenState] = {}
        self._tree_of: dict[str, str | None] = {}  # run → name of its tree
        self._paths: dict[str, list[str]] = {}  # interpreter → its import path

    def current(self) -> FrozenState:
        """Return the state of the code now; it is frozen if it is new.

        Raises:
            LabError: It cannot be frozen.
        """
        self._capsules.refresh(STALE_S)
        state = self._known.get(self._key())
        if state is not None and state.tree.path.is_dir():
            self._code.link(state.tree)
            return state
        for _ in range(TRIES):
            self._capsules.refresh(0.0)
            key, code = self._key(), self._capsules.current
            tree = self._code.freeze(self._capsules.code_names())
            self._capsules.refresh(0.0)
            if self._key() == key:  # else it changed while it was copied
                self._known = {key: FrozenState({**code, "frozen": tree.name}, tree)}
                return self._known[key]
        raise LabError("the code changed while it was being copied", hint="wait, or `executor: {freeze: false}`")

    def of_run(self, run_id: str, attempt: int) -> FrozenState:
        """Return the state that an attempt at a run begins with: the current one, or that of its attempt before.

        Raises:
            LabError: It cannot be frozen.
        """
        state = self._earlier(run_id) if attempt > 1 else None
        state = state or self.current()
        self._tree_of[run_id] = state.tree.name
        return state

    def _earlier(self, run_id: str) -> FrozenState | None:
        code = folder.read_capsule(self._outputs / run_id).get("code")
        tree = self._code.open(code.get("frozen")) if isinstance(code, dict) else None
        return FrozenState(code, tree) if tree is not None and isinstance(code, dict) else None

    def environment(self, tree: FrozenTree, program: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that let a trainer import the frozen code where it would import that of the lab.

        Args:
            tree: Its code.
            program: Its executable.
            env: Its variables, in addition to the engine's.
        """
        before = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        given = [entry for entry in before.split(os.pathsep) if entry]
        moved = tree.moved_search_path(given)
        own = self._search_path(program)
        moved += [new for old, new in zip(own, tree.moved_search_path(own), strict=True) if old != new]
        return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(moved))} if moved != given else {}

    def _search_path(self, program: str) -> list[str]:
        """Return where an interpreter imports from without PYTHONPATH, as editable installations have it."""
        if program not in self._paths:
            self._paths[program] = []
            if Path(program).name.startswith("python"):
                env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
                    asked = subprocess.run(
                        [program, "-c", ASK_PATH], cwd="/", env=env, capture_output=True, timeout=ASK_S, check=False
                    )
                    self._paths[program] = [str(entry) for entry in json.loads(asked.stdout)]
        return self._paths[program]

    def prune(self, open_runs: Iterable[str]) -> list[str]:
        """Remove the trees that no open run needs, except the current one while there are open runs.

        Returns:
            Files that runs have written into trees that are over; these are kept.
        """
        runs = list(open_runs)
        for run_id in runs:
            if run_id not in self._tree_of:
                code = folder.read_capsule(self._outputs / run_id).get("code")
                name = code.get("frozen") if isinstance(code, dict) else None
                self._tree_of[run_id] = name if isinstance(name, str) else None
        self._tree_of = {run_id: self._tree_of[run_id] for run_id in runs}
        needed = {name for name in self._tree_of.values() if name is not None}
        if runs:
            needed |= {state.tree.name for state in self._known.values()}
        return self._code.prune(needed)

    @property
    def has_old(self) -> bool:
        """Whether there is more than the current tree."""
        return self._code.count > 1

    def _key(self) -> tuple[Any, ...]:
        code = self._capsules.current
        return tuple(code.get(name) for name in ("commit", "patch", "files", "why"))
