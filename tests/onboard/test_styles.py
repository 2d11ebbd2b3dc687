"""Trainers in many styles: what `looplab init` makes of them reaches them, value by value.

Each script prints the settings that it trained with. LOOPLAB_SHELF_PYTHON names an interpreter with more packages than
that of the tests.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from looplab.onboard.base import Script
from looplab.onboard.labfile import NewLab, make_lab
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script
from looplab.testing.readers import run_trainer

PYTHON = os.environ.get("LOOPLAB_SHELF_PYTHON", sys.executable)
SAY = "\nimport json as _json\nprint('GOT', _json.dumps({}))\n"


@cache
def has(package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([PYTHON, "-c", code]).returncode == 0


@dataclass
class Case:
    name: str
    script: str
    """The text of train.py."""
    says: str
    """What it prints: an expression for a dict."""
    reader: str
    knobs: str
    """Names of knobs that must be found."""
    seed: str | None
    change: Mapping[str, Any]
    got: Mapping[str, Any]
    """What the script then prints, at least."""
    others: str = ""
    """Names that must not be knobs."""
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()
    command: Sequence[str] = ("python", "train.py")
    indent: bool = False
    """Whether the script has a place for what it prints: the word SAY."""


CASES = [
    Case(
        "argparse in a function of another module",
        "from engine.opts import get_args_parser\nargs = get_args_parser().parse_args()\n",
        "vars(args)",
        "argparse",
        "lr weight-decay batch-size drop-path opt warmup-epochs",
        "seed",
        {"lr": 0.003, "opt": "sgd", "repeated-aug": False, "batch-size": 128},
        {"lr": 0.003, "opt": "sgd", "repeated_aug": False, "batch_size": 128, "epochs": 300, "amp": False},
        others="device output-dir data-path num-workers dist-url world-size eval print-freq",
        files={
            "engine/__init__.py": "",
            "engine/opts.py": """
import argparse
def get_args_parser():
    parser = argparse.ArgumentParser('training script', add_help=True)
    parser.add_argument('--batch-size', default=64, type=int)
    parser.add_argument('--epochs', default=300, type=int)
    model = parser.add_argument_group('model')
    model.add_argument('--drop-path', type=float, default=0.1, metavar='PCT')
    model.add_argument('--opt', default='adamw', choices=['adamw', 'sgd', 'lamb'])
    model.add_argument('--opt-betas', default=None, type=float, nargs='+')
    parser.add_argument('--clip-grad', type=float, default=None)
    parser.add_argument('--lr', type=float, default=5e-4, help='learning rate (default: 5e-4)')
    parser.add_argument('--weight-decay', type=float, default=0.05)
    parser.add_argument('--warmup-epochs', type=int, default=5)
    parser.add_argument('--repeated-aug', action='store_true')
    parser.add_argument('--no-repeated-aug', action='store_false', dest='repeated_aug')
    parser.set_defaults(repeated_aug=True)
    parser.add_argument('--data-path', default='/datasets/x', type=str)
    parser.add_argument('--output-dir', default='')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--amp', action='store_true')
    parser.add_argument('--seed', default=0, type=int)
    parser.add_argument('--eval', action='store_true')
    parser.add_argument('--num-workers', default=10, type=int)
    parser.add_argument('--world-size', default=1, type=int)
    parser.add_argument('--dist-url', default='env://')
    parser.add_argument('--print-freq', default=10, type=int)
    return parser
""",
        },
    ),
    Case(
        "argparse with everything",
        """
import argparse
def str2bool(v):
    if v.lower() in ('yes', 'true', 't', '1'): return True
    if v.lower() in ('no', 'false', 'f', '0'): return False
    raise argparse.ArgumentTypeError('bool')
p = argparse.ArgumentParser()
p.add_argument('data', metavar='DIR')
p.add_argument('-lr', type=float, default=1e-3)
p.add_argument('-b', '--batch_size', type=int, default=1e2)
p.add_argument('--use_bias', type=str2bool, nargs='?', const=True, default=True)
p.add_argument('--shuffle', type=bool, default=True)
p.add_argument('--anneal_lr', action=argparse.BooleanOptionalAction, default=True)
p.add_argument('--nesterov', type=lambda x: x.lower() == 'true', default=False)
p.add_argument('--layer_sizes', type=int, nargs='+', default=[64, 64])
p.add_argument('--milestones', type=lambda s: [int(x) for x in s.split(',')], default=[10, 20])
p.add_argument('--no_bn', dest='bn', action='store_false')
p.add_argument('--residual', action='store_false')
p.add_argument('--dropout', type=float, default='0.1')
g = p.add_mutually_exclusive_group()
g.add_argument('--momentum', type=float, default=0.9)
g.add_argument('--beta1', type=float, default=0.8)
p.add_argument('--gamma', type=float, default=0.99)
p.add_argument('--tags', action='append')
p.add_argument('-v', action='count', default=0)
p.add_argument('--manual_seed', type=int)
args, rest = p.parse_known_args()
assert not rest, rest
""",
        "vars(args)",
        "argparse",
        "lr batch_size use_bias anneal_lr nesterov dropout momentum gamma bn",
        "manual_seed",
        {"lr": 0.01, "use_bias": False, "shuffle": False, "anneal_lr": False, "nesterov": True, "bn": False, "gamma": 0.9,
         "residual": False},
        {
            "lr": 0.01,
            "use_bias": False,
            "shuffle": False,
            "anneal_lr": False,
            "nesterov": True,
            "bn": False,
            "data": "imagenet",
            "batch_size": 100,
            "layer_sizes": [64, 64],
            "milestones": [10, 20],
            "manual_seed": 1,
            "residual": False,
            "gamma": 0.9,
        },
        others="data tags v",
        arguments=["imagenet"],
    ),
    Case(
        "argparse with commands",
        """
import argparse
common = argparse.ArgumentParser(add_help=False)
common.add_argument('--seed', type=int, default=7)
p = argparse.ArgumentParser()
p.add_argument('--root', default='.')
subs = p.add_subparsers(dest='what', required=True)
e = subs.add_parser('evaluate', parents=[common])
e.add_argument('--ckpt', required=True)
t = subs.add_parser('train', parents=[common])
t.add_argument('--learning-rate', type=float, default=0.1)
t.add_argument('--hidden', type=int, default=32)
args = p.parse_args()
""",
        "vars(args)",
        "argparse",
        "learning-rate hidden",
        "seed",
        {"learning-rate": 0.2},
        {"learning_rate": 0.2, "hidden": 32, "seed": 7, "what": "train", "root": "here"},
        arguments=["--root", "here", "train"],
    ),
    Case(
        "two parsers, the first for a config",
        """
