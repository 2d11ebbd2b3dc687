"""The settings of an experiment: every key with its default, checked on reading.

`load(path)` reads a YAML or JSON file. A key that does not exist, a value of the wrong type or out of its range is an
error that names the file, the line and the key; nothing is ignored. `Settings.plain()` is the resolved form, with all
defaults written out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from looplab.errors import LabError

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
Layers = Annotated[list[int | float], Field(min_length=1)]
Variant = Literal["esm", "no_memory", "no_probing", "random_direction", "shuffled_retrieval", "mean_vector"]
Ablation = Literal["no_memory", "no_probing", "random_direction", "shuffled_retrieval", "mean_vector"]
Stage = Literal["mine", "select", "memory", "eval"]

RENAMED = {("online", "k"): "k_retrieve", ("online", "alpha_mult"): "k_scale"}
"""Names of older config files that are still read, with a note."""


def resolve_layers(wanted: Sequence[int | float] | None, n_layers: int) -> tuple[int, ...]:
    """Layer indices: an integer is an index (negative from the top), a float in 0..1 a share of the depth.

    None is the top third. 0.0 is the first layer, 1.0 the last.
    """
    if wanted is None:
        return tuple(range(n_layers - max(1, n_layers // 3), n_layers))
    found = set()
    for layer in wanted:
        index = round(layer * (n_layers - 1)) if isinstance(layer, float) else layer
        if not -n_layers <= index < n_layers:
            raise LabError(f"there is no layer {layer}: the model has {n_layers}", hint=f"write 0 to {n_layers - 1}")
        found.add(index % n_layers)
    return tuple(sorted(found))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(Section):
    name_or_path: str = "model"
    """A folder with a model in the Hugging Face form, or a name that transformers can find."""
    backend: Literal["transformers", "vllm", "toy"] = "transformers"
    """What computes: transformers, vLLM, or a toy of a few numpy lines that needs no model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """`auto` takes a GPU if there is one; else `cpu`, `cuda`, `cuda:1`."""
    threads: Count = 1
    """CPU threads of torch. More than one is slower on a shared machine."""
    tensor_parallel_size: Count = 1
    """vLLM only. One process uses one GPU; for more GPUs run a suite."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """vLLM only: lower it first when memory runs out."""
    max_model_len: Count = 8192
    """The longest prompt plus answer, in tokens."""
    max_num_seqs: Count = 64
    """The most sequences computed at once."""


class GeneratorSettings(Section):
    """For tasks that are generated, not read from files: `tiny` and `reasoning-gym/<task>`."""

    kind: Literal["steerable", "slips", "addition1", "addition2"] = "steerable"
    """`tiny` only: which of our own tasks."""
    n_train: Natural = 160
    n_dev: Natural = 160
    n_test: Natural = 400
    seed: int = 0
    """Another seed gives other questions."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`reasoning-gym` only: settings of the generator, such as {min_terms: 2, max_terms: 3}."""


class TaskSettings(Section):
    dataset: str
    """gsm8k, arc-c, svamp, strategyqa, math500, aime_2024, reasoning-gym/<task> or tiny."""
    data_root: str = "datasets"
    """The folder that holds a folder for each dataset."""
    train_split: str = "train"
    """What is mined."""
    dev_split: str | None = None
    """What choices are made on. null: a seeded share of the questions of `train_split` that is not mined."""
    eval_split: str = "test"
    """What is reported, once."""
    dev_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """The share of the training questions that dev takes where `dev_split` is null."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The share of all questions that the test takes where a dataset is one file without splits."""
    split_seed: int = 0
    """Seeds the division and the samples below."""
    max_train_examples: Count | None = None
    """null: all; else a seeded sample of this size."""
    max_eval_examples: Count | None = None
    max_dev_examples: Count | None = None
    """null: as max_eval_examples."""
    generator: GeneratorSettings = GeneratorSettings()

    @model_validator(mode="after")
    def _three_parts(self) -> TaskSettings:
        names = [name for name in (self.train_split, self.dev_split, self.eval_split) if name is not None]
        if len(set(names)) < len(names):
            raise ValueError(
                "train_split, dev_split and eval_split must be different, for what is mined or tuned on is no test; "
                "leave dev_split out to divide the training questions"
            )
        return self


