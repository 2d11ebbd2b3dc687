from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from looplab.config import files
from looplab.config.files import (
    canonical_json,
    dump_config,
    dump_json,
    plain,
    read_config,
    read_document,
    write_atomic,
)
from looplab.config.paths import same
from looplab.errors import LabError

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=10,
)
configs = st.dictionaries(st.text(max_size=4), values, max_size=4)
files_on_disk = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def wrong(path: Path) -> LabError:
    """The error that both ways of reading give."""
    with pytest.raises(LabError) as first:
        read_config(path)
    with pytest.raises(LabError) as second:
        read_document(path)
    assert str(first.value) == str(second.value)
    assert first.value.file == str(path)
    return first.value


def write_data(path: Path, data: Any) -> None:
    path.write_bytes(dump_config(path, data))


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_three_formats_read_alike(tmp_path: Path) -> None:
    expected = {"train": {"lr": 1e-06, "steps": 100, "on": True}, "names": ["a", "b"]}
    json_file = write(tmp_path / "c.json", '{"train": {"lr": 1e-6, "steps": 100, "on": true}, "names": ["a", "b"]}')
    yaml_file = write(tmp_path / "c.yaml", "train:\n  lr: 1e-6\n  steps: 100\n  on: true\nnames: [a, b]\n")
    toml_file = write(tmp_path / "c.toml", 'names = ["a", "b"]\n[train]\nlr = 1e-6\nsteps = 100\non = true\n')
    for path in (json_file, yaml_file, toml_file):
        assert same(read_config(path), expected)
        assert same(read_document(path).plain(), expected)


def test_a_suffix_may_be_in_capitals_and_yml_is_yaml(tmp_path: Path) -> None:
    assert read_config(write(tmp_path / "c.YML", "a: 1\n")) == {"a": 1}


def test_yaml_is_read_by_the_rules_of_1_2(tmp_path: Path) -> None:
    text = "a: 1e-6\nb: on\nc: off\nd: yes\ne: 0o17\nf: 1:30\ng: ~\nh: .inf\ni: 'x'\nj: 010\n"
    expected = {
        "a": 1e-6,
        "b": "on",
        "c": "off",
        "d": "yes",
        "e": 15,
        "f": "1:30",
        "g": None,
        "h": math.inf,
        "i": "x",
        "j": 10,
    }
    path = write(tmp_path / "c.yaml", text)
    assert same(read_config(path), expected)
    assert same(read_document(path).plain(), expected)


def test_dates_become_iso_text(tmp_path: Path) -> None:
    yaml_file = write(tmp_path / "c.yaml", "a: 2024-01-02\nb: 2024-01-02 03:04:05\nc: 2024-01-02T03:04:05-05:00\n")
    expected = {"a": "2024-01-02", "b": "2024-01-02T03:04:05", "c": "2024-01-02T03:04:05-05:00"}
    assert read_config(yaml_file) == read_document(yaml_file).plain() == expected
    toml_file = write(tmp_path / "c.toml", "a = 2024-01-02\nb = 2024-01-02T03:04:05\nc = 03:04:05\n")
    expected = {"a": "2024-01-02", "b": "2024-01-02T03:04:05", "c": "03:04:05"}
    assert read_config(toml_file) == read_document(toml_file).plain() == expected


def test_plain_data_is_of_plain_types_only(tmp_path: Path) -> None:
    def types(data: Any) -> set[type]:
        inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
        return {type(data)}.union(*(types(item) for item in inner))

    yaml_file = write(
        tmp_path / "c.yaml", 'a: &x true\nb: *x\nc: 1e-3\nd: 0x1F\ne: "q"\nf: [1, {g: 2.5}]\nh: |\n  text\ni: null\n'
    )
    toml_file = write(
        tmp_path / "c.toml", 'a = true\nb = [true, 1, 2.5, "s", {c = false}]\n[[t]]\nx = 1\n[[t]]\ny = 2\n'
    )
    allowed = {dict, list, str, int, float, bool, type(None)}
    for path in (yaml_file, toml_file):
        assert types(read_config(path)) <= allowed
        assert types(read_document(path).plain()) <= allowed
        assert same(read_config(path), read_document(path).plain())


def test_anchors_and_merges_are_resolved_into_separate_data(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "base: &b {x: 1, y: 2}\nsame: *b\nmore:\n  <<: *b\n  y: 3\n")
    config = read_config(path)
    assert config == {"base": {"x": 1, "y": 2}, "same": {"x": 1, "y": 2}, "more": {"x": 1, "y": 3}}
    assert config["base"] is not config["same"]
    assert read_document(path).plain() == config


