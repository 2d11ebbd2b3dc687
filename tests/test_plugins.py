"""Plug-ins: another package adds to looplab by entry points; recipes also come from folders and git."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import looplab
from looplab.cli.recipes import names

EXAMPLE = Path(__file__).parents[1] / "examples/plugins"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the example package is installed, as pip would do."""
    site = tmp_path / "site"
    shutil.copytree(EXAMPLE / "src", site)
    about = site / "looplab_example-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: looplab-example\nVersion: 0.1.0\n")
    groups: dict[str, list[str]] = {}
    group = ""
    for line in (EXAMPLE / "pyproject.toml").read_text().splitlines():
        if line.startswith("[project.entry-points."):
            group = line.split('"')[1]
        elif line.startswith("["):
            group = ""
        elif group and "=" in line:
            name, _, value = line.partition(" = ")
            groups.setdefault(group, []).append(f"{name} = {value.strip(chr(34))}")
    text = "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in groups.items())
    (about / "entry_points.txt").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def call(env: dict[str, str], *words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "looplab", *words], env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_recipe_and_a_source_of_another_package_are_used(installed: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    call(installed, "init", "parabola", str(lab))
    assert not (lab / "__init__.py").exists()
    call(installed, "run", "--lab", str(lab))
    status = json.loads(call(installed, "status", "--lab", str(lab), "--json"))["studies"][0]
    assert status["counts"] == {"ok": 6}
    rows = json.loads(call(installed, "query", "SELECT proposer FROM runs ORDER BY n", "--lab", str(lab), "--json"))
    assert [row["proposer"] for row in rows] == ["base", *["halving"] * 5]
    assert status["best"]["objective"] < 1.2
    assert "is whole" in call(installed, "verify", "--lab", str(lab))


PARROT = """#!{python}
import json, sys
assert "What you may change" in sys.stdin.read()
answer = {{"proposals": [{{"edits": ["x@set=0.5"], "reason": "I heard it"}}]}}
print(json.dumps({{"say": json.dumps(answer)}}))
print(json.dumps({{"done": True, "tokens": 12}}))
"""
LAB = """
study: {study}
launch: {{command: ["{{python}}", train.py]}}
base: base.json
objective: {{metric: loss, goal: min}}
measure: {{sources: [tsv]}}
knobs:
  x: {{type: float, low: -2, high: 2}}
proposers: {proposers}
executor: {{listing: {{file: started.txt}}}}
watch:
  - jump: {{factor: 0.4}}
    alert: {{file: {{path: {alarms}}}}}
slots: {{count: 2, gpus: none}}
budget: {{runs: {runs}}}
"""


@pytest.mark.slow
def test_a_study_uses_a_plug_in_of_every_kind(installed: dict[str, str], tmp_path: Path) -> None:
    lab, parrot, alarms = tmp_path / "lab", tmp_path / "parrot", tmp_path / "alarms.txt"
    call(installed, "init", "parabola", str(lab))
    parrot.write_text(PARROT.format(python=sys.executable))
    parrot.chmod(0o755)
    learns = "[{halving: {knob: x}}, {search: {sampler: hill, startup: 2, options: {width: 0.2}}}]"
    asks = f"[{{agent: {{cli: parrot, binary: {parrot}}}}}]"
    for study, proposers, runs in (("learns", learns, 10), ("asks", asks, 2)):
        (lab / "lab.yaml").write_text(LAB.format(study=study, proposers=proposers, alarms=alarms, runs=runs))
        call(installed, "check", "--lab", str(lab))
        call(installed, "run", "--lab", str(lab))
    query = "SELECT proposer, count(*) AS n FROM runs GROUP BY proposer"
    rows = json.loads(call(installed, "query", query, "--lab", str(lab), "--json"))
    counts = {row["proposer"]: row["n"] for row in rows}
    assert set(counts) == {"base", "halving", "search", "agent"}, counts
    assert sum(counts.values()) == 12
    ended = [line for line in (lab / "started.txt").read_text().splitlines() if line.startswith("Ended")]
    assert len(ended) == 12
    assert "loss jumped from" in alarms.read_text()
    assert "is whole" in call(installed, "verify", "--lab", str(lab))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("executor: {listing: {nonsense: 1}}", "the plug-in 'listing' (looplab.executors) cannot be used"),
        ("executor: nowhere", "there is no executor 'nowhere'; installed: local, slurm, ray, listing"),
        ("watch: [{jump: {nonsense: 1}}]", "the plug-in 'jump' (looplab.conditions) cannot be used"),
        ("watch: [{jump: {}, nan: true}]", "a watch rule has exactly one of"),
        ("watch: [{nan: true, alert: {file: {}}}]", "the plug-in 'file' (looplab.alerts) cannot be used"),
        ("proposers: [{search: {sampler: hill, options: {nonsense: 1}}}]", "the plug-in 'hill' (looplab.samplers)"),
        ("proposers: [{search: {sampler: hil}}]", "did you mean 'hill'?"),
        ("proposers: [{agent: {cli: parot}}]", "did you mean 'parrot'?"),
    ],
)
def test_a_mistake_in_the_options_of_a_plug_in_is_reported(
    installed: dict[str, str], tmp_path: Path, line: str, told: str
) -> None:
    lab = tmp_path / "lab"
    call(installed, "init", "parabola", str(lab))
    text = (lab / "lab.yaml").read_text()
    key = line.partition(":")[0]
    kept = [row for row in text.splitlines() if not row.startswith(f"{key}:")]
    (lab / "lab.yaml").write_text("\n".join([*kept, line]) + "\n")
    assert told in " ".join(call(installed, "run", "--lab", str(lab), code=2).split())


