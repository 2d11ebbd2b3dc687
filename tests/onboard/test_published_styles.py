"""More ways in which people publish trainers: shell options, Makefiles, commented JSON, output named in a config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from looplab.cli.onboarding import init
from looplab.config.files import read_config
from looplab.config.lab import ConfigRendering
from looplab.errors import LabError
from looplab.launch.command import build_argv, render
from looplab.measure.stdout import StdoutSource
from looplab.measure.summary import Directions
from looplab.onboard.base import Interface, ScriptSetting
from looplab.onboard.knobs import suggest
from looplab.onboard.labfile import make_lab
from looplab.onboard.objective import rank_objectives
from looplab.onboard.readers import read_interface
from looplab.onboard.readers.lightning import LightningReader
from looplab.onboard.scripts import find_script, is_script
from looplab.onboard.trial import MeasuredMetric
from looplab.onboard.written import WrittenFile, explain_written

ARGPARSE = "import argparse\np = argparse.ArgumentParser()\n"


def lab_of(folder: Path, *words: str) -> dict[str, Any]:
    """Return the lab file that `init` would write, with the base config as `config`, and its notes."""
    script = find_script(words, folder)
    interface = read_interface(script)
    assert interface is not None
    made = make_lab(script, interface)
    (folder / "lab.yaml").write_text(made.files["lab.yaml"])
    base = json.loads(next(text for name, text in made.files.items() if name.endswith(".base.json")))
    return {**read_config(folder / "lab.yaml"), "config": base, "notes": made.notes}


def run(folder: Path, lab: dict[str, Any]) -> str:
    """Return what the command of a lab prints."""
    arguments = render(lab["config"], ConfigRendering.model_validate(lab["launch"]["config"]))
    argv = build_argv(lab["launch"]["command"], {}, arguments, config=lab["config"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(argv, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


GETOPTS = """#!/bin/bash
usage() { echo "usage: $0 [-l rate]"; exit 1; }
lr=0.01
hidden=32
seed=1
data=xor
while getopts ":l:n:s:d:h" opt; do
  case $opt in
    l) lr=$OPTARG ;;
    n) hidden="${OPTARG}" ;;
    s) seed=$OPTARG ;;
    d) data=$OPTARG ;;
    *) usage ;;
  esac
done
echo "GOT $lr $hidden $seed $data"
python train.py $data $lr $hidden $seed
"""
WHILE_CASE = """#!/bin/bash
LR=0.01
HIDDEN=32
SEED=1
while [[ $# -gt 0 ]]; do
  key="$1"
  case $key in
    -l|--lr)
      LR="$2"
      shift 2
      ;;
    --hidden) HIDDEN="$2"; shift; shift ;;
    --seed ) SEED=${2}; shift 2 ;;
    *) echo "unknown option $1"; exit 1 ;;
  esac
done
echo "GOT $LR $HIDDEN $SEED xor"
"""
JOINED = """#!/bin/sh
LR=0.01
HIDDEN=32
SEED=1
for i in "$@"; do
  case $i in
    --lr=*) LR="${i#*=}" ;;
    --hidden=*) HIDDEN="${i#*=}" ;;
    --seed=*) SEED="${i#*=}" ;;
  esac
done
echo "GOT $LR $HIDDEN $SEED xor"
"""


@pytest.mark.parametrize(
    ("code", "typed"), [(GETOPTS, ["-l", "0.5"]), (WHILE_CASE, ["-l", "0.5"]), (JOINED, ["--lr=0.5"])]
)
def test_options_that_a_shell_script_parses_itself(code: str, typed: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(code)
    (tmp_path / "train.py").write_text("")
    lab = lab_of(tmp_path, "bash", "run.sh", *typed)
    names = [name.lower() for name in lab["config"]]
    assert names == ["lr", "hidden", "seed"]
    assert lab["config"]["lr"] == 0.5
    assert set(lab["knobs"]) == {"lr", "hidden"}
    assert lab["seed"] == "seed"
    lab["config"] |= {"hidden": 8, "seed": 7}
    assert "GOT 0.5 8 7 xor" in run(tmp_path, lab)


MAKEFILE = """PYTHON ?= python
LR ?= 0.05
HIDDEN = 24
SEED := 0
UNUSED = 3
FLAGS = --hidden $(HIDDEN)

