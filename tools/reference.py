"""Reference pages of the site, generated from the code: the lab file, the commands, the Python API.

The schema, the commands and the docstrings are the only source; no generated page is kept in the repository.
`make docs` builds the site, `python tools/reference.py lab-file` prints a page.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

WORDS = {
    "str": "text", "int": "whole number", "float": "number", "bool": "true or false", "Any": "anything", "None": "none",
    "Duration": "duration", "EditText": "edit", "ExpressionText": "expression", "InLab": "path in the lab",
    "Texts": "text, or list of texts", "TextsInLab": "path in the lab, or list of paths", "Path": "path",
    "At": "`first`, `last`, `best` or `mean(k)`", "Effect": "number or percentage",
    "AgentName": "`codex`, `claude`, `command` or a plug-in", "Command": "argv",
    "WandbKey": "`enable`, `mode`, `entity`, `project`, `artifacts`, `disable_artifact`",
    "Setting": "name of a setting",
}  # fmt: skip
"""Names of types in annotations, in the words of the page."""
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}


# -- the lab file


def lab_file() -> str:
    """Return the page of all keys of lab.yaml and iterate.yaml."""
    from looplab.config.lab import StudyConfig
    from looplab.iterate.settings import IterateConfig

    top = """# All keys of the lab file

Generated from the schema. [The lab file](../lab-file.md) explains how the keys work together. A duration is a number of
seconds, or text such as `90s`, `30m`, `10h`, `1h30m`. An edit is `path@op=value`; [the lab file](../lab-file.md) has
the language of expressions. Unknown keys are errors that name the line.

At the top level, beside the keys of one study: `studies`, a list of studies, for which the other keys are common
defaults; `state_dir`, a local folder for the ledger of a lab on a network disk.

<style>.md-typeset td:first-child code { white-space: nowrap; }</style>
"""
    return "\n".join([top, *_sections("lab.yaml", StudyConfig), *_sections("iterate.yaml", IterateConfig)])


def _sections(title: str, root: type[BaseModel]) -> Iterator[str]:
    yield f"## `{title}`"
    yield ""
    done: set[type[BaseModel]] = set()
    waiting = [(root, "")]
    while waiting:
        model, at = waiting.pop(0)
        if model in done:
            continue
        done.add(model)
        if at:
            yield f"### {title}: `{at}` {{#{_anchor(title, model)}}}"
            yield ""
        yield _one_line(inspect.getdoc(model) or "")
        yield ""
        yield "| key | value | default | |"
        yield "|---|---|---|---|"
        sources = field_sources(model)
        for name, field in model.model_fields.items():
            annotation, text = sources[name]
            key = field.alias or name
            inner = list(models_in(field.annotation))
            shown = _type_words(annotation)
            links = [f"[`{key}`](#{_anchor(title, one)})" for one in inner if one.__name__ in shown]
            for one, link in zip([one for one in inner if one.__name__ in shown], links, strict=True):
                shown = re.sub(rf"\b{one.__name__}\b", lambda _, link=link: link, shown)
            bounds = " and ".join(_bounds(field))
            text = text or _one_line((inspect.getdoc(inner[0]) or "").split("\n\n")[0] if inner else "")
            shown += f", {bounds}" if bounds else ""
            yield f"| `{key}` | {_cell(shown)} | {_default(field)} | {_cell(text)} |"
            below = "[]" if get_origin(field.annotation) is list else ""
            waiting += [(one, f"{at}.{key}{below}".lstrip(".")) for one in inner]
        yield ""


def field_sources(model: type[BaseModel]) -> dict[str, tuple[ast.expr, str]]:
    """Return the annotation and the docstring of each field, as the source has them; base classes first."""
    found: dict[str, tuple[ast.expr, str]] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = _one_line(str(following.value.value))
            earlier = found.get(statement.target.id, (None, ""))[1]
            found[statement.target.id] = (statement.annotation, text or earlier)
    return found


def _type_words(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return _type_words(left)
        case ast.BinOp(left=left, right=right):
            return f"{_type_words(left)}, or {_type_words(right)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return _type_words(first)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            return ", ".join(f"`{value.value}`" for value in values if isinstance(value, ast.Constant))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=value)):
            return f"`{value}`"
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return f"list: {_type_words(inner)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, value])):
            return f"{_type_words(key)} → {_type_words(value)}"
        case ast.Name(id=name):
            return WORDS.get(name, name)
    return ast.unparse(node)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, list, dict, Annotated):
        for part in get_args(annotation):
            yield from models_in(part)


def _bounds(field: FieldInfo) -> Iterator[str]:
    for one in field.metadata:
        for name, text in BOUNDS.items():
            if getattr(one, name, None) is not None:
                yield text.format(getattr(one, name))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value == [] or value == {} or isinstance(value, BaseModel):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _anchor(title: str, model: type[BaseModel]) -> str:
    return f"{title.split('.')[0]}-{model.__name__.lower()}"


# -- the commands


def commands() -> str:
    """Return the page of all commands."""
    from looplab.cli.app import app
    from looplab.cli.help import EXAMPLES, GROUPS

    group: Any = typer.main.get_command(app)
    lines = [
        """# Commands

