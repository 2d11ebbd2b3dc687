"""`looplab check --fix`: what it mends, what it leaves to people, and that it leaves no lab broken."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S

from looplab.config.files import read_config
from looplab.config.lab import load_lab
from looplab.errors import LabError
from looplab.ledger.ledger import open_for_reading
from looplab.ledger.study import StudyLedger
from looplab.loop.session import check_study
from looplab.loop.setup import RunOptions
from looplab.onboard.labfile import make_lab
from looplab.onboard.mend import find_mending
from looplab.onboard.mend_files import Mending
from looplab.onboard.readers import read_interface
from looplab.onboard.scripts import find_script

SHELF = Path(__file__).parent / "shelf"
COMMAND = Path(sys.executable).with_name("looplab")
OPTIONS = """
p.add_argument("--lr", type=float, default=0.001, help="learning rate")
p.add_argument("--hidden", type=int, default=64)
p.add_argument("--seed", type=int, default=1)
"""
LAB = """\
# My lab.
study: s
launch:
  command: ["{python}", train.py, "{flags}"]
  config: {as: flags, case: as_written}
base: base.json
knobs:
  # how fast
  lr: {type: float, low: 1.0e-05, high: 0.1, log: true}  # the rate
  hidden: {choices: [32, 64, 128]}
seed: seed
proposers: [{queue: ""}]
"""
BASE = {"lr": 0.001, "hidden": 64, "seed": 1}


def write_script(folder: Path, options: str, name: str = "train.py") -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(
        f"import argparse\np = argparse.ArgumentParser()\n{options}\na = p.parse_args()\nprint('loss:', vars(a))\n"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_script(tmp_path, OPTIONS)
    (tmp_path / "lab.yaml").write_text(LAB.replace('proposers: [{queue: ""}]\n', ""))
    write_base(tmp_path, BASE)
    return tmp_path


def write_base(folder: Path, config: Any) -> None:
    (folder / "base.json").write_text(json.dumps(config, indent=2) + "\n")


def edit_lab(folder: Path, old: str, new: str) -> None:
    file = folder / "lab.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def look(folder: Path, *, ask: bool = True) -> Mending:
    lab = load_lab(folder)
    return find_mending(lab, list(lab.studies.values()), ask=ask)


def fix(folder: Path) -> Mending:
    """Mend a lab; mending it again changes nothing, and the lab passes its checks."""
    found = look(folder)
    found.apply(folder)
    lab = load_lab(folder)
    for study in lab.studies.values():
        check_study(lab, study, RunOptions(informal=True))
    again = look(folder)
    assert not again.fixes
    assert again.doubts == found.doubts
    return found


def python_with(package: str) -> str:
    """Return a Python that has a package: this one, or that on PATH; the test is skipped if there is none."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    python = shutil.which("python")
    if python is None or subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"{package} is not installed")
    return python


def content(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}


def test_a_lab_that_fits_its_script_is_left_alone(folder: Path) -> None:
    before = content(folder)
    found = fix(folder)
    assert not found.fixes
    assert not found.doubts
    assert content(folder) == before


def test_a_renamed_setting_is_renamed_everywhere(folder: Path) -> None:
    write_script(folder, OPTIONS.replace("--lr", "--learning-rate"))
    edit_lab(
        folder,
        "seed: seed",
        'seed: seed\nconstraints: ["lr < hidden"]\nmodes: {fast: [lr@mul=10]}\nflags: {steps: lr}',
    )
    edit_lab(folder, '"{flags}"]', '"{flags}"]\n  env: {RATE: "{config.lr}"}')
    found = fix(folder)
    assert {one.file for one in found.fixes} == {"lab.yaml", "base.json"}
    assert all("learning-rate" in one.why for one in found.fixes)
    lab = load_lab(folder)
    study = lab.study(None)
    assert list(study.knobs) == ["learning-rate", "hidden"]
    assert study.constraints == ["`learning-rate` < hidden"]
    assert study.modes == {"fast": ["learning-rate@mul=10"]}
    assert study.flags == {"steps": "learning-rate"}
    assert study.launch.env == {"RATE": "{config.learning-rate}"}
    assert list(read_config(folder / "base.json")) == ["learning-rate", "hidden", "seed"]
    text = (folder / "lab.yaml").read_text()
    assert "# My lab." in text
    assert "  # how fast\n" in text
    assert "# the rate" in text


