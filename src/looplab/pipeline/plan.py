"""Plan a call: from a lab, a config and stage names to run folder, upstream stages, fingerprints and commands.

Nothing is written here."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from looplab.config.edits import apply_edits
from looplab.config.files import read_config
from looplab.config.lab import LabConfig, StageConfig, StudyConfig
from looplab.config.paths import diff, find, get, parse, same, set_
from looplab.errors import LabError
from looplab.launch.base import Slot
from looplab.launch.command import VARIABLE, find_program, replace_variables
from looplab.pipeline import fingerprint
from looplab.pipeline.fingerprint import Hashes, Parts
from looplab.pipeline.folder import (
    CALL_CONFIG,
    CONFIG,
    RunFolder,
    latest,
    make_id,
    need_latest,
    read_record,
    runs_below,
)
from looplab.pipeline.resolve import resolve_config
from looplab.runs.folder import study_folder
from looplab.runs.names import check_name, inside

COMMAND_VARIABLES = frozenset({"python", "config", "run_dir", "run_id", "stage", "lab", "study", "slot", "devices"})
"""Names that looplab itself replaces in commands."""
LATEST_ID = "latest"


def fill_template(template: str, config: Mapping[str, Any], variables: Mapping[str, str], where: str) -> str | None:
    """Replace `{name}` by a variable or by the config's value at that dotted key; None if a value is null."""
    null = False

    def value_of(name: str) -> str | None:
        nonlocal null
        if not re.fullmatch(r"[\w.-]+", name):
            return None
        if name in variables:
            return variables[name]
        places = find(config, name)
        if not places:
            known = ", ".join("{" + known + "}" for known in variables)
            raise LabError(
                f"{where}: {{{name}}} is neither a variable nor a key of the config",
                hint=f"variables: {known}; write {{{{ for a literal brace" if known else None,
            )
        value = get(config, places[0])
        if isinstance(value, dict | list):
            raise LabError(f"{where}: {name} is not a single value in the config")
        null = null or value is None
        return str(value)

    text = replace_variables(template, value_of)
    return None if null else text


