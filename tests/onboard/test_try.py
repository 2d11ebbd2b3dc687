"""`looplab try`: one run of somebody's script, what it measured, and what to know about it."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PATIENCE_S
from tests.e2e.conftest import COMMAND, Terminal, until

from looplab.onboard.objective import KeptBest, kept_best, rank_objectives
from looplab.onboard.trial import MeasuredMetric, full_run_seconds, share_done
from looplab.onboard.written import WrittenFile, explain_written

HEAD = """\
import argparse, os, random, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
random.seed(args.seed)
"""
TRAIN = """\
for epoch in range(1, args.epochs + 1):
    loss = 1 / epoch + 0.01 * random.random() + (args.lr - 0.1) ** 2
    print(f"epoch {epoch}: train loss {loss:.6f}, val loss {loss + 0.1:.6f}", flush=True)
"""
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


class Project:
    """A folder with a training script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, code: str, name: str = "train.py") -> None:
        (self.folder / name).write_text(code)

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(COMMAND), *words],
            cwd=self.folder,
            env=ENV,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))

    @property
    def lab(self) -> str:
        return (self.folder / "lab.yaml").read_text()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    found = Project(tmp_path)
    found.write(HEAD + TRAIN)
    return found


@pytest.mark.slow
def test_from_a_script_to_an_objective_in_a_pipe(project: Project) -> None:
    shown = project("init", "train.py", "--try")
    assert "$ python train.py --lr 0.1 --epochs 8 --seed 1" in shown
    assert "ok in " in shown
    assert "peak memory " in shown
    row = next(line for line in shown.splitlines() if line.startswith("val_loss"))
    assert row.split()[:3] == ["val_loss", "printed", "8"]
    assert row.endswith("%")  # its noise
    assert "likely objective: val_loss (min; validation, 8 points)" in shown
    assert "next: looplab objective val_loss --min" in shown
    assert "objective: {" not in project.lab.replace("# objective: {", "")

    again = project("try", "--seed", "2")
    assert "seed 1 → 2: different numbers than 0001-" in again
    same = project.json("try", "--seed", "2")
    assert same["compared"]["result"] == "same config, same numbers"
    assert same["next"] == "looplab objective val_loss --min"

    chosen = project("objective", "val_loss")
    assert "objective: val_loss (min), written to lab.yaml" in chosen
    value = next(metric["last"] for metric in same["runs"][-1]["metrics"] if metric["name"] == "val_loss")
    assert f"({same['runs'][-1]['run']}) measured: {value:.6g}" in chosen
    shown = project("try", "--seed", "2")
    assert f"objective: val_loss (min) {value:.6g}\nnext: looplab run\n" in shown
    assert "did you mean val_loss" in project("objective", "val_los")
    shown = project("try", "--seed", "2")
    assert "the objective 'val_los' was not measured; did you mean val_loss?" in shown
    assert "next: looplab run" not in shown


@pytest.mark.slow
def test_everything_that_is_said_is_in_the_json(project: Project) -> None:
    project("init", "train.py")
    found = project.json("try", "--set", "epochs=4", "--seeds", "2", "--yes")
    one, two = found["runs"]
    assert (one["seed"], two["seed"]) == (1, 2)
    assert [(metric["name"], metric["source"], metric["points"]) for metric in one["metrics"]] == [
        ("train_loss", "printed", 4),
        ("val_loss", "printed", 4),
    ]
    assert one["command"][:4] == ["python", "train.py", "--lr", "0.1"]
    assert one["status"] == "ok"
    assert one["peak_memory_mb"] > 1
    assert one["full_run_s"] == pytest.approx(2 * one["seconds"])  # 8 epochs instead of 4
    assert one["wrote"] == []
    assert one["diagnosis"] is None
    assert found["compared"] == {"with": one["run"], "result": "difference"}
    assert found["candidates"][0]["metric"] == "val_loss"
    assert found["objective"] == {"metric": "val_loss", "goal": "min"}
    assert found["next"] == "looplab run"
    assert "objective:\n  metric: val_loss" in project.lab or "objective: {metric: val_loss" in project.lab


