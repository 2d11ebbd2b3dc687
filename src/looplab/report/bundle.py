"""Front-end modules that `looplab ui` serves and report.html contains: `report/assets/`.

`looplab ui` serves the folder as it is; dom.js describes its rules. A single file cannot import modules, so for it they
are joined into one script whose hash is in the page's policy.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from looplab.untrusted import dump_json

ASSETS: Traversable = files("looplab.report") / "assets"
UPLOT = ("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")
"""Script (not a module: it defines the global `uPlot`) and style of the chart library."""

MODULES = ("i18n.js", "dom.js", "table.js", "charts.js", "figures.js")
"""Modules of `assets/`, each after those it imports."""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{body}
{data}
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async |const |let |function |class ))", re.MULTILINE)


def read_asset(name: str) -> str:
    """Return the text of a file of `assets/`."""
    return (ASSETS / name).read_text(encoding="utf-8")


def join_modules(texts: Iterable[str]) -> str:
    """Join ES modules, in an order in which each comes after those it imports, into one classic script.

    Imports and the word `export` are removed; top-level names must be unique.
    """
    return '"use strict";\n' + "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts)


def content_hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def single_file(
    title: str, body: str, data: Mapping[str, Any], *, folder: Traversable, scripts: Sequence[str], style: str
) -> str:
    """Return a page as one file that sends no requests, and in which nothing but its own scripts can run.

    Args:
        title: Title of the page.
        body: HTML before the scripts.
        data: What the scripts read, by the id of the node that holds it as JSON.
        folder: Where the page's own scripts and style are.
        scripts: Names of the scripts, each after those it imports; the shared modules come before them.
        style: Name of the style.
    """
    library, library_style = map(read_asset, UPLOT)
    styles = library_style + read_asset("theme.css") + (folder / style).read_text(encoding="utf-8")
    own = [(folder / name).read_text(encoding="utf-8") for name in scripts]
    script = join_modules([*map(read_asset, MODULES), *own])
    policy = (
        f"default-src 'none'; script-src '{content_hash(library)}' '{content_hash(script)}';"
        f" style-src '{content_hash(styles)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    blocks = "\n".join(
        f'<script type="application/json" id="{name}">{dump_json(value).replace("<", chr(92) + "u003c")}</script>'
        for name, value in data.items()
    )
    return _PAGE.format(
        policy=policy, title=escape(title), style=styles, body=body, data=blocks, library=library, script=script
    )
