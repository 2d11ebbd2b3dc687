"""The command line of PufferLib 3.0.0's `puffer train puffer_drone`, as strict as its own: what it reads, as JSON.

Written from its documented options. Options of a section take the type of their default value. For a boolean that is
`bool`, so that any text but the empty one is true; `auto` is a word or a number; defaults that are no Python literal
(`anneal_lr = true` of the drone environment) are texts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

TRAIN: dict[str, Any] = {
    "name": "pufferai", "project": "ablations", "seed": 42, "torch_deterministic": True, "cpu_offload": False,
    "device": "cuda", "optimizer": "muon", "anneal_lr": "true", "precision": "float32", "total_timesteps": 100_000_000,
    "learning_rate": 0.0109, "gamma": 0.997, "gae_lambda": 0.964, "update_epochs": 1, "clip_coef": 0.0598,
    "vf_coef": 2.13, "vf_clip_coef": 0.587, "max_grad_norm": 1.63, "ent_coef": 0.00247, "adam_beta1": 0.961,
    "adam_beta2": 0.9999, "adam_eps": 7.8e-10, "data_dir": "experiments", "checkpoint_interval": 200,
    "batch_size": "auto", "minibatch_size": 32768, "max_minibatch_size": 32768, "bptt_horizon": 64, "compile": False,
    "compile_mode": "max-autotune-no-cudagraphs", "compile_fullgraph": True, "vtrace_rho_clip": 3.8,
    "vtrace_c_clip": 2.7, "prio_alpha": 0.897, "prio_beta0": 0.867,
}  # fmt: skip
VEC: dict[str, Any] = {"backend": "Multiprocessing", "num_envs": 8, "num_workers": "auto", "batch_size": "auto",
                       "zero_copy": True, "seed": 42}  # fmt: skip
SECTIONS = {"vec": VEC, "env": {"num_envs": 1024}, "train": TRAIN}


def number_or_auto(text: str) -> Any:
    return text if text == "auto" else int(text) if text.isnumeric() else float(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="puffer", allow_abbrev=True)
    for name, default in (("load-model-path", None), ("load-id", None), ("wandb-project", "pufferlib"),
                          ("wandb-group", "debug"), ("neptune-name", "pufferai"), ("neptune-project", "ablations"),
                          ("tag", None)):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--wandb", action="store_true")
    parser.add_argument("--neptune", action="store_true")
    for section, options in SECTIONS.items():
        for key, default in options.items():
            kind: Any = number_or_auto if default == "auto" else type(default)
            parser.add_argument(f"--{section}.{key}".replace("_", "-"), default=default, type=kind)
    return parser


def main(argv: list[str]) -> None:
    if len(argv) < 2 or argv[0] != "train":
        sys.exit("usage: puffer train ENVIRONMENT [options]")
    if argv[1] != "puffer_drone":
        sys.exit(f"No config for env_name {argv[1]}")
    print(json.dumps({"env_name": argv[1], "cwd": os.getcwd(), **vars(make_parser().parse_args(argv[2:]))}))
    print("environment/score: 1.0")


if __name__ == "__main__":
    main(sys.argv[1:])
