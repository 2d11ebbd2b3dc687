"""Ways of writing trainers that were met in released packages, each in a small script of that style."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.e2e.conftest import COMMAND

from looplab.config.files import read_config
from looplab.errors import LabError
from looplab.measure.stdout import StdoutSource
from looplab.onboard.base import Interface, Script, ScriptSetting
from looplab.onboard.knobs import find_seed, suggest, unused_settings
from looplab.onboard.labfile import make_lab
from looplab.onboard.objective import explain_choice, kept_best, kept_in_config, rank_objectives
from looplab.onboard.output_folder import output_words
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script
from looplab.onboard.trial import MeasuredMetric

ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}


def looplab(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [str(COMMAND), *words], cwd=folder, env=ENV, capture_output=True, text=True, timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(folder: Path, code: str, *arguments: str) -> tuple[Script, Interface]:
    (folder / "train.py").write_text(code)
    script = find_script([sys.executable, "train.py", *arguments], folder)
    interface = read_interface(script)
    assert interface is not None
    return script, interface


def lab_of(folder: Path, code: str, *arguments: str) -> dict[str, Any]:
    """Return the lab file that `init` would write, and the base config as its key `config`."""
    script, interface = read(folder, code, *arguments)
    files = make_lab(script, interface).files
    (folder / "lab.yaml").write_text(files["lab.yaml"])
    return {**read_config(folder / "lab.yaml"), "config": json.loads(files["train.base.json"])}


# -- which settings are knobs

ARGPARSE = "import argparse\np = argparse.ArgumentParser()\n"


def test_one_number_of_an_option_that_takes_several_is_a_knob(tmp_path: Path) -> None:
    code = f"""{ARGPARSE}
p.add_argument("--hidden-dim", type=int, nargs="+", default=[300])
p.add_argument("--depth", type=int, nargs="*", default=[3])
p.add_argument("--milestones", type=int, nargs="+", default=[30, 60])
p.parse_args()
"""
    lab = lab_of(tmp_path, code)
    assert lab["knobs"]["hidden-dim"] == {"choices": [75, 150, 300, 600, 1200]}
    assert lab["knobs"]["depth"] == {"type": "int", "low": 1, "high": 6}
    assert lab["config"]["hidden-dim"] == 300
    assert "milestones" not in lab["knobs"]
    typed = lab_of(tmp_path, code, "--hidden-dim", "64", "--depth", "2", "4")
    assert typed["config"] == {"hidden-dim": 64, "depth": [2, 4]}
    assert typed["launch"]["config"]["lists"] == "spread"
    assert "depth" not in typed["knobs"]  # two values are not one number


def test_settings_of_what_is_switched_off_are_not_knobs(tmp_path: Path) -> None:
    code = f"""{ARGPARSE}
p.add_argument("--lr", type=float, default=0.01)
p.add_argument("--swa", action="store_true")
p.add_argument("--swa-lr", type=float, default=0.001)
p.add_argument("--use-ema", action="store_true")
p.add_argument("--ema-decay", type=float, default=0.99)
p.add_argument("--optimizer", choices=["adam", "lion"], default="adam")
p.add_argument("--lion-beta", type=float, default=0.95)
p.add_argument("--beta-lion", type=float, default=0.95)
p.add_argument("--adam-beta", type=float, default=0.9)
p.add_argument("--norm", choices=["batch", "group"], default="group")
p.add_argument("--batch-size", type=int, default=32)
p.parse_args()
"""
    assert set(lab_of(tmp_path, code)["knobs"]) == {"lr", "optimizer", "adam-beta", "norm", "batch-size"}
    with_swa = lab_of(tmp_path, code, "--swa", "--optimizer", "lion")["knobs"]
    assert {"swa-lr", "lion-beta", "beta-lion"} <= set(with_swa)
    assert "adam-beta" not in with_swa
    assert "ema-decay" in lab_of(tmp_path, code, "--ema-decay", "0.9")["knobs"]  # it was typed


def test_a_switch_with_a_general_name_switches_nothing_off() -> None:
    settings = [ScriptSetting("train", "bool", False), ScriptSetting("train_batch_size", "int", 32)]
    assert unused_settings(settings, {}) == set()


def test_the_weight_of_a_term_of_the_loss_is_offered_only() -> None:
    assert suggest(ScriptSetting("forces_weight", "float", 10.0, help="weight of forces loss")).role == "doubtful"
    assert suggest(ScriptSetting("class_weight_power", "float", 10.0)).role == "knob"


def test_the_seed_of_the_training_comes_before_that_of_the_data() -> None:
    names = ["data-seed", "pytorch-seed"]
    assert find_seed([ScriptSetting(name, "int", 0) for name in names]) == "pytorch-seed"
    assert find_seed([ScriptSetting(name, "int", 0) for name in ("data.seed", "trainer.init_seed")]) == (
        "trainer.init_seed"
    )
    assert find_seed([ScriptSetting("split_seed", "int", 0)]) == "split_seed"  # better than none


def test_a_learn_rate_is_a_learning_rate() -> None:
    spec = suggest(ScriptSetting("training.optimizer.learn_rate", "float", 0.001)).spec
    assert spec == {"type": "float", "low": 1e-5, "high": 0.1, "log": True}


# -- how values reach the trainer


def test_a_typed_value_of_the_config_file_is_part_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("training: {steps: 20000, lr: 0.1}\nname: a\nseed: 0\n")
    code = """
