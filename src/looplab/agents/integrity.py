"""Detect and undo changes by an agent to files that it must not change: code, settings, ended runs, models.

A snapshot has the size, times and inode of every such file, and the hash of small ones; untouched files are not read
again. If the agent is not confined, it also has the content of small files, so that they can be restored. It is held in
memory, out of the agent's reach.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.agents.base import AgentSpec
from looplab.agents.sandbox import confinement_of, writable_folders
from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.ledger.catalogue import AlarmEvent, FilesChangedEvent
from looplab.ledger.study import StudyLedger
from looplab.runs import folder
from looplab.runs.git import git_bytes, isolated
from looplab.untrusted import UntrustedError, load_json, read_bounded, real_path

MAX_HASHED_BYTES = 1 << 20
"""Largest file whose content is compared and kept; larger ones are compared by size, times and inode."""
MAX_KEPT_BYTES = 64 << 20
"""Total size of the contents that are kept."""
MAX_FILES = 200_000
TIME_S = 10.0
"""Seconds for one scan of all files; the rest is skipped, and the snapshot marked as incomplete."""
GIT_S = 20.0
"""Timeout of git in seconds."""
IMPORTED = {".py", ".so", ".pth"}
"""Suffixes of files that can change what runs by their mere existence."""
CODE = IMPORTED | {
    ".bash", ".c", ".cc", ".cfg", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".ini", ".ipynb", ".pyi", ".pyx", ".rs", ".sh",
    ".toml", ".yaml", ".yml",
}  # fmt: skip
OWN_FOLDERS = {"outputs", "agent_runs", "runs", "wandb", "mlruns"}
"""Top-level folders of a lab that runs and looplab itself write to."""
IGNORED_FOLDERS = {"__pycache__", "node_modules"}
TEMPORARY = ".tmp-"
"""Start of the names that the engine's files have while they are written; they come and go during a call."""
POINTERS = ("LATEST", "BEST")
MODELS = "models"
NEWEST = 5_000
"""Number of latest runs that are guarded."""
NAMED = 5
"""Number of files that an alarm lists; the event has all of them."""
CALLS = "agent_calls"
QUARANTINE = "quarantine"
"""Folders in `.looplab`."""
LARGEST_STATE = 256 << 20
UNGUARDED = {"notes.md"}
"""Files in a run's record that people and rules write to."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Metadata of a file; only root can change a file without changing any of it."""

    mode: int
    size: int
    modified: int
    changed: int
    inode: int
    link: str | None

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.mode)

    @classmethod
    def of(cls, path: str | Path) -> Stamp | None:
        """Return the stamp of a file or link; None if there is none."""
        try:
            found = os.lstat(path)
            link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
            if link is not None:
                with contextlib.suppress(OSError):  # its target counts
                    found = os.stat(path)
        except OSError:
            return None
        return cls(found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, link)


