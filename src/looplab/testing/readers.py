"""The contract of readers: see `looplab.onboard.base`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.config.files import dump_config
from looplab.config.lab import load_lab
from looplab.config.paths import leaves, set_, show
from looplab.launch.command import build_argv, render, render_environment
from looplab.onboard.base import MISSING, InterfaceReader, Script
from looplab.onboard.labfile import NewLab, make_lab
from looplab.onboard.scripts import find_script

FOREIGN = {
    "constants": "LR = 0.1\nfor step in range(3):\n    print(LR * step)\n",
    "argparse": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\n"
    "print(p.parse_args().lr)\n",
    "empty": "",
    "not Python": "def train(:\n",
}
"""Scripts that take their settings in other ways, or are not scripts."""


def run_trainer(folder: Path, lab: NewLab, changes: Mapping[str, Any], env: Mapping[str, str] | None = None) -> str:
    """Write a lab, start its trainer as a run would, with some values changed, and return what it prints.

    Args:
        changes: Values by dotted key of the base config.
        env: Further environment variables.
    """
    for name, text in lab.files.items():
        (folder / name).write_text(text)
    (study,) = load_lab(folder).studies.values()
    config: dict[str, Any] = json.loads(next(text for name, text in lab.files.items() if name.endswith(".base.json")))
    for key, value in changes.items():
        set_(config, tuple(key.split(".")), value)
    rendering = study.launch.config
    record = folder / "record"
    record.mkdir()
    file = record / f"config.{rendering.format if rendering.as_ == 'file' else 'json'}"
    file.write_bytes(dump_config(file, config))
    variables = {"config": str(file), "python": sys.executable, "run_dir": str(record), "out_dir": str(record)}
    arguments = render(config, rendering, dict.fromkeys(changes, False))
    argv = build_argv(study.launch.command, variables, arguments, config=config)
    everything = {**os.environ, **render_environment(config, rendering), **(env or {})}
    done = subprocess.run(argv, cwd=folder, env=everything, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (argv, done.stderr[-2000:])
    return done.stdout


class ReaderContract:
    """What every reader guarantees. Subclasses define `make_reader`, `files`, `arguments`, `changes` and `printed`."""

    files: dict[str, str] = {}  # noqa: RUF012 (subclasses replace it)
    """A script of the reader's kind, `train.py`, and what it needs, by name. It prints the settings that it uses."""
    arguments: Sequence[str] = ()
    """What a person types after `train.py`."""
    changes: dict[str, Any] = {}  # noqa: RUF012
    """Other values of some settings, by dotted key of the base config."""

    def make_reader(self) -> InterfaceReader:
        """Return the reader."""
        raise NotImplementedError

    def printed(self, text: str) -> Mapping[str, Any]:
        """Return the settings that the script printed, by the same keys as `changes`."""
        raise NotImplementedError

    def _script(self, folder: Path, files: Mapping[str, str], arguments: Sequence[str] = ()) -> Script:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return find_script([sys.executable, "train.py", *arguments], folder)

    def _own(self, folder: Path) -> Script:
        return self._script(folder, self.files, self.arguments)

    def test_its_settings_are_named_once_and_have_defaults_of_their_kind(self, tmp_path: Path) -> None:
        found = self.make_reader().read(self._own(tmp_path))
        assert found is not None
        assert found.reader
        names = [setting.name for setting in found.settings]
        assert len(set(names)) == len(names) > 0
        kinds: dict[str, type | tuple[type, ...]] = {
            "int": int, "float": (int, float), "bool": bool, "str": str, "list": list,
        }  # fmt: skip
        for setting in found.settings:
            if setting.default is not MISSING and setting.default is not None and setting.kind in kinds:
                assert isinstance(setting.default, kinds[setting.kind]), setting
        json.dumps([dict(found.rendering), dict(found.base or {})])

    def test_a_value_of_the_lab_reaches_the_script(self, tmp_path: Path) -> None:
        script = self._own(tmp_path)
        found = self.make_reader().read(script)
        assert found is not None
        lab = make_lab(script, found)
        got = self.printed(run_trainer(tmp_path, lab, self.changes))
        assert {key: got[key] for key in self.changes} == self.changes

    def test_the_base_config_is_what_the_script_uses_by_itself(self, tmp_path: Path) -> None:
        script = self._own(tmp_path)
        done = subprocess.run(script.argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        alone = self.printed(done.stdout)
        found = self.make_reader().read(script)
        assert found is not None
        lab = make_lab(script, found)
        base = json.loads(next(text for name, text in lab.files.items() if name.endswith(".base.json")))
        for path, value in leaves(base):
            if show(path) in alone:
                assert alone[show(path)] == value

    def test_reading_changes_no_file(self, tmp_path: Path) -> None:
        script = self._own(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        self.make_reader().read(script)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_other_scripts_are_left_to_other_readers(self, tmp_path: Path) -> None:
        for name, text in FOREIGN.items():
            folder = tmp_path / name
            folder.mkdir()
            assert self.make_reader().read(self._script(folder, {"train.py": text})) is None, name
