"""The catalogue of events: every kind that is recorded in the chain, with the data of its payload.

`Ledger.record` takes an instance of one of these classes, so a kind that is not in the catalogue, or a field that is
not in its class, does not pass the type check. A field without a default is always in the payload; a field whose
default is None is left out while it is None. Events of older versions may lack fields, and readers allow for that.
`docs/events.md` is generated from this file by `tests/ledger/event_page.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import get_annotations
from typing import Any, ClassVar, TypeVar, dataclass_transform

from looplab.ledger.roles import Role

Hashes = Mapping[str, str]
"""SHA-256 of files by path: of a run, relative to its folder."""


class EventData:
    """The payload of an event.

    Not a dataclass: generating the methods of all kinds would take a tenth of the time of `looplab status`, and three
    events are recorded for every run.
    """

    __slots__ = ("_data",)
    kind: ClassVar[str]
    is_clean: ClassVar[bool]
    """Whether it has no text from outside, or only text without secrets; others are searched for secrets."""
    _required: ClassVar[frozenset[str]]
    _optional: ClassVar[frozenset[str]]

    def __init__(self, **data: Any) -> None:
        unknown = data.keys() - self._required
        if len(data) - len(unknown) != len(self._required) or not unknown <= self._optional:
            fields = ", ".join(sorted(unknown - self._optional | self._required - data.keys()))
            raise TypeError(f"{type(self).__name__}: missing or unknown: {fields}")
        for name in unknown:
            if data[name] is None:
                del data[name]
        self._data = data

    def to_dict(self) -> dict[str, Any]:
        """Return the payload as it is recorded."""
        return self._data


CATALOGUE: dict[str, type[EventData]] = {}
"""The class of each kind."""
_E = TypeVar("_E", bound=EventData)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def event(kind: str, *, clean: bool = False) -> Callable[[type[_E]], type[_E]]:
    """Make a class the definition of a kind of event."""

    def define(cls: type[_E]) -> type[_E]:
        names = frozenset(get_annotations(cls))
        cls.kind, cls.is_clean = kind, clean
        cls._optional = names & cls.__dict__.keys()
        cls._required = names - cls._optional
        assert kind not in CATALOGUE
        CATALOGUE[kind] = cls
        return cls

    return define


# -- Studies


@event("study opened")
class StudyOpenedEvent(EventData):
    """A study began, or got its first objective."""

    objective: str | None
    goal: str


@event("objective changed")
class ObjectiveChangedEvent(EventData):
    """A study is measured by another metric, goal, or point of the curve."""

    objective: str | None
    goal: str
    cleared: bool
    """Whether all runs lost their objective until they are measured again."""


@event("study configured")
class StudyConfiguredEvent(EventData):
    """An engine started with another configuration of the study than the last one."""

    hash: str
    configuration: Mapping[str, Any]
    """The study as resolved from the lab file, without secrets."""


@event("options")
class OptionsEvent(EventData):
    """An engine was started with other options of the command line than the last one."""

    text: str
    """The options as JSON."""


@event("round began", clean=True)
class RoundBeganEvent(EventData):
    """A round was opened."""

    round: int


@event("round ended", clean=True)
class RoundEndedEvent(EventData):
    """All runs of a round have ended."""

    round: int


# -- Proposals


@event("proposed", clean=True)
class ProposedEvent(EventData):
    """A proposal is waiting."""

    proposal: int
    proposer: str
    """Name of a proposer of the study, or a value of `Origin`."""
    source: str | None
    """Idempotency key: a study accepts one proposal per source."""
    parent: str | None
    """A run, `best`, or null for the base config."""
    edits: Sequence[str]
    reason: str
    hypothesis: str
    job: Mapping[str, Any] | None = None
    """A submitted command, instead of edits: `argv`, `cwd`, `files`, `timeout`."""


@event("rejected")
class RejectedEvent(EventData):
    """The guard rejected a proposal, or it was withdrawn."""

    proposal: int
    problems: Sequence[Mapping[str, Any]]
    """Each with `key`, `value`, `rule`, `message` and `nearest`."""


@event("mix")
class MixEvent(EventData):
    """A mix of proposers has chosen among them."""

    weights: Mapping[str, float]
    chosen: Mapping[str, int]
    """Number of proposals by proposer."""


@event("belief")
class BeliefEvent(EventData):
    """What the model of the search believes, after runs have ended."""

    points: int
    """Measured configs."""
    noise: float
    """Standard deviation of a single run, in the unit of the objective."""
    noise_share: float
    best: Sequence[Mapping[str, Any]]
    """The best configs, each with `run`, `values`, `mean`, `sd`, `runs`, `measured` and `is_pending`."""
    uncertain: Sequence[Mapping[str, Any]]
    """Where the model knows least, each with `values`, `mean` and `sd`."""
    importance: Mapping[str, float]
    failing: Sequence[str]
    pending: int
    earlier: Mapping[str, float]
    """Weight of each earlier study in the model."""
    repeated: int
    """Configs that were run more than once."""
    is_deterministic: bool


@event("belief before")
class BeliefBeforeEvent(EventData):
    """What earlier studies predict before the first run of this one."""

    studies: Sequence[Mapping[str, Any]]
    """Each with `study`, `points`, `best`, `measured` and `importance`."""
    first: Sequence[Mapping[str, Any]]
    """The configs that are tried first."""


@event("proposer failed")
class ProposerFailedEvent(EventData):
    """A proposer raised an error."""

    proposer: str
    why: str


# -- Runs


@event("planned", clean=True)
class PlannedEvent(EventData):
    """A run was decided on. It will be started once, whatever fails in between."""

    n: int
    """Number of the run in its study, from 1."""
    round: int
    proposal: int | None
    proposer: str
    parent: str | None
    base: str
    config: str
    """Hash of the config."""
    role: Role
    reason: str
    devices: int
    point: str
    """Hash of the config without its seed, and of the conditions."""
    seed: int | None
    plan: str
    """Hash of the plan in the table `plans`."""
    twin: str | None = None
    """The run that it repeats."""
    warm: str | None = None
    """The run, or file, whose weights it starts from."""


@event("imported")
class ImportedEvent(EventData):
    """A run that another tool made was added to the study, as ended."""

    n: int
    round: int
    proposal: int | None
    proposer: str
    parent: str | None
    base: str
    config: str
    role: Role
    reason: str
    devices: int
    point: str
    seed: int | None
    status: str
    code: int | None
    signal: int | None
    ended: float
    objective: float | None
    measured: str | None
    files: Hashes
    source: Mapping[str, Any]
    """Where it comes from: `kind`, `path`, `digest`."""


@event("launched", clean=True)
class LaunchedEvent(EventData):
    """The run's folder exists and the executor was asked to start it."""

    slot: str
    files: Hashes
    attempt: int | None = None
    """From 2, if the run is tried again."""
    queued: bool | None = None
    """True if a scheduler decides when it starts."""


