"""The guides of docs/own-trainer.md and docs/coming-from.md: their commands are taken from the pages and run."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

import pytest
import typer.main
from tests.conftest import PATIENCE_S

from looplab.cli.app import app
from looplab.cli.main import expand_argv

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-trainer.md"
FOLDERS = (Path(__file__).parent / "shelf", Path(__file__).parent / "guides")
PYTHON = os.environ.get("LOOPLAB_SHELF_PYTHON", sys.executable)
"""An interpreter with the packages of the trainers."""
LOOPLAB = Path(sys.executable).with_name("looplab")
TOP = "Your own trainer"


@dataclass(frozen=True)
class Guide:
    """A section of the page and the trainer that its commands are run on."""

    section: str
    trainer: str


GUIDES = (
    Guide(TOP, "keras_prints"),
    Guide("CleanRL", "tyro_cleanrl_ppo"),
    Guide("nanoGPT", "nanogpt_globals"),
    Guide("Hugging Face Trainer", "hf_trainer"),
    Guide("Lightning", "lightning_trainer"),
    Guide("LightningCLI", "lightning_cli"),
    Guide("Hydra", "hydra_app"),
    Guide("W&B script", "wandb_argparse"),
    Guide("W&B sweep", "wandb_sweep"),
    Guide("Optuna script", "optuna_study"),
    Guide("Stable-Baselines3", "sb3"),
    Guide("XGBoost", "xgboost_evals"),
    Guide("LightGBM", "lightgbm_valid"),
    Guide("scikit-learn script", "sklearn_final_score"),
    Guide("Shell script", "shell_wrapper"),
)

RELEASED = {"RL Baselines3 Zoo"}
"""Sections that are run on a released package alone."""


def sections(page: Path) -> dict[str, list[tuple[str, str]]]:
    """The fenced blocks of each section, as pairs of language and text."""
    found: dict[str, list[tuple[str, str]]] = {}
    heading, language, lines = "", None, []
    for line in page.read_text().splitlines():
        if language is None and (match := re.fullmatch(r"#+ (.*)", line)):
            heading = match[1]
        elif match := re.fullmatch(r"```(\w*)", line):
            if language is None:
                language, lines = match[1], []
            else:
                found.setdefault(heading, []).append((language, "\n".join(lines)))
                language = None
        else:
            lines.append(line)
    return found


class Desk:
    """A folder with a trainer, and the commands that are typed in it."""

    def __init__(self, folder: Path, quick: dict) -> None:
        self.folder = folder
        self.quick = quick
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("LOOPLAB_", "WANDB_"))},
            "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder.parent),
            "WANDB_MODE": "offline",
            **quick.get("env", {}),
        }

    def type(self, words: list[str]) -> str:
        """Run a command of the page, with the arguments of a short training, and a single run of a study."""
        if words[:2] == ["looplab", "init"] and not words[2].endswith(".yaml"):
            at = words.index("--objective") if "--objective" in words else len(words)
            words = [*words[:at], *self.quick.get("args", []), *words[at:]]
        if words == ["looplab", "run"]:
            words = [*words, "--runs", "1"]
        done = subprocess.run(
            [str(LOOPLAB), *words[1:]],
            cwd=self.folder, env=self.env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def follow(self, blocks: list[tuple[str, str]]) -> None:
        """Type the commands of a section; what it shows as YAML is added to the lab file."""
        for language, text in blocks:
            if language == "yaml":
                with open(self.folder / "lab.yaml", "a") as file:
                    file.write(f"{text}\n")
                continue
            for line in text.splitlines():
                self.type(shlex.split(line))

    def objective(self) -> float | None:
        """The objective of the best run."""
        best = json.loads(self.type(["looplab", "status", "--json"]))["studies"][0]["best"]
        return best and best["objective"]


def desk(trainer: str, scratch: Path) -> Desk:
    source = next(folder / trainer for folder in FOLDERS if (folder / trainer).is_dir())
    about = json.loads((source / "about.json").read_text())
    for package in about["requires"]:
        found = subprocess.run(
            [PYTHON, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"]
        )
        if found.returncode != 0:
            pytest.skip(f"{package} is not installed")
    folder = scratch / trainer
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("about.json", "__pycache__"))
    quick = about["quick_run"]
    for file, pairs in quick.get("replace", {}).items():
        for old, new in pairs:
            if old:  # a pair without old text stands for what a sweep agent would write
                (folder / file).write_text((folder / file).read_text().replace(old, new, 1))
    return Desk(folder, quick)


def test_every_section_with_commands_is_run() -> None:
    assert [name for name in sections(PAGE) if name not in RELEASED] == [guide.section for guide in GUIDES]
    assert set(sections(PAGE)) >= RELEASED


@pytest.mark.long
@pytest.mark.parametrize("guide", GUIDES, ids=[guide.trainer for guide in GUIDES])
def test_a_guide_leads_to_a_measured_run(guide: Guide, tmp_path: Path) -> None:
    here = desk(guide.trainer, tmp_path)
    before = {path: path.read_bytes() for path in here.folder.rglob("*.py")}
    here.follow(sections(PAGE)[guide.section])
    assert here.objective() is not None
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_the_two_commands_of_the_readme_are_enough(tmp_path: Path) -> None:
    english, chinese = (sections(ROOT / name) for name in ("README.md", "README.zh.md"))
    assert list(english.values()) == list(chinese.values())
    here = desk("keras_prints", tmp_path)
    here.follow([block for blocks in english.values() for block in blocks])
    assert here.objective() is not None


# -- the programs of others, as they were released


def installed(*packages: str) -> bool:
    """Whether the interpreter of the trainers can import these."""
    return subprocess.run([PYTHON, "-c", f"import {', '.join(packages)}"], capture_output=True).returncode == 0


def version_of(package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def install(packages: list[str], site: Path, *, alone: bool = True) -> None:
    """Install packages from the registry into a folder; skip if it cannot be reached.

    Args:
        alone: Without what they require, which the interpreter of the trainers has.
    """
    flags = ["--quiet", "--no-compile", "--target", str(site)]
    flags += ["--no-deps", "--ignore-requires-python"] if alone else []
    done = subprocess.run([PYTHON, "-m", "pip", "install", *flags, *packages], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{packages[0]} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")


def fetch_from_sdist(package: str, version: str, file: str, folder: Path) -> Path:
    """Extract one file of a source distribution; nothing of it is built. Skip if it cannot be reached."""
    name = package.replace("-", "_")
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    asked = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    index = os.environ.get("PIP_INDEX_URL", asked.stdout.strip())
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/{package}/", timeout=60) as page:
            links = re.findall(r'href="([^"#]+)', page.read().decode())
        link = next(html.unescape(link) for link in links if link.endswith(f"{name}-{version}.tar.gz"))
        with urllib.request.urlopen(urljoin(page.url, link), timeout=PATIENCE_S) as archive:
            data = io.BytesIO(archive.read())
    except (OSError, ValueError, StopIteration) as error:
        pytest.skip(f"{package} {version} cannot be fetched: {error}")
    with tarfile.open(fileobj=data) as archive:
        source = archive.extractfile(f"{name}-{version}/{file}")
        assert source is not None
        (folder / Path(file).name).write_bytes(source.read())
    return folder / Path(file).name


@pytest.mark.long
def test_the_guide_of_cleanrl_works_on_a_released_file(tmp_path: Path) -> None:
    """CleanRL 1.2.0 from PyPI, unchanged, with the Gym of its time."""
    if not installed("distutils", "tensorboard", "torch"):
        pytest.skip("it needs torch, tensorboard and a Python with distutils")
    site, folder = tmp_path / "site", tmp_path / "cleanrl"
    install(["cleanrl==1.2.0", "gym==0.23.1", "gym-notices==0.0.8", "pygame"], site)
    folder.mkdir()
    shutil.copy(site / "cleanrl" / "ppo.py", folder)
    here = Desk(folder, {"args": ["--total-timesteps", "1024"], "env": {"PYTHONPATH": str(site)}})
    here.follow(sections(PAGE)["CleanRL"])
    assert here.objective() is not None
    assert (folder / "ppo.py").read_bytes() == (site / "cleanrl" / "ppo.py").read_bytes()


@pytest.mark.long
def test_the_guide_of_the_rl_zoo_works_on_the_released_package(tmp_path: Path) -> None:
    """RL Baselines3 Zoo from PyPI: a module that is installed, in a folder with nothing else."""
    if not installed("stable_baselines3", "optuna", "tqdm", "rich", "yaml"):
        pytest.skip("it needs stable-baselines3 and optuna")
    site, folder = tmp_path / "site", tmp_path / "empty"
    release = version_of("stable-baselines3")
    install([f"rl_zoo3=={release}", f"sb3-contrib=={release}", "huggingface_sb3", "wasabi", "moviepy"], site)
    folder.mkdir()
    here = Desk(folder, {"env": {"PYTHONPATH": str(site)}})
    blocks = [
        (language, text.replace("-n 20000", "-n 600").replace("--eval-freq 2000", "--eval-freq 200"))
        for language, text in sections(PAGE)["RL Baselines3 Zoo"]
    ]
    here.follow(blocks)
    assert here.objective() is not None
    lab = (folder / "lab.yaml").read_text()
    assert "hyperparams.learning_rate: {type: float" in lab
    assert "hyperparams.gamma: {type: float" in lab
    assert not (folder / "logs").exists()  # it writes to its run folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "knob", "objective"),
    [
        ("examples/classification/plot_digits_classification.py", "SVC.gamma", "accuracy"),
        ("examples/ensemble/plot_gradient_boosting_regression.py", "params.learning_rate", "MSE_test"),
        ("examples/gaussian_process/plot_gpc.py", "RBF.length_scale", "Accuracy"),
    ],
)
def test_an_example_of_scikit_learn_is_tuned_as_it_was_released(
    file: str, knob: str, objective: str, tmp_path: Path
) -> None:
    if not installed("sklearn", "matplotlib"):
        pytest.skip("it needs scikit-learn and matplotlib")
    script = fetch_from_sdist("scikit-learn", version_of("scikit-learn"), file, tmp_path)
    before = script.read_bytes()
    here = Desk(tmp_path, {"env": {"MPLBACKEND": "Agg"}})
    here.type(["looplab", "init", script.name])
    tried = json.loads(here.type(["looplab", "try", "--yes", "--json"]))
    assert tried["objective"]["metric"] == objective
    assert f"  {knob}: {{type: float" in (tmp_path / "lab.yaml").read_text()
    here.type(["looplab", "run"])
    assert here.objective() is not None
    assert script.read_bytes() == before


@dataclass(frozen=True)
class Released:
    """A script in a source distribution of somebody else's package."""

    package: str
    file: str
    needs: tuple[str, ...]
    """Modules that must be installed."""
    installs: tuple[str, ...]
    objective: str
    goal: str
    knob: str
    """A line of the lab file, up to its range."""
    args: tuple[str, ...] = ()


