"""Python functions as trainers: by name, and by value as source."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import looplab
from looplab.trainkit.call import load_function

SCRIPT = """
import math
from math import sqrt as root
import looplab
from looplab import Float, LabError, trainkit

SCALE = 2.0

def shape(x):
    return SCALE * abs(x)

def train(config):
    trainkit.log({{"loss": 9.0}}, step=1)
    return {{"loss": root(shape(config["lr"] - 0.25)) + math.sin(0)}}

HOLDER = object()

def bad(config):
    return {{"loss": HOLDER}}

def closed():
    depth = 3
    return lambda config: depth

if __name__ == "__main__":
    common = dict(base={{"lr": 0.1}}, knobs={{"lr": Float(0.01, 1.0)}}, metric="loss", goal="min",
                  slots={{"count": 2, "gpus": "none", "cores": "none"}}, budget={{"runs": 4}},
                  proposers=[{{"search": "random"}}])
    study = looplab.create_study({folder!r}, "toy", trainer=train, **common)
    result = study.run()
    print([run.status for run in study.runs], study.best.objective < 9)
    for wrong in (bad, closed()):
        try:
            looplab.create_study({folder!r}, "toy", trainer=wrong, **common)
        except LabError as error:
            print(error)
"""


def test_a_function_of_a_script_is_run_by_value_in_processes_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    folder = tmp_path / "lab"
    script.write_text(SCRIPT.format(folder=str(folder)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    statuses, bad, closed = done.stdout.strip().splitlines()
    assert statuses == "['ok', 'ok', 'ok', 'ok'] True"
    assert "bad uses HOLDER, a object" in bad
    assert "lambda" in closed
    source = (folder / "trainers/train.py").read_text()
    assert source.index("SCALE = 2.0") < source.index("def shape") < source.index("def train")
    assert "from math import sqrt as root" in source
    assert "Float" not in source  # which the function does not use
    study = looplab.open(folder).study()
    assert all("loss" in run.summary()["metrics"] for run in study.runs)


def test_a_function_of_a_module_in_the_lab_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mytrainer.py").write_text("def train(config):\n    return config['lr'] ** 2\n")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import looplab, mytrainer
        study = looplab.create_study({str(tmp_path)!r}, "toy", trainer=mytrainer.train, base={{"lr": 0.5}},
            knobs={{"lr": looplab.Float(0.1, 1.0)}}, metric="loss", goal="min", budget={{"runs": 1}},
            slots={{"count": 1, "gpus": "none", "cores": "none"}})
        study.run()
        print(study.best.objective)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.25"
    assert "mytrainer:train" in (tmp_path / "lab.yaml").read_text()
    assert not (tmp_path / "trainers").exists()


def test_a_function_can_be_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from __future__ import annotations\ndef f(x):\n    return x + 1\n")
    assert load_function(f"{tmp_path}/one.py:f")(1) == 2
