"""The prompt for the next version: looplab's own template, or the lab's, with the same variables in braces."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from looplab.errors import LabError
from looplab.iterate.gates import GateFinding
from looplab.iterate.settings import IterateConfig
from looplab.untrusted import read_bounded

MAX_TEMPLATE = 10_000_000
"""Largest template in bytes."""

ARTIFACTS = ("checkpoints", "logs", "tb_logs", "plots", "media")
TEMPLATE = """\
You write version v{X} of this project. Your folder is {version}/; work in this worktree and nowhere else.

Read first: {sop}{previous}.

Do, in this order:
1. Write {version}/{document} as you go, with these sections, none of them empty: {sections}.
   Plan: what you change and which effect you expect. Observations: what you saw in the previous version.
   Runs: every command with its settings. Results: what they measured. Learning: what the next version should know.
2. Write {version}/train.py{from_previous}. It writes only to {version}/artifacts/ (checkpoints, logs,
   tb_logs, plots, media): curves in plots/, a picture or video in media/.
3. Train.{instructions}{submit}{venv}

Programs, not your own report, check the following when you are done:
{checks}

Rules:
- Change only {version}/. Older versions, {frozen} are read-only; their hashes are compared, and a version that changed
  any of them is void.
- Do not commit, push, switch branches or reset: what you leave in the worktree is committed for you.
- Only numbers measured by the frozen evaluation count; note in {document} where yours are from.
- End with a summary of `git status --short`, and the words "v{X} done".
"""
SUBMIT = """
   Train through the lab: `{looplab} submit -- {python} {version}/train.py ...` waits for a free slot, shows the output,
   and continues if you are interrupted; the same command attaches to it. Do not train in the background. The version is
   checked when everything that you submitted has ended."""
VENV = """
   Python is in `venv/` at the root: `uv venv venv` if it is missing, then `source venv/bin/activate`; install with
   `uv pip install`."""
INTERRUPTED = "You were interrupted. What you had done is still in the worktree; look at it and continue from there."


def make(
    settings: IterateConfig, number: int, previous: int | None, lab: Path, submit: bool, python: str | Path = "python"
) -> str:
    """Return the prompt for a version.

    Args:
        settings: The lab's `iterate.yaml`.
        number: Version to write.
        previous: Version before it; None if there is none.
        lab: Folder of the lab.
        submit: Whether the agent trains through `looplab submit`.
        python: Interpreter of the versions; the agent's shell may have another PATH.
    """
    version = f"{settings.experiments}/v{number}"
    document = f"dev_v{number}.md"
    before = "" if previous is None else f" and {settings.experiments}/v{previous}/dev_v{previous}.md"
    source = "" if previous is None else f" (start from a copy of {settings.experiments}/v{previous}/train.py)"
    text = TEMPLATE
    if settings.prompt:
        try:
            text = read_bounded(lab / settings.prompt, MAX_TEMPLATE).decode()
        except (OSError, ValueError) as error:
            raise LabError(f"the prompt template cannot be read: {error}", file=lab / settings.prompt) from None
    variables = {
        "submit": SUBMIT if submit else "",
        "looplab": _command(),
        "python": str(python),
        "venv": VENV if settings.venv else "",
        "checks": "\n".join(f"- {line}" for line in _checks(settings, document)),
        "sections": _names(settings),
        "frozen": ", ".join(settings.frozen) or "frozen files",
        "sop": settings.sop,
        "previous": before,
        "from_previous": source,
        "instructions": "".join(f" {sentence}" for sentence in settings.instructions),
        "document": document,
        "version": version,
        "X": str(number),
    }
    for name, value in variables.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _command() -> str:
    """Return the path of looplab: the agent's shell may have another PATH."""
    own = Path(sys.executable).with_name("looplab")
    return str(own) if own.exists() else "looplab"


def _names(settings: IterateConfig) -> str:
    return ", ".join(headings[0] for headings in settings.sections)


def _checks(settings: IterateConfig, document: str) -> list[str]:
    """Describe the gates for the agent."""
    checks = [f"{document} has the sections {_names(settings)}"]
    if settings.smoke:
        checks.append(f"`{' '.join(settings.smoke.command)}` succeeds within {settings.smoke.timeout:g} s")
    checks += [f"a non-empty file matches {{version}}/{pattern}" for pattern in settings.artifacts]
    checks += [f"{{version}}/{pattern} was written by a training that you submitted" for pattern in settings.trained]
    checks += [f"{gate.key} in {{version}}/{gate.file} is within its bounds" for gate in settings.values]
    checks.append("nothing outside {version}/ was changed")
    if settings.schedule:
        checks.append(
            f"every value declared in {{version}}/{settings.schedule.declared} is reached in {settings.schedule.trace}"
            " there, and every gate fires"
        )
    checks.append(f"the frozen evaluation of {{version}} returns {settings.evaluate.metric} ({settings.evaluate.goal})")
    return checks


def make_retry(findings: Sequence[GateFinding], number: int) -> str:
    """Return the prompt that asks the agent to fix a version that did not pass."""
    problems = "\n".join(f"- {finding.what}: {finding.why}" for finding in findings if finding.stops)
    return f"v{number} did not pass its checks:\n{problems}\nFix this in the same worktree; the rules stay the same."
