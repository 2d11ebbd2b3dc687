"""Secrets never land: what looks like one is replaced before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from looplab.untrusted import open_regular

HIDDEN = "***"
SECRET_WORDS = {
    "KEY",
    "APIKEY",
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "CREDENTIAL",
    "CREDENTIALS",
    "AUTH",
    "COOKIE",
}
SECRET_VALUE = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,2000}+\.[\w-]{10,20000}+\.[\w-]{5,}|wandb_v1_\w{20,}"
)
CHUNK = 1 << 20
SHORTEST = 8
"""No secret is shorter than this, and one that were would be found everywhere by chance."""
URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]+):([^/\s@]+)(?=@)")
FLAG = re.compile(r"(?P<name>--?[\w.-]+)=(?P<value>.*)", re.DOTALL)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret: `WANDB_API_KEY` does, `TOKENIZERS_PARALLELISM` not."""
    return any(word in SECRET_WORDS for word in re.split(r"[^A-Z0-9]+", name.upper()))


def redact_text(text: str) -> str:
    if len(text) < SHORTEST:
        return text
    return URL_PASSWORD.sub(rf"\1:{HIDDEN}", SECRET_VALUE.sub(HIDDEN, text))


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    return {name: HIDDEN if is_secret_name(name) and value else redact_text(value) for name, value in env.items()}


def redact_argv(argv: Iterable[str]) -> list[str]:
    """The arguments without secrets: `--api-key=x`, `--api-key x`, and values that look like one."""
    clean: list[str] = []
    hide_next = False
    for part in argv:
        flag = FLAG.fullmatch(part)
        if hide_next and not part.startswith("-"):
            clean.append(HIDDEN)
        elif flag and is_secret_name(flag["name"]):
            clean.append(f"{flag['name']}={HIDDEN}")
        else:
            clean.append(redact_text(part))
        hide_next = part.startswith("-") and not flag and is_secret_name(part)
    return clean


def known_secrets(env: Mapping[str, str] | None = None) -> list[bytes]:
    """The values of secret variables that a training could print."""
    env = os.environ if env is None else env
    return sorted(
        {v.encode() for k, v in env.items() if is_secret_name(k) and len(v) >= SHORTEST}, key=len, reverse=True
    )


def scrub_file(path: Path, secrets: Sequence[bytes]) -> bool:
    """Replace known secrets in a finished file; True if there were any. The file keeps its name and its other bytes.

    Works in chunks, and writes only if there is something to replace.

    Raises:
        OSError: The file cannot be read, or its new content not written.
        UntrustedError: It is not a regular file.
    """
    if not secrets:
        return False
    try:
        with open_regular(path, follow=False) as file:
            if not _has_any(file, secrets):
                return False
            file.seek(0)
            temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")  # swept away after a crash
            temporary.unlink(missing_ok=True)
            try:
                with temporary.open("xb") as clean:
                    _copy_clean(file, clean, secrets)
                temporary.replace(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                error.filename = error.filename or str(path)
                raise
    except FileNotFoundError:
        return False
    return True


def _has_any(file: BinaryIO, secrets: Sequence[bytes]) -> bool:
    overlap = max(map(len, secrets)) - 1
    window = b""
    while chunk := file.read(CHUNK):
        window = window[-overlap:] + chunk
        if any(secret in window for secret in secrets):
            return True
    return False


def _copy_clean(file: BinaryIO, clean: BinaryIO, secrets: Sequence[bytes]) -> None:
    longest = max(map(len, secrets))
    rest = b""
    while True:
        chunk = file.read(CHUNK)
        data = rest + chunk
        # A secret that begins before this place is in the data as a whole.
        decided = len(data) - longest + 1 if chunk else len(data)
        ahead = {secret: data.find(secret) for secret in secrets}
        done = 0
        while (found := [(at, -len(secret)) for secret, at in ahead.items() if at >= 0]) and min(found)[0] < decided:
            at, size = min(found)
            clean.write(data[done:at] + HIDDEN.encode())
            done = at - size
            ahead = {secret: data.find(secret, done) if 0 <= at < done else at for secret, at in ahead.items()}
        decided = max(done, decided)
        clean.write(data[done:decided])
        rest = data[decided:]
        if not chunk:
            return