@pytest.mark.slow
def test_a_long_run_is_stopped_and_shows_what_it_has_measured(project: Project) -> None:
    project.write(HEAD + TRAIN.replace("args.epochs + 1", "3") + "time.sleep(10_000)\n")
    project("init", "train.py")
    # Nothing measured before the limit would be a slow machine's fault, so the limit waits for the script.
    found = project.json("try", "--time", "20s")
    run = found["runs"][0]
    assert run["status"] == "timeout"
    assert run["ended_by"] == "SIGTERM"
    assert [metric["points"] for metric in run["metrics"]] == [2, 2]
    assert run["full_run_s"] == pytest.approx(4 * run["seconds"])  # epoch 2 of 8
    assert found["candidates"][0]["metric"] == "val_loss"


@pytest.mark.slow
def test_a_script_that_ignores_sigterm_is_killed_and_that_is_said(project: Project) -> None:
    project.write(HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAIN + "time.sleep(10_000)\n")
    project("init", "train.py")
    lab = project.folder / "lab.yaml"
    lab.write_text(lab.read_text().replace("launch:\n", "launch:\n  grace: 1\n"))
    shown = project("try", "--time", "15s")
    assert "stopped after 15.0s: the metrics so far" in shown
    assert "it ignored SIGTERM and was killed after" in shown


@pytest.mark.slow
def test_a_change_that_the_script_ignores_is_noticed_although_it_is_printed(project: Project) -> None:
    project.write(
        HEAD
        + "for epoch in range(1, 4):\n"
        + '    print(\'{"epoch": %d, "lr": %g, "val_loss": %.6f}\' % (epoch, args.lr, 1 / epoch + random.random()))\n'
    )
    project("init", "train.py")
    project("try")
    shown = project("try", "--set", "lr=0.5")
    assert "lr 0.1 → 0.5: the same numbers as 0001-" in shown
    assert "The change does not reach the trainer" in shown


@pytest.mark.slow
def test_files_outside_the_run_folder_are_named(project: Project) -> None:
    project.write(
        HEAD
        + TRAIN
        + "here = os.path.dirname(os.path.abspath(__file__))\n"
        + "open(os.path.join(here, 'best_params.py'), 'w').write(f'LOSS = {loss}')\n"
    )
    project("init", "train.py")
    shown = project("try")
    assert "it wrote outside its run folder: best_params.py" in shown
    assert "best_params.py is code" in shown
    assert "{out_dir}" in shown


@pytest.mark.slow
def test_what_looplab_prints_to_a_file_is_not_taken_for_the_trainers(project: Project) -> None:
    project("init", "train.py")
    words = [str(COMMAND), "try", "--time", "300"]
    with open(project.folder / "try.log", "w") as file:
        done = subprocess.run(words, cwd=project.folder, env=ENV, stdout=file, stderr=file, timeout=PATIENCE_S)
    shown = (project.folder / "try.log").read_text()
    assert done.returncode == 0, shown
    assert "ok in " in shown
    assert "outside its run folder" not in shown
    assert "--time: 'soon' is not a duration; write 90, 30m, 10h or 1h30m" in project("try", "--time", "soon", code=2)


@pytest.mark.slow
def test_metric_files_beside_the_lab_are_found(project: Project) -> None:
    project.write(
        HEAD + "os.makedirs('logs', exist_ok=True)\nopen('logs/metrics.csv', 'w').write('step,val_loss\\n1,0.5\\n')\n"
    )
    project("init", "train.py")
    lab = project.folder / "lab.yaml"
    lab.write_text("\n".join(line for line in lab.read_text().split("\n") if "cwd: run" not in line))
    shown = project("try", "--yes")
    assert "written to lab.yaml: launch.cwd: run" in shown
    assert "objective: val_loss (min)" in shown


@pytest.mark.slow
def test_a_script_without_a_seed_is_repeated_as_it_is(project: Project) -> None:
    project.write(
        HEAD.replace('parser.add_argument("--seed", type=int, default=1)\n', "").replace("random.seed(args.seed)\n", "")
        + TRAIN
    )
    project("init", "train.py")
    assert project.json("try", "--seeds", "2")["compared"]["result"] == "same config, other numbers"
    assert "no seed reaches the trainer" in project("try", "--seed", "2", code=2)