.PHONY: train data
data:
\t@mkdir -p data

train: data
\t@echo GOT $(LR) \\
\t    $(FLAGS) --seed ${SEED}

test:
\techo $(UNUSED)
"""


def test_variables_of_a_makefile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.chdir(tmp_path)
    assert is_script(["make", "train"])
    assert not is_script(["make"])
    lab = lab_of(tmp_path, "make", "train", "LR=0.5")
    assert lab["study"] == "train"
    assert lab["config"] == {"LR": 0.5, "SEED": 0, "HIDDEN": 24}
    assert set(lab["knobs"]) == {"LR", "HIDDEN"}
    assert lab["seed"] == "SEED"
    assert lab["launch"]["command"] == ["make", "train", "{overrides}"]
    (tmp_path / "Makefile").unlink()
    assert not is_script(["make", "train"])


def test_a_command_line_of_lightning_may_be_a_class_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main.py").write_text(
        "from lightning.pytorch.cli import LightningCLI\nclass MyCLI(LightningCLI): pass\nMyCLI(Model, run=False)\n"
    )
    asked = []

    def ask(script: Any, words: list[str]) -> tuple[dict[str, Any], None]:
        asked.append(words)
        return {"model": {"lr": 0.1, "dropout": 0.0}}, None

    monkeypatch.setattr("looplab.onboard.readers.lightning.ask", ask)
    found = LightningReader().read(find_script([sys.executable, "main.py"], tmp_path))
    assert isinstance(found, Interface)
    assert found.base == {"model": {"lr": 0.1, "dropout": 0.0}}
    assert asked == [["--print_config"]]  # run=False: it has no commands


@pytest.mark.parametrize("typed", [["--output_path", "out"], ["-s", "out"], ["--output-path=out"]])
def test_a_required_option_may_be_typed_by_any_of_its_flags(typed: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{ARGPARSE}p.add_argument('--output_path', '-s', required=True)\n"
        "p.add_argument('--lr', type=float, default=0.1)\np.parse_args()\n"
    )
    with pytest.raises(LabError, match=r"train\.py needs output_path"):
        lab_of(tmp_path, sys.executable, "train.py")
    assert "out" in " ".join(lab_of(tmp_path, sys.executable, "train.py", *typed)["launch"]["command"])


def test_json_with_comments_is_a_config(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{ARGPARSE}p.add_argument('--config')\np.parse_args()\n")
    (tmp_path / "c.json").write_text(
        '{\n  // the "usual" values\n  "lr": 0.1, /* Adam,\n } */\n  "url": "http://a//b", "q": "\\"//",\n'
        '  "layers": [64, 32,], // two\n  "dropout": 0.2,\n  // the end\n}\n'
    )
    lab = lab_of(tmp_path, sys.executable, "train.py", "--config", "c.json")
    assert lab["config"] == {"lr": 0.1, "url": "http://a//b", "q": '"//', "layers": [64, 32], "dropout": 0.2}
    assert set(lab["knobs"]) == {"lr", "dropout"}


def test_a_file_with_hyper_parameters_is_a_config_whatever_its_name(tmp_path: Path) -> None:
    """It is used even if it is beside a module, and words override it."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/default.yaml").write_text("epochs: 3\nlr0: 0.05\nmomentum: 0.9\nseed: 0\n")
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/__main__.py").write_text(
        "import sys\nfrom pathlib import Path\nimport yaml\n"
        "cfg = yaml.safe_load((Path(__file__).parent / 'default.yaml').read_text())\n"
        "for word in sys.argv[1:]:\n    key, sign, value = word.partition('=')\n"
        "    if sign:\n        cfg[key] = yaml.safe_load(value)\n"
        "    elif word != 'train':\n        raise SyntaxError(word)\n"
    )
    lab = lab_of(tmp_path, sys.executable, "-m", "pkg", "train", "epochs=2")
    assert lab["config"] == {"epochs": 2, "lr0": 0.05, "momentum": 0.9, "seed": 0}
    assert set(lab["knobs"]) == {"lr0", "momentum"}
    assert lab["launch"]["command"][1:] == [
        *("with_config.py", "pkg/default.yaml={config}", "-m", "pkg", "train", "epochs={config.epochs}"),
    ]


