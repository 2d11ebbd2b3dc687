"""Front-end modules that `looplab ui` serves and report.html contains: `report/assets/`.

`looplab ui` serves the folder as it is; dom.js describes its rules. A single file cannot import modules, so for it they
are joined into one script whose hash is in the page's policy.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable

ASSETS: Traversable = files("looplab.report") / "assets"
UPLOT = ("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")
"""Script (not a module: it defines the global `uPlot`) and style of the chart library."""

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
