"""Schema of the lab file, lab.yaml. Every mistake is reported with its line."""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from looplab import plugins
from looplab.config.edits import parse_edit
from looplab.config.expression import compile_expression
from looplab.config.files import Document, read_document
from looplab.config.renamed import rename_keys
from looplab.config.state import LEDGER, StateConfig, claim_state_folder, state_folder
from looplab.config.validation import Section, check_section, line_of, suggest
from looplab.errors import LabError
from looplab.untrusted import real_path

LAB_FILE = "lab.yaml"
ITERATE_FILE = "iterate.yaml"
"""Settings of `looplab iterate`; a lab may consist of this file only."""
STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
FIND_OBJECTIVE = "`looplab try` shows what the trainer measures, `looplab objective METRIC` writes it"
CONFIG_FLAGS = ("steps", "log-freq", "eval-freq")
"""Flags of `looplab run` that edit a key of every config."""
RUN_FOLDER = "run"
"""`launch.cwd` of a trainer that starts in its run folder."""
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Units of durations, in seconds."""


def parse_duration(value: Any) -> float:
    """Return a duration such as `90`, `"30m"` or `"1h30m"` in seconds."""
    if isinstance(value, bool) or value is None:
        raise ValueError("a duration is a number of seconds, or text such as 30m or 10h")
    if isinstance(value, int | float):
        seconds = float(value) if abs(value) <= sys.float_info.max else math.inf
    else:
        text = str(value).strip()
        text = f"{text}s" if re.fullmatch(r"[0-9.]+", text) else text
        parts = re.findall(r"([0-9.]+)\s*(ms|min|[smhd])", text)
        try:
            seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
        except ValueError:  # 1.2.3
            parts = []
        if not parts or re.sub(r"([0-9.]+)\s*(ms|min|[smhd])", "", text).strip():
            raise ValueError(f"{value!r} is not a duration; write 90, 30m, 10h or 1h30m")
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError("a duration must be longer than 0")
    return seconds


def check_study_name(name: str) -> str:
    if not STUDY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a study's name: letters, digits, `_`, `-`, `.`; it becomes a folder")
    return name


def parse_at(text: str) -> int | None:
    """Return the k of `mean(k)`; None for `first`, `last` and `best`.

    Raises:
        LabError: The text is none of these.
    """
    match = re.fullmatch(r"first|last|best|mean\(([1-9][0-9]{0,2})\)", text)
    if match is None:
        raise LabError(f"{text!r} is not a valid `at`", hint="write first, last, best or mean(5)")
    return int(match[1]) if match[1] else None


def check_inside(path: str, info: ValidationInfo) -> str:
    """Reject paths outside the lab's folder, which would make the lab impossible to move or reproduce."""
    folder: Path | None = (info.context or {}).get("folder")
    if folder is not None and not real_path(folder / path).is_relative_to(folder.resolve()):
        raise ValueError(f"{path} leads out of the lab; keep what the lab uses inside its folder")
    return path


def check_flag(name: str) -> str:
    plain = name.replace("_", "-").removeprefix("--")
    if plain not in CONFIG_FLAGS:
        raise ValueError(f"{name!r} is not a flag that edits a config; known: {', '.join(CONFIG_FLAGS)}")
    return plain


def check_cwd(path: str) -> str:
    if re.search(r"\{\w+\}", path):
        raise ValueError(
            f"{path} is not a folder of the lab, and variables are not replaced here; "
            f"write `cwd: {RUN_FOLDER}` to start the trainer in its run folder"
        )
    return path


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Validate that `parse` accepts the text."""

    def check(text: str) -> str:
        try:
            parse(text)
        except LabError as error:
            message, *excerpt = error.message.split("\n")
            raise ValueError("\n".join([message + (f" ({error.hint})" if error.hint else ""), *excerpt])) from None
        return text

    return AfterValidator(check)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _one_of(group: str, *built_in: str) -> AfterValidator:
    """Validate that a text names something that looplab, or a plug-in of this group, provides."""

    def check(name: str) -> str:
        if name not in built_in and name not in plugins.names(group):
            known = [*built_in, *plugins.names(group)]
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name!r} is not one of {', '.join(known)}{meant}")
        return name

    return AfterValidator(check)


AgentName = Annotated[str, _one_of("agents", "codex", "claude", "command")]
Duration = Annotated[float, BeforeValidator(parse_duration)]
EditText = Annotated[str, _parsed_by(parse_edit)]
At = Annotated[str, _parsed_by(parse_at)]
ExpressionText = Annotated[str, _parsed_by(compile_expression)]
InLab = Annotated[str, AfterValidator(check_inside)]
Texts = Annotated[list[str], BeforeValidator(_as_list)]
TextsInLab = Annotated[list[InLab], BeforeValidator(_as_list)]


class PluggableSection(Section):
    """A section in which the name of a plug-in may be a key, with the plug-in's arguments as its value."""

    group: ClassVar[str]
    """The entry point group."""
    plugin: str | None = None
    """The name of the plug-in; None: none is used."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`plugin`: its arguments."""

    @model_validator(mode="before")
    @classmethod
    def _plugin(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, dict) else []
        named = [key for key in unknown if key in plugins.names(cls.group)]
        if len(named) != 1:
            return data
        data = dict(data)
        return {"plugin": named[0], "options": data.pop(named[0]) or {}, **data}


