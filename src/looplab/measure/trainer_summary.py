"""`trainer_summary.json`: final values that the trainer itself wrote."""

from __future__ import annotations

from pathlib import Path

from looplab.measure.json_file import JsonFile
from looplab.measure.rows import STEP_NAMES


class TrainerSummarySource(JsonFile):
    """One point per number, named `outer/inner`; numbers under `metrics` keep their own names."""

    kind = "trainer_summary"

    def __init__(self, path: Path) -> None:
        super().__init__(path, "/", lambda name: name.removeprefix("metrics/"), STEP_NAMES)
