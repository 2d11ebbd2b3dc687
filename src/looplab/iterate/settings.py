"""`iterate.yaml` and the environment variables that override it. Errors name file and line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from looplab.agents.base import AgentSpec, Limits
from looplab.agents.run import spec_of
from looplab.config.files import read_document
from looplab.config.lab import ITERATE_FILE, AgentProgram, Duration, Effect, InLab, Texts, TextsInLab, parse_effect
from looplab.config.validation import Section, check_section
from looplab.errors import LabError
from looplab.untrusted import real_path

FILE = ITERATE_FILE
VARIABLES = {"python", "version", "number", "scratch", "result", "lab"}
"""Variables that commands may use in braces."""
Setting = Literal["experiments", "logs", "binary", "approval_flags", "json_flags"]
OVERRIDES: dict[Setting, str] = {
    "experiments": "LOOPLAB_EXPERIMENTS_ROOT",
    "logs": "LOOPLAB_RUN_LOG_DIR",
    "binary": "LOOPLAB_AGENT_BIN",
    "approval_flags": "LOOPLAB_APPROVAL_FLAGS",
    "json_flags": "LOOPLAB_JSON_FLAGS",
}
"""Environment variable of each setting. Empty flags mean no flags."""
WORKDIR = "LOOPLAB_WORKDIR"
"""Environment variable with the folder of the lab."""
UNSAFE_FLAGS = ("--dangerously-bypass-approvals-and-sandbox", "--yolo")
Sandbox = Literal["read-only", "workspace-write", "danger-full-access"]
SANDBOXES: dict[str, Sandbox] = {
    "read-only": "read-only", "workspace-write": "workspace-write", "danger-full-access": "danger-full-access",
}  # fmt: skip


def _check_variables(command: list[str]) -> list[str]:
    for word in command:
        if word.startswith("{") and word.endswith("}") and word[1:-1] not in VARIABLES:
            raise ValueError(f"{word} is unknown; variables: {', '.join(sorted(f'{{{p}}}' for p in VARIABLES))}")
    return command


Command = Annotated[list[str], Field(min_length=1), AfterValidator(_check_variables)]


class Smoke(Section):
    """A short training that shows whether the version runs.

    It may write only to the version's worktree and to `{scratch}`, which is also its TMPDIR.
    """

    command: Command
    """Its argv."""
    timeout: Duration = 180.0
    """Time limit in seconds."""
    writable: Texts = Field(default_factory=list)
    """More folders that it may write to, such as a cache; relative to the lab, or with `~`."""


class Evaluate(Section):
    """The frozen evaluation: runs in the lab's own tree, on the folder of a version."""

    command: Command
    """Its argv."""
    timeout: Duration = 600.0
    """Time limit in seconds."""
    metric: str
    """Key of the metric in its JSON result; dots lead into objects."""
    values: str | None = None
    """Key of the list of values, one per episode, in the same order for every version."""
    goal: Literal["max", "min"] = "max"
    """Whether larger or smaller values are better."""
    declared: str = "artifacts/eval.json"
    """File in which a version may report its own result; compared, never used."""


class Schedule(Section):
    """Declared schedules of the training, and the trace of their actual values."""

    declared: str
    """File with the declared schedules, below the version's folder."""
    trace: str
    """File with the actual values, below the version's folder."""
    strict: bool = False
    """Whether a value that is never reached fails the version instead of a warning."""


class ValueGate(Section):
    """A bound of a number in a JSON file of the version."""

    file: str
    """Path below the version's folder."""
    key: str
    """Dots lead into objects."""
    at_least: float | None = None
    """Smallest allowed value; None: no limit."""
    at_most: float | None = None
    """Largest allowed value; None: no limit."""

    @model_validator(mode="after")
    def _has_a_bound(self) -> ValueGate:
        if self.at_least is None and self.at_most is None:
            raise ValueError("set at_least, at_most or both")
        return self