def test_only_the_lines_that_change_are_written(folder: Path) -> None:
    edit_lab(
        folder,
        "seed: seed",
        "seed:   'seed'   # fixed\nproposers:  [{search: random}]\nobjective:\n    metric: x\n    goal: min",
    )
    before = (folder / "lab.yaml").read_text().splitlines()
    write_script(folder, OPTIONS.replace("--hidden", "--hidden-size"))
    found = fix(folder)
    after = (folder / "lab.yaml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [("  hidden: {choices: [32, 64, 128]}", "  hidden-size: {choices: [32, 64, 128]}")]
    assert ("-   hidden: {choices: [32, 64, 128]}", "+   hidden-size: {choices: [32, 64, 128]}") in [
        one.diff for one in found.fixes
    ]


def test_several_candidates_are_named_and_nothing_is_changed(folder: Path) -> None:
    before = content(folder)
    two = OPTIONS.replace('"--hidden", type=int', '"--hidden-size", type=int')
    write_script(folder, two + 'p.add_argument("--hidden-dim", type=int, default=64)\n')
    found = look(folder)
    assert not found.fixes
    assert found.doubts == ("hidden is no longer a setting of train.py; it may be hidden-size, hidden-dim now",)
    assert {**content(folder), "train.py": ""} == {**before, "train.py": ""}


def test_another_default_is_a_doubt(folder: Path) -> None:
    write_script(folder, OPTIONS.replace('"--hidden", type=int, default=64', '"--hidden-size", type=int, default=65'))
    found = look(folder)
    assert not found.fixes
    assert "hidden-size" in found.doubts[0]
    assert "another type or default" in found.doubts[0]


def test_a_setting_that_is_gone_is_removed(folder: Path) -> None:
    write_script(folder, OPTIONS.replace('p.add_argument("--hidden", type=int, default=64)\n', ""))
    fix(folder)
    assert list(load_lab(folder).study(None).knobs) == ["lr"]
    assert read_config(folder / "base.json") == {"lr": 0.001, "seed": 1}


def test_a_setting_that_a_constraint_uses_is_not_removed(folder: Path) -> None:
    edit_lab(folder, "seed: seed", "seed: seed\nconstraints: [hidden > 3]")
    write_script(folder, OPTIONS.replace('p.add_argument("--hidden", type=int, default=64)\n', ""))
    found = look(folder)
    assert not found.fixes
    assert "names it elsewhere" in found.doubts[0]


def test_a_script_that_takes_unknown_flags_loses_no_setting(folder: Path) -> None:
    write_script(folder, OPTIONS.replace('p.add_argument("--hidden", type=int, default=64)\n', ""))
    script = folder / "train.py"
    script.write_text(script.read_text().replace("a = p.parse_args()", "a, rest = p.parse_known_args()"))
    assert look(folder) == Mending((), (), {})


def test_a_new_required_setting_is_named(folder: Path) -> None:
    write_script(folder, OPTIONS + 'p.add_argument("--data", required=True)\np.add_argument("out")\n')
    found = look(folder)
    assert not found.fixes
    assert [text.split(";")[0] for text in found.doubts] == ["train.py needs data now", "train.py needs out now"]
    edit_lab(folder, '"{flags}"]', '"{flags}", --data, d, "{run_dir}"]')
    assert look(folder) == Mending((), (), {})


def test_a_base_without_a_knob_gets_the_default_of_the_script(folder: Path) -> None:
    write_base(folder, {"lr": 0.001, "seed": 1})
    found = fix(folder)
    assert read_config(folder / "base.json") == {"lr": 0.001, "seed": 1, "hidden": 64}
    assert "64 is the default of train.py" in found.fixes[0].why


@pytest.mark.parametrize(
    ("value", "knob", "expected"),
    [
        (0.5, "lr", {"type": "float", "low": 1e-05, "high": 0.5, "log": True}),
        (1e-7, "lr", {"type": "float", "low": 1e-07, "high": 0.1, "log": True}),
        (100, "hidden", {"choices": [32, 64, 100, 128]}),
    ],
)
def test_a_range_is_widened_to_the_value_of_the_base(folder: Path, value: Any, knob: str, expected: Any) -> None:
    write_base(folder, {**BASE, knob: value})
    assert look(folder, ask=False).fixes
    fix(folder)
    assert load_lab(folder).study(None).knobs[knob] == expected
    assert "# the rate" in (folder / "lab.yaml").read_text()


@pytest.mark.parametrize(("value", "knob"), [(-1.0, "lr"), ("wide", "hidden"), (0.5, "hidden")])
def test_a_value_that_no_range_could_have_is_left_to_people(folder: Path, value: Any, knob: str) -> None:
    write_base(folder, {**BASE, knob: value})
    found = look(folder, ask=False)
    assert not found.fixes
    assert found.doubts[0].startswith(f"knob {knob}: ")


def test_the_seed_is_found_where_it_was_moved_to(folder: Path) -> None:
    edit_lab(folder, "config: {as: flags, case: as_written}", "config: file")
    write_base(folder, {"lr": 0.001, "hidden": 64, "train": {"random_seed": 1}})
    fix(folder)
    assert load_lab(folder).study(None).seed == "train.random_seed"
    write_base(folder, {"lr": 0.001, "hidden": 64, "a": {"seed": 1}, "b": {"seed": 2}})
    assert look(folder).doubts == ("seed: train.random_seed is not in the base configs; which of a.seed, b.seed?",)


def test_a_renamed_seed_stays_the_seed(folder: Path) -> None:
    write_script(folder, OPTIONS.replace("--seed", "--random-seed"))
    fix(folder)
    assert load_lab(folder).study(None).seed == "random-seed"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ('action="store_true"', False, {"booleans": "present"}),
        ("type=bool, default=True", True, {"booleans": "empty"}),
        ("type=lambda text: text == 'True', default=True", True, {"booleans": "value"}),
        ("action=argparse.BooleanOptionalAction, default=True", True, {}),
    ],
)
def test_bools_are_written_as_the_script_reads_them(
    folder: Path, option: str, value: bool, expected: dict[str, str]
) -> None:
    write_script(folder, OPTIONS + f'p.add_argument("--on", {option})\n')
    write_base(folder, {**BASE, "on": value})
    wrong = "value" if expected != {"booleans": "value"} else "present"
    edit_lab(folder, "case: as_written}", f"case: as_written, booleans: {wrong}}}")
    fix(folder)
    written = read_config(folder / "lab.yaml")["launch"]["config"]
    assert written == {"as": "flags", "case": "as_written", **expected}