class ConfigRendering(Section):
    """How the config reaches the trainer."""

    as_: Literal["file", "flags", "hydra", "env", "wandb"] = Field("file", alias="as")
    """`wandb`: as `wandb.config`, for scripts of W&B sweeps, which read their values only from there."""
    format: Literal["json", "yaml", "toml", "ini"] = "json"
    """`file`: format of the file at {config}."""
    case: Literal["kebab", "as_written", "snake"] = "kebab"
    """`flags`: `--learning-rate` for the key `learning_rate` (kebab), or each key as it is written. A switch that is
    off is `--no-x`; `snake` is the same as `as_written`, except that it writes `--no_x`."""
    keys: Literal["dotted", "flat"] = "dotted"
    """`flags`: `--train.learning-rate`, or only the last component, `--learning-rate`."""
    booleans: Literal["switch", "value", "present", "empty"] = "switch"
    """`flags`: `--anneal` or `--no-anneal` (switch); `--anneal True` or `--anneal False` (value); `--anneal` or nothing
    (present: argparse's `store_true`); `--anneal True` or `--anneal ""` (empty: argparse's `type=bool`, for which any
    other text is true)."""
    store_true: Texts = Field(default_factory=list)
    """`flags`: keys that are rendered as `present`, whatever `booleans` says."""
    names: dict[str, str] = Field(default_factory=dict)
    """`flags`: keys whose flags are not named after them: `{lr: "-lr"}`. For a bool, both words separated by a slash:
    `{shuffle: --shuffle/--keep-order}`, `{cuda: /--no-cuda}` (nothing if it is true)."""
    lists: Literal["json", "spread"] = "json"
    """`flags`: `--layers "[64, 64]"`, or `--layers 64 64` (argparse's `nargs`)."""
    separator: Literal["space", "equals"] = "space"
    """`flags`: `--lr 0.1` or `--lr=0.1`."""
    only: Literal["all", "changed"] | None = None
    """Which keys: all, or those that differ from the base. None: `changed` for Hydra, which has its own base,
    `all` otherwise."""
    prefix: str = ""
    """`env`: prefix of the variable names."""
    skip: Texts = Field(default_factory=list)
    """Keys that are not passed to the trainer, with everything below them."""

    def leaves_out(self, at: Sequence[str | int]) -> bool:
        """Return whether `skip` names this key or one above it."""
        return bool(self.skip) and any(".".join(map(str, at[:n])) in self.skip for n in range(1, len(at) + 1))

    @model_validator(mode="after")
    def _fits_together(self) -> ConfigRendering:
        if self.lists == "spread" and self.separator == "equals":
            raise ValueError("lists: spread needs separator: space (an option with an equals sign takes one value)")
        return self


class LaunchConfig(Section):
    """How the trainer is started."""

    command: list[str] = Field(min_length=1)
    """An argv with placeholders such as {python}, {config} and {run_dir}."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables; values may contain the placeholders of `command`."""
    config: ConfigRendering = Field(default_factory=ConfigRendering)
    output_dir: Literal["run", "absent"] = "run"
    """`run`: {out_dir} is the run folder; `absent`: a folder in it that does not exist yet."""
    timeout: Duration | None = None
    """Time limit of a run in seconds; None: no limit."""
    grace: Duration = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    cleanup_timeout: Duration = 5.0
    """Seconds that leftover processes may live after the trainer exits."""
    cwd: Annotated[InLab, AfterValidator(check_cwd)] = "."
    """Working directory of the trainer, inside the lab; `run`: its run folder."""
    links: TextsInLab = Field(default_factory=list)
    """Files and folders of the lab that a trainer with `cwd: run` finds in its working directory, as symbolic links."""

    @field_validator("links")
    @classmethod
    def _relative(cls, links: list[str], info: ValidationInfo) -> list[str]:
        if links and info.data.get("cwd") != RUN_FOLDER:
            raise ValueError(f"links are made in the run folder; they need `cwd: {RUN_FOLDER}`")
        for link in links:
            if os.path.isabs(link) or os.path.normpath(link).split(os.sep)[0] in (".", "..", "outputs", "record"):
                raise ValueError(f"{link!r} is not the relative path of a file or folder of the lab")
        return links

    @model_validator(mode="before")
    @classmethod
    def _short_config(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("config"), str):
            return {**data, "config": {"as": data["config"]}}
        return data


class TieBreak(Section):
    """Metric that decides between runs whose objectives are exactly equal."""

    metric: str
    """Name of the metric, as the trainer logs it."""
    goal: Literal["max", "min"]
    """Whether larger or smaller values are better."""
    at: At = "last"
    """Which value of a run counts."""


class FurtherObjective(TieBreak):
    """A metric that is optimised in addition to the objective."""

    price: float | None = Field(None, gt=0)
    """What one unit of this metric is worth in units of the objective: the trade-off that is judged; None: none is
    chosen, and the search looks for the whole Pareto front."""


class ObjectiveConfig(Section):
    """The metric that the study optimises."""

    metric: str
    """Name of the metric, as the trainer logs it."""
    goal: Literal["max", "min"]
    """Whether larger or smaller values are better."""
    at: At = "last"
    """Which value of a run counts."""
    then: TieBreak | None = None
    pareto: list[FurtherObjective] = Field(default_factory=list)
    """Further objectives."""

    @model_validator(mode="after")
    def _another_metric(self) -> ObjectiveConfig:
        if self.then is not None and self.then.metric == self.metric:
            raise ValueError("then: the tie-break must be a different metric than the objective")
        names = [self.metric, *(one.metric for one in self.pareto)]
        if len({*names}) < len(names):
            raise ValueError("pareto: every objective must be a different metric")
        if self.is_priced and any(one.price is None for one in self.pareto):
            raise ValueError("pareto: give every further objective a price, or none")
        return self

    @property
    def is_priced(self) -> bool:
        """Whether the objective is a trade-off: the metric, and further ones at their price."""
        return any(one.price is not None for one in self.pareto)

    @property
    def targets(self) -> tuple[TieBreak | ObjectiveConfig, ...]:
        """All metrics that it consists of, the objective last."""
        return (*self.pareto, *((self.then,) if self.then is not None else ()), self)


class NormaliseConfig(Section):
    """A key that is set to the value of an expression in every config."""

    set: str
    """The key."""
    to: ExpressionText
    """Its value, computed from the config."""


class FidelityConfig(Section):
    """Rungs at which runs are stopped, to be continued from their checkpoints if they are promising."""

    scheduler: Literal["model", "asha", "hyperband", "halving"] = "model"
    """What decides between new configs and stopped runs: the model of curves and knobs, or ranks at each rung."""
    min: float | None = Field(None, gt=0)
    """Step of the first rung; None: 1/27 of the steps of a whole run."""
    max: float | None = Field(None, gt=0)
    """Steps of a whole run; None: the median of the runs that have finished. Until one has, no run is stopped."""
    reduction_factor: int = Field(3, ge=2)
    """Ratio of the steps of one rung to those of the rung below; one in this many runs is promoted."""

    @model_validator(mode="after")
    def _min_below_max(self) -> FidelityConfig:
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError("fidelity: min must be less than max")
        return self


class PbtConfig(Section):
    """Population-based training as a proposer."""

    population: int = Field(8, ge=2)
    """Members that are trained side by side."""
    interval: float = Field(gt=0)
    """Steps after which a member is stopped and compared with the others."""
    quantile: float = Field(0.25, gt=0, le=0.5)
    """Members below this quantile continue from the checkpoint of one of as many at the top."""
    perturb: float = Field(1.25, gt=1)
    """Factor by which the knobs of such a member are changed, up or down."""
    resample: float = Field(0.25, ge=0, le=1)
    """Probability that a knob is drawn again instead."""
    seed: int = 0
    """Seed of the random choices."""


