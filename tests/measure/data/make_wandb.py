"""Write a small offline W&B run with whatever wandb is installed; the README beside this says how it was called."""

import os
import sys
from pathlib import Path

folder, version = Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True, exist_ok=True)
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_DIR": str(folder),
    "WANDB_CONFIG_DIR": str(folder / "config"),
    "WANDB_CACHE_DIR": str(folder / "cache"),
    "WANDB_DATA_DIR": str(folder / "data"),
    "WANDB_HOST": "host",
    "WANDB_USERNAME": "user",
    "WANDB_PROGRAM": "train.py",
    "WANDB_START_METHOD": "thread",
}
sys.argv = ["train.py"]

import wandb  # noqa: E402

if wandb.__version__ != version:
    sys.exit(f"this is wandb {wandb.__version__}, not {version}")

new = not version.startswith("0.16.")
quiet = {("x_" if new else "_") + name: True for name in ("disable_meta", "disable_stats")}
settings = wandb.Settings(console="off", disable_git=True, disable_code=True, **quiet)
run = wandb.init(
    project="fixture",
    name="a small run",
    id="fixture1",
    group="old clients",
    tags=["one", "two"],
    config={"lr": 0.001, "net": {"width": 64}},
    settings=settings,
)
for step in range(40):
    row = {
        "loss": 1 / (step + 1),
        "acc": step / 40,
        "count": step,
        "good": step % 2 == 0,
        "nested": {"inner": {"x": step * 0.5}},
    }
    row["word"] = "not a number"
    if step == 3:
        row |= {"odd": float("nan"), "endless": float("inf"), "long": "x" * 300}
    if step % 10 == 9:
        row["eval/loss"] = 2 / (step + 1)
    wandb.log(row, step=step * 5)
run.config["late"] = 5
run.summary["note"] = 3
run.finish()