Generated from the program: `looplab COMMAND --help` prints the same. Exit codes: 0 done, 1 tried and failed, 2 bad
input, 3 busy (another engine), 130 interrupted. `looplab --version` prints the version, `looplab --install-completion`
installs shell completion.
"""
    ]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [*_command(name, group.commands[name], EXAMPLES[name]), ""]
    return "\n".join(lines)


def _command(name: str, command: Any, example: str) -> Iterator[str]:
    context = command.context_class(command, info_name=f"looplab {name}")
    yield f"### `looplab {name}`"
    yield ""
    yield inspect.cleandoc(command.help or "")
    yield ""
    yield "```text"
    yield " ".join([f"looplab {name}", *command.collect_usage_pieces(context)])
    yield "```"
    yield ""
    yield "| argument or option | |"
    yield "|---|---|"
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield f"| `{record[0].replace('|', chr(92) + '|')}` | {_cell(record[1])} |"
    yield ""
    yield f"Example: `{example}`"


# -- Python


def python_api() -> str:
    """Return the page of the Python API, for mkdocstrings to fill in."""
    import looplab
    from looplab import trainkit

    lines = [
        "# Python API", "",
        "Generated from the docstrings. [looplab from Python](../api.md) is the guide to it.", "",
        "## looplab", "", "What a program or notebook imports: `import looplab`.", "",
    ]  # fmt: skip
    for name in sorted(looplab.__all__, key=str.lower):
        home = looplab._HOMES[name]
        lines += [f"::: looplab.{home}.{'open_lab' if name == 'open' else name}", ""]
    lines += ["## looplab.trainkit", "", "What a trainer imports: `from looplab import trainkit`.", ""]
    for name in sorted(trainkit.__all__, key=str.lower):
        home = trainkit._LAZY.get(name) or ("log" if name in ("Logger", "log", "summary") else "")
        lines += [f"::: looplab.trainkit.{home + '.' if home else ''}{name}", ""]
    lines += ["## looplab.rl", "", "For reinforcement learning: [a runtime that survives](../rl.md).", ""]
    for name in ("vector.SupervisedVectorEnv", "runner.Runner", "runner.TrainingPlan", "ppo.Ppo", "ppo.PpoSettings",
                 "impala.Impala", "impala.ImpalaSettings", "replay.PrioritizedReplay", "metrics.MetricsWriter",
                 "metrics.MetricField"):  # fmt: skip
        lines += [f"::: looplab.rl.{name}", ""]
    return "\n".join(lines)


# -- common


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """Return text for a cell of a table. In code, `<` stays as it is; in YAML, nothing is called None."""
    parts = _one_line(text).replace("|", "\\|").replace("None: ", "if not set: ").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


PAGES = {"lab-file": lab_file, "commands": commands, "python": python_api}
"""Pages below `reference/` of the site."""

if __name__ == "__main__":
    print(PAGES[sys.argv[1]]())
