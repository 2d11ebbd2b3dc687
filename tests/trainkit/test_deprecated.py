"""Former names of trainkit: they still work, and warn with the new name at the line that uses them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from looplab import trainkit
from looplab.trainkit.deprecated import NEW_NAMES


@pytest.mark.parametrize("old", NEW_NAMES)
def test_a_former_name_warns_and_is_the_new_object(old: str) -> None:
    module, _, name = old.rpartition(".")
    new_module, _, new_name = NEW_NAMES[old].rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} was renamed to {NEW_NAMES[old]}") as caught:
        value = getattr(importlib.import_module(module), name)
    assert value is getattr(importlib.import_module(new_module), new_name)
    assert caught[0].filename == __file__
    assert name not in trainkit.__all__


def test_a_script_with_the_former_imports_runs_and_sees_the_warnings(tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text(
        "from looplab.trainkit import Everything, write_whole\n"
        "from looplab.trainkit.tensors import Broken\n"
        "from looplab.trainkit.whole import write_whole as same\n"
        "assert same is write_whole and issubclass(Broken, Exception)\n"
        "write_whole('a.txt', b'a')\n"
        "Everything(metrics=False)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.txt").read_bytes() == b"a"
    for line, new in ((1, "TrainingState"), (1, "atomic_write"), (2, "CorruptCheckpoint"), (3, "atomic_write")):
        assert any(f"old.py:{line}: DeprecationWarning" in text and new in text for text in done.stderr.splitlines())


def test_cut_warns_and_truncates(tmp_path: Path) -> None:
    logger = trainkit.Logger(tmp_path / "metrics.jsonl")
    logger.log(loss=1.0)
    with pytest.warns(DeprecationWarning, match="renamed to Logger.truncate"):
        logger.cut(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_name_that_never_existed_is_an_attribute_error() -> None:
    for module in {old.rpartition(".")[0] for old in NEW_NAMES}:
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = importlib.import_module(module).nothing
