"""check --fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from looplab.cli import output
from looplab.cli.labs import open_lab
from looplab.config.lab import LabConfig, StudyConfig
from looplab.errors import LabError
from looplab.onboard.mend import find_mending
from looplab.onboard.mend_files import Mending


def fix(folder: Path | None, name: str | None, *, dry_run: bool, json: bool) -> dict[str, Any]:
    """Fix a lab and show the changes; return the findings.

    Raises:
        LabError: The lab does not pass its checks afterwards; its files are unchanged.
    """
    lab = open_lab(folder)
    studies = [lab.study(name)] if name else list(lab.studies.values())
    mending = find_mending(lab, studies, ask=True)
    if not json:
        _show(mending)
    if mending.fixes and not dry_run:
        mending.apply(lab.folder)
    written = sorted({one.file for one in mending.fixes}) if not dry_run else []
    found = {**as_dict(mending), "written": written}
    if dry_run and json:
        output.print_json({"lab": str(lab.folder), **found})
    elif dry_run:
        output.say("nothing was written")
    elif not json:
        output.say(
            f"written: {', '.join(written)}"
            if written
            else "nothing was changed"
            if mending.doubts
            else "nothing to fix"
        )
    return found


def preview(lab: LabConfig, studies: list[StudyConfig]) -> Mending:
    """Return what `--fix` would change, as far as that is known without starting a script."""
    try:
        return find_mending(lab, studies, ask=False)
    except (LabError, OSError):  # `check` itself reports it
        return Mending((), (), {})


def say_preview(mending: Mending) -> None:
    for one in mending.fixes:
        output.say(f"`looplab check --fix` would change {one.file}: {one.why}")
    for doubt in mending.doubts:
        output.say(f"note: {doubt}")


def as_dict(mending: Mending) -> dict[str, Any]:
    return {"fixes": [one.as_dict() for one in mending.fixes], "doubts": list(mending.doubts)}


def _show(mending: Mending) -> None:
    for one in mending.fixes:
        output.say(f"{one.file}: {one.why}")
        for line in one.diff:
            output.say(f"  {line}")
    for doubt in mending.doubts:
        output.say(f"not changed: {doubt}")