import sys
import yaml
config = yaml.safe_load(open(sys.argv[1]))
for key, value in zip(sys.argv[2::2], sys.argv[3::2]):
    node = config
    *above, last = key.lstrip("-").split(".")
    for part in above:
        node = node[part]
    node[last] = yaml.safe_load(value)
print(config)
"""
    lab = lab_of(tmp_path, code, "c.yaml", "--training.steps", "40", "--name", "b")
    assert lab["config"] == {"training": {"steps": 40, "lr": 0.1}, "name": "a", "seed": 0}
    assert lab["launch"]["command"][2:] == [
        "{config}", "--training.steps", "{config.training.steps}", "--name", "b",
    ]  # fmt: skip
    joined = lab_of(tmp_path, code, "c.yaml", "training.lr=0.2")
    assert joined["config"]["training"]["lr"] == 0.2
    assert joined["launch"]["command"][2:] == ["{config}", "training.lr={config.training.lr}"]


CHAIN = """
import argparse
import sys

def launch(words):
    inner = argparse.ArgumentParser("launcher")
    inner.add_argument("--num_machines", type=int, default=1)
    inner.add_argument("training_script")
    inner.add_argument("training_script_args", nargs=argparse.REMAINDER)
    inner.parse_args(words)

def main():
    outer = argparse.ArgumentParser("tool", allow_abbrev=False)
    commands = outer.add_subparsers(dest="command")
    for name in ("sft", "dpo"):
        commands.add_parser(name, add_help=False)
    args, _ = outer.parse_known_args(sys.argv[1:])
    words = sys.argv[sys.argv.index(args.command) + 1:]
    parser = argparse.ArgumentParser("tool " + args.command)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--bf16", type=lambda text: text == "True", nargs="?", default=None)
    parser.add_argument("--seed", type=int, default=42)
    parser.parse_known_args(words)
    launch(["/elsewhere/sft.py", *words])

main()
"""


def test_the_options_of_a_later_parser_follow_the_command(tmp_path: Path) -> None:
    _, interface = read(tmp_path, CHAIN, "sft", "--learning_rate", "1e-3", "--bf16", "False")
    assert interface.command[2:] == ("sft", "{flags}")
    assert {"learning_rate", "seed"} <= {setting.name for setting in interface.settings}
    assert "training_script" not in {setting.name for setting in interface.settings}  # of a launcher inside


def test_folders_that_are_read_from_are_found_from_the_run_folder(tmp_path: Path) -> None:
    for name in ("data", "model", "results"):
        (tmp_path / name).mkdir()
    code = f"""{ARGPARSE}
p.add_argument("--lr", type=float, default=0.01)
p.add_argument("--dataset")
p.add_argument("--model_path")
p.add_argument("--output_dir")
args = p.parse_args()
import os
os.makedirs(args.output_dir, exist_ok=True)
"""
    lab = lab_of(tmp_path, code, "--dataset", "data", "--model_path=model/", "--output_dir", "results")
    assert lab["launch"]["cwd"] == "run"
    assert lab["launch"]["command"][2:] == [
        "--dataset", "{lab}/data", "--model_path={lab}/model", "--output_dir", "results", "{flags}",
    ]  # fmt: skip
    by_default = lab_of(tmp_path, code.replace('"--dataset"', '"--dataset", default="data"'), "--output_dir", "r")
    assert "cwd" not in by_default["launch"]


def test_a_folder_that_is_made_twice_does_not_end_the_question_for_options(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
for _ in range(2):
    (Path.home() / ".cache-of-this-test" / "datasets").mkdir(parents=True, exist_ok=True)
{ARGPARSE}
p.add_argument("--lr", type=float, default=0.01)
p.parse_args()
"""
    script, _ = read(tmp_path, code)
    assert script.introspection.problem is None
    assert not (Path.home() / ".cache-of-this-test").exists()