@dataclass(frozen=True)
class PipelinePlan:
    """One call: a config, and the stages to run, in dependency order."""

    lab: Path
    study: StudyConfig
    config: dict[str, Any]
    """After edits; `latest` in the artifacts key is resolved to the real path."""
    source: str
    """File that the config was read from."""
    called: tuple[str, ...]
    edits: tuple[str, ...] = ()
    artifacts: RunFolder | None = None
    """Another run whose stages this call builds on."""
    hashes: Hashes = field(repr=False, compare=False, default_factory=lambda: Hashes(Path()))

    @property
    def stages(self) -> Mapping[str, StageConfig]:
        return self.study.stages

    @property
    def root(self) -> Path:
        settings = self.study.pipeline
        text = fill_template(settings.root, self.config, {"study": self.study.name}, "pipeline.root")
        if not text:
            raise LabError(f"pipeline.root: {settings.root} names a key whose value is null", file=self.source)
        root = inside(self.lab, text, "pipeline.root")
        if root == study_folder(self.lab, self.study.name).resolve():
            raise LabError(
                f"pipeline.root: {text} is the folder of the study's own runs, which have their own LATEST",
                hint="use another folder, or rename the study",
            )
        return root

    @property
    def run_id_key(self) -> str | None:
        """Config key of the run's name; not part of fingerprints, since it does not affect results."""
        match = VARIABLE.fullmatch(self.study.pipeline.run_id or "")
        return match[1] if match and match[1] else None

    # -- upstream

    def uses_artifacts(self, stage: str) -> bool:
        """Return whether a stage reads the artifacts key, and the config names another run there."""
        key, reads = self.study.pipeline.artifacts, self.stages[stage].reads
        if self.artifacts is None or key is None:
            return False
        path = parse(key)
        return reads is None or any(parse(prefix) == path[: len(parse(prefix))] for prefix in reads)

    def upstream(self, stage: str, run: RunFolder) -> dict[str, RunFolder]:
        """Map each upstream stage to the run that holds its outputs."""
        other = self.artifacts if self.uses_artifacts(stage) else None
        return {
            name: other if other is not None and name not in self.called else run for name in self.stages[stage].after
        }

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages of the same run that must be complete before the call."""
        return tuple(
            dict.fromkeys(
                name
                for stage in self.called
                if not self.uses_artifacts(stage)
                for name in self.stages[stage].after
                if name not in self.called
            )
        )

    @property
    def first(self) -> tuple[str, ...]:
        """Called stages that do not depend on another called stage."""
        return tuple(stage for stage in self.called if not set(self.stages[stage].after) & set(self.called))

    # -- fingerprints

    def parts(self, stage: str, run: RunFolder) -> Parts:
        """Return the current fingerprint parts of a stage."""
        about = self.stages[stage]
        where = f"stages.{stage}"
        files = {}
        for text in about.files:
            name = fill_template(text, self.config, {"lab": str(self.lab)}, f"{where}.files")
            if name is not None:
                files[name] = self.hashes.tree(self.lab / name)
        before = {name: there.complete(name) for name, there in self.upstream(stage, run).items()}
        return {
            "do": {"call": about.command or about.entry},
            "config": fingerprint.config_part(self.config, about.reads, [*about.ignores, self.run_id_key or ""]),
            "code": fingerprint.code_part(
                self.lab, [*about.code, *_entry_file(self.lab, about.entry)], self.hashes, f"{where}.code"
            ),
            "files": files,
            "upstream": {name: there and there["id"] for name, there in before.items()},
        }

    def why_not_fresh(self, stage: str, run: RunFolder) -> str | None:
        """Return why the outputs of a stage are missing or stale; None if they are fresh."""
        if run.begun(stage) is not None:
            return "it started but did not complete"
        made = run.complete(stage)
        if made is None:
            return "it has not been run"
        for name, there in self.upstream(stage, run).items():
            if (why := self.why_not_fresh(name, there)) is not None:
                return why if there is not run else f"{name}, which it builds on, is not usable: {why}"
        changes = fingerprint.changes(made["parts"], self.parts(stage, run))
        changes += fingerprint.changed_outputs(run.path, made["outputs"], self.hashes)
        return f"since then, {fingerprint.shorten(changes)}" if changes else None

    def check_upstream(self, run: RunFolder) -> None:
        """Raise LabError if a called stage would build on missing or stale outputs."""
        for name in self.needs:
            why = self.why_not_fresh(name, run)
            if why is not None:
                raise LabError(
                    f"{_users(self, name)} cannot use {name} of run {run.name}: {why}",
                    hint=f"rerun {name}, or name it in the same call: {self._call_with(name, run)}",
                )

    def _call_with(self, name: str, run: RunFolder) -> str:
        stages = [stage for stage in in_order(self.stages) if stage == name or stage in self.called]
        edits = [word for edit in self.edits for word in ("--edit", edit)]
        return shlex.join(["looplab", "stage", "--config", self.source, "--run-id", run.name, *edits, *stages])

    # -- commands

    def argv(self, stage: str, run: RunFolder, slot: Slot) -> list[str]:
        about = self.stages[stage]
        config = str(run.path / CALL_CONFIG)
        if about.entry is not None:
            return [sys.executable, "-m", "looplab.pipeline.call", about.entry, config, str(run.path)]
        return fill_argv(about.command or [], self, run, slot, {"config": config, "stage": stage}, f"stages.{stage}")

    def check_commands(self, run: RunFolder) -> None:
        """Raise LabError if the program of a called stage cannot be found."""
        for stage in self.called:
            argv = self.argv(stage, run, Slot("here"))
            find_stage_program(argv[0], self.lab, self.stages[stage].env, f"stages.{stage}.command")


def _entry_file(lab: Path, entry: str | None) -> list[str]:
    """Return the file of the lab that defines the function of a stage; empty if it is elsewhere."""
    place = (entry or "").rpartition(":")[0]
    names = [place] if place.endswith(".py") else [f"{place.replace('.', '/')}.py"] if place else []
    return [name for name in names if (lab / name).is_file()]


def _users(plan: PipelinePlan, name: str) -> str:
    return ", ".join(stage for stage in plan.called if name in plan.stages[stage].after)


def fill_argv(
    template: Sequence[str], plan: PipelinePlan, run: RunFolder, slot: Slot, more: Mapping[str, str], where: str
) -> list[str]:
    variables = {
        "python": sys.executable,
        "run_dir": str(run.path),
        "run_id": run.name,
        "lab": str(plan.lab),
        "study": plan.study.name,
        "slot": slot.name,
        "devices": ",".join(slot.devices),
        **more,
    }
    argv = []
    for text in template:
        filled = fill_template(text, plan.config, variables, f"{where}.command")
        if filled is None:
            raise LabError(f"{where}.command: {text} names a key whose value is null in the config", file=plan.source)
        argv.append(filled)
    return argv


def find_stage_program(name: str, lab: Path, env: Mapping[str, str], where: str) -> str:
    try:
        return find_program(name, lab, env)
    except LabError as error:
        what = error.message.removeprefix("trainer not found: ")
        raise LabError(f"{where}: {what}", hint="{python} is looplab's own Python") from None


def in_order(stages: Mapping[str, StageConfig]) -> list[str]:
    """Sort stages topologically; otherwise keep the order of the lab file."""
    ordered: list[str] = []
    while len(ordered) < len(stages):
        ordered += [n for n, stage in stages.items() if n not in ordered and set(stage.after) <= set(ordered)][:1]
    return ordered


def pick_stages(study: StudyConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return the named stages in dependency order; all of them if none is named."""
    if not study.stages:
        raise LabError(f"study {study.name!r} has no stages", file="lab.yaml", hint="see stages: in docs/pipeline.md")
    chosen = list(names) or list(study.stages)
    for name in chosen:
        if name not in study.stages:
            near = get_close_matches(name, study.stages, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"stages: {', '.join(study.stages)}"
            raise LabError(f"study {study.name!r} has no stage {name!r}", hint=hint)
    return tuple(stage for stage in in_order(study.stages) if stage in chosen)


def read_call_config(lab: Path, path: Path, edits: Sequence[str]) -> dict[str, Any]:
    """Read a config and apply edits; the path is relative to the current folder, else to the lab."""
    file = path if path.exists() or not (lab / path).exists() else lab / path
    try:
        return dict(apply_edits(read_config(file), edits).config)
    except LabError as error:
        if error.file is not None:
            raise
        raise LabError(error.message, file=file, hint=error.hint) from None


def make_plan(
    lab: LabConfig,
    study: StudyConfig,
    config: Mapping[str, Any],
    source: str,
    called: Sequence[str],
    edits: Sequence[str] = (),
    hashes: Hashes | None = None,
) -> PipelinePlan:
    """Plan a call; if the config names another run's artifacts, resolve and check that run.

    Raises:
        LabError: The config is rejected, or the artifacts are missing, incomplete or do not fit.
    """
    hashes = hashes or Hashes(lab.folder)
    config = resolve_config(lab.folder, study, config, source, edits)
    plan = PipelinePlan(lab.folder, study, dict(config), source, tuple(called), tuple(edits), None, hashes)
    settings = study.pipeline
    places = find(config, settings.artifacts) if settings.artifacts else []
    value = get(config, places[0]) if places else None
    if value is None:
        return plan
    if not isinstance(value, str) or not value:
        raise LabError(f"{settings.artifacts} must be the folder of a run, not {value!r}", file=source)
    folder = inside(lab.folder, value, str(settings.artifacts))
    wants_latest = folder.name == LATEST_ID and not (folder / "pipeline.json").exists()
    found = latest(folder.parent) if wants_latest else RunFolder(folder)
    resolved = apply_edits(config, ()).config  # a copy
    other = found or RunFolder(folder)
    set_(resolved, places[0], str(other.path.relative_to(lab.folder.resolve())))
    used = PipelinePlan(lab.folder, study, resolved, source, tuple(called), tuple(edits), other, plan.hashes)
    needed = {name for stage in called if used.uses_artifacts(stage) for name in study.stages[stage].after}
    needed -= set(called)
    if needed and found is None:
        need_latest(folder.parent, f"{settings.artifacts} names the latest run")
    check_artifacts(used, other, [name for name in in_order(study.stages) if name in needed])
    return used


def missing_artifacts(lab: Path, study: StudyConfig, config: Mapping[str, Any], source: str) -> str | None:
    """Return a warning if the config reuses the stages of a run that does not exist yet; else None."""
    key = study.pipeline.artifacts
    places = find(config, key) if key else []
    value = get(config, places[0]) if places else None
    if not isinstance(value, str) or not value:
        return None
    folder = inside(lab, value, str(key))
    if folder.exists() or (folder.name == LATEST_ID and latest(folder.parent) is not None):
        return None
    return f"{key} of {source} names {value}, which does not exist: its runs will fail until its stages have been run"


def check_artifacts(plan: PipelinePlan, other: RunFolder, needed: Sequence[str]) -> None:
    """Raise LabError unless the stages of another run are complete, consistent with each other, and fit the config."""
    key = plan.study.pipeline.artifacts
    for stage in needed:
        why = _why_not_consistent(plan.stages, other, stage, plan.hashes)
        if why is not None:
            raise LabError(f"{key}: {stage} of {other.path} cannot be used: {why}", hint=f"run {stage} there first")
    if not needed:
        return
    theirs = read_config(other.path / CONFIG)
    mismatches = []
    for prefix in plan.study.pipeline.fits:
        mine, yours = (fingerprint.config_part(config, [prefix]) for config in (plan.config, theirs))
        mismatches += [f"{name} is {change.get('new')!r} here and {change.get('old')!r} there"
                 for name, change in diff({"/": yours}, {"/": mine}).items()]  # fmt: skip
    if mismatches:
        what = "; ".join(text.removeprefix("/.").replace("\\.", ".") for text in mismatches)
        raise LabError(
            f"{key}: {other.path} does not fit: {what}", hint="use artifacts that match this config, or rebuild them"
        )


def _why_not_consistent(stages: Mapping[str, StageConfig], run: RunFolder, stage: str, hashes: Hashes) -> str | None:
    if run.begun(stage) is not None:
        return "it started but did not complete"
    made = run.complete(stage)
    if made is None:
        return "it has not been run"
    for name in stages[stage].after:
        used = made["parts"]["upstream"].get(name)
        there = run.complete(name)
        if there is not None and there["id"] != used and not made.get("artifacts"):
            return f"{name} was rebuilt since then"
    changes = fingerprint.changed_outputs(run.path, made["outputs"], hashes)
    return fingerprint.shorten(changes) if changes else None


# -- which run


def choose_run(plan: PipelinePlan, run_id: str | None, *, new: bool = False) -> RunFolder:
    """Return the run folder of a call; it need not exist yet.

    In order of precedence: the named run; the newest run with the stages that the call needs; the newest run in which
    this call, or a shorter one, started and did not finish; LATEST, if the first stages are unchanged there; a new run.
    """
    root = plan.root
    name, template, key = run_id, plan.study.pipeline.run_id, plan.run_id_key
    if name is None and template is not None and (key is None or find(plan.config, key)):
        name = fill_template(template, plan.config, {}, "pipeline.run_id")
    if new:
        if plan.needs:
            raise LabError(
                f"a new run has no {', '.join(plan.needs)}, which {', '.join(plan.called)} builds on",
                hint="add it to the call",
            )
        return _run_below(plan, root, make_id() if name in (None, LATEST_ID) else name)
    if name is not None and name != LATEST_ID:
        return _named_run(plan, root, name)
    if plan.needs or name == LATEST_ID:
        return _run_with(plan, root)
    for run in _unfinished(root):
        if any(_matches(plan, run, stage, begun=True) for stage in plan.first) or _is_untouched(plan, run):
            return run
    last = latest(root)
    if last is not None and all(_matches(plan, last, stage, begun=False) for stage in plan.first):
        return last
    return RunFolder(root / make_id())


def _run_below(plan: PipelinePlan, root: Path, name: str | None) -> RunFolder:
    """Return the run folder of a user-supplied name; raise LabError if it leads out of the lab."""
    path = root / check_name(name, "a run's name")
    inside(plan.lab, path, "the run's folder")
    return RunFolder(path)


def _named_run(plan: PipelinePlan, root: Path, name: str) -> RunFolder:
    run = _run_below(plan, root, name)
    if plan.needs and not (run.path / "pipeline.json").exists():
        known = [other.name for other in runs_below(root)]
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"runs: {', '.join(known[:5]) or 'none'}"
        raise LabError(f"{root} has no run {name!r}", hint=hint)
    return run


def _unfinished(root: Path) -> list[RunFolder]:
    """Return runs with an unfinished stage or call that are not older than LATEST, newest first."""
    last = latest(root)
    since = last.created if last is not None else 0.0
    return [run for run in runs_below(root) if run.created >= since and (run.call() or not run.is_consistent())]


def _run_with(plan: PipelinePlan, root: Path) -> RunFolder:
    """Return the newest unfinished run with the stages that the call needs, else the latest run."""
    for run in _unfinished(root):
        if all(run.complete(name) is not None for name in plan.needs):
            return run
    why = f"{', '.join(plan.called)} builds on {', '.join(plan.needs)}" if plan.needs else "there is no latest"
    return need_latest(root, why)


def _matches(plan: PipelinePlan, run: RunFolder, stage: str, *, begun: bool) -> bool:
    """Return whether a stage of the run, complete or (with `begun`) started, has the current fingerprint."""
    made = run.complete(stage) or (run.begun(stage) if begun else None)
    return made is not None and made["fingerprint"] == fingerprint.hash_parts(plan.parts(stage, run))


def _is_untouched(plan: PipelinePlan, run: RunFolder) -> bool:
    """Return whether the run was created for this config and interrupted before its first stage started."""
    if any(run.complete(stage) or run.begun(stage) for stage in plan.stages):
        return False
    config, own = read_record(run.path / CONFIG), [plan.run_id_key or ""]
    return config is not None and same(
        fingerprint.config_part(config, None, own),
        fingerprint.config_part(plan.config, None, own),
    )
