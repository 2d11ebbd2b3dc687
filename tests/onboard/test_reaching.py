"""Values reach the trainer as they are in the config: small real scripts write down what they got."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import PATIENCE_S

from looplab.config.files import read_config
from looplab.config.lab import ConfigRendering, check_definition, load_lab
from looplab.launch.command import render
from looplab.loop.preview import base_command
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions
from looplab.onboard.labfile import make_lab
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script

COMMAND = Path(sys.executable).with_name("looplab")
SHELF = Path(__file__).parent / "shelf"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
PARSER = "import argparse, json\np = argparse.ArgumentParser()\n"
PRINTED = "print(json.dumps(vars(p.parse_args())))\n"
WRITTEN = (
    "import json, os\nwith open(os.environ['LOOPLAB_RUN_DIR'] + '/got.json', 'w') as file:\n    json.dump(got, file)\n"
)


def looplab(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [COMMAND, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def write_lab(folder: Path, script: str, base: dict[str, Any], launch: dict[str, Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    (folder / "base.json").write_text(json.dumps(base))
    launch = {"command": ["{python}", "train.py", "{flags}"], **launch}
    (folder / "lab.yaml").write_text(json.dumps({"study": "s", "launch": launch, "base": "base.json", **more}))
    return folder


def start(folder: Path) -> Any:
    """Start the command of the base config, as `looplab check` shows it; return what it printed."""
    lab = load_lab(folder)
    setup = check_study(lab, lab.study(None), RunOptions(informal=True))
    command = base_command(setup, setup.bases[0])
    Path(command.cwd).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command.argv, cwd=command.cwd, env={**ENVIRONMENT, **command.env}, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{command.argv}\n{done.stderr}"
    return json.loads(done.stdout)


def got(folder: Path, study: str = "s") -> list[Any]:
    """Return what the runs of a study wrote down, in their order."""
    return [json.loads(file.read_text()) for file in sorted((folder / "outputs" / study).glob("0*/got.json"))]


# -- argparse


def test_everything_that_init_writes_for_argparse_reaches_the_script(tmp_path: Path) -> None:
    options = """
p.add_argument("data")
p.add_argument("width", type=int)
p.add_argument("--lr", type=float, default=1e-05)
p.add_argument("--weight-decay", type=float, default=0.0001)
p.add_argument("--clip_norm", type=float, default=1e22)
p.add_argument("--margin", type=float, default=-1e-05)
p.add_argument("--nesterov", action="store_true")
p.add_argument("--anneal", action=argparse.BooleanOptionalAction, default=False)
p.add_argument("--use_bias", action=argparse.BooleanOptionalAction, default=True)
p.add_argument("--amsgrad", type=bool, default=False)
p.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
p.add_argument("--seed", type=int, default=3)
p.add_argument("--layers", type=int, nargs="+", default=[64, 32])
"""
    (tmp_path / "train.py").write_text(PARSER + options + PRINTED)
    words = [sys.executable, "train.py", "some data/ü", "3"]
    script = find_script(words, tmp_path)
    interface = read_interface(script)
    assert interface is not None
    for name, text in make_lab(script, interface).files.items():
        (tmp_path / name).write_text(text)
    base = read_config(tmp_path / "train.base.json")
    assert base["data"] == "some data/ü"
    assert base["use_bias"] is True
    seen = start(tmp_path)
    expected = subprocess.run(
        [*words[:1], tmp_path / "train.py", *words[2:]], capture_output=True, text=True, check=True
    ).stdout
    assert seen == json.loads(expected)
    for key, value in {"anneal": True, "use_bias": False, "amsgrad": True, "nesterov": True, "width": 5}.items():
        (tmp_path / "train.base.json").write_text(json.dumps({**base, key: value}))
        assert start(tmp_path)[key] == value


SPECIAL = {
    "tiny": 5e-324,
    "small": 1e-05,
    "decimal": 0.00001,
    "large": 1.7976931348623157e308,
    "negative": -1,
    "below": -1e-3,
    "far_below": -1e-300,
    "infinite": float("-inf"),
    "whole": 1e16,
    "count": 10**18,
    "words": "two words",
    "unicode": "Größe 漢字 🎲",
    "quotes": """it's "so" """,
    "dashed": "-x --y",
    "empty": "",
    "sign": "a=b",
    "brace": "{x}",
    "line": "a\nb",
}