import argparse
pre = argparse.ArgumentParser(add_help=False)
pre.add_argument('-c', '--config', default='', type=str)
p = argparse.ArgumentParser()
p.add_argument('--lr', type=float, default=0.05)
p.add_argument('--smoothing', type=float, default=0.1)
p.add_argument('--mixup', type=float, default=0.0)
p.add_argument('--model-ema-decay', type=float, default=0.9998)
p.add_argument('--seed', type=int, default=42)
p.add_argument('--local_rank', default=0, type=int)
first, rest = pre.parse_known_args()
args = p.parse_args(rest)
""",
        "vars(args)",
        "argparse",
        "lr smoothing model-ema-decay",
        "seed",
        {"lr": 0.1, "smoothing": 0.0},
        {"lr": 0.1, "smoothing": 0.0, "seed": 42},
        others="local_rank config",
    ),
    Case(
        "dataclass defaults through argparse, in a module that cannot be imported",
        """
import argparse
import a_package_that_nobody_has
p = argparse.ArgumentParser()
p.add_argument('--lr', type=float, default=0.05)
p.add_argument('--bs', type=int, default=16)
p.add_argument('--width', type=int, default=2 ** 6)
p.add_argument('--seed', type=int, default=3)
p.add_argument('--out', default=str(__file__))
p.add_argument('--fast', type=lambda v: v == 'True', default=False)
args = p.parse_args()
""",
        "vars(args)",
        "argparse",
        "lr bs width",
        "seed",
        {"lr": 0.1, "width": 128, "fast": True},
        {"lr": 0.1, "width": 128, "seed": 3, "bs": 16, "fast": True},
        files={"later/a_package_that_nobody_has.py": ""},
    ),
    Case(
        "argparse without types",
        """
import argparse
p = argparse.ArgumentParser()
p.add_argument('--lr', default=0.1)
p.add_argument('--wd', default=0.01)
p.add_argument('--hidden', default=32)
p.add_argument('--opt', default='sgd', choices=['sgd', 'adam'])
p.add_argument('--seed', default=0)
args = p.parse_args()
args.lr, args.seed = float(args.lr), int(args.seed)
args.twice = args.wd * 2
""",
        "vars(args)",
        "argparse",
        "lr opt",
        "seed",
        {"lr": 0.5, "opt": "adam", "seed": 4},
        {"lr": 0.5, "opt": "adam", "seed": 4, "twice": 0.02, "hidden": 32},
        others="wd hidden",
    ),
    Case(
        "constants, and numbers in calls",
        """
import types
k = types.SimpleNamespace(Adam=lambda **o: o, Dense=lambda **o: o, fit=lambda **o: o)
batch_size = 128
epochs = 3
layers = [k.Dense(units=64), k.Dense(units=10)]
opt = k.Adam(learning_rate=1e-3, beta_1=0.9)
history = k.fit(batch_size=batch_size, epochs=epochs, validation_split=0.1)
""",
        "{**opt, **history, 'units': [l['units'] for l in layers]}",
        "constants",
        "batch_size Adam.learning_rate Adam.beta_1",
        None,
        {"batch_size": 32, "Adam.learning_rate": 0.5},
        {"batch_size": 32, "learning_rate": 0.5, "beta_1": 0.9, "epochs": 3, "units": [64, 10], "validation_split": 0.1},
        others="Dense.units fit.validation_split",
    ),
    Case(
        "argparse from the fields of a dataclass, with dots and infinities",
        """
import argparse, dataclasses
@dataclasses.dataclass
class Config:
    lr: float = 0.1
    dropout: float = 0.0
    nesterov: bool = True
    patience: float = float('inf')
p = argparse.ArgumentParser()
for f in dataclasses.fields(Config):
    p.add_argument('--' + f.name, type=f.type, default=f.default)
p.add_argument('--model', default='mlp', choices=['mlp', 'cnn'])
p.add_argument('--model.width', type=int, default=32)
p.add_argument('--model.random-seed', type=int, default=5)
args = p.parse_args()
args.patience = str(args.patience)
""",
        "vars(args)",
        "argparse",
        "lr dropout nesterov model.width",
        "model.random-seed",
        {"lr": 0.5, "nesterov": False, "model.width": 64},
        {"lr": 0.5, "nesterov": False, "model.width": 64, "model": "mlp", "patience": "inf", "model.random_seed": 5},
    ),
    Case(
        "a parser that changes its defaults and parses again",
        """
import argparse
class Options:
    def parse(self):
        p = argparse.ArgumentParser()
        p.add_argument('--model', default='gan')
        p.add_argument('--hidden', type=int, default=64)
        p.add_argument('--lr', type=float, default=0.1)
        opt, _ = p.parse_known_args()
        if opt.model == 'gan':
            p.set_defaults(hidden=32)
            p.add_argument('--lambda_l1', type=float, default=10.0)
        return p.parse_args()
opt = Options().parse()
""",
        "vars(opt)",
        "argparse",
        "lr hidden lambda_l1",
        None,
        {"lambda_l1": 5.0},
        {"lambda_l1": 5.0, "hidden": 32, "lr": 0.1},
    ),
    Case(
        "yacs",
        """