CONFIG_WITH_OUTPUT = """\
output_dir: {elsewhere}/lora
model_dir: {elsewhere}/llama
checkpoint_dir: {elsewhere}/there
data_path: {elsewhere}/data.txt
logger:
  log_dir: {elsewhere}/lora/logs
optimizer: {{lr: 0.1, weight_decay: 0.01}}
seed: 1
"""
READS_CONFIG = """import argparse, os, yaml
p = argparse.ArgumentParser()
p.add_argument("--config")
c = yaml.safe_load(open(p.parse_args().config))
os.makedirs("made")
"""


def test_output_that_a_config_file_names_is_a_place_in_the_run_folder(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "there").mkdir(parents=True)
    (elsewhere / "lora/logs").mkdir(parents=True)  # of an earlier training
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(READS_CONFIG)
    (project / "c.yaml").write_text(CONFIG_WITH_OUTPUT.format(elsewhere=elsewhere))
    lab = lab_of(project, sys.executable, "train.py", "--config", "c.yaml")
    assert lab["launch"]["cwd"] == "run"
    assert lab["config"] == {
        "output_dir": "lora",
        "model_dir": f"{elsewhere}/llama",
        "checkpoint_dir": f"{elsewhere}/there",  # it exists, so it may be read from
        "data_path": f"{elsewhere}/data.txt",
        "logger": {"log_dir": "logs"},
        "optimizer": {"lr": 0.1, "weight_decay": 0.01},
        "seed": 1,
    }
    assert f"output_dir is lora in place of {elsewhere}/lora: each run writes to its own folder" in lab["notes"]


@pytest.mark.parametrize("typed", [["--workdir", "{elsewhere}/vae"], ["--workdir={elsewhere}/vae"]])
def test_output_that_was_typed_is_a_place_in_the_run_folder(typed: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"{ARGPARSE}p.add_argument('--workdir', required=True)\np.add_argument('--data-dir')\n"
        "p.add_argument('--lr', type=float, default=0.1)\np.parse_args()\n"
    )
    words = [word.format(elsewhere=tmp_path) for word in typed]
    lab = lab_of(tmp_path, sys.executable, "train.py", *words, "--data-dir", "/data/mnist")
    command = " ".join(lab["launch"]["command"]).replace("=", " ")
    assert "--workdir {out_dir}/vae" in command
    assert "--data-dir /data/mnist" in command


def test_options_with_pairs_of_a_config_in_python_are_known_by_their_action(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("optimizer = dict(type='SGD', lr=0.1)\nrandomness = dict(seed=0)\n")
    (tmp_path / "train.py").write_text(
        "import argparse\nclass DictAction(argparse.Action): pass\n"
        "p = argparse.ArgumentParser()\np.add_argument('config')\n"
        "p.add_argument('--cfg-options', nargs='+', action=DictAction)\np.parse_args()\n"
    )
    lab = lab_of(tmp_path, sys.executable, "train.py", "c.py")
    assert list(lab["knobs"]) == ["optimizer.lr"]
    assert "optimizer.lr={config.optimizer.lr}" in lab["launch"]["command"]


JAX = """import jax
config = {"LR": 0.5, "GAMMA": 0.99}
rng = jax.random.PRNGKey(30)
"""


def test_the_only_key_of_jax_is_the_seed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JAX)
    assert lab_of(tmp_path, sys.executable, "train.py")["config"]["seed"] == 30
    (tmp_path / "train.py").write_text(f"{JAX}data = jax.random.normal(jax.random.PRNGKey(1), (3,))\n")
    assert "seed" not in lab_of(tmp_path, sys.executable, "train.py")["config"]