class SearchConfig(Section):
    """An optimiser over the knobs as a proposer."""

    sampler: Annotated[str, _one_of("samplers", "auto", "tpe", "cmaes", "gp", "random", "grid", "qmc")] = "auto"
    """`auto`: looplab's own; the others are those of Optuna, or of a plug-in."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a sampler from a plug-in."""
    seed: int = 0
    """Seed of the sampler."""
    startup: int | None = Field(None, ge=1)
    """Measured runs before the sampler relies on its model; None: the sampler's default."""
    cost: str | None = None
    """`auto`: divide the expected improvement by what the run is predicted to cost: `seconds`, or the last value of a
    metric that the trainer logs, such as its dollars; None: all runs cost the same."""
    transfer: bool = True
    """`auto`: learn from earlier studies of the lab with the same knobs and the same objective."""
    repeat_share: float = Field(0.1, ge=0, le=0.5)
    """`auto`, without a judge: the largest share of runs that repeat the config that the model believes in."""
    fidelity: FidelityConfig | None = None
    """Stops runs at rungs and continues the promising ones; None: every run is trained to its end."""

    @field_validator("fidelity", mode="before")
    @classmethod
    def _switched_on(cls, value: Any) -> Any:
        return {} if value is True else None if value is False else value


class PriceConfig(Section):
    """Dollars per million tokens, for agents that do not report their cost."""

    input: float = Field(ge=0)
    """Dollars per million input tokens."""
    output: float = Field(ge=0)
    """Dollars per million output tokens."""
    cached_input: float | None = Field(None, ge=0)
    """Dollars per million cached input tokens; None: as `input`."""


class AgentProgram(Section):
    """A coding agent: its program, its limits and what it may do."""

    cli: AgentName = "codex"
    """Which agent."""
    model: str | None = None
    """Model that it uses; None: its default."""
    binary: str | None = None
    """Path of its program; None: found on PATH."""
    command: list[str] = Field(default_factory=list)
    """`cli: command`: an argv; without {prompt_file} the prompt is passed on stdin."""
    wall: Duration
    """Wall-clock limit of one call, in seconds."""
    tokens: int | None = Field(None, ge=1)
    """Token limit of one call; None: no limit."""
    usd: float | None = Field(None, gt=0)
    """Cost limit of one call; None: no limit."""
    retries: int = Field(5, ge=0)
    """Retries of a call after rate limits, within its `wall`."""
    env: Texts = Field(default_factory=list)
    """Names of environment variables to pass on, such as OPENAI_API_KEY."""
    extra: Texts = Field(default_factory=list)
    """Additional arguments of its program."""
    writable: Texts = Field(default_factory=list)
    """Folders that it may write to, in addition to its own; relative to the lab."""
    log_mb: int = Field(16, ge=1)
    """Megabytes of its output to keep in the log, half from the start and half from the end."""
    network: bool = False
    """Whether its sandbox allows the network."""
    dangerous: bool = False
    """Run without a sandbox and without permission prompts."""
    price: PriceConfig | None = None


class AgentConfig(AgentProgram):
    """A coding agent as a proposer; it never starts training itself."""

    wall: Duration = 900.0
    prompt: InLab | None = None
    """Template of the prompt; None: looplab's own."""
    answer: InLab = "proposals/next_config.json"
    """File in which the agent may write its proposals; people may also write to it."""
    tries: int = Field(3, ge=1)
    """Attempts per round: a rejected proposal is returned to the agent with the reasons."""
    call_retries: int = Field(2, ge=0)
    """Retries of a failed or hung call before other proposers take over."""
    backoff: Duration = 10.0
    """Seconds before the first of these retries; doubles with each consecutive failure, up to ten minutes."""
    stop_on_failure: bool = False
    """End the study with exit code 1 when the agent gives up; otherwise other proposers, or a search, take over."""


class ProposerConfig(PluggableSection):
    """One proposer: exactly one of queue, rules, search, pbt, agent, or a plug-in by its name."""

    group = "proposers"

    queue: InLab | None = None
    """Proposals by people, from a file or from `looplab propose`."""
    rules: InLab | None = None
    """A rules.yaml, or a rules.py with `decide(summary, history)`."""
    search: SearchConfig | None = None
    pbt: PbtConfig | None = None
    agent: AgentConfig | None = None
    variants: int = Field(1, ge=1)
    """`rules`: maximum number of proposals per run."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        short = {"search": "sampler", "agent": "cli"}
        if isinstance(data, dict):
            return {key: {short[key]: value} if key in short and isinstance(value, str) else value
                    for key, value in data.items()}  # fmt: skip
        return data

    @model_validator(mode="after")
    def _one_of_them(self) -> ProposerConfig:
        kinds = self.model_fields_set & {"queue", "rules", "search", "pbt", "agent", "plugin"}
        if len(kinds) != 1:
            raise ValueError("a proposer is one of queue, rules, search, pbt, agent; give each its own entry")
        if "variants" in self.model_fields_set and self.rules is None:
            raise ValueError("variants belongs to rules")
        return self


class DivergeConfig(Section):
    """A metric that becomes much worse than its best value."""

    metric: str
    """Metric that is watched."""
    factor: float = Field(10.0, gt=1)
    """How many times worse than its best value so far."""
    after: float = 0.0
    """Steps to ignore at the start of a run."""


class PlateauConfig(Section):
    """A metric that no longer improves."""

    metric: str
    """Metric that is watched."""
    over: float = Field(gt=0)
    """Steps without progress."""
    least: float = Field(0.0, ge=0)
    """Smallest improvement that counts as progress, as a fraction of the last value that was progress."""


class PruneConfig(Section):
    """An Optuna pruner, for any trainer."""

    pruner: Literal["median", "asha", "hyperband", "threshold"] = "median"
    """Which of Optuna's pruners."""
    metric: str | None = None
    """None: the study's objective."""
    startup: int = Field(5, ge=0)
    """`median`: finished runs before anything is pruned."""
    warmup: float = Field(0.0, ge=0)
    """Steps before which no run is pruned."""
    every: float | None = Field(None, gt=0)
    """Steps between evaluations; None: every row is evaluated."""
    lower: float | None = None
    """`threshold`: smallest allowed value; None: no limit."""
    upper: float | None = None
    """`threshold`: largest allowed value; None: no limit."""
    min_resource: int = Field(1, ge=1)
    """`asha`, `hyperband`: in rows of the metric."""
    reduction_factor: int = Field(3, ge=2)
    """`asha`, `hyperband`: one in this many runs is continued."""
    max_resource: int | None = Field(None, ge=1)
    """`hyperband`: in rows of the metric; None: Optuna's `auto`."""