@event("queued")
class QueuedEvent(EventData):
    """A scheduler has accepted the run."""

    job: str
    """Its id at the scheduler."""
    why: str
    """Why it waits, in the scheduler's words."""


@event("started")
class StartedEvent(EventData):
    """A run that was queued at a scheduler runs."""

    host: str
    job: str | None
    devices: Sequence[str]
    cores: Sequence[int]
    started: float


@event("attempt ended")
class AttemptEndedEvent(EventData):
    """An attempt at a run was lost by its place, and the run is planned again."""

    attempt: int
    reason: str
    """lost or preempted."""
    why: str
    code: int | None
    signal: int | None
    started: float | None
    ended: float | None
    host: str | None
    job: str | None
    lost_s: float
    """Seconds that this attempt and those before it ran."""


@event("returned")
class ReturnedEvent(EventData):
    """The run could not be started and is planned again."""

    why: str


@event("ended", clean=True)
class EndedEvent(EventData):
    """The run has ended and was measured."""

    status: str
    """ok, failed, stopped, timeout or lost."""
    code: int | None
    signal: int | None
    started: float | None
    ended: float | None
    objective: float | None
    measured: str | None
    """Hash of everything that it measured."""
    files: Hashes
    note: str | None = None


@event("remeasured")
class RemeasuredEvent(EventData):
    """The metrics of an ended run were read again."""

    objective: float | None
    before: float | None
    """The objective that it had."""
    measured: str | None
    files: Hashes


@event("watched")
class WatchedEvent(EventData):
    """A watch rule fired on a running run."""

    rule: str
    text: str
    stops: bool