import argparse, ast
class CN(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__
    def merge_from_list(self, words):
        for key, text in zip(words[::2], words[1::2]):
            *above, last = key.split('.')
            node = self
            for part in above: node = node[part]
            assert last in node
            node[last] = ast.literal_eval(text)
_C = CN()
_C.SEED = 1
_C.SOLVER = CN()
_C.SOLVER.BASE_LR = 0.01
_C.MODEL = CN()
_C.MODEL.DROPOUT = 0.1
_C.OUTPUT_DIR = 'out'
p = argparse.ArgumentParser()
p.add_argument('--config-file', default='')
p.add_argument('opts', default=None, nargs=argparse.REMAINDER)
_C.merge_from_list(p.parse_args().opts)
""",
        "_C",
        "yacs",
        "SOLVER.BASE_LR MODEL.DROPOUT",
        "SEED",
        {"SOLVER.BASE_LR": 0.5, "SEED": 3},
        {"SOLVER": {"BASE_LR": 0.5}, "MODEL": {"DROPOUT": 0.1}, "SEED": 3, "OUTPUT_DIR": "out"},
        others="OUTPUT_DIR",
    ),
    Case(
        "numbers of sys.argv",
        "import sys\nlr = float(sys.argv[1]) if len(sys.argv) > 1 else 0.1\nhidden = int(sys.argv[2]) if len(sys.argv) > 2 else 64\n",
        "{'lr': lr, 'hidden': hidden}",
        "sys.argv",
        "lr hidden",
        None,
        {"lr": 0.5},
        {"lr": 0.5, "hidden": 64},
    ),
    Case(
        "globals with a configurator",
        """
out_dir = 'out'
eval_interval = 2000
always_save_checkpoint = True
wandb_log = False
batch_size = 12
n_layer = 12
n_head = 12
n_embd = 768
dropout = 0.0
learning_rate = 6e-4 # max learning rate
weight_decay = 1e-1
beta2 = 0.95
grad_clip = 1.0
decay_lr = True
warmup_iters = 2000
device = 'cpu'
config_keys = [k for k, v in globals().items() if not k.startswith('_') and isinstance(v, (int, float, bool, str))]
exec(open('configurator.py').read())
config = {k: globals()[k] for k in config_keys}
iter_num = 0
best_val_loss = 1e9
""",
        "config",
        "globals",
        "batch_size n_layer n_head n_embd dropout learning_rate weight_decay beta2 grad_clip",
        None,
        {"learning_rate": 0.01, "decay_lr": False, "n_layer": 6},
        {"learning_rate": 0.01, "decay_lr": False, "n_layer": 6, "batch_size": 12},
        others="iter_num best_val_loss out_dir device eval_interval",
        files={
            "configurator.py": """
import sys
from ast import literal_eval
for arg in sys.argv[1:]:
    key, val = arg[2:].split('=')
    if key not in globals():
        raise ValueError('Unknown config key: ' + key)
    try:
        attempt = literal_eval(val)
    except (SyntaxError, ValueError):
        attempt = val
    assert type(attempt) == type(globals()[key]), key
    globals()[key] = attempt
""",
        },
    ),
    Case(
        "a class of constants",
        """
import random
class CFG:
    debug = False
    seed = 42
    lr = 1e-3
    min_lr = lr * 0.01
    batch_size = 32
    n_fold = 5
    trn_fold = [0]
    model_name = 'resnet'
    epochs = 4
best = 0.0
for epoch in range(2):
    best += CFG.lr
""",
        "{k: v for k, v in vars(CFG).items() if k[0] != '_'}",
        "constants",
        "CFG.lr CFG.batch_size",
        "CFG.seed",
        {"CFG.lr": 0.5, "CFG.debug": True},
        {"lr": 0.5, "min_lr": 0.005, "debug": True, "seed": 42, "trn_fold": [0]},
        others="best CFG.min_lr CFG.n_fold",
    ),
    Case(
        "constants in main()",
        """
def train(model, lr=0.01, momentum=0.9):
    return {'lr': lr, 'momentum': momentum}
def main():
    seed = 0
    epochs = 3
    batch_size = 64
    step = 0
    for _ in range(epochs):
        step += batch_size
    got = train(None)
    got.update(seed=seed, batch_size=batch_size, step=step)
    SAY
if __name__ == '__main__':
    main()
""",
        "got",
        "constants",
        "main.batch_size train.lr train.momentum",
        "main.seed",
        {"main.batch_size": 32, "train.lr": 0.5},
        {"batch_size": 32, "lr": 0.5, "momentum": 0.9, "seed": 0, "step": 96},
        others="main.step",
        indent=True,
    ),
    Case(
        "parameters of a boosting library",
        """
SEED = 11
LR, DROPOUT = 1e-3, 0.1
def seed_everything(seed=42):
    return seed
seed_everything(SEED)
params = dict(objective='binary', learning_rate=0.05, num_leaves=31, feature_fraction=0.8, max_depth=-1, verbose=-1)
params['bagging_freq'] = 5
NUM_ROUNDS = 200
""",
        "{**params, 'SEED': SEED, 'NUM_ROUNDS': NUM_ROUNDS, 'LR': LR, 'DROPOUT': DROPOUT}",
        "constants",
        "params.learning_rate params.num_leaves params.feature_fraction LR DROPOUT",
        "SEED",
        {"params.learning_rate": 0.2, "params.num_leaves": 63, "params.bagging_freq": 2, "LR": 0.5},
        {"LR": 0.5, "DROPOUT": 0.1, "learning_rate": 0.2, "num_leaves": 63, "bagging_freq": 2, "SEED": 11, "max_depth": -1},
        others="params.verbose params.max_depth seed_everything.seed",
    ),
    Case(
        "numbers in calls only",
        """
class Forest:
    pass
import types
sk = types.SimpleNamespace(ForestClassifier=lambda **k: k, train_test_split=lambda *a, **k: k)
split = sk.train_test_split([1], test_size=0.2, random_state=42)
model = sk.ForestClassifier(n_estimators=100, max_depth=8, random_state=3)
""",
        "{**model, 'split': split['random_state']}",
        "constants",
        "ForestClassifier.n_estimators ForestClassifier.max_depth",
        "ForestClassifier.random_state",
        {"ForestClassifier.n_estimators": 50},
        {"n_estimators": 50, "max_depth": 8, "random_state": 3, "split": 42},
        others="train_test_split.test_size",
    ),
    Case(
        "numbers in calls that only may be hyper-parameters, and seeds of generators",
        """
import random, types
random.seed(3)
sk = types.SimpleNamespace(Classifier=lambda **k: k, seed_everything=random.seed)
first = random.random()
sk.seed_everything(3, workers=True) if False else random.seed(3)
model = sk.Classifier(coef0=0.5, gamma=0.001)
""",
        "{**model, 'first': first, 'again': random.random()}",
        "constants",
        "Classifier.gamma",
        "seed",
        {"Classifier.gamma": 0.1, "seed": 4},
        {"gamma": 0.1, "coef0": 0.5, "first": random.Random(4).random(), "again": random.Random(4).random()},
    ),
    Case(
        "a number in a call that only may be a hyper-parameter",
        "import types\nsk = types.SimpleNamespace(Kernel=lambda **k: k)\nmodel = sk.Kernel(coef0=0.5, copy=True)\n",
        "model",
        "constants",
        "Kernel.coef0",
        None,
        {"Kernel.coef0": 0.25},
        {"coef0": 0.25, "copy": True},
    ),
    Case(
        "a config module beside the script",
        "import config as cfg\nfrom config import HIDDEN\n",
        "{'LR': cfg.LR, 'HIDDEN': HIDDEN, 'SEED': cfg.SEED}",
        "constants",
        "config.LR config.HIDDEN",
        "config.SEED",
        {"config.LR": 0.5, "config.HIDDEN": 16},
        {"LR": 0.5, "HIDDEN": 16, "SEED": 0},
        files={"config.py": "LR = 0.1\nHIDDEN = 8\nSEED = 0\nDATA_DIR = 'data'\n"},
        others="config.DATA_DIR",
    ),
    Case(
        "environment",
        """
import os
def env(name, default, kind=float):
    return kind(os.environ.get(name, default))
lr = env('LR', 0.01)
bs = int(os.getenv('BATCH_SIZE', '32'))
seed = int(os.environ.get('SEED', 0))
out = os.environ.get('OUT_DIR', 'out')
""",
        "{'lr': lr, 'bs': bs, 'seed': seed, 'out': out}",
        "environment",
        "LR BATCH_SIZE",
        "SEED",
        {"LR": 0.5},
        {"lr": 0.5, "bs": 32, "seed": 0, "out": "out"},
        others="OUT_DIR",
    ),
    Case(
        "a JSON config and a seed as a flag",
        """
import argparse, json
p = argparse.ArgumentParser()
p.add_argument('--config', required=True)
p.add_argument('--seed', type=int, default=None)
p.add_argument('--gpu', type=int, default=0)
args = p.parse_args()
cfg = json.load(open(args.config))
""",
        "{**cfg, 'seed_flag': args.seed}",
        "config file",
        "optim.lr optim.momentum model.hidden",
        "seed",
        {"optim.lr": 0.5, "seed": 9},
        {"optim": {"lr": 0.5, "momentum": 0.9}, "model": {"hidden": 64}, "seed_flag": 9},
        files={"exp.json": '{"optim": {"lr": 0.1, "momentum": 0.9}, "model": {"hidden": 64}}'},
        arguments=["--config", "exp.json"],
        others="gpu",
    ),
    Case(
        "hyp.yaml beside flags",
        """
import argparse
p = argparse.ArgumentParser()
p.add_argument('--weights', type=str, default='')
p.add_argument('--cfg', type=str, default='model.yaml')
p.add_argument('--hyp', type=str, default='data/hyp.yaml')
p.add_argument('--epochs', type=int, default=10)
p.add_argument('--batch-size', type=int, default=16)
p.add_argument('--seed', type=int, default=0)
p.add_argument('--workers', type=int, default=8)
opt = p.parse_args()
hyp = dict(line.strip().split(': ') for line in open(opt.hyp) if ': ' in line)
hyp = {k: float(v) for k, v in hyp.items() if k in ('lr0', 'momentum', 'weight_decay', 'fliplr')}
""",
        "{**hyp, **vars(opt)}",
        "config file",
        "lr0 momentum weight_decay batch-size",
        "seed",
        {"lr0": 0.5, "batch-size": 32},
        {"lr0": 0.5, "momentum": 0.937, "batch_size": 32, "epochs": 10, "seed": 0, "cfg": "model.yaml"},
        files={
            "model.yaml": "nc: 80\ndepth_multiple: 0.33\n",
            "data/hyp.yaml": "lr0: 0.01  # initial\nmomentum: 0.937\nweight_decay: 0.0005\nfliplr: 0.5\n".replace(
                "  # initial", ""
            ),
        },
        others="workers",
    ),
    Case(
        "shell variables, nothing passed on",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=1.0)\n"
        "p.add_argument('--wd', type=float, default=0.1)\np.add_argument('--seed', type=int, default=0)\n"
        "p.add_argument('--name', default='')\nargs = p.parse_args()\n",
        "vars(args)",
        "argparse",
        "lr wd",
        "seed",
        {"wd": 0.01},
        {"lr": 0.003, "wd": 0.01, "name": "big", "seed": 5},
        files={
            "run.sh": "#!/bin/bash\nset -e\nLR=0.003\nexport SEED=${SEED:-5}\nNAME=big\n# python old.py\n"
            "CUDA_VISIBLE_DEVICES=0 python -u train.py \\\n  --lr $LR --name $NAME \\\n  --seed ${SEED} 2>&1 | tee log\n"
        },
        command=("bash", "run.sh"),
    ),
    Case(
        "shell that passes its arguments on",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=1.0)\n"
        "p.add_argument('--wd', type=float, default=0.1)\np.add_argument('--seed', type=int, default=0)\n"
        "p.add_argument('--name', default='')\nargs = p.parse_args()\n",
        "vars(args)",
        "shell, then argparse",
        "lr wd",
        "seed",
        {"wd": 0.01},
        {"lr": 0.003, "wd": 0.01, "name": "big", "seed": 0},
        files={"run.sh": 'NAME=big\nexec python train.py --lr 0.003 --name "$NAME" "$@"\n'},
        command=("bash", "run.sh"),
    ),
    Case(
        "CfgNode",
        """
import sys
class N:
    def __init__(self, **k): self.__dict__.update(k)
    def merge_from_args(self, args):
        for arg in args:
            key, val = arg[2:].split('=')
            *above, last = key.split('.')
            node = self
            for part in above: node = getattr(node, part)
            assert hasattr(node, last), key
            setattr(node, last, eval(val))
def get_config():
    C = N()
    C.system = N()
    C.system.seed = 3407
    C.model = N()
    C.model.n_layer = 6
    C.model.dropout = 0.1
    C.trainer = N()
    C.trainer.learning_rate = 5e-4
    return C
config = get_config()
config.merge_from_args(sys.argv[1:])
""",
        "{**vars(config.system), **vars(config.model), **vars(config.trainer)}",
        "CfgNode",
        "trainer.learning_rate model.dropout model.n_layer",
        "system.seed",
        {"trainer.learning_rate": 0.5},
        {"learning_rate": 0.5, "seed": 3407, "n_layer": 6, "dropout": 0.1},
    ),
    Case(
        "click",
        """
import click
@click.command()
@click.option('-l', '--learning-rate', 'lr', default=0.1, show_default=True)
@click.option('--hidden_dim', type=click.IntRange(1), default=32)
@click.option('--shuffle/--keep-order', default=True)
@click.option('--nesterov', is_flag=True)
@click.option('--optimizer', type=click.Choice(['sgd', 'adam']), default='sgd')
@click.option('--betas', nargs=2, type=float, default=(0.9, 0.99))
@click.option('--seed', type=int, default=None)
@click.argument('data', default='digits')
def main(**got):
    SAY
main()
""",
        "got",
        "click",
        "learning-rate hidden_dim nesterov optimizer",
        "seed",
        {"learning-rate": 0.5, "shuffle": False, "nesterov": True, "optimizer": "adam"},
        {"lr": 0.5, "shuffle": False, "nesterov": True, "optimizer": "adam", "hidden_dim": 32, "seed": 1, "data": "digits"},
        needs=["click"],
        indent=True,
        others="data",
    ),
    Case(
        "typer",
        """
import typer
app = typer.Typer()
@app.command()
def evaluate(ckpt: str): ...
@app.command()
def train(lr: float = 0.1, batch_size: int = 32, anneal: bool = True, seed: int = 0, out_dir: str = 'out'):
    got = dict(lr=lr, batch_size=batch_size, anneal=anneal, seed=seed)
    SAY
app()
""",
        "got",
        "typer",
        "lr batch-size anneal",
        "seed",
        {"lr": 0.5, "anneal": False},
        {"lr": 0.5, "anneal": False, "batch_size": 32, "seed": 0},
        needs=["typer"],
        indent=True,
        others="out-dir",
    ),
    Case(
        "absl",
        """
from absl import app, flags
FLAGS = flags.FLAGS
flags.DEFINE_float('learning_rate', 0.1, 'Step size.', lower_bound=0.0)
flags.DEFINE_integer('num_hidden', 64, 'Width.')
flags.DEFINE_bool('use_bias', True, 'Bias.')
flags.DEFINE_enum('optimizer', 'sgd', ['sgd', 'adam'], 'Which.')
flags.DEFINE_list('layers', ['1', '2'], 'Sizes.')
flags.DEFINE_integer('seed', 0, 'Seed.')
flags.DEFINE_string('workdir', None, 'Where.')
def main(argv):
    got = {name: FLAGS[name].value for name in ('learning_rate', 'num_hidden', 'use_bias', 'optimizer', 'layers', 'seed')}
    SAY
app.run(main)
""",
        "got",
        "absl",
        "learning_rate num_hidden use_bias optimizer",
        "seed",
        {"learning_rate": 0.5, "use_bias": False, "optimizer": "adam"},
        {"learning_rate": 0.5, "use_bias": False, "optimizer": "adam", "num_hidden": 64, "layers": ["1", "2"]},
        needs=["absl"],
        indent=True,
        others="workdir layers",
    ),
    Case(
        "ml_collections",
        """
from absl import app
from ml_collections import config_flags
CONFIG = config_flags.DEFINE_config_file('config', 'configs/default.py')
def main(argv):
    got = CONFIG.value.to_dict()
    SAY
app.run(main)
""",
        "got",
        "absl",
        "config.lr config.model.dropout",
        "config.seed",
        {"config.lr": 0.5, "config.model.dropout": 0.2},
        {"lr": 0.5, "model": {"dropout": 0.2, "hidden": 64}, "seed": 0},
        files={
            "configs/default.py": "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict("
            "dict(lr=0.1, seed=0, model=dict(dropout=0.1, hidden=64)))\n"
        },
        needs=["absl", "ml_collections"],
        indent=True,
    ),
    Case(
        "fire with commands",
        """
import fire
class Trainer:
    def __init__(self, lr=0.1, seed=0, out_dir='out'):
        self.got = dict(lr=lr, seed=seed)
    def train(self, epochs=3, batch_size=32, amsgrad=False):
        got = dict(self.got, epochs=epochs, batch_size=batch_size, amsgrad=amsgrad)
        SAY
    def evaluate(self): ...
if __name__ == '__main__':
    fire.Fire(Trainer)
""",
        "got",
        "fire",
        "lr batch_size amsgrad",
        "seed",
        {"lr": 0.5, "amsgrad": True},
        {"lr": 0.5, "amsgrad": True, "batch_size": 32, "seed": 0, "epochs": 3},
        needs=["fire"],
        indent=True,
        others="out_dir",
    ),
    Case(
        "tyro",
        """
from dataclasses import dataclass, field
from typing import Literal, Optional
import tyro
@dataclass
class Optim:
    learning_rate: float = 3e-4
    kind: Literal['adam', 'sgd'] = 'adam'
    nesterov: bool = False
@dataclass
class Args:
    optim: Optim = field(default_factory=Optim)
    num_envs: int = 4
    num_steps: int = 128
    num_minibatches: int = 4
    anneal_lr: bool = True
    target_kl: Optional[float] = None
    capture_video: bool = False
    seed: int = 1
args = tyro.cli(Args)
import dataclasses
""",
        "dataclasses.asdict(args)",
        "tyro",
        "optim.learning-rate optim.nesterov anneal-lr num-minibatches",
        "seed",
        {"optim.learning-rate": 0.5, "optim.nesterov": True, "anneal-lr": False},
        {"optim": {"learning_rate": 0.5, "kind": "adam", "nesterov": True}, "anneal_lr": False, "num_envs": 4},
        needs=["tyro"],
        others="capture-video",
    ),
    Case(
        "OmegaConf",
        """
from dataclasses import dataclass, field
from omegaconf import OmegaConf
@dataclass
class Optim:
    lr: float = 0.1
    wd: float = 1e-4
@dataclass
class Config:
    optim: Optim = field(default_factory=Optim)
    batch_size: int = 8
    seed: int = 0
cfg = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_cli())
""",
        "OmegaConf.to_container(cfg)",
        "OmegaConf",
        "optim.lr optim.wd batch_size",
        "seed",
        {"optim.lr": 0.5},
        {"optim": {"lr": 0.5, "wd": 1e-4}, "batch_size": 8, "seed": 0},
        needs=["omegaconf"],
    ),
    Case(
        "Hydra",
        """