class AlertConfig(PluggableSection):
    """Where an alarm is sent: a command, a webhook, or a plug-in by its name."""

    group = "alerts"

    command: list[str] | None = Field(None, min_length=1)
    """An argv that receives the alarm as JSON on stdin."""
    webhook: str | None = None
    """An http(s) address that receives the alarm as JSON."""

    @model_validator(mode="after")
    def _one_of_them(self) -> AlertConfig:
        if len([target for target in (self.command, self.webhook, self.plugin) if target is not None]) != 1:
            raise ValueError("an alert is a command or a webhook")
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise ValueError("a webhook must begin with http:// or https://")
        return self


WATCH_KINDS = ("when", "nan", "diverge", "stall", "timeout", "plateau", "budget", "prune")


class WatchRule(PluggableSection):
    """A condition on running runs, which may be that of a plug-in, and the action to take when it holds."""

    group = "conditions"

    name: str | None = None
    """Name in messages; None: a label of the condition."""
    when: ExpressionText | None = None
    """An expression over `step`, `seconds` and the metrics: `step >= 300 and train.loss > 10`."""
    nan: bool | Texts = False
    """NaN or infinity in any metric, or in the listed ones."""
    diverge: DivergeConfig | None = None
    stall: Duration | None = None
    """Seconds without a new row."""
    timeout: Duration | None = None
    """Run time in seconds."""
    plateau: PlateauConfig | None = None
    budget: bool = False
    """The study's wall-clock or device budget is exhausted."""
    prune: PruneConfig | None = None
    stop: bool | None = None
    """Whether to stop the run; None: stop it if there is neither a note nor an alert. `requeue` always stops it."""
    requeue: list[EditText] = Field(default_factory=list)
    """Edits with which to run the config again; also stops the run."""
    requeues: int = Field(3, ge=1)
    """Maximum number of consecutive requeues, from one run to the next."""
    note: str | None = None
    """Text for the notes of the run."""
    alert: AlertConfig | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> WatchRule:
        kinds = [name for name in (*WATCH_KINDS, "plugin") if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise ValueError(f"a watch rule has exactly one of {', '.join(WATCH_KINDS)}")
        return self

    @property
    def kind(self) -> str:
        return self.plugin or next(name for name in WATCH_KINDS if getattr(self, name) not in (None, False))

    @property
    def stops(self) -> bool:
        if self.requeue:
            return True
        return self.stop if self.stop is not None else self.note is None and self.alert is None


def parse_effect(value: Any) -> Any:
    """Return the fields of an `Effect` from `0.002` or from `0.5%` (of the champion's mean)."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return {"relative": float(value.strip()[:-1]) / 100}
    return {"absolute": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class Effect(Section):
    """Smallest improvement that matters; the larger of the two applies."""

    absolute: float = Field(0.0, ge=0)
    """In units of the metric."""
    relative: float = Field(0.0, ge=0)
    """As a fraction of the champion's mean."""


class JudgeConfig(Section):
    """How a challenger becomes the champion."""

    by: Literal["test", "mean", "ratchet"] = "test"
    """`mean`: the best mean of `replicates` runs wins, no proof. `ratchet`: any improvement of a single run wins."""
    baseline_seeds: int = Field(5, ge=2)
    """Seeds of the base config to run before anything is compared with it."""
    replicates: int = Field(3, ge=2)
    """Pairs at the first look at a challenger."""
    max_replicates: int = Field(28, ge=2)
    """Pairs at the last look."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Largest probability that a study promotes a config that is not better."""
    min_effect: Annotated[Effect, BeforeValidator(parse_effect)] = Field(default_factory=Effect)
    """Smallest improvement worth a promotion: `0.002`, or `0.5%` of the champion's mean."""
    confirm: bool = True
    """Before a promotion, run the champion again on the seeds of the test; it must lose again."""

    @model_validator(mode="after")
    def _in_order(self) -> JudgeConfig:
        if self.max_replicates < self.replicates:
            raise ValueError("max_replicates, the number of pairs at the last look, must be at least replicates")
        return self


class WarmStartConfig(Section):
    """How a run starts from the weights of another run."""

    mode: str
    """Config key with the value `fresh` or `continue`."""
    source: str = Field(alias="from")
    """Config key that names the source: `latest`, `best`, a run, or a path inside the lab or `allow`."""
    checkpoint: Texts = Field(min_length=1)
    """Where a run saves its weights: names or patterns (`experiments/*.pt`) below its folder; for a trainer that writes
    elsewhere, absolute patterns below the lab or `allow`. The first pattern with a match counts, and its newest match
    is used."""
    allow: list[str] = Field(default_factory=list)
    """Folders outside the lab from which weights may be loaded."""
    arguments: Texts
    """Arguments appended to the trainer's command, with {checkpoint}."""

    @model_validator(mode="after")
    def _outside_is_absolute(self) -> WarmStartConfig:
        for folder in self.allow:
            if not Path(folder).expanduser().is_absolute():
                raise ValueError(f"allow: {folder} is not an absolute path; the lab's own files need no permission")
        for name in self.checkpoint:
            if ".." in Path(name).parts:
                raise ValueError(f"checkpoint: {name} leads out of the run folder; write an absolute pattern")
        return self


class ProbeConfig(Section):
    """What `looplab probe` tries to find the highest stable throughput."""

    sweep: dict[str, list[Any]] = Field(min_length=1)
    """Keys with their values; every combination that the guard admits is run."""
    edits: list[EditText] = Field(default_factory=list)
    """Edits that make the runs short."""
    metric: str = "sps"
    """Metric of the throughput; larger is better."""
    timeout: Duration = 120.0
    """Time limit of a run in seconds."""
    stall: Duration = 30.0
    """Seconds without a new row after which a run is stopped."""
    repeats: int = Field(1, ge=1)
    """Runs of each combination."""


class HoldoutConfig(Section):
    """A metric that only the judge reads, and only before a promotion."""

    metric: str
    """Name of the metric; it must not be the objective."""
    goal: Literal["max", "min"] | None = None
    """None: the objective's goal."""
    at: At = "last"
    """Which value of a run counts."""
    budget: int = Field(10, ge=1)
    """Maximum number of reads in the whole study."""


class SlotsConfig(Section):
    """Number of parallel runs, and their devices and cores."""

    count: int | None = Field(None, ge=1)
    """Concurrent runs, at most `per_gpu` for each device; None: that maximum, or 1 without devices."""
    gpus: Literal["auto", "none"] | list[int | str] = "auto"
    """Indices or UUIDs of the devices; `auto`: all of this machine."""
    per_gpu: int = Field(1, ge=1)
    """Slots on each device."""
    cores: Literal["auto", "none"] | list[str | list[int]] = "auto"
    """Cores of each slot, as in `[0-3, 4-7]`; `auto`: divided evenly; `none`: not pinned."""
    share: bool = False
    """Whether to use devices that other programs use."""


class SlurmConfig(Section):
    """Runs as Slurm jobs. Options of sbatch are passed unchanged; None: the cluster's default."""

    partition: str | None = None
    """Partition of the jobs."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    gres: str | None = None
    """Devices of a run, as in `gpu:a100:1`; None: from `resources.devices`."""
    time: str | None = None
    """Time limit of a job, as in `2:00:00`; None: from `launch.timeout` with a margin, else the partition's default."""
    sbatch: list[str] = Field(default_factory=list)
    """More options of sbatch, as in `--exclude=n7`."""
    setup: Texts = Field(default_factory=list)
    """Shell lines of the batch script before the run, as in `module load cuda`."""
    python: str | None = None
    """Interpreter for the launcher on the nodes, version 3.9 or newer; None: looplab's."""
    jobs: int = Field(16, ge=1)
    """Maximum number of concurrent jobs, including queued ones; `slots.count` and `--concurrency` take precedence."""
    array: bool = True
    """Submit runs that are started together as one job array."""
    lease: Duration = 30.0
    """Seconds without a heartbeat after which a run is lost if its job is over according to Slurm."""
    poll: Duration = 1.0
    """Seconds between calls of squeue."""


class RayConfig(Section):
    """Runs on a Ray cluster. What a run needs is in `resources`."""

    address: str = "auto"
    """Address of the cluster, as `ray.init` takes it; `auto`: the cluster of this machine."""
    slots: int = Field(16, ge=1)
    """Maximum number of concurrent runs; `slots.count` and `--concurrency` take precedence."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of a slot, as Ray names them."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's own description of the environment of the actors, as in `{pip: [looplab]}`."""
    idle: Duration = 60.0
    """Seconds after which a slot's actor exits if it has no runs and no engine."""
    folder: str | None = None
    """Folder on each node's local disk, for nodes that do not share the lab's disk: runs are executed there and
    copied back. None: the nodes share the folder of the lab."""
    copy_mb: int = Field(1024, ge=1)
    """`folder`: maximum size of what is copied back for a run, in MB; larger files stay on the node."""


class ExecutorConfig(PluggableSection):
    """What starts the runs: this machine (`local`), `slurm`, `ray`, or a plug-in by its name."""

    group = "executors"
    use: str | None = None
    """The executor that is used if the options of several are given; None: the only one, else `local`."""
    slurm: SlurmConfig | None = None
    ray: RayConfig | None = None
    freeze: bool = True
    """Whether runs that may wait in a queue run from a copy of the code, made when they are submitted."""
    environment: list[str] | None = None
    """Variables of the engine that runs on other machines get, by name or pattern (`HF_*`); None: all, except those
    that belong to the machine, the terminal or the login of the engine."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"use": data}
        return data

    @model_validator(mode="after")
    def _exists(self) -> ExecutorConfig:
        if self.use is not None and self.use not in self.names():
            raise ValueError(f"there is no executor {self.use!r}; installed: {', '.join(self.names())}")
        return self

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all executors."""
        return ["local", *BUILT_IN_EXECUTORS, *plugins.names(cls.group)]

    @property
    def name(self) -> str:
        """The executor that is used."""
        given = [name for name in BUILT_IN_EXECUTORS if getattr(self, name) is not None]
        given += [self.plugin] if self.plugin is not None else []
        return self.use or (given[0] if len(given) == 1 else "local")


BUILT_IN_EXECUTORS = ("slurm", "ray")
"""Executors other than `local` that come with looplab, each with a section for its options."""


class ResourcesConfig(Section):
    """What each run needs, for executors that choose the place; None: as set in their own options."""

    devices: int | None = Field(None, ge=0)
    """Number of devices."""
    cores: int | None = Field(None, ge=1)
    """Number of cores."""
    memory_mb: int | None = Field(None, ge=1)
    """Memory in megabytes."""
    time: Duration | None = None
    """Seconds after which the scheduler ends the run; None: from `launch.timeout`, with a margin."""
    constraints: dict[str, str] = Field(default_factory=dict)
    """Scheduler-specific requirements, by option: `constraint: a100`."""


class RetryConfig(Section):
    """How often a run is tried again, in its folder and from its checkpoint, if its place failed; None: as the executor
    says (`local`: never)."""

    lost: int | None = Field(None, ge=0)
    """Its machine failed, or its end was not observed."""
    preempted: int | None = Field(None, ge=0)
    """A scheduler stopped it in favour of another job."""

    def allowed(self, reason: str, defaults: Mapping[str, int]) -> int:
        """Return the number of further attempts after ends of this reason."""
        given: int | None = getattr(self, reason, None)
        return defaults.get(reason, 0) if given is None else given


class BudgetConfig(Section):
    """Limits of the whole study; None: no limit."""

    rounds: int | None = Field(None, ge=1)
    """Number of rounds."""
    runs: int | None = Field(None, ge=1)
    """Number of runs."""
    wall: Duration | None = None
    """Seconds during which an engine runs."""
    device_hours: float | None = Field(None, gt=0)
    """Device hours, or slot hours without a device; also spelled `gpu_hours`."""
    usd: float | None = Field(None, gt=0)
    """Total cost of all agents."""
    tokens: int | None = Field(None, ge=1)
    """Total tokens of all agents."""

    @model_validator(mode="before")
    @classmethod
    def _gpu_hours(cls, data: Any) -> Any:
        if isinstance(data, dict) and "gpu_hours" in data:
            data = dict(data)
            if "device_hours" in data:
                raise ValueError("gpu_hours and device_hours mean the same: give only one")
            data["device_hours"] = data.pop("gpu_hours")
        return data


class MeasureConfig(Section):
    """Where metrics come from and which way they improve."""

    sources: Literal["auto"] | list[str] = "auto"
    """Where to look for metrics, by name of the source; `auto`: everywhere."""
    aliases: dict[str, Texts] = Field(default_factory=dict)
    """Metrics, each with the other names that trainers use for it, in order of preference."""
    groups: dict[str, Texts] = Field(default_factory=dict)
    """Groups of metrics, in which `looplab show` lists them."""
    stdout: Texts = Field(default_factory=list)
    """Regular expressions with named groups, for printed metrics."""
    goals: dict[str, Literal["max", "min"]] = Field(default_factory=dict)
    """Direction of further metrics, for tables and reports."""


WandbKey = Literal["enable", "mode", "entity", "project", "artifacts", "disable_artifact"]


class WandbConfig(Section):
    """W&B settings that every run receives."""

    mode: Literal["online", "offline", "disabled"] = "offline"
    """Whether runs are sent to W&B, kept for later, or not tracked."""
    entity: str | None = None
    """Team or user; None: the trainer's setting."""
    project: str | None = None
    """Project; None: the trainer's setting."""
    artifacts: bool = False
    """Whether trainers may upload artifacts."""
    keys: Literal["auto", "none"] | dict[WandbKey, str] = "auto"
    """The config's own W&B keys, which are set in every run: found by name (`wandb.mode`, `wandb_project`), none,
    or listed here. Trainers pass such keys to `wandb.init`, where they override the environment."""


class TrackConfig(Section):
    """Experiment trackers."""

    wandb: WandbConfig | None = None


class AnchorConfig(Section):
    """Where the head of the ledger's chain is published, out of reach of anyone who can write to the ledger."""

    git: bool = False
    """As a note under refs/notes/looplab on the lab repository's HEAD; the user pushes it."""
    file: str | None = Field(None, min_length=1)
    """A file to which a line is appended; may be outside the lab."""
    command: list[str] | None = Field(None, min_length=1)
    """An argv that receives the line on stdin."""
    sign: str | None = Field(None, min_length=1)
    """An SSH key that signs the line: a private key without a passphrase, or a public key known to ssh-agent."""
    every: Duration = 600.0
    """Seconds between publications while an engine runs; it also publishes at start, end and promotion."""


class Require(Section):
    """Requirements of a formal run; `--informal` waives them."""

    gpu: bool = False
    """A run needs a device."""
    wandb: Literal["online"] | None = None
    """A run is tracked online."""


STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
RESERVED_NAMES = (
    "stages", "logs", "previous", "partial", "config_resolved.json", "config_call.json", "pipeline.json", "train.log",
    "process.json", "exit.json",
)  # fmt: skip
"""Names that looplab itself writes in the run folder of a pipeline."""


def check_entry(text: str) -> str:
    if not re.fullmatch(r"[^:\s]+\.py:[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        raise ValueError(f"{text!r} is not a function; write file.py:function or module:function")
    return text


def check_output(text: str) -> str:
    """Reject outputs outside the run folder: outputs may be deleted, and nothing else may be."""
    parts = Path(text).parts
    if not parts or Path(text).is_absolute() or ".." in parts:
        raise ValueError(f"{text!r} is not a file or folder below the run folder")
    if parts[0] in RESERVED_NAMES or parts[0].startswith("."):
        raise ValueError(f"{parts[0]} is reserved for looplab in a run folder; rename the output")
    return text


class StageConfig(Section):
    """One step of a pipeline: a command or a Python function, and the inputs of its result."""

    command: list[str] | None = Field(None, min_length=1)
    """An argv: {python} {config} {run_dir} {run_id} {stage} {lab} {study} {slot} {devices}, and {dotted.key}s."""
    entry: Annotated[str, AfterValidator(check_entry)] | None = None
    """`file.py:function` or `module:function`, called with (config, run_dir) in its own process."""
    after: Texts = Field(default_factory=list)
    """Stages whose outputs it uses."""
    reads: Texts | None = None
    """Sections of the config that it depends on; None: the whole config."""
    ignores: Texts = Field(default_factory=list)
    """Keys in these sections that do not change its result, such as a batch size."""
    code: TextsInLab = Field(default_factory=list)
    """Patterns of its source files."""
    files: Texts = Field(default_factory=list)
    """Other files and folders that it reads; may contain config keys: "{model.name_or_path}"."""
    outputs: list[Annotated[str, AfterValidator(check_output)]] = Field(default_factory=list)
    """What it writes in the run folder. A stage is complete when it succeeded and all outputs exist."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables."""
    timeout: Duration | None = None
    """Time limit in seconds; None: no limit."""
    grace: Duration = 10.0
    """Seconds between SIGTERM and SIGKILL."""

    @model_validator(mode="after")
    def _one_of_them(self) -> StageConfig:
        if (self.command is None) == (self.entry is None):
            raise ValueError("a stage is a command or an entry")
        return self


class PipelineConfig(Section):
    """Where the runs of the stages are."""

    root: str = "outputs/{study}-stages"
    """Parent of the run folders, inside the lab; may contain config keys."""
    run_id: str | None = None
    """Name of the run, such as "{outputs.run_id}"; None: a time stamp."""
    artifacts: str | None = None
    """Config key that names another run whose stages are reused."""
    fits: Texts = Field(default_factory=list)
    """Sections of the config that must be the same here and in that run."""
    env: dict[str, str] = Field(default_factory=dict)
    """For every stage."""
    resolve: list[str] | None = Field(None, min_length=1)
    """An argv ({python} {config} {lab} {study}) that checks a config and prints it with all defaults, as JSON. A config
    that it rejects is not run."""
    keep: int = Field(2, ge=0)
    """How many earlier outputs of a stage that ran again are kept, in `previous/` of the run folder."""


class SuiteConfig(Section):
    """How the datasets of a suite reach the config; a suite file may set the same keys."""

    fields: dict[str, str] = Field(default_factory=dict)
    """Short names of config keys in the entries of datasets; `name`: the key that receives the dataset's name."""
    run_name: str | None = None
    """Config key that is set to `<prefix>_<name>`, and is part of `pipeline.root`; None: no key is set."""
    tables: dict[str, str] = Field(default_factory=dict)
    """Maps each table of the suite, a CSV file, to the table of a run that it collects."""

    @model_validator(mode="after")
    def _tables_are_files(self) -> SuiteConfig:
        for table in self.tables:
            if Path(table).name != table or not table.endswith(".csv"):
                raise ValueError(f"tables: {table!r} is not the name of a CSV file")
        return self


class CaseConfig(Section):
    """What `looplab case` runs: a close look at a few examples."""

    command: list[str] = Field(min_length=1)
    """Like a stage's. Each other {name} is an option: `--name value`."""
    defaults: dict[str, str | int | float] = Field(default_factory=dict)
    """Values of options that are not passed."""
    after: Texts = Field(default_factory=list)
    """Stages that must be complete."""
    outputs: list[Annotated[str, AfterValidator(check_output)]] = Field(default_factory=lambda: ["cases/*.md"])
    """Patterns of the files that it writes in the run folder."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables."""


def check_stages(stages: Mapping[str, StageConfig]) -> None:
    """Check the names, order and outputs of stages.

    Raises:
        ValueError: A name is invalid, a dependency is missing or circular, or two stages write the same output.
    """
    outputs: list[tuple[Path, str]] = []
    for name, stage in stages.items():
        if not STAGE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot be a stage's name: letters, digits, `_`, `-`")
        for other in stage.after:
            if other not in stages:
                raise ValueError(f"stages.{name}.after: there is no stage {other!r}{suggest(other, list(stages))}")
        for output in map(Path, stage.outputs):
            for other_output, writer in outputs:
                if output.is_relative_to(other_output) or other_output.is_relative_to(output):
                    raise ValueError(
                        f"stages.{name} and stages.{writer} both write {output}: an output must have one writer"
                    )
            outputs.append((output, name))
    try:
        TopologicalSorter({name: stage.after for name, stage in stages.items()}).prepare()
    except CycleError as error:
        raise ValueError(f"stages wait for each other: {', '.join(n for n in stages if n in error.args[1])}") from None


STAGES_AS_TRAINER = [
    "{python}", "-m", "looplab", "stage", "--lab", "{lab}", "--study", "{study}", "--config", "{config}",
    "--run-dir", "{run_dir}/pipeline",
]  # fmt: skip
"""Command of a study with stages and without a launch: it runs all stages."""


class StudyConfig(Section):
    """One question: base configs, knobs, objective, budget, proposers."""

    name: Annotated[str, AfterValidator(check_study_name)] = Field(alias="study")
    """Name of the study; its runs go to `outputs/<study>/`."""
    launch: LaunchConfig
    base: TextsInLab = Field(default_factory=list)
    """Config files of the first round."""
    modes: dict[str, list[EditText]] = Field(default_factory=dict)
    """Named lists of edits on the base, for `--mode`."""
    flags: dict[Annotated[str, AfterValidator(check_flag)], str] = Field(default_factory=dict)
    """Config keys that `--steps`, `--log-freq` and `--eval-freq` edit; by default found by their names."""
    objective: ObjectiveConfig | None = None
    knobs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Config keys that proposers may change: path → `{type, low, high, log, step}` or `{choices: [...]}`."""
    normalise: list[NormaliseConfig] = Field(default_factory=list)
    derive: dict[str, ExpressionText] = Field(default_factory=dict)
    """Keys that are always computed from others."""
    constraints: list[ExpressionText] = Field(default_factory=list)
    """Expressions that must be true for every config."""
    seed: str | None = None
    """Config key of the random seed; None: found by its name."""
    deterministic: bool = False
    """A config with a fixed seed always measures the same: no noise floor; each winner is repeated once to check it."""
    holdout: HoldoutConfig | None = None
    proposers: list[ProposerConfig] = Field(default_factory=list)
    mix: Literal["bandit", "order"] = "bandit"
    """How proposers share the study: by success so far, or in order, each filling what earlier ones leave open."""
    warm_start: WarmStartConfig | None = None
    probe: ProbeConfig | None = None
    watch: list[WatchRule] = Field(default_factory=list)
    judge: JudgeConfig | None = None
    """None: no verdicts; the best run is only a hint."""
    round_size: int | None = Field(None, ge=1)
    """Runs per round; None: the number of slots."""
    slots: SlotsConfig = Field(default_factory=SlotsConfig)
    executor: ExecutorConfig = Field(default_factory=ExecutorConfig)
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)
    retry: RetryConfig = Field(default_factory=RetryConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    measure: MeasureConfig = Field(default_factory=MeasureConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)
    require: Require = Field(default_factory=Require)
    anchor: AnchorConfig | None = None
    """The ledger belongs to the lab, so `looplab anchor` and `verify` use the anchors of all studies."""
    data: TextsInLab = Field(default_factory=list)
    """Files and folders whose hashes are recorded in every capsule."""
    evaluator: TextsInLab = Field(default_factory=list)
    """Files that compute the metrics: runs with different versions of them cannot be compared."""
    needs_exec: bool = False
    """`run` only shows the plan unless `--exec` is given."""
    keep_going: bool = False
    """Continue even if no base config works."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    stages: dict[str, StageConfig] = Field(default_factory=dict)
    suite: SuiteConfig = Field(default_factory=SuiteConfig)
    case: CaseConfig | None = None

    @property
    def goals(self) -> dict[str, Literal["max", "min"]]:
        """Direction of each metric for which the lab file names one."""
        targets = self.objective.targets if self.objective is not None else ()
        return {**self.measure.goals, **{target.metric: target.goal for target in targets}}

    @property
    def last_values(self) -> int:
        """Number of last values of a metric that the objective and its tie-break are computed from."""
        return max([1, *(parse_at(target.at) or 1 for target in (self.objective.targets if self.objective else ()))])

    @property
    def judge_rule(self) -> Literal["test", "mean", "ratchet", "deterministic"] | None:
        """Rule by which configs are promoted; None: the study has no judge."""
        if self.judge is None:
            return None
        return "deterministic" if self.deterministic and self.judge.by == "test" else self.judge.by

    @model_validator(mode="before")
    @classmethod
    def _stages_alone(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("stages") and "launch" not in data:
            return {**data, "launch": {"command": STAGES_AS_TRAINER}}
        return data

    @model_validator(mode="after")
    def _stages_fit(self) -> StudyConfig:
        check_stages(self.stages)
        missing = [name for name in (self.case.after if self.case else ()) if name not in self.stages]
        if missing:
            raise ValueError(f"case.after: there is no stage {missing[0]!r}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _short_judge(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("judge"), str):
            rule = data["judge"]
            return {**data, "judge": None if rule == "none" else {"by": rule}}
        return data

    @property
    def is_searched(self) -> bool:
        """Whether a search proposes runs, so that an objective is needed."""
        return any(entry.search is not None or entry.pbt is not None for entry in self.proposers)

    @model_validator(mode="after")
    def _measurable(self, info: ValidationInfo) -> StudyConfig:
        for key, section in (("judge", self.judge), ("holdout", self.holdout)):
            if section is not None and self.objective is None and not (info.context or {}).get("draft"):
                raise ValueError(f"{key} needs an objective: name the metric to optimise ({FIND_OBJECTIVE})")
        if self.objective is not None and self.holdout is not None and self.holdout.metric == self.objective.metric:
            raise ValueError("the held-out metric must be a different one than the objective")
        tie_break = self.objective.then if self.objective is not None else None
        if tie_break is not None and self.holdout is not None and self.holdout.metric == tie_break.metric:
            raise ValueError("the held-out metric is hidden, so it cannot break ties")
        further = {one.metric for one in self.objective.pareto} if self.objective is not None else set()
        if self.holdout is not None and self.holdout.metric in further:
            raise ValueError("the held-out metric is hidden, so it cannot be one of the objectives")
        return self


def derived_study(study: StudyConfig, inherited: Sequence[str], **changed: Any) -> StudyConfig:
    """Return a study derived from another one; every field is either changed or inherited by name.

    Raises:
        TypeError: A field is in neither, or in both: whoever adds one decides what derived studies do with it.
    """
    unclear = (StudyConfig.model_fields.keys() ^ {*inherited, *changed}) | ({*inherited} & changed.keys())
    if unclear:
        raise TypeError(f"inherited or changed? {', '.join(sorted(unclear))}")
    return study.model_copy(update=changed)


class LabConfig:
    """A folder with a lab.yaml."""

    def __init__(
        self,
        folder: Path,
        studies: Mapping[str, StudyConfig],
        lines: Callable[..., int | None] = lambda study, *keys: None,
        notes: Sequence[str] = (),
        state_dir: str | None = None,
    ) -> None:
        self.folder = folder
        self.state_dir = state_dir
        """Folder with the state folders of labs, for the ledger; None: LOOPLAB_STATE_DIR, or the lab itself."""
        self.notes = tuple(notes)
        """Notes on the lab file for its author, such as renamed keys."""
        self.studies = dict(studies)
        self._lines = lines

    @contextmanager
    def at(self, study: StudyConfig, *keys: str) -> Iterator[None]:
        """Report any LabError raised inside the block at this place of the lab file."""
        try:
            yield
        except LabError as error:
            if error.file is not None:
                raise
            line = self._lines(study.name, *keys)
            raise LabError(error.message, file=self.folder / LAB_FILE, line=line, hint=error.hint) from None

    @property
    def ledger_path(self) -> Path:
        """The ledger, which may not exist yet; whoever may create it calls `claim_ledger` instead.

        Raises:
            LabError: It is on another machine, or not where the lab file says.
        """
        return state_folder(self.folder, self.state) / LEDGER

    @property
    def state(self) -> StateConfig:
        return StateConfig.of(self.folder, self.state_dir)

    def claim_ledger(self) -> Path:
        """Return the path of the ledger; if the lab has none yet, fix its location for good."""
        return claim_state_folder(self.folder, self.state) / LEDGER

    @property
    def anchors(self) -> list[AnchorConfig]:
        return [study.anchor for study in self.studies.values() if study.anchor is not None]

    def study(self, name: str | None) -> StudyConfig:
        """Return the study of this name; None: the only study.

        Raises:
            LabError: There is no such study, or several and no name.
        """
        if name is None:
            if len(self.studies) > 1:
                raise LabError(
                    f"the lab has several studies: {', '.join(self.studies)}", hint="choose one with --study"
                )
            return next(iter(self.studies.values()))
        if name not in self.studies:
            near = difflib.get_close_matches(name, self.studies, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self.studies)}"
            raise LabError(f"the lab has no study {name!r}", hint=hint)
        return self.studies[name]


def find_lab(start: Path) -> Path:
    """Return the folder of the lab that contains `start`; raise LabError if there is none."""
    start = start.resolve()
    if start.is_file():
        return start.parent
    for folder in (start, *start.parents):
        if (folder / LAB_FILE).exists():
            return folder
    raise LabError(
        f"no {LAB_FILE} in {start} or above",
        hint="change to your lab, pass --lab, or create one: `looplab init train.py` for your own script, "
        "`looplab init quickstart` for an example",
    )


def load_lab(folder: Path, *, draft: bool = False) -> LabConfig:
    """Read and check the lab file.

    A single study is at the top level. Several are in the list `studies:`; the other top-level keys are their common
    defaults.

    Args:
        draft: Whether the objective may still be missing where it will be needed.

    Raises:
        LabError: The file cannot be read or is invalid; names the line.
    """
    path = folder / LAB_FILE
    document = read_document(path)
    data = document.plain()
    state_dir = _pop_state_dir(document, data)
    blocks: list[tuple[dict[str, Any], tuple[str | int, ...]]]
    if "studies" in data:
        common = {key: value for key, value in data.items() if key != "studies"}
        listed = data["studies"]
        if not isinstance(listed, list) or not listed or not all(isinstance(block, dict) for block in listed):
            raise LabError("studies: must be a list of studies", file=path, line=document.line_of(("studies",)))
        blocks = [({**common, **block}, ("studies", i)) for i, block in enumerate(listed)]
    else:
        blocks = [(data, ())]
    studies: dict[str, StudyConfig] = {}
    places: dict[str, tuple[str | int, ...]] = {}
    notes: dict[str, None] = {}
    for raw_block, at in blocks:
        block, old_keys = rename_keys(raw_block)
        for (section, key), new in old_keys.items():
            line = line_of(document, at, (section, key))
            notes[
                f"{path.name}:{line}: {section}.{key} is now {section}.{new}; the old name works in this release only"
            ] = None
        study = check_section(StudyConfig, block, document, at=at, draft=draft)
        if study.name in studies:
            raise LabError(
                f"two studies have the name {study.name!r}",
                file=path,
                line=document.line_of((*at, "study")),
                hint="rename one",
            )
        studies[study.name] = study
        places[study.name] = at
    return LabConfig(
        folder, studies, lambda study, *keys: line_of(document, places[study], keys), tuple(notes), state_dir
    )


def read_state_dir(folder: Path) -> str | None:
    """Return `state_dir` of the lab file without checking the rest; None: there is none, or no lab file."""
    path = folder / LAB_FILE
    if not path.exists():
        return None
    document = read_document(path)
    return _pop_state_dir(document, document.plain())


def _pop_state_dir(document: Document, data: dict[str, Any]) -> str | None:
    state_dir = data.pop("state_dir", None)
    if state_dir is not None and (not isinstance(state_dir, str) or not state_dir):
        raise LabError("state_dir takes a folder", file=document.path, line=document.line_of(("state_dir",)))
    return state_dir


def check_definition(study: Mapping[str, Any], folder: Path) -> StudyConfig:
    """Check a study that is not in a file yet.

    Raises:
        LabError: Something in it is wrong.
    """
    return check_section(StudyConfig, dict(study), folder=folder)
