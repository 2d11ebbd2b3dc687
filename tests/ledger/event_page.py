"""Generate docs/events.md from the catalogue: `python tests/ledger/event_page.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from looplab.ledger import catalogue

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
INTRODUCTION = """# Events

The kinds of events in the ledger and the fields of their data. This page is generated from `ledger/catalogue.py`.

Every event has a number (`seq`, from 1), a Unix time (`at`), a `kind`, a `study` (empty: the whole lab), a `run` (null: no
single run), its `data` as JSON, and a `hash`. A reader follows the chain with `SELECT * FROM events WHERE seq > ?`; the
Python class `looplab.ledger.ledger.Event` is one row. [The record](record.md) says what the hashes prove.

A field marked *optional* is left out if it has no value; all others are always there, but may be null if their type says
so. Events of older versions may lack fields that were added later. `Hashes` are SHA-256 by path; `Role` is `base`, `trial`,
`replicate`, `control`, `reproduction` or `imported`. Secrets in texts are replaced by `***`.
"""


def render() -> str:
    """Return the page."""
    source = Path(catalogue.__file__).read_text()
    lines = source.splitlines()
    headings = [(number, line[5:]) for number, line in enumerate(lines, 1) if line.startswith("# -- ")]
    page = [INTRODUCTION]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.decorator_list:
            while headings and headings[0][0] < node.lineno:
                page.append(f"## {headings.pop(0)[1]}\n")
            page += _event(node)
    return "\n".join(page).rstrip() + "\n"


def _event(node: ast.ClassDef) -> Iterator[str]:
    call = node.decorator_list[0]
    assert isinstance(call, ast.Call)
    yield f"### {ast.literal_eval(call.args[0])}\n"
    yield f"{' '.join((ast.get_docstring(node) or '').split())}\n"
    rows = list(_fields(node.body))
    if rows:
        yield "| field | type | |\n|---|---|---|"
        yield from rows
        yield ""


def _fields(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            type_ = ast.unparse(statement.annotation)
            optional = statement.value is not None
            type_ = type_.replace(" | None", "" if optional else " or null").replace(" | ", " or ")
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(str(following.value.value).split())
            words = " ".join(filter(None, ("*optional*." if optional else "", text)))
            yield f"| `{ast.unparse(statement.target)}` | `{type_}` | {words} |".replace("\\|", "or").replace(
                "  |", " |"
            )


if __name__ == "__main__":
    PAGE.write_text(render())
