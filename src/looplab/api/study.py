"""Labs, studies, runs and verdicts as typed objects."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from looplab.config.edits import parse_edit
from looplab.config.lab import LabConfig, StudyConfig, find_lab, load_lab
from looplab.decide.belief import StudyBelief, recorded_belief
from looplab.errors import LabError
from looplab.ledger.ledger import Ledger, open_for_reading
from looplab.ledger.roles import Origin
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.events import EngineEvent, Listener
from looplab.loop.flags import best_run
from looplab.loop.session import (
    Session,
    SessionResult,
    check_study,
    options_to_resume,
    refuse_hopeless,
    relative_to_lab,
    stop_study,
)
from looplab.loop.setup import RunOptions, Setup
from looplab.runs import folder
from looplab.untrusted import real_path

if TYPE_CHECKING:
    import pandas as pd

    from looplab.api.ask_tell import AskTell


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """A snapshot of a run, as of the call."""

    id: str
    study: str
    number: int
    round: int
    role: str
    """base | trial | replicate | control | reproduction | imported"""
    proposer: str
    parent: str | None
    """The run whose config it changes; None: a base config."""
    reason: str
    seed: int | None
    state: str
    """planned | running | ended"""
    status: str | None
    """Once ended: ok | failed | stopped | timeout | lost"""
    objective: float | None
    """None: it has not ended well, or did not measure it."""
    verdict: str | None
    seconds: float | None
    folder: Path

    def config(self) -> dict[str, Any]:
        """Return the config that the trainer got."""
        return folder.read_json(self.folder, "config.json")

    def summary(self) -> dict[str, Any]:
        """Return `summary.json`: first, last and best value of each metric, and how it ended. Empty while it runs."""
        return folder.read_json(self.folder, "summary.json")

    def log_path(self) -> Path:
        """Return the file with what the trainer printed."""
        return folder.record_file(self.folder, "train.log")


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """What the judge decided about a run, and on what evidence. Effects are positive where the run was better."""

    run: str
    verdict: str
    """keep | discard | inconclusive | crash | void"""
    why: str
    champion: str | None
    """The champion that it was compared with."""
    effect: float | None
    low: float | None
    """The 95 % confidence interval of the effect, from `low` to `high`."""
    high: float | None
    p: float | None
    """One-sided p-value; None where there was no test."""
    n: int
    """Replicates that the effect rests on."""


class Lab:
    """A folder with a `lab.yaml`. Made by `looplab.open`."""

    def __init__(self, config: LabConfig) -> None:
        self._config = config
        self.folder = config.folder
        self.notes = config.notes
        """What a person should know about the lab file, such as keys with a new name."""

    @property
    def studies(self) -> list[str]:
        """The names of the studies."""
        return list(self._config.studies)

    def study(self, name: str | None = None) -> Study:
        """Return a study by its name, which may be omitted if the lab has only one study."""
        return Study(self._config, self._config.study(name))

    def __repr__(self) -> str:
        return f"<looplab.Lab {str(self.folder)!r}: {', '.join(self.studies)}>"


class Study:
    """One question: its runs, its champion, and what can be done with it."""

    def __init__(self, lab: LabConfig, config: StudyConfig) -> None:
        self._lab = lab
        self._config = config
        self.name = config.name
        self.folder = folder.study_folder(lab.folder, config.name)

    # -- what it has found

    @property
    def runs(self) -> list[Run]:
        """All runs, in planning order."""
        return self._read(lambda record: [self._run(row) for row in record.runs()], [])

    @property
    def best(self) -> Run | None:
        """The champion if the study has a judge; else a run of the config that the model of the search believes in (see
        `belief`); without a model, the run with the best objective, which is only a hint."""
        return self._read(lambda record: self._optional(record.best()), None)

    @property
    def luckiest(self) -> Run | None:
        """The run with the best objective, without regard to noise; None if nothing was measured."""

        def find(record: StudyLedger) -> Run | None:
            best = record.best()
            return self._optional(best_run(self._config, record, best.conditions, self.folder)) if best else None

        return self._read(find, None)

    @property
    def belief(self) -> StudyBelief | None:
        """What the model of the search believes: best configs with mean and standard deviation, what matters, what is
        uncertain, what fails; None if the study has no search, or too few runs."""
        return self._read(recorded_belief, None)

    @property
    def champion(self) -> Run | None:
        """The run that the judge promoted last; None without a judge, or before it has decided."""

        def find(record: StudyLedger) -> Run | None:
            name = (record.judge_state() or {}).get("champion")
            return self._run(record.run(name)) if name else None

        return self._read(find, None)

    @property
    def verdicts(self) -> list[RunVerdict]:
        """The last verdict on each judged run, in the order of judgement."""
        return self._read(lambda record: [_verdict(run, given) for run, given in record.verdicts().items()], [])

    def run_named(self, name: str) -> Run:
        """Return a run by its id, or by a part of it that is unique: its number, `best`, `latest`.

        Raises:
            LabError: There is no such run.
        """
        found = self._read(lambda record: self._run(record.run(name)), None)
        if found is None:
            raise LabError(f"study {self.name!r} has no runs yet")
        return found

    def frame(self, table: str = "runs") -> pd.DataFrame:
        """Return a table as a pandas frame; `LabFrames` has one property for each of them."""
        from looplab.api.frames import load
        from looplab.report.tables import VIEWS

        if table not in VIEWS:
            raise LabError(f"there is no table {table!r}", hint=f"there are: {', '.join(VIEWS)}")
        frame: pd.DataFrame = getattr(load(self.name, self._lab.folder), table)
        return frame

    # -- what it does

    def run(
        self,
        *,
        rounds: int | None = None,
        runs: int | None = None,
        configs: Sequence[Path | str] = (),
        callbacks: Sequence[Listener] = (),
        **options: Any,
    ) -> SessionResult:
        """Run the study here until it is done, as `looplab run` does.

        Args:
            rounds: Rounds that the study has at its end, with those of earlier calls; None: the budget alone counts.
            runs: Runs that the study has at its end, in the same way.
            configs: Base configs, instead of those of the lab file.
            callbacks: Called with each event (`looplab.RunEnded`, …). An exception in one stops the study and is
                raised again when its runs have ended.
            options: Further options of `looplab run`, as fields of `RunOptions`: `mode`, `continuous`, `extra`, …

        Raises:
            BusyError: Another engine runs the study.
            LabError: Something in the lab is wrong.
        """
        setup = self._check(rounds=rounds, runs=runs, configs=configs, **options)
        with Session(self._lab, self._config, listeners=callbacks) as session:
            return session.run(session.begin(setup))

    def resume(self, *, callbacks: Sequence[Listener] = ()) -> SessionResult:
        """Continue the study with the options of its last run, as `looplab resume` does."""
        with contextlib.closing(open_for_reading(self._lab.ledger_path)) as ledger:
            options = options_to_resume(StudyLedger(ledger, self.name), self._lab.folder)
        setup = check_study(self._lab, self._config, options)
        with Session(self._lab, self._config, listeners=callbacks) as session:
            return session.run(setup, resumed=True)

    def events(self, **options: Any) -> Iterator[EngineEvent]:
        """Run the study in a thread and yield its events as they come; arguments as for `run`.

        Leaving the loop early stops the study: its runs are stopped and recorded.
        """
        setup = self._check(**options)
        with EngineThread(self._lab, self._config, setup) as thread:
            yield from thread.events()

    def ask_tell(self, **options: Any) -> AskTell:
        """Return a loop of one's own: `ask` for a config, train it here, `tell` what it measured.

        It is the same study: proposals, guard, judge, budget and record are the same as in `run`. Arguments as there.
        """
        from looplab.api.ask_tell import AskTell

        return AskTell(self._lab, self._config, self._check(**options))

    def propose(
        self, edits: Sequence[str] | Mapping[str, Any], reason: str, *, parent: str | None = None, hypothesis: str = ""
    ) -> int:
        """Put a proposal into the queue; return its number. The guard checks it again when it is its turn.

        Args:
            edits: `["train.lr@mul=0.5"]`, or values by path: `{"train.lr": 0.1}`.
            parent: The run to start from, or `best`; None: the base config.

        Raises:
            LabError: A key is not a knob, or is set to a value outside of its range.
        """
        if isinstance(edits, Mapping):
            edits = [f"{path}@set={json.dumps(value)}" for path, value in edits.items()]
        refuse_hopeless(self._lab, self._config, [parse_edit(text) for text in edits])
        with contextlib.closing(Ledger(self._lab.claim_ledger())) as ledger:
            record = StudyLedger(ledger, self.name)
            objective = self._config.objective
            record.open(objective.metric if objective else None, objective.goal if objective else "min")
            number = record.propose(Origin.PERSON, list(edits), reason, parent=parent, hypothesis=hypothesis)
        assert number is not None
        return number

    def stop(self, *, drain: bool = False) -> str:
        """Stop the study, wherever its engine runs; with `drain`, when the running trainings have ended. Returns a
        description."""
        with contextlib.closing(Ledger(self._lab.ledger_path, create=False)) as ledger:
            return stop_study(self._lab, self._config, StudyLedger(ledger, self.name), None, drain=drain)

    def __repr__(self) -> str:
        return f"<looplab.Study {self.name!r} in {str(self._lab.folder)!r}>"

    # -- inside

    def _check(
        self,
        *,
        rounds: int | None = None,
        runs: int | None = None,
        configs: Sequence[Path | str] = (),
        **options: Any,
    ) -> Setup:
        unknown = sorted(set(options) - set(RunOptions.__slots__))
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(RunOptions.__slots__))}")
        cfgs = relative_to_lab(self._lab.folder, [str(real_path(Path(path))) for path in configs])
        return check_study(self._lab, self._config, RunOptions(rounds=rounds, runs=runs, cfgs=cfgs, **options))

    def _read(self, read: Callable[[StudyLedger], T], without: T) -> T:
        """Read the ledger, without writing to it; `without` is the answer if there is none yet."""
        if not self._lab.ledger_path.exists():
            return without
        with contextlib.closing(open_for_reading(self._lab.ledger_path)) as ledger:
            return read(StudyLedger(ledger, self.name))

    def _optional(self, row: RunRow | None) -> Run | None:
        return None if row is None else self._run(row)

    def _run(self, row: RunRow) -> Run:
        return Run(
            id=row.id, study=row.study, number=row.n, round=row.round, role=row.role, proposer=row.proposer,
            parent=row.parent, reason=row.reason, seed=row.seed, state=row.state, status=row.status,
            objective=row.objective, verdict=row.verdict, seconds=row.seconds, folder=self.folder / row.id,
        )  # fmt: skip


def _verdict(run: str, given: Mapping[str, Any]) -> RunVerdict:
    return RunVerdict(
        run=run, verdict=given["verdict"], why=given.get("why", ""), champion=given.get("champion"),
        effect=given.get("effect"), low=given.get("low"), high=given.get("high"), p=given.get("p"),
        n=given.get("n", 0),
    )  # fmt: skip


class EngineThread:
    """Context manager that runs an engine in a separate thread; leaving it stops the engine."""

    def __init__(self, lab: LabConfig, study: StudyConfig, setup: Setup, **session: Any) -> None:
        self._setup = setup
        self._events: queue.Queue[EngineEvent | None] = queue.Queue()
        self._error: BaseException | None = None
        self.result: SessionResult | None = None
        """How it ended, once it has."""
        self.session = Session(lab, study, listeners=[self._events.put], **session)
        self._thread = threading.Thread(target=self._work, name="looplab-engine", daemon=True)

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        while self._thread.is_alive():
            self.session.request_stop()  # again: the engine may not have been there yet
            self._thread.join(0.2)
        if self._error is not None and error[0] is None:
            raise self._error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def events(self) -> Iterator[EngineEvent]:
        """Yield events until the engine has ended."""
        while (event := self._events.get()) is not None:
            yield event

    def _work(self) -> None:
        try:
            with self.session as session:  # in this thread, as SQLite wants it
                self.result = session.run(session.begin(self._setup))
        except BaseException as error:  # noqa: BLE001 (raised again in the thread that waits)
            self._error = error
        finally:
            self._events.put(None)


def open_lab(path: Path | str = ".") -> Lab:
    """Open the lab in this folder, or in the nearest folder above it.

    Raises:
        LabError: There is no lab, or its lab file is wrong.
    """
    return Lab(load_lab(find_lab(Path(path))))
