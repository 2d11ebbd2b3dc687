"""The command line and the config of LeRobot's trainer with a transport loss, as strict as its parser (draccus): unknown
keys and options and values of a wrong type end it, a float is no int, and `--config_path=` must have its equals sign.

Written from its documented keys. It trains nothing: it prints what it would hand to `wandb.init`, and one metric.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TEXT, WHOLE, NUMBER, SWITCH, MAYBE_TEXT, MAYBE_WHOLE = "text", "int", "float", "bool", "text?", "int?"
FEATURE = {"name": TEXT, "term": TEXT, "use_learned_embed": SWITCH, "weight_embed": NUMBER, "weight_label": NUMBER}
KEYS: dict[str, Any] = {
    "dataset": {"repo_id": TEXT, "root": MAYBE_TEXT},
    "policy": {"type": TEXT, "device": MAYBE_TEXT, "chunk_size": WHOLE, "optimizer_lr": NUMBER,
               "optimizer_weight_decay": NUMBER},
    "output_dir": MAYBE_TEXT, "job_name": MAYBE_TEXT, "resume": SWITCH, "seed": MAYBE_WHOLE, "num_workers": WHOLE,
    "batch_size": WHOLE, "steps": WHOLE, "eval_freq": WHOLE, "log_freq": WHOLE, "save_freq": WHOLE,
    "optimizer": {"type": TEXT, "lr": NUMBER, "weight_decay": NUMBER},
    "wandb": {"enable": SWITCH, "disable_artifact": SWITCH, "project": TEXT, "entity": MAYBE_TEXT, "notes": MAYBE_TEXT,
              "run_id": MAYBE_TEXT, "mode": MAYBE_TEXT},
    "ot": {"lambda_ot": NUMBER, "window_size": WHOLE,
           "loss_config": {"reg": NUMBER, "tau_src": NUMBER, "tau_tgt": NUMBER, "features": [FEATURE]}},
}  # fmt: skip


def decode(value: Any, kind: Any, at: str) -> Any:
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            sys.exit(f"`{at}`: Expected a dict")
        unknown = sorted(set(value) - set(kind))
        if unknown:
            sys.exit(f"The fields `{', '.join(unknown)}` are not valid for {at or 'TrainPipelineConfig'}")
        return {key: decode(item, kind[key], f"{at}.{key}".strip(".")) for key, item in value.items()}
    if isinstance(kind, list):
        return [decode(item, kind[0], f"{at}.{i}") for i, item in enumerate(value)]
    if value is None and kind.endswith("?"):
        return None
    plain = kind.rstrip("?")
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        "int": whole,
        "float": whole or isinstance(value, float),
        "bool": isinstance(value, bool),
        "text": isinstance(value, str),
    }[plain]
    if not fits:
        sys.exit(f"`{at}`: Couldn't parse '{value}' into a {plain}")
    return float(value) if plain == "float" else value


def read_option(text: str, kind: str) -> Any:
    """The value of an option as YAML would have it; texts stay texts."""
    if kind.rstrip("?") == "text":
        return None if text == "null" and kind.endswith("?") else text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main(argv: list[str]) -> None:
    config: dict[str, Any] = {}
    for word in argv:
        if word.startswith("--config_path="):
            with open(word.partition("=")[2]) as file:
                config = decode(json.load(file), KEYS, "")
    for word in argv:
        name, sign, text = word.partition("=")
        if name == "--config_path" and sign:
            continue
        *above, last = name.removeprefix("--").split(".")
        kinds, node = KEYS, config
        for part in above:
            kinds, node = kinds.get(part, {}), node.setdefault(part, {})
        if not word.startswith("--") or not sign or not isinstance(kinds.get(last), str):
            sys.exit(f"error: unrecognized arguments: {word}")
        node[last] = decode(read_option(text, kinds[last]), kinds[last], name[2:])
    if "repo_id" not in config.get("dataset", {}):
        sys.exit("`dataset.repo_id`: is required")
    if os.path.exists(config["output_dir"]):
        sys.exit(f"Output directory {config['output_dir']} already exists and resume is False.")
    wandb = config.get("wandb", {})
    told = None
    if wandb.get("enable") and wandb.get("project", "lerobot"):
        mode = wandb.get("mode")
        known = mode if mode in ("online", "offline", "disabled") else "online"
        told = {"mode": known, "entity": wandb.get("entity"), "project": wandb.get("project", "lerobot"),
                "artifacts": not wandb.get("disable_artifact", False)}  # fmt: skip
    print(json.dumps({"init": told, "device": config.get("policy", {}).get("device"), "config": config}))
    print("eval/offline_eval/avg_l1: 0.25")


if __name__ == "__main__":
    main(sys.argv[1:])