@pytest.mark.slow
def test_a_seed_that_is_a_constant_of_the_script_is_set(project: Project) -> None:
    code = (HEAD + TRAIN).replace('parser.add_argument("--seed", type=int, default=1)\n', "")
    code = code.replace("random.seed(args.seed)", "random.seed(1337 + int(args.lr))")
    project.write(code)
    assert "seed: a constant of the script, which with_config.py sets" in project("init", "train.py")
    first = project("try", "--yes")
    assert "$ python with_config.py seed=1 train.py --lr 0.1" in first
    assert "no seed reaches the trainer" not in first
    assert "seed 1 → 2: different numbers than" in project("try", "--seed", "2")
    assert "over 3 seeds" in project("run", "--runs", "3")
    assert (project.folder / "train.py").read_text() == code


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_shows_what_it_has_measured(project: Project) -> None:
    project.write(HEAD + TRAIN + "time.sleep(10_000)\n")
    project("init", "train.py")
    terminal = Terminal([str(COMMAND), "try"], project.folder, ENV)
    try:
        until(
            lambda: any("epoch 8" in log.read_text() for log in project.folder.glob("outputs/*/*/record/train.log")),
            "the last epoch",
        )
        terminal.type(b"\x03")
        assert terminal.ended() == 130
        assert ": the metrics so far" in terminal.shown
        assert "val_loss" in terminal.shown
    finally:
        terminal.clear_away()
    assert not [
        pid for pid in os.listdir("/proc") if pid.isdigit() and str(project.folder).encode() in _command_line(pid)
    ]


def _command_line(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "written"), [(b"\n", "val_loss"), (b"7\n2\n", "train_loss"), (b"n\n", None)])
def test_a_terminal_asks_for_the_objective(project: Project, typed: bytes, written: str | None) -> None:
    project("init", "train.py")
    terminal = Terminal([str(COMMAND), "try"], project.folder, ENV)
    try:
        until(lambda: "n: none" in terminal.shown or terminal.process.poll() is not None, "the question")
        assert "Which metric should be optimised?" in terminal.shown
        terminal.type(typed)
        assert terminal.ended() == 0
        shown = terminal.shown
    finally:
        terminal.clear_away()
    if written is None:
        assert "no objective set" in shown
        assert "\nobjective" not in project.lab
    else:
        assert f"objective: {written} (min), written to lab.yaml" in shown
        assert written in project.lab


@pytest.mark.slow
def test_a_killed_try_does_not_confuse_the_next_one(project: Project) -> None:
    project.write(HEAD + "print('val_loss: 0.5', flush=True)\ntime.sleep(10_000 if not os.path.exists('go') else 0)\n")
    project("init", "train.py")
    lab = project.folder / "lab.yaml"
    lab.write_text("\n".join(line for line in lab.read_text().split("\n") if "cwd: run" not in line))
    first = subprocess.Popen([str(COMMAND), "try"], cwd=project.folder, env=ENV, stdout=subprocess.DEVNULL)
    try:
        until(
            lambda: any("val_loss" in log.read_text() for log in project.folder.glob("outputs/*/*/record/train.log")),
            "the first value",
        )
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    (project.folder / "go").touch()
    [run] = project.json("try")["runs"]
    assert (run["status"], run["metrics"][0]["name"]) == ("ok", "val_loss")
    assert run["run"].startswith("0002-")


# -- the objective is guessed


def measured(name: str, points: int = 5) -> MeasuredMetric:
    return MeasuredMetric(
        name=name,
        source="CSV",
        file=None,
        points=points,
        first=1.0,
        last=0.5,
        every_steps=1,
        per_minute=1,
        noise=None,
    )


@pytest.mark.parametrize(
    ("names", "metric", "goal"),
    [
        (["train_loss", "val_loss", "lr"], "val_loss", "min"),
        (["loss", "test_loss", "test_accuracy"], "test_accuracy", "max"),
        (
            ["charts/SPS", "losses/value_loss", "charts/episodic_return", "losses/entropy"],
            "charts/episodic_return",
            "max",
        ),
        (["rollout/ep_len_mean", "rollout/ep_rew_mean", "time/fps"], "rollout/ep_rew_mean", "max"),
        (["bic", "train_ll", "held-out log-likelihood"], "held-out log-likelihood", "max"),
        (["Test ELBO", "rec", "kl"], "Test ELBO", "max"),
        (["val/negative_log_likelihood", "train/loss"], "val/negative_log_likelihood", "min"),
        (["loss", "best_loss"], "loss", "min"),
        (["auc", "auc_std", "epoch"], "auc", "max"),
        (["0/f1-score", "accuracy", "macro_avg/f1-score"], "accuracy", "max"),
        (["Last_reward", "Average_reward"], "Average_reward", "max"),
    ],
)
def test_the_likeliest_objective_comes_first(names: list[str], metric: str, goal: str) -> None:
    best = rank_objectives([measured(name) for name in names])[0]
    assert (best.metric, best.goal) == (metric, goal)


