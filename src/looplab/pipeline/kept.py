"""Outputs of a stage that are not the current ones: those it replaces, and those of an attempt that did not complete.

    <run>/previous/STAGE/ATTEMPT/   outputs of an earlier complete attempt, and its manifest (`.stage.json`)
    <run>/partial/STAGE/            outputs of the last attempt that failed, and its record (`.begun.json`)

A stage that runs again never deletes what is finished. Its outputs are moved to `previous` before it starts, and moved
back if it fails; what the failed attempt wrote is kept in `partial`, and resumed from there. All moves are renames
within the run folder. A process may be killed between any two of them: each function continues where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from looplab.pipeline.folder import RunFolder, read_record
from looplab.runs import tree

PREVIOUS, PARTIAL = "previous", "partial"
MANIFEST, BEGUN = ".stage.json", ".begun.json"


class KeptOutputs:
    """The set-aside outputs of one stage in a run folder."""

    def __init__(self, run: RunFolder, stage: str, outputs: Sequence[str]) -> None:
        self.run, self.stage = run, stage
        # An output inside another one moves with it.
        self.outputs = [name for name in outputs if not any(Path(other) in Path(name).parents for other in outputs)]

    def partial(self) -> dict[str, Any] | None:
        """Return the record of the failed attempt whose outputs are kept."""
        return read_record(self.run.path / PARTIAL / self.stage / BEGUN)

    def previous_folder(self, attempt: int) -> Path:
        """Return the folder with the outputs of an earlier attempt."""
        return self.run.path / PREVIOUS / self.stage / str(attempt)

    def set_aside(self, attempt: int) -> None:
        """Move the current outputs and their manifest, of this attempt, to `previous`."""
        for name in self.outputs:
            if not self._is_aside(attempt, name):
                self._move(name, f"{self._previous(attempt)}/{name}")
        self._move(self._manifest, f"{self._previous(attempt)}/{MANIFEST}")

    def use_partial(self) -> None:
        """Move the outputs of the failed attempt into place, to continue it."""
        for name in self.outputs:
            self._move(f"{PARTIAL}/{self.stage}/{name}", name)

    def restore(self, attempt: int, failed: dict[str, Any] | None) -> None:
        """Move the outputs of an earlier attempt back into place.

        Args:
            attempt: The earlier attempt.
            failed: Record of the attempt that did not complete; its outputs are kept as the partial ones. None: it did
                not start.
        """
        if failed is not None and self.partial() != failed:
            self.drop_partial()
            record = f"{PARTIAL}/{self.stage}/{BEGUN}"
            with tree.open_parent(self.run.path, record, create=True):
                self.run.write(record, failed)
        for name in self.outputs:
            if self._is_aside(attempt, name):
                self._move(name, f"{PARTIAL}/{self.stage}/{name}")
                self._move(f"{self._previous(attempt)}/{name}", name)
        self._move(f"{self._previous(attempt)}/{MANIFEST}", self._manifest)
        self.run.remove(self._previous(attempt))
        self.run.remove(f"stages/{self.stage}.begun.json")

    def drop_partial(self) -> None:
        self.run.remove(f"{PARTIAL}/{self.stage}")

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` earlier attempts."""
        folder = self.run.path / PREVIOUS / self.stage
        attempts = sorted((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), reverse=True)
        for attempt in attempts[keep:]:
            self.run.remove(self._previous(attempt))

    @property
    def _manifest(self) -> str:
        return f"stages/{self.stage}.json"

    def _previous(self, attempt: int) -> str:
        return f"{PREVIOUS}/{self.stage}/{attempt}"

    def _is_aside(self, attempt: int, name: str) -> bool:
        return tree.exists(self.run.path, f"{self._previous(attempt)}/{name}")

    def _move(self, name: str, target: str) -> None:
        tree.move(self.run.path, name, target)
