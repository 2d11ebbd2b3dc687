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
PAGES = ["README.md", "README.zh.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
CHINESE = [page for page in PAGES if page == "README.zh.md" or page.startswith("docs/zh/")]
SYSTEMS = ("auto-loop", "autopilot", "coming-from", "iterate", "esm", "own-trainer", "pipeline", "rl")
"""Pages that are there in Chinese too."""


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


def code_of(page: Path) -> tuple[list[str], set[str], list[str]]:
    """The code of a page: its blocks, the commands within its sentences, the rows of its tables of commands."""
    text = page.read_text()
    fenced = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = [line for line in prose.splitlines() if line.startswith("    ")]
    within = {" ".join(span.split()) for span in re.findall(r"`(looplab [^`]*)`", prose)}
    rows = [line for line in prose.splitlines() if line.startswith("| `") and "looplab " in line]
    return [*fenced, *indented], within, rows


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_chinese_page_has_the_code_of_its_english_page(name: str) -> None:
    english, chinese = ROOT / "docs" / f"{name}.md", ROOT / "docs" / "zh" / f"{name}.md"
    assert code_of(chinese) == code_of(english)
    headings = [[line[: line.index(" ")] for line in page.read_text().splitlines() if line.startswith("#")]
                for page in (english, chinese)]  # fmt: skip
    assert headings[0] == headings[1]
    assert f"](zh/{name}.md)" in english.read_text()
    assert f"](docs/zh/{name}.md)" in (ROOT / "README.zh.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in CHINESE])
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


@pytest.mark.slow
def test_the_trainer_that_a_page_shows_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rl.md").read_text()
    code = "\n".join(line[4:] for line in page.splitlines() if line.startswith("    ") and "looplab init" not in line)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "pole" / "checkpoints" / "latest").exists()
