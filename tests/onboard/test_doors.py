"""What a person meets who brings a script that does not work yet: each trouble has a name and a way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.e2e.conftest import COMMAND

from looplab.cli import onboarding
from looplab.errors import LabError
from looplab.onboard.scripts import trainers_in

OPTIONS = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\n"
SEED = "p.add_argument('--seed', type=int, default=1)\n"
PARSE = "a = p.parse_args()\n"
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ENV["PATH"])
    return tmp_path


def refused(*words: str) -> str:
    """Return why `looplab init` does not take these words."""
    try:
        assert onboarding.wants(words), "taken for a recipe"
        onboarding.init(words, None, None, None, False)
    except LabError as error:
        assert not Path("lab.yaml").exists()
        return str(error)
    pytest.fail("it was taken")


# -- words that are not a script


def test_a_wrong_path_names_the_nearest_scripts(folder: Path) -> None:
    for name in ("train.py", "models.py", "tools/train_gan.py", "tests/test_train.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(OPTIONS + PARSE)
    assert refused("trian.py") == "there is no script trian.py (did you mean train.py, or tools/train_gan.py?)"
    assert "tools/train_gan.py" in refused("train_gann.py")
    assert "did you mean train.py" in refused("python", "nothing_like_it.py")
    assert refused("./train") == "there is no script ./train (looplab init ./train.py)"


def test_a_notebook_must_be_converted(folder: Path) -> None:
    (folder / "Train.ipynb").write_text("{}")
    assert "jupyter nbconvert --to script Train.ipynb, then looplab init Train.py" in refused("Train.ipynb")


def test_a_folder_lists_its_scripts(folder: Path) -> None:
    for name in ("src/train.py", "src/finetune.py", "src/model.py", "src/__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(OPTIONS + PARSE)
    for words in (("src",), ("python", "src")):
        assert "which script? (looplab init src/train.py, or src/finetune.py)" in refused(*words)
    assert trainers_in(folder) == ["src/train.py", "src/finetune.py"]


def test_an_empty_folder_has_no_script(folder: Path) -> None:
    assert "there is no script in ." in refused(".")
    assert "nor any other in" in refused("train.py")


def test_other_languages_are_started_by_a_lab_file_of_ones_own(folder: Path) -> None:
    (folder / "train.jl").write_text("x = 1\n")
    for words in (("train.jl",), ("julia", "train.jl")):
        assert 'launch.command: [julia, train.jl, "{flags}"]' in refused(*words)


def test_an_unknown_interpreter_is_named(folder: Path) -> None:
    (folder / "train.py").write_text(OPTIONS + PARSE)
    assert "there is no interpreter python2.4 on this machine (use python" in refused("python2.4", "train.py")


def test_a_recipe_is_still_a_recipe(folder: Path) -> None:
    assert not onboarding.wants(["quickstart", "mine"])
    assert not onboarding.wants(["nothing"])
    assert not onboarding.wants(["https://example.org/lab.git"])


# -- scripts that cannot be read


def test_a_syntax_error_is_shown_with_its_line(folder: Path) -> None:
    (folder / "train.py").write_text("import os\ndef f(:\n")
    assert f"SyntaxError in {folder}/train.py, line 2" in refused("train.py")


def test_a_missing_package_is_named_with_the_command_that_installs_it(folder: Path) -> None:
    (folder / "train.py").write_text("import flashy_kernels\nflashy_kernels.run()\n")
    assert "the package flashy_kernels is not installed" in (said := refused("train.py"))
    assert "pip install flashy_kernels" in said


def test_a_missing_package_is_mentioned_although_the_options_could_be_read(folder: Path, capsys: Any) -> None:
    (folder / "train.py").write_text("import flashy_kernels\n" + OPTIONS + SEED + PARSE)
    onboarding.init(["train.py"], None, None, None, False)
    shown = capsys.readouterr().out
    assert "it does not start: the package flashy_kernels is not installed" in shown
    assert "next: looplab try" in shown.lower()


def test_a_script_that_asks_on_stdin_cannot_be_read(folder: Path) -> None:
    (folder / "train.py").write_text("k = int(input('How many neighbours [5]: ') or 5)\nprint('accuracy:', k)\n")
    assert "it asks for input, but a run has no stdin" in refused("train.py")


def test_what_a_script_needs_is_shown_as_a_command(folder: Path) -> None:
    (folder / "train.py").write_text(OPTIONS + "p.add_argument('--data', required=True)\n" + PARSE)
    assert "train.py needs data (pass it: looplab init train.py --data …)" in refused("train.py")
    (folder / "fit.py").write_text(OPTIONS + "p.add_argument('table')\n" + PARSE)
    assert "looplab init fit.py TABLE" in refused("fit.py")


def test_a_script_without_a_seed_is_told(folder: Path, capsys: Any) -> None:
    (folder / "train.py").write_text(OPTIONS + PARSE + "print('val_loss:', a.lr)\n")
    onboarding.init(["train.py"], None, None, None, False)
    assert "seed: none found; without one, runs cannot be repeated or judged" in capsys.readouterr().out


def test_a_lab_is_not_overwritten(folder: Path) -> None:
    (folder / "train.py").write_text(OPTIONS + SEED + PARSE)
    onboarding.init(["train.py"], None, None, None, True)
    before = (folder / "lab.yaml").read_text()
    with pytest.raises(LabError, match=r"lab.yaml already exists .*`looplab try` runs it"):
        onboarding.init(["train.py"], None, None, None, True)
    assert (folder / "lab.yaml").read_text() == before


def test_a_package_is_named_after_its_folder(folder: Path) -> None:
    (folder / "tiny").mkdir()
    (folder / "tiny/__main__.py").write_text(OPTIONS + SEED + PARSE)
    onboarding.init(["python", "-m", "tiny"], None, None, None, True)
    assert "study: tiny\n" in (folder / "lab.yaml").read_text()


def test_a_flag_that_takes_true_or_false_does_not_swallow_the_next_flag(folder: Path) -> None:
    from looplab.onboard.base import ScriptSetting
    from looplab.onboard.typed import given_values

    settings = [ScriptSetting("do_warmup", "bool", False, boolean="value"), ScriptSetting("lr", "float", 0.1)]
    assert given_values(["--do_warmup", "--lr", "2"], settings)[0] == {"do_warmup": True, "lr": 2.0}
    assert given_values(["--do_warmup", "false", "--lr", "2"], settings)[0] == {"do_warmup": False, "lr": 2.0}


def test_a_recipe_beside_a_script_mentions_the_script(folder: Path, capsys: Any) -> None:
    onboarding.suggest_scripts(folder)
    assert capsys.readouterr().out == ""
    (folder / "train.py").write_text(OPTIONS + PARSE)
    onboarding.suggest_scripts(folder)
    assert "looplab init train.py" in capsys.readouterr().out


# -- scripts that fail when they run

FAILING = {
    "gpu": (
        "p.add_argument('--device', default='cuda')\n",
        "raise RuntimeError('No CUDA GPUs are available')",
        "it needs a GPU, but finds none",
    ),
    "network": (
        "",
        "import urllib.request\nurllib.request.urlopen('http://data.example.invalid/train.csv')",
        "it needs the network",
    ),
    "memory": ("", "x = [0] * (1 << 62)", "memory of this machine was not enough"),
    "stdin": ("", "input('go on? ')", "it asks for input, but a run has no stdin (it printed: go on?)"),
    "exists": ("", "import os\nos.makedirs(os.path.dirname(os.path.abspath(__file__)))", "already exists"),
    "exception": ("", "assert a.lr > 1, 'lr is too small'", "AssertionError: lr is too small (train.py:"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAILING)
def test_a_failed_try_says_why_and_what_to_do(folder: Path, kind: str) -> None:
    option, code, said = FAILING[kind]
    (folder / "train.py").write_text(OPTIONS + SEED + option + PARSE + code + "\n")
    onboarding.init(["train.py"], None, None, None, True)
    done = _looplab(folder, "try", "--json")
    assert done.returncode == 1
    [run] = json.loads(done.stdout)["runs"]
    assert (run["status"], run["diagnosis"]["kind"]) == ("failed", kind)
    assert said in run["diagnosis"]["what"]


@pytest.mark.slow
def test_a_script_that_measures_nothing_is_told_how_to(folder: Path) -> None:
    (folder / "train.py").write_text(OPTIONS + SEED + PARSE + "print('all done')\n")
    onboarding.init(["train.py"], None, None, None, True)
    done = _looplab(folder, "try")
    assert done.returncode == 1
    assert "looplab found no metrics (its last line: all done)" in done.stdout
    assert "print `name: value`" in done.stdout


@pytest.mark.slow
def test_a_study_whose_base_fails_says_why(folder: Path) -> None:
    (folder / "train.py").write_text(OPTIONS + SEED + PARSE + "import flashy_kernels\n")
    onboarding.init(["train.py"], "val_loss", "min", None, True)
    done = _looplab(folder, "run")
    assert done.returncode == 1
    assert "failed: the package flashy_kernels is not installed for this Python; install it: pip" in done.stdout


def _looplab(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), *words],
        cwd=folder,
        env=ENV,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