from dataclasses import dataclass
from hydra import main
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
@main(version_base=None, config_path='conf', config_name='config')
def run(cfg):
    got = OmegaConf.to_container(cfg, resolve=True)
    SAY
run()
""",
        "got",
        "hydra",
        "optim.lr batch_size",
        "seed",
        {"optim.lr": 0.5},
        {"optim": {"name": "sgd", "lr": 0.5}, "batch_size": 8, "seed": 0, "run_name": "sgd-8"},
        files={
            "conf/config.yaml": "defaults:\n  - optim: sgd\n  - _self_\nbatch_size: 8\nseed: 0\n"
            "run_name: ${optim.name}-${batch_size}\n",
            "conf/optim/sgd.yaml": "name: sgd\nlr: 0.1\n",
            "conf/optim/adam.yaml": "name: adam\nlr: 0.001\n",
        },
        needs=["hydra"],
        indent=True,
    ),
    Case(
        "simple-parsing",
        """
from dataclasses import dataclass
from simple_parsing import ArgumentParser
@dataclass
class Train:
    lr: float = 0.1
    use_bias: bool = True
    hidden: int = 32
    seed: int = 0
p = ArgumentParser()
p.add_arguments(Train, dest='train')
args = p.parse_args()
""",
        "vars(args.train)",
        "simple-parsing",
        "lr use_bias hidden",
        "seed",
        {"lr": 0.5, "use_bias": False},
        {"lr": 0.5, "use_bias": False, "hidden": 32, "seed": 0},
        needs=["simple_parsing"],
    ),
    Case(
        "jsonargparse",
        """
