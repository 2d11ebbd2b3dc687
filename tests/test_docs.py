"""Every command that the README and the docs show is run, in order, in a lab made for it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PAGES = ["README.md", "README.zh.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """The commands of the indented blocks that are ours, without their comments."""
    found = []
    for line in page.read_text().splitlines():
        match = re.fullmatch(r"    (looplab .*|cd .*)", line)
        if match:
            found.append(shlex.split(match[1], comments=True))
    return found


def test_both_readmes_show_the_same_commands() -> None:
    english, chinese = (commands(ROOT / page) for page in ("README.md", "README.zh.md"))
    assert [words[:4] for words in english] == [words[:4] for words in chinese]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.zh.md"])
def test_every_command_of_a_page_works(page: str, tmp_path: Path) -> None:
    shown = commands(ROOT / page)
    here = tmp_path
    if shown and shown[0][:2] != ["looplab", "init"]:
        subprocess.run([BIN / "looplab", "init", "quickstart", "lab"], cwd=here, check=True, capture_output=True)
        here = here / "lab"
    for words in shown:
        if words[0] == "cd":
            here = here / words[1]
            baseline = here / "configs" / "baseline.json"
            baseline.write_text(baseline.read_text().replace('"epochs": 150', '"epochs": 20'))
            continue
        done = subprocess.run(
            [BIN / words[0], *words[1:]], cwd=here, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_trainer_that_a_page_shows_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rl.md").read_text()
    code = "\n".join(line[4:] for line in page.splitlines() if line.startswith("    ") and "looplab init" not in line)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "pole" / "checkpoints" / "latest").exists()