# -- what is said


def test_an_option_of_looplab_that_the_script_has_too_is_named(tmp_path: Path) -> None:
    code = f"""{ARGPARSE}
p.add_argument("--name", required=True)
p.add_argument("--lr", type=float, default=0.01)
p.parse_args()
"""
    (tmp_path / "train.py").write_text(code)
    told = looplab(tmp_path, "init", "python", "train.py", "--lr", "0.1", "--name", "a b", code=2)
    assert "--name is an option of both looplab and train.py" in told
    assert "looplab init -- python train.py --lr 0.1 --name 'a b'" in told
    looplab(tmp_path, "init", "--", "python", "train.py", "--lr", "0.1", "--name", "a b")
    assert '"--name", "a b"' in (tmp_path / "lab.yaml").read_text()


def test_the_name_of_a_study_is_taken_with_a_word_if_the_script_has_that_option(tmp_path: Path) -> None:
    code = f'{ARGPARSE}p.add_argument("--name", default="x")\np.add_argument("--lr", type=float, default=0.1)\n'
    (tmp_path / "train.py").write_text(f"{code}p.parse_args()\n")
    told = json.loads(looplab(tmp_path, "init", "train.py", "--name", "s", "--json"))
    assert any("for train.py: looplab init -- python train.py --name s" in note for note in told["notes"])
    assert read_config(tmp_path / "lab.yaml")["study"] == "s"


def test_a_program_that_does_not_start_is_not_called_incomplete(tmp_path: Path) -> None:
    code = f"""{ARGPARSE}
import a_package_that_nobody_has
p.add_argument("--input-path", required=True)
p.add_argument("--lr", type=float, default=0.1)
p.parse_args()
"""
    script, interface = read(tmp_path, code)
    with pytest.raises(LabError) as raised:
        make_lab(script, interface)
    assert "did not answer `--help`" in str(raised.value)
    assert "a_package_that_nobody_has" in str(raised.value)


# -- what is measured

REPORT = """\
Epoch 1: train loss 0.9
Epoch 2: train loss 0.5
Done.
{
  "config": {"lr": 0.1},
  "head": {
    "hits_at_10": 0.93,
    "mean_rank": 4.5
  },
  "both": {
    "hits_at_10": 0.91,
    "mean_rank": 4.1
  }
}
"""


def printed(folder: Path, text: str) -> dict[str, list[tuple[float, float]]]:
    (folder / "train.log").write_text(text)
    batch = StdoutSource(folder / "train.log").poll(final=True)
    return {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in batch.items()}


def test_a_printed_json_report_is_read_as_a_whole(tmp_path: Path) -> None:
    assert printed(tmp_path, REPORT) == {
        "train_loss": [(1, 0.9), (2, 0.5)],
        "head/hits_at_10": [(2, 0.93)],
        "head/mean_rank": [(2, 4.5)],
        "both/hits_at_10": [(2, 0.91)],
        "both/mean_rank": [(2, 4.1)],
    }


def test_a_printed_json_config_is_not_measured(tmp_path: Path) -> None:
    config = json.dumps({"lr": 0.1, "loss_weight": 2.0, "model": {"hidden": 64}}, indent=2)
    assert printed(tmp_path, f"{config}\nepoch 1 val_loss 0.5\n") == {"val_loss": [(1, 0.5)]}


@pytest.mark.parametrize("text", ["{\n  'loss': 0.5,\n  'acc': 0.9\n}\n", '{\n  "loss": 0.5,\n  "acc": 0.9,\n'])
def test_what_is_almost_json_is_read_line_by_line(tmp_path: Path, text: str) -> None:
    assert printed(tmp_path, text).keys() == {"loss", "acc"}


# -- which metric counts


def metric(name: str, last: float) -> MeasuredMetric:
    return MeasuredMetric(
        name=name, source="stdout", file=None, points=3, first=1.0, last=last, every_steps=1, per_minute=1, noise=None
    )


BOTH = [metric("val_loss", 0.5), metric("val_accuracy", 0.9)]