class PromptSettings(Section):
    template: str = "gsm8k_0shot"
    """See prompts.py."""
    chat: bool = False
    """Put the prompt into the model's own chat template."""


def _yes_or_no(value: Any) -> Any:
    """Older files give `logprobs` as a count or null."""
    return bool(value) if value is None or isinstance(value, int) else value


class DecodeSettings(Section):
    max_new_tokens: Count = 256
    """T_max: the budget of one answer in tokens. Probes are counted apart."""
    temperature: NotNegative = 0.0
    """0 is greedy."""
    top_p: TopP = 1.0
    logprobs: Annotated[bool, BeforeValidator(_yes_or_no)] = False
    """Write the mean log-probability of each answer's tokens into per_example.jsonl."""


class ControlPointSettings(Section):
    M: Count = 6
    """At most this many segments are steered; the rest is generated plainly."""
    segment_delimiter: Annotated[str, Field(min_length=1)] = "\n\n"
    """The text that ends a segment."""


class MineSettings(Section):
    K: Annotated[int, Field(ge=2)] = 8
    """Rollouts for each question."""
    K_pos: Count = 4
    """At most so many of the best correct rollouts make the positive mean."""
    K_neg: Count = 4
    """At most so many of the worst incorrect rollouts make the negative mean."""
    temperature: Positive = 0.7
    """Above 0: rollouts that are all alike have nothing to compare."""
    top_p: TopP = 0.95
    max_new_tokens: Count = 512
    eta0: NotNegative = 0.001
    """The price of length: R = 1[correct] - eta0 * tokens / max_new_tokens."""
    keep_top_C: Count = 512  # noqa: N815
    """How many pairs are kept, by quality Q."""
    candidate_layers: Layers | None = None
    """Indices, or shares of the depth such as 0.75; null is the top third."""
    require_correct_and_incorrect: bool = True
    """Compare correct with incorrect; false compares the best with the worst by reward."""
    min_correct_rollouts: Natural = 1
    """A question with fewer correct rollouts is passed over."""
    pos_source: Literal["rollout", "gold", "rollout_or_gold"] = "rollout"
    """Whether the positives are the model's own answers, the written solution, or the second where the first lacks."""
    batch_size_examples: Count = 16
    """How many questions are sampled together."""


class SelectSettings(Section):
    B: Count = 64
    """The size of the library."""
    method: Literal["dpp", "top", "random"] = "dpp"
    lambda_diversity: NotNegative = 0.5
    """`dpp`: the weight of diversity against quality."""
    epsilon: Positive = 1e-4
    """`dpp`: added to the diagonal of the Gram matrix."""
    min_per_control_point: Natural = 0
    """At least so many of each control point, as far as there are."""


class MemorySettings(Section):
    normalize_keys: bool = True
    """Unit keys, so that the similarity is the cosine."""


class OnlineSettings(Section):
    variant: Variant = "esm"
    k_retrieve: Count = 16
    """Entries retrieved at each control point."""
    L: Natural = 2
    """Of these, how many are probed, besides null."""
    probe_tokens: Count = 8
    beta: NotNegative = 1.0
    """Score = beta * A + rho * (logprob - logprob of null)."""
    rho: NotNegative = 0.1
    k_scale: NotNegative = 1.0
    """What is added is k_scale * Score * vector."""
    tau_null: float = 0.0
    """A score below this leaves the model alone."""
    min_sim: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """No entry so similar: leave the model alone."""
    min_entries: Count = 1
    """Fewer entries than this at a control point: leave the model alone."""
    min_tool_m: Count = 1
    """Only entries of control points from here …"""
    max_tool_m: Count | None = None
    """… to here are used; null is no limit."""
    layers: Layers | None = None
    """Which of the stored layers may be steered; null is all of them."""
    batch_size_examples: Count = 16

    @model_validator(mode="after")
    def _window(self) -> OnlineSettings:
        if self.max_tool_m is not None and self.max_tool_m < self.min_tool_m:
            raise ValueError(f"max_tool_m {self.max_tool_m} is below min_tool_m {self.min_tool_m}")
        return self


