"""What is released: one version, a wheel without junk, and licences of all that comes with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import looplab

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import licences  # noqa: E402
import release_check  # noqa: E402


def test_the_version_is_in_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert not re.search(r'^version = "', project, re.MULTILINE)
    assert 'path = "src/looplab/__init__.py"' in project
    done = subprocess.run([sys.executable, "-m", "looplab", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == looplab.__version__


def test_every_package_that_looplab_needs_allows_its_use() -> None:
    found = licences.components()
    base = {name: one for name, one in found.items() if "base" in one.wanted_by}
    assert {"pydantic", "typer", "duckdb", "numpy"} <= {*base}
    assert [one.name for one in base.values() if one.licence == "see its files"] == []
    assert [one.name for one in base.values() if re.search(r"\bA?GPL", one.licence)] == []


def test_the_sbom_names_packages_and_vendored_code() -> None:
    found = licences.components()
    sbom = json.loads(licences.as_sbom(found))
    assert sbom["bomFormat"] == "CycloneDX"
    assert {"uPlot", "pydantic"} <= {part["name"] for part in sbom["components"]}
    assert all(part["version"] and part["licenses"] for part in sbom["components"])
    assert "| pydantic |" in licences.as_markdown(found)


def test_code_of_others_is_in_one_folder_with_its_licence() -> None:
    """A file that says who holds its rights, anywhere else in the package, has been copied from somewhere."""
    vendor = licences.VENDORED.parent
    for entry in licences.vendored():
        assert (vendor / f"{entry['name']}.LICENSE").stat().st_size > 500
    says = re.compile(r"copyright\s*(\(c\)|©|20\d\d|19\d\d)|SPDX-License-Identifier|@license", re.IGNORECASE)
    sources = [p for p in (ROOT / "src").rglob("*") if p.suffix in {".py", ".js", ".css", ".c", ".html", ".sh"}]
    copied = [str(p) for p in sources if p.parent != vendor and says.search(p.read_text(errors="replace"))]
    assert copied == []


@pytest.mark.parametrize("name", ["tests/test_a.py", "looplab/__pycache__/a.pyc", "outputs/x", "looplab/rl/test_a.py"])
def test_junk_in_a_wheel_is_found(name: str) -> None:
    good = ["looplab/__init__.py", "looplab-0.2.0.dist-info/METADATA", "looplab/recipes/fish/.gitignore"]
    assert release_check.problems_of(good) == []
    assert release_check.problems_of([*good, name]) == [name]


@pytest.mark.slow
def test_wheel_and_sdist_are_built_and_contain_what_they_should() -> None:
    pytest.importorskip("build")
    done = subprocess.run([sys.executable, ROOT / "tools/release_check.py", "--fast"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"looplab-{looplab.__version__}-py3-none-any.whl" in done.stdout
