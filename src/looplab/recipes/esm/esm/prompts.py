"""Prompt templates.

Each asks for steps separated by blank lines, because segments end there, and for a fixed form of the final answer,
which grading.py looks for first.
"""

from __future__ import annotations

import difflib

from looplab.errors import LabError

from .data import LETTERS, Example

_STEPS = "Think step by step, with a blank line between the steps."
_NUMBER = "End with a line of the form\n#### <answer>\nwhere <answer> is only a number."

TEMPLATES = {
    "gsm8k_0shot": f"Solve this word problem. {_STEPS} {_NUMBER}\n\nProblem: {{question}}\n\nSolution:",
    "gsm8k_0shot_compact": (
        "Solve this word problem in a few short steps, with a blank line between them, one calculation a step. "
        f"{_NUMBER}\n\nProblem: {{question}}\n\nSolution:"
    ),
    "svamp_0shot": f"Solve this word problem. {_STEPS} {_NUMBER}\n\nProblem: {{question}}\n\nSolution:",
    "addition_0shot": f"{{question}} {_STEPS} {_NUMBER}",
    "arc_0shot": (
        f"Answer this multiple-choice question. {_STEPS} End with a line of the form\n#### <letter>\n"
        "where <letter> is the letter of the right choice.\n\nQuestion: {question}\n{choices}\n\nAnswer:"
    ),
    "strategyqa_0shot": (
        f"Answer this question with yes or no. {_STEPS} End with a line of the form\n#### <answer>\n"
        "where <answer> is yes or no.\n\nQuestion: {question}\n\nAnswer:"
    ),
    "math_0shot": (
        f"Solve this problem. {_STEPS} Put the final answer in \\boxed{{{{}}}}.\n\nProblem: {{question}}\n\nSolution:"
    ),
    "tiny": "{question}\n\n",
}


def render(template: str, example: Example) -> str:
    """Return the prompt of an example."""
    if template not in TEMPLATES:
        near = difflib.get_close_matches(template, TEMPLATES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TEMPLATES)}"
        raise LabError(f"unknown prompt.template {template!r}", hint=hint)
    text = TEMPLATES[template]
    if example.kind == "choice" and "{choices}" not in text:
        raise LabError(
            f"the template {template} does not show the choices of {example.id}",
            hint="set prompt.template to arc_0shot",
        )
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, example.choices, strict=False))
    return text.format(question=example.question, choices=choices)
