"""`trainer_state.json` of Hugging Face's Trainer: all rows that it has logged, in each checkpoint and at the end."""

from __future__ import annotations

from pathlib import Path

from looplab.measure.base import Batch
from looplab.measure.json_file import JsonFile
from looplab.measure.rows import STEP_NAMES, RowAccumulator


class TrainerStateSource(JsonFile):
    """The rows of `log_history`, each with its `step`."""

    kind = "trainer_state"

    def __init__(self, path: Path) -> None:
        super().__init__(path, "/", lambda name: name, STEP_NAMES)
        self._rows = RowAccumulator()
        self._count = 0

    def poll(self, final: bool = False, until: float | None = None) -> Batch:
        content = self._read_if_changed()
        history = content.get("log_history") if content is not None else None
        if not isinstance(history, list):
            return {}
        if len(history) < self._count:  # a new training
            self._rows.reset()
            self._count = 0
        batch: Batch = {}
        self._rows.fold_rows([row for row in history[self._count :] if isinstance(row, dict)], batch)
        self._count = len(history)
        return batch