@pytest.mark.parametrize("how", [{}, {"case": "as_written"}, {"case": "snake"}, {"separator": "equals"}])
def test_values_that_are_hard_to_write_reach_argparse(tmp_path: Path, how: dict[str, str]) -> None:
    kebab = "case" not in how
    options = "".join(
        f"p.add_argument({'--' + (key.replace('_', '-') if kebab else key)!r}, type={type(value).__name__})\n"
        for key, value in SPECIAL.items()
    )
    write_lab(tmp_path, PARSER + options + PRINTED, {**SPECIAL, "left_out": None}, {"config": {"as": "flags", **how}})
    seen = start(tmp_path)
    assert seen == SPECIAL
    assert {key: type(value) for key, value in seen.items()} == {key: type(value) for key, value in SPECIAL.items()}


def test_lists_reach_argparse_as_several_words_or_as_one(tmp_path: Path) -> None:
    base = {"a": [1, 2], "b": [], "c": [-1.0, -1e-05, 0.5], "d": ["x y", "ü"], "after": "z"}
    options = (
        "p.add_argument('--a', type=int, nargs='+')\np.add_argument('--b', nargs='*')\n"
        "p.add_argument('--c', type=float, nargs='*')\np.add_argument('--d', nargs=2)\np.add_argument('--after')\n"
    )
    write_lab(tmp_path, PARSER + options + PRINTED, base, {"config": {"as": "flags", "lists": "spread"}})
    assert start(tmp_path) == base
    options = "".join(f"p.add_argument('--{key}', type=json.loads)\n" for key in "abcd") + "p.add_argument('--after')\n"
    write_lab(tmp_path, PARSER + options + PRINTED, base, {"config": {"as": "flags"}})
    assert start(tmp_path) == base


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"case": "as_written"}, ["--train.batch_size", "--train.optim.lr"]),
        ({}, ["--train.batch-size", "--train.optim.lr"]),
        ({"keys": "flat", "case": "as_written"}, ["--batch_size", "--lr"]),
    ],
)
def test_nested_keys_reach_argparse(tmp_path: Path, how: dict[str, str], names: list[str]) -> None:
    options = (
        f"p.add_argument({names[0]!r}, dest='size', type=int)\np.add_argument({names[1]!r}, dest='rate', type=float)\n"
    )
    base = {"train": {"batch_size": 8, "optim": {"lr": 1e-4}}}
    write_lab(tmp_path, PARSER + options + PRINTED, base, {"config": {"as": "flags", **how}})
    assert start(tmp_path) == {"size": 8, "rate": 1e-4}


def test_values_seed_and_run_folder_may_be_words_and_variables(tmp_path: Path) -> None:
    script = (
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['RATE'], os.environ['SEED'], os.getcwd()]))\n"
    )
    launch = {
        "command": ["{python}", "train.py", "{config.data}", "--lr={config.train.lr}", "--seed", "{seed}", "{run_dir}"],
        "env": {"RATE": "{config.train.lr}", "SEED": "{seed}"},
        "cwd": "run",
    }
    write_lab(tmp_path, script, {"data": "a b", "train": {"lr": 1e-05}}, launch)
    words, rate, seed, cwd = start(tmp_path)
    assert words == ["a b", "--lr=1e-05", "--seed", "1", cwd]
    assert (rate, seed) == ("1e-05", "1")
    assert Path(cwd).parent == tmp_path / "outputs/s"


