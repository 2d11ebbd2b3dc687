"""Settings of an experiment: every key with its default, validated when loaded.

`load(path)` reads a YAML or JSON file. Unknown keys, wrong types and values out of range are errors that name the file,
the line and the key; nothing is ignored. `EsmSettings.plain()` is the resolved form, with all defaults.
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
Ablation = Literal["no_memory", "no_probing", "random_direction", "shuffled_retrieval", "mean_vector"]
Variant = Literal["esm", Ablation]
Stage = Literal["mine", "select", "memory", "eval"]

RENAMED = {("online", "k"): "k_retrieve", ("online", "alpha_mult"): "k_scale"}
"""Former names that are still accepted, with a note."""


def resolve_layers(requested: Sequence[int | float] | None, n_layers: int) -> tuple[int, ...]:
    """Return layer indices: an int is an index (negative: from the top), a float in 0..1 a relative depth.

    0.0 is the first layer, 1.0 the last. None selects the top third.
    """
    if requested is None:
        return tuple(range(n_layers - max(1, n_layers // 3), n_layers))
    indices = set()
    for layer in requested:
        index = round(layer * (n_layers - 1)) if isinstance(layer, float) else layer
        if not -n_layers <= index < n_layers:
            raise LabError(f"no layer {layer}: the model has {n_layers}", hint=f"use 0 to {n_layers - 1}")
        indices.add(index % n_layers)
    return tuple(sorted(indices))


class ConfigSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(ConfigSection):
    name_or_path: str = "model"
    """Folder of a model in Hugging Face format, or a name on the hub."""
    backend: Literal["transformers", "vllm", "toy"] = "transformers"
    """transformers, vLLM, or a toy model in numpy that needs no weights."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """`auto` uses a GPU if available; or `cpu`, `cuda`, `cuda:1`."""
    threads: Count = 1
    """CPU threads of torch; more than one is slower on a shared machine."""
    tensor_parallel_size: Count = 1
    """vLLM only. A process uses one GPU; run a suite to use more."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """vLLM only: lower this first if memory runs out."""
    max_model_len: Count = 8192
    """Maximum length of prompt plus answer, in tokens."""
    max_num_seqs: Count = 64
    """Maximum number of sequences that are computed at once; lower this if memory runs out."""


class GeneratorSettings(ConfigSection):
    """Settings of generated tasks: `tiny` and `reasoning-gym/<task>`."""

    kind: Literal["steerable", "opposed", "slips", "addition1", "addition2", "habits"] = "steerable"
    """`tiny` only: the task."""
    n_train: Natural = 160
    n_dev: Natural = 160
    n_test: Natural = 400
    seed: int = 0
    """Seed of the questions."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`reasoning-gym` only: options of the generator, such as {min_terms: 2, max_terms: 3}."""


class SourceSettings(ConfigSection):
    """A dataset in your own files: where they are, and which keys of a row are what.

    A key is the name of a column. Dots lead into nested rows (`data.question`); `a|b` is the one that a row has.
    """

    path: Annotated[str, Field(min_length=1)]
    """Below task.data_root: a .jsonl, .json, .csv, .tsv, .parquet or .arrow file; `{split}` in it: one file per split;
    or a folder with files per split, or saved by `datasets`."""
    grader: Literal["number", "math", "choice", "yes_no", "exact"]
    """How answers are extracted and compared."""
    question: str = "question"
    answer: str = "answer"
    """For `choice`, the label, letter, text or index (from 0) of the right one. A solution that ends with `#### answer`
    or \\boxed{answer} is accepted as well."""
    choices: str | list[str] | None = None
    """For `choice`: key of the choices, or one key for each."""
    solution: str | None = None
    """Key of a reference solution, for offline_mine.pos_source."""
    id: str | None = None
    """Key of an identifier; null: split and index of the row."""
    family: str | None = None
    """Key of a group of similar questions that must stay in one split."""
    split: str | None = None
    """Key of the split if one file contains several; null: `split`, if the rows have it."""

    @model_validator(mode="after")
    def _has_choices(self) -> SourceSettings:
        if (self.grader == "choice") != (self.choices is not None):
            raise ValueError("`choices` goes with `grader: choice`, and only with it")
        return self


