"""What is shown to people and programs: no terminal codes, HTML or formulas from outside, and always valid JSON."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from looplab import untrusted
from looplab.cli import output
from looplab.report import labbook, markdown, wording
from looplab.report.export import without_formula
from looplab.runs import folder
from looplab.runs.redact import known_secrets, scrub_file

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=40) | st.text(
    "<>[]()|!`\\\x1b\x9b\u202e\r\na ", max_size=30
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
CONTROLS = set(map(chr, range(0x20))) - {"\n", "\t"} | set(map(chr, range(0x7F, 0xA0))) | set("\u202e\u2066\u2028")


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, action: Any) -> str:
    """What an action writes to a stdout of this encoding."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        output.accept_any_text()
        action()
        stream.flush()
    return raw.getvalue().decode(encoding)


@given(data=VALUES, encoding=st.sampled_from(["utf-8", "latin-1", "ascii"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_is_valid_and_cannot_control_a_terminal(monkeypatch: pytest.MonkeyPatch, data: Any, encoding: str) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    expected = json.loads(untrusted.dump_json(data))
    for show in (output.print_json, output.print_line):
        shown = printed(monkeypatch, encoding, lambda show=show: show(data))
        assert not CONTROLS & set(shown)
        assert json.loads(shown, parse_constant=refuse) == expected


@given(text=ANY_TEXT, encoding=st.sampled_from(["utf-8", "latin-1", "ascii"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_and_tables_hold_any_text(monkeypatch: pytest.MonkeyPatch, text: str, encoding: str) -> None:
    shown = printed(monkeypatch, encoding, lambda: (output.say(text), output.table(("a", text), [(text, "b")])))
    assert not CONTROLS & set(shown)


@given(ANY_TEXT)
def test_the_lab_book_and_the_report_hold_any_text_without_codes_html_or_links(text: str) -> None:
    line = labbook.line(0.0, text, text, text, text)
    assert line.count(" | ") == 4
    for shown in (line, markdown.text(text), wording.plain(text)):
        shown.encode()
        assert not CONTROLS & set(shown)
    for shown in (line, markdown.text(text)):
        assert "\n" not in shown
        assert "<a" not in shown.replace("\\<", "")
        assert "](" not in shown.replace("\\]", "").replace("\\(", "")


def test_the_lab_book_s_own_words_stay_as_they_are() -> None:
    assert labbook.line(0.0, "a", "better by 0.2 [0.1, 0.3], x < 3", "", "").endswith(
        "better by 0.2 [0.1, 0.3], x < 3 | - | -"
    )
    assert "\\<b>" in labbook.line(0.0, "<b>x</b>", "", "", "")


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-cmd", "@x", "\t=1", "\r=1", "--", "-1+1"])
def test_formulas_become_text_in_csv_files(text: str) -> None:
    assert without_formula(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-1", "+2.5e-3", "-.5", "a=1", "", 3, -1.5, None])
def test_numbers_and_other_texts_are_not_changed(value: Any) -> None:
    assert without_formula(value) == value


def test_csv_files_of_tables_hold_no_formulas(tmp_path: Path) -> None:
    import pyarrow as pa

    from looplab.report.export import _write

    batch = pa.record_batch({"reason": ["=1+1", "-0.5", None, "fine"], "n": [1, 2, 3, -4]})
    reader = pa.RecordBatchReader.from_batches(batch.schema, [batch])
    _write(reader, tmp_path / "x.csv", "csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        assert list(csv.reader(file))[1:] == [["'=1+1", "1"], ["-0.5", "2"], ["", "3"], ["fine", "-4"]]


def test_secrets_of_any_bytes_are_known_and_hidden(tmp_path: Path) -> None:
    secrets = known_secrets({"MY_TOKEN": "abc\udcff defgh", "A_KEY": "half \ud83d of it", "PATH": "/bin"})
    assert b"abc\xff defgh" in secrets
    log = tmp_path / "train.log"
    log.write_bytes(b"it is abc\xff defgh\n")
    assert scrub_file(log, secrets)
    assert b"defgh" not in log.read_bytes()


def test_pointers_and_the_lab_book_may_hold_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "BEST").write_bytes(b"\xff\xfe")
    assert folder.pointed(tmp_path, "BEST") == "\ufffd\ufffd"
    (tmp_path / "LATEST").mkdir()
    assert folder.pointed(tmp_path, "LATEST") is None
    (tmp_path / labbook.NAME).write_bytes(b"l\xe9gende\n- x | run 0001-a | kept | - | -\n")
    assert labbook.missing(tmp_path, ["0001-a", "0002-b"]) == ["0002-b"]


def test_counts_are_written_in_singular_or_plural() -> None:
    """`1 run`, `2 runs`: never `1 run(s)`."""
    source = Path(output.__file__).parents[1]
    places = (source / "cli", source / "report", source / "ui", source / "loop")
    files = [file for place in places for file in place.rglob("*.py") if file.name != "engine.py"]
    lines = [(file.name, line) for file in files for line in file.read_text().splitlines()]
    assert [found for found in lines if re.search(r"[a-z]\(s\)", found[1])] == []
