"""Import of runs of other tools into a study.

The folder of an imported run is staged under a hidden name. The ledger then records the run, and the folder is renamed.
After a crash, `complete_imports` finishes the imports that the ledger knows and removes the others, so that a repeated
import never duplicates a run.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.config import paths
from looplab.config.files import dump_json, has_non_finite, hash_config
from looplab.errors import LabError
from looplab.guard.guard import Guard
from looplab.ledger.roles import Origin, Role
from looplab.ledger.study import StudyLedger
from looplab.loop.decision import hash_point
from looplab.loop.setup import Base, Setup
from looplab.measure.foreign import ForeignRun
from looplab.measure.summary import to_dict
from looplab.runs import folder
from looplab.runs.names import run_id
from looplab.runs.redact import HIDDEN, hide_values, redact_text, scrub_file
from looplab.untrusted import UntrustedError, clean_line, open_regular

MAX_COPY = 32 << 20
"""Maximum size of a copied file, in bytes; of a larger one only path, size and hash are recorded."""
MAX_COPIES = 128 << 20
"""Maximum total size of the copied files of a run, in bytes."""
MAX_LOG = 8 << 20
"""Maximum size of a copied train.log, in bytes."""
MAX_NOTE = 1_000
"""Maximum length of a note, in characters."""
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Fitted:
    """The config of a foreign run, mapped to a config of the study."""

    config: dict[str, Any]
    known: tuple[str, ...]
    """Knobs whose values are in the run's config."""
    assumed: tuple[str, ...]
    """Knobs that are missing there. Their values are from the base config; if all are missing, `config` is empty."""
    illegal: tuple[str, ...]
    """Why the guard rejects the config, so that a search cannot use it; empty if it is legal."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """A run that was imported, or would be in a dry run."""

    source: str
    run: str
    """Run id; empty if nothing was written."""
    objective: float | None
    fitted: Fitted
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source, "run": self.run or None, "objective": self.objective, "knobs": self.fitted.known,
            "assumed": self.fitted.assumed, "illegal": self.fitted.illegal, "notes": self.notes,
        }  # fmt: skip


def count_knobs(guard: Guard, mapped: Mapping[str, str]) -> Any:
    """Return a function that counts the study's knobs in another tool's config.

    Args:
        mapped: Keys of the study by keys of the tool.
    """
    theirs = {ours: name for name, ours in mapped.items()}

    def count(config: Mapping[str, Any]) -> int:
        return sum(
            bool(paths.find(config, path) or (path in theirs and paths.find(config, theirs[path])))
            for path in guard.knobs
        )

    return count


def fit_config(run: ForeignRun, base: Base, guard: Guard, mapped: Mapping[str, str]) -> Fitted:
    """Copy the values of a foreign config into the study's base config, for all keys that the study knows.

    Args:
        mapped: Keys of the study by keys of the tool.
    """
    config = copy.deepcopy(base.config)
    theirs = {ours: name for name, ours in mapped.items()}
    keys = dict.fromkeys(paths.show(place) for place, _ in paths.leaves(config))
    keys |= dict.fromkeys(guard.knob_values(guard.with_defaults(config)))
    keys |= dict.fromkeys(path for path in guard.knobs if "*" not in path)
    knobs = set(guard.knob_values(guard.with_defaults(config))) | {path for path in guard.knobs if "*" not in path}
    short = _short_names(knobs) if run.is_flat else {}
    known, assumed, notes = [], [], []
    for key in keys:
        name = theirs.get(key, key)
        places = paths.find(run.config, name)
        if not places and key in short and short[key] in run.config:
            places = [(short[key],)]
            notes.append(f"{short[key]} was read as {key}")
        value = paths.get(run.config, places[0]) if places else None
        if not places or isinstance(value, dict) or not _put(config, key, value):
            if key in knobs:
                assumed.append(key)
            continue
        if key in knobs:
            known.append(key)
    if not known:  # no knob matches, so its config is unknown
        return Fitted({}, (), tuple(assumed), (), tuple(notes))
    hidden, _ = hide_values(config)
    ruling = guard.admit(hidden)
    illegal = tuple(problem.message for problem in ruling.problems)
    if assumed:
        notes.append(f"not recorded by the run, taken from the base: {', '.join(assumed)}")
    return Fitted(hidden, tuple(known), tuple(assumed), illegal, tuple(notes))


def _short_names(knobs: Iterable[str]) -> dict[str, str]:
    """Return the last component of each knob's path, if it is unique among the knobs."""
    last = {knob: knob.rpartition(".")[2] for knob in knobs}
    return {knob: name for knob, name in last.items() if list(last.values()).count(name) == 1}


def _put(config: dict[str, Any], key: str, value: Any) -> bool:
    """Set a key, keeping its type; return False if the value has another structure or the key holds a secret."""
    places = paths.find(config, key)
    if not places:
        *above, last = paths.parse(key)
        parents = paths.find_parents(config, key)
        node: Any = paths.get(config, parents[0]) if parents else config
        for part in () if parents else above:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            return False
        node[last] = value
        return True
    old = paths.get(config, places[0])
    if old == HIDDEN or isinstance(old, dict) or isinstance(old, list) != isinstance(value, list):
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(old, float) and is_number:
        value = float(value)
    elif type(old) is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    paths.set_(config, places[0], value)
    return True


def complete_imports(record: StudyLedger, outputs: Path) -> None:
    """Finish or remove interrupted imports; the caller holds the study's lock."""
    for staged in sorted(outputs.glob(f"{folder.STAGED}*")):
        run = staged.name.removeprefix(folder.STAGED)
        row = record.find_run(run)
        if row is not None and row.role == Role.IMPORTED and not (outputs / run).exists():
            os.rename(staged, outputs / run)
        else:
            shutil.rmtree(staged, ignore_errors=True)


