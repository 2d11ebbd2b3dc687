"""Data from outside: mended, bounded or refused, never a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab import untrusted
from looplab.untrusted import UntrustedError, append_own

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
)


@given(ANY_TEXT)
def test_text_becomes_valid_unicode(text: str) -> None:
    mended = untrusted.mend_text(text)
    mended.encode()
    assert untrusted.mend_text(mended) == mended
    assert len(mended) <= len(text)


def test_the_halves_of_a_pair_are_joined_and_a_single_half_is_replaced() -> None:
    assert untrusted.mend_text("faster \ud83d\ude80") == "faster 🚀"
    assert untrusted.mend_text("half \ud83d.") == "half \ufffd."


@given(ANY_TEXT)
def test_shown_text_has_no_controls_and_is_stable(text: str) -> None:
    clean = untrusted.clean_text(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in clean)
    assert not any(c in clean for c in "\x1b\x7f\x9b\u202e\u2066")
    clean.encode()
    assert "\n" not in untrusted.clean_line(text)


def test_terminal_codes_are_removed_whole() -> None:
    assert untrusted.clean_text("\x1b[31mred\x1b[0m \x1b]0;title\x07ok\u202etxt") == "red oktxt"
    assert untrusted.clean_line("one\ntwo\rthree") == "one two three"
    assert untrusted.clean_text("abcdef", 4) == "abc…"


@given(VALUES)
def test_whatever_the_record_is_given_it_can_hold(data: Any) -> None:
    text = untrusted.dump_json(data, sort_keys=True)
    text.encode()
    untrusted.load_json(text)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 99999999999999999999, 10**300])
def test_large_ints_stay_exact(number: int) -> None:
    assert untrusted.load_json(untrusted.dump_json({"x": number})) == {"x": number}


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 3_000 + "]" * 3_000, "9" * 5_000, '{"a": ', "\ud800", ""])
def test_what_is_not_bounded_json_is_refused(text: str) -> None:
    with pytest.raises(UntrustedError):
        untrusted.load_json(text)


def test_python_s_own_words_for_numbers_are_read() -> None:
    assert str(untrusted.load_json('{"loss": NaN}')["loss"]) == "nan"
    assert untrusted.load_json(json.dumps("🚀")) == "🚀"


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "zero"):
        with pytest.raises(UntrustedError):
            untrusted.read_bounded(tmp_path / name, 10)
    with pytest.raises(UntrustedError):
        untrusted.read_bounded(tmp_path / "link", 10, follow=False)
    with pytest.raises(UntrustedError):
        untrusted.read_bounded(tmp_path / "file", 4)
    with pytest.raises(OSError, match="symbolic links"):
        untrusted.read_bounded(tmp_path / "loop", 10)
    assert untrusted.read_bounded(tmp_path / "link", 5) == b"12345"


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_an_own_file_is_never_written_through_what_is_in_its_place(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "own", tmp_path / "victim"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(victim)
    if kind == "link":
        victim.write_text("kept")
    with append_own(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert not path.is_symlink()
    assert victim.exists() == (kind == "link")
    assert not victim.exists() or victim.read_text() == "kept"
    with append_own(path) as file:
        file.write(b"er")
    assert path.read_text() == "newer"
    assert len(list(tmp_path.glob("own.changed-*"))) == 1