RELEASES = (
    Released(
        package="pytorch-ignite", file="examples/reinforcement_learning/actor_critic.py",
        needs=("torch", "gymnasium"), installs=("pytorch-ignite==0.5.5",),
        objective="Average_reward", goal="max", knob="  gamma: {type: float", args=("--max-episodes", "30"),
    ),
    Released(
        package="deap", file="examples/ga/onemax.py", needs=("numpy",), installs=("deap==1.4.4", "moocore", "cffi"),
        objective="Avg", goal="max", knob="  # main.CXPB: {type: float",
    ),
    Released(
        package="poutyne", file="examples/basic_random_classification.py",
        needs=("torch",), installs=("poutyne==1.19.0", "torchmetrics", "lightning-utilities"),
        objective="val_acc", goal="max", knob="  hidden_state_size: {choices:",
    ),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("one", RELEASES, ids=lambda one: one.package)
def test_a_script_of_a_source_distribution_is_tuned_as_it_was_released(one: Released, tmp_path: Path) -> None:
    if not installed(*one.needs):
        pytest.skip(f"it needs {' and '.join(one.needs)}")
    site, folder = tmp_path / "site", tmp_path / "scripts"
    install(list(one.installs), site)
    folder.mkdir()
    version = one.installs[0].partition("==")[2]
    script = fetch_from_sdist(one.package, version, one.file, folder)
    before = script.read_bytes()
    here = Desk(folder, {"args": list(one.args), "env": {"PYTHONPATH": str(site)}})
    here.type(["looplab", "init", script.name])
    assert one.knob in (folder / "lab.yaml").read_text()
    tried = json.loads(here.type(["looplab", "try", "--yes", "--json"]))
    assert tried["objective"] == {"metric": one.objective, "goal": one.goal}
    here.type(["looplab", "run"])
    assert here.objective() is not None
    assert script.read_bytes() == before


SPACY_DATA = """
import random
import spacy
from spacy.tokens import DocBin

nlp, rng = spacy.blank("en"), random.Random(0)
words = {0: ["poor", "awful", "dull"], 1: ["great", "lovely", "superb"]}
for name, count in (("train", 40), ("dev", 20)):
    docs = DocBin()
    for i in range(count):
        text = rng.choices(["film", "plot", "cast", "it", "was", "the"], k=5) + [rng.choice(words[i % 2])]
        rng.shuffle(text)
        doc = nlp(" ".join(text))
        doc.cats = {"POS": float(i % 2), "NEG": float(1 - i % 2)}
        docs.add(doc)
    docs.to_disk(f"{name}.spacy")
"""
TRL_DATA = """
import json, os
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

texts = [f"the {a} is {b}." for a in ("cat", "dog", "sun", "sea") for b in ("red", "big", "old", "wet")]
tokens = Tokenizer(models.BPE(unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
tokens.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=list(special.values())))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
tokenizer.save_pretrained("model")
size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size)).save_pretrained("model")
os.makedirs("data")
for split in ("train", "test"):
    with open(f"data/{split}.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\\n" for text in texts * 2)
"""


@dataclass(frozen=True)
class Program:
    """A program that a released package installs, called by its name."""

    name: str
    needs: tuple[str, ...]
    installs: tuple[str, ...]
    command: tuple[str, ...]
    objective: tuple[str, str]
    knobs: tuple[str, ...]
    not_knobs: tuple[str, ...] = ()
    data: str = ""
    """Code that writes its input into the folder."""
    first: tuple[str, ...] = ()
    """A command of its own that is called before."""
    alone: bool = True
    """Whether what it requires is installed already."""


PROGRAMS = (
    Program(
        name="spacy", needs=(), installs=("spacy==3.8.18",), alone=False, data=SPACY_DATA,
        first=("spacy", "init", "config", "--lang", "en", "--pipeline", "textcat", "config.cfg"),
        command=(
            *("spacy", "train", "config.cfg", "--output", "out", "--paths.train", "train.spacy"),
            *("--paths.dev", "dev.spacy", "--training.max_steps", "40", "--training.eval_frequency", "10"),
        ),
        objective=("SCORE", "max"),
        knobs=("training.optimizer.learn_rate: {type: float", "training.dropout: {type: float"),
        not_knobs=("training.eval_frequency",),
    ),
    Program(
        name="trl", needs=("torch", "transformers", "accelerate", "pyarrow"),
        installs=("trl==1.16.0", "datasets==5.2.0", "dill", "multiprocess", "xxhash"), data=TRL_DATA,
        command=(
            *("trl", "sft", "--model_name_or_path", "model", "--dataset_name", "data", "--dataset_test_split", "test"),
            *("--output_dir", "out", "--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2"),
            *("--logging_steps", "2", "--report_to", "none", "--use_cpu", "--bf16", "False"),
        ),
        objective=("eval_mean_token_accuracy", "max"),
        knobs=("learning_rate: {type: float", "weight_decay: {choices"), not_knobs=("ignore_bias_buffers", "fp8_opt_level"),
    ),
    Program(
        name="pykeen", needs=("torch", "optuna", "pandas"),
        installs=(
            *("pykeen==1.11.1", "click_default_group", "class_resolver", "pystow", "docdata", "more_click"),
            *("torch_max_mem", "torch_ppr", "rexmex", "dataclasses_json", "tabulate", "more_itertools"),
        ),
        command=("pykeen", "train", "transe", "--dataset", "nations", "--number-epochs", "3"),
        objective=("both/optimistic/hits_at_1", "max"),
        knobs=("learning-rate: {type: float", "embedding-dim: {choices"), not_knobs=("random-seed",),
    ),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("one", PROGRAMS, ids=lambda one: one.name)
def test_a_released_program_is_tuned_by_two_commands(one: Program, tmp_path: Path) -> None:
    if one.needs and not installed(*one.needs):
        pytest.skip(f"it needs {' and '.join(one.needs)}")
    site, folder = tmp_path / "site", tmp_path / "work"
    install(list(one.installs), site, alone=one.alone)
    folder.mkdir()
    here = Desk(folder, {"env": {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}})
    here.env["PATH"] = f"{site / 'bin'}{os.pathsep}{here.env['PATH']}"
    for command in (
        [PYTHON, "-c", one.data],
        [str(site / "bin" / word) for word in one.first[:1]] + list(one.first[1:]),
    ):
        if command[-1:] not in ([], [""]):
            subprocess.run(command, cwd=folder, env=here.env, check=True, capture_output=True, timeout=PATIENCE_S)
    here.type(["looplab", "init", *one.command])
    lab = (folder / "lab.yaml").read_text()
    assert all(f"\n  {knob}" in lab for knob in one.knobs)
    assert not any(f"\n  {name}:" in lab for name in one.not_knobs)
    tried = json.loads(here.type(["looplab", "try", "--yes", "--json"]))
    assert tried["objective"] == dict(zip(("metric", "goal"), one.objective, strict=True))
    here.type(["looplab", "run"])
    assert here.objective() is not None
    lab = (folder / "lab.yaml").read_text()
    assert "cwd: run" in lab or "{out_dir}" in lab  # each run writes to its own folder


def commands_of(page: Path) -> list[str]:
    """The commands of looplab in the sentences and tables of a page."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`(looplab [^`]*)`", prose)]


@pytest.mark.parametrize("page", ["own-trainer.md", "coming-from.md"])
def test_every_command_of_a_page_exists_and_has_its_options(page: str) -> None:
    found = commands_of(ROOT / "docs" / page)
    assert found
    for command in found:
        chosen, words = typer.main.get_command(app), expand_argv(shlex.split(command)[1:])
        while hasattr(chosen, "get_command"):
            name, *words = words
            chosen = chosen.get_command(None, name)
            assert chosen is not None, command
        chosen.make_context(name, words)  # fails if an option is wrong; runs nothing


def test_every_tool_and_system_has_a_table_of_commands() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text()
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        rows = [line for line in part.splitlines() if line.startswith("| `")]
        assert len(rows) >= 5
        assert all(re.fullmatch(r"\| `[^`]+` \| `looplab [^`]+` \|", row) for row in rows)