def known_sources(record: StudyLedger, outputs: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the imported runs by the digest and by the path of their source."""
    sources = record.imports()
    for run in record.runs(state="ended"):
        if run.role == Role.IMPORTED and run.id not in sources:  # the events were lost, the tables rebuilt
            sources[run.id] = folder.read_json(outputs / run.id, "run.json", strict=False).get("imported") or {}
    by_digest = {str(source.get("digest")): run for run, source in sources.items()}
    return by_digest, {str(source.get("path")): run for run, source in sources.items()}


def import_run(setup: Setup, record: StudyLedger, run: ForeignRun, fitted: Fitted) -> Imported:
    """Import a foreign run into the study; the caller holds the study's lock."""
    outputs = folder.study_folder(setup.lab, setup.study.name)
    folder.make_study_folder(outputs)
    n = record.next_number()
    id_ = run_id(n)
    staged = folder.staged_import(outputs / id_)
    shutil.rmtree(staged, ignore_errors=True)
    (staged / folder.RECORD).mkdir(parents=True)
    copied, named, notes = _copy_files(run, staged)
    notes = [*run.notes, *fitted.notes, *notes, *(f"not legal here: {why}" for why in fitted.illegal)]
    notes = [redact_text(clean_line(note, MAX_NOTE)) for note in notes]
    if setup.study.objective is not None and run.objective is None and run.status == "ok":
        notes.append(f"it did not measure {setup.study.objective.metric}")
    base = setup.bases[0]
    point = hash_point(fitted.config, setup.seed, setup.study.warm_start)
    seed = _seed(setup, fitted.config)
    source = {"kind": run.kind, "path": run.source, "digest": run.digest, "config": run.config_from}
    reason = redact_text(f"imported from {clean_line(run.source, MAX_NOTE)}")
    changes = paths.diff(base.config, fitted.config) if fitted.config else {}
    about = {
        "id": id_, "study": record.name, "n": n, "round": 0, "parent": None, "base": base.name,
        "proposer": Origin.IMPORT, "source": None, "reason": reason, "hypothesis": "", "notes": notes,
        "config_hash": hash_config(fitted.config), "role": Role.IMPORTED, "point": point, "seed": seed, "twin": None,
        "warm": None, "warm_start": None, "created": time.time(), "changes": {"parent": changes, "base": changes},
        "imported": {**source, "assumed": list(fitted.assumed), "files": named},
    }  # fmt: skip
    original, _ = hide_values(run.config)
    contents = {
        "config.json": dump_json(fitted.config),
        "source_config.json": dump_json(original),
        "summary.json": dump_json(_summary(setup, run, id_, notes), finite=True),
        "run.json": dump_json(about, finite=not has_non_finite(changes)),
    }
    for name, content in contents.items():
        (staged / folder.RECORD / name).write_bytes(content)
    files = folder.hash_files(staged, [*copied, *(f"{folder.RECORD}/{name}" for name in contents)])
    with record.ledger.write():
        record.record_import(
            id_, n=n, base=base.name, reason=reason, config=fitted.config, point=point, seed=seed, status=run.status,
            objective=run.objective, files=files, source=source,
        )  # fmt: skip
    os.rename(staged, outputs / id_)
    return Imported(run.source, id_, run.objective, fitted, tuple(notes))


def _seed(setup: Setup, config: Mapping[str, Any]) -> int | None:
    """Return the seed in a config; None if it has no valid one."""
    with suppress(LabError):
        return setup.seed_of(config)
    return None


def _summary(setup: Setup, run: ForeignRun, id_: str, notes: Sequence[str]) -> dict[str, Any]:
    """Return the content of `summary.json` for an imported run."""
    config = setup.study.objective
    objective = None
    if config is not None:
        objective = {"metric": config.metric, "goal": config.goal, "at": config.at, "value": run.objective}
    return {
        "id": id_, "study": setup.study.name, "status": run.status, "exit_code": None, "signal": None,
        "reason": Role.IMPORTED, "seconds": None, "steps": run.steps, "objective": objective, "verdict": None,
        "notes": list(notes), "metrics": to_dict(run.metrics), "measured": None,
    }  # fmt: skip


def _copy_files(run: ForeignRun, staged: Path) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Copy the measurements and the log of a run into its staged folder, with secrets redacted.

    Returns:
        Paths of the copies; files that are too large (`path`, `bytes`, `sha256`); and notes on failed copies.
    """
    copied: list[str] = []
    named: list[dict[str, Any]] = []
    notes: list[str] = []
    room = MAX_COPIES
    for file in run.files:
        name = os.path.relpath(file, run.source)
        if name.startswith((os.pardir, f"{folder.RECORD}{os.sep}")) and not name.endswith("train.log"):
            continue  # the record of another looplab run, or a file outside its folder
        if os.path.basename(name) == "train.log":
            name = f"{folder.RECORD}/train.log"
        try:
            size = file.stat().st_size
            if size > (MAX_LOG if name.endswith("train.log") else MAX_COPY) or size > room:
                named.append({"path": str(file), "bytes": size, "sha256": folder.hash_file(file)})
                continue
            _copy(file, staged / name, size)
            room -= size
            copied.append(name)
        except (OSError, UntrustedError) as error:
            notes.append(f"{name} could not be copied: {error}")
    return copied, named, notes


def _copy(source: Path, target: Path, limit: int) -> None:
    """Copy at most `limit` bytes of a file, and redact secrets in the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(source) as file, target.open("xb") as out:
        while limit > 0 and (data := file.read(min(CHUNK, limit))):
            out.write(data)
            limit -= len(data)
    scrub_file(target)