class VersionJudging(Section):
    """Test that a version must pass to become the champion."""

    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Probability that any version is promoted if none is better."""
    share: float = Field(0.15, gt=0, lt=1)
    """Share of the remaining alpha for the test of the next version."""
    replicates: int = Field(5, ge=2)
    """Minimum number of episodes for a test."""
    min_effect: Annotated[Effect, BeforeValidator(parse_effect)] = Field(default_factory=Effect)
    """Smallest improvement that matters: `0.002`, or `0.5%` of the champion."""


class VersionAgent(AgentProgram):
    """The agent that writes the versions."""

    wall: Duration = 7200.0
    allowed_tools: Texts = Field(default_factory=lambda: ["Read", "Glob", "Grep", "Bash"])
    """claude: tools that need no permission, in addition to edits in the worktree."""


class IterateConfig(Section):
    """Content of `iterate.yaml`."""

    experiments: InLab = "experiments"
    """Folder of the versions."""
    frozen: TextsInLab = Field(default_factory=list)
    """Files and folders that the agent must not change; `iterate.yaml` is always one of them."""
    sop: InLab = "SOP.md"
    """Standard operating procedure that the agent reads first."""
    sections: list[Annotated[Texts, Field(min_length=1)]] = Field(
        default_factory=lambda: [["Plan"], ["Observations"], ["Runs"], ["Results"], ["Learning"]]
    )
    """Sections that `dev_vX.md` must have, each a heading or a list of alternatives; none may be empty. The tour shows
    the last one."""
    smoke: Smoke | None = None
    evaluate: Evaluate
    artifacts: Texts = Field(default_factory=list)
    """Patterns below the version's folder; each must match a non-empty file."""
    trained: Texts = Field(default_factory=list)
    """Patterns of files, such as checkpoints, that a training of this version must have written through
    `looplab submit`; copies of another version's files do not pass."""
    values: list[ValueGate] = Field(default_factory=list)
    """Numbers that the version's files must contain, such as the number of parallel envs."""
    schedule: Schedule | None = None
    instructions: Texts = Field(default_factory=list)
    """Sentences about the training, for the prompt."""
    agent: VersionAgent = Field(default_factory=VersionAgent)
    retries: int = Field(1, ge=0)
    """Number of times the agent may fix a version that does not pass a gate."""
    prompt: InLab | None = None
    """Template of the prompt; default: looplab's own."""
    logs: str = "agent_runs"
    """Folder for the logs of agents."""
    venv: bool = True
    """Whether versions use the `venv/` at the root of the lab."""
    submit: bool = True
    """Whether the agent trains through `looplab submit`; needs a lab.yaml."""
    study: str | None = None
    """Study whose slots `submit` uses, if the lab has several."""
    push: bool = False
    """Whether to push the lab's branch after each version."""
    judge: VersionJudging = Field(default_factory=VersionJudging)
    environment: dict[Setting, str] = Field(default_factory=dict)
    """More environment variables that override settings; looplab's own (`OVERRIDES`) take precedence."""


@dataclass(frozen=True, slots=True)
class Flags:
    """Settings of the agent's program from the environment; None: not set."""

    binary: str | None = None
    approval: tuple[str, ...] | None = None
    json: tuple[str, ...] | None = None


def _variable(name: Setting, environ: Mapping[str, str], more: Mapping[Setting, str]) -> str | None:
    """Return the environment variable that overrides a setting; None if none is set."""
    return next((variable for variable in (OVERRIDES[name], more.get(name, "")) if variable in environ), None)


def find_folder(folder: Path | None, environ: Mapping[str, str]) -> Path:
    """Search upwards for `iterate.yaml`, from the folder, else the environment's, else here; return its folder."""
    start = (folder or Path(environ.get(WORKDIR) or ".")).resolve()
    for candidate in (start, *start.parents):
        if (candidate / FILE).exists():
            return candidate
    raise LabError(f"no {FILE} in {start} or above", hint="create a lab with `looplab init fish`, or pass --lab")


