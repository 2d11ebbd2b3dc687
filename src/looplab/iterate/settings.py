"""`iterate.yaml`, and the environment variables that override it. Every mistake is named with its line."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from looplab.agents.base import AgentSpec, Limits, TokenPrice
from looplab.config.files import Document, read_document
from looplab.config.lab import Duration, Effect, InLab, PriceConfig, Section, Texts, TextsInLab, parse_effect
from looplab.errors import LabError
from looplab.untrusted import real_path

FILE = "iterate.yaml"
PLACES = {"python", "version", "number", "scratch", "result", "lab"}
"""What a command may have in braces."""
OVERRIDES = {
    "binary": ("LOOPLAB_AGENT_BIN", "CODEX_BIN"),
    "approval": ("LOOPLAB_APPROVAL_FLAGS", "CODEX_APPROVAL_FLAGS"),
    "json": ("LOOPLAB_JSON_FLAGS", "CODEX_JSON_FLAGS"),
    "logs": ("LOOPLAB_RUN_LOG_DIR", "CODEX_RUN_LOG_DIR"),
    "experiments": ("LOOPLAB_EXPERIMENTS_ROOT", "EXPERIMENTS_ROOT"),
    "workdir": ("LOOPLAB_WORKDIR", "FISH_RL_WORKDIR"),
}
"""What each variable overrides; the first one that is set counts. Set to nothing, flags really are none."""
ANYTHING = ("--dangerously-bypass-approvals-and-sandbox", "--yolo")
Sandbox = Literal["read-only", "workspace-write", "danger-full-access"]
SANDBOXES: dict[str, Sandbox] = {
    "read-only": "read-only", "workspace-write": "workspace-write", "danger-full-access": "danger-full-access",
}  # fmt: skip


def _known_places(command: list[str]) -> list[str]:
    for word in command:
        if word.startswith("{") and word.endswith("}") and word[1:-1] not in PLACES:
            raise ValueError(f"{word} is not known; there are {', '.join(sorted(f'{{{p}}}' for p in PLACES))}")
    return command


Command = Annotated[list[str], Field(min_length=1), AfterValidator(_known_places)]


class Smoke(Section):
    """A short training, to see that the version runs at all.

    It may write to the version's worktree, to `{scratch}` (which is also its TMPDIR), and nowhere else.
    """

    command: Command
    timeout: Duration = 180.0
    writable: Texts = Field(default_factory=list)
    """Further folders that it may write to, such as a cache; from the lab, or with `~`."""


class Evaluate(Section):
    """The frozen evaluation: run from the lab's own tree, on what a version left in its folder."""

    command: Command
    timeout: Duration = 600.0
    metric: str
    """The key of its JSON result that counts; dots lead into objects."""
    values: str | None = None
    """The key of the list of values, one an episode, in the same order for every version."""
    goal: Literal["max", "min"] = "max"
    declared: str = "artifacts/eval.json"
    """Where a version may have written what it measured itself: only compared, never believed."""


class Schedule(Section):
    """What the training wanted to do over time, and what it did."""

    declared: str
    trace: str
    strict: bool = False
    """Whether a value that is never reached is an error, not a warning."""


class VersionJudging(Section):
    """How a version becomes the champion."""

    alpha: float = Field(0.05, gt=0, lt=0.5)
    """How likely any version at all may be promoted that is not better."""
    share: float = Field(0.15, gt=0, lt=1)
    """The part of the alpha still left that the next version's test gets."""
    replicates: int = Field(5, ge=2)
    """Fewer episodes than this prove nothing."""
    min_effect: Annotated[Effect, BeforeValidator(parse_effect)] = Field(default_factory=Effect)
    """What is too small to matter: `0.002`, or `0.5%` of the champion."""