def test_what_the_script_keeps_the_best_of_decides() -> None:
    metrics = [measured("val_accuracy"), measured("val_loss")]
    assert rank_objectives(metrics)[0].metric == "val_accuracy"
    kept = kept_best([ast.parse("best = min(best, val_loss)")])
    assert rank_objectives(metrics, (), kept)[0].metric == "val_loss"
    assert (
        rank_objectives([measured("value")], (), kept_best([ast.parse("create_study(direction='maximize')")]))[0].goal
        == "max"
    )


@pytest.mark.parametrize(
    ("code", "words", "goal"),
    [
        ("if val_acc > best_acc: best_acc = val_acc", {"val", "acc"}, "max"),
        ("if losses['val'] < self.best_val_loss: pass", {"losses", "val"}, "min"),
        ("if best_f1 <= f1: pass", {"f1"}, "max"),
        ("best = max(best, reward)", {"reward"}, "max"),
        ("EarlyStopping(monitor='val_loss', mode='min')", {"val", "loss"}, "min"),
        ("TrainingArguments(metric_for_best_model='eval_accuracy')", {"eval", "acc"}, None),
    ],
)
def test_what_a_script_keeps_the_best_of_is_read_from_its_source(code: str, words: set[str], goal: Any) -> None:
    found = kept_best([ast.parse(code)])
    words = {{"losses": "loss"}.get(word, word) for word in words}
    assert KeptBest(frozenset(words), goal) in found


@pytest.mark.parametrize(
    ("code", "goal"),
    [
        ("scores = cross_val_score(model, X, y)\nprint(scores.mean())", "max"),
        ("print(model.score(X, y))", "max"),
        ("result = mean_squared_error(y, model.predict(X))\nprint(result)", "min"),
        ("print(f'{np.mean(losses):.3f}')", "min"),
        ("print('start')\nprint(accuracy_score(y, p))", "max"),
    ],
)
def test_the_goal_of_a_number_without_a_name_is_that_of_what_is_printed(code: str, goal: str) -> None:
    (guess,) = rank_objectives([measured("last_line")], (), kept_best([ast.parse(code)]))
    assert (guess.metric, guess.goal, guess.why) == ("last_line", goal, "the number in the last printed line")


def test_the_goal_of_a_name_that_says_nothing_is_where_its_curve_goes() -> None:
    for first, last, points, goal in ((50.0, 90.0, 30, "max"), (90.0, 50.0, 30, "min"), (50.0, 90.0, 2, "max")):
        for name, expected in (("Avg", goal), ("loss", "min"), ("error", "min")):
            (guess,) = rank_objectives([replace(measured(name, points), first=first, last=last)])
            assert guess.goal == expected
            assert guess.is_goal_known == (points > 2 or name != "Avg")


def test_settings_that_a_script_prints_are_not_offered() -> None:
    names = ["hidden-size", "val_loss", "weight_decay"]
    guesses = rank_objectives([measured(name) for name in names], ["model.hidden_size", "weight-decay"])
    assert [guess.metric for guess in guesses] == ["val_loss"]


def test_the_index_of_a_loop_is_not_offered() -> None:
    index = replace(measured("e", 5), first=0.0, last=4.0, is_count=True)
    assert [guess.metric for guess in rank_objectives([index, measured("l", 5)])] == ["l"]


def test_a_learning_rate_in_the_last_print_does_not_tell_the_goal() -> None:
    (guess,) = rank_objectives([measured("last_line", 1)], (), kept_best([ast.parse("print(abs(lr - 0.03) + x)")]))
    assert not guess.is_goal_known


def test_a_goal_that_nothing_tells_is_marked_as_a_guess() -> None:
    known = {
        guess.metric: guess.is_goal_known
        for guess in rank_objectives([measured("last_line", 1), measured("accuracy", 1), measured("x", 9)])
    }
    assert known == {"last_line": False, "accuracy": True, "x": True}


