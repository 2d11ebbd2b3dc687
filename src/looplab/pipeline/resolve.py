"""Ask the lab's own program to check a config and to fill in its defaults, before anything is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json
from looplab.config.lab import StudyConfig
from looplab.errors import LabError
from looplab.launch.command import find_program, replace_variables
from looplab.runs.redact import redact_text
from looplab.untrusted import UntrustedError, load_json

TIMEOUT_S = 300.0
"""Seconds that the program may take."""
LARGEST = 64 << 20
"""Bytes that it may print."""
SHOWN_LINES = 5


def resolve_config(
    lab: Path, study: StudyConfig, config: Mapping[str, Any], source: str, edits: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the config as `pipeline.resolve` prints it, with all defaults; unchanged if there is no such program.

    Args:
        lab: Folder of the lab.
        study: The study with the pipeline.
        config: The config, after edits.
        source: File that it was read from, for messages.
        edits: The edits, for messages.

    Raises:
        LabError: The program rejects the config, or cannot be run.
    """
    template = study.pipeline.resolve
    if template is None:
        return dict(config)
    with tempfile.TemporaryDirectory(prefix="looplab-") as folder:
        path = Path(folder, "config.json")
        path.write_bytes(dump_json(config))
        variables = {"python": sys.executable, "config": str(path), "lab": str(lab), "study": study.name}
        argv = [replace_variables(word, variables.get) for word in template]
        argv[0] = find_program(argv[0], lab, study.pipeline.env)
        try:
            done = subprocess.run(
                argv, cwd=lab, env={**os.environ, **study.pipeline.env}, capture_output=True, timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LabError(f"pipeline.resolve did not end within {TIMEOUT_S:g} s", file="lab.yaml") from None
        if done.returncode != 0:
            said = redact_text(done.stderr.decode(errors="replace")).replace(str(path), source).strip().splitlines()
            what = " / ".join(said[-SHOWN_LINES:]).removeprefix("error: ") or f"exit code {done.returncode}"
            with_edits = f" (with {', '.join(edits)})" if edits else ""
            raise LabError(f"{source}{with_edits} was rejected: {what}", hint="nothing was run or changed")
        try:
            resolved = load_json(done.stdout[:LARGEST])
        except (ValueError, UntrustedError):
            resolved = None
    if not isinstance(resolved, dict):
        raise LabError("pipeline.resolve did not print the config as JSON", file="lab.yaml")
    return resolved
