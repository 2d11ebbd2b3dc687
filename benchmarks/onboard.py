"""Other people's trainers, unedited: `looplab init COMMAND --objective M`, then `looplab run`.

    python benchmarks/onboard.py [--quick] [--python PYTHON]

For each trainer of the shelf (tests/onboard/shelf) whose packages are installed: whether its first run measures the
objective without a line of YAML written by hand, how many commands were typed, and how long it took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHELF = Path(__file__).parents[1] / "tests/onboard/shelf"
QUICK = ("argparse_options", "click_cli", "env_vars", "json_config", "shell_wrapper", "toml_config", "writes_source")
"""Trainers that need neither torch nor a download, for a short run."""


def arguments(about: dict, words: list[str]) -> list[str]:
    """The command as its user would type it for a short training."""
    return [*words, *about.get("quick_run", {}).get("args", [])]


def onboard(folder: Path, about: dict, looplab: list[str], python: str) -> dict:
    """Type the two commands, and return what came of it."""
    env = {**os.environ, **about.get("quick_run", {}).get("env", {}), "WANDB_MODE": "offline"}
    env["PATH"] = f"{Path(python).parent}{os.pathsep}{env['PATH']}"
    goal = "--max" if about["goal"] == "max" else "--min"
    words = arguments(about, about["command"])
    began = time.perf_counter()
    commands = [[*looplab, "init", *words, "--objective", about["objective"], goal], [*looplab, "run", "--runs", "1"]]
    for number, command in enumerate(commands, 1):
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0:
            told = (done.stderr or done.stdout).strip().splitlines()
            return {"ok": False, "commands": number, "why": told[-1] if told else f"exit code {done.returncode}"}
    seconds = time.perf_counter() - began
    status = subprocess.run([*looplab, "status", "--json"], cwd=folder, env=env, capture_output=True, text=True)
    studies = json.loads(status.stdout)["studies"]
    measured = studies[0]["best"] and studies[0]["best"]["objective"] is not None
    return {"ok": bool(measured), "commands": 2, "seconds": seconds, "why": "" if measured else "not measured"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the trainers' packages")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    looplab = [sys.executable, "-m", "looplab"]
    results = {}
    for folder in sorted(path for path in SHELF.iterdir() if path.is_dir()):
        about = json.loads((folder / "about.json").read_text())
        if (options.names and folder.name not in options.names) or (options.quick and folder.name not in QUICK):
            continue
        if about["exit_code"] != 0 or about["objective"] is None:
            continue  # meant to fail, or nothing to measure
        missing = [name for name in about["requires"] if not _imports(options.python, name)]
        if missing:
            print(f"{folder.name:24} skipped: no {', '.join(missing)}", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="looplab-onboard-") as scratch:
            copy = Path(scratch, folder.name)
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("about.json"))
            result = results[folder.name] = onboard(copy, about, looplab, options.python)
        print(
            f"{folder.name:24} {'ok' if result['ok'] else 'no':3} {result.get('seconds', 0):6.1f} s  {result['why']}",
            flush=True,
        )
    good = [result for result in results.values() if result["ok"]]
    figures = {
        "shelf": len(results),
        "unedited_share": round(len(good) / max(1, len(results)), 3),
        "commands_median": statistics.median([result["commands"] for result in good] or [0]),
        "yaml_lines_median": 0,
        "seconds_to_first_run_median": round(statistics.median([result["seconds"] for result in good] or [0]), 1),
    }
    print(json.dumps(figures))


def _imports(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
