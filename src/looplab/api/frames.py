"""`looplab.load`: a lab, or one study of it, as pandas frames, for notebooks and scripts."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from looplab.errors import LabError

if TYPE_CHECKING:
    import pandas as pd

    from looplab.config.lab import LabConfig


class LabFrames:
    """The tables of a lab as they stood at one moment, each made into a frame when it is first asked for."""

    def __init__(self, lab: LabConfig, study: str | None) -> None:
        from looplab.report.tables import connect

        self.folder = lab.folder
        self.study = study
        self._connection = connect(lab, study=study)

    def _frame(self, view: str) -> pd.DataFrame:
        frame: pd.DataFrame = self._connection.sql(f"FROM {view}").df()
        return frame

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row for each run: where it comes from, how it ended, its objective."""
        return self._frame("runs")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each measured point: study, run, metric, step, value."""
        return self._frame("metrics")

    @cached_property
    def proposals(self) -> pd.DataFrame:
        """A row for each proposal and its outcome."""
        return self._frame("proposals")

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        """A row for each verdict with its evidence."""
        return self._frame("verdicts")

    @cached_property
    def knobs(self) -> pd.DataFrame:
        """A row for each run and knob: key, value as text, and as a number where it is one."""
        return self._frame("knobs")

    @cached_property
    def events(self) -> pd.DataFrame:
        """The record: a row for each thing that happened."""
        return self._frame("events")

    @cached_property
    def stages(self) -> pd.DataFrame:
        """A row for each attempt at a stage of a pipeline."""
        return self._frame("stages")

    @cached_property
    def suites(self) -> pd.DataFrame:
        """A row for each suite, as its last call left it."""
        return self._frame("suites")

    @cached_property
    def cases(self) -> pd.DataFrame:
        """A row for each case that was run."""
        return self._frame("cases")

    @cached_property
    def versions(self) -> pd.DataFrame:
        """A row for each attempt at a version of the code."""
        return self._frame("versions")

    def __repr__(self) -> str:
        return f"<looplab {self.folder}" + (f", study {self.study}>" if self.study else ">")


def load(study: str | None = None, lab: Path | str | None = None) -> LabFrames:
    """Load the lab in this folder, or the one that the working directory lies in; all studies, or one."""
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise LabError("looplab.load needs pandas", hint="pip install pandas") from None
    from looplab.config.lab import find_lab, load_lab

    return LabFrames(load_lab(find_lab(Path(lab) if lab is not None else Path.cwd())), study)