class TaskSettings(ConfigSection):
    dataset: str
    """A published dataset: gsm8k, svamp, math, math500, aime_2024, aime25, amc23, strategyqa, arc-c, openbookqa,
    commonsense_qa; a name in `sources`; or a generated one: reasoning-gym/<task> or tiny."""
    train_dataset: str | None = None
    """Mine and tune on another dataset, and evaluate on all of `dataset`; null: the same."""
    sources: dict[str, SourceSettings] = {}
    """Datasets of your own, by name. A name of a published dataset replaces it."""
    data_root: str = "datasets"
    """Folder that contains one folder per dataset."""
    train_split: str = "train"
    """Split used for mining."""
    dev_split: str | None = None
    """Split used for tuning. null: a seeded fraction of `train_split`, which is not mined."""
    eval_split: str = "test"
    """Split used for the final report, once."""
    dev_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Fraction of the training questions used as dev if `dev_split` is null."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of the questions used as test if the dataset is one file without splits."""
    split_seed: int = 0
    """Seed of the splits and of the samples below."""
    max_train_examples: Count | None = None
    """Size of a seeded sample; null: all."""
    max_eval_examples: Count | None = None
    max_dev_examples: Count | None = None
    """null: same as max_eval_examples."""
    generator: GeneratorSettings = GeneratorSettings()

    @model_validator(mode="after")
    def _three_parts(self) -> TaskSettings:
        apart = self.train_dataset not in (None, self.dataset)
        names = [self.train_split, self.dev_split, None if apart else self.eval_split]
        names = [name for name in names if name is not None]
        if len(set(names)) < len(names):
            raise ValueError(
                "train_split, dev_split and eval_split must be different: questions used for mining or tuning are not "
                "a test; omit dev_split to split the training questions"
            )
        return self


class PromptSettings(ConfigSection):
    template: str = "gsm8k_0shot"
    """A name in prompts.py; `auto`: by the grader of the dataset; or a text with {question} (and {choices})."""
    chat: bool = False
    """Apply the model's chat template."""


def _as_bool(value: Any) -> Any:
    """Convert `logprobs`, which older files give as a count or null."""
    return bool(value) if value is None or isinstance(value, int) else value


class DecodeSettings(ConfigSection):
    max_new_tokens: Count = 256
    """T_max: token budget per answer, without probes."""
    temperature: NotNegative = 0.0
    """0 is greedy."""
    top_p: TopP = 1.0
    logprobs: Annotated[bool, BeforeValidator(_as_bool)] = False
    """Write the mean log probability of each answer's tokens to per_example.jsonl."""


class ControlPointSettings(ConfigSection):
    M: Count = 6
    """Maximum number of steered segments; the rest is generated without steering."""
    segment_delimiter: Annotated[str, Field(min_length=1)] = "\n\n"
    """Text that ends a segment."""


class MineSettings(ConfigSection):
    K: Annotated[int, Field(ge=2)] = 8
    """Rollouts per question."""
    K_pos: Count = 4
    """Maximum number of correct rollouts (the best) in the positive mean."""
    K_neg: Count = 4
    """Maximum number of incorrect rollouts (the worst) in the negative mean."""
    temperature: Positive = 0.7
    """Above 0: identical rollouts have no contrast."""
    top_p: TopP = 0.95
    max_new_tokens: Count = 512
    eta0: NotNegative = 0.001
    """Length penalty: R = 1[correct] - eta0 * tokens / max_new_tokens."""
    keep_top_C: Count = 512  # noqa: N815
    """Number of pairs to keep, by quality Q."""
    candidate_layers: Layers | None = None
    """Indices, or relative depths such as 0.75; null: the top third."""
    require_correct_and_incorrect: bool = True
    """Contrast correct with incorrect rollouts; false: the best with the worst by reward."""
    min_correct_rollouts: Natural = 1
    """Questions with fewer correct rollouts are skipped."""
    pos_source: Literal["rollout", "gold", "rollout_or_gold"] = "rollout"
    """Positives: the model's correct rollouts, the reference solution, or the latter if the former are missing."""
    batch_size_examples: Count = 16
    """Questions per batch."""


class SelectSettings(ConfigSection):
    B: Count = 64
    """Size of the library."""
    method: Literal["dpp", "top", "random"] = "dpp"
    lambda_diversity: NotNegative = 0.5
    """`dpp`: weight of diversity relative to quality."""
    epsilon: Positive = 1e-4
    """`dpp`: added to the diagonal of the Gram matrix."""
    min_per_control_point: Natural = 0
    """Minimum number of candidates per control point, if available."""


