"""Anchors: the head of the chain, published out of reach of those who can write the ledger.

A hash chain reveals careless edits, but anyone who can write the file can recompute all hashes. A head that is kept
elsewhere (a pushed git note, a file on another disk, a mail) fixes every event up to it. An anchor is one line, with
an SSH signature of its first six fields if the lab file names a key:

    looplab-anchor v1 <ledger id> <number of the event> <its hash> <UTC time> [<signature in base64>]
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sqlite3
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from looplab.config.lab import AnchorConfig
from looplab.errors import LabError
from looplab.ledger.catalogue import AnchoredEvent, AnchorFailedEvent
from looplab.ledger.ledger import Ledger
from looplab.ledger.schema import DRAW_ID
from looplab.runs.git import NOBODY, git
from looplab.runs.programs import ProgramError, run_program
from looplab.runs.redact import redact_argv, redact_text

NOTES = "refs/notes/looplab"
NAMESPACE = "looplab"
"""Namespace of the signatures; one made for another purpose is not valid."""
LINE = re.compile(
    r"looplab-anchor v1 ([0-9a-f]{16}) ([1-9][0-9]*) ([0-9a-f]{64}) (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"
    r"(?: (U1NIU0lH[A-Za-z0-9+/]+=*))?(?=\s|$)"  # "SSHSIG" in base64
)
SHOWN_IN_NOTE = 64
"""Lines in the note of one commit; older ones are in the history of the notes, which is read as well."""
TIMEOUT_S = 30.0
"""Seconds that git, ssh-keygen or a command may take."""
CLOSE_S = 60.0
"""Seconds that a closing engine waits for the last anchor."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The head of a ledger at one moment."""

    seq: int | None
    """Number of the last event; None: only its hash is known."""
    hash: str
    """Hash of that event: 64 hex digits, or at least the first 12 if typed by a person."""
    ledger: str | None = None
    """Id of the ledger; None: unknown."""
    at: str | None = None
    """UTC time, by the clock of the publishing machine."""
    signature: str | None = None
    """SSH signature, in base64; None: not signed."""

    @property
    def text(self) -> str:
        """The signed text, without its trailing newline."""
        return f"looplab-anchor v1 {self.ledger} {self.seq} {self.hash} {self.at}"

    @property
    def line(self) -> str:
        """The anchor as it is published."""
        return f"{self.text} {self.signature}" if self.signature else self.text


@dataclass(frozen=True, slots=True)
class Publication:
    """The result of publishing an anchor."""

    anchor: Anchor
    where: tuple[str, ...]
    """Targets it was published to: `git`, `file PATH`, `command NAME`."""
    problems: dict[str, str] = field(default_factory=dict)
    """Target → why publishing failed; `sign`: why it is not signed."""