def load(folder: Path, environ: Mapping[str, str] | None = None) -> IterateConfig:
    """Read `iterate.yaml` and apply the overrides of the environment.

    Raises:
        LabError: The first error in the file or in a variable.
    """
    environ = os.environ if environ is None else environ
    path = folder / FILE
    document = read_document(path)
    settings = check_section(IterateConfig, document.plain(), document)
    overrides = {}
    if (variable := _variable("experiments", environ, settings.environment)) and environ[variable]:
        inside = real_path(folder / environ[variable])
        if not inside.is_relative_to(folder.resolve()) or inside == folder.resolve():
            raise LabError(f"{variable}={environ[variable]} is not a folder inside the lab {folder}")
        overrides["experiments"] = str(inside.relative_to(folder.resolve()))
    if (variable := _variable("logs", environ, settings.environment)) and environ[variable]:
        overrides["logs"] = environ[variable]
    return settings.model_copy(update=overrides)


def read_flags(environ: Mapping[str, str], more: Mapping[Setting, str] | None = None) -> Flags:
    """Read the settings of the agent's program from the environment.

    Args:
        more: More variables; see `IterateConfig.environment`.
    """

    def words(name: Setting) -> tuple[str, ...] | None:
        variable = _variable(name, environ, more or {})
        try:
            return None if variable is None else tuple(shlex.split(environ[variable]))
        except ValueError as error:
            raise LabError(f"{variable}: {error}") from None

    binary = _variable("binary", environ, more or {})
    return Flags((binary and environ[binary]) or None, words("approval_flags"), words("json_flags"))


def make_spec(agent: VersionAgent, flags: Flags, extra: Sequence[str] = ()) -> AgentSpec:
    """Return the agent's spec. If its flags lack `--json`, codex prints plain text and is run like any command."""
    spec = replace(spec_of(agent), extra_args=(*agent.extra, *extra), allowed_tools=tuple(agent.allowed_tools))
    if agent.cli == "command":
        return spec
    spec = replace(spec, binary=flags.binary or spec.binary)
    if agent.cli != "codex":
        return spec
    spec = _with_approval_flags(spec, flags.approval) if flags.approval is not None else spec
    if flags.json is None or "--json" in flags.json:
        more = tuple(flag for flag in flags.json or () if flag != "--json")
        return replace(spec, extra_args=(*more, *spec.extra_args))
    approval = flags.approval
    if approval is None:
        approval = (UNSAFE_FLAGS[0],) if spec.dangerous else ("--sandbox", spec.sandbox)
    model = ("--model", spec.model) if spec.model else ()
    rest = (*approval, *flags.json, *model, *agent.extra, *extra, "-")
    command = (spec.binary or "codex", "exec", "--skip-git-repo-check", *rest)
    return replace(spec, cli="command", command=command, extra_args=(), confines_itself=True)


def _with_approval_flags(spec: AgentSpec, flags: tuple[str, ...]) -> AgentSpec:
    """Translate codex's approval flags into the spec's settings."""
    rest: list[str] = []
    sandbox: Sandbox = "workspace-write"
    dangerous = False
    words = iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        if word in UNSAFE_FLAGS:
            dangerous = True
        elif name in ("--sandbox", "-s"):
            kind = value if equals else next(words, "")
            if kind not in SANDBOXES:
                raise LabError(
                    f"the approval flags name an unknown sandbox {kind!r}", hint=f"one of {', '.join(SANDBOXES)}"
                )
            sandbox = SANDBOXES[kind]
            dangerous |= sandbox == "danger-full-access"
        elif word != "--full-auto":  # an older name of our default
            rest.append(word)
    return replace(spec, sandbox=sandbox, dangerous=dangerous, extra_args=(*rest, *spec.extra_args))


def limits_of(agent: VersionAgent) -> Limits:
    return Limits(agent.wall, agent.tokens, agent.usd, retries=agent.retries, log_bytes=agent.log_mb << 20)