class MemorySettings(ConfigSection):
    normalize_keys: bool = True
    """Normalize keys to unit length, so that the similarity is the cosine."""


class OnlineSettings(ConfigSection):
    variant: Variant = "esm"
    k_retrieve: Count = 16
    """Entries retrieved per control point."""
    L: Natural = 2
    """Number of retrieved entries that are probed, besides null."""
    probe_tokens: Count = 8
    probe_rule: Literal["score", "rank"] = "score"
    """`score`: candidates and null are compared by score, probes included. `rank`: probes only rank the candidates."""
    beta: NotNegative = 1.0
    """Score = beta * A + rho * (logprob - logprob of null)."""
    rho: NotNegative = 0.1
    k_scale: NotNegative = 1.0
    """Injected is k_scale * Score * vector."""
    tau_null: float = 0.0
    """Minimum score for steering."""
    min_sim: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Minimum similarity of the nearest entry for steering."""
    min_entries: Count = 1
    """Minimum number of entries at a control point for steering."""
    min_tool_m: Count = 1
    """First control point whose entries are used."""
    max_tool_m: Count | None = None
    """Last control point whose entries are used; null: no limit."""
    layers: Layers | None = None
    """Stored layers that may be steered; null: all."""
    batch_size_examples: Count = 16

    @model_validator(mode="after")
    def _window(self) -> OnlineSettings:
        if self.max_tool_m is not None and self.max_tool_m < self.min_tool_m:
            raise ValueError(f"max_tool_m {self.max_tool_m} is below min_tool_m {self.min_tool_m}")
        return self


class EvalSettings(ConfigSection):
    split: Literal["dev", "test"] = "dev"
    """Tune on dev; evaluate on test once."""
    methods: Annotated[list[Literal["greedy", "esm", "majority", "prompt"]], Field(min_length=1)] = ["greedy", "esm"]
    """`majority` votes among sampled answers (self-consistency); `prompt` is greedy with `prompt_line`."""
    ablations: list[Ablation] = []
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    """Seeds of everything random: sampling, random directions, shuffling."""
    vote_samples: Annotated[int, Field(ge=2)] = 5
    """`majority`: answers per question."""
    vote_temperature: Positive = 0.8
    prompt_line: str = ""
    """`prompt`: one line that is added to every question."""
    own: dict[Literal["esm", Ablation], dict[str, Any]] = {}
    """Settings of `online` that a method has for itself: `{mean_vector: {layers: [2], k_scale: 4.0}}`."""
    artifact_run_dir: str | None = None
    """Use the memory of this run folder; `outputs/<run_name>/latest` follows LATEST."""
    bootstrap: Natural = 2000
    """Bootstrap samples for confidence intervals."""


class OutputSettings(ConfigSection):
    root_dir: str = "outputs"
    run_name: str = "esm"
    run_id: str | None = None
    """null: the current time; `latest`: the newest run of this name."""


class SuiteDataset(ConfigSection):
    """One dataset of a suite; null values are taken from the other sections."""

    name: str
    """As task.dataset."""
    train_dataset: str | None = None
    label: str | None = None
    """Suffix of the run name; null: the name."""
    prompt_template: str | None = None
    data_root: str | None = None
    train_split: str | None = None
    dev_split: str | None = None
    eval_split: str | None = None
    max_train_examples: Count | None = None
    max_eval_examples: Count | None = None
    max_dev_examples: Count | None = None
    max_new_tokens: Count | None = None
    """As decode.max_new_tokens; mathematics needs more."""
    generator: GeneratorSettings | None = None


def _gpu_list(value: Any) -> Any:
    """Parse `"0,1"`, as on the command line."""
    return [int(part) if part.strip().isdigit() else part for part in value.split(",")] if type(value) is str else value


class SuiteSettings(ConfigSection):
    run_name_prefix: str = "suite"
    stages: Annotated[list[Stage], Field(min_length=1)] = ["mine", "select", "memory", "eval"]
    gpus: Annotated[list[Natural], BeforeValidator(_gpu_list)] = []
    """One dataset at a time per GPU; empty: sequentially, on the CPU or the visible GPU."""
    datasets: Annotated[list[SuiteDataset], Field(min_length=1)]

    @model_validator(mode="after")
    def _own_folders(self) -> SuiteSettings:
        labels = [one.label or one.name for one in self.datasets]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two datasets would share the folder {twice[0]}; give each its own `label`")
        return self


class EsmSettings(ConfigSection):
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
        """Notes for the user, such as a key under a former name."""
        return self._notes

    def plain(self) -> dict[str, Any]:
        """Return plain JSON data with all defaults."""
        return self.model_dump(mode="json", exclude=None if self.suite else {"suite"})

    def changed(self, changes: Mapping[str, Any]) -> EsmSettings:
        """Return validated settings with some dotted keys changed: `{"decode.max_new_tokens": 64}`."""
        plain = self.plain()
        for key, value in changes.items():
            *path, last = key.split(".")
            place = plain
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value
        return parse_settings(plain)

    def own(self) -> dict[str, EsmSettings]:
        """Return the settings of the methods in `eval.own`."""
        return {
            name: self.changed({f"online.{key}": value for key, value in changes.items()})
            for name, changes in self.eval.own.items()
        }

    def members(self) -> list[EsmSettings]:
        """Return the settings of each dataset of the suite, as single experiments."""
        if self.suite is None:
            raise LabError("this config has no `suite` section", hint="add suite: {datasets: [...]}")
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


def load(path: str | Path) -> EsmSettings:
    """Load a YAML or JSON file. Raises LabError if it is invalid."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    path = Path(path)
    try:
        raw = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(str(other) for other in path.parent.glob("*.yaml"))
        raise LabError("no such config", file=path, hint=f"available: {', '.join(near)}" if near else None) from None
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
        raise LabError("a config must be a mapping with sections such as model and task", file=path)
    return parse_settings(raw, file=path)