class VersionAgent(Section):
    """Who writes the versions."""

    cli: Literal["codex", "claude", "command"] = "codex"
    model: str | None = None
    binary: str | None = None
    command: list[str] = Field(default_factory=list)
    """`command`: an argv; {prompt_file} is replaced, else the prompt comes on stdin."""
    wall: Duration = 7200.0
    tokens: int | None = Field(None, ge=1)
    usd: float | None = Field(None, gt=0)
    """What one call may take."""
    retries: int = Field(5, ge=0)
    """How often a call is repeated after a rate limit."""
    env: Texts = Field(default_factory=list)
    """Names of variables that it gets, such as OPENAI_API_KEY."""
    extra: Texts = Field(default_factory=list)
    """Further arguments of its program."""
    allowed_tools: Texts = Field(default_factory=lambda: ["Read", "Glob", "Grep", "Bash"])
    """claude: tools that need no permission, beside edits in the worktree."""
    writable: Texts = Field(default_factory=list)
    """Folders that it may write to beside the worktree; relative ones are in the lab."""
    log_mb: int = Field(16, ge=1)
    """Megabytes of what it prints that its log keeps: the first half and the last one."""
    network: bool = False
    dangerous: bool = False
    """Without a sandbox and without permissions."""
    price: PriceConfig | None = None


class IterateConfig(Section):
    experiments: InLab = "experiments"
    """The folder of the versions."""
    frozen: TextsInLab = Field(default_factory=list)
    """Files and folders outside of the agent's reach; this file is always one of them."""
    sop: InLab = "SOP.md"
    """The standard operating procedure that the agent reads first."""
    sections: Texts = Field(default_factory=lambda: ["Plan", "Observations", "Runs", "Results", "Learning"])
    """What `dev_vX.md` must have, each with some text."""
    smoke: Smoke | None = None
    evaluate: Evaluate
    artifacts: Texts = Field(default_factory=list)
    """Patterns below the version's folder; each must match a file that is not empty."""
    schedule: Schedule | None = None
    min_parallel_envs: int = Field(64, ge=1)
    agent: VersionAgent = Field(default_factory=VersionAgent)
    retries: int = Field(1, ge=0)
    """How often the agent is asked again when a gate is not passed."""
    prompt: InLab | None = None
    """The template of the prompt; looplab's own if not said."""
    logs: str = "agent_runs"
    venv: bool = True
    """Whether the convention of a `venv/` at the root holds."""
    submit: bool = True
    """Whether the agent trains through `looplab submit`; needs a lab.yaml."""
    study: str | None = None
    """`submit`: the study whose slots it uses, where the lab has several."""
    push: bool = False
    """Whether the lab's branch is pushed after each version."""
    judge: VersionJudging = Field(default_factory=VersionJudging)


@dataclass(frozen=True, slots=True)
class Flags:
    """What the environment says about the agent's program; None: nothing."""

    binary: str | None = None
    approval: tuple[str, ...] | None = None
    json: tuple[str, ...] | None = None


def override(name: str, environ: Mapping[str, str]) -> str | None:
    """The value of the variable that overrides this setting; None if none is set."""
    return next((environ[variable] for variable in OVERRIDES[name] if variable in environ), None)


