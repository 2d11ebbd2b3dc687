"""Secrets never land: what looks like one is replaced before anything is written."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from looplab.untrusted import mend_text

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
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}|wandb_v1_\w{20,}"
)
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
        {_encoded(v) for k, v in env.items() if is_secret_name(k) and len(v) >= SHORTEST}, key=len, reverse=True
    )


def _encoded(value: str) -> bytes:
    """Return the bytes of a variable as a child process gets them, whatever they are."""
    try:
        return os.fsencode(value)
    except UnicodeEncodeError:
        return mend_text(value).encode()


def scrub_file(path: Path, secrets: list[bytes]) -> bool:
    """Replace known secrets in a finished file; True if there were any. The file keeps its name and its other bytes."""
    if not secrets:
        return False
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
        clean = data
        for secret in secrets:
            clean = clean.replace(secret, HIDDEN.encode())
        if clean != data:
            temporary = path.with_name(f".{path.name}.clean")
            temporary.write_bytes(clean)
            temporary.replace(path)
            return True
    return False
