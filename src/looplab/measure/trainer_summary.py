"""`trainer_summary.json`: what the trainer itself said at the end."""

from __future__ import annotations

from pathlib import Path

from looplab.measure.json_file import JsonFile
from looplab.measure.rows import STEP_NAMES


class TrainerSummarySource(JsonFile):
    """Numbers of the file as `outer/inner`, those under `metrics` by their own names, one point each."""

    kind = "trainer_summary"

    def __init__(self, path: Path) -> None:
        super().__init__(path, "/", lambda name: name.removeprefix("metrics/"), STEP_NAMES)
