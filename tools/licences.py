"""Licences of everything that looplab installs: a table for people, and an SBOM (CycloneDX 1.5) for programs.

    python tools/licences.py [FOLDER]       # writes licences.md and sbom.cdx.json; `make licences`

What is listed is what is installed here of looplab's dependencies and extras, and of their dependencies.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

VENDORED = Path(__file__).parent.parent / "src/looplab/report/assets/vendor/vendor.json"
LICENCE_CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(.+)")


@dataclass
class Component:
    """An installed package."""

    name: str
    version: str
    licence: str
    home: str
    wanted_by: set[str] = field(default_factory=set)
    """Extras of looplab that need it; `base`: all installations."""


def components(root: str = "looplab") -> dict[str, Component]:
    """Return the packages below `root`, by normalised name, with the extras that need each."""
    found: dict[str, Component] = {}
    package = distribution(root)
    extras = [extra for extra in package.metadata.get_all("Provides-Extra") or [] if extra not in ("all", "testing")]
    for extra in ["", *extras]:
        for one in _closure(package, {extra} if extra else set(), {}):
            key = _normalised(one.metadata["Name"])
            if key == root:
                continue
            component = found.setdefault(key, _component(one))
            component.wanted_by.add(extra or "base")
    return dict(sorted(found.items()))


def _closure(package: Distribution, extras: set[str], seen: dict[str, set[str]]) -> Iterator[Distribution]:
    key = _normalised(package.metadata["Name"])
    fresh = key not in seen
    if not fresh and extras <= seen[key]:
        return
    seen.setdefault(key, set()).update(extras)
    if fresh:
        yield package
    for text in package.requires or []:
        requirement = Requirement(text)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            continue
        try:
            below = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # an extra that is not installed here
        yield from _closure(below, set(requirement.extras), seen)


def _component(package: Distribution) -> Component:
    about = package.metadata
    classifiers = [m[1] for one in about.get_all("Classifier") or [] if (m := LICENCE_CLASSIFIER.fullmatch(one))]
    text = (about.get("License") or "").strip()
    short = text.splitlines()[0] if text and len(text.splitlines()[0]) < 60 else ""
    licence = about.get("License-Expression") or "; ".join(classifiers) or short or "see its files"
    urls = [url.partition(",")[2].strip() for url in about.get_all("Project-URL") or []]
    return Component(about["Name"], package.version, licence, about.get("Home-page") or (urls or [""])[0])


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def vendored() -> list[dict[str, str]]:
    """Return the code of others that is in the wheel itself."""
    loaded = json.loads(VENDORED.read_text(encoding="utf-8"))
    return [{"name": name, "version": about["version"], "license": about["license"]} for name, about in loaded.items()]


def as_markdown(found: dict[str, Component]) -> str:
    lines = ["# Licences", "", "looplab is Apache-2.0. In its wheel, with their licences:", ""]
    lines += [f"- {entry['name']} {entry['version']}: {entry['license']}" for entry in vendored()]
    lines += ["", "Installed with it:", "", "| package | version | licence | needed by |", "|---|---|---|---|"]
    for one in found.values():
        needed = "all installations" if "base" in one.wanted_by else ", ".join(sorted(one.wanted_by))
        lines.append(f"| {one.name} | {one.version} | {one.licence.replace('|', '/')} | {needed} |")
    return "\n".join([*lines, ""])


def as_sbom(found: dict[str, Component]) -> str:
    version = distribution("looplab").version
    parts = [
        {
            "type": "library", "name": one.name, "version": one.version, "bom-ref": f"pkg:pypi/{name}@{one.version}",
            "purl": f"pkg:pypi/{name}@{one.version}", "licenses": [{"license": {"name": one.licence}}],
            "scope": "required" if "base" in one.wanted_by else "optional",
        }
        for name, one in found.items()
    ]  # fmt: skip
    parts += [
        {
            "type": "library", "name": entry["name"], "version": entry["version"], "scope": "required",
            "bom-ref": f"vendored/{entry['name']}", "licenses": [{"license": {"name": entry["license"]}}],
        }
        for entry in vendored()
    ]  # fmt: skip
    about = {"component": {"type": "application", "name": "looplab", "version": version, "bom-ref": "looplab"}}
    whole = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": about, "components": parts}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build")
    folder.mkdir(parents=True, exist_ok=True)
    found = components()
    (folder / "licences.md").write_text(as_markdown(found), encoding="utf-8")
    (folder / "sbom.cdx.json").write_text(as_sbom(found), encoding="utf-8")
    unknown = [one.name for one in found.values() if one.licence == "see its files"]
    print(f"{len(found)} packages: {folder}/licences.md, {folder}/sbom.cdx.json")
    if unknown:
        print(f"without a declared licence: {', '.join(unknown)}")


if __name__ == "__main__":
    main()
