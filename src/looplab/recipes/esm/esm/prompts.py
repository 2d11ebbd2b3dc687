"""Prompt templates.

Each asks for steps separated by blank lines, because segments end there, and for a fixed form of the final answer,
which grading.py looks for first.
"""

from __future__ import annotations

import difflib
import re

from looplab.errors import LabError

from .example import LETTERS, Example, Kind

_STEPS = "Think step by step, with a blank line between the steps."
_END = "End with a line of the form\n#### <answer>\nwhere <answer> is"

TEMPLATES = {
    "gsm8k_0shot": f"Solve this word problem. {_STEPS} {_END} only a number.\n\nProblem: {{question}}\n\nSolution:",
    "gsm8k_0shot_compact": (
        "Solve this word problem in a few short steps, with a blank line between them, one calculation a step. "
        f"{_END} only a number.\n\nProblem: {{question}}\n\nSolution:"
    ),
    "svamp_0shot": f"Solve this word problem. {_STEPS} {_END} only a number.\n\nProblem: {{question}}\n\nSolution:",
    "addition_0shot": f"{{question}} {_STEPS} {_END} only a number.",
    "arc_0shot": (
        f"Answer this multiple-choice question. {_STEPS} End with a line of the form\n#### <letter>\n"
        "where <letter> is the letter of the right choice.\n\nQuestion: {question}\n{choices}\n\nAnswer:"
    ),
    "strategyqa_0shot": (
        f"Answer this question with yes or no. {_STEPS} {_END} yes or no.\n\nQuestion: {{question}}\n\nAnswer:"
    ),
    "math_0shot": (
        f"Solve this problem. {_STEPS} Put the final answer in \\boxed{{}}.\n\nProblem: {{question}}\n\nSolution:"
    ),
    "exact_0shot": (
        f"Answer this question. {_STEPS} {_END} only the answer, as short as possible.\n\n"
        "Question: {question}\n\nAnswer:"
    ),
    "tiny": "{question}\n\n",
    "question": "{question}",
}
BY_KIND: dict[Kind, str] = {
    "number": "gsm8k_0shot", "math": "math_0shot", "choice": "arc_0shot", "yes_no": "strategyqa_0shot",
    "exact": "exact_0shot",
}  # fmt: skip
"""Prompts that the template `auto` selects."""


def render(template: str, example: Example) -> str:
    """Return the prompt of an example; `template` is a name, `auto`, or a text with {question} (and {choices})."""
    name = BY_KIND[example.kind] if template == "auto" else template
    text = name if "{question}" in name else TEMPLATES.get(name)
    if text is None:
        near = difflib.get_close_matches(name, TEMPLATES, n=1)
        names = ", ".join(("auto", *TEMPLATES))
        hint = f"did you mean {near[0]}?" if near else f"choose one of {names}, or write a text with {{question}}"
        raise LabError(f"unknown prompt.template {name!r}", hint=hint)
    if example.kind == "choice" and "{choices}" not in text:
        raise LabError(
            f"the template {name if name in TEMPLATES else 'of the config'} does not show the choices of {example.id}",
            hint="set prompt.template to auto or arc_0shot, or write {choices} in the text",
        )
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, example.choices, strict=False))
    shown = {"{question}": example.question, "{choices}": choices}
    return re.sub(r"\{question\}|\{choices\}", lambda match: shown[match.group()], text)
