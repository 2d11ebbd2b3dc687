"""The plan of a run: what was decided, beyond the run's own row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from looplab.config.edits import apply_edits


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted command. Its fields are the config of its run."""

    argv: tuple[str, ...]
    """The first is a path: `python`, for example, locates its packages relative to it."""
    cwd: str
    """Working directory, relative to the lab."""
    files: Mapping[str, str]
    """SHA-256 of the lab files among its arguments, by path relative to the lab."""
    timeout: float | None = None
    """Seconds that it may run; None: no limit of its own."""

    def to_dict(self) -> dict[str, Any]:
        found = {"argv": list(self.argv), "cwd": self.cwd, "files": dict(self.files), "timeout": self.timeout}
        return {key: value for key, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Job:
        """Return the job from what the ledger keeps.

        Raises:
            KeyError, TypeError: It is not a job.
        """
        return cls(tuple(kept["argv"]), kept["cwd"], dict(kept["files"]), kept.get("timeout"))

    @classmethod
    def from_edits(cls, edits: Sequence[str]) -> Job:
        """Return a job of version 0.1, which was recorded as edits of an empty config.

        Raises:
            LabError, KeyError, TypeError: It is not a job.
        """
        return cls.from_dict(apply_edits({}, edits).config)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will be. The ledger keeps it until the run has ended."""

    config: dict[str, Any]
    """The config that the trainer gets, secrets hidden; of a submitted command: the fields of `Job`."""
    edits: tuple[str, ...] = ()
    """The edits as proposed."""
    diff_parent: Mapping[str, Any] = field(default_factory=dict)
    """Changes against the parent's config, by dotted path."""
    diff_base: Mapping[str, Any] = field(default_factory=dict)
    """Changes against the base config, by dotted path."""
    notes: tuple[str, ...] = ()
    hypothesis: str = ""
    source: str | None = None
    """Where the proposal comes from, such as a line of a queue file."""
    place: str | None = None
    """A folder to run in instead of the lab: the lab as it was at an earlier time."""
    start: dict[str, Any] | None = None
    """The weights that it starts from: `run`, `path`, `sha256`."""
    job: Job | None = None
    """The submitted command; None: a training of the study."""
    extra: tuple[str, ...] | None = None
    """Arguments of the trainer beyond launch.command, without secrets; None: not recorded."""
    call_edits: tuple[str, ...] = ()
    """Edits by the flags of the call, such as --steps."""
    until: float | None = None
    """Step of the objective at which the run is stopped; None: it is trained to its end."""

    def to_dict(self) -> dict[str, Any]:
        """Return what the ledger keeps: all but the config, which it keeps by its hash."""
        found = {
            "edits": list(self.edits),
            "diff_parent": dict(self.diff_parent),
            "diff_base": dict(self.diff_base),
            "notes": list(self.notes),
            "hypothesis": self.hypothesis,
            "source": self.source,
            "place": self.place,
            "start": self.start,
            "job": None if self.job is None else self.job.to_dict(),
            "extra": None if self.extra is None else list(self.extra),
            "call_edits": list(self.call_edits) or None,
            "until": self.until,
        }
        return {key: value for key, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any], config: dict[str, Any] | None) -> RunPlan | None:
        """Return the plan from what the ledger keeps; None if its config is lost.

        Args:
            config: By the run's hash; None: unknown. Early versions kept the config in the plan.
        """
        config = kept.get("config", config)
        if config is None:
            return None
        extra, job = kept.get("extra"), kept.get("job")
        return cls(
            config=config,
            edits=tuple(kept.get("edits", ())),
            diff_parent=kept.get("diff_parent", {}),
            diff_base=kept.get("diff_base", {}),
            notes=tuple(kept.get("notes", ())),
            hypothesis=kept.get("hypothesis", ""),
            source=kept.get("source"),
            place=kept.get("place"),
            start=kept.get("start"),
            job=Job.from_dict(config if job is True else job) if job else None,  # True: version 0.1
            extra=None if extra is None else tuple(extra),
            call_edits=tuple(kept.get("call_edits") or ()),
            until=kept.get("until"),
        )