def test_a_reader_of_another_package_is_asked_first(installed: dict[str, str], tmp_path: Path) -> None:
    code = "import sys\nDEFAULTS = {'lr': 0.1, 'seed': 0}\nfound = [w for w in sys.argv if w.startswith('-D')]\n"
    (tmp_path / "train.py").write_text(code)
    words = [sys.executable, "-m", "looplab", "init", "train.py", "--json"]
    done = subprocess.run(words, env=installed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reader"] == "define"
    assert "-Dlr" in (tmp_path / "lab.yaml").read_text()


@pytest.mark.slow
def test_the_example_passes_the_contracts(installed: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(EXAMPLE / "tests")]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, cwd=EXAMPLE)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 70, done.stdout


def test_the_page_shows_the_files_of_the_example() -> None:
    page = (EXAMPLE.parents[1] / "docs/extend.md").read_text()
    for name, text in re.findall(r"`examples/plugins/(\S+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL):
        assert (EXAMPLE / name).read_text() == text, name
    groups = re.findall(
        r'^\[project.entry-points."looplab\.(\w+)"\]', (EXAMPLE / "pyproject.toml").read_text(), re.MULTILINE
    )
    for group in groups:
        assert f"`looplab.{group}`" in page, group


def test_without_the_package_the_source_is_unknown(installed: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    call(installed, "init", "parabola", str(lab))
    told = call(dict(os.environ), "check", "--lab", str(lab), code=2)
    assert "lab.yaml:" in told
    assert "unknown key 'proposers.0.halving'" in told or "measure has no source 'tsv'" in told


def test_a_plug_in_that_cannot_be_imported_is_an_error_that_names_it(installed: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    call(installed, "init", "parabola", str(lab))
    (tmp_path / "site/looplab_example/source.py").write_text("1 / 0\n")
    told = call(installed, "check", "--lab", str(lab), code=2)
    assert "the plug-in 'tsv' of looplab-example cannot be imported: ZeroDivisionError" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "code"),
    [("source.py", 'cells = line.split("\\t")', 1), ("proposer.py", "first = study.count_proposals", 0)],
)
def test_a_plug_in_that_exits_fails_and_the_study_does_not(
    installed: dict[str, str], tmp_path: Path, file: str, line: str, code: int
) -> None:
    lab, module = tmp_path / "lab", tmp_path / "site/looplab_example" / file
    call(installed, "init", "parabola", str(lab))
    text = module.read_text()
    assert line in text
    module.write_text(text.replace(line, f"raise SystemExit(7)\n        {line}"))
    call(installed, "run", "--lab", str(lab), code=code)
    rows = json.loads(call(installed, "query", "SELECT data FROM events", "--lab", str(lab), "--json"))
    assert any("SystemExit: 7" in row["data"] for row in rows)
    assert "is whole" in call(installed, "verify", "--lab", str(lab))


def test_a_lab_is_made_from_a_folder_and_from_git(tmp_path: Path) -> None:
    source = tmp_path / "source"
    call(dict(os.environ), "init", str(EXAMPLE / "src/looplab_example/lab"), str(source))
    (source / "outputs").mkdir()
    (source / ".looplab").mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(source)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a lab"], check=True)
    for number, recipe in enumerate((str(source), f"file://{source}")):
        copy = tmp_path / f"copy{number}"
        call(dict(os.environ), "init", recipe, str(copy))
        assert sorted(path.name for path in copy.iterdir()) == ["base.json", "lab.yaml", "train.py"]
    assert "no recipe" in call(dict(os.environ), "init", "nowhere", code=2)
    assert "it has no lab.yaml" in call(dict(os.environ), "init", f"{tmp_path}/", str(tmp_path / "x"), code=2)


def test_own_recipes_are_still_there() -> None:
    assert {"quickstart", "act_ot", "esm", "drone", "mario", "fish"} <= set(names())
    assert looplab.__version__