def find_folder(given: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder with the `iterate.yaml`: the one that is given, else as the environment says, else around here."""
    named = override("workdir", environ)
    start = (given or Path(named or ".")).resolve()
    for folder in (start, *start.parents):
        if (folder / FILE).exists():
            return folder
    raise LabError(f"no {FILE} in {start} or above", hint="make a lab with `looplab init fish`, or give --lab")


def load(folder: Path, environ: Mapping[str, str] | None = None) -> IterateConfig:
    environ = os.environ if environ is None else environ
    path = folder / FILE
    document = read_document(path)
    try:
        settings = IterateConfig.model_validate(document.plain(), context={"folder": folder})
    except ValidationError as error:
        raise _wrong(document, error) from None
    changed = {}
    if experiments := override("experiments", environ):
        inside = real_path(folder / experiments)
        if not inside.is_relative_to(folder.resolve()) or inside == folder.resolve():
            raise LabError(f"EXPERIMENTS_ROOT={experiments} is no folder inside the lab {folder}")
        changed["experiments"] = str(inside.relative_to(folder.resolve()))
    if logs := override("logs", environ):
        changed["logs"] = logs
    return settings.model_copy(update=changed)


def read_flags(environ: Mapping[str, str]) -> Flags:
    def words(name: str) -> tuple[str, ...] | None:
        text = override(name, environ)
        try:
            return None if text is None else tuple(shlex.split(text))
        except ValueError as error:
            raise LabError(f"{' or '.join(OVERRIDES[name])}: {error}") from None

    return Flags(override("binary", environ) or None, words("approval"), words("json"))


def make_spec(agent: VersionAgent, flags: Flags, extra: Sequence[str] = ()) -> AgentSpec:
    """The agent to be asked. Without `--json` among its flags codex prints plain text, and is run as any command is."""
    price = agent.price
    spec = AgentSpec(
        agent.cli, agent.model, agent.binary, tuple(agent.command), network=agent.network,
        extra_args=(*agent.extra, *extra), env=tuple(agent.env), dangerous=agent.dangerous,
        allowed_tools=tuple(agent.allowed_tools), writable=tuple(agent.writable),
        price=TokenPrice(price.input, price.output, price.cached_input) if price is not None else None,
    )  # fmt: skip
    if agent.cli == "command":
        return spec
    spec = replace(spec, binary=flags.binary or spec.binary)
    if agent.cli != "codex":
        return spec
    spec = _approved(spec, flags.approval) if flags.approval is not None else spec
    if flags.json is None or "--json" in flags.json:
        more = tuple(flag for flag in flags.json or () if flag != "--json")
        return replace(spec, extra_args=(*more, *spec.extra_args))
    approval = flags.approval
    if approval is None:
        approval = (ANYTHING[0],) if spec.dangerous else ("--sandbox", spec.sandbox)
    model = ("--model", spec.model) if spec.model else ()
    rest = (*approval, *flags.json, *model, *agent.extra, *extra, "-")
    command = (spec.binary or "codex", "exec", "--skip-git-repo-check", *rest)
    return replace(spec, cli="command", command=command, extra_args=(), confines_itself=True)


def _approved(spec: AgentSpec, flags: tuple[str, ...]) -> AgentSpec:
    """The approval flags of the environment, in our words; whoever sets them knows what they mean."""
    rest: list[str] = []
    sandbox: Sandbox = "workspace-write"
    dangerous = False
    words = iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        if word in ANYTHING:
            dangerous = True
        elif name in ("--sandbox", "-s"):
            kind = value if equals else next(words, "")
            if kind not in SANDBOXES:
                raise LabError(f"the approval flags ask for a sandbox {kind!r}", hint=f"one of {', '.join(SANDBOXES)}")
            sandbox = SANDBOXES[kind]
            dangerous |= sandbox == "danger-full-access"
        elif word != "--full-auto":  # an older word for what is our default
            rest.append(word)
    return replace(spec, sandbox=sandbox, dangerous=dangerous, extra_args=(*rest, *spec.extra_args))


def limits_of(agent: VersionAgent) -> Limits:
    return Limits(agent.wall, agent.tokens, agent.usd, retries=agent.retries, log_bytes=agent.log_mb << 20)


def _wrong(document: Document, error: ValidationError) -> LabError:
    """The first mistake, with its line."""
    problem = error.errors()[0]
    where = [part for part in problem["loc"] if isinstance(part, int) or "[" not in part]  # not pydantic's own words
    line = next((n for end in range(len(where), 0, -1) if (n := document.line_of(tuple(where[:end])))), None)
    key = ".".join(map(str, where))
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(where[-1]), _keys(where[:-1]), 1)
        said = f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")
    elif problem["type"] == "missing":
        said = f"{key!r} is missing"
    else:
        said = f"{key}: {str(problem['msg']).removeprefix('Value error, ')}"
    return LabError(said, file=document.path, line=line)


def _keys(where: Sequence[str | int]) -> list[str]:
    model: Any = IterateConfig
    for part in where:
        field = model.model_fields.get(str(part))
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        if model is None:
            return []
    return list(model.model_fields)