class EvalSettings(Section):
    split: Literal["dev", "test"] = "dev"
    """Choose on dev; look at test once."""
    methods: Annotated[list[Literal["greedy", "esm"]], Field(min_length=1)] = ["greedy", "esm"]
    ablations: list[Ablation] = []
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    """Repeats of what is random: sampling, random directions, shuffling."""
    artifact_run_dir: str | None = None
    """Use the library and memory of this run folder; `outputs/<run_name>/latest` follows LATEST."""
    bootstrap: Natural = 2000
    """Resamples for the confidence interval of a difference."""


class OutputSettings(Section):
    root_dir: str = "outputs"
    run_name: str = "esm"
    run_id: str | None = None
    """null: the time; `latest`: the newest run of this name."""


class SuiteDataset(Section):
    """One dataset of a suite; what is null here is taken from the sections above."""

    name: str
    """As task.dataset."""
    label: str | None = None
    """What its run is called after the prefix; null: the name."""
    prompt_template: str | None = None
    data_root: str | None = None
    train_split: str | None = None
    dev_split: str | None = None
    eval_split: str | None = None
    max_train_examples: Count | None = None
    max_eval_examples: Count | None = None
    max_dev_examples: Count | None = None
    max_new_tokens: Count | None = None
    """As decode.max_new_tokens: mathematics needs more."""
    generator: GeneratorSettings | None = None


def _gpu_list(value: Any) -> Any:
    """`"0,1"` as on the command line."""
    return [int(part) if part.strip().isdigit() else part for part in value.split(",")] if type(value) is str else value


class SuiteSettings(Section):
    run_name_prefix: str = "suite"
    stages: Annotated[list[Stage], Field(min_length=1)] = ["mine", "select", "memory", "eval"]
    gpus: Annotated[list[Natural], BeforeValidator(_gpu_list)] = []
    """One dataset at a time on each; empty: one after another, on the CPU or the one GPU that is visible."""
    datasets: Annotated[list[SuiteDataset], Field(min_length=1)]

    @model_validator(mode="after")
    def _own_folders(self) -> SuiteSettings:
        labels = [one.label or one.name for one in self.datasets]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two datasets would share the folder of {twice[0]}; give each its own `label`")
        return self


class Settings(Section):
    """A whole config file."""

    seed: int = 0
    model: ModelSettings = ModelSettings()
    task: TaskSettings
    prompt: PromptSettings = PromptSettings()
    decode: DecodeSettings = DecodeSettings()
    control_points: ControlPointSettings = ControlPointSettings()
    offline_mine: MineSettings = MineSettings()
    offline_select: SelectSettings = SelectSettings()
    offline_memory: MemorySettings = MemorySettings()
    online: OnlineSettings = OnlineSettings()
    eval: EvalSettings = EvalSettings()
    outputs: OutputSettings = OutputSettings()
    suite: SuiteSettings | None = None
    """Only in files for `suite`."""
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of the file should be told, such as a key under an old name."""
        return self._notes

    def plain(self) -> dict[str, Any]:
        """Dicts, lists, numbers and texts, with every default written out."""
        return self.model_dump(mode="json", exclude=None if self.suite else {"suite"})

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """The same settings with some dotted keys set, checked again: `{"decode.max_new_tokens": 64}`."""
        plain = self.plain()
        for key, value in changes.items():
            *path, last = key.split(".")
            place = plain
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        return settings(plain)

    def members(self) -> list[Settings]:
        """The settings of each dataset of the suite, as a single experiment."""
        if self.suite is None:
            raise LabError("this config has no `suite` section", hint="it lists the datasets: suite: {datasets: [...]}")
        members = []
        for one in self.suite.datasets:
            given = one.model_dump(mode="json", exclude_none=True)
            name = given.pop("name")
            label = given.pop("label", name)
            elsewhere = {"prompt_template": "prompt.template", "max_new_tokens": "decode.max_new_tokens"}
            changes = {elsewhere.get(key, f"task.{key}"): value for key, value in given.items()}
            run_name = f"{self.suite.run_name_prefix}_{label}".replace("/", "_")
            changes |= {"task.dataset": name, "outputs.run_name": run_name, "suite": None}
            members.append(self.changed(changes))
        return members


def load(path: str | Path) -> Settings:
    """The settings in a YAML or JSON file."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    path = Path(path)
    try:
        raw = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(str(other) for other in path.parent.glob("*.yaml"))
        raise LabError(
            "there is no such config", file=path, hint=f"there are {', '.join(near)}" if near else None
        ) from None
    except OSError as error:
        raise LabError(f"cannot read the config: {error.strerror}", file=path) from error
    except UnicodeDecodeError as error:
        raise LabError("the config is not UTF-8 text", file=path) from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise LabError(f"this is not YAML: {error.problem}", file=path, line=line) from error
    except YAMLError as error:
        raise LabError(f"this is not YAML: {error}", file=path) from error
    if not isinstance(raw, dict):
        raise LabError("a config is a mapping with sections such as model and task", file=path)
    return settings(raw, file=path)