@event("archived")
class ArchivedEvent(EventData):
    """Archives of ended runs were written."""

    runs: Mapping[str, Hashes]


@event("kept")
class KeptEvent(EventData):
    """Files were written that belong to no single run."""

    paths: Hashes
    """By path in the study's folder."""


@event("record changed")
class RecordChangedEvent(EventData):
    """The run itself changed recorded files in its folder."""

    changes: Sequence[Mapping[str, Any]]
    """Each with `name`, `recorded`, `found` and `restored`."""


@event("unreadable")
class UnreadableEvent(EventData):
    """Something of a run could not be read, measured or written."""

    what: str
    """A file or a step."""
    why: str


@event("reproduced")
class ReproducedEvent(EventData):
    """A run was compared with its repetition."""

    again: str
    """The repetition."""
    same: bool
    why: str
    difference: float | None = None
    allowed: float | None = None


@event("told")
class ToldEvent(EventData):
    """The result of a submitted command was reported to its caller."""


# -- Verdicts


@event("best", clean=True)
class BestEvent(EventData):
    """The study has another best run (the event's run); null: none."""

    objective: float | None


@event("judged", clean=True)
class JudgedEvent(EventData):
    """The judge, or a person's veto, gave a verdict on a run."""

    verdict: str
    evidence: Mapping[str, Any]
    files: Hashes


@event("judge state")
class JudgeStateEvent(EventData):
    """The state of the judge's sequential tests changed."""

    hash: str


@event("judge restarted")
class JudgeRestartedEvent(EventData):
    """All verdicts but vetoes were taken back; the judge starts over with its full alpha."""

    why: str


@event("held-out read")
class HeldOutReadEvent(EventData):
    """The held-out metric was compared, once of a limited number of times; the event's run is the challenger."""

    against: str
    """The champion."""
    n: int
    """How often it was read, this time included."""
    text: str


@event("alarm")
class AlarmEvent(EventData):
    """Something happened that a person must look at before the results are believed."""

    text: str
    since: str | None = None
    """The last run with other code."""
    code: Sequence[str] | None = None
    """Changed source files."""
    lab_file: Sequence[str] | None = None
    """Changed keys of the lab file."""
    same_as: str | None = None
    """A run that measured exactly the same."""
    keys: Sequence[str] | None = None
    """Keys in which the configs of the two differ."""
    call: str | None = None
    """A call of an agent, whose answer is void."""


# -- Engines and people


@event("engine began")
class EngineBeganEvent(EventData):
    """An engine took over the study."""

    session: int
    host: str
    pid: int
    ticks: int
    """Start time of the process, in clock ticks since boot."""


@event("engine ended")
class EngineEndedEvent(EventData):
    """An engine ended by itself."""

    session: int
    how: str
    """done, drained, stopped or failed."""
    why: str


@event("asked")
class AskedEvent(EventData):
    """A person asked a running engine for something."""

    what: str
    """pause, resume, drain, stop or veto."""
    why: str | None = None


@event("said")
class SaidEvent(EventData):
    """A person told agents something."""

    text: str


@event("steered")
class SteeredEvent(EventData):
    """A person did something on the live page; the event of what they did is recorded with it."""

    what: str
    """pause, resume, drain, stop, stop run, propose, say, veto or objective."""
    who: str
    """User that runs the page's server."""
    where: str
    """Where the request came from."""


@event("variant written")
class VariantWrittenEvent(EventData):
    """`looplab edit` wrote a variant of a config file."""

    variant: str
    parent: str
    edits: Sequence[str]
    reason: str


@event("moved")
class MovedEvent(EventData):
    """The lab is in another place than when its last engine started."""

    was: Mapping[str, Any]
    """`host`, `path` and `inode`."""
    now: Mapping[str, Any]


@event("copied")
class CopiedEvent(EventData):
    """The lab is a copy of another, which still exists."""

    was: Mapping[str, Any]
    """`host`, `path` and `inode`."""
    now: Mapping[str, Any]


# -- Agents


@event("agent asked")
class AgentAskedEvent(EventData):
    """An agent was called."""

    call: str
    log: str
    n: int
    """Number of proposals asked for."""
    attempt: int
    parent: str | None
    cli: str
    version: int | None = None
    """The version that the agent writes (`looplab iterate`)."""
    ask: int | None = None
    """Index of the request in the attempt, from 1 (`looplab iterate`)."""