@dataclass(frozen=True, slots=True)
class GuardedChange:
    """A file that was changed."""

    path: Path
    how: str
    """changed | added | removed"""


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a snapshot covers."""

    lab: Path
    outputs: Path
    named: tuple[Path, ...]
    """Files and folders named in the lab file."""
    ended: tuple[str, ...]
    """Ended runs, newest first."""
    ignored: tuple[Path, ...] = ()
    """The answer file, and queues that people write to."""


class FileSnapshot:
    """State of a lab's guarded files at one time."""

    def __init__(self, guarded: Guarded, *, keeps: bool, earlier: FileSnapshot | None = None) -> None:
        """
        Args:
            keeps: Whether to keep the content of small files for `restore`.
            earlier: A previous snapshot; files with the same stamp are not read again.
        """
        self.guarded = guarded
        self.left_out = False
        """Whether there were too many files, or too little time, to scan all of them."""
        self._stamps: dict[str, Stamp] = {}
        self._hashes: dict[str, str] = {}
        self._contents: dict[str, bytes] = {}
        room = MAX_KEPT_BYTES
        for path, stamp in self._scan():
            self._stamps[path] = stamp
            if stamp.size > MAX_HASHED_BYTES or not stat.S_ISREG(stamp.kind):
                continue
            if earlier is not None and earlier._stamps.get(path) == stamp and (not keeps or path in earlier._contents):
                content, digest = earlier._contents.get(path), earlier._hashes.get(path)
            else:
                content = _read_small(path)
                digest = hashlib.sha256(content).hexdigest() if content is not None else None
            if digest is not None:
                self._hashes[path] = digest
            if keeps and content is not None and len(content) <= room:
                room -= len(content)
                self._contents[path] = content

    def has(self, path: Path) -> bool:
        """Return whether this file was there."""
        return str(path) in self._stamps

    def changes(self) -> list[GuardedChange]:
        """Return the files that have changed since the snapshot."""
        found = []
        complete = not self.left_out
        now = dict(self._scan())
        for path, before in self._stamps.items():
            stamp = now.get(path) or Stamp.of(path)
            if stamp == before:
                continue
            if stamp is None:
                found.append(GuardedChange(Path(path), "removed"))
            elif (stamp.kind, stamp.link) != (before.kind, before.link) or not self._is_same(path, stamp):
                found.append(GuardedChange(Path(path), "changed"))
        for path in now.keys() - self._stamps.keys():
            if complete and self._counts_when_added(path):
                found.append(GuardedChange(Path(path), "added"))
        return sorted(found, key=lambda change: change.path)

    def restore(self, changes: Iterable[GuardedChange], quarantine: Path) -> dict[Path, bool]:
        """Restore files. Their current versions are moved to the quarantine folder, never deleted.

        Returns:
            Whether each file was restored; large files cannot be.
        """
        done = {}
        for change in changes:
            path = str(change.path)
            content = self._contents.get(path)
            if change.how != "added" and content is None:
                done[change.path] = False
                continue
            try:
                # A file that is replaced is copied first: it must never be missing, in case the engine is killed here.
                before = self._stamps.get(path)
                is_replaced = content is not None and before is not None and before.link is None
                aside = _copy_aside if is_replaced and _is_plain_file(path) else _put_aside
                aside(change.path, quarantine / _relative(change.path, self.guarded.lab))
                if content is not None and before is not None:
                    change.path.parent.mkdir(parents=True, exist_ok=True)
                    if before.link is not None:
                        with contextlib.suppress(FileExistsError):
                            os.symlink(before.link, path)
                    target = real_path(change.path)
                    write_atomic(target, content)
                    os.chmod(target, stat.S_IMODE(before.mode))
                done[change.path] = True
            except OSError:
                done[change.path] = False
        return done

    def digests(self) -> dict[str, Any]:
        """Return stamps and hashes as plain data, in case the engine is killed during the call."""
        return {
            path: [s.mode, s.size, s.modified, s.changed, s.inode, s.link, self._hashes.get(path)]
            for path, s in self._stamps.items()
        }

    @classmethod
    def from_digests(cls, guarded: Guarded, data: Mapping[str, Any]) -> FileSnapshot:
        """Return a snapshot that can detect changes, but not restore files."""
        snapshot = cls.__new__(cls)
        snapshot.guarded = guarded
        snapshot.left_out = False
        snapshot._contents = {}
        snapshot._stamps = {path: Stamp(*entry[:6]) for path, entry in data.items()}
        snapshot._hashes = {path: entry[6] for path, entry in data.items() if entry[6] is not None}
        return snapshot

    def _is_same(self, path: str, stamp: Stamp) -> bool:
        digest = self._hashes.get(path)
        if digest is None or stamp.size > MAX_HASHED_BYTES:
            return False
        content = _read_small(path)
        return content is not None and hashlib.sha256(content).hexdigest() == digest

    def _counts_when_added(self, path: str) -> bool:
        return os.path.splitext(path)[1] in IMPORTED and not path.startswith(f"{self.guarded.outputs}{os.sep}")

    # -- which files

    def _scan(self) -> Iterator[tuple[str, Stamp]]:
        """Yield every guarded file once, with its stamp; code first, then the records of runs."""
        deadline = time.monotonic() + TIME_S
        visited: set[str] = {str(path) for path in self.guarded.ignored}
        for path in self._paths():
            if path in visited or os.path.basename(path).startswith(TEMPORARY):
                continue
            visited.add(path)
            if len(visited) > MAX_FILES or time.monotonic() > deadline:
                self.left_out = True
                return
            stamp = Stamp.of(path)
            if stamp is not None and not stat.S_ISDIR(stamp.kind):
                yield path, stamp

    def _paths(self) -> Iterator[str]:
        guarded = self.guarded
        for path in guarded.named:
            yield from _files_below(str(path), lambda _: True)
        yield from _tracked(guarded.lab)
        top = str(guarded.lab)
        yield from _files_below(top, lambda name: os.path.splitext(name)[1] in CODE, excluded=OWN_FOLDERS)
        for run in guarded.ended:
            yield from _files_below(f"{guarded.outputs}/{run}/{folder.RECORD}", lambda name: name not in UNGUARDED)
        yield from _files_below(f"{guarded.outputs}/{MODELS}", lambda name: not name.startswith("."))
        for run in guarded.ended:
            yield from _files_below(f"{guarded.outputs}/{run}", lambda name: name not in UNGUARDED)