def settings(raw: Mapping[str, Any], file: Path | None = None) -> Settings:
    """Settings from plain data; `raw` may be what ruamel read, which knows its lines."""
    notes = []
    data = json.loads(json.dumps(raw, default=str))
    for (section, old), new in RENAMED.items():
        place = data.get(section)
        if isinstance(place, dict) and old in place:
            if new in place:
                raise LabError(f"{section}.{old} is the old name of {section}.{new}; both are given", file=file)
            place[new] = place.pop(old)
            notes.append(f"{section}.{old} is read as {section}.{new}")
    try:
        # JSON with strict types: a text is no number, yes is no integer, yet a list fits wherever a list is meant
        found = Settings.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
        said = [_said(problem["type"], problem["loc"], problem["msg"], problem["input"]) for problem in problems]
        more = f"\n  and: {'; '.join(said[1:])}" if said[1:] else ""
        raise LabError(said[0] + more, file=file, line=_line(raw, problems[0]["loc"])) from None
    found._notes = tuple(notes)
    return found


def _keys(where: tuple[int | str, ...]) -> list[int | str]:
    """The keys of a place, without the words that pydantic adds for the members of a union."""
    return [part for part in where if part not in ("int", "float") and "[" not in str(part)]


def _said(kind: str, where: tuple[int | str, ...], message: str, value: Any) -> str:
    keys = _keys(where)
    name = ".".join(str(key) for key in keys)
    if kind == "extra_forbidden":
        section: Any = Settings
        for key in keys[:-1]:
            field = section.model_fields.get(key) if isinstance(key, str) else None
            section = _section(field.annotation) if field else section
        near = difflib.get_close_matches(str(keys[-1]), list(section.model_fields), n=1)
        return f"unknown key {name}, did you mean {near[0]}?" if near else f"unknown key {name}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "string_type" and isinstance(value, int | float):
        return f"{name} is a text: put it in quotes"  # not shown: 2025_12 was read as 202512
    message = message.removeprefix("Value error, ")
    shown = "" if isinstance(value, dict | list) else f", not {value!r}"
    return f"{name}: {message}{shown}" if name else message


def _section(annotation: Any) -> Any:
    """The section class inside an annotation such as `list[SuiteDataset]` or `SuiteSettings | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = [_section(part) for part in getattr(annotation, "__args__", ())]
    return next((part for part in inner if part is not None), None)


def _line(raw: Any, where: tuple[int | str, ...]) -> int | None:
    """The line of a key in what ruamel read, or of the nearest section around it."""
    line = None
    old_name = {new: old for (_, old), new in RENAMED.items()}
    for key in _keys(where):
        lines = getattr(raw, "lc", None)
        if lines is None:
            return line
        if isinstance(raw, dict):
            key = key if key in raw else old_name.get(str(key), key)
            if key not in raw:
                return line
            line = lines.key(key)[0] + 1
        else:
            line = lines.item(key)[0] + 1
        raw = raw[key]
    return line