@event("agent answered")
class AgentAnsweredEvent(EventData):
    """A call of an agent ended."""

    call: str
    ok: bool
    why: str
    usage: Mapping[str, Any]
    """Tokens and dollars."""
    seconds: float | None = None
    attempts: int | None = None
    session: str | None = None
    void: str | None = None
    """Why the answer is void."""
    accepted: int | None = None
    """Number of usable proposals."""
    refused: Sequence[str] | None = None
    """Why other proposals are not usable."""
    interrupted: bool | None = None
    """Whether looplab ended before it had answered."""


@event("agent not confined")
class AgentNotConfinedEvent(EventData):
    """An agent of the study can write outside its folder."""

    text: str


@event("files changed")
class FilesChangedEvent(EventData):
    """Files of the lab changed while an agent was running."""

    call: str
    by: str
    files: Sequence[Mapping[str, Any]]
    """Each with `path`, `how` and, if that was tried, `restored`."""
    confined: str | None = None
    """What confined the agent."""


# -- Pipelines (folders are relative to the lab)


@event("stage began")
class StageBeganEvent(EventData):
    """An attempt at a stage of a pipeline began."""

    folder: str
    """Run folder of the pipeline."""
    stage: str
    attempt: int
    state: str
    """running"""
    why: str
    """Why it runs."""
    fingerprint: str
    """Hash of its inputs."""
    began: float
    config: str | None = None
    """Hash of the resolved config."""
    slot: str | None = None


@event("stage ended")
class StageEndedEvent(EventData):
    """An attempt at a stage ended; also recorded later, from its folder, if the call that saw the end could not."""

    folder: str
    stage: str
    attempt: int
    state: str
    """complete | failed | stopped | lost (nobody saw its end)"""
    why: str
    """Why it ran; if it is not complete, why not."""
    fingerprint: str
    began: float
    config: str | None = None
    outputs: str | None = None
    """Hash of its outputs, if it is complete."""
    slot: str | None = None
    ended: float | None = None
    seconds: float | None = None


@event("suite began")
class SuiteBeganEvent(EventData):
    """A call of a suite began."""

    id: str
    folder: str
    fingerprint: str
    """Hash of study, stages and configs."""
    state: str
    """running"""
    jobs: Mapping[str, str]
    """State of each dataset."""
    began: float


@event("suite ended")
class SuiteEndedEvent(EventData):
    """A call of a suite ended."""

    id: str
    folder: str
    fingerprint: str
    state: str
    """complete | failed | stopped"""
    jobs: Mapping[str, str]
    began: float
    ended: float


@event("case ended")
class CaseEndedEvent(EventData):
    """A case was run."""

    folder: str
    """Run folder of the pipeline."""
    tag: str
    exit_code: int
    """Negative: the signal that ended it."""
    config: str
    """Hash of the config."""
    files: Sequence[str]
    """Files that it wrote, relative to the run folder."""
    began: float
    ended: float


# -- Versions (`looplab iterate`; the event's run is the version, such as v3)


@event("iterate began")
class IterateBeganEvent(EventData):
    """`looplab iterate` started on a range of versions."""

    start: int
    end: int


@event("iterate ended")
class IterateEndedEvent(EventData):
    """The range of versions is done."""

    ok: bool


@event("version begun")
class VersionBegunEvent(EventData):
    """An attempt at a version began."""

    attempt: int
    branch: str
    base: str
    """Commit that it starts from."""
    onto: str
    """Branch of the lab."""
    folder: str | None = None
    """Folder of the version, relative to the lab."""


@event("version preparing")
class VersionPreparingEvent(EventData):
    """The worktree of a version is being made."""


@event("version prepared")
class VersionPreparedEvent(EventData):
    """The worktree of a version is ready and its sealed files are hashed."""

    base: str
    seals: str
    sealed: int
    frozen: str
    champion: str


@event("version checking")
class VersionCheckingEvent(EventData):
    """The gates are being checked."""

    ask: int


@event("version checked")
class VersionCheckedEvent(EventData):
    """The gates were checked."""

    ask: int
    findings: Sequence[Mapping[str, Any]]
    void: str
    """Why the attempt is void; empty: it is not."""