def test_the_metric_that_the_config_monitors_is_the_objective() -> None:
    assert rank_objectives(BOTH)[0].metric == "val_accuracy"
    for value in ("min val_loss", "val_loss"):
        settings = {"trainer.monitor": value, "trainer.epochs": 3}
        assert rank_objectives(BOTH, settings, kept_in_config(settings))[0].metric == "val_loss"
    assert kept_in_config({"trainer.monitor": "off", "monitor_gpu": True}) == []


def test_early_stopping_on_the_first_of_several_metrics_tells_the_objective() -> None:
    code = """
params = {"objective": "binary", "metric": ["binary_logloss", "auc"]}
lgb.train(params, data, callbacks=[lgb.early_stopping(20, first_metric_only=True)])
"""
    metrics = [metric("valid_binary_logloss", 0.2), metric("valid_auc", 0.98)]
    assert rank_objectives(metrics, (), kept_best([ast.parse(code)]))[0].metric == "valid_binary_logloss"
    other = kept_best([ast.parse(code.replace("True", "False"))])
    assert rank_objectives(metrics, (), other)[0].metric == "valid_auc"


def test_a_second_metric_that_is_almost_as_likely_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f'{ARGPARSE}p.add_argument("--lr", type=float, default=0.1)\np.add_argument("--seed", type=int, default=1)\n'
        'p.parse_args()\nfor i in range(4):\n    print(f"epoch {i} val_loss {1 / (i + 1)} val_accuracy {i / 4}")\n'
    )
    looplab(tmp_path, "init", "train.py")
    told = looplab(tmp_path, "try", "--yes")
    assert "objective: val_accuracy (max), written" in told
    assert "val_accuracy rather than val_loss: it is what people report" in told
    assert "almost as likely: val_loss (min): looplab objective val_loss --min" in told


@pytest.mark.parametrize(
    ("names", "chosen", "why"),
    [
        (["val_loss", "val_acc"], "val_acc", "it is what people report, while a loss is what training minimises"),
        (["val_top5", "val_top1"], "val_top1", "top-1 is stricter than top-5"),
        (["Acc@5", "Acc@1"], "Acc@1", "top-1 is stricter than top-5"),
        (["val_mae", "val_rmse"], "val_mae", "both are equally likely by name"),
    ],
)
def test_a_tie_between_metrics_of_a_split_is_broken_and_explained(names: list[str], chosen: str, why: str) -> None:
    first, second = rank_objectives([metric(name, 0.5) for name in names])
    assert (first.metric, explain_choice(first, second)) == (chosen, why)


# -- where the hyper-parameters are


def test_a_config_is_not_added_to_words_that_fill_the_places_of_sys_argv(tmp_path: Path) -> None:
    """A stage of a DVC pipeline: its paths are words, its params are in a file with a fixed name."""
    (tmp_path / "params.yaml").write_text("prepare: {split: 0.2, seed: 3}\ntrain: {seed: 4, lr: 0.1}\n")
    (tmp_path / "train.py").write_text(
        "import sys, yaml\n"
        "params = yaml.safe_load(open('params.yaml'))['train']\n"
        "if len(sys.argv) != 3:\n    sys.exit('Usage: train.py features model')\n"
        "print(sys.argv[1], sys.argv[2], 'loss:', params['lr'])\n"
    )
    script = find_script([sys.executable, "train.py", "features.csv", "model"], tmp_path)
    interface = read_interface(script)
    assert interface is not None
    assert interface.command[-2:] == ("features.csv", "model")
    assert find_seed(interface.settings) == "train.seed"


def test_a_config_file_whose_path_is_computed_is_read(tmp_path: Path) -> None:
    """YOLO has `default=ROOT / "data/hyp.yaml"`, and its seed is a flag."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "hyp.yaml").write_text("lr0: 0.01\nmomentum: 0.9\n")
    code = f"""from pathlib import Path
{ARGPARSE}
ROOT = Path(__file__).resolve().parent
p.add_argument("--hyp", default=ROOT / "data/hyp.yaml")
p.add_argument("--project", default=ROOT / "runs/train")
p.add_argument("--seed", type=int, default=0)
p.parse_args()
"""
    lab = lab_of(tmp_path, code)
    assert set(lab["knobs"]) == {"lr0", "momentum"}
    assert lab["launch"]["command"][2:] == ["--hyp", "{config}", "--seed", "{config.seed}"]
    script = find_script([sys.executable, "train.py"], tmp_path)
    assert output_words(script, ["runs/train/exp/hyp.yaml"]) == ["--project", "{out_dir}/train"]


def test_a_seed_that_is_a_flag_of_click_goes_with_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text("optimizer: {lr: 0.05}\nepochs: 5\n")
    code = """import click