def guarded_files(lab: Path, outputs: Path, study: StudyConfig, ended: Iterable[str], answer: Path) -> Guarded:
    """Return what an agent of this study must not change."""
    lab = lab.resolve()
    names = ["lab.yaml", "iterate.yaml", *study.data, *study.evaluator]
    names += [os.path.dirname(name) or name for name in study.base]
    names += [entry.rules for entry in study.proposers if entry.rules]
    names += [entry.agent.prompt for entry in study.proposers if entry.agent is not None and entry.agent.prompt]
    names += [word for word in study.launch.command if "{" not in word and not os.path.isabs(word)]
    start = lab / study.launch.cwd
    named = [path for name in names for path in dict.fromkeys((lab / name, start / name)) if os.path.lexists(path)]
    queues = [lab / entry.queue for entry in study.proposers if entry.queue]  # people write to them at any time
    return Guarded(lab, real_path(outputs), tuple(named), tuple(ended), (real_path(answer), answer, *queues))


def _files_below(top: str, counts: Callable[[str], bool], excluded: Iterable[str] = ()) -> Iterator[str]:
    """Yield the files below a folder whose names count, or the file itself.

    Links to folders are not followed; hidden folders and virtual environments are skipped.
    """
    if not os.path.isdir(top):
        if os.path.lexists(top):
            yield top
        return
    for parent, folders, files in os.walk(top):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        skipped = {*IGNORED_FOLDERS, *(excluded if parent == top else ())}
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        yield from (f"{parent}{os.sep}{name}" for name in sorted(files) if counts(name))


def _tracked(lab: Path) -> Iterator[str]:
    """Yield the files of the lab that git tracks."""
    try:
        with isolated(lab, timeout=GIT_S) as (_, env):
            names = git_bytes(lab, "ls-files", "-z", env=env, timeout=GIT_S, alone=True).split(b"\0")[:-1]
    except (LabError, OSError):
        return
    for name in map(os.fsdecode, names):
        first = name.partition("/")[0]
        if first not in OWN_FOLDERS and first != ".looplab":
            yield f"{lab}{os.sep}{name}"


def _read_small(path: str) -> bytes | None:
    try:
        return read_bounded(path, MAX_HASHED_BYTES)
    except (OSError, UntrustedError):
        return None


def _relative(path: Path, lab: Path) -> Path:
    return path.relative_to(lab) if path.is_relative_to(lab) else Path(*path.parts[1:])


def _is_plain_file(path: str) -> bool:
    """Return whether there is a regular file, not a link to one."""
    stamp = Stamp.of(path)
    return stamp is not None and stamp.link is None and stat.S_ISREG(stamp.kind)


def _copy_aside(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target, follow_symlinks=False)


def _put_aside(path: Path, target: Path) -> None:
    if os.path.lexists(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)


