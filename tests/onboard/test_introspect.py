"""Scripts are asked what they take: nothing is trained, and nothing of theirs is changed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from looplab.errors import LabError
from looplab.onboard.base import Script
from looplab.onboard.introspect import NO_COMMAND_LINE, ask, introspect
from looplab.onboard.labfile import starts_in_run_folder
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script, is_script

ONBOARD = Path(read_interface.__code__.co_filename).parents[1]
PARSER = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\n"


def script_of(folder: Path, text: str, *arguments: str) -> Script:
    (folder / "train.py").write_text(text)
    return find_script([sys.executable, "train.py", *arguments], folder)


def files(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["hook.py", "with_config.py", "find_module.py"])
def test_what_runs_under_the_users_python_is_for_old_ones_too(name: str) -> None:
    tree = ast.parse((ONBOARD / name).read_text(), feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(str(module).startswith("looplab") for module in imported)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            assert not isinstance(node.args[1], ast.BinOp)


def test_what_a_script_writes_before_it_parses_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("mine")
    (tmp_path / "helper.py").write_text("X = 1\n")
    writes = """
import os, shutil, helper
from pathlib import Path
os.makedirs('runs/1', exist_ok=True)
Path('checkpoints').mkdir(exist_ok=True)
Path('checkpoints', 'last.txt').write_text('step 0')
assert Path('checkpoints', 'last.txt').parent
with open('log.txt', 'w') as file:
    file.write('theirs')
with open('runs/1/a.txt', 'w') as file:
    file.write('a')
assert open('runs/1/a.txt').read() == 'a'
os.replace('runs/1/a.txt', 'runs/1/b.txt')
assert open('runs/1/b.txt').read() == 'a'
os.remove('runs/1/b.txt')
"""
    script = script_of(tmp_path, writes + PARSER + "args = p.parse_args()\n")
    before = files(tmp_path)
    found = introspect(script)
    assert found.problem is None, found.printed
    assert [option["dest"] for option in found.parsers[0]["options"]] == ["lr"]
    assert files(tmp_path) == before


READS_A_FILE = """
import argparse, os, sys
class FileParser(argparse.ArgumentParser):
    _default_config_files = ["train.ini"]
    def parse_known_args(self, args=None, namespace=None):
        args = list(sys.argv[1:] if args is None else args)
        if "--help" not in args:
            for line in open("train.ini"):
                key, value = line.split("=")
                args += [f"--{key.strip()}", value.strip()]
        return argparse.ArgumentParser.parse_known_args(self, args, namespace)