def head_anchor(ledger: Ledger) -> Anchor:
    """Return an anchor of the current head.

    Raises:
        LabError: The ledger has no events.
    """
    if ledger.id() is None:
        with ledger.write():
            ledger.execute(DRAW_ID)
    seq, digest = ledger.head()
    if seq == 0:
        raise LabError("nothing is recorded yet", hint="start with `looplab run`")
    return Anchor(seq, digest, ledger.id(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def parse_anchors(text: str) -> list[Anchor]:
    """Return all distinct anchors in a text. They are also found inside other lines: quoted in a mail, added in a diff,
    or after a line that a full disk truncated."""
    found = {match[0]: match for match in LINE.finditer(text)}
    return [Anchor(int(m[2]), m[3], m[1], m[4], m[5]) for m in found.values()]


# -- publishing


def publish(
    ledger: Ledger,
    lab: Path,
    configs: Sequence[AnchorConfig],
    *,
    only: Collection[str] | None = None,
    reported: Collection[str] = (),
) -> Publication:
    """Publish the head to all configured targets, then record where. No transaction may be open.

    A process that is killed in between leaves an anchor that the chain does not mention, which is harmless.

    Args:
        ledger: The ledger.
        lab: The lab; relative paths in `configs` start here.
        configs: Where to publish, and the key to sign with.
        only: Targets to publish to; None: all.
        reported: Targets whose failure is already recorded.
    """
    anchor = head_anchor(ledger)
    problems: dict[str, str] = {}
    for key in [config.sign for config in configs if config.sign][:1]:
        try:
            anchor = replace(anchor, signature=sign(anchor.text, lab / Path(key).expanduser()))
        except LabError as error:
            problems["sign"] = redact_text(str(error))
    ledger.sync()  # after a power failure, an anchor of lost events would look like a rewrite
    where = []
    for name, publish_line in _targets(lab, configs).items():
        if only is None or name in only:
            try:
                publish_line(anchor.line)
                where.append(name)
            except (LabError, OSError) as error:
                problems[name] = redact_text(str(error))
    new_problems = {name: why for name, why in problems.items() if name not in reported}
    if where or new_problems:
        with ledger.write():
            if where:
                assert anchor.ledger is not None
                assert anchor.seq is not None
                assert anchor.at is not None
                event = AnchoredEvent(ledger=anchor.ledger, seq=anchor.seq, hash=anchor.hash, at=anchor.at, where=where)
                ledger.record(event, "")
            for name, why in new_problems.items():
                ledger.record(AnchorFailedEvent(where=name, problem=why), "")
    return Publication(anchor, tuple(where), problems)


def file_of(lab: Path, config: AnchorConfig) -> Path | None:
    return lab / Path(config.file).expanduser() if config.file else None


def _targets(lab: Path, configs: Sequence[AnchorConfig]) -> dict[str, Callable[[str], None]]:
    """Return the functions that publish a line, by the name of their target."""
    found: dict[str, Callable[[str], None]] = {}
    for config in configs:
        path = file_of(lab, config)
        if path is not None:
            found[f"file {path}"] = partial(_append, path)
        if config.git:
            found["git"] = partial(_annotate, lab)
        if config.command is not None:
            found[" ".join(["command", *redact_argv(config.command)])] = partial(_call, config.command, lab)
    return found


def _append(path: Path, line: str) -> None:
    data = f"{line}\n".encode()
    # The folder is not created: a missing mount must be an error, not a file on the wrong disk.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _annotate(lab: Path, line: str) -> None:
    """Add the line to the git note of HEAD. The work tree and the index are not touched."""

    def run_git(*args: str, ok: bool = False) -> str:
        return git(lab, *NOBODY, *args, ok=ok, timeout=TIMEOUT_S, alone=True)

    if not run_git("rev-parse", "--verify", "--quiet", "HEAD", ok=True):
        raise LabError("the lab is not in a git repository with a commit", file=lab)
    with _locked(Path(run_git("rev-parse", "--path-format=absolute", "--git-common-dir"))):
        before = run_git("notes", "--ref", NOTES, "show", "HEAD", ok=True).splitlines()
        run_git("notes", "--ref", NOTES, "add", "-f", "-m", "\n".join([*before[1 - SHOWN_IN_NOTE :], line]), "HEAD")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Serialise writers of notes: of two concurrent notes, git keeps only one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _call(command: Sequence[str], lab: Path, line: str) -> None:
    try:
        run_program(command, f"{line}\n".encode(), timeout=TIMEOUT_S, cwd=lab)
    except ProgramError as error:
        raise LabError(f"{command[0]} {error}") from None


class Publisher:
    """Publishes anchors from its own thread: on request, at an interval, and when closed.

    A slow disk, git or command never blocks the engine. A failing target is reported once, to `tell` and in the chain,
    until it works again.
    """

    def __init__(self, ledger: Path, lab: Path, config: AnchorConfig, tell: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._lab = lab
        self._config = config
        self._tell = tell
        self._failing: dict[str, str] = {}
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looplab-anchor", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Publish the head soon. Call this after the transaction has committed."""
        self._due.set()

    def close(self) -> None:
        """Publish a last time; wait at most CLOSE_S seconds."""
        self._closing.set()
        self._due.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._tell(f"the last anchor could not be published in {CLOSE_S:g} s; `looplab anchor` publishes it")

    def _run(self) -> None:
        last = False
        while not last:
            is_requested = self._due.wait(self._config.every)
            self._due.clear()
            last = self._closing.is_set()
            self._publish(is_requested=is_requested)

    def _publish(self, *, is_requested: bool) -> None:
        try:
            with closing(Ledger(self._ledger, create=False)) as ledger:
                only = None
                if not is_requested and _last_kind(ledger) in (AnchoredEvent.kind, AnchorFailedEvent.kind):
                    only = self._failing.keys()  # no new events: only retry what failed
                    if not only:
                        return
                problems = publish(ledger, self._lab, [self._config], only=only, reported=self._failing).problems
        except (LabError, OSError, sqlite3.Error) as error:
            problems = {"ledger": str(error)}
        for name in problems.keys() - self._failing.keys():
            self._tell(f"anchor: {name}: {problems[name]}; the study continues")
        self._failing = problems


def _last_kind(ledger: Ledger) -> str:
    row = ledger.one("SELECT kind FROM events ORDER BY seq DESC LIMIT 1")
    return row["kind"] if row else ""


# -- signatures


def sign(text: str, key: Path) -> str:
    """Return the SSH signature of a text, in base64 on one line. Never asks for a passphrase."""
    armored = _ssh_keygen("sign", "-n", NAMESPACE, "-f", str(key), stdin=text)
    return "".join(line for line in armored.splitlines() if not line.startswith("-----"))


def signer_of(anchor: Anchor, allowed: Path) -> str:
    """Return the principal of the allowed-signers file that signed an anchor.

    Raises:
        LabError: No allowed signer signed it, or the signature is for another text.
    """
    assert anchor.signature is not None
    assert anchor.at is not None
    at = "-Overify-time=" + re.sub(r"\D", "", anchor.at)
    with TemporaryDirectory(prefix="looplab-") as folder:
        file = Path(folder, "signature")
        body = "\n".join(textwrap.wrap(anchor.signature, 70))
        file.write_text(f"-----BEGIN SSH SIGNATURE-----\n{body}\n-----END SSH SIGNATURE-----\n")
        found = _ssh_keygen("find-principals", "-s", str(file), "-f", str(allowed), at).splitlines()[0]
        _ssh_keygen("verify", "-n", NAMESPACE, "-I", found, "-s", str(file), "-f", str(allowed), at, stdin=anchor.text)
    return found


def _ssh_keygen(what: str, *args: str, stdin: str = "") -> str:
    env = {**os.environ, "SSH_ASKPASS_REQUIRE": "never", "TZ": "UTC"}
    data = f"{stdin}\n".encode() if stdin else b""
    try:
        return run_program(["ssh-keygen", "-Y", what, *args], data, timeout=TIMEOUT_S, env=env, capture=True).decode()
    except ProgramError as error:
        raise LabError(f"ssh-keygen {error}") from None
