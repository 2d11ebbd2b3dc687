"""Texts in the language of the reader: English is the key, `assets/zh.json` has Chinese.

The live page, report.html and `looplab top` share this file. Sentences of the judge and of agents are recorded in
English and stay so.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from looplab.report.bundle import read_asset

LANGUAGES = ("en", "zh")
_VALUE = re.compile(r"\{(\w+)(?:\|([^|}]*)\|([^}]*))?\}")
_language: ContextVar[str] = ContextVar("language", default="en")


@functools.cache
def texts(language: str) -> Mapping[str, str]:
    """Return the translations by their English texts; empty for English."""
    return {} if language == "en" else json.loads(read_asset(f"{language}.json"))


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Let `t` translate into a language inside of the block."""
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def t(key: str, **values: Any) -> str:
    """Return a text in the current language.

    Args:
        key: The English text: `{name}` is a value, `{name|one|many}` a word by the number of that name.
        values: The values.
    """

    def put(found: re.Match[str]) -> str:
        name, one, many = found.groups()
        value = values.get(name, "")
        return str(value) if one is None else one if value == 1 else many

    return _VALUE.sub(put, texts(_language.get()).get(key, key))


def in_each(make: Callable[[], Any]) -> dict[str, Any]:
    """Return what is made in each language, for a page that chooses one."""
    found = {}
    for language in LANGUAGES:
        with speaking(language):
            found[language] = make()
    return found


def language_of_terminal() -> str:
    """Return the language of messages by LC_ALL, LC_MESSAGES or LANG."""
    named = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "") or ""
    return "zh" if named.lower().startswith("zh") else "en"