def test_lists_and_case_are_written_as_the_script_reads_them(folder: Path) -> None:
    write_script(folder, OPTIONS + 'p.add_argument("--layer_sizes", type=int, nargs="+", default=[1])\n')
    write_base(folder, {**BASE, "layer_sizes": [1, 2]})
    edit_lab(folder, "config: {as: flags, case: as_written}", "config: flags")
    fix(folder)
    assert read_config(folder / "lab.yaml")["launch"]["config"] == {
        "as": "flags", "case": "as_written", "lists": "spread",
    }  # fmt: skip


def test_a_flag_that_is_written_in_another_way_gets_a_name(folder: Path) -> None:
    write_script(folder, OPTIONS.replace('"--lr"', '"-lr"'))
    fix(folder)
    config = {"as": "flags", "case": "as_written", "names": {"lr": "-lr"}}
    assert read_config(folder / "lab.yaml")["launch"]["config"] == config
    write_script(folder, OPTIONS.replace('p.add_argument("--lr", type=float, default=0.001, help="learning rate")', ""))
    fix(folder)
    assert "lr" not in str(read_config(folder / "lab.yaml")["launch"])
    assert list(load_lab(folder).study(None).knobs) == ["hidden"]


def test_a_script_that_was_moved_is_found(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "train.py").rename(folder / "src/train.py")
    (folder / "outputs/s").mkdir(parents=True)
    (folder / "outputs/s/train.py").write_text("")
    assert look(folder, ask=False).fixes[0].why == "train.py was moved to src/train.py"
    fix(folder)
    assert load_lab(folder).study(None).launch.command[1] == "src/train.py"
    (folder / "other").mkdir()
    (folder / "src/train.py").rename(folder / "other/train.py")
    (folder / "third").mkdir()
    (folder / "third/train.py").write_text("")
    assert look(folder).doubts == (
        "launch.command: src/train.py does not exist; which of other/train.py, third/train.py?",
    )


def test_an_unknown_command_is_not_spoken_of(folder: Path) -> None:
    edit_lab(folder, '["{python}", train.py, "{flags}"]', '["true", "{flags}"]')
    assert look(folder) == Mending((), (), {})