def parse_settings(raw: Mapping[str, Any], file: Path | None = None) -> EsmSettings:
    """Validate plain data. If `raw` comes from ruamel, errors contain line numbers."""
    notes = []
    data = json.loads(json.dumps(raw, default=str))
    for (section, old), new in RENAMED.items():
        place = data.get(section)
        if isinstance(place, dict) and old in place:
            if new in place:
                raise LabError(f"{section}.{old} is the former name of {section}.{new}; remove one of them", file=file)
            place[new] = place.pop(old)
            notes.append(f"{section}.{old} is read as {section}.{new}")
    try:
        # Strict JSON: strings are not numbers and booleans not integers, but lists are accepted for tuples
        found = EsmSettings.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
        messages = [_explain(problem["type"], problem["loc"], problem["msg"], problem["input"]) for problem in problems]
        more = f"\n  and: {'; '.join(messages[1:])}" if messages[1:] else ""
        raise LabError(messages[0] + more, file=file, line=_line(raw, problems[0]["loc"])) from None
    found._notes = tuple(notes)
    return found


def _keys(where: tuple[int | str, ...]) -> list[int | str]:
    """Return the keys of a location, without the tags that pydantic adds for union members."""
    return [part for part in where if part not in ("int", "float") and "[" not in str(part)]


def _explain(kind: str, where: tuple[int | str, ...], message: str, value: Any) -> str:
    keys = _keys(where)
    name = ".".join(str(key) for key in keys)
    if kind == "extra_forbidden":
        section: Any = EsmSettings
        for key in keys[:-1]:
            field = section.model_fields.get(key) if isinstance(key, str) else None
            section = _section_class(field.annotation) if field else section
        near = difflib.get_close_matches(str(keys[-1]), list(section.model_fields), n=1)
        return f"unknown key {name}, did you mean {near[0]}?" if near else f"unknown key {name}"
    if kind == "missing":
        return f"{name} is missing"
    if kind == "string_type" and isinstance(value, int | float):
        return f"{name} must be a string: put it in quotes"  # value not shown: YAML reads 2025_12 as 202512
    message = message.removeprefix("Value error, ")
    shown = "" if isinstance(value, dict | list) else f", not {value!r}"
    return f"{name}: {message}{shown}" if name else message


def _section_class(annotation: Any) -> Any:
    """Return the section class in an annotation such as `list[SuiteDataset]` or `SuiteSettings | None`."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return annotation
    inner = [_section_class(part) for part in getattr(annotation, "__args__", ())]
    return next((part for part in inner if part is not None), None)


def _line(raw: Any, where: tuple[int | str, ...]) -> int | None:
    """Return the line of a key in ruamel's data, or of the nearest enclosing section."""
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
