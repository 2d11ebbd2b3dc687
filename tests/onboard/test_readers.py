"""Other people's trainers are understood: their settings, their seed, and what may be a knob."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from looplab.errors import LabError
from looplab.onboard.base import Interface
from looplab.onboard.labfile import make_lab
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script
from looplab.onboard.sweeps import read_sweep

SHELF = Path(__file__).parent / "shelf"
NOT_UNDERSTOOD = {"asks_stdin", "wandb_sweep"}
"""One asks on stdin, one has its settings in sweep.yaml alone."""
NEEDS_ITS_FRAMEWORK = {"hydra_app": "hydra", "lightning_cli": "lightning"}
"""Their configs are composed by the framework."""
KNOWN_TO_BE_WRONG = {"argparse_options": {"dim"}, "ignores_flags": {"lr", "weight_decay"}}
"""`dim` is of the data; the other script has flags that do nothing, which only a run can tell."""


def plain(name: str) -> str:
    return name.rpartition(".")[2].replace("-", "_").lower()


def read(name: str) -> tuple[dict[str, Any], Interface | None, Any]:
    about = json.loads((SHELF / name / "about.json").read_text())
    command = [sys.executable if word == "python" else word for word in about["command"]]
    script = find_script(command, SHELF / name)
    return about, read_interface(script), script


@pytest.mark.parametrize("name", sorted(path.name for path in SHELF.iterdir() if path.is_dir()))
def test_a_script_is_understood_without_being_run(name: str) -> None:
    if name in NEEDS_ITS_FRAMEWORK:
        pytest.importorskip(NEEDS_ITS_FRAMEWORK[name])
    about, interface, script = read(name)
    if name in NOT_UNDERSTOOD:
        assert interface is None
        return
    assert interface is not None
    lab = make_lab(script, interface)
    found = {plain(knob) for knob in lab.knobs}
    settings = {plain(setting.name) for setting in interface.settings}
    assert lab.seed is None if about["seed"] is None else plain(about["seed"]) == plain(lab.seed or "")
    assert found & {plain(knob) for knob in about["must_not_be_knobs"]} <= KNOWN_TO_BE_WRONG.get(name, set())
    sensible = {plain(knob) for knob in about["sensible_knobs"]}
    assert len(sensible & settings) >= 0.5 * len(sensible)


def test_what_a_script_needs_is_asked_for(tmp_path: Path) -> None:
    code = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\n"
    (tmp_path / "train.py").write_text(
        code + "p.add_argument('--lr', type=float, default=0.1)\nargs = p.parse_args()\n"
    )
    script = find_script([sys.executable, "train.py"], tmp_path)
    interface = read_interface(script)
    assert interface is not None
    with pytest.raises(LabError, match=r"train.py needs data .*--data"):
        make_lab(script, interface)
    script = find_script([sys.executable, "train.py", "--data", "d.csv", "--lr=0.5"], tmp_path)
    lab = make_lab(script, interface)
    assert json.loads(lab.files["train.base.json"]) == {"lr": 0.5}
    assert '"--data", d.csv, "{flags}"' in lab.files["lab.yaml"]


def test_a_number_of_steps_that_the_script_computes_is_not_passed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\n"
        "p.add_argument('--lr', type=float, default=0.1)\np.add_argument('--epochs', type=int, default=3)\n"
        "p.add_argument('--num-iterations', type=int, default=0, help='computed in runtime')\nargs = p.parse_args()\n"
    )
    script = find_script([sys.executable, "train.py"], tmp_path)
    interface = read_interface(script)
    assert interface is not None
    assert json.loads(make_lab(script, interface).files["train.base.json"]) == {"lr": 0.1, "epochs": 3}


def test_a_sweep_whose_parameters_are_options_without_defaults_passes_them_as_options(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\n"
        "parser.add_argument('--num-layers', type=int)\nparser.add_argument('--seed', type=int, default=0)\n"
        "args = parser.parse_args()\nloss, momentum = 1.0, 0.9\n"
    )
    (tmp_path / "sweep.yaml").write_text(
        "program: train.py\nmethod: bayes\nmetric: {name: val_loss, goal: minimize}\nparameters:\n"
        "  lr: {distribution: log_uniform_values, min: 0.001, max: 0.1}\n  num_layers: {values: [1, 2, 3]}\n"
    )
    sweep = read_sweep(tmp_path / "sweep.yaml", tmp_path)
    assert sweep.interface.rendering["as"] == "flags"
    lab = make_lab(sweep.script, sweep.interface, objective=sweep.metric, goal=sweep.goal, specs=sweep.knobs)
    assert (lab.knobs, lab.seed) == (("lr", "num-layers"), "seed")
    assert json.loads(lab.files["train.base.json"]) == {"lr": 0.01, "num-layers": 2, "seed": 0}


BOUNDED = {
    "pydantic": """
from typing import Annotated
from pydantic import Field, PositiveInt
from pydantic_settings import BaseSettings, SettingsConfigDict
class Config(BaseSettings):
    model_config = SettingsConfigDict(cli_parse_args=True)
    lr: float = Field(0.05, ge=0.01, le=0.2)
    dropout: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    layers: PositiveInt = 3
config = Config()
""",
    "argparse": """
import argparse
def share(text):
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError('not in [0, 1]')
    return value
def positive(text):
    if int(text) <= 0:
        raise argparse.ArgumentTypeError('not positive')
    return int(text)
p = argparse.ArgumentParser()
p.add_argument('--lr', type=share, default=0.5)
p.add_argument('--layers', type=positive, default=1)
p.parse_args()
""",
    "click": """
import click
@click.command()
@click.option('--lr', default=0.05, type=click.FloatRange(0.01, 0.2))
@click.option('--dropout', default=0.1, type=click.FloatRange(0, 0.5, max_open=True))
@click.option('--layers', default=3, type=click.IntRange(min=1))
def main(lr, dropout, layers):
    pass
main()
""",
}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("pydantic", {"lr": (0.01, 0.2), "dropout": (0, 0.4995), "layers": (1, None)}),
        ("argparse", {"lr": (0.0, 1.0), "layers": (1, None)}),
        ("click", {"lr": (0.01, 0.2), "dropout": (0, 0.4995), "layers": (1, None)}),
    ],
)
def test_the_bounds_that_a_script_checks_are_known(name: str, bounds: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("pydantic_settings" if name == "pydantic" else name)
    (tmp_path / "train.py").write_text(BOUNDED[name])
    interface = read_interface(find_script([sys.executable, "train.py"], tmp_path))
    assert interface is not None
    assert {setting.name: (setting.low, setting.high) for setting in interface.settings} == {
        key: (low, None if high is None else pytest.approx(high)) for key, (low, high) in bounds.items()
    }