@click.command()
@click.option("--config", type=click.Path(exists=True), default="config.yml")
@click.option("--lr", type=float, default=None)
@click.option("--seed", type=int, default=17)
def main(config, lr, seed): pass
main()
"""
    lab = lab_of(tmp_path, code)
    assert (lab["seed"], lab["config"]["seed"]) == ("seed", 17)
    assert lab["launch"]["command"][2:] == ["--config", "{config}", "--seed", "{config.seed}"]
    assert set(lab["knobs"]) == {"optimizer.lr"}


NANOGPT = """batch_size = 32
learning_rate = 6e-3
dropout = 0.0
exec(open('configurator.py').read())
"""


def test_values_in_a_python_file_that_is_typed_are_the_base_config(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "small.py").write_text("learning_rate = 1e-2 # higher\nbatch_size = 16\nother = 3\n")
    lab = lab_of(tmp_path, NANOGPT, "config/small.py")
    assert lab["config"] == {"batch_size": 16, "learning_rate": 0.01, "dropout": 0.0}
    assert lab["launch"]["command"][2:] == ["config/small.py", "{flags}"]


MINGPT = """import sys
class Net:
    @staticmethod
    def get_default_config():
        C = CN()
        C.model_type = 'gpt'
        C.n_hidden = 48
        return C
class Trainer:
    @staticmethod
    def get_default_config():
        C = CN()
        C.learning_rate = 3e-4
        C.batch_size = 64
        return C
def get_config():
    C = CN()
    C.system = CN()
    C.system.seed = 3407
    C.system.work_dir = './out/adder'
    C.model = Net.get_default_config()
    C.model.model_type = 'gpt-nano'
    C.trainer = Trainer.get_default_config()
    C.trainer.learning_rate = 5e-4
    return C
config = get_config()
config.merge_from_args(sys.argv[1:])
"""


def test_configs_that_classes_return_are_tables_of_the_config(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MINGPT)
    assert lab["config"]["model"] == {"model_type": "gpt-nano", "n_hidden": 48}
    assert lab["config"]["trainer"] == {"learning_rate": 5e-4, "batch_size": 64}
    assert set(lab["config"]) == {"system", "model", "trainer"}
    assert lab["launch"]["config"]["skip"] == ["model.model_type", "system.work_dir"]  # not literals of Python
    assert lab["seed"] == "system.seed"


def test_an_experiment_like_that_of_sacred_takes_words(tmp_path: Path) -> None:
    code = """from own import Experiment
ex = Experiment("svm")
@ex.config
def cfg():
    C = 1.0
    seed = 5
@ex.automain
def run(C, seed): pass
"""
    lab = lab_of(tmp_path, code)
    assert lab["config"] == {"C": 1.0, "seed": 5}
    assert lab["launch"]["command"][2:] == ["with", "{overrides}"]


def test_defaults_of_shell_variables_may_be_quoted_or_assigned(tmp_path: Path) -> None:
    code = f"{ARGPARSE}" + "".join(
        f'p.add_argument("--{name}", type={kind}, required=True)\n'
        for name, kind in (("lr", "float"), ("hidden", "int"), ("seed", "int"))
    )
    (tmp_path / "fit.py").write_text(f"{code}p.parse_args()\n")
    (tmp_path / "run.sh").write_text(
        'LR=${LR:-1e-2}\nHIDDEN=${HIDDEN:-"24"}\n: "${SEED:=13}"\npython fit.py --lr "$LR" --hidden $HIDDEN --seed "$SEED"\n'
    )
    script = find_script(["run.sh"], tmp_path)
    interface = read_interface(script)
    assert interface is not None
    assert json.loads(make_lab(script, interface).files["run.base.json"]) == {"lr": 0.01, "hidden": 24, "seed": 13}


def test_the_settings_of_hugging_face_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(
        '{"learning_rate": 0.005, "per_device_train_batch_size": 16, "output_dir": "out"}'
    )
    (tmp_path / "transformers.py").write_text(
        "import argparse\nclass HfArgumentParser(argparse.ArgumentParser):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.add_argument('--learning_rate', type=float, default=5e-5)\n"
        "        self.add_argument('--seed', type=int, default=42)\n"
        "    def parse_json_file(self, file): pass\n"
    )
    code = """import sys
from transformers import HfArgumentParser
parser = HfArgumentParser()
if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
    parser.parse_json_file(sys.argv[1])
