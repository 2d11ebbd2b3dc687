"""Anchors: the head of the chain, published where whoever can write the ledger cannot change it.

A hash chain shows careless edits; whoever can write the file can compute all its hashes again. A head that is kept
elsewhere (a pushed git note, a file on another disk, a mail) fixes every event up to it. An anchor is one line, with
the SSH signature of its first six fields if the lab file names a key:

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
from looplab.ledger.ledger import Ledger
from looplab.ledger.schema import DRAW_ID
from looplab.runs.git import NOBODY, git
from looplab.runs.programs import ProgramError, run_program
from looplab.runs.redact import redact_argv, redact_text

ANCHORED, FAILED = "anchored", "anchor failed"
"""Events: where the head was published, and where it could not be."""
NOTES = "refs/notes/looplab"
NAMESPACE = "looplab"
"""Of the signatures: one that was made for another purpose does not count."""
LINE = re.compile(
    r"looplab-anchor v1 ([0-9a-f]{16}) ([1-9][0-9]*) ([0-9a-f]{64}) (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"
    r"(?: (U1NIU0lH[A-Za-z0-9+/]+=*))?(?=\s|$)"  # "SSHSIG" in base64
)
SHOWN_IN_NOTE = 64
"""Lines in the note of one commit; the older ones are in the history of the notes, which is read, too."""
TIMEOUT_S = 30.0
"""Seconds that git, ssh-keygen or a command may take."""
CLOSE_S = 60.0
"""Seconds that an engine waits at its end for the last anchor."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The head of a ledger at one moment."""

    seq: int | None
    """The number of the last event; None: only its hash is known."""
    hash: str
    """Of that event: 64 hex digits, or the first 12 or more of them if a person typed it."""
    ledger: str | None = None
    """The id of the ledger; None: not known."""
    at: str | None = None
    """UTC, by the clock of the machine that published it."""
    signature: str | None = None
    """An SSH signature, in base64."""

    @property
    def text(self) -> str:
        """What is signed, without the newline at its end."""
        return f"looplab-anchor v1 {self.ledger} {self.seq} {self.hash} {self.at}"

    @property
    def line(self) -> str:
        return f"{self.text} {self.signature}" if self.signature else self.text


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of an anchor."""

    anchor: Anchor
    where: tuple[str, ...]
    """Where it was published: `git`, `file PATH`, `command NAME`."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why it was not published there; `sign`: why it is not signed."""


def head_anchor(ledger: Ledger) -> Anchor:
    """The anchor of a ledger as it is now."""
    if ledger.id() is None:
        with ledger.write():
            ledger.execute(DRAW_ID)
    seq, digest = ledger.head()
    if seq == 0:
        raise LabError("nothing is recorded yet", hint="start with `looplab run`")
    return Anchor(seq, digest, ledger.id(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def parse_anchors(text: str) -> list[Anchor]:
    """All anchors in a text, each once. They are found inside other lines, too: quoted in a mail, marked as added in a
    diff, or behind a line that was cut off by a full disk."""
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
    """Publish the head wherever the lab file says, then record where. No transaction may be open.

    A process that is killed in between leaves an anchor that the chain does not mention; that is harmless, and the next
    one is published as usual.

    Args:
        only: The targets to publish to; None: all.
        reported: Targets that are known to fail, which is not recorded again.
    """
    anchor = head_anchor(ledger)
    problems: dict[str, str] = {}
    for key in [config.sign for config in configs if config.sign][:1]:
        try:
            anchor = replace(anchor, signature=sign(anchor.text, lab / Path(key).expanduser()))
        except LabError as error:
            problems["sign"] = redact_text(str(error))
    ledger.sync()  # after a power cut, an anchor of events that are gone would look like a rewrite
    where = []
    for name, put in _targets(lab, configs).items():
        if only is None or name in only:
            try:
                put(anchor.line)
                where.append(name)
            except (LabError, OSError) as error:
                problems[name] = redact_text(str(error))
    news = {name: why for name, why in problems.items() if name not in reported}
    if where or news:
        with ledger.write():
            if where:
                ledger.record(
                    ANCHORED, "", ledger=anchor.ledger, seq=anchor.seq, hash=anchor.hash, at=anchor.at, where=where
                )
            for name, why in news.items():
                ledger.record(FAILED, "", where=name, problem=why)
    return Publication(anchor, tuple(where), problems)


def file_of(lab: Path, config: AnchorConfig) -> Path | None:
    return lab / Path(config.file).expanduser() if config.file else None


def _targets(lab: Path, configs: Sequence[AnchorConfig]) -> dict[str, Callable[[str], None]]:
    """What publishes a line, by the name of where it goes."""
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
    # Its folder is not created: a share that is not mounted must be a problem, not a file on the wrong disk.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _annotate(lab: Path, line: str) -> None:
    """Add the line to the note of HEAD. Neither the work tree nor the index is touched."""

    def ask(*args: str, ok: bool = False) -> str:
        return git(lab, *NOBODY, *args, ok=ok, timeout=TIMEOUT_S, alone=True)

    if not ask("rev-parse", "--verify", "--quiet", "HEAD", ok=True):
        raise LabError("the lab is not in a git repository with a commit", file=lab)
    with _locked(Path(ask("rev-parse", "--path-format=absolute", "--git-common-dir"))):
        before = ask("notes", "--ref", NOTES, "show", "HEAD", ok=True).splitlines()
        ask("notes", "--ref", NOTES, "add", "-f", "-m", "\n".join([*before[1 - SHOWN_IN_NOTE :], line]), "HEAD")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process of looplab at a time write notes: of two that git makes at once, it keeps one."""
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
    """Publishes from a thread of its own: when asked, every so often, and when closed.

    A slow disk, git or command never holds up the engine, and what goes wrong is reported once, to `tell` and in the
    chain, until it works again.
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
        """Publish the head soon; called after the transaction that it is about."""
        self._due.set()

    def close(self) -> None:
        """Publish a last time, and wait for that within reason."""
        self._closing.set()
        self._due.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._tell(f"the last anchor could not be published in {CLOSE_S:g} s; `looplab anchor` publishes it")

    def _run(self) -> None:
        last = False
        while not last:
            asked = self._due.wait(self._config.every)
            self._due.clear()
            last = self._closing.is_set()
            self._publish(asked)

    def _publish(self, asked: bool) -> None:
        try:
            with closing(Ledger(self._ledger, create=False)) as ledger:
                only = None
                if not asked and _last_kind(ledger) in (ANCHORED, FAILED):
                    only = self._failing.keys()  # nothing has happened since: try what failed once more
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
        LabError: Nobody who is allowed did, or the signature is of another text.
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
