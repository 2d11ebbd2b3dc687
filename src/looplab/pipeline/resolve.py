"""Ask the lab's own program to check a config and to fill in its defaults, before anything is touched."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json, read_document
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
            text = _name_source(redact_text(done.stderr.decode(errors="replace")), path, lab / source, source)
            said = text.strip().splitlines()
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


def _name_source(text: str, checked: Path, file: Path, source: str) -> str:
    """Replace the checked file with the one that people edit, and its lines with those of the same keys there.

    A line is left out if that file has no such key, as with an edit, or does not tell its lines, as JSON and TOML.
    """
    if str(checked) not in text:
        return text
    lines: dict[int, int | None] = {}
    with contextlib.suppress(LabError, OSError):
        original = read_document(file)
        copy = checked.with_suffix(".yaml")  # JSON is YAML, whose reader knows lines
        copy.write_bytes(checked.read_bytes())
        known = read_document(copy)
        for path in _key_paths(known.plain()):
            line = known.line_of(path)
            if line is not None:
                lines[line] = original.line_of(path)

    def name(match: re.Match[str]) -> str:
        line = lines.get(int(match[1])) if match[1] else None
        return source if line is None else f"{source}:{line}"

    return re.sub(rf"{re.escape(str(checked))}(?::(\d+))?", name, text)


def _key_paths(data: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all keys and list items, outer ones first."""
    pairs: Iterable[tuple[str | int, Any]] = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in pairs:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _key_paths(value, (*above, key))
