"""From a lab, a config and the names of stages to what is to be done: which run folder, from which upstream, with which
fingerprints, by which commands. Nothing is written here."""

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
from looplab.launch.command import find_program
from looplab.pipeline import fingerprint
from looplab.pipeline.fingerprint import Hashes, Parts
from looplab.pipeline.folder import CONFIG, RunFolder, latest, make_id, need_latest, read_record, runs_below
from looplab.runs.folder import study_folder
from looplab.runs.names import check_name, inside

VARIABLE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")
LATEST_ID = "latest"


def fill(template: str, config: Mapping[str, Any], variables: Mapping[str, str], where: str) -> str | None:
    """Replace `{name}` by a variable or by the config's value at that dotted key; None where the value is null."""
    null = False

    def replace(match: re.Match[str]) -> str:
        nonlocal null
        name = match.group(1)
        if name is None:
            return match.group(0)[0]
        if name in variables:
            return variables[name]
        places = find(config, name)
        if not places:
            known = ", ".join("{" + known + "}" for known in variables)
            raise LabError(
                f"{where}: {{{name}}} is neither a variable nor a key of the config",
                hint=f"variables: {known}; write {{{{ for a plain brace" if known else None,
            )
        value = get(config, places[0])
        if isinstance(value, dict | list):
            raise LabError(f"{where}: {name} is no single value in the config")
        null = null or value is None
        return str(value)

    text = VARIABLE.sub(replace, template)
    return None if null else text


@dataclass(frozen=True)
class PipelinePlan:
    """A call: a config, and stages of the study in their order."""

    lab: Path
    study: StudyConfig
    config: dict[str, Any]
    """With the edits; where it names another run's artifacts, with the real path."""
    source: str
    """The file that the config came from."""
    called: tuple[str, ...]
    edits: tuple[str, ...] = ()
    artifacts: RunFolder | None = None
    """The other run whose stages are used."""
    hashes: Hashes = field(repr=False, compare=False, default_factory=lambda: Hashes(Path()))

    @property
    def stages(self) -> Mapping[str, StageConfig]:
        return self.study.stages

    @property
    def root(self) -> Path:
        settings = self.study.pipeline
        text = fill(settings.root, self.config, {"study": self.study.name}, "pipeline.root")
        if not text:
            raise LabError(f"pipeline.root: {settings.root} names a key that is null", file=self.source)
        root = inside(self.lab, text, "pipeline.root")
        if root == study_folder(self.lab, self.study.name).resolve():
            raise LabError(
                f"pipeline.root: {text} is where the study's own runs lie, with a LATEST of their own",
                hint="let it be another folder, or rename the study",
            )
        return root

    @property
    def run_id_key(self) -> str | None:
        """The config's key of the run's name: it says where results go, not what they are."""
        match = VARIABLE.fullmatch(self.study.pipeline.run_id or "")
        return match[1] if match and match[1] else None

    # -- upstream

    def uses_artifacts(self, stage: str) -> bool:
        """Whether a stage takes what it builds on from another run: where one is named, by a key that it reads."""
        key, reads = self.study.pipeline.artifacts, self.stages[stage].reads
        if self.artifacts is None or key is None:
            return False
        wanted = parse(key)
        return reads is None or any(parse(prefix) == wanted[: len(parse(prefix))] for prefix in reads)

    def upstream(self, stage: str, run: RunFolder) -> dict[str, RunFolder]:
        """The run in which each stage before this one is to be found."""
        elsewhere = self.artifacts if self.uses_artifacts(stage) else None
        return {
            name: elsewhere if elsewhere is not None and name not in self.called else run
            for name in self.stages[stage].after
        }

    @property
    def needs(self) -> tuple[str, ...]:
        """The stages of the same run that must be complete already."""
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
        """The called stages that build on no other called one."""
        return tuple(stage for stage in self.called if not set(self.stages[stage].after) & set(self.called))

    # -- fingerprints

    def parts(self, stage: str, run: RunFolder) -> Parts:
        """What the stage's result depends on, as it is now."""
        about = self.stages[stage]
        where = f"stages.{stage}"
        files = {}
        for text in about.files:
            name = fill(text, self.config, {"lab": str(self.lab)}, f"{where}.files")
            if name is not None:
                files[name] = self.hashes.tree(self.lab / name)
        before = {name: there.complete(name) for name, there in self.upstream(stage, run).items()}
        return {
            "do": {"call": about.command or about.entry},
            "config": fingerprint.config_part(self.config, about.reads, self.run_id_key),
            "code": fingerprint.code_part(
                self.lab, [*about.code, *_entry_file(self.lab, about.entry)], self.hashes, f"{where}.code"
            ),
            "files": files,
            "upstream": {name: there and there["id"] for name, there in before.items()},
        }

    def why_not_fresh(self, stage: str, run: RunFolder) -> str | None:
        """Why what a stage has made cannot be built on, if that is so."""
        if run.begun(stage) is not None:
            return "it has begun and is not complete"
        made = run.complete(stage)
        if made is None:
            return "it was not run"
        for name, there in self.upstream(stage, run).items():
            if (why := self.why_not_fresh(name, there)) is not None:
                return why if there is not run else f"{name}, which it builds on, is not as it should be: {why}"
        told = fingerprint.changes(made["parts"], self.parts(stage, run))
        told += fingerprint.changed_outputs(run.path, made["outputs"], self.hashes)
        return f"since then, {fingerprint.in_short(told)}" if told else None

    def check_upstream(self, run: RunFolder) -> None:
        """An error if a called stage would build on what is missing or stale."""
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

    def argv(self, stage: str, run: RunFolder, slot: Slot, more: Mapping[str, str] | None = None) -> list[str]:
        about = self.stages[stage]
        config = str(run.path / CONFIG)
        if about.entry is not None:
            return [sys.executable, "-m", "looplab.pipeline.call", about.entry, config, str(run.path)]
        return fill_argv(about.command or [], self, run, slot, {"config": config, "stage": stage}, f"stages.{stage}")

    def check_commands(self, run: RunFolder) -> None:
        """An error if a called stage cannot be started at all."""
        for stage in self.called:
            argv = self.argv(stage, run, Slot("here"))
            find_stage_program(argv[0], self.lab, self.stages[stage].env, f"stages.{stage}.command")


