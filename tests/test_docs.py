"""Every command that the README and the docs show is run, in order, in a lab made for it."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer.main
from ruamel.yaml import YAML

from looplab.cli.app import app
from looplab.cli.main import expand_argv
from looplab.config.lab import StudyConfig, load_lab
from looplab.decide.rules import read_rules
from looplab.iterate.settings import IterateConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402
import site_pages as site  # noqa: E402

BIN = Path(sys.executable).parent
PAGES = ["README.md", "README.zh.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
CHINESE = [page for page in PAGES if page == "README.zh.md" or page.startswith("docs/zh/")]
SYSTEMS = ("auto-loop", "autopilot", "coming-from", "iterate", "esm", "own-trainer", "pipeline", "rl", "tutorial")
"""Pages that are there in Chinese too."""
RUN_ELSEWHERE = {
    "README.md": "tests/onboard/test_guides.py",
    "docs/own-trainer.md": "tests/onboard/test_guides.py",
    "docs/pipeline.md": "tests/e2e/test_pipeline.py",
    "docs/page.md": "tests/ui",  # a server, which runs until it is ended
}
"""Pages whose fenced commands another test runs."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


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
    assert heading_levels(ROOT / "README.md") == heading_levels(ROOT / "README.zh.md")


def heading_levels(page: Path) -> list[str]:
    prose = FENCE.sub("", page.read_text())
    return [line[: line.index(" ")] for line in prose.splitlines() if re.match("#+ ", line)]


def code_of(page: Path) -> tuple[list[str], set[str], list[str]]:
    """The code of a page: its blocks, the commands within its sentences, the rows of its tables of commands."""
    text = page.read_text()
    fenced = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = [line for line in prose.splitlines() if line.startswith("    ")]
    within = {" ".join(span.split()) for span in re.findall(r"`(looplab [^`]*)`", prose)}
    rows = [line for line in prose.splitlines() if line.startswith("| `") and "looplab " in line]
    reason = re.compile(r'(--reason) ".*?"')  # a sentence of the person, in their language
    return [*fenced, *(reason.sub(r"\1", line) for line in indented)], within, rows


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_chinese_page_has_the_code_of_its_english_page(name: str) -> None:
    english, chinese = ROOT / "docs" / f"{name}.md", ROOT / "docs" / "zh" / f"{name}.md"
    assert code_of(chinese) == code_of(english)
    assert heading_levels(english) == heading_levels(chinese)
    assert f"](zh/{name}.md)" in english.read_text()
    assert f"](../{name}.md)" in chinese.read_text()
    assert f"](docs/zh/{name}.md)" in (ROOT / "README.zh.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in CHINESE])
def test_every_command_of_a_page_works(page: str, tmp_path: Path) -> None:
    shown = commands(ROOT / page)
    here = tmp_path
    if shown and shown[0][:2] != ["looplab", "init"]:
        here = here / "lab"
        make_short_lab(here)
    for words in shown:
        if words[0] == "cd":
            here = here / words[1]
            shorten(here)
            continue
        done = subprocess.run(
            [BIN / words[0], *words[1:]], cwd=here, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in CHINESE and page not in RUN_ELSEWHERE])
