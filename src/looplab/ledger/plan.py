"""The plan of a run: what was decided, beyond the run's own row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will be. The ledger keeps it until the run has ended."""

    config: dict[str, Any]
    """The config that the trainer gets, secrets hidden; of a submitted job: `argv`, `cwd`, `files`, `timeout`."""
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
    is_job: bool = False
    """Whether it is a submitted command rather than a training of the study."""
    extra: tuple[str, ...] | None = None
    """Arguments of the trainer beyond launch.command, without secrets; None: not recorded."""
    call_edits: tuple[str, ...] = ()
    """Edits by the flags of the call, such as --steps."""

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
            "job": self.is_job or None,
            "extra": None if self.extra is None else list(self.extra),
            "call_edits": list(self.call_edits) or None,
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
        extra = kept.get("extra")
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
            is_job=bool(kept.get("job")),
            extra=None if extra is None else tuple(extra),
            call_edits=tuple(kept.get("call_edits") or ()),
        )