def test_a_seed_with_a_word_of_its_own_is_the_seed(tmp_path: Path) -> None:
    launch = {"command": ["{python}", "train.py", "{config.seed}"], "config": {"as": "flags", "skip": ["seed"]}}
    write_lab(tmp_path, "import json, sys\nprint(json.dumps(sys.argv[1:]))\n", {"seed": 5, "x": 1}, launch)
    assert start(tmp_path) == ["5", "--x", "1"]
    lab = load_lab(tmp_path)
    assert check_study(lab, lab.study(None), RunOptions(informal=True)).seed_route == "seed in the config"


def test_environment_variables_hold_the_config(tmp_path: Path) -> None:
    script = "import json, os\nprint(json.dumps({k: v for k, v in os.environ.items() if k.startswith('X_')}))\n"
    base = {"lr": 1e-05, "on": False, "train": {"name": "a b"}, "layers": [1, 2]}
    write_lab(tmp_path, script, base, {"command": ["{python}", "train.py"], "config": {"as": "env", "prefix": "X_"}})
    assert start(tmp_path) == {"X_LR": "1e-05", "X_ON": "False", "X_TRAIN__NAME": "a b", "X_LAYERS": "[1, 2]"}


# -- other parsers


numbers = st.one_of(st.integers(), st.floats(allow_nan=False))
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
spread_items = st.one_of(
    st.lists(numbers.filter(lambda x: x not in (float("-inf"),)), max_size=4),
    st.lists(texts.filter(lambda text: not text.startswith("-")), max_size=3),
)


@given(items=spread_items, after=numbers)
@settings(deadline=None)
def test_spread_lists_are_read_back_by_argparse(items: list[Any], after: float) -> None:
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False)
    kind: Any = type(items[0]) if items and len({*map(type, items)}) == 1 else str
    parser.add_argument("--items", nargs="*", type=kind)
    parser.add_argument("--after", type=type(after))
    words = render({"items": items, "after": after}, ConfigRendering.model_validate({"as": "flags", "lists": "spread"}))
    read = parser.parse_args(words)
    assert read.after == after
    if len({*map(type, items)}) == 1:
        assert read.items == items
    else:
        assert [float(item) for item in read.items] == [float(item) for item in items]


@given(values=st.dictionaries(st.sampled_from("abcd"), st.one_of(numbers, texts, st.booleans()), min_size=1))
@settings(deadline=None)
def test_what_is_rendered_as_flags_is_read_back_by_click(values: dict[str, Any]) -> None:
    click = pytest.importorskip("click")
    options = [
        click.Option([f"--{key}/--no-{key}"] if isinstance(value, bool) else [f"--{key}"], type=type(value))
        for key, value in values.items()
    ]
    command = click.Command("train", params=options, callback=lambda **found: found)
    for separator in ("space", "equals"):
        rendering = ConfigRendering.model_validate({"as": "flags", "separator": separator})
        assert command.main(render(values, rendering), standalone_mode=False) == values


# -- whole runs