class CallGuard:
    """Compares the lab before and after each call of an agent; restores files and voids the answer if necessary.

    `begin` and `finish` run in the thread of the call, since they read many files; `prepare` and `rule` run in the
    engine's thread, inside its transaction.
    """

    def __init__(self, spec: AgentSpec, lab: Path, outputs: Path, study: StudyConfig, answer: Path,
                 tell: Callable[[str, str], None]) -> None:  # fmt: skip
        """
        Args:
            answer: File for the agent's answer; its folder is the agent's own.
            tell: Receives messages for people: the kind (`note` or `alarm`) and a sentence.

        Raises:
            LabError: The agent's folder would contain the lab's own files.
        """
        if not spec.dangerous and real_path(outputs).is_relative_to(real_path(answer.parent)):
            raise LabError(
                f"the agent's folder would be {answer.parent}, which contains the whole lab",
                hint="`answer` must be in its own folder, such as proposals/next_config.json",
            )
        self._confinement = confinement_of(spec)
        self._lab = lab.resolve()
        self._outputs = outputs
        self._study = study
        self._answer = answer
        self._tell = tell
        self._folders = [real_path(answer.parent), *writable_folders(spec, lab)]
        self._ended: tuple[str, ...] = ()
        self._snapshot: FileSnapshot | None = None
        self._changes: list[GuardedChange] = []
        self._pointers: dict[str, str | None] = {}
        self._void = ""  # what an earlier engine found
        self._restored_before: list[GuardedChange] = []  # what it found, and may have restored
        self._incomplete_reported = False  # whether it was reported that not all files are compared
        self.looks_only = False
        """Whether to restore and record nothing, for a preview."""

    def prepare(self, record: StudyLedger) -> None:
        """Read which runs have ended: nothing writes to them any more."""
        self._ended = tuple(run.id for run in reversed(record.runs(state="ended", limit=NEWEST)))
        self._changes, self._void, self._restored_before = [], "", []

    def begin(self, call: str) -> None:
        """Take a snapshot before the agent is called."""
        guarded = guarded_files(self._lab, self._outputs, self._study, self._ended, self._answer)
        self._pointers = {name: _pointed(self._outputs, name) for name in POINTERS}
        free = not self._confinement.is_complete
        self._snapshot = FileSnapshot(guarded, keeps=free, earlier=self._snapshot)
        if free:
            self._save(call)

    def finish(self) -> None:
        """Compare the files once no process of the agent is left."""
        assert self._snapshot is not None
        self._changes = self._snapshot.changes()

    def recover(self, call: str) -> None:
        """Compare with the snapshot of an earlier engine, which started the call."""
        try:
            state = load_json(read_bounded(self._state(call), LARGEST_STATE))
            self._void = str(state.get("void", ""))
            self._restored_before = [GuardedChange(Path(path), how) for path, how in state.get("changes", ())]
            self._ended = tuple(state["ended"])
            self._pointers = dict(state["points"])
            guarded = guarded_files(self._lab, self._outputs, self._study, self._ended, self._answer)
            self._snapshot = FileSnapshot.from_digests(guarded, state["files"])
            self._changes = self._snapshot.changes()
        except (OSError, UntrustedError, AttributeError, LookupError, TypeError, ValueError):
            self._snapshot = None
            if not self._confinement.is_complete:
                self._void = "it is unknown which files the agent changed, so its answer is void"

    def rule(self, record: StudyLedger, call: str) -> str | None:
        """Record changes during the call, restore what the agent may have changed, and raise an alarm.

        Returns:
            Why the answer is void; None if it is valid.
        """
        changes = [change for change in self._changes if not self._is_explained(record, change)]
        changes += self._wrong_pointers(record) + self._spoilt_models(record)
        complete = self._confinement.is_complete
        blamed = [change for change in changes if not complete or self._is_writable(change.path)]
        others = [change for change in changes if change not in blamed]
        if self.looks_only:
            return self._void or (self._names(blamed) if blamed else None)
        if others:
            text = f"{self._names(others)} while the agent ran, but not by the agent, which could not write there"
            record.record_agent(FilesChangedEvent(call=call, by="somebody else", files=self._listed(others)))
            self._tell("note", text)
        if self._snapshot is not None and self._snapshot.left_out and not self._incomplete_reported:
            self._incomplete_reported = True
            self._tell("note", "the lab has too many files to compare all of them before and after an agent call")
        void = self._void
        remaining = {change.path for change in changes}
        restored_before = [change for change in self._restored_before if change.path not in remaining]
        if restored_before:  # by an engine that was killed before it recorded that
            files = self._listed(restored_before, {change.path: True for change in restored_before})
            record.record_agent(FilesChangedEvent(call=call, by="agent", confined=self._confinement.by, files=files))
        if blamed:
            void = f"{self._names(blamed)} while the agent ran, so its answer is void"
            restored = self._restore(record, call, blamed, void)
            void += self._describe_restored(restored)
            files = self._listed(blamed, restored)
            record.record_agent(FilesChangedEvent(call=call, by="agent", confined=self._confinement.by, files=files))
        if void:
            record.alarm(None, AlarmEvent(text=void, call=call))
            self._tell("alarm", void)
        self._changes, self._pointers, self._void, self._restored_before = [], {}, "", []
        # Not before the commit: if the engine is killed until then, the call is open and the files look unchanged.
        record.ledger.after_commit(lambda: self._state(call).unlink(missing_ok=True))
        return void or None

    def _restore(self, record: StudyLedger, call: str, blamed: Sequence[GuardedChange], void: str) -> dict[Path, bool]:
        if self._snapshot is None:
            return {}
        # A restored file looks unchanged: record the finding first, in case the engine is killed here.
        found = [(str(change.path), change.how) for change in blamed]
        self._save(call, {"void": void, "changes": found})
        points = {self._outputs / name: run for name, run in _pointing(record).items() if run is not None}
        files = [change for change in blamed if change.path not in points]
        quarantine = self._lab / ".looplab" / QUARANTINE / call
        restored = self._snapshot.restore(files, quarantine)
        for change in blamed:
            if restored.get(change.path) is False and change.path.parent == real_path(self._outputs) / MODELS:
                aside = quarantine / _relative(change.path, self._lab)
                restored[change.path] = self._copy_again(record, change.path, aside)
            if change.path in points:
                _put_aside(change.path, quarantine / change.path.name)
                folder.point(self._outputs, change.path.name, points[change.path])
                restored[change.path] = True
        return restored

    def _describe_restored(self, restored: Mapping[Path, bool]) -> str:
        lost = [self._shown(path) for path, done in restored.items() if not done]
        text = "; restored, the changed files are in .looplab/quarantine" if any(restored.values()) else ""
        return text + (f"; NOT restored: {', '.join(lost[:NAMED])}" if lost else "")

    def _is_explained(self, record: StudyLedger, change: GuardedChange) -> bool:
        """Return whether looplab itself wrote this; then the ledger has its hash."""
        path = change.path
        if not path.is_relative_to(real_path(self._outputs)):
            return False
        run, *rest = path.relative_to(real_path(self._outputs)).parts
        if run == MODELS and path.name.startswith("latest"):
            newest = record.runs(state="ended", limit=1)
            return [one.id for one in newest] != list(self._ended[:1])
        recorded = record.kept_files() if run == MODELS else record.recorded_files(run)
        name = "/".join((run, *rest) if run == MODELS else rest)
        return name in recorded and folder.hash_file(path) == recorded[name]

    def _spoilt_models(self, record: StudyLedger) -> list[GuardedChange]:
        """Return the copies of checkpoints that looplab made during the call and that have changed since."""
        if self._snapshot is None:
            return []
        found = []
        for name, digest in record.kept_files().items():
            path = real_path(self._outputs) / name
            is_new = path.parent.name == MODELS and not self._snapshot.has(path)
            if is_new and os.path.lexists(path) and folder.hash_file(path) != digest:
                found.append(GuardedChange(path, "changed"))
        return found

    def _copy_again(self, record: StudyLedger, path: Path, aside: Path) -> bool:
        """Copy the checkpoint of a run again that was kept as this file; return False if it is not there any more."""
        digest = record.kept_files().get(f"{MODELS}/{path.name}")
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            about = load_json(read_bounded(path.with_suffix(".json"), MAX_HASHED_BYTES))
            source = real_path(self._outputs / str(about["model_path"]))
            if digest is None or folder.hash_file(source) != digest:
                return False
            (_copy_aside if _is_plain_file(str(path)) else _put_aside)(path, aside)
            shutil.copyfile(source, temporary)
            os.replace(temporary, path)
        except (OSError, UntrustedError, LookupError, TypeError):
            return False
        return folder.hash_file(path) == digest

    def _wrong_pointers(self, record: StudyLedger) -> list[GuardedChange]:
        if self._confinement.is_complete:
            return []
        expected = _pointing(record)
        # The engine updates them with a delay: any run that they ever pointed to is valid.
        valid = {"LATEST": {run.id for run in record.runs(state="ended", limit=NEWEST)}, "BEST": {*record.bests()}}
        return [
            GuardedChange(self._outputs / name, "changed")
            for name, before in self._pointers.items()
            if expected[name] is not None and _pointed(self._outputs, name) not in {before, *valid[name]}
        ]

    def _is_writable(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)

    def _names(self, changes: Sequence[GuardedChange]) -> str:
        named = [f"{self._shown(change.path)} was {change.how}" for change in changes[:NAMED]]
        more = f" and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
        return ", ".join(named) + more

    def _listed(
        self, changes: Sequence[GuardedChange], restored: Mapping[Path, bool] | None = None
    ) -> list[dict[str, Any]]:
        return [{"path": self._shown(change.path), "how": change.how,
                 **({} if restored is None else {"restored": restored.get(change.path, False)})}
                for change in changes]  # fmt: skip

    def _shown(self, path: Path) -> str:
        return str(_relative(path, self._lab))

    def _state(self, call: str) -> Path:
        return self._lab / ".looplab" / CALLS / f"{call}.json"

    def _save(self, call: str, found: Mapping[str, Any] | None = None) -> None:
        """Write what an engine that continues this one needs to compare the files; `found`: what differs."""
        assert self._snapshot is not None
        path = self._state(call)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {"ended": list(self._ended), "files": self._snapshot.digests(), "points": self._pointers}
        write_atomic(path, dump_json({**state, **(found or {})}))


def _pointed(outputs: Path, name: str) -> str | None:
    try:
        return folder.pointed(outputs, name)
    except OSError:
        return None


def _pointing(record: StudyLedger) -> dict[str, str | None]:
    """Return the runs that LATEST and BEST must point to."""
    latest, best = record.runs(state="ended", limit=1), record.best()
    return {"LATEST": latest[-1].id if latest else None, "BEST": best.id if best else None}
