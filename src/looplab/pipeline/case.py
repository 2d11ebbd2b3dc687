"""Cases: a few examples looked at closely, by the lab's own `case.command`, in the folder of a run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab import signals
from looplab.config.files import dump_json, write_atomic
from looplab.errors import LabError
from looplab.launch.base import Slot
from looplab.pipeline.folder import RunFolder
from looplab.pipeline.plan import VARIABLE, PipelinePlan, check_artifacts, fill, fill_argv, find_stage_program

OPTIONS = ("example_ids", "max_new_tokens", "methods", "tag")


def case_argv(plan: PipelinePlan, run: RunFolder, config: Path, said: Mapping[str, Any]) -> list[str]:
    """The command, with what was said on the command line, else by the lab file."""
    case = plan.study.case
    assert case is not None
    given = {name: str(value) for name, value in {**case.defaults, **said}.items() if value is not None}
    for part in case.command:
        for match in VARIABLE.finditer(part):
            if match[1] in OPTIONS and match[1] not in given:
                raise LabError(
                    f"case.command needs {{{match[1]}}}",
                    hint=f"give --{match[1].replace('_', '-')}, or case.defaults.{match[1]} in lab.yaml",
                )
    return fill_argv(case.command, plan, run, Slot("here"), {"config": str(config), **given}, "case")


def run_case(
    plan: PipelinePlan, run: RunFolder, said: Mapping[str, Any], *, quiet: bool = False
) -> tuple[int, list[Path]]:
    """Run it in the foreground; gives its exit code and the files that it wrote."""
    case = plan.study.case
    assert case is not None
    if plan.artifacts is not None:
        check_artifacts(plan, plan.artifacts, case.after)
    for stage in case.after if plan.artifacts is None else ():
        why = plan.why_not_fresh(stage, run)
        if why is not None:
            raise LabError(f"a case needs {stage} of run {run.name}: {why}", hint=f"run {stage} first")
    tag = str(said.get("tag") or case.defaults.get("tag") or "case")
    config = run.path / "cases" / f".{tag.replace('/', '_')}.config.json"
    argv = case_argv(plan, run, config, said)
    variables = {"run_dir": str(run.path), "run_id": run.name, "lab": str(plan.lab)}
    env = {
        **os.environ,
        "LOOPLAB_CONFIG": str(config),
        **{name: fill(text, plan.config, variables, f"case.env.{name}") or ""
           for name, text in {**plan.study.pipeline.env, **case.env}.items()},
    }  # fmt: skip
    program = find_stage_program(argv[0], plan.lab, env, "case.command")
    config.parent.mkdir(parents=True, exist_ok=True)
    run.describe(plan.study.name, plan.source, plan.edits)
    write_atomic(config, dump_json(plan.config))
    before = _written(run.path, case.outputs)
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        if process is None:
            raise KeyboardInterrupt
        if number != signal.SIGINT:  # a Ctrl-C reaches the whole process group, and so the case as well
            process.send_signal(number)

    with signals.handled(pass_on):
        process = subprocess.Popen(
            argv, executable=program, cwd=plan.lab, env=env, stdin=subprocess.DEVNULL, stdout=2 if quiet else None
        )
        code = process.wait()
    after = _written(run.path, case.outputs)
    return code, sorted(path for path, mark in after.items() if before.get(path) != mark)


def _written(folder: Path, patterns: list[str]) -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path: (status.st_mtime_ns, status.st_size) for path, status in found.items()}
