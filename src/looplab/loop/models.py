"""The models that a study keeps: `models/best` and `models/latest`, copies of a run's checkpoint.

Copies can be slow, so a background thread makes them under a hidden name. The engine then records the hash and renames
the copy. Later writes to the checkpoint do not affect it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from looplab.config.files import dump_json, write_atomic
from looplab.config.lab import WarmStartConfig
from looplab.errors import LabError
from looplab.ledger.study import StudyLedger
from looplab.ledger.view import RunRow
from looplab.loop.events import Note
from looplab.loop.outbox import Outbox
from looplab.loop.recording import Recorder
from looplab.loop.warm_start import MODELS, find_checkpoint
from looplab.measure.discover import describe
from looplab.runs import folder
from looplab.untrusted import open_regular

FICLONE = 0x40049409
"""Linux ioctl that clones a file copy-on-write."""
CHUNK = 1 << 20
TEMPORARY = ".tmp-model-"


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A finished copy, not yet recorded and renamed, or a failed one."""

    name: str
    """`best` or `latest`."""
    run: RunRow
    temporary: Path | None = None
    target: Path | None = None
    digest: str = ""
    about: bytes = b""
    error: Exception | None = None
    """Why the copy failed; None if it succeeded."""

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of the files that `install` writes, by path relative to the study's folder."""
        assert self.target is not None
        return {
            f"{MODELS}/{self.target.name}": self.digest,
            f"{MODELS}/{self.name}.json": folder.hash_bytes(self.about),
        }

    def install(self) -> None:
        """Move the copy to its final name, and write its description."""
        assert self.temporary is not None
        assert self.target is not None
        os.replace(self.temporary, self.target)
        write_atomic(self.target.with_name(f"{self.name}.json"), self.about, sync=False)


class ModelKeeper:
    """Copies checkpoints in a background thread."""

    def __init__(
        self, warm: WarmStartConfig, outputs: Path, wake: Callable[[], None], record: StudyLedger | None = None
    ) -> None:
        """Create the keeper; its thread starts with the first request.

        Args:
            wake: Called from the thread after each copy.
            record: Used to attribute checkpoints outside the run folders to runs.
        """
        self._warm = warm
        self._record = record
        self._outputs = outputs
        self._wake = wake
        self._changed = threading.Condition()
        self._wanted: dict[str, tuple[RunRow, Path]] = {}
        self._ready: list[KeptModel] = []
        self._working = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def request(self, name: str, run: RunRow) -> None:
        """Queue a copy of a run's checkpoint; replaces a request for the same name that has not started."""
        try:  # not in the worker: the ledger belongs to the engine's thread
            lab = self._outputs.parent.parent
            source = find_checkpoint(self._warm, lab, self._outputs, run, self._record)
        except (LabError, OSError):
            return  # the run has no checkpoint
        with self._changed:
            self._wanted[name] = (run, source)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="looplab-models", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self) -> list[KeptModel]:
        """Return the copies finished since the last call."""
        with self._changed:
            ready, self._ready = self._ready, []
        return ready

    def finish(self) -> list[KeptModel]:
        """Wait for all requested copies; return those that were not taken yet."""
        with self._changed:
            while self._wanted or self._working:
                self._changed.wait()
        return self.take()

    def close(self) -> None:
        """Drop pending requests, and stop the thread after its current copy."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def is_current(self, name: str, run: RunRow, recorded: dict[str, str]) -> bool:
        """Return whether `models/<name>` is the recorded copy of this run's checkpoint, according to its description.

        Args:
            recorded: SHA-256 by path relative to the study's folder, from the ledger.
        """
        path = self._outputs / MODELS / f"{name}.json"
        try:
            return (
                folder.hash_file(path) == recorded.get(f"{MODELS}/{name}.json") and run.id.encode() in path.read_bytes()
            )
        except OSError:
            return False

    def recover(self, best: RunRow | None, ended: Sequence[RunRow], recorded: dict[str, str]) -> None:
        """Request the copies that a killed engine had no time for.

        Args:
            best: The best run.
            ended: Ended runs.
            recorded: As for `is_current`.
        """
        folder.sweep(self._outputs / MODELS)
        latest = max((run for run in ended if run.status == "ok"), key=lambda run: run.ended or 0.0, default=None)
        for name, run in (("best", best), ("latest", latest)):
            if run is not None and not self.is_current(name, run, recorded):
                self.request(name, run)

    def keep(self, copies: Sequence[KeptModel], recorder: Recorder, outbox: Outbox) -> None:
        """Record copies of checkpoints and name them; after a crash in between, the next engine copies again."""
        assert self._record is not None
        for copy in copies:
            with self._record.ledger.write(), recorder.tolerant(copy.run, "copying its model"):
                if copy.error is not None:
                    raise copy.error
                self._record.kept(copy.files)
            notes = recorder.take_notes(copy.run.id)
            if copy.error is None and not notes:
                try:
                    copy.install()
                except OSError as error:
                    if folder.concerns_lab(error, self._outputs):
                        raise
                    notes = [f"its model could not be copied: {describe(error)}"]
            for note in notes:
                outbox.tell(Note(f"run {copy.run.id}: {note}", copy.run.id))

    def _work(self) -> None:
        """Copy requested checkpoints until the keeper is closed."""
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                name, (run, source) = self._wanted.popitem()
                self._working = True
            model = self._copy(name, run, source)
            with self._changed:
                self._ready.append(model)
                self._working = False
                self._changed.notify_all()
            self._wake()

    def _copy(self, name: str, run: RunRow, source: Path) -> KeptModel:
        """Copy one checkpoint; errors are returned in the result."""
        try:
            models = self._outputs / MODELS
            models.mkdir(exist_ok=True)
            target = models / f"{name}{source.suffix}"
            temporary = models / f"{TEMPORARY}{name}-{run.id}{source.suffix}"
            digest = copy_file(source, temporary)
            outputs = self._outputs.resolve()
            inner = source.relative_to(outputs) if source.is_relative_to(outputs) else source
            about = {
                "run_id": run.id, "model_path": str(inner),
                "objective": run.objective, "sha256": digest, "timestamp": run.ended,
            }  # fmt: skip
            return KeptModel(name, run, temporary, target, digest, dump_json(about, finite=True))
        except Exception as error:  # noqa: BLE001 (reported to the engine)
            return KeptModel(name, run, error=error)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file, as a copy-on-write clone if the file system supports it; return the SHA-256 of the copy."""
    total = hashlib.sha256()
    target.unlink(missing_ok=True)
    with open_regular(source) as file, target.open("xb+") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, file.fileno())
            while data := copy.read(CHUNK):
                total.update(data)
        except OSError:
            copy.truncate(0)
            copy.seek(0)
            while data := file.read(CHUNK):
                copy.write(data)
                total.update(data)
    return total.hexdigest()
