"""Other people's trainers, unedited: from the script to the first measured run, beside four other tools.

    python benchmarks/onboard.py [--quick] [--python PYTHON] [--peers guild,wandb,optuna,ray] [TRAINER…]

The shelf (tests/onboard/shelf) has trainers in many styles, each with its documented objective. PYTHON has their
packages (group `trainers` of pyproject.toml); trainers whose packages are missing are left out. Per trainer and tool:

- looplab: `looplab init COMMAND --objective M`, `looplab run`. Where its first run does not measure the objective, but
  looplab names another spelling, `looplab objective`, `looplab remeasure` and `looplab resume` follow, and count; where
  a line of YAML by hand would do, it is added and counted. Beside it, without the objective: `looplab try --yes`, and
  whether the objective that it takes is the documented one.
- Guild AI: `guild run SCRIPT FLAG=VALUE …`. Where that does not run, or has no value of the objective, a guild.yml with
  the script, its flags and a pattern for the objective is written and counted.
- W&B sweep: the sweep server is not there, so no agent can run. The lines of sweep.yaml are counted, and the command
  that an agent would start (`${args}`) is run offline; it counts if the script logs to W&B.
- Optuna and Ray Tune: one knob, one trial; the wrapper that calls the script in a subprocess and takes the objective
  from its output with a regex is written, counted and run.

A tool has a trainer "measured" if the script runs unchanged with a chosen value of a knob, and the tool ends up with a
value of the objective; "unedited" if commands alone did it, without a correction of a file by hand. The wrappers of
Optuna and Ray, and the YAML of W&B, count as lines written, not as corrections. Guild, Optuna and Ray have environments
of their own in ~/.cache/looplab/onboard, which are made when they are missing (not with --quick) and borrow the
trainers' packages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHELF = Path(__file__).parents[1] / "tests/onboard/shelf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "looplab/onboard"
QUICK = (
    *("argparse_options", "shell_wrapper", "timestamp_outputs", "env_vars", "json_config", "click_cli", "keras_prints"),
    *("toml_config", "typer_cli", "absl_flags", "writes_source", "wandb_sweep_defaults"),
)
"""Trainers of a second or two."""
QUICK_PEERS = ("argparse_options",)
"""Those of them that other tools run, that are judged, and whose objective is guessed, with --quick."""
PATIENCE_S = 600.0
SEEDS = 3
"""Runs of the base until its verdict."""
PACKAGES = {"guild": ["guildai"], "optuna": ["optuna"], "ray": ["ray[tune]"]}
PEERS = {"guild": "Guild AI", "wandb": "W&B sweep", "optuna": "Optuna + subprocess", "ray": "Ray Tune + subprocess"}


@dataclass(frozen=True)
class Knob:
    """What a user of another tool would write down for a trainer: one knob, and how the script takes it."""

    name: str
    low: float
    high: float
    by: str = "flag"
    """`flag`: --x 1, `equals`: --x=1, `word`: x=1, `env`, `wandb`, or the name of a config file."""
    pattern: str | None = None
    """Finds the objective in the output; None: its name, then a number."""

    @property
    def middle(self) -> float | int:
        whole = isinstance(self.low, int)
        return int((self.low + self.high) // 2) if whole else float(f"{(self.low * self.high) ** 0.5:.3g}")


KNOBS = {
    "absl_flags": Knob("learning_rate", 1e-3, 0.1),
    "argparse_mixed": Knob("learning_rate", 1e-3, 0.1),
    "argparse_options": Knob("lr", 1e-3, 0.1),
    "argparse_tensorboard": Knob("lr", 1e-3, 0.1),
    "click_group": Knob("learning-rate", 1e-3, 0.3),
    "click_cli": Knob("alpha", 1e-5, 0.1, pattern=r"mean auc: ([0-9.]+)"),
    "ddp_local_rank": Knob("lr", 1e-4, 0.01),
    "dotenv_file": Knob("LEARNING_RATE", 0.01, 0.5, "env"),
    "env_vars": Knob("LR", 0.01, 0.5, "env"),
    "fire_cli": Knob("learning_rate", 1e-4, 0.01),
    "getopt_yaml": Knob("optimizer.lr", 1e-3, 0.1, "conf/exp.yaml"),
    "hf_trainer": Knob("learning_rate", 1e-4, 0.01),
    "hydra_app": Knob("optim.lr", 1e-4, 0.01, "word"),
    "ignores_flags": Knob("lr", 1e-4, 0.1),
    "json_config": Knob("optimizer.args.lr", 1e-3, 0.1, "config.json"),
    "json_report": Knob("lr", 0.05, 1.0, pattern=r'"mrr": ([0-9.]+)'),
    "keras_prints": Knob("learning_rate", 1e-4, 0.01),
    "lightgbm_valid": Knob("learning_rate", 0.01, 0.3),
    "lightning_cli": Knob("model.lr", 1e-4, 0.01),
    "mnist_example": Knob("lr", 0.1, 1.0, pattern=r"Accuracy: (\d+)/"),
    "nanogpt_globals": Knob("learning_rate", 1e-3, 0.01, "equals"),
    "no_seed": Knob("lr", 1e-3, 0.1),
    "optuna_study": Knob("n-trials", 2, 6),
    "sb3": Knob("learning-rate", 1e-4, 0.01),
    "shell_wrapper": Knob("eta", 0.1, 1.0),
    "simple_parsing": Knob("lr", 1e-3, 0.01),
    "sklearn_final_score": Knob("n_estimators", 5, 15, pattern=r"([0-9.]+)"),
    "subparsers_package": Knob("eta", 0.02, 1.0),
    "timestamp_outputs": Knob("alpha", 0.01, 0.5),
    "toml_config": Knob("em.reg_covar", 1e-5, 1e-3, "settings.toml"),
    "typer_cli": Knob("lr", 1e-3, 0.1, pattern=r"Validation RMSE: ([0-9.]+)"),
    "tyro_union": Knob("optimizer.lr", 1e-3, 0.3),
    "tyro_cleanrl_ppo": Knob("learning-rate", 1e-4, 0.01),
    "wandb_argparse": Knob("lr", 1e-3, 0.1),
    "wandb_sweep": Knob("learning_rate", 0.01, 0.3, "wandb"),
    "wandb_sweep_defaults": Knob("eta0", 1e-3, 0.5, "wandb"),
    "writes_source": Knob("reassignment_ratio", 1e-3, 0.1),
    "xgboost_evals": Knob("eta", 0.03, 0.5),
    "yaml_config": Knob("train.optimizer.lr", 1e-3, 0.1, "configs/base.yaml"),
}
"""Without an entry (asks on stdin, constants in the code), the script would have to be edited for the other tools."""


@dataclass(frozen=True)
class Trainer:
    """A trainer of the shelf."""

    name: str
    about: Mapping[str, Any]

    @property
    def command(self) -> list[str]:
        """As its user types it for a short training."""
        return [*self.about["command"], *self.about["quick_run"].get("args", [])]

    @property
    def is_sweep(self) -> bool:
        return (SHELF / self.name / "sweep.yaml").exists()

    def copy_to(self, folder: Path) -> Path:
        """Copy it, without its description, with the changes of a short training."""
        copy = folder / self.name
        shutil.copytree(SHELF / self.name, copy, ignore=shutil.ignore_patterns("about.json", "__pycache__"))
        for file, pairs in self.about["quick_run"].get("replace", {}).items():
            for old, new in pairs:
                if old:  # without an old text, it stands for what a sweep agent would write
                    (copy / file).write_text((copy / file).read_text().replace(old, new, 1))
        return copy


@dataclass
class Outcome:
    """What became of a trainer with a tool."""

    ok: bool = False
    """Whether the tool has a value of the objective."""
    why: str = ""
    """Why not."""
    commands: int = 0
    lines: int = 0
    """Lines that a person wrote."""
    edited: bool = False
    """Whether the first commands did not do."""
    seconds: float | None = None
    verdict_seconds: float | None = None
    asked: bool = False
    """Whether looplab was asked to guess the objective."""
    guess: str | None = None
    """The objective that was taken without being told."""


class Failed(Exception):
    """A command did not end well."""

    def __init__(self, why: str, output: str = "") -> None:
        super().__init__(why)
        self.output = output


class Bench:
    """Runs the tools."""

    def __init__(self, python: str) -> None:
        self.python = python
        self.judged = True
        """Whether looplab's runs go on to the first verdict."""

    def environment(self, trainer: Trainer, **more: str) -> dict[str, str]:
        """The environment of somebody who has activated the trainers' environment."""
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("LOOPLAB_", "WANDB_"))},
            "PATH": f"{Path(self.python).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "offline",
            **trainer.about["quick_run"].get("env", {}),
            **more,
        }

    def call(self, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> str:
        try:
            done = subprocess.run(
                list(command), cwd=folder, env=dict(env), capture_output=True, text=True, errors="replace",
                timeout=PATIENCE_S, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failed(f"still running after {PATIENCE_S:.0f} s") from None
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise Failed(lines[-1][:150] if lines else f"exit code {done.returncode}", done.stdout + done.stderr)
        return done.stdout + done.stderr

    def looplab(self, trainer: Trainer, folder: Path) -> Outcome:
        """Type the two commands; then look at what the ledger has."""
        outcome = Outcome()
        env = self.environment(trainer)
        words = ["sweep.yaml"] if trainer.is_sweep else trainer.command
        told = ["--objective", trainer.about["objective"], f"--{trainer.about['goal']}"]
        program = [sys.executable, "-m", "looplab"]
        runs = str(SEEDS if trainer.about["seed"] and self.judged else 1)
        began = time.time()
        try:
            outcome.commands = 1
            self.call([*program, "init", *words, *([] if trainer.is_sweep else told)], folder, env)
            outcome.commands = 2
            corrected = 0.0
            try:
                self.call([*program, "run", "--runs", runs], folder, env)
            except Failed as error:
                named = re.search(r"but '([^']+)' was|did you mean (\S+?)[ ?]", error.output)
                if named is None:
                    raise
                outcome.commands += 3
                self.call([*program, "objective", named[1] or named[2], told[-1]], folder, env)
                self.call([*program, "remeasure"], folder, env)
                corrected = time.time()
                self.call([*program, "resume"], folder, env)
            first = "select min(ended) from runs where objective is not null"
            verdict = "select min(\"at\") from verdicts where verdict <> 'crash'"
            ended, judged = (
                _only_value(json.loads(self.call([*program, "query", sql, "--json"], folder, env)))
                for sql in (first, verdict)
            )
            outcome.ok = ended is not None
            outcome.seconds = None if ended is None else max(ended, corrected) - began
            outcome.verdict_seconds = None if judged is None else judged - began
            outcome.why = "" if outcome.ok else "the objective was not measured"
        except Failed as error:
            outcome.why = str(error)
        return outcome

    def guess(self, trainer: Trainer, folder: Path) -> str | None:
        """Return the objective that `looplab try --yes` takes; None: none."""
        env = self.environment(trainer)
        program = [sys.executable, "-m", "looplab"]
        try:
            self.call([*program, "init", *trainer.command], folder, env)
            self.call([*program, "try", "--yes"], folder, env)
        except Failed:
            return None
        found = re.search(r"^objective: *\{?\s*metric: *([^\n,}]+)", (folder / "lab.yaml").read_text(), re.MULTILINE)
        return found[1].strip(" '\"") if found else None

    def guild(self, trainer: Trainer, folder: Path) -> Outcome:
        """`guild run`, and the scalars that it has afterwards; if that is not enough, with a guild.yml."""
        outcome = Outcome()
        knob = KNOBS.get(trainer.name)
        if knob is None or knob.by not in ("flag", "equals"):
            return Outcome(why="takes no flags: needs an edit")
        home = folder.parent / "guild-home"
        home.mkdir()
        env = self.environment(trainer, GUILD_HOME=str(home))
        program = str(CACHE / "guild/bin/guild")
        words = [word for word in trainer.about["command"] if word not in ("python", "-m")]
        quick = trainer.command[len(trainer.about["command"]) :]
        flags = {name.lstrip("-"): value for name, value in _pairs(quick)} | {knob.name: str(knob.middle)}
        values = [f"{name}={value}" for name, value in flags.items()]
        attempts = [[program, "run", "-y", *words, *values], [program, "run", "-y", "train", *values]]
        began = time.time()
        for command in attempts:
            if command is attempts[1]:
                (folder / "guild.yml").write_text(_guildfile(trainer, knob, words, flags))
                outcome.edited, outcome.lines = True, len((folder / "guild.yml").read_text().splitlines())
            outcome.commands += 1
            try:
                self.call(command, folder, env)
                outcome.seconds = time.time() - began
                output = self.call([program, "runs", "info", "--json"], folder, env)
                scalars = _names(json.loads(output[output.index("{") :]).get("scalars", {}))
            except (Failed, ValueError) as error:
                outcome.why = str(error)
                continue
            wanted = (trainer.about["objective"], "objective")
            outcome.ok = any(_same(name.rpartition("#")[2], one) for name in scalars for one in wanted)
            outcome.why = "" if outcome.ok else "ran, but the objective is not among its scalars"
            if outcome.ok:
                break
        return outcome

    def wandb(self, trainer: Trainer, folder: Path) -> Outcome:
        """The command that a sweep agent would start."""
        knob = KNOBS.get(trainer.name)
        if knob is None or knob.by not in ("flag", "equals", "word", "wandb"):
            return Outcome(why="takes no flags: needs an edit")
        outcome = Outcome(commands=2)  # wandb sweep, wandb agent
        program = folder / "sweep.yaml"
        if not program.exists():
            program.write_text(_sweep(trainer, knob))
            outcome.lines = len(program.read_text().splitlines())
        env = self.environment(trainer)
        words = []
        if knob.by == "wandb":  # what the agent leaves for wandb.init
            values = trainer.about["quick_run"].get("replace", {}).get("config-defaults.yaml")
            text = values[0][1] if values else f"{knob.name}: {{value: {knob.middle}}}\n"
            (folder / "params.yaml").write_text(text)
            env["WANDB_SWEEP_PARAM_PATH"] = str(folder / "params.yaml")
        else:
            words = [f"{knob.name}={knob.middle}" if knob.by == "word" else f"--{knob.name}={knob.middle}"]
        began = time.time()
        try:
            self.call([*trainer.command, *words], folder, env)
            outcome.seconds = time.time() - began
            outcome.ok = any(folder.rglob("*.wandb"))
            outcome.why = "" if outcome.ok else "does not log to W&B: needs an edit"
        except Failed as error:
            outcome.why = str(error)
        return outcome

    def wrapper(self, tool: str, write: Callable[[Trainer, Knob, Path], str]) -> Callable[[Trainer, Path], Outcome]:
        """A tool that needs a Python file which calls the script."""

        def run(trainer: Trainer, folder: Path) -> Outcome:
            knob = KNOBS.get(trainer.name)
            if knob is None or knob.by == "wandb":
                return Outcome(why="a subprocess cannot change its values: needs an edit")
            outcome = Outcome(commands=1)
            code = write(trainer, knob, folder)
            (folder / "search.py").write_text(code)
            outcome.lines = sum(1 for line in code.splitlines() if line.strip())
            env = self.environment(trainer, RAY_AIR_NEW_OUTPUT="0", RAY_USAGE_STATS_ENABLED="0")
            began = time.time()
            try:
                output = self.call([str(CACHE / tool / "bin/python"), "search.py"], folder, env)
                outcome.seconds = time.time() - began
                outcome.ok = re.search(r"^best: -?[0-9.e+-]+$", output, re.MULTILINE) is not None
                outcome.why = "" if outcome.ok else "no value"
            except Failed as error:
                outcome.why = str(error)
            return outcome

        return run


def _call_lines(trainer: Trainer, knob: Knob, folder: Path) -> list[str]:
    """The lines of a wrapper that start the script and find the objective."""
    lines = []
    command = [repr(word) for word in trainer.command]
    options = f"cwd={str(folder)!r}, capture_output=True, text=True"
    if knob.by in ("flag", "equals", "word"):
        dashes = "" if knob.by == "word" else "--"
        command += (
            [f'"{dashes}{knob.name}", str(value)'] if knob.by == "flag" else [f'f"{dashes}{knob.name}={{value}}"']
        )
    elif knob.by == "env":
        options += f', env={{**os.environ, "{knob.name}": str(value)}}'
    else:
        leaf = knob.name.rpartition(".")[2]
        lines += [
            f"file = pathlib.Path({str(folder / knob.by)!r})",
            f"old = re.compile(r'(\\b{leaf}\"?\\s*[:=]\\s*)[-+.\\de]+')",
            'file.write_text(old.sub(rf"\\g<1>{value}", file.read_text(), count=1))',
        ]
    pattern = knob.pattern or _pattern(trainer.about["objective"])
    return [
        *lines,
        f"done = subprocess.run([{', '.join(command)}], {options})",
        "if done.returncode != 0:",
        "    raise RuntimeError(done.stderr[-500:])",
        f"found = re.findall({pattern!r}, done.stdout + done.stderr)",
    ]


def optuna_wrapper(trainer: Trainer, knob: Knob, folder: Path) -> str:
    suggest = "suggest_int" if isinstance(knob.low, int) else "suggest_float"
    body = [
        f'value = trial.{suggest}("{knob.name}", {knob.low}, {knob.high}, log=True)',
        *_call_lines(trainer, knob, folder),
        "return float(found[-1])",
    ]
    lines = ["import os, pathlib, re, subprocess", "import optuna", "", "def objective(trial):"]
    lines += [f"    {line}" for line in body]
    return "\n".join([
        *lines, "", f'study = optuna.create_study(direction="{trainer.about["goal"]}imize")',
        "study.optimize(objective, n_trials=1)", 'print("best:", study.best_value)', "",
    ])  # fmt: skip


def ray_wrapper(trainer: Trainer, knob: Knob, folder: Path) -> str:
    space = (
        f"tune.lograndint({knob.low}, {knob.high})"
        if isinstance(knob.low, int)
        else f"tune.loguniform({knob.low}, {knob.high})"
    )
    body = [
        'value = config["value"]', *_call_lines(trainer, knob, folder), 'tune.report({"objective": float(found[-1])})',
    ]  # fmt: skip
    lines = ["import os, pathlib, re, subprocess", "from ray import tune", "", "def train(config):"]
    lines += [f"    {line}" for line in body]
    return "\n".join([
        *lines, "", "tuner = tune.Tuner(", "    train,", f'    param_space={{"value": {space}}},',
        f'    tune_config=tune.TuneConfig(metric="objective", mode="{trainer.about["goal"]}", num_samples=1),', ")",
        'print("best:", tuner.fit().get_best_result().metrics["objective"])', "",
    ])  # fmt: skip


def _sweep(trainer: Trainer, knob: Knob) -> str:
    goal = {"min": "minimize", "max": "maximize"}[trainer.about["goal"]]
    args = "${args_no_hyphens}" if knob.by == "word" else "${args}"
    return (
        f"program: {trainer.about['command'][-1]}\nmethod: bayes\nmetric:\n  name: {trainer.about['objective']}\n"
        f"  goal: {goal}\nparameters:\n  {knob.name}:\n    min: {knob.low}\n    max: {knob.high}\n"
        f'    distribution: log_uniform_values\ncommand: [{", ".join(trainer.command)}, "{args}"]\n'
    )


def _guildfile(trainer: Trainer, knob: Knob, words: Sequence[str], flags: Mapping[str, str]) -> str:
    """A guild.yml that names the script, its flags, and how the objective is printed."""
    main = " ".join([words[0].removesuffix(".py"), *words[1:]])
    start = f"  exec: {' '.join(words)} ${{flag_args}}\n" if words[0] == "bash" else f"  main: {main}\n"
    pattern = (knob.pattern or _pattern(trainer.about["objective"])).replace("'", "''")
    listed = "".join(f"    {name}: {value}\n" for name, value in flags.items())
    return f"train:\n{start}  flags-dest: args\n  flags:\n{listed}  output-scalars:\n    objective: '.*?{pattern}'\n"


def _pattern(objective: str) -> str:
    words = re.split(r"[\s_'-]+", objective.rpartition("/")[2])
    return r"[\s_'s-]*".join(map(re.escape, words)) + r"[^\w\n-]{0,20}(-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)"


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Options and their values."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return list(zip(split[::2], split[1::2], strict=True))


def _names(scalars: Any) -> list[str]:
    """Names of scalars, which Guild groups by file."""
    if not isinstance(scalars, dict):
        return []
    return [*scalars, *(name for value in scalars.values() for name in _names(value))]


def _same(one: str, other: str) -> bool:
    """Return whether two names differ only in signs and case."""
    plain = [re.sub(r"[^a-z0-9]+", "", re.sub(r"'s\b", "", name.lower())) for name in (one, other)]
    return plain[0] == plain[1]


def _only_value(rows: Any) -> float | None:
    """Return the only value of a query's answer."""
    while isinstance(rows, dict | list) and rows:
        rows = next(iter(rows.values())) if isinstance(rows, dict) else rows[0]
    return float(rows) if isinstance(rows, int | float) else None


def prepare(peer: str, python: str, make: bool) -> str | None:
    """Make the environment of a peer if there is none; return why it cannot be used."""
    if peer not in PACKAGES:
        return None
    folder = CACHE / peer
    version = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if peer == "guild" and tuple(map(int, version.split("."))) >= (3, 12):
        return f"guildai 0.9.0 imports `imp`, which Python {version} does not have"
    done = folder / f"complete-{version}"
    if not done.exists():
        if not make:
            return "no environment yet: call it once without --quick"
        print(f"making an environment with {', '.join(PACKAGES[peer])} …", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            [python, "-m", "venv", str(folder)],
            [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *PACKAGES[peer]],
        ):
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                return f"pip: {result.stderr.strip().splitlines()[-1][:150]}"
        done.touch()
    where = "import sys; print(*(p for p in sys.path if p.endswith('site-packages')), sep='\\n')"
    paths = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "trainers.pth").write_text(paths)  # behind its own packages
    return None


def _imports(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return round(statistics.median(there), 2) if there else None


def trainers(python: str, names: Sequence[str], quick: bool) -> list[Trainer]:
    """The trainers that are meant to work, and whose packages are there."""
    found = []
    for folder in sorted(path.parent for path in SHELF.glob("*/about.json")):
        about = json.loads((folder / "about.json").read_text())
        if (names and folder.name not in names) or (quick and not names and folder.name not in QUICK):
            continue
        if about["exit_code"] != 0 or about["objective"] is None:
            continue
        missing = [name for name in about["requires"] if not _imports(python, name)]
        if missing:
            print(f"{folder.name:22} left out: no {', '.join(missing)}", flush=True)
            continue
        found.append(Trainer(folder.name, about))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the trainers' packages")
    parser.add_argument("--peers", default=",".join(PEERS), help="tools to compare with; empty: none")
    parser.add_argument("names", nargs="*", metavar="TRAINER")
    options = parser.parse_args()
    bench = Bench(options.python)
    tools: dict[str, Callable[[Trainer, Path], Outcome]] = {"looplab": bench.looplab}
    unused = {}
    for peer in filter(None, options.peers.split(",")):
        if options.quick and peer in ("guild", "ray"):
            unused[peer] = "left out with --quick: it starts for longer than most trainers run"
            continue
        problem = prepare(peer, options.python, make=not options.quick)
        if problem:
            unused[peer] = problem
        elif peer == "guild":
            tools[peer] = bench.guild
        elif peer == "wandb":
            tools[peer] = bench.wandb
        else:
            tools[peer] = bench.wrapper(peer, optuna_wrapper if peer == "optuna" else ray_wrapper)
    shelf = trainers(options.python, options.names, options.quick)
    results: dict[str, dict[str, Outcome]] = {tool: {} for tool in tools}
    for trainer in shelf:
        whole = bench.judged = not options.quick or trainer.name in QUICK_PEERS
        for tool, run in tools.items():
            if tool != "looplab" and not whole:
                continue
            with tempfile.TemporaryDirectory(prefix="looplab-onboard-") as scratch:
                outcome = results[tool][trainer.name] = run(trainer, trainer.copy_to(Path(scratch)))
            if tool == "looplab" and whole and not trainer.is_sweep:
                with tempfile.TemporaryDirectory(prefix="looplab-onboard-") as scratch:
                    outcome.asked = True
                    outcome.guess = bench.guess(trainer, trainer.copy_to(Path(scratch)))
            shown = f"{outcome.seconds:6.1f} s" if outcome.ok and outcome.seconds else "       -"
            verdict = "ok" if outcome.ok and not outcome.edited else "edited" if outcome.ok else "no"
            notes = [outcome.why, f"guessed {outcome.guess}" if outcome.guess else ""]
            print(f"{trainer.name:22} {tool:8} {verdict:6} {shown}  {'; '.join(filter(None, notes))}", flush=True)
    figures = _report(shelf, results, unused)
    print(json.dumps(figures))


def _report(shelf: Sequence[Trainer], results: Mapping[str, Mapping[str, Outcome]], unused: Mapping[str, str]) -> dict:
    """Print the table, and return the figures."""
    ours = results["looplab"]
    print(f"\n{'':22} {'measured':>9} {'unedited':>9} {'lines':>6} {'commands':>9} {'seconds':>8} {'× looplab':>10}")
    figures: dict[str, Any] = {"shelf": len(shelf)}
    for tool, outcomes in results.items():
        good = {name: outcome for name, outcome in outcomes.items() if outcome.ok}
        unedited = sum(1 for one in good.values() if not one.edited)
        lines, commands = (_median([getattr(one, key) for one in good.values()]) for key in ("lines", "commands"))
        seconds = _median([one.seconds for one in good.values()])
        pairs = [
            one.seconds / ours[name].seconds  # type: ignore[operator]
            for name, one in good.items()
            if one.seconds and ours[name].ok and ours[name].seconds
        ]
        ratio = _median(pairs)
        columns = (f"{len(good)} of {len(outcomes)}", unedited, lines, commands, seconds, ratio)
        widths = (9, 9, 6, 9, 8, 10)
        cells = (f"{column!s:>{width}}" for column, width in zip(columns, widths, strict=True))
        print(f"{PEERS.get(tool, tool):22} {' '.join(cells)}")
        prefix = "" if tool == "looplab" else f"{tool}_"
        figures |= {
            f"{prefix}measured_share": round(len(good) / max(1, len(outcomes)), 3),
            f"{prefix}unedited_share": round(unedited / max(1, len(outcomes)), 3),
            f"{prefix}commands_median": commands,
            f"{prefix}{'yaml_lines' if tool == 'looplab' else 'lines'}_median": lines,
            f"{prefix}seconds_to_first_run_median": seconds,
        }
        if tool != "looplab":
            figures[f"{prefix}x_looplab"] = ratio
    for peer, problem in unused.items():
        print(f"{PEERS[peer]:22} not run: {problem}")
        figures[f"{peer}_not_run"] = problem
    asked = [trainer for trainer in shelf if ours[trainer.name].asked]  # no guess is a wrong one
    hits = [trainer for trainer in asked if _same(ours[trainer.name].guess or "", trainer.about["objective"])]
    figures["seconds_to_first_verdict_median"] = _median([one.verdict_seconds for one in ours.values()])
    figures["guessed_objective_share"] = round(len(hits) / max(1, len(asked)), 3)
    print(f"first verdict of looplab after {figures['seconds_to_first_verdict_median']} s (median)")
    print(f"without being told, `looplab try --yes` took the documented objective in {len(hits)} of {len(asked)}")
    return figures


if __name__ == "__main__":
    main()