def test_keys_that_are_numbers_become_text(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "names:\n  0: cat\n  1: dog\n  null: x\n")
    document = read_document(path)
    assert read_config(path) == document.plain() == {"names": {"0": "cat", "1": "dog", "null": "x"}}
    assert document.line_of(("names", "1")) == 3


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    for name, text in (("c.json", '{"a":\r\n 1}'), ("c.yaml", "a: 1\r\n"), ("c.toml", "a = 1\r\n")):
        assert read_config(write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())) == {"a": 1}


def test_json_may_hold_nan_and_large_ints(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", '{"a": NaN, "b": -Infinity, "c": 123456789012345678901234567890, "d": "\\ud800"}')
    config = read_config(path)
    assert same(config, {"a": math.nan, "b": -math.inf, "c": 123456789012345678901234567890, "d": "\ufffd"})
    write_data(path, config)
    assert same(read_config(path), config)


def test_a_missing_file_is_named_with_its_likely_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "baseline.json", "{}")
    error = wrong(tmp_path / "baselin.json")
    assert "no such file" in error.message
    assert error.hint == "did you mean baseline.json?"
    assert "folder" in str(wrong(tmp_path / "nowhere" / "c.json").hint)


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    (tmp_path / "c.json").mkdir()
    assert "folder" in wrong(tmp_path / "c.json").message


def test_a_file_that_cannot_be_read_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", "{}") / "d.json"
    assert wrong(path).message == "cannot be read: Not a directory"


def test_an_ini_file_keeps_its_sections_and_texts_and_only_plain_numbers_become_numbers(tmp_path: Path) -> None:
    text = "[DEFAULT]\ntag = demo\n[Train]\nLR = 1e-3\nsteps = 10\nhalf = .5\ncode = 007\nflag = yes\nalone\nurl = a%%b = c\n"
    path = write(tmp_path / "c.ini", text)
    data = read_config(path)
    train = {"LR": 1e-3, "steps": 10, "half": 0.5, "code": "007", "flag": "yes", "alone": None, "url": "a%%b = c"}
    assert data == {"DEFAULT": {"tag": "demo"}, "Train": train}
    again = tmp_path / "again.ini"
    again.write_bytes(dump_config(again, data))
    assert read_config(again) == data


def test_what_ini_cannot_express_is_an_error(tmp_path: Path) -> None:
    for data in ({"lr": 0.1}, {"train": {"layers": [1, 2]}}):
        with pytest.raises(LabError, match="INI"):
            dump_config(tmp_path / "c.ini", data)


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    for name in ("c.conf", "c"):
        assert ".toml" in str(wrong(write(tmp_path / name, "a=1")).hint)
    with pytest.raises(LabError):
        write_data(tmp_path / "d.conf", {})


@pytest.mark.parametrize("name", ["c.json", "c.yaml", "c.toml"])
def test_a_bad_byte_is_an_error_with_its_line(tmp_path: Path, name: str) -> None:
    error = wrong(write(tmp_path / name, b"# one\n# two\n\xff\n"))
    assert "UTF-8" in error.message
    assert error.line == 3


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("c.json", '{\n"a": 1,\n"b": \n}', 4),
        ("c.json", "", 1),
        ("c.json", '{"a": 1,\n}', 2 if sys.version_info < (3, 13) else 1),  # later ones name the comma
        ("c.yaml", "a: 1\nb: [1, 2\nc: 3\n", 3),
        ("c.yaml", "a: 1\n b: 2\n", 2),
        ("c.yaml", "a:\n\t- b\n", 2),
        ("c.yaml", "a: 1\n---\nb: 2\n", 2),
        ("c.yaml", "a: 1\nb: *nothing\n", 2),
        ("c.yaml", "a: 1\nb: !secret x\n", 2),
        ("c.yaml", "a: 1\nb: !!python/object:os.system {}\n", 2),
        ("c.yaml", "a: 1\nb: !!set {x, y}\n", 2),
        ("c.yaml", "a: 1\nb: 2024-13-45\n", 2),
        ("c.yaml", "a: 1\nb: \x00\n", 2),
        ("c.toml", "a = 1\nb = \n", 2),
        ("c.toml", "a = 1\nb = [1,\n2\n\n", 3),
        ("c.toml", "a = 1\na = 2\n", 2),
    ],
)
def test_broken_syntax_is_an_error_with_its_line(tmp_path: Path, name: str, text: str, line: int) -> None:
    error = wrong(write(tmp_path / name, text))
    assert error.message.startswith(("broken JSON: ", "broken YAML: ", "broken TOML: "))
    assert error.line == line


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("c.json", '{\n"a": 1,\n"b": {"a": 2},\n"a": 3}', 4),
        ("c.json", '{"x": [{"a": 1},\n{"a": 1, "\\u0061": 2}]}', 2),
        ("c.json", '{"a": NaN,\n"a": "x\\" : {"}', 2),
        ("c.yaml", "a: 1\nb:\n  a: 1\na: 2\n", 4),
    ],
)
def test_a_key_that_occurs_twice_is_an_error_with_its_line(tmp_path: Path, name: str, text: str, line: int) -> None:
    error = wrong(write(tmp_path / name, text))
    assert error.message == "the key 'a' occurs twice"
    assert error.line == line