def test_variables_that_a_script_sets_are_not_settings(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('import os\nos.environ["KERAS_BACKEND"] = "torch"\nLR = 0.1\n')
    assert lab_of(tmp_path, sys.executable, "train.py")["config"] == {"LR": 0.1}


def role_and_spec(name: str, default: Any, choices: tuple[Any, ...] | None = None) -> tuple[str, Any]:
    kinds: dict[type, Any] = {int: "int", float: "float"}
    found = suggest(ScriptSetting(name, kinds[type(default)], default, choices))
    return found.role, found.spec and dict(found.spec)


def test_names_that_need_their_own_ranges() -> None:
    assert role_and_spec("rank", 4) == ("knob", {"choices": [1, 2, 4, 8, 16]})
    assert role_and_spec("lora_r", 8) == ("knob", {"choices": [2, 4, 8, 16, 32]})
    for name, default in (("rank", 0), ("rank", -1), ("local_rank", 2), ("rank", 1)):
        assert role_and_spec(name, default)[0] != "knob"
    assert role_and_spec("warmup_ratio", 0.1) == ("knob", {"type": "float", "low": 0.0, "high": 0.5})
    assert role_and_spec("augment.p", 0.5) == ("doubtful", {"type": "float", "low": 0.0, "high": 1.0})
    assert role_and_spec("shrinkage", 0.2)[0] == "knob"
    assert role_and_spec("nhid", 200) == ("knob", {"choices": [50, 100, 200, 400, 800]})
    for name in ("logging_steps", "save_steps", "steps_per_print", "checkpoint_epochs"):
        assert role_and_spec(name, 50)[0] == "other", name
    assert role_and_spec("depth", 18, (18, 34, 50)) == ("knob", {"choices": [18, 34, 50]})
    assert role_and_spec("n_points", 18, (18, 34, 50))[0] == "other"


def printed(folder: Path, text: str) -> dict[str, list[float]]:
    (folder / "train.log").write_text(text)
    return {name: list(one.values) for name, one in StdoutSource(folder / "train.log").poll(final=True).items()}


def test_normalised_errors_are_results(tmp_path: Path) -> None:
    line = "debug: train NRMSE 1.5e-02, test NRMSE 1.6e-02\n"
    assert printed(tmp_path, line) == {"train_NRMSE": [0.015], "test_NRMSE": [0.016]}
    assert Directions().goal("test_NRMSE") == "min"
    assert Directions().goal("valid/SI-SDR") == "max"


def test_a_percentage_without_a_name_should_probably_be_large() -> None:
    def goal(name: str, first: float, last: float, points: int = 6) -> tuple[str, bool]:
        measured = MeasuredMetric(
            name=name, source="stdout", file=None, points=points, first=first, last=last,
            every_steps=1, per_minute=1, noise=None,
        )  # fmt: skip
        (found,) = rank_objectives([measured])
        return found.goal, found.is_goal_known

    assert goal("Test", 97.2, 97.2) == ("max", False)
    assert goal("Test", 97.2, 95.1) == ("max", True)
    assert goal("val", 1.3, 1.2) == ("min", True)
    assert goal("val", 1.3, 1.2, points=1) == ("min", False)
    assert goal("test_error", 97.2, 95.1) == ("min", True)


HYDRA_APP = """import hydra
raise SystemExit("the application was imported")
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg): pass
"""


def test_hydra_composes_files_without_the_application(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    (tmp_path / "conf/optim").mkdir(parents=True)
    (tmp_path / "conf/config.yaml").write_text("defaults: [_self_, {optim: adam}]\nseed: 3\nname: run_${optim.lr}\n")
    (tmp_path / "conf/optim/adam.yaml").write_text("lr: 0.01\nweight_decay: 0.1\n")
    (tmp_path / "conf/optim/sgd.yaml").write_text("lr: 0.1\nweight_decay: 0.1\n")
    (tmp_path / "train.py").write_text(HYDRA_APP)
    lab = lab_of(tmp_path, sys.executable, "train.py", "optim.weight_decay=0.2")
    assert lab["config"]["seed"] == 3
    assert lab["config"]["optim"]["weight_decay"] == 0.2
    assert lab["knobs"]["groups.optim"] == {"choices": ["adam", "sgd"]}
    assert "name" not in lab["config"]


def test_results_that_a_script_writes_beside_itself_are_named() -> None:
    files = [WrittenFile("checkpoints/a.json", True), WrittenFile("results.json", True)]
    told = explain_written(files, in_run_dir=False, beside_script=True)
    assert "launch.cwd" not in told
    assert told.endswith(
        "results.json. If it writes next to its own source (it uses __file__), pass {out_dir} for its output in "
        "launch.command, or run one at a time: slots: {count: 1}"
    )


def test_the_score_over_all_folds_comes_before_that_of_the_last_fold() -> None:
    names = {"valid-auc": 14, "AUC": 4, "train-auc": 14, "OOF_AUC": 1}
    measured = [
        MeasuredMetric(
            name=name, source="stdout", file=None, points=points, first=0.9, last=0.93, every_steps=1, per_minute=1,
            noise=None,
        )
        for name, points in names.items()
    ]  # fmt: skip
    assert [one.metric for one in rank_objectives(measured)][:2] == ["OOF_AUC", "valid-auc"]


@pytest.mark.parametrize(
    ("code", "why", "remedy"),
    [
        (
            "for step in range(3):\n    print(step, 0.1 ** step)\n",
            "it has no options, and no constants that look like hyper-parameters",
            "give names to the numbers to be searched, such as LR = 0.1",
        ),
        ("print(1 + 'a')\n", "TypeError", "if it fails without --help too, correct the script"),
    ],
)
def test_a_script_without_settings_is_told_what_to_do(
    code: str, why: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LabError, match=why) as raised:
        init([sys.executable, "train.py"], None, None, None, False)
    assert remedy in str(raised.value.hint)


FIELDS = """import argparse
from dataclasses import dataclass, field, fields

@dataclass
class Config:
    lr: float = field(default=0.02, metadata={"help": "learning rate"})
    rank: int = 8
    bias: bool = False
    solver: str = "sgd"
    random_state: int = 0

p = argparse.ArgumentParser()
p.add_argument("--lr", type=float, default=argparse.SUPPRESS)
p.add_argument("--rank", type=int, default=object)
p.add_argument("--bias", action="store_true", default=argparse.SUPPRESS)
p.add_argument("--solver", type=str, choices=["sgd", "momentum"], default=None)
p.add_argument("--random-state", type=int)
p.parse_args()
"""


def test_defaults_may_be_those_of_a_dataclass(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FIELDS)
    lab = lab_of(tmp_path, sys.executable, "train.py")
    assert lab["config"] == {"lr": 0.02, "rank": 8, "bias": False, "solver": "sgd", "random-state": 0}
    assert set(lab["knobs"]) == {"lr", "rank", "bias", "solver"}


ZOO = """import argparse, os, yaml
p = argparse.ArgumentParser()
p.add_argument("--algo", default="ppo")
p.add_argument("--env", default="CartPole-v1")
p.add_argument("--seed", type=int, default=0)
a = p.parse_args()
with open(os.path.join("hyperparams", f"{a.algo}.yml")) as f:
    Model(env=a.env, seed=a.seed, **yaml.safe_load(f)[a.env])
"""
TUNED = """CartPole-v1: {learning_rate: 0.001, batch_size: 64}
Pendulum-v1: {learning_rate: 0.1, batch_size: 256}
"""


def test_a_config_file_named_by_an_option_with_a_table_for_each_environment(tmp_path: Path) -> None:
    (tmp_path / "hyperparams").mkdir()
    for algo in ("ppo", "dqn"):
        (tmp_path / f"hyperparams/{algo}.yml").write_text(TUNED)
    (tmp_path / "train.py").write_text(ZOO)
    lab = lab_of(tmp_path, sys.executable, "train.py")
    assert "hyperparams/ppo.yml={config}" in lab["launch"]["command"]
    assert set(lab["knobs"]) == {"CartPole-v1.learning_rate", "CartPole-v1.batch_size"}
    assert lab["seed"] == "seed"
    typed = lab_of(tmp_path, sys.executable, "train.py", "--algo", "dqn", "--env=Pendulum-v1")
    assert "hyperparams/dqn.yml={config}" in typed["launch"]["command"]
    assert set(typed["knobs"]) == {"Pendulum-v1.learning_rate", "Pendulum-v1.batch_size"}


def test_the_reward_of_a_monitor_is_the_objective() -> None:
    measured = [
        MeasuredMetric(
            name=name, source="csv", file=None, points=9, first=9.0, last=last, every_steps=1, per_minute=1, noise=None
        )
        for name, last in (("l", 9.0), ("t", 12.0), ("r", 9.0))
    ]
    best = rank_objectives(measured)[0]
    assert (best.metric, best.goal, best.is_goal_known) == ("r", "max", True)