@event("version measuring")
class VersionMeasuringEvent(EventData):
    """A version is being evaluated."""

    ask: int | None


@event("version measured")
class VersionMeasuredEvent(EventData):
    """A version was evaluated."""

    ask: int | None
    """Index of the request; null: a version that looplab did not create, or the champion again."""
    metric: str
    value: float
    values: Sequence[float]
    fingerprint: str
    """Hash of the evaluation."""
    folder: str | None = None
    """Folder of the version, relative to the lab."""


@event("version judged")
class VersionJudgedEvent(EventData):
    """A version was compared with the champion."""

    verdict: str
    why: str
    n: int
    """Number of episodes compared."""
    champion: str | None = None
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    alpha: float | None = None


@event("version champion")
class VersionChampionEvent(EventData):
    """A version is the champion."""

    why: str


@event("version merging")
class VersionMergingEvent(EventData):
    """A version is being merged into the lab's branch."""


@event("version committed")
class VersionCommittedEvent(EventData):
    """The work of an attempt was committed."""

    commit: str


@event("version merged")
class VersionMergedEvent(EventData):
    """A version was merged."""

    commit: str
    branch: str
    into: str
    code: str | None = None
    """Hash of its folder in that commit: the git tree."""


@event("version closing")
class VersionClosingEvent(EventData):
    """A failed attempt is being closed."""

    how: str


@event("version failed")
class VersionFailedEvent(EventData):
    """An attempt at a version failed or is void."""

    how: str
    why: str
    branch: str
    commit: str


@event("ledger forged")
class LedgerForgedEvent(EventData):
    """Somebody else wrote or changed events of versions."""

    why: str
    known: Sequence[Sequence[Any]]
    """The true events: number, time, kind, run, data."""
    broken: Mapping[str, Any] | None
    """First break of the chain: `seq`, `why`."""


# -- The ledger itself


@event("anchored")
class AnchoredEvent(EventData):
    """The head of the chain was published."""

    ledger: str
    """Id of the ledger."""
    seq: int
    hash: str
    at: str
    where: Sequence[str]


@event("anchor failed")
class AnchorFailedEvent(EventData):
    """The head of the chain could not be published."""

    where: str
    problem: str


@event("ledger moved")
class LedgerMovedEvent(EventData):
    """The ledger was moved to another folder, for example from a network disk to a local one."""

    was: str
    now: str


@event("scrubbed")
class ScrubbedEvent(EventData):
    """Secrets were removed from files."""

    files: Mapping[str, str | None]
    """SHA-256 by path, after it."""
    before: Mapping[str, str | None]


@event("journal rewritten")
class JournalRewrittenEvent(EventData):
    """The journal was missing, or had lost its end, and was written again."""

    why: str


@event("head rewritten")
class HeadRewrittenEvent(EventData):
    """The file that notes where the chain ends was damaged and was written again."""

    why: str


@event("recovered")
class RecoveredEvent(EventData):
    """`looplab reindex` restored a run or a proposal from a run folder, because the chain lacked it or differed."""

    proposed: Mapping[str, Any] | None = None
    """The proposal, with the fields of `proposed` and its `run`; a run has the fields below instead."""
    planned: Mapping[str, Any] | None = None
    """The fields of `planned`."""
    ended: Mapping[str, Any] | None = None
    """The fields of `ended`; absent: it has not ended."""
    state: str | None = None
    verdict: str | None = None
    files: Hashes | None = None


@event("reindexed")
class ReindexedEvent(EventData):
    """The tables were rebuilt from the chain and the run folders."""

    runs: Mapping[str, int]
    """Number of run folders by study."""
    recovered: int
    pipelines: int
    """Number of stages and suites that were recorded from their folders."""
    gone: Mapping[str, Sequence[str]]
    """Started runs whose folder is missing, by study."""
    dropped: Mapping[str, Sequence[str]]
    """Runs that were planned and lost with their plan, by study; they are planned again."""
    rounds: Mapping[str, Sequence[int]]
    """Rounds that the chain does not know, by study."""
    renumbered: Mapping[str, str]
    from_journal: int
    """Number of events that were restored from the journal or a backup."""
    aside: Sequence[str]
    """Files that were moved aside."""
    events_lost: int
    new_chain: bool
    judged_again: Sequence[str]
    backup: str | None
