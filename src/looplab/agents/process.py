"""An agent's process under its supervisor, as two streams of lines. No process of the agent outlives it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from looplab.agents import supervisor as agent_supervisor
from looplab.agents.lines import Lines
from looplab.errors import LabError
from looplab.launch import procfs, supervisor

MARK = "LOOPLAB_AGENT_LOG"
"""Environment variable that identifies the processes of an agent: the path of its log."""
TICK_S = 0.2
"""Maximum seconds between two ticks."""
CHUNK = 1 << 16


class AgentProcess:
    """Runs an agent under its supervisor; a context manager."""

    def __init__(self, argv: list[str], env: Mapping[str, str], cwd: Path, grace: float) -> None:
        self.ending = False
        """Whether it was asked to stop."""
        self.exit_code: int | None = None
        self.error = ""
        self.last_line = time.monotonic()
        self.printed = 0
        """Bytes printed so far."""
        self._mark = env[MARK]
        self._report = b""
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            arguments = (theirs.fileno(), grace, _tag_of(self._mark))
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", agent_supervisor.__file__, *map(str, arguments), *argv],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env=dict(env),
                    cwd=cwd,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal goes to looplab, which then ends the agent
                )
            except (OSError, ValueError) as error:  # the command line is too long or contains NUL
                self._lifeline.close()
                raise LabError(f"the agent cannot be started: {getattr(error, 'strerror', None) or error}") from None

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes of the agent."""
        self._lifeline.close()
        for stream in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        self._popen.wait()
        if not self._report:  # the supervisor itself was killed
            kill_marked(self._mark)

    def end(self) -> None:
        """Ask the supervisor to end the agent; do not wait."""
        self.ending = True
        with contextlib.suppress(OSError):
            self._lifeline.send(b"x")

    def lines(self, prompt: str, tick: Callable[[], None]) -> Iterator[tuple[str, str]]:
        """Yield (stream, line) until the agent is gone.

        Args:
            prompt: Text for its stdin.
            tick: Called at least every TICK_S seconds.
        """
        popen = self._popen
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stderr is not None
        rest = memoryview(prompt.encode("utf-8", "replace"))
        gone = False
        cut = {"stdout": Lines(), "stderr": Lines()}
        with selectors.DefaultSelector() as selector:
            for name, stream in (("stdout", popen.stdout), ("stderr", popen.stderr), ("stdin", popen.stdin)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_WRITE if name == "stdin" else selectors.EVENT_READ, name)
            selector.register(self._lifeline, selectors.EVENT_READ, "lifeline")
            while selector.get_map():
                ready = selector.select(TICK_S)
                if gone and not ready:  # held open by a process that could not be killed
                    break
                for key, _ in ready:
                    if key.data == "stdin":
                        rest = self._feed(popen.stdin, rest)
                        if not rest:
                            selector.unregister(popen.stdin)
                            popen.stdin.close()
                    elif key.data == "lifeline":
                        data = self._read_report()
                        self._report += data
                        if not data:
                            gone = True
                            selector.unregister(self._lifeline)
                            if not self._report:
                                kill_marked(self._mark)
                    else:
                        data = os.read(key.fd, CHUNK)
                        self.printed += len(data)
                        if not data:
                            selector.unregister(key.fileobj)
                        if b"\n" in data:
                            self.last_line = time.monotonic()
                        for line in cut[key.data].feed(data) if data else cut[key.data].finish():
                            yield key.data, line
                tick()
        self._popen.wait()
        self._parse_report()

    @staticmethod
    def _feed(stdin: IO[bytes], rest: memoryview) -> memoryview:
        try:
            return rest[os.write(stdin.fileno(), rest[:CHUNK]) :] if rest else rest
        except BlockingIOError:
            return rest
        except OSError:  # it does not read (more); its exit says whether that is a failure
            return rest[len(rest) :]

    def _read_report(self) -> bytes:
        try:
            return self._lifeline.recv(4096)
        except OSError:
            return b""

    def _parse_report(self) -> None:
        kind, _, value = self._report.decode().strip().partition(" ")
        if kind == "exit":
            self.exit_code = int(value)
        elif kind == "error":
            self.error = value
        elif kind != "signal":
            self.error = "its supervisor was killed"


def _tag_of(mark: str) -> int:
    """Return the tag of an agent's processes, a resource limit; unlike the mark, it survives a cleared environment."""
    digest = hashlib.sha256(os.fsencode(mark)).digest()
    return supervisor.FIRST_TAG + int.from_bytes(digest[:8], "big") % supervisor.FIRST_TAG


def _is_marked(pid: int, mark: str) -> bool:
    if supervisor.tag_on(pid) == _tag_of(mark):
        return True
    return os.fsencode(f"{MARK}={mark}") in procfs.environ(pid)


def kill_marked(mark: str) -> None:
    """Kill every process with the mark of an agent whose supervisor is gone."""
    give_up = time.monotonic() + agent_supervisor.GIVE_UP_S
    found = True
    while found and time.monotonic() < give_up:  # repeat: one of them may have started another
        found = False
        for pid in procfs.pids():
            with contextlib.suppress(OSError):
                if pid != os.getpid() and _is_marked(pid, mark) and not procfs.is_zombie(pid):
                    os.kill(pid, signal.SIGKILL)
                    found = True
        if found:
            time.sleep(agent_supervisor.CHECK_S)