def test_a_lab_that_fails_its_checks_afterwards_is_put_back(folder: Path) -> None:
    write_script(folder, OPTIONS.replace("--lr", "--learning-rate"))
    edit_lab(folder, "seed: seed", "seed: seed\nconstraints: [hidden > 100]")
    before = content(folder)
    found = look(folder)
    assert found.fixes
    with pytest.raises(LabError, match="nothing was changed"):
        found.apply(folder)
    assert content(folder) == before


def test_every_study_of_a_lab_is_mended(folder: Path) -> None:
    text = (folder / "lab.yaml").read_text()
    body = text.partition("study: s\n")[2]
    (folder / "lab.yaml").write_text(f"{body}studies:\n- study: a\n- study: b\n  base: other.json\n")
    (folder / "other.json").write_text(json.dumps({**BASE, "hidden": 128}))
    write_script(folder, OPTIONS.replace("--lr", "--learning-rate"))
    fix(folder)
    assert read_config(folder / "other.json") == {"learning-rate": 0.001, "hidden": 128, "seed": 1}
    assert all("learning-rate" in study.knobs for study in load_lab(folder).studies.values())


@pytest.mark.long
def test_keys_of_hydra_are_renamed_with_its_config(tmp_path: Path) -> None:
    python = python_with("hydra")
    shutil.copytree(SHELF / "hydra_app", tmp_path, dirs_exist_ok=True)
    script = find_script([python, "train.py"], tmp_path)
    interface = read_interface(script)
    assert interface is not None
    for name, text in make_lab(script, interface).files.items():
        (tmp_path / name).write_text(text)
    assert look(tmp_path) == Mending((), (), {})
    model = tmp_path / "conf/model/mlp.yaml"
    model.write_text(model.read_text().replace("hidden: 32", "hidden_size: 32"))
    fix(tmp_path)
    knobs = load_lab(tmp_path).study(None).knobs
    assert "model.hidden_size" in knobs
    assert "model.hidden" not in knobs
    assert list(read_config(tmp_path / "train.base.json")["model"]) == ["name", "hidden_size", "init_scale"]


# -- as a person meets it


def looplab(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_check_says_what_fix_would_do_and_fix_does_it(folder: Path) -> None:
    write_base(folder, {**BASE, "lr": 0.5})
    told = looplab(folder, "check")
    assert told.returncode == 2
    assert "`looplab check --fix` would change lab.yaml: lr: the value in base.json is 0.5" in told.stdout
    before = content(folder)
    dry = looplab(folder, "check", "--fix", "--dry-run", "--json")
    assert content(folder) == before
    assert [one["file"] for one in json.loads(dry.stdout)["fixes"]] == ["lab.yaml"]
    assert json.loads(dry.stdout)["written"] == []
    done = looplab(folder, "check", "--fix")
    assert done.returncode == 0, done.stderr
    assert "high: 0.5" in done.stdout
    assert "written: lab.yaml\n" in done.stdout
    assert done.stdout.endswith("all is well\n")
    again = json.loads(looplab(folder, "check", "--fix", "--json").stdout)
    assert again["fixes"] == again["doubts"] == again["written"] == []
    assert again["studies"][0]["argv"]["base.json"][1:] == ["train.py", "--lr", "0.5", "--hidden", "64", "--seed", "1"]


@pytest.mark.long
def test_an_objective_that_no_run_measures_becomes_the_nearest_metric(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\n"
        + OPTIONS
        + "a = p.parse_args()\nfor step in range(1, 4):\n    print(f'step {step} val_loss: {a.lr / step} lr: 1')\n"
    )
    edit_lab(folder, "seed: seed", "seed: seed\nobjective: {metric: valid_loss, goal: min}")
    assert looplab(folder, "run", "--runs", "1").returncode == 1  # it measured no objective
    assert "would change lab.yaml: the last 1 run(s) measured val_loss" in looplab(folder, "check").stdout
    done = looplab(folder, "check", "--fix")
    assert done.returncode == 0, done.stderr
    objective = load_lab(folder).study(None).objective
    assert objective is not None
    assert objective.metric == "val_loss"
    assert json.loads(looplab(folder, "check", "--fix", "--json").stdout)["fixes"] == []
    assert looplab(folder, "remeasure").returncode == 0
    ledger = open_for_reading(load_lab(folder).ledger_path)
    assert [run.objective for run in StudyLedger(ledger, "s").runs()] == [0.001 / 3]
    ledger.close()
