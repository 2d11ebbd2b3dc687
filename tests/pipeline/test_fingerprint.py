"""Fingerprints: equal exactly when nothing can be named that changed."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from looplab.pipeline.fingerprint import LARGE, Hashes, changes, config_part, hash_parts

scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 2.0]) | st.text("ab", max_size=2)
names = st.text("xyz", min_size=1, max_size=2)
parts = st.fixed_dictionaries(
    {part: st.dictionaries(names, scalars, max_size=3) for part in ("do", "config", "code", "files", "upstream")}
)


@given(parts, parts)
def test_a_changed_fingerprint_is_a_change_that_can_be_named(old: dict, new: dict) -> None:
    assert (hash_parts(old) == hash_parts(new)) == (not changes(old, new))
    assert not changes(old, old)


def test_parts_of_a_config_are_named_by_prefixes() -> None:
    config = {"a": {"b": 1, "c": {"d": [2, 3]}}, "ab": 4, "e": {}}
    assert config_part(config, ["a.c", "e"]) == {"a.c.d.0": 2, "a.c.d.1": 3, "e": {}}
    assert config_part(config, ["a", "missing"]) == {"a.b": 1, "a.c.d.0": 2, "a.c.d.1": 3}
    assert config_part(config, None, ["a.b"]) == {"a.c.d.0": 2, "a.c.d.1": 3, "ab": 4, "e": {}}


def test_the_hash_of_a_large_file_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"a" * LARGE)
    os.utime(file, (1e9, 1e9))
    hashes = Hashes(tmp_path)
    first = hashes.file(file)
    hashes.save()
    other = Path(f"{file}.other")
    other.write_bytes(b"b" * LARGE)
    os.utime(other, (1e9, 1e9))
    os.replace(other, file)  # the same size and time, but not the same file
    assert Hashes(tmp_path).file(file) != first
    (tmp_path / "fresh.bin").write_bytes(b"a" * LARGE)
    assert hashes.file(tmp_path / "fresh.bin") == first
    hashes.save()
    assert "fresh.bin" not in (tmp_path / ".looplab" / "hashes.json").read_text()  # it may still be written to


def test_a_folder_is_hashed_with_all_that_is_in_it_but_caches(tmp_path: Path) -> None:
    (tmp_path / "m" / "deep").mkdir(parents=True)
    (tmp_path / "m" / "deep" / "x").write_text("1")
    first = Hashes(tmp_path).tree(tmp_path / "m")
    (tmp_path / "m" / "__pycache__").mkdir()
    (tmp_path / "m" / "__pycache__" / "y").write_text("2")
    assert Hashes(tmp_path).tree(tmp_path / "m") == first
    (tmp_path / "m" / "deep" / "x").write_text("3")
    assert Hashes(tmp_path).tree(tmp_path / "m") != first
    assert Hashes(tmp_path).tree(tmp_path / "nothing") is None