def test_a_string_that_looks_like_keys_is_not_a_duplicate_key(tmp_path: Path) -> None:
    config = {"a": '"a": 1, "a": {', "b": [{"a": 1}, {"a": 2}], 'c\\": ': 1}
    assert read_config(write(tmp_path / "c.json", json.dumps(config))) == config


def test_a_number_and_its_text_as_keys_are_a_double_key(tmp_path: Path) -> None:
    assert "occurs twice" in wrong(write(tmp_path / "c.yaml", "1: a\n'1': b\n")).message


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("c.json", "\n\n[1]", 3),
        ("c.json", "3", 1),
        ("c.yaml", "# about\n\n---\n- 1\n", 4),
        ("c.yaml", "just text\n", 1),
        ("c.yaml", "# only a comment\n", None),
        ("c.yaml", "", None),
    ],
)
def test_the_top_must_be_a_mapping(tmp_path: Path, name: str, text: str, line: int | None) -> None:
    error = wrong(write(tmp_path / name, text))
    assert "mapping" in str(error.hint)
    assert error.line == line


def test_an_empty_toml_file_is_an_empty_config(tmp_path: Path) -> None:
    assert read_config(write(tmp_path / "c.toml", "")) == {}


def test_data_nested_beyond_reason_is_an_error_not_a_crash(tmp_path: Path) -> None:
    assert "deep" in wrong(write(tmp_path / "c.json", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}")).message
    with pytest.raises(LabError, match="anchor"):
        read_config(write(tmp_path / "c.yaml", "a: &a [*a]\n"))


YAML_TEXT = """\
# The study of the drone.
---
train:  # how to learn
    lr: 1e-3  # per step

    steps: 1_000
    name: 'quoted'
    # what to watch
    features:
      - {w: 1.0}   # first
      - w: 2.0
        label: null
    note: |
        two
        lines
last: "x"  # end
"""

TOML_TEXT = """\
# The study.
title = "x" # name
bits = [true, false] # bits

[train] # how to learn
lr = 1e-3 # per step

[[features]]
w = 1.0 # first

[[features]]
w = 2.0
"""


def test_an_untouched_document_is_written_as_it_was(tmp_path: Path) -> None:
    assert read_document(write(tmp_path / "c.toml", TOML_TEXT)).text() == TOML_TEXT
    for text in (
        YAML_TEXT.replace("# The study of the drone.\n---\n", "# The study of the drone.\n").replace(
            "{w: 1.0}   #", "{w: 1.0} #"
        ),
        "a:\n- 1\n- b: 2\n  c: 3\n",
        "a:\n  - 1\n  - b: 2\n    c: 3\n",
        "a:\n    b:\n        - 1\n",
        "---\na: 1\n",
        "a:   # why\n  b: 1\n",
        "on: yes\n",
    ):
        again = read_document(write(tmp_path / "c.yaml", text)).text()
        assert [line.split() for line in again.splitlines()] == [line.split() for line in text.splitlines()]
        assert [len(line) - len(line.lstrip()) for line in again.splitlines()] == [
            len(line) - len(line.lstrip()) for line in text.splitlines()
        ]


def test_lines_of_yaml_keys_and_items_are_known(tmp_path: Path) -> None:
    document = read_document(write(tmp_path / "c.yaml", YAML_TEXT))
    assert document.line_of(("train",)) == 3
    assert document.line_of(("train", "lr")) == 4
    assert document.line_of(("train", "features", 1)) == 11
    assert document.line_of(("train", "features", 1, "label")) == 12
    assert document.line_of(("train", "features", 0, "w")) == 10
    assert document.line_of(("train", "nothing")) is None
    assert document.line_of(("train", "lr", "deeper")) is None
    assert read_document(write(tmp_path / "c.toml", TOML_TEXT)).line_of(("title",)) is None
    assert read_document(write(tmp_path / "c.json", '{"a": 1}')).line_of(("a",)) is None


def test_a_document_is_saved_in_the_format_of_the_path(tmp_path: Path) -> None:
    document = read_document(write(tmp_path / "c.yaml", YAML_TEXT.replace("---\n", "")))
    document.save(tmp_path / "d.yml")
    assert "# per step" in (tmp_path / "d.yml").read_text()
    document.save(tmp_path / "d.json")
    assert read_config(tmp_path / "d.json") == document.plain() == read_config(tmp_path / "d.yml")


def test_yaml_is_written_so_that_1_1_readers_agree(tmp_path: Path) -> None:
    write_data(
        tmp_path / "c.yaml", {"a": "on", "b": 1e-06, "c": "12:30:00", "d": "no", "e": 1e22, "f": None, "g": "1e-6"}
    )
    lines = (tmp_path / "c.yaml").read_text().splitlines()
    assert lines == ["a: 'on'", "b: 1.0e-06", "c: '12:30:00'", "d: 'no'", "e: 1.0e+22", "f: null", "g: '1e-6'"]


def test_toml_says_which_key_is_null(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"a\.0\.b is null"):
        write_data(tmp_path / "c.toml", {"a": [{"b": None}]})
    assert list(tmp_path.iterdir()) == []


def without_null(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: without_null(value) for key, value in data.items() if value is not None}
    return [without_null(value) for value in data if value is not None] if isinstance(data, list) else data


@given(configs)
@example({"a": "\x85\u2028\ufeff", "b": " x ", "c": "a\n\n b\n", "d": "- x", "e": "#", "": {"": []}, "f": "x: y"})
@files_on_disk
def test_what_is_written_is_read_back_in_every_format(tmp_path: Path, config: dict[str, Any]) -> None:
    for name in ("c.json", "c.yaml"):
        write_data(tmp_path / name, config)
        assert same(read_config(tmp_path / name), config)
    write_data(tmp_path / "c.toml", without_null(config))
    assert same(read_config(tmp_path / "c.toml"), without_null(config))


def test_json_is_indented_and_keeps_the_order_of_keys() -> None:
    assert (
        dump_json({"b": 1, "a": [1.5, None, "é"]})
        == '{\n  "b": 1,\n  "a": [\n    1.5,\n    null,\n    "é"\n  ]\n}\n'.encode()
    )


def test_json_keeps_what_is_not_finite_and_large_ints() -> None:
    data = {"a": [None, {"b": math.nan}], "c": -math.inf, "d": 10**30}
    assert same(json.loads(dump_json(data)), data)
    assert dump_json({"a": math.nan}) == b'{\n  "a": NaN\n}\n'
    assert dump_json({"a": None, "null": "null"}) == b'{\n  "a": null,\n  "null": "null"\n}\n'


def test_json_holds_plain_data_only(tmp_path: Path) -> None:
    for value in ({1, 2}, object(), tmp_path):
        with pytest.raises(TypeError):
            dump_json({"a": value})
        with pytest.raises(TypeError):
            plain({"a": value})


def test_canonical_json_sorts_keys_and_takes_no_space() -> None:
    assert canonical_json({"b": [1, 1.0, None, True], "a": {"d": "é", "c": math.inf}}) == (
        '{"a":{"c":Infinity,"d":"é"},"b":[1,1.0,null,true]}'.encode()
    )


def test_canonical_json_refuses_keys_that_are_not_text() -> None:
    for data in ({1: 2}, {"a": [{None: 1}]}, [{"b": ({1.5: 2},)}]):
        with pytest.raises(TypeError, match="must be text"):
            canonical_json(data)


def exactly(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(exactly(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(exactly, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


few = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, -0.0, math.nan, math.inf, "", "1", "null"]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=3,
)


@given(few, few)
def test_canonical_json_is_equal_just_when_the_data_is(a: Any, b: Any) -> None:
    assert (canonical_json(a) == canonical_json(b)) == exactly(a, b)


@given(configs)
def test_canonical_json_does_not_depend_on_the_order_of_keys(config: dict[str, Any]) -> None:
    assert canonical_json(config) == canonical_json(dict(reversed(config.items())))
    assert same(json.loads(canonical_json(config)), config)


@given(configs)
def test_json_reads_back_to_the_same_data(config: dict[str, Any]) -> None:
    assert same(json.loads(dump_json(config)), config)


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_whole_and_nothing_is_left_behind(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "c.json"
    for content in (b"old", b"", b"x" * 3_000_000):
        write_atomic(path, content, sync=sync)
        assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(files.os, "write", lambda handle, data: real(handle, bytes(data[:3])))
    write_atomic(tmp_path / "c", b"0123456789")
    monkeypatch.undo()
    assert (tmp_path / "c").read_bytes() == b"0123456789"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "c", "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_target_that_cannot_be_replaced_raises_the_error_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", b"x")
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "nowhere" / "c", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_a_leftover_of_a_dead_process_is_stepped_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_counter", iter(range(10)))
    leftover = write(tmp_path / f".tmp-{os.getpid()}-0", "torn")
    write_atomic(tmp_path / "c", b"new")
    assert (tmp_path / "c").read_bytes() == b"new"
    assert leftover.read_bytes() == b"torn"


def test_a_relative_path_is_written_in_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_atomic(Path("c"), b"x")
    assert (tmp_path / "c").read_bytes() == b"x"


def test_importing_the_module_imports_no_parser() -> None:
    code = (
        "import sys, looplab.config.files; print([m for m in ('orjson', 'ruamel.yaml', 'tomlkit') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def bomb(levels: int = 9, width: int = 10) -> str:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merge_bomb(levels: int = 9, width: int = 10) -> str:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * width)}], k{n}: 1}}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb(), merge_bomb(), bomb(30, 2)])
@pytest.mark.parametrize("read", [read_config, read_document])
def test_aliases_that_expand_to_millions_of_values_are_rejected(tmp_path: Path, text: str, read: Any) -> None:
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(LabError, match="aliases") as error:
        read(path)
    assert error.value.file == str(path)


def test_usual_aliases_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", bomb(4) + "\n" + merge_bomb(3).replace("a", "b"))
    assert read_config(path) == read_document(path).plain()
    assert read_config(path)["b2"] == {"x": 1, "y": 2, "k1": 1, "k2": 1}


@pytest.mark.parametrize("levels", [300, 700, 100_000])
@pytest.mark.parametrize("read", [read_config, read_document])
def test_nesting_has_a_limit_in_every_format(tmp_path: Path, levels: int, read: Any) -> None:
    texts = {
        "a.json": '{"a": ' + "[" * levels + "]" * levels + "}",
        "b.json": '{"a": ' * levels + "1" + "}" * levels,
        "a.yaml": "a: " + "[" * min(levels, 700) + "]" * min(levels, 700),
        "b.yaml": "a: " + "{a: " * min(levels, 5_000) + "1" + "}" * min(levels, 5_000),
        "a.toml": "a = " + "[" * levels + "]" * levels,
        "b.toml": ".".join(["a"] * min(levels, 700)) + " = 1",
    }
    for name, text in texts.items():
        path = write(tmp_path / name, text)
        with pytest.raises(LabError, match=r"nested too deeply|broken") as error:
            read(path)
        assert error.value.file == str(path)


@pytest.mark.parametrize("read", [read_config, read_document])
def test_what_is_not_a_regular_file_is_rejected_at_once(tmp_path: Path, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    for name in ("pipe.json", "zero.yaml", "folder.toml"):
        with pytest.raises(LabError, match="not a file"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    ["%YAML 1.9\n---\na: 1", "%YAML 99999999999999999999999.1\n---\na: 1", "a: !!int x", "a: !!float []",
     "a: !!timestamp 1", "? [a]\n: 1", "a: &b *b", "<<: 1", "<<: [1]", "a: " + "9" * 5_000, "!!map a",
     "a: 0x" + "f" * 5_000, "a: !!bool x"],
)  # fmt: skip
@pytest.mark.parametrize("read", [read_config, read_document])
def test_odd_yaml_is_read_or_rejected_by_name(tmp_path: Path, text: str, read: Any) -> None:
    path = write(tmp_path / "c.yaml", text)
    try:
        read(path)
    except LabError as error:
        assert error.file == str(path)  # noqa: PT017 (what is accepted is fine too)


def test_halves_of_surrogate_pairs_are_joined_or_replaced(tmp_path: Path) -> None:
    text = '{"rocket": "\\ud83d\\ude80", "half": "\\ud83d", "\\udc00": 1}'
    for name in ("c.json", "c.yaml"):
        path = write(tmp_path / name, text)
        assert read_config(path) == {"rocket": "🚀", "half": "\ufffd", "\ufffd": 1}
        assert read_document(path).plain() == read_config(path)
        read_document(path).save(path)
        assert read_config(path)["rocket"] == "🚀"