from jsonargparse import auto_cli
def train(lr: float = 0.1, nesterov: bool = False, hidden: int = 32, seed: int = 0):
    got = dict(lr=lr, nesterov=nesterov, hidden=hidden, seed=seed)
    SAY
if __name__ == '__main__':
    auto_cli(train)
""",
        "got",
        "jsonargparse",
        "lr nesterov hidden",
        "seed",
        {"lr": 0.5, "nesterov": True},
        {"lr": 0.5, "nesterov": True, "hidden": 32, "seed": 0},
        needs=["jsonargparse"],
        indent=True,
    ),
    Case(
        "pyrallis",
        """
from dataclasses import dataclass, field
import pyrallis
@dataclass
class Optim:
    lr: float = 0.1
@dataclass
class Config:
    optim: Optim = field(default_factory=Optim)
    nesterov: bool = False
    seed: int = 0
cfg = pyrallis.parse(config_class=Config)
""",
        "{'lr': cfg.optim.lr, 'nesterov': cfg.nesterov, 'seed': cfg.seed}",
        "pyrallis",
        "optim.lr nesterov",
        "seed",
        {"optim.lr": 0.5, "nesterov": True},
        {"lr": 0.5, "nesterov": True, "seed": 0},
        needs=["pyrallis"],
    ),
    Case(
        "typed-argument-parser",
        """