def test_a_sweep_script_gets_its_values_as_wandb_config(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    script = (
        "import wandb\nwandb.init(config={'lr': 9, 'kept': 1})\ngot = dict(wandb.config)\n"
        + WRITTEN
        + "wandb.finish()\n"
    )
    base = {"lr": 1e-05, "layers": [1, 2], "name": "a b", "on": False, "train": {"x": 1}}
    launch = {"command": ["{python}", "train.py"], "config": "wandb", "env": {"WANDB_SILENT": "true"}}
    write_lab(tmp_path, script, base, launch, track={"wandb": {"mode": "offline"}})
    looplab(tmp_path, "run", "--runs", "1")
    (seen,) = got(tmp_path)
    assert seen == {**base, "kept": 1}


def test_files_outside_of_the_run_folder_are_named_once(tmp_path: Path) -> None:
    script = (
        "import os\nos.makedirs('runs/a', exist_ok=True)\nopen('runs/a/events.bin', 'w').close()\n"
        "open('model.pt', 'w').close()\nprint('step 1 loss: 0.5')\n"
    )
    write_lab(
        tmp_path, script, {"x": 1}, {"command": ["{python}", "train.py"]}, objective={"metric": "loss", "goal": "min"}
    )
    (tmp_path / "old.txt").write_text("")
    os.utime(tmp_path / "old.txt", (1, 1))
    looplab(tmp_path, "run", "--runs", "1")
    (summary,) = (tmp_path / "outputs/s").glob("0*/record/summary.json")
    (note,) = json.loads(summary.read_text())["notes"]
    assert note.startswith("while it ran, files outside of its folder were written: model.pt, runs/a/events.bin (")
    assert "launch.cwd: run" in note


def test_what_looplab_prints_to_a_file_in_the_lab_is_not_the_runs(tmp_path: Path) -> None:
    base, launch = {"x": 1}, {"command": ["{python}", "train.py"]}
    write_lab(tmp_path, "print('step 1 loss: 0.5')\n", base, launch, objective={"metric": "loss", "goal": "min"})
    with (tmp_path / "night.log").open("w") as log:
        command = [sys.executable, "-m", "looplab", "run", "--runs", "1"]
        subprocess.run(command, cwd=tmp_path, stdout=log, stderr=log, check=True)
    (summary,) = (tmp_path / "outputs/s").glob("0*/record/summary.json")
    assert json.loads(summary.read_text())["notes"] == []


def python_with(package: str) -> str:
    """Return the Python on PATH that has a package; the test is skipped if there is none."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    python = shutil.which("python")
    if python is None or subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{package} is not installed")
    return python


@pytest.mark.long
def test_a_group_of_hydra_is_composed_by_hydra_for_each_run(tmp_path: Path) -> None:
    python = python_with("hydra")
    folder = tmp_path / "app"
    shutil.copytree(SHELF / "hydra_app", folder)
    script = find_script([python, "train.py"], folder)
    interface = read_interface(script)
    assert interface is not None
    lab_files = make_lab(script, interface)
    assert any("model (linear, mlp): model.hidden exists with mlp alone" in note for note in lab_files.notes)
    for name, text in lab_files.files.items():
        (folder / name).write_text(text)
    base = read_config(folder / "train.base.json")
    assert base["model"] == {"name": "mlp", "hidden": 32, "init_scale": 1.0}
    offered = [line for line in (folder / "lab.yaml").read_text().splitlines() if "a config group:" in line]
    assert [line.partition("  # a config")[0] for line in offered] == ["  # model: {choices: [linear, mlp]}"]
    assert 'write "mlp" in place of the table' in offered[0]
    lab = read_config(folder / "lab.yaml")
    assert lab["launch"]["config"] == {"as": "hydra", "only": "all", "skip": ["groups"]}
    base["model"], base["trainer"]["max_epochs"], base["optim"]["lr"] = "linear", 1, 0.002
    (folder / "train.base.json").write_text(json.dumps(base))
    lab["knobs"] = {"model": {"choices": ["linear", "mlp"]}, "optim.lr": lab["knobs"]["optim.lr"]}
    lab["proposers"] = []
    (folder / "lab.yaml").write_text(json.dumps(lab))
    looplab(folder, "propose", "--change", "model@set=mlp", "--change", "optim.lr@set=0.05", "--reason", "a group")
    looplab(folder, "run", "--runs", "2")
    runs = sorted((folder / "outputs/train").glob("0*"))
    recorded = [read_config(run / "record/config.json") for run in runs]
    composed = [read_config(run / ".hydra/config.yaml") for run in runs]
    assert [one["model"] for one in recorded] == ["linear", "mlp"]
    assert [one["model"] for one in composed] == [{"name": "linear"}, {"name": "mlp", "hidden": 32, "init_scale": 1.0}]
    for record, truth in zip(recorded, composed, strict=True):
        assert {key: truth[key] for key in ("seed", "data", "trainer")} == {
            key: record[key] for key in ("seed", "data", "trainer")
        }
    assert [one["optim"]["lr"] for one in composed] == [0.002, 0.05]
    assert json.loads(looplab(folder, "check", "--fix", "--json"))["fixes"] == []


@pytest.mark.long
def test_a_group_of_hydra_is_a_knob_and_its_option_reaches_the_trainer(tmp_path: Path) -> None:
    python = python_with("hydra")
    folder = tmp_path / "app"
    shutil.copytree(SHELF / "hydra_app", folder)
    script = find_script([python, "train.py", "optim=sgd", "trainer.max_epochs=1"], folder)
    interface = read_interface(script)
    assert interface is not None
    made = make_lab(script, interface)
    for name, text in made.files.items():
        (folder / name).write_text(text)
    assert any("optim.momentum exists with sgd alone" in note for note in made.notes)  # no knob of sgd is given up
    (folder / "conf/optim/sgd.yaml").write_text(
        "name: sgd\nlr: 1.0e-2\nmomentum: ${optim.weight_decay}\nweight_decay: 0.0\n"
    )
    script = find_script([python, "train.py", "optim=sgd", "trainer.max_epochs=1"], folder)
    interface = read_interface(script)
    assert interface is not None
    for name, text in make_lab(script, interface).files.items():
        (folder / name).write_text(text)
    lab = read_config(folder / "lab.yaml")
    assert lab["knobs"]["groups.optim"] == {"choices": ["adam", "sgd"]}
    assert lab["knobs"]["optim.lr"] == {"type": "float", "low": 1e-05, "high": 1.0, "log": True}  # for both options
    assert "optim=sgd" not in lab["launch"]["command"]
    base = read_config(folder / "train.base.json")
    assert base["groups"] == {"optim": "sgd"}
    assert base["optim"] == {"lr": 0.01, "weight_decay": 0.0}  # what differs otherwise is left to Hydra
    (folder / "lab.yaml").write_text(json.dumps({**lab, "proposers": []}))
    looplab(folder, "propose", "--change", "groups.optim@set=adam", "--reason", "the other option")
    looplab(folder, "run", "--runs", "2")
    composed = [read_config(run / ".hydra/config.yaml")["optim"] for run in sorted(folder.glob("outputs/train/0*"))]
    assert composed[0]["name"] == "sgd"
    assert composed[1] == {"name": "adam", "lr": 0.01, "betas": [0.9, 0.999], "weight_decay": 0.0}
    assert json.loads(looplab(folder, "check", "--fix", "--json"))["fixes"] == []


def test_plan_and_check_show_the_command_of_the_base(tmp_path: Path) -> None:
    write_lab(tmp_path, "", {"lr": -1e-05, "name": "a b"}, {"config": "flags"})
    expected = "train.py --lr=-1e-05 --name 'a b'"
    assert expected in looplab(tmp_path, "check")
    assert expected in looplab(tmp_path, "plan")
    argv = ["train.py", "--lr=-1e-05", "--name", "a b"]
    assert json.loads(looplab(tmp_path, "check", "--json"))["studies"][0]["argv"]["base.json"][1:] == argv
    assert json.loads(looplab(tmp_path, "plan", "--json"))["runs"][0]["argv"][1:] == argv


def test_case_snake_keeps_its_negation(tmp_path: Path) -> None:
    for case, word in (("snake", "--no_use_x"), ("as_written", "--no-use_x"), ("kebab", "--no-use-x")):
        rendering = ConfigRendering.model_validate({"as": "flags", "case": case})
        assert render({"use_x": False}, rendering) == [word]
    study = {"study": "s", "launch": {"command": ["true"], "config": {"as": "flags", "case": "as_written"}}}
    assert check_definition(study, tmp_path).launch.config.case == "as_written"
