"""Assemble the Markdown of the site: the pages of `docs/`, pages from outside it, and the generated references.

`make docs` calls this with the folder that mkdocs.yml names, then MkDocs.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).parent.parent
FROM_OUTSIDE = {
    "README.md": "index.md",
    "README.zh.md": "zh/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}
"""Pages of the repository that are not in `docs/`, and their places on the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")


def assemble(folder: Path) -> None:
    """Write all pages to the folder, which is emptied before."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {f"docs/{path.relative_to(ROOT / 'docs')}": path for path in sorted((ROOT / "docs").rglob("*"))}
    pages |= {name: ROOT / name for name in FROM_OUTSIDE}
    for name, path in pages.items():
        target = folder / FROM_OUTSIDE.get(name, name.removeprefix("docs/"))
        if path.is_dir():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(with_links_of_the_site(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        else:
            shutil.copyfile(path, target)
    (folder / "reference").mkdir()
    for name, page in reference.PAGES.items():
        (folder / "reference" / f"{name}.md").write_text(page(), encoding="utf-8")


def with_links_of_the_site(text: str, source: str) -> str:
    """Return a page whose links lead to the places on the site; files that are not on it are named instead."""
    place = FROM_OUTSIDE.get(source, source.removeprefix("docs/"))

    def replace(match: re.Match[str]) -> str:
        picture, label, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path not in FROM_OUTSIDE and not path.startswith("docs/"):
            return f"{label} (`{path}`)"
        target = posixpath.relpath(FROM_OUTSIDE.get(path, path.removeprefix("docs/")), posixpath.dirname(place) or ".")
        return f"{picture}[{label}]({target}{anchor or ''})"

    return LINK.sub(replace, text)


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