from typing import List
from tap import Tap
class Args(Tap):
    lr: float = 0.1  # learning rate
    hidden: int = 32
    nesterov: bool = False
    layers: List[int] = [1, 2]
    seed: int = 0
args = Args().parse_args()
""",
        "args.as_dict()",
        "argparse",
        "lr hidden nesterov",
        "seed",
        {"lr": 0.5, "nesterov": True},
        {"lr": 0.5, "nesterov": True, "hidden": 32, "seed": 0, "layers": [1, 2]},
        needs=["tap"],
    ),
    Case(
        "argparse with an option of pairs",
        """
import argparse
class Pairs(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        pairs = dict(value.split(':', 1) for value in values)
        setattr(namespace, self.dest, {key: float(value) for key, value in pairs.items()})
parser = argparse.ArgumentParser()
parser.add_argument('--n-steps', type=int, default=5)
parser.add_argument('--seed', type=int, default=-1)
parser.add_argument('-params', '--hyperparams', nargs='+', type=str, action=Pairs)
parser.add_argument('--tag')
args = parser.parse_args()
""",
        "vars(args)",
        "argparse",
        "hyperparams.learning_rate hyperparams.gamma",
        "seed",
        {"hyperparams": {"learning_rate": 0.5, "gamma": 0.9, "levels": 3}, "seed": 7},
        {"hyperparams": {"learning_rate": 0.5, "gamma": 0.9, "levels": 3.0}, "seed": 7, "n_steps": 5, "tag": "a:1"},
        arguments=["-params", "learning_rate:1e-3", "gamma:0.99", "levels:2", "--tag", "a:1"],
    ),
    Case(
        "gin with absl",
        """
import gin
from absl import app, flags
flags.DEFINE_multi_string('gin_file', ['configs/base.gin'], 'files')
flags.DEFINE_multi_string('gin_param', None, 'bindings')
@gin.configurable
def make_optimizer(lr=0.5, beta=0.9, kind='sgd'): return {'lr': lr, 'beta': beta, 'kind': kind}
@gin.configurable
def train(optimizer, steps=10, seed=0, nesterov=True):
    got = {**optimizer(), 'steps': steps, 'seed': seed, 'nesterov': nesterov}
    SAY
def main(_):
    gin.parse_config_files_and_bindings(flags.FLAGS.gin_file, flags.FLAGS.gin_param)
    train()
app.run(main)
""",
        "got",
        "gin",
        "make_optimizer.lr make_optimizer.beta",
        "train.seed",
        {"make_optimizer.lr": 0.003, "train.seed": 7, "train.nesterov": True},
        {"lr": 0.003, "beta": 0.8, "kind": "adam", "steps": 60, "seed": 7, "nesterov": True},
        files={
            "configs/base.gin": "# base\ninclude 'configs/optim.gin'\ntrain.optimizer = @make_optimizer\n"
            "train.steps = 60\ntrain.seed = 1\ntrain.nesterov = False\n",
            "configs/optim.gin": "make_optimizer.lr = 0.05  # step size\nmake_optimizer.beta = 0.8\n"
            "make_optimizer.kind = 'adam'\n",
        },
        needs=["gin", "absl"],
        indent=True,
    ),
    Case(
        "gin with an argument that takes several bindings",
        """
import argparse, gin
@gin.configurable
class Trainer:
    def __init__(self, lr=gin.REQUIRED, epochs=5): self.got = {'lr': lr, 'epochs': epochs}
parser = argparse.ArgumentParser()
parser.add_argument('--config', default='exp.gin')
parser.add_argument('--bind', nargs='*', default=[])
args = parser.parse_args()
gin.parse_config_files_and_bindings([args.config], args.bind)
""",
        "Trainer().got",
        "gin",
        "Trainer.lr",
        None,
        {"Trainer.lr": 0.003},
        {"lr": 0.003, "epochs": 8},
        files={"exp.gin": "Trainer.lr = 0.1\nTrainer.epochs = 8\n"},
        needs=["gin"],
    ),
    Case(
        "pydantic-settings from the environment",
        """
from pydantic import BaseModel, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
class Optim(BaseModel):
    lr: float = Field(0.01, gt=0, lt=1, description='Learning rate')
class Shared(BaseSettings):
    seed: int = 0
class Settings(Shared):
    model_config = SettingsConfigDict(env_prefix='TRAIN_', env_nested_delimiter='__')
    optim: Optim = Optim()
    dropout: float = Field(default=0.1, ge=0, le=0.9)
    hidden: int = Field(64, validation_alias='HIDDEN_UNITS')
    nesterov: bool = False
settings = Settings()
""",
        "settings.model_dump()",
        "pydantic-settings",
        "TRAIN_OPTIM__LR TRAIN_DROPOUT HIDDEN_UNITS TRAIN_NESTEROV",
        "TRAIN_SEED",
        {"TRAIN_OPTIM__LR": 0.003, "HIDDEN_UNITS": 32, "TRAIN_NESTEROV": True, "TRAIN_SEED": 5},
        {"optim": {"lr": 0.003}, "dropout": 0.1, "hidden": 32, "nesterov": True, "seed": 5},
        needs=["pydantic_settings"],
    ),
    Case(
        "pydantic-settings with a command line",
        """
from typing import Literal
from pydantic import BaseModel
from pydantic_settings import BaseSettings, CliApp
class Optim(BaseModel):
    lr: float = 0.02
class Train(BaseSettings):
    optim: Optim = Optim()
    epochs: int = 5
    activation: Literal['relu', 'tanh'] = 'relu'
    augment: bool = True
    seed: int = 0
    def cli_cmd(self) -> None:
        SAY
CliApp.run(Train)
""",
        "self.model_dump()",
        "pydantic-settings",
        "optim.lr activation augment",
        "seed",
        {"optim.lr": 0.003, "activation": "tanh", "augment": False},
        {"optim": {"lr": 0.003}, "epochs": 5, "activation": "tanh", "augment": False, "seed": 0},
        needs=["pydantic_settings"],
        indent=True,
    ),
    Case(
        "an INI file as argument",
        """
import configparser, sys
config = configparser.ConfigParser()
config.read(sys.argv[1] if len(sys.argv) > 1 else 'config.ini')
train = config['train']
""",
        "{'lr': train.getfloat('lr'), 'seed': train.getint('seed'), 'augment': train.getboolean('augment'),"
        " 'tag': train['tag'], 'Path': config['data']['Path']}",
        "config file",
        "train.lr",
        "train.seed",
        {"train.lr": 0.003},
        {"lr": 0.003, "seed": 42, "augment": True, "tag": "demo", "Path": "a%b"},
        files={
            "config.ini": "[DEFAULT]\ntag = demo\n[train]\n# step size\nlr = 0.05\nseed = 42\naugment = yes\n"
            "[data]\nPath = a%%b\n",
            "setup.cfg": "[flake8]\nmax-line-length = 100\n",
        },
    ),
    Case(
        "an INI file with a fixed name",
        """
import configparser
from pathlib import Path
config = configparser.ConfigParser()
config.read(Path(__file__).parent / 'settings.ini')
train = config['train']
""",
        "{'lr': train.getfloat('lr'), 'seed': train.getint('seed')}",
        "fixed config file",
        "train.lr",
        "train.seed",
        {"train.lr": 0.003},
        {"lr": 0.003, "seed": 42},
        files={"settings.ini": "[train]\nlr = 0.05\nseed = 42\n"},
    ),
    Case(
        "a JSON file with a fixed name",
        """
import json
with open('configs/base.json') as file:
    config = json.load(file)
with open('results.json', 'w') as file:
    json.dump({'lr': 1.0}, file)
""",
        "config",
        "fixed config file",
        "optim.lr",
        "seed",
        {"optim.lr": 0.003},
        {"optim": {"lr": 0.003, "name": "adam"}, "seed": 1},
        files={
            "configs/base.json": '{"optim": {"lr": 0.1, "name": "adam"}, "seed": 1}',
            "results.json": '{"lr": 1.0}',
            "pyproject.toml": "[tool.ruff]\nline-length = 100\n",
        },
    ),
    Case(
        "optparse",
        """
from optparse import OptionParser
parser = OptionParser()
parser.add_option('-l', '--lr', dest='lr', type='float', default=0.1, help='step size')
parser.add_option('--hidden', type='int', default=32)
parser.add_option('--seed', type='int', default=0)
parser.add_option('--nesterov', action='store_true', default=False)
options, _ = parser.parse_args()
""",
        "vars(options)",
        "argparse",
        "lr hidden nesterov",
        "seed",
        {"lr": 0.003, "nesterov": True},
        {"lr": 0.003, "hidden": 32, "seed": 0, "nesterov": True},
    ),
    Case(
        "docopt, by the text of --help",
        '''"""Toy trainer.

Usage:
  train.py [--lr=<f>] [-w <n> | --width=<n>] [--seed=<n>] [--out=<dir>]

Options:
  -h --help              Show this.
  --lr=<f>               Learning rate,
                         of the first step [default: 0.1].
  -w <n>, --width=<n>    Units [default: 64].
  --seed=<n>             Seed [default: 0].
  --out=<dir>            Output folder [default: out].
"""
from docopt import docopt
args = docopt(__doc__)
''',
        "{key.strip('-'): value for key, value in args.items()}",
        "--help",
        "lr width",
        "seed",
        {"lr": 0.003, "width": 32},
        {"lr": "0.003", "width": "32", "seed": "0", "out": "out"},
        others="out",
        needs=["docopt"],
    ),
    Case(
        "a union of dataclasses is a command of tyro",
        """
from dataclasses import asdict, dataclass
from typing import Union
import tyro
@dataclass
class Sgd:
    lr: float = 0.1
    momentum: float = 0.9
@dataclass
class AdamW:
    lr: float = 0.003
    beta1: float = 0.9
@dataclass
class Args:
    optimizer: Union[Sgd, AdamW]
    l2: float = 1e-4
    augment: bool = True
    seed: int = 3
args = tyro.cli(Args)
""",
        "{**asdict(args), 'kind': type(args.optimizer).__name__}",
        "tyro",
        "l2 optimizer.lr optimizer.beta1",
        "seed",
        {"l2": 0.01, "optimizer.lr": 0.02, "augment": False, "seed": 8},
        {"kind": "AdamW", "l2": 0.01, "optimizer": {"lr": 0.02, "beta1": 0.9}, "augment": False, "seed": 8},
        arguments=["--l2", "0.002", "optimizer:adam-w"],
        needs=["tyro"],
    ),
    Case(
        "several dataclasses are the commands of a program",
        """
from dataclasses import asdict, dataclass
import tyro
@dataclass
class Evaluate:
    checkpoint: str
@dataclass
class TrainModel:
    lr: float = 0.1
    seed: int = 0
args = tyro.cli(Evaluate | TrainModel)
""",
        "asdict(args)",
        "tyro",
        "lr",
        "seed",
        {"lr": 0.3},
        {"lr": 0.3, "seed": 0},
        needs=["tyro"],
    ),
    Case(
        "options before a command of argparse",
        """
import argparse
p = argparse.ArgumentParser()
p.add_argument('--seed', type=int, default=7)
p.add_argument('--verbose', action='store_true')
s = p.add_subparsers(dest='command', required=True)
e = s.add_parser('export')
e.add_argument('file')
t = s.add_parser('pretrain')
t.add_argument('--eta', type=float, default=0.2)
t.add_argument('--depth', type=int, default=2, choices=range(1, 7))
t.add_argument('--hidden', type=int, default=64)
args = p.parse_args()
""",
        "vars(args)",
        "argparse",
        "eta depth hidden",
        "seed",
        {"eta": 0.5, "seed": 11},
        {"eta": 0.5, "seed": 11, "command": "pretrain", "verbose": True, "hidden": 32},
        arguments=["--seed", "9", "--verbose", "pretrain", "--hidden", "32"],
    ),
    Case(
        "options of a group of click",
        """
import click
@click.group()
@click.option('--seed', default=1, type=int)
@click.pass_context
def cli(ctx, seed):
    ctx.obj = seed
@cli.group()
@click.option('--momentum', default=0.9)
@click.pass_context
def model(ctx, momentum):
    ctx.obj = (ctx.obj, momentum)
@cli.command()
def clean():
    pass
@model.command()
@click.option('-l', '--learning-rate', default=0.05, type=click.FloatRange(1e-3, 0.5))
@click.option('--hidden', default=32)
@click.option('--width', default=64)
@click.pass_obj
def train(obj, learning_rate, hidden, width):
    SAY
cli()
""",
        "{'seed': obj[0], 'momentum': obj[1], 'lr': learning_rate, 'hidden': hidden}",
        "click",
        "momentum learning-rate hidden",
        "seed",
        {"learning-rate": 0.3, "momentum": 0.5, "seed": 4},
        {"seed": 4, "momentum": 0.5, "lr": 0.3, "hidden": 32},
        arguments=["model", "train"],
        needs=["click"],
        indent=True,
    ),
    Case(
        "getopt, with defaults in variables",
        """
import getopt, sys
lr, hidden = 0.1, 64
seed = 2
options, rest = getopt.getopt(sys.argv[1:], 'l:h:s:', ['lr=', 'hidden=', 'seed=', 'out='])
for key, value in options:
    if key in ('-l', '--lr'):
        lr = float(value)
    elif key in ('-h', '--hidden'):
        hidden = int(value)
    elif key in ('-s', '--seed'):
        seed = int(value)
""",
        "{'lr': lr, 'hidden': hidden, 'seed': seed}",
        "getopt",
        "lr hidden",
        "seed",
        {"lr": 0.02, "seed": 5},
        {"lr": 0.02, "hidden": 64, "seed": 5},
    ),
    Case(
        "getopt with a config file that has a template",
        """
import getopt, sys, yaml
file = 'conf/exp.yaml'
for key, value in getopt.getopt(sys.argv[1:], 'c:', ['config='])[0]:
    file = value
config = yaml.safe_load(open(file))
""",
        "config['optimizer']",
        "config file",
        "optimizer.lr optimizer.momentum",
        "optimizer.seed",
        {"optimizer.lr": 0.3},
        {"lr": 0.3, "momentum": 0.9, "seed": 11},
        others="defaults.lr defaults.momentum",
        files={
            "conf/exp.yaml": "defaults: &defaults\n  lr: 0.01\n  momentum: 0.9\noptimizer:\n  <<: *defaults\n  seed: 11\n",
            "conf/other.yaml": "lr: 0.5\n",
        },
    ),
    Case(
        "variables in .env",
        """
import os
from dotenv import load_dotenv
load_dotenv()
LR = float(os.environ['LR'])
SEED = int(os.getenv('SEED', '3'))
DROPOUT = float(os.environ['DROPOUT'])
""",
        "{'lr': LR, 'seed': SEED, 'dropout': DROPOUT}",
        "environment",
        "LR DROPOUT",
        "SEED",
        {"LR": 0.5},
        {"lr": 0.5, "seed": 8, "dropout": 0.25},
        files={".env": "# settings\nexport LR=0.1\nSEED='8'\nDROPOUT = 0.25  # of all layers\n"},
        needs=["dotenv"],
    ),
    Case(
        "gin without an option for bindings",
        """
import gin
@gin.configurable
def train(lr=0.01, hidden=2, seed=0, name='x'):
    return {'lr': lr, 'hidden': hidden, 'seed': seed, 'name': name}
gin.parse_config_file('config.gin')
got = train()
""",
        "got",
        "gin",
        "train.lr train.hidden",
        "train.seed",
        {"train.lr": 0.7},
        {"lr": 0.7, "hidden": 16, "seed": 1, "name": "a b"},
        files={"config.gin": "train.lr = 0.1\ntrain.hidden = 16\ntrain.seed = 1\ntrain.name = 'a b'\n"},
        needs=["gin"],
    ),
    Case(
        "short flags are called as the script calls them",
        """
import argparse
p = argparse.ArgumentParser()
p.add_argument('-l', dest='lr', type=float, default=0.1)
p.add_argument('-s', dest='seed', type=int, default=0)
args = p.parse_args()
""",
        "vars(args)",
        "argparse",
        "lr",
        "seed",
        {"lr": 0.2, "seed": 6},
        {"lr": 0.2, "seed": 6},
    ),
    Case(
        "required options are knobs by what was typed",
        """
import argparse
p = argparse.ArgumentParser()
p.add_argument('--lr', type=float, required=True)
p.add_argument('--data', required=True)
p.add_argument('--seed', type=int, required=True)
args = p.parse_args()
""",
        "vars(args)",
        "argparse",
        "lr",
        "seed",
        {"lr": 0.2},
        {"lr": 0.2, "seed": 6, "data": "d.csv"},
        others="data",
        arguments=["--lr", "0.1", "--data", "d.csv", "--seed", "6"],
    ),
    Case(
        "classes of settings, of which one is used",
        "from config import settings\n",
        "{'lr': settings.LR, 'width': settings.WIDTH, 'seed': settings.SEED}",
        "constants",
        "config.Base.LR config.Small.WIDTH",
        "config.Base.SEED",
        {"config.Base.LR": 0.5, "config.Small.WIDTH": 32},
        {"lr": 0.5, "width": 32, "seed": 42},
        others="config.Big.LR config.Big.WIDTH",
        files={
            "config.py": "class Base:\n    LR = 0.01\n    SEED = 42\nclass Small(Base):\n    WIDTH = 16\n"
            "class Big(Base):\n    LR = 0.003\n    WIDTH = 64\nsettings = Small()\n"
        },
    ),
    Case(
        "the seed of a class of the script",
        """
LR = 0.05
class Agent:
    def __init__(self, size, seed):
        self.seed = seed
agent = Agent(8, seed=3)
""",
        "{'lr': LR, 'seed': agent.seed}",
        "constants",
        "LR",
        "Agent.seed",
        {"LR": 0.5, "Agent.seed": 7},
        {"lr": 0.5, "seed": 7},
    ),
    Case(
        "a notebook that was exported, with its magics",
        """
get_ipython().run_line_magic('matplotlib', 'inline')
lr = 0.05
hidden = 32
seed = 3
get_ipython().system('nvidia-smi')
""",
        "{'lr': lr, 'hidden': hidden, 'seed': seed}",
        "constants",
        "lr hidden",
        "seed",
        {"lr": 0.5},
        {"lr": 0.5, "hidden": 32, "seed": 3},
    ),
]  # fmt: skip


def write(case: Case, folder: Path) -> Script:
    says = SAY.format(case.says)
    if case.indent:
        line = next(line for line in case.script.splitlines() if line.strip() == "SAY")
        pad = line[: len(line) - len(line.lstrip())]
        text = case.script.replace(line, "\n".join(pad + part for part in says.split("\n") if part))
    else:
        text = case.script + says
    (folder / "train.py").write_text(text)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    words = [PYTHON if word == "python" else word for word in case.command]
    return find_script([*words, *case.arguments], folder)


def launch(folder: Path, lab: NewLab, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Start the trainer with a changed config as a run would, and return what it prints."""
    paths = [str(folder / "later"), os.environ.get("PYTHONPATH", "")]
    printed = run_trainer(folder, lab, changes, {"PYTHONPATH": os.pathsep.join(filter(None, paths))})
    return json.loads(next(line for line in printed.splitlines() if line.startswith("GOT"))[4:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_lab_sets_reaches_the_script(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in case.needs:
        if not has(package):
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}")
    script = write(case, tmp_path)
    before = set(tmp_path.rglob("*"))
    interface = read_interface(script)
    assert set(tmp_path.rglob("*")) == before
    assert interface is not None, script.introspection
    assert interface.reader == case.reader
    lab = make_lab(script, interface)
    assert lab.seed == case.seed
    knobs = set(lab.knobs)
    assert set(case.knobs.split()) <= knobs | {name for name in case.knobs.split() if f"  # {name}:" in str(lab.files)}
    assert not knobs & set(case.others.split())
    got = launch(tmp_path, lab, case.change)
    assert {key: got.get(key) for key in case.got} == dict(case.got)