def _entry_file(lab: Path, entry: str | None) -> list[str]:
    """The file of the lab in which the function of a stage stands."""
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
        filled = fill(text, plan.config, variables, f"{where}.command")
        if filled is None:
            raise LabError(f"{where}.command: {text} names a key that is null in the config", file=plan.source)
        argv.append(filled)
    return argv


def find_stage_program(name: str, lab: Path, env: Mapping[str, str], where: str) -> str:
    try:
        return find_program(name, lab, env)
    except LabError as error:
        what = error.message.removeprefix("trainer not found: ")
        raise LabError(f"{where}: {what}", hint="{python} is looplab's own Python") from None


def in_order(stages: Mapping[str, StageConfig]) -> list[str]:
    """Every stage behind those it builds on; else as the lab file has them."""
    placed: list[str] = []
    while len(placed) < len(stages):
        placed += [n for n, stage in stages.items() if n not in placed and set(stage.after) <= set(placed)][:1]
    return placed


def pick_stages(study: StudyConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The named stages in their order; all of them where none is named."""
    if not study.stages:
        raise LabError(f"study {study.name!r} has no stages", file="lab.yaml", hint="see stages: in docs/pipeline.md")
    wanted = list(names) or list(study.stages)
    for name in wanted:
        if name not in study.stages:
            near = get_close_matches(name, study.stages, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(study.stages)}"
            raise LabError(f"study {study.name!r} has no stage {name!r}", hint=hint)
    return tuple(stage for stage in in_order(study.stages) if stage in wanted)


def read_call_config(lab: Path, path: Path, edits: Sequence[str]) -> dict[str, Any]:
    """A config as a person names it: from where they are, or from the lab."""
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
    """The call, with the artifacts of another run found and checked where the config names one."""
    hashes = hashes or Hashes(lab.folder)
    plan = PipelinePlan(lab.folder, study, dict(config), source, tuple(called), tuple(edits), None, hashes)
    settings = study.pipeline
    places = find(config, settings.artifacts) if settings.artifacts else []
    value = get(config, places[0]) if places else None
    if value is None:
        return plan
    if not isinstance(value, str) or not value:
        raise LabError(f"{settings.artifacts} is the folder of a run, not {value!r}", file=source)
    folder = inside(lab.folder, value, str(settings.artifacts))
    sought = folder.name == LATEST_ID and not (folder / "pipeline.json").exists()
    found = latest(folder.parent) if sought else RunFolder(folder)
    resolved = apply_edits(config, ()).config  # a copy
    other = found or RunFolder(folder)
    set_(resolved, places[0], str(other.path.relative_to(lab.folder.resolve())))
    used = PipelinePlan(lab.folder, study, resolved, source, tuple(called), tuple(edits), other, plan.hashes)
    wanted = {name for stage in called if used.uses_artifacts(stage) for name in study.stages[stage].after}
    wanted -= set(called)
    if wanted and found is None:
        need_latest(folder.parent, f"{settings.artifacts} asks for its latest")
    check_artifacts(used, other, [name for name in in_order(study.stages) if name in wanted])
    return used


def check_artifacts(plan: PipelinePlan, other: RunFolder, needed: Sequence[str]) -> None:
    """The stages are complete there, each made from what stands beside it, and the configs fit."""
    key = plan.study.pipeline.artifacts
    for stage in needed:
        why = _why_not_consistent(plan.stages, other, stage, plan.hashes)
        if why is not None:
            raise LabError(f"{key}: {stage} of {other.path} cannot be used: {why}", hint=f"run {stage} there first")
    if not needed:
        return
    theirs = read_config(other.path / CONFIG)
    told = []
    for prefix in plan.study.pipeline.fits:
        mine, yours = (fingerprint.config_part(config, [prefix]) for config in (plan.config, theirs))
        told += [f"{name} is {change.get('new')!r} here and {change.get('old')!r} there"
                 for name, change in diff({"/": yours}, {"/": mine}).items()]  # fmt: skip
    if told:
        what = "; ".join(text.removeprefix("/.").replace("\\.", ".") for text in told)
        raise LabError(f"{key}: {other.path} does not fit: {what}", hint="use artifacts of the same kind, or mine anew")


def _why_not_consistent(stages: Mapping[str, StageConfig], run: RunFolder, stage: str, hashes: Hashes) -> str | None:
    if run.begun(stage) is not None:
        return "it has begun and is not complete"
    made = run.complete(stage)
    if made is None:
        return "it was not run"
    for name in stages[stage].after:
        used = made["parts"]["upstream"].get(name)
        there = run.complete(name)
        if there is not None and there["id"] != used and not made.get("artifacts"):
            return f"{name} was made anew since then"
    told = fingerprint.changed_outputs(run.path, made["outputs"], hashes)
    return fingerprint.in_short(told) if told else None


# -- which run


def choose_run(plan: PipelinePlan, run_id: str | None, *, new: bool = False) -> RunFolder:
    """The run folder of a call; it need not exist yet.

    Named: that one. Else: where stages of the same run are needed, the newest one that has them. Else the newest run in
    which this very call, or a shorter one, was begun and not ended; else LATEST, if the first stages are unchanged
    there; else a new one.
    """
    root = plan.root
    said, template, key = run_id, plan.study.pipeline.run_id, plan.run_id_key
    if said is None and template is not None and (key is None or find(plan.config, key)):
        said = fill(template, plan.config, {}, "pipeline.run_id")
    if new:
        if plan.needs:
            raise LabError(
                f"a new run has no {', '.join(plan.needs)}, which {', '.join(plan.called)} builds on",
                hint="name that stage too",
            )
        return _run_below(plan, root, make_id() if said in (None, LATEST_ID) else said)
    if said is not None and said != LATEST_ID:
        return _named_run(plan, root, said)
    if plan.needs or said == LATEST_ID:
        return _run_with(plan, root)
    for run in _unfinished(root):
        if any(_is_of(plan, run, stage, begun=True) for stage in plan.first) or _is_untouched(plan, run):
            return run
    last = latest(root)
    if last is not None and all(_is_of(plan, last, stage, begun=False) for stage in plan.first):
        return last
    return RunFolder(root / make_id())


def _run_below(plan: PipelinePlan, root: Path, name: str | None) -> RunFolder:
    """A run folder by a name from outside; not one that is a link to elsewhere."""
    path = root / check_name(name, "a run's name")
    inside(plan.lab, path, "the run's folder")
    return RunFolder(path)


def _named_run(plan: PipelinePlan, root: Path, name: str) -> RunFolder:
    run = _run_below(plan, root, name)
    if plan.needs and not (run.path / "pipeline.json").exists():
        known = [other.name for other in runs_below(root)]
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known[:5]) or 'none'}"
        raise LabError(f"{root} has no run {name!r}", hint=hint)
    return run


def _unfinished(root: Path) -> list[RunFolder]:
    """Runs with a stage or a call that is not at its end, not older than LATEST; the newest first."""
    last = latest(root)
    since = last.created if last is not None else 0.0
    return [run for run in runs_below(root) if run.created >= since and (run.call() or not run.is_whole())]


def _run_with(plan: PipelinePlan, root: Path) -> RunFolder:
    """The newest run that has what the call needs; where none has it, the one to complain about."""
    for run in _unfinished(root):
        if all(run.complete(name) is not None for name in plan.needs):
            return run
    why = f"{', '.join(plan.called)} builds on {', '.join(plan.needs)}" if plan.needs else "there is no latest"
    return need_latest(root, why)


def _is_of(plan: PipelinePlan, run: RunFolder, stage: str, *, begun: bool) -> bool:
    """Whether what the run has of a stage (complete, or also just begun) is what it would be now."""
    made = run.complete(stage) or (run.begun(stage) if begun else None)
    return made is not None and made["fingerprint"] == fingerprint.hash_parts(plan.parts(stage, run))


def _is_untouched(plan: PipelinePlan, run: RunFolder) -> bool:
    """Whether it was made for this config, and cut off before its first stage began."""
    if any(run.complete(stage) or run.begun(stage) for stage in plan.stages):
        return False
    config = read_record(run.path / CONFIG)
    return config is not None and same(
        fingerprint.config_part(config, None, plan.run_id_key),
        fingerprint.config_part(plan.config, None, plan.run_id_key),
    )