def test_every_fenced_command_of_a_page_works(page: str, tmp_path: Path) -> None:
    """The blocks of a page are run by bash, in a lab whose first round is done, as its indented commands leave it."""
    blocks = [text for language, text in FENCE.findall((ROOT / page).read_text()) if language in ("console", "sh")]
    if not blocks:
        pytest.skip("the page has none")
    make_short_lab(tmp_path / "lab")
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    for text in ["looplab run --rounds 1\n", *blocks]:
        done = subprocess.run(
            ["bash", "-e", "-c", text], cwd=tmp_path / "lab", env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def make_short_lab(folder: Path) -> None:
    subprocess.run([BIN / "looplab", "init", "quickstart", folder], check=True, capture_output=True)
    shorten(folder)


def shorten(lab: Path) -> None:
    baseline = lab / "configs" / "baseline.json"
    baseline.write_text(baseline.read_text().replace('"epochs": 150', '"epochs": 20'))


@functools.cache
def all_commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_exists_with_its_options(page: str) -> None:
    """Commands in blocks, sentences and tables are parsed as the program would; nothing is run."""
    text = (ROOT / page).read_text()
    lines = [line for _, block in FENCE.findall(text) for line in block.splitlines() if line.startswith("looplab ")]
    lines += [line[4:] for line in text.splitlines() if line.startswith("    looplab ")]
    lines += [" ".join(span.split()) for span in re.findall(r"`(looplab [^`]*)`", FENCE.sub("", text))]
    for line in lines:
        if "…" in line or "$(" in line or "[" in line or "&&" in line or " > " in line:
            continue  # shortened, or for a shell
        words = expand_argv(shlex.split(line, comments=True)[1:])
        if words[0].startswith("-") or not re.fullmatch("[a-z-]+", words[0]):
            continue
        assert words[0] in all_commands(), line
        if len(words) > 1:
            try:
                all_commands()[words[0]].make_context(words[0], words[1:], resilient_parsing=False)
            except Exception as error:
                if "Missing" not in str(getattr(error, "message", "Missing")):
                    pytest.fail(f"{page}: {line}\n{getattr(error, 'message', error)}")


def yaml_blocks(page: str) -> list[str]:
    """The YAML of a page: fenced blocks, and indented ones that begin with a key."""
    text = (ROOT / page).read_text()
    fenced = [block for language, block in FENCE.findall(text) if language == "yaml"]
    indented = re.findall(r"(?:^    .*\n|^ *\n(?=    ))+", FENCE.sub("", text), re.MULTILINE)
    blocks = [textwrap.dedent(block).strip("\n") for block in indented]
    return fenced + [block for block in blocks if re.match(r"[a-z_]+:(\s|$)", block)]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in CHINESE])  # which have the same blocks
def test_every_yaml_block_of_a_page_is_valid(page: str, tmp_path: Path) -> None:
    """Parts of a lab file are read with all that they leave out; other files as what they are."""
    for number, block in enumerate(yaml_blocks(page)):
        folder = tmp_path / str(number)
        folder.mkdir()
        keys = read_yaml(block)
        if "rules" in keys:
            (folder / "rules.yaml").write_text(block)
            assert read_rules(folder / "rules.yaml")
        elif match := re.match(r"# (\S+\.yaml)\n", block):
            (folder / match[1]).write_text(block)
            assert load_lab(folder).studies if match[1] == "lab.yaml" else keys
        else:
            whole = {"study": "toy", "launch": {"command": ["true"]}, "objective": {"metric": "loss", "goal": "min"}}
            missing = {key: value for key, value in whole.items() if key not in keys}
            (folder / "lab.yaml").write_text(
                f"{block}\n" + "".join(f"{k}: {json.dumps(v)}\n" for k, v in missing.items())
            )
            assert load_lab(folder).studies


def read_yaml(text: str) -> dict[str, Any]:
    loaded = YAML(typ="safe").load(text)
    assert isinstance(loaded, dict), text
    return loaded


def test_every_key_of_the_lab_file_is_documented() -> None:
    """The reference of the site is generated from the schema, so each field says there what it means."""
    waiting, seen, lacking = [StudyConfig, IterateConfig], set(), []
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        sources = reference.field_sources(model)
        for name, field in model.model_fields.items():
            inner = list(reference.models_in(field.annotation))
            waiting += inner
            if not sources[name][1] and not (inner and inner[0].__doc__):
                lacking.append(f"{model.__name__}.{name}")
    assert not lacking, "write a docstring below each of these fields"


def test_the_references_name_every_command_and_every_key() -> None:
    commands_page, keys_page = reference.commands(), reference.lab_file()
    for name, command in all_commands().items():
        assert f"### `looplab {name}`" in commands_page
        for parameter in command.params:
            assert parameter.hidden or all(
                option in commands_page for option in parameter.opts if option.startswith("--")
            ), name
    for name, field in StudyConfig.model_fields.items():
        assert f"| `{field.alias or name}` |" in keys_page


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="`pip install --group docs`")
    built = tmp_path / "site"
    site.assemble(tmp_path / "pages")
    config = (ROOT / "mkdocs.yml").read_text().replace("build/docs", str(tmp_path / "pages"))
    (tmp_path / "mkdocs.yml").write_text(config.replace("paths: [src]", f"paths: [{ROOT / 'src'}]"))
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml"), "-d", str(built)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in built.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:)?//", page.read_text())
        assert not fetched, page
    assert (built / "reference" / "python.html").stat().st_size > 20_000


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