else:
    parser.parse_args()
"""
    lab = lab_of(tmp_path, code, "args.json")
    assert lab["launch"]["command"][2:] == ["{config}"]
    assert lab["launch"]["config"] == {"as": "file", "format": "json"}
    assert set(lab["knobs"]) == {"learning_rate", "per_device_train_batch_size"}
    assert (lab["config"]["learning_rate"], lab["seed"]) == (0.005, "seed")


def test_the_last_underscore_of_a_name_is_part_of_the_flag_of_tyro(tmp_path: Path) -> None:
    code = """import dataclasses, tyro
@dataclasses.dataclass
class Field:
    hidden_dim: int = 32
@dataclasses.dataclass
class Config:
    lambda_: float = 0.9
    field_: Field = dataclasses.field(default_factory=Field)
tyro.cli(Config)
"""
    lab = lab_of(tmp_path, code)
    assert set(lab["knobs"]) == {"lambda_", "field_.hidden-dim"}
    assert lab["launch"]["config"]["case"] == "as_written"


def test_choices_of_a_type_are_those_of_the_knob(tmp_path: Path) -> None:
    code = """from typing import Literal
from jsonargparse import CLI
def train(lr: float = 0.1, schedule: Literal["const", "cosine"] = "cosine"): pass
CLI(train)
"""
    lab = lab_of(tmp_path, code)
    assert lab["knobs"]["schedule"] == {"choices": ["const", "cosine"]}
    assert lab["config"]["schedule"] == "cosine"


def test_a_rate_in_a_text_that_may_have_several_is_a_knob(tmp_path: Path) -> None:
    """fairseq: `--lr 0.25`, or `--lr 0.25,0.1` for two epochs."""
    code = f"""{ARGPARSE}
p.add_argument("--lr", default="0.25", type=lambda text: [float(word) for word in text.split(",")])
p.add_argument("--layers", default="64,64", type=lambda text: [int(word) for word in text.split(",")])
p.parse_args()
"""
    lab = lab_of(tmp_path, code)
    assert lab["config"] == {"lr": 0.25}
    assert lab["knobs"]["lr"] == {"type": "float", "low": 0.0025, "high": 2.5, "log": True}


def test_names_that_other_fields_use() -> None:
    rate = suggest(ScriptSetting("step_size", "float", 0.1))
    assert (rate.role, rate.spec) == ("knob", {"type": "float", "low": 0.001, "high": 1.0, "log": True})
    assert suggest(ScriptSetting("prior_precision", "float", 1.0)).role == "doubtful"
    assert suggest(ScriptSetting("precision", "int", 16)).role == "other"
    assert suggest(ScriptSetting("attn_pdrop", "float", 0.1)).spec == {"type": "float", "low": 0.0, "high": 0.7}


def test_a_default_is_not_repeated_in_the_comment_of_a_knob(tmp_path: Path) -> None:
    script, interface = read(
        tmp_path,
        f'{ARGPARSE}p.add_argument("--lr", type=float, default=0.1, help="default: %(default)s")\np.parse_args()',
    )
    assert "default" not in make_lab(script, interface).files["lab.yaml"].partition("knobs:")[2]


# -- which metric is the objective


def test_words_with_digits_and_capitals_are_results() -> None:
    def best(*names: str) -> tuple[str, str]:
        guess = rank_objectives([metric(name, 0.5) for name in names])[0]
        return guess.metric, guess.goal

    assert best("box_loss", "P", "R", "mAP50", "mAP50-95") == ("mAP50-95", "max")
    assert best("train/box_loss", "val/box_loss", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95", "x/lr0") == (
        "metrics/mAP_0.5:0.95",
        "max",
    )
    assert best("loss", "train_loss", "val_loss", "acc")[0] == "val_loss"  # that of the training, perhaps
    assert best("LossPi", "AverageEpRet", "MaxEpRet", "StdEpRet", "AverageEpLen") == ("AverageEpRet", "max")


def test_what_an_evaluation_returns_comes_before_the_rewards_of_exploration() -> None:
    code = "mean_reward, std_reward = evaluate_policy(model, env)\nprint(f'mean_reward={mean_reward} +/- {std_reward}')"
    metrics = [metric("rollout/ep_rew_mean", 38.5), replace(metric("mean_reward", 465.8), points=1)]
    assert rank_objectives(metrics)[0].metric == "rollout/ep_rew_mean"
    assert rank_objectives(metrics, (), kept_best([ast.parse(code)]))[0].metric == "mean_reward"
