"""Make the executor that a study names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from looplab import plugins
from looplab.config.lab import ExecutorConfig, RayConfig, SlurmConfig, StudyConfig
from looplab.errors import LabError
from looplab.launch.base import Executor, ExecutorContext, LaunchSpec, Resources
from looplab.launch.local import LocalExecutor


def make_executor(lab: Path, study: StudyConfig) -> Executor:
    """Return a new executor for an engine of this study.

    Raises:
        LabError: The plug-in cannot be imported or does not accept its options, or the cluster cannot be reached.
    """
    config, name = study.executor, study.executor.name
    if name == "local":
        return LocalExecutor()
    if name == "slurm":
        from looplab.launch.slurm import SlurmExecutor, require_slurm

        require_slurm()
        return SlurmExecutor(ExecutorContext(lab, study.name), config.slurm, config.environment)
    if name == "ray":
        from looplab.launch.ray import RayExecutor

        needs = study.resources
        resources = Resources(needs.devices, needs.cores, needs.memory_mb)
        return RayExecutor(ExecutorContext(lab, study.name), config.ray or RayConfig(), resources, config.environment)
    options = config.options if config.plugin == name else {}
    executor: Executor = plugins.make("executors", name, ExecutorContext(lab, study.name), **options)
    return executor


def check_executor(config: ExecutorConfig) -> None:
    """Raise LabError if the executor of a study cannot be used from here; nothing is connected or started."""
    if config.name == "slurm":
        from looplab.launch.slurm import require_slurm

        require_slurm()
    elif config.name == "ray":
        if find_spec("ray") is None:
            raise LabError("the executor ray needs Ray", hint="pip install 'looplab[ray]'")
        from looplab.launch.ray import require_listener

        require_listener((config.ray or RayConfig()).address)


def needs_shared_disk(config: ExecutorConfig) -> bool:
    """Return whether the nodes of an executor must see the folder of the lab."""
    return config.name == "slurm" or (config.name == "ray" and (config.ray is None or config.ray.folder is None))


def script_of(config: ExecutorConfig, spec: LaunchSpec) -> str | None:
    """Return the script that the scheduler of an executor would get for a run; None: it uses none."""
    if config.name == "slurm":
        from looplab.launch.slurm import batch_script, job_key

        record_dir = spec.record_dir or spec.run_dir
        return batch_script(config.slurm or SlurmConfig(), [spec], job_key([record_dir], spec.attempt))
    return None


def remote_limit(config: ExecutorConfig) -> int | None:
    """Return how many runs an executor that chooses the places itself may have at a time; None: the places are ours."""
    if config.name == "slurm":
        return (config.slurm or SlurmConfig()).jobs
    if config.name == "ray":
        return (config.ray or RayConfig()).slots
    return None
