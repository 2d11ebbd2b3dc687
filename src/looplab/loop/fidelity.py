"""What rungs and population-based training need of a lab: an objective, checkpoints, or a pruner instead."""

from __future__ import annotations

from looplab.config.lab import FIND_OBJECTIVE, PruneConfig, StudyConfig, WatchRule
from looplab.errors import LabError


def with_fidelity(study: StudyConfig) -> tuple[StudyConfig, tuple[str, ...]]:
    """Return the study with what its rungs need, and notes for people about them.

    Without checkpoints, a pruner is added: runs are stopped and never continued.

    Raises:
        LabError: Something is missing.
    """
    notes: list[str] = []
    for entry in study.proposers:
        rungs = entry.search.fidelity if entry.search is not None else None
        if entry.pbt is None and rungs is None:
            continue
        what = "pbt" if entry.pbt is not None else "fidelity"
        if study.objective is None:
            raise LabError(
                f"{what} needs an objective: name the metric to optimise",
                hint=FIND_OBJECTIVE,
            )
        if study.warm_start is not None:
            if any(rule.prune is not None for rule in study.watch):
                notes.append(f"{what} continues the runs that it stopped, but not those that a watch rule pruned")
            notes.append(
                f"{what} needs the steps of {study.objective.metric}, which the trainer logs, and continues runs from "
                f"{' or '.join(study.warm_start.checkpoint)}"
            )
            continue
        if rungs is None:
            raise LabError(
                "pbt needs checkpoints: members continue from each other's",
                hint="set in warm_start where runs save them (docs/autopilot.md)",
            )
        notes.append(
            "fidelity: runs are stopped early (asha) and never continued, since there is no warm_start that says where "
            "runs save checkpoints"
        )
        if not any(rule.prune is not None for rule in study.watch):
            prune = PruneConfig(pruner="asha", reduction_factor=rungs.reduction_factor, warmup=rungs.min or 0.0)
            study = study.model_copy(update={"watch": [*study.watch, WatchRule(prune=prune)]})
    return study, tuple(notes)