# -- how long a full run takes


@pytest.mark.parametrize(
    ("log", "step", "wanted", "share"),
    [
        ("Epoch 3/12\nloss 0.5", None, {}, 0.25),
        ("epoch 1/4 step 90/100", None, {}, 0.25),
        ("step 1,000/10,000", None, {}, 0.1),
        ("Epoch: 0, Loss\nEpoch: 1, Loss", 1, {"epochs": 8}, 0.25),
        ("epoch 1\nepoch 2", 2, {"epochs": 8}, 0.25),
        ("loss 0.5", 500, {"total-timesteps": 2000}, 0.25),
        ("loss 0.5", 5000, {"total-timesteps": 2000}, None),
        ("loss 0.5", 40, {"epochs": 100}, None),  # steps are not epochs
        ("", None, {"epochs": 8}, None),
    ],
)
def test_the_share_that_is_done_is_read_from_the_log(log: str, step: Any, wanted: dict[str, float], share: Any) -> None:
    assert share_done(log, step, wanted) == share


def test_a_full_run_is_longer_by_the_settings_of_its_length() -> None:
    assert full_run_seconds(10.0, 1.0, {"epochs": 2}, {"epochs": 20}) == 100.0
    assert full_run_seconds(10.0, 0.5, {"epochs": 20}, {"epochs": 20}) == 20.0
    assert full_run_seconds(10.0, None, {"epochs": 2}, {"epochs": 20}) is None


def test_many_files_are_named_by_their_folder() -> None:
    files = [WrittenFile(f"runs/exp1/{i}.pt", True) for i in range(9)] + [WrittenFile("results.csv", False)]
    text = explain_written(files, in_run_dir=False)
    assert "runs/ (9 files), results.csv" in text
    assert "results.csv existed before" in text
    assert "launch.cwd: run" in text


@pytest.mark.parametrize(
    "code",
    [
        "parser.add_argument('--monitor', default='val_f1')",
        "config = {'early_stopping_metric': 'val_f1'}",
        "def fit(model, metric_for_best_model='val/f1'): pass",
        "MAIN_METRIC = 'val_f1'",
    ],
)
def test_the_metric_that_a_script_names_is_its_objective(code: str) -> None:
    metrics = [measured("val_acc"), measured("val_f1"), measured("val_loss")]
    assert rank_objectives(metrics, kept=kept_best([ast.parse(code)]))[0].metric == "val_f1"


def test_what_a_script_sums_up_at_its_end_is_its_objective() -> None:
    metrics = [measured("val_acc"), measured("val_dice"), measured("best_val_dice", points=1)]
    assert rank_objectives(metrics)[0].metric == "val_dice"


@pytest.mark.slow
def test_results_in_a_format_that_is_not_read_are_named(project: Project) -> None:
    project.write(HEAD + "import pickle\npickle.dump({'val_loss': [0.5]}, open('results.pkl', 'wb'))\n")
    project("init", "train.py")
    assert "(it wrote results.pkl, a format that looplab does not read)" in project("try", code=1)
    assert project.json("try", code=1)["runs"][0]["unread"] == ["results.pkl"]


PRINTS_AND_WRITES = """
import os
os.makedirs('logs', exist_ok=True)
with open('logs/metrics.csv', 'w') as table:
    print('step,val_loss', file=table)
    for step in range(5):
        print(step, 1 / (1 + args.lr * step), sep=',', file=table)
print('val_loss:', 0.5, 'mode_a:', 1, 'mode_b:', 2)
print('val_loss:', 0.5, 'mode_a:', 1, 'mode_b:', 2)
"""


@pytest.mark.slow
def test_a_table_outside_the_run_folder_counts_more_than_what_is_printed(project: Project) -> None:
    project.write(HEAD + PRINTS_AND_WRITES)
    project("init", "train.py")
    lab = re.sub(r"  cwd: run.*\n(  links:.*\n)?", "", project.lab)
    (project.folder / "lab.yaml").write_text(lab)
    shown = project("try", "--yes")
    assert "written to lab.yaml: launch.cwd: run" in shown
    row = next(line for line in shown.splitlines() if line.startswith("val_loss"))
    assert row.split()[1:3] == ["CSV", "5"]
