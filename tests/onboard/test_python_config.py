"""Scripts whose config is a Python file, changed by words of the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from looplab.onboard.readers.python_config import PythonConfigReader
from looplab.onboard.scripts import find_script

TRAIN = """
import argparse, ast, json, runpy
from pathlib import Path

def load(path):
    values = {k: v for k, v in runpy.run_path(str(path)).items() if not k.startswith("__")}
    config = {}
    for base in values.pop("_base_", []):
        merge(config, load(Path(path).parent / base))
    merge(config, values)
    return config

def merge(config, other):
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value

class Config(dict):
    def merge_from_dict(self, words):
        for word in words or ():
            key, _, text = word.partition("=")
            *above, last = key.split(".")
            node = self
            for part in above:
                node = node[part]
            node[last] = ast.literal_eval(text)

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--work-dir")
parser.add_argument("--cfg-options", nargs="+")
args = parser.parse_args()
cfg = Config(load(args.config))
cfg.merge_from_dict(args.cfg_options)
print(json.dumps(cfg))
"""
BASE = "optimizer = dict(type='SGD', lr=0.1, momentum=0.9)\nrandomness = dict(seed=None)\n"
CONFIG = """
_base_ = ["base.py"]
batch_size = 32
loader = dict(batch_size=batch_size, dataset=dict(type="Toy", noise=1.0))
optimizer = dict(lr=0.05)
model = {"depth": 2, "head": dict(dropout=0.1, topk=(1, 5))}
steps = open("/etc/passwd").read()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "configs/base.py").write_text(BASE)
    (tmp_path / "configs/small.py").write_text(CONFIG)
    return tmp_path


def read(project: Path, *words: str):
    script = find_script([sys.executable, "train.py", "configs/small.py", *words], project)
    return PythonConfigReader().read(script)


def test_the_constants_of_the_file_and_of_those_it_extends_are_settings(project: Path) -> None:
    interface = read(project)
    assert interface.base == {
        "optimizer": {"lr": 0.05, "momentum": 0.9},
        "randomness": {"seed": 0},
        "loader": {"batch_size": 32},
        "model": {"depth": 2, "head": {"dropout": 0.1}},
    }
    assert "optimizer.lr={config.optimizer.lr}" in interface.command[interface.command.index("--cfg-options") :]
    assert not any(word.startswith("batch_size=") for word in interface.command)  # it would change nothing
    assert any("seed" in note for note in interface.notes)


def test_words_that_a_person_typed_are_values_of_the_base_config(project: Path) -> None:
    interface = read(project, "--work-dir=out", "--cfg-options", "optimizer.lr=0.2", "model.head.dropout=0.3")
    assert interface.base["optimizer"]["lr"] == 0.2
    assert interface.base["model"]["head"]["dropout"] == 0.3
    assert interface.command.count("--cfg-options") == 1
    assert "--work-dir=out" in interface.command


def test_the_values_reach_the_script(project: Path) -> None:
    import subprocess

    command = [word.format_map(_Filled()) for word in read(project).command]
    done = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["optimizer"] == {"type": "SGD", "lr": 7, "momentum": 7}


@pytest.mark.parametrize("text", ["def f(:", "_base_ = ['small.py']\nlr = 0.1", "\0", ""])
def test_an_odd_file_is_no_config(project: Path, text: str) -> None:
    (project / "configs/small.py").write_text(text)
    interface = read(project)
    assert interface is None or interface.base == {"lr": 0.1}


class _Filled(dict[str, object]):
    """Fills every placeholder `{config.X}` with 7."""

    def __missing__(self, key: str) -> object:
        return self

    def __getattr__(self, name: str) -> object:
        return self

    def __format__(self, spec: str) -> str:
        return "7"
