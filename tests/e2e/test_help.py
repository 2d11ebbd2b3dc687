"""What a person meets first: help, version, completion."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from looplab.cli.app import app
from looplab.cli.help import EXAMPLES, GROUPS
from looplab.cli.main import expand_argv

COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)


def test_help_names_every_command(lab) -> None:
    out = lab("--help").out
    assert "Usage: looplab" in out
    for command in COMMANDS:
        assert re.search(rf"^\W*{command} ", out, re.MULTILINE), command


def test_without_a_command_help_is_shown(lab) -> None:
    done = lab(code=None)
    assert "Usage: looplab" in done.out + done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(lab, command: str) -> None:
    out = lab(command, "--help").out
    assert f"Usage: looplab {command}" in out
    assert len(out.splitlines()) > 3


@pytest.mark.slow
def test_every_command_is_in_one_group_and_its_example_can_be_parsed(lab) -> None:
    groups = [name for names in GROUPS.values() for name in names]
    assert sorted(groups) == sorted([*COMMANDS, "analyze"])
    parser = typer.main.get_command(app)
    for name, example in EXAMPLES.items():
        words = expand_argv(shlex.split(example)[1:])
        assert words[0] == name
        command = parser.get_command(None, name)
        command.make_context(name, words[1:])  # fails if the example is wrong
        assert example in " ".join(lab(name, "--help").out.split())
    out = lab("--help").out
    assert [out.index(f"\n{title}:\n") for title in GROUPS] == sorted(out.index(f"\n{title}:\n") for title in GROUPS)


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_readme_names_the_commands_without_json(readme: str) -> None:
    parser = typer.main.get_command(app)
    text = (Path(__file__).parents[2] / readme).read_text()
    sentence = next(one for one in re.split(r"[.。；;]\s", text) if "`--json`" in one)
    for name in COMMANDS:
        has_json = any("--json" in parameter.opts for parameter in parser.get_command(None, name).params)
        assert has_json == (f"`{name}`" not in sentence), name


def test_help_of_run_names_what_follows_two_dashes(lab) -> None:
    out = lab("run", "-h").out
    for word in ("--cfgs", "--mode", "--rounds", "--runs", "--continuous", "--concurrency", "--gpus", "--exec", "`--`"):
        assert word in out


def test_version(lab) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", lab("--version").out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_can_be_printed(lab, shell: str) -> None:
    out = lab(env={"_LOOPLAB_COMPLETE": f"source_{shell}"}, code=None).out
    assert "looplab" in out
    assert "_LOOPLAB_COMPLETE" in out


def test_the_shell_that_asks_gets_its_completion_script(lab) -> None:
    terminal = lab.terminal("-c", f"{lab.command} --show-completion; true", program="/bin/bash")
    assert terminal.ended() == 0
    assert "complete_bash" in terminal.shown


def test_completion_knows_commands_and_options(lab) -> None:
    env = {"_LOOPLAB_COMPLETE": "complete_bash", "COMP_WORDS": "looplab st", "COMP_CWORD": "1"}
    assert set(lab(env=env).out.split()) == {"stage", "status", "stop"}


def test_init_makes_a_lab_that_can_be_checked(lab, tmp_path) -> None:
    out = lab("init", "quickstart", "mine", cwd=tmp_path).out
    assert "looplab run" in out
    assert "all is well" in lab("check", cwd=tmp_path / "mine").out
    assert "is not empty" in lab("init", "quickstart", "mine", cwd=tmp_path, code=2).err
    assert "available: act_ot, drone" in lab("init", "nothing", cwd=tmp_path, code=2).err


def test_a_shell_offers_runs_and_studies(lab) -> None:
    def offered(*words: str) -> list[str]:
        env = {"_LOOPLAB_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return lab(env=env).out.split()

    assert offered("looplab", "show", "") == ["BEST", "LATEST"]
    lab.queue("train.lr@set=0.3")
    lab("run")
    first, second = (run.name for run in lab.runs())
    assert offered("looplab", "show", "") == ["BEST", "LATEST", second, first]
    assert offered("looplab", "logs", first[:4]) == [first]
    assert offered("looplab", "show", "--study", "t") == ["toy"]
    assert offered("looplab", "sta") == ["status", "stage"]