p = FileParser()
p.add_argument("--lr", type=float, default=0.1)
p.add_argument("--depth", type=int, default=3)
args = p.parse_args()
"""


def test_what_a_parser_takes_from_its_config_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "train.ini").write_text("lr = 0.02\n")
    options = introspect(script_of(tmp_path, READS_A_FILE)).parsers[0]["options"]
    assert {option["dest"]: option["default"] for option in options} == {"lr": 0.02, "depth": 3}


def test_a_script_that_removes_files_is_ended(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "weights.txt").write_text("precious")
    script = script_of(tmp_path, "import shutil\nshutil.rmtree('old')\n" + PARSER + "args = p.parse_args()\n")
    before = files(tmp_path)
    found = introspect(script)
    assert "changes files" in (found.problem or "")
    assert files(tmp_path) == before
    interface = read_interface(script)
    assert interface is not None  # from the source alone
    assert [setting.name for setting in interface.settings] == ["lr"]


def test_a_script_that_downloads_is_ended(tmp_path: Path) -> None:
    connects = "import urllib.request\nurllib.request.urlopen('http://192.0.2.1/data')\n"
    script = script_of(tmp_path, connects + PARSER + "args = p.parse_args()\n")
    assert "another machine" in (introspect(script).problem or "")


@pytest.mark.slow
def test_a_parser_without_help_does_not_let_the_script_train(tmp_path: Path) -> None:
    text = PARSER.replace("()", "(add_help=False)", 1) + "args, _ = p.parse_known_args()\n"
    trains = text + "open('trained.txt', 'w').write('x')\nwhile True:\n    pass\n"
    script = script_of(tmp_path, trains)
    found = introspect(script)
    assert found.parsers
    assert not (tmp_path / "trained.txt").exists()


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = script_of(tmp_path, "while True:\n    pass\n" + PARSER + "args = p.parse_args()\n")
    found = introspect(script, timeout=2)
    assert found.problem == "`--help` did not end within 2 s"


def test_a_script_without_a_command_line_is_not_started(tmp_path: Path) -> None:
    script = script_of(tmp_path, "open('started.txt', 'w')\nLR = 0.1\n")
    assert introspect(script).problem == NO_COMMAND_LINE
    assert not (tmp_path / "started.txt").exists()


def test_a_question_on_stdin_ends_the_script(tmp_path: Path) -> None:
    script = script_of(tmp_path, "name = input('name? ')\n" + PARSER + "args = p.parse_args()\n")
    assert "asks on stdin" in (introspect(script).problem or "")


def test_a_parser_that_reads_its_own_list_is_not_a_command_line(tmp_path: Path) -> None:
    text = "LR = 0.5\n" + PARSER + "args = p.parse_args([])\n"
    interface = read_interface(script_of(tmp_path, text))
    assert interface is not None
    assert interface.reader == "constants"


def test_a_config_is_asked_for_without_leaving_anything(tmp_path: Path) -> None:
    text = "import os\nos.makedirs('outputs/x')\nprint('a logo')\nprint('lr: 0.1\\nmodel:\\n  width: 3')\n"
    script = script_of(tmp_path, text)
    assert ask(script, ["--cfg", "job"]) == ({"lr": 0.1, "model": {"width": 3}}, None)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "prefix", "arguments"),
    [
        (["torchrun", "--nproc_per_node", "1", "train.py", "--lr", "1"], 4, ["--lr", "1"]),
        (["accelerate", "launch", "--num_processes", "1", "train.py"], 5, []),
        (["uv", "run", "train.py", "-x"], 3, ["-x"]),
        (["env", "A=1", "B=2", "{python}", "train.py", "--lr", "1"], 5, ["--lr", "1"]),
        (["{python}", "-u", "-W", "ignore", "train.py"], 5, []),
        (["{python}", "-m", "torch.distributed.run", "--standalone", "train.py", "-x"], 5, ["-x"]),
        (["nohup", "{python}", "train.py", "-x"], 3, ["-x"]),
        (["uv", "run", "{python}", "-m", "pkg.train", "-x"], 5, ["-x"]),
    ],
)
def test_launchers_and_variables_before_a_script(
    words: list[str], prefix: int, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PARSER)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(PARSER)
    command = [sys.executable if word == "{python}" else word for word in words]
    assert is_script(command)
    script = find_script(command, tmp_path)
    assert script.path.name == "train.py"
    assert list(script.argv) == command
    assert list(script.arguments) == arguments
    assert list(script.prefix) == command[:prefix]


def test_a_variable_before_a_command_becomes_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PARSER)
    script = find_script(["A=1", "B=2", sys.executable, "train.py"], tmp_path)
    assert script.argv == ("env", "A=1", "B=2", sys.executable, "train.py")


def test_a_module_of_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, site = tmp_path / "project", tmp_path / "site-packages"
    for folder in (project, site / "zoo" / "nested"):
        folder.mkdir(parents=True)
    (site / "zoo" / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    (site / "zoo" / "options.py").write_text(PARSER)
    (site / "zoo" / "train.py").write_text("from zoo.options import p\nimport other\np.parse_args()\nsave()\n")
    (site / "zoo" / "nested" / "__main__.py").write_text(PARSER + "p.parse_args()\n")
    (site / "other.py").write_text("import argparse\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    script = find_script([sys.executable, "-m", "zoo.train", "--lr", "1"], project)
    assert script.path == site / "zoo" / "train.py"
    assert len(script.modules) == 2  # its package is its project, and nothing else that is installed
    assert starts_in_run_folder(script)[0]
    (site / "zoo" / "__init__.py").write_text("")
    found = read_interface(script)
    assert found is not None
    assert [setting.name for setting in found.settings] == ["lr"]
    assert found.command == (sys.executable, "-m", "zoo.train", "{flags}")
    assert find_script([sys.executable, "-m", "zoo.nested"], project).path.name == "__main__.py"
    for name in ("zoo.absent", "zoo", "zoo.train.more", "sys"):
        with pytest.raises(LabError, match=f"module {name} was not found in .* or among the packages of"):
            find_script([sys.executable, "-m", name], project)
    (project / "zoo").mkdir()
    (project / "zoo" / "train.py").write_text(PARSER)
    assert find_script([sys.executable, "-m", "zoo.train"], project).path == project / "zoo" / "train.py"
