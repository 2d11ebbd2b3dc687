"""Files of W&B clients before 0.10: `files/wandb-history.jsonl`, or else `files/wandb-summary.json`."""

from __future__ import annotations

from pathlib import Path

from looplab.measure.json_file import JsonFile
from looplab.measure.jsonl import JsonlSource
from looplab.measure.rows import RowAccumulator


class WandbHistorySource(JsonlSource):
    """Rows with `_step`; nested values are named `outer.inner`."""

    kind = "wandb_history"

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, rows=RowAccumulator(".", step_names=("_step", "train/optimization step", "optimization step"))
        )


class WandbSummarySource(JsonFile):
    """The last value of each metric: one point each, without a curve."""

    kind = "wandb_summary"

    def __init__(self, path: Path) -> None:
        super().__init__(path, ".", lambda name: name, ("_step",))
