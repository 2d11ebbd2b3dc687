"""What a run is for, and who asked for it."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a run is for; the column `role`."""

    BASE = "base"
    """A base config of the lab file."""
    TRIAL = "trial"
    """A new config."""
    CONTINUATION = "continuation"
    """A run that was stopped at a rung, continued from its checkpoint; its parent is the run so far."""
    REPLICATE = "replicate"
    """A known config once more, usually with another seed."""
    CONFIRMATION = "confirmation"
    """The champion with a seed that it has run with, before another config replaces it."""
    CONTROL = "control"
    """The champion's config, started from the weights that a challenger started from."""
    REPRODUCTION = "reproduction"
    """A run repeated with its own seed; it is compared, not judged."""
    IMPORTED = "imported"
    """A run that another tool made and recorded. Imported runs are hints for search, agents and rules; they are never
    judged, repeated or counted in a budget."""

    @classmethod
    def of(cls, text: str) -> Role:
        """Return the role of a run from its column; a trial if the column was tampered with."""
        return _ROLES.get(text, cls.TRIAL)


_ROLES = {role.value: role for role in Role}
DECIDED = (Role.BASE, Role.TRIAL, Role.CONTINUATION)
"""Runs of a config that was not run before, or only in part; all others repeat one."""
COPIES = (Role.CONFIRMATION, Role.REPRODUCTION)
"""Runs that repeat another one with its own seed; they say nothing about the noise between seeds."""


class Origin(StrEnum):
    """Who asked for a run; the column `proposer`, which otherwise has the name of a proposer of the study."""

    BASE = "base"
    """The lab file: a base config."""
    JUDGE = "judge"
    """The judge, which needs a replicate or a control."""
    WATCH = "watch"
    """A watch rule, which stopped a run and requeues it with edits."""
    AGAIN = "again"
    """`looplab reproduce`."""
    JOB = "job"
    """`looplab submit`: a command rather than a config."""
    QUEUE = "queue"
    """A queue file, which people write."""
    PERSON = "person"
    """`looplab propose`, or `Study.propose`."""
    IMPORT = "import"
    """`looplab import`."""
    PROPOSER = "proposer"
    """Any other proposer: rules, search, an agent, a plug-in."""

    @classmethod
    def of(cls, proposer: str) -> Origin:
        """Return the origin of a proposal or run from the name in its column `proposer`."""
        return _ORIGINS.get(proposer, cls.PROPOSER)

    @property
    def is_person(self) -> bool:
        """Whether it is a person, whose requests may repeat earlier runs."""
        return self in (Origin.QUEUE, Origin.PERSON)


_ORIGINS = {origin.value: origin for origin in Origin}
