"""Make the executor that a study names."""

from __future__ import annotations

from pathlib import Path

from looplab import plugins
from looplab.config.lab import StudyConfig
from looplab.launch.base import Executor, ExecutorContext
from looplab.launch.local import LocalExecutor


def make_executor(lab: Path, study: StudyConfig) -> Executor:
    """Return a new executor for an engine of this study.

    Raises:
        LabError: The plug-in cannot be imported, or does not accept its options.
    """
    config = study.executor
    if config.plugin is None:
        return LocalExecutor()
    executor: Executor = plugins.make("executors", config.plugin, ExecutorContext(lab, study.name), **config.options)
    return executor
