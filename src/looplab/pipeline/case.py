"""Cases: run the lab's `case.command` on a few examples, in the folder of a run."""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sqlite3
import subprocess
from collections.abc import Mapping
from pathlib import Path

from looplab import signals
from looplab.config.files import dump_json, hash_config, write_atomic
from looplab.config.paths import find
from looplab.errors import LabError
from looplab.launch.base import Slot
from looplab.launch.command import VARIABLE
from looplab.ledger.pipelines import PipelineLedger
from looplab.pipeline.folder import RunFolder
from looplab.pipeline.plan import (
    COMMAND_VARIABLES,
    PipelinePlan,
    check_artifacts,
    fill_argv,
    fill_template,
    find_stage_program,
)
from looplab.runs import clock
from looplab.runs.redact import redact_data

TAG = "tag"
"""Option that names the files of a case."""


def case_argv(plan: PipelinePlan, run: RunFolder, config: Path, options: Mapping[str, str]) -> list[str]:
    """Return the command; values on the command line take precedence over `case.defaults`.

    Raises:
        LabError: An option is not a {name} of the command, or a {name} has no value.
    """
    case = plan.study.case
    assert case is not None
    values = {**{name: str(value) for name, value in case.defaults.items()}, **options}
    named = [match[1] for part in case.command for match in VARIABLE.finditer(part) if match[1]]
    known = [name for name in dict.fromkeys([*named, TAG]) if name not in COMMAND_VARIABLES]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {_flag(near[0])}?" if near else f"it has {', '.join(map(_flag, known))}"
            raise LabError(f"the case has no option {_flag(name)}", hint=hint)
    for name in named:
        if name in known and name not in values and not find(plan.config, name):
            raise LabError(
                f"case.command needs {{{name}}}",
                hint=f"pass {_flag(name)}, or set case.defaults.{name} in lab.yaml",
            )
    return fill_argv(case.command, plan, run, Slot("here"), {"config": str(config), **values}, "case")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run_case(
    plan: PipelinePlan, run: RunFolder, options: Mapping[str, str], *, quiet: bool = False,
    record: PipelineLedger | None = None,
) -> tuple[int, list[Path]]:  # fmt: skip
    """Run the case in the foreground and record it; return its exit code and the files that it wrote."""
    case = plan.study.case
    assert case is not None
    if plan.artifacts is not None:
        check_artifacts(plan, plan.artifacts, case.after)
    for stage in case.after if plan.artifacts is None else ():
        why = plan.why_not_fresh(stage, run)
        if why is not None:
            raise LabError(f"the case needs {stage} of run {run.name}: {why}", hint=f"run {stage} first")
    tag = str(options.get(TAG) or case.defaults.get(TAG) or "case")
    config = run.path / "cases" / f".{tag.replace('/', '_')}.config.json"
    argv = case_argv(plan, run, config, options)
    variables = {"run_dir": str(run.path), "run_id": run.name, "lab": str(plan.lab)}
    env = {
        **os.environ,
        "LOOPLAB_CONFIG": str(config),
        **{name: fill_template(text, plan.config, variables, f"case.env.{name}") or ""
           for name, text in {**plan.study.pipeline.env, **case.env}.items()},
    }  # fmt: skip
    program = find_stage_program(argv[0], plan.lab, env, "case.command")
    config.parent.mkdir(parents=True, exist_ok=True)
    run.describe(plan.study.name, plan.source, plan.edits)
    write_atomic(config, dump_json(plan.config))
    before = _file_stamps(run.path, case.outputs)
    began = clock.now()
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: object) -> None:
        if process is None:
            raise KeyboardInterrupt
        if number != signal.SIGINT:  # Ctrl-C reaches the whole process group, and so the case too
            process.send_signal(number)

    with signals.handled(forward):
        process = subprocess.Popen(
            argv, executable=program, cwd=plan.lab, env=env, stdin=subprocess.DEVNULL, stdout=2 if quiet else None
        )
        code = process.wait()
    after = _file_stamps(run.path, case.outputs)
    files = sorted(path for path, stamp in after.items() if before.get(path) != stamp)
    if record is not None:
        with contextlib.suppress(LabError, OSError, sqlite3.Error):  # as for a stage: the ledger is optional
            config_hash = hash_config(redact_data(plan.config))
            record.case(run.path, tag, config_hash, exit_code=code, files=files, began=began, ended=clock.now())
    return code, files


def _file_stamps(folder: Path, patterns: list[str]) -> dict[Path, tuple[int, int]]:
    """Modification time and size of each file that matches one of the patterns."""
    found = {path: path.stat() for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {path: (status.st_mtime_ns, status.st_size) for path, status in found.items()}
