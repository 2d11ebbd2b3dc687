"""Logs of any size are read in portions, and secrets in them are hidden wherever a portion ends."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from io import BytesIO
from pathlib import Path

import pytest

from looplab.runs import logs, redact
from looplab.runs.logs import LogStream, read_tail, seek_last_lines
from looplab.runs.redact import redact_text, scrub_file
from looplab.untrusted import UntrustedError

SECRET = b"0123456789abcdef0123456789abcdef"
TOKEN = "hf_" + "a1b2c3d4" * 4


@pytest.mark.parametrize("text", [b"", b"a", b"a\n", b"a\nb", b"a\r\nb\rc\n\nd\n", "é\nü\n".encode(), b"\n" * 9])
@pytest.mark.parametrize("lines", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("block", [1, 2, 1 << 16])
def test_the_last_lines_are_those_of_the_whole_log(
    monkeypatch: pytest.MonkeyPatch, text: bytes, lines: int, block: int
) -> None:
    monkeypatch.setattr(logs, "BLOCK", block)
    file = BytesIO(text)
    seek_last_lines(file, lines)
    assert file.read() == b"".join(text.splitlines(keepends=True)[-lines:] if lines else [])


@pytest.mark.parametrize("portion", [1, 2, 3, 7, 100])
def test_a_log_is_the_same_in_portions_of_any_size(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    text = f"first é line\nkey {TOKEN} and https://me:{TOKEN}@host\r{TOKEN}\n\n{TOKEN}"
    monkeypatch.setattr(logs, "PORTION", portion)
    monkeypatch.setattr(logs, "LONGEST_PART", 1000)
    assert "".join(LogStream(BytesIO(text.encode())).portions(final=True)) == redact_text(text)


def test_half_a_line_waits_for_its_rest_or_until_nothing_more_comes(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("one\ntw")
    with path.open("rb") as file, path.open("a") as writer:
        stream = LogStream(file)
        assert "".join(stream.portions(final=False)) == "one\n"
        writer.write("o\nthree")
        writer.flush()
        assert "".join(stream.portions(final=False)) == "two\n"
        assert "".join(stream.portions(final=False)) == "three"
        assert list(stream.portions(final=False)) == []


def bounded(code: str, *arguments: object) -> str:
    """Run code in a process with 50 MB of memory beyond what the imports take."""
    head = """
        import resource, sys
        from pathlib import Path
        from looplab.runs.logs import LogStream, seek_last_lines
        from looplab.runs.redact import scrub_file
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (50 << 20),) * 2)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_end_of_a_gigabyte_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\none\ntwo\n")
    code = """
        with open(sys.argv[1], "rb") as file:
            seek_last_lines(file, 2)
            print("".join(LogStream(file).portions(final=True)), end="")
        """
    assert bounded(code, path) == "one\ntwo\n"


def test_hiding_secrets_in_a_large_log_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.truncate(200 << 20)
        file.seek(0, os.SEEK_END)
        file.write(SECRET)
    assert bounded("print(scrub_file(Path(sys.argv[1]), [sys.argv[2].encode()]))", path, SECRET.decode()) == "True\n"
    assert path.stat().st_size == (200 << 20) + 3
    path.unlink()


@pytest.mark.parametrize("chunk", [1, 3, 8, 31, 32, 33, 100])
def test_secrets_across_chunks_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(redact, "CHUNK", chunk)
    monkeypatch.setattr(redact, "SHAPED", -1)
    rng = random.Random(chunk)
    secrets = [SECRET, b"another-secret", b"another-secret-and-longer", b"aaaaaaaa"]
    secrets.sort(key=len, reverse=True)
    for _ in range(30):
        parts = [rng.choice([*secrets, b"text", b"a" * rng.randrange(12), SECRET[:9], b"\n"]) for _ in range(20)]
        text = b"".join(parts)
        path = tmp_path / "train.log"
        path.write_bytes(text)
        found = any(secret in text for secret in secrets)
        assert scrub_file(path, secrets) == found
        clean = path.read_bytes()
        assert not any(secret in clean for secret in secrets)
        expected = redact.re.sub(b"|".join(map(redact.re.escape, secrets)), b"***", text)
        assert clean == expected
        assert os.listdir(tmp_path) == ["train.log"]


def test_a_log_without_secrets_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("loss 1\n")
    before = path.stat()
    assert not scrub_file(path, [SECRET])
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("what", ["pipe", "zero", "folder"])
def test_what_is_not_a_log_is_not_searched(tmp_path: Path, what: str) -> None:
    path = tmp_path / "train.log"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(UntrustedError):
        scrub_file(path, [SECRET])


def test_a_text_that_begins_like_many_tokens_is_searched_once() -> None:
    """Two megabytes, of which an unbounded expression needs hours."""
    text = "eyJ" * 700_000
    assert redact_text(text) == text


def test_the_tail_is_as_a_terminal_shows_it_and_may_begin_at_an_offset(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"old\n" * 30 + b"10 %\r\x1b[1m100 %\x1b[0m\r\nnew \nlast\n")
    assert read_tail(log, 3) == "100 %\nnew\nlast"
    assert read_tail(log, start=120) == "100 %\nnew\nlast"
    log.write_bytes(b"x" * 100 + b"\n" + b"y" * (1 << 16) + b"\nend\n")
    assert read_tail(log) == "end"
    assert read_tail(tmp_path / "none.log") == ""
