"""Suites: the same stages on several datasets, one per slot, and tables over all of them.

A suite has a folder `_suite/<id>` next to the roots of its runs; the run of each dataset is named by the suite's id.
Repeating the command continues the same suite: complete stages are skipped, running ones are attached to.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import hashlib
import io
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from looplab.config.edits import Edit, Op, apply_edits, parse_edit
from looplab.config.files import canonical_json, dump_json, plain, read_config, read_document, write_atomic
from looplab.config.lab import STUDY_NAME, LabConfig, StudyConfig, SuiteConfig
from looplab.config.validation import Section, check_section
from looplab.errors import BusyError, LabError
from looplab.ledger.pipelines import PipelineLedger
from looplab.pipeline.fingerprint import Hashes
from looplab.pipeline.folder import RunFolder, make_id, read_record
from looplab.pipeline.plan import PipelinePlan, make_plan, pick_stages
from looplab.pipeline.runner import StageRun
from looplab.runs import clock, tree
from looplab.runs.names import check_name, inside
from looplab.untrusted import open_regular


class Dataset(Section):
    """One entry of `datasets:`; extra keys are short names for config keys."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    label: str = ""
    """Name of this entry if one dataset is used several times; default: the dataset's name."""
    edits: list[str] = Field(default_factory=list)

    @property
    def called(self) -> str:
        """Label, else name."""
        return self.label or self.name

    @model_validator(mode="after")
    def _names_a_folder(self) -> Dataset:
        if not STUDY_NAME.fullmatch(self.called):
            raise ValueError(f"{self.called!r} cannot name a folder: letters, digits, `_`, `-`, `.`; set a label")
        return self

    @field_validator("edits")
    @classmethod
    def _readable(cls, edits: list[str]) -> list[str]:
        for edit in edits:
            try:
                parse_edit(edit)
            except LabError as error:
                raise ValueError(str(error)) from None
        return edits


class SuiteSettings(SuiteConfig):
    """The block `suite:` of a suite file; the other keys are the base config, unless `config` names a file."""

    datasets: list[Dataset] = Field(min_length=1)
    config: str | None = None
    run_name_prefix: str = ""
    stages: list[str] = Field(default_factory=list)
    gpus: list[int | str] | str | None = None

    @model_validator(mode="after")
    def _check(self) -> SuiteSettings:
        names = [dataset.called for dataset in self.datasets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"datasets: {twice[0]} is named twice; set a label for each")
        known = [name for name in self.fields if name != "name"]
        for dataset in self.datasets:
            for key in dataset.model_extra or {}:
                if key not in known:
                    near = difflib.get_close_matches(key, [*known, "edits", "label"], 1)
                    hint = f", did you mean {near[0]!r}?" if near else "; define it in fields, or use edits"
                    raise ValueError(f"datasets: {dataset.called} has the unknown key {key!r}{hint}")
        if self.run_name_prefix and self.run_name is None:
            raise ValueError("run_name_prefix needs run_name, the config key that it is written to")
        return self


class SuiteFile(Section):
    """A suite file; its other keys are the base config."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    suite: SuiteSettings


@dataclass(frozen=True, slots=True)
class SuiteJob:
    """One dataset of a suite."""

    name: str
    """Label, else the dataset's name."""
    columns: Mapping[str, str]
    """Leading columns of its rows in the suite's tables."""
    plan: PipelinePlan
    run: RunFolder


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite file, resolved: one job per dataset."""

    id: str
    folder: Path
    settings: SuiteSettings
    jobs: tuple[SuiteJob, ...]
    key: str
    """Hash of study, stages and configs; equal suites have equal keys."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the suite; raise BusyError if another process does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with RunFolder(self.folder).lock(f"looplab suite {self.id}"):
                yield
        except BusyError as error:
            raise BusyError(error.message.replace("run ", "suite ", 1), file=error.file, hint=error.hint) from None

    def begin(self, record: PipelineLedger | None = None) -> float:
        """Write `suite.json` and record the call; return when it began."""
        existing = read_record(self.folder / "suite.json")
        began = clock.now()
        self._write(
            "suite.json",
            {"id": self.id, "key": self.key, "created": existing["created"] if existing else time.time(),
             "study": self.jobs[0].plan.study.name, "jobs": {job.name: str(job.run.path) for job in self.jobs}},
        )  # fmt: skip
        self._note(record, {job.name: "waiting" for job in self.jobs}, began)
        return began

    def end(self, runs: Sequence[StageRun], record: PipelineLedger | None = None, began: float = 0.0) -> dict[str, Any]:
        """Collect the tables, write `summary.json` and record the end of the call; return the summary."""
        jobs = [
            {"name": run.name, "status": run.state, "error": run.error or None, "run": str(run.run.path),
             "stages": [{"stage": done.stage, "how": done.how, "seconds": done.seconds} for done in run.done],
             "tail": run.tail() if run.state == "failed" else []}
            for run in runs
        ]  # fmt: skip
        tables = self.collect([run.name for run in runs if run.state == "complete"])
        ended = clock.now()
        result = {"id": self.id, "folder": str(self.folder), "jobs": jobs, "tables": tables}
        self._write("summary.json", {**result, "began": began, "ended": ended})
        self._note(record, {run.name: run.state for run in runs}, began, ended)
        return result

    def _note(
        self, record: PipelineLedger | None, jobs: Mapping[str, str], began: float, ended: float | None = None
    ) -> None:
        if record is not None:
            with contextlib.suppress(LabError, OSError, sqlite3.Error):  # its stages have reported that already
                record.suite(self.folder, self.id, self.key, jobs, began=began, ended=ended)

    def collect(self, names: Sequence[str]) -> list[str]:
        """Write the suite's tables from those of the named jobs; return their paths."""
        made = []
        for table, source in self.settings.tables.items():
            path = self.folder / "tables" / table
            rows = [row for job in self.jobs if job.name in names for row in _rows(job, source)]
            if not rows:
                tree.remove(self.folder, f"tables/{table}")
                continue
            columns = list(dict.fromkeys(column for row in rows for column in row))
            text = io.StringIO()
            writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.folder.is_symlink() or path.parent.is_symlink():
                raise LabError(
                    "is a link, and looplab does not write through links", file=path.parent, hint="remove the link"
                )
            write_atomic(path, text.getvalue().encode())
            made.append(str(path))
        return made

    def _write(self, name: str, data: Any) -> None:
        write_atomic(self.folder / name, dump_json(data))


def _rows(job: SuiteJob, source: str) -> list[dict[str, str]]:
    path = inside(job.plan.lab, job.run.path / source, "suite.tables")
    try:
        with open_regular(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
            return [
                {**job.columns, **{str(key): value or "" for key, value in row.items()}} for row in csv.DictReader(file)
            ]
    except FileNotFoundError:
        return []
    except (csv.Error, ValueError) as error:
        raise LabError(f"not a CSV file: {error}", file=path) from None


# -- reading suite files


def read_suite(path: Path, lab: Path, defaults: SuiteConfig) -> tuple[SuiteSettings, dict[str, Any], str]:
    """Return the settings, the base config, and the file that holds it."""
    document = read_document(path)
    data = document.plain()
    if not isinstance(data.get("suite"), dict):
        raise LabError("has no block `suite:`", file=path, hint="see docs/pipeline.md")
    block = _with_defaults(data["suite"], defaults)
    settings = check_section(SuiteFile, {"suite": block}, document).suite
    base = {key: value for key, value in data.items() if key != "suite"}
    if settings.config is None:
        if not base:
            raise LabError("has no config: put it next to `suite:`, or name a file in suite.config", file=path)
        return settings, plain(base), str(path)
    if base:
        raise LabError(
            f"has both its own config ({', '.join(list(base)[:3])}) and suite.config",
            file=path,
            hint="keep one of them",
        )
    file = inside(lab, settings.config, "suite.config")
    return settings, read_config(file), str(file)


def _with_defaults(block: dict[str, Any], defaults: SuiteConfig) -> dict[str, Any]:
    """Return the block with the lab file's defaults; short names are added to those of the lab file."""
    merged = {**defaults.model_dump(exclude_unset=True), **block}
    if isinstance(block.get("fields"), dict):
        merged["fields"] = {**defaults.fields, **block["fields"]}
    return merged


def dataset_config(settings: SuiteSettings, base: Mapping[str, Any], dataset: Dataset) -> Any:
    """Return the config of one dataset: the base, then its name, its short names, the run name, and its edits."""
    fields = settings.fields
    edits: list[Edit | str] = []
    if "name" in fields:
        edits.append(Edit(fields["name"], Op.NEW, dataset.name))
    edits += [Edit(fields[key], Op.NEW, value) for key, value in (dataset.model_extra or {}).items()]
    if settings.run_name is not None:
        prefix = f"{settings.run_name_prefix}_" if settings.run_name_prefix else ""
        edits.append(Edit(settings.run_name, Op.NEW, f"{prefix}{dataset.called}"))
    try:
        return apply_edits(base, [*edits, *dataset.edits]).config
    except LabError as error:
        raise LabError(f"dataset {dataset.called}: {error.message}", file=error.file, hint=error.hint) from None


def make_suite(lab: LabConfig, study: StudyConfig, path: Path, suite_id: str | None, *, new: bool = False) -> Suite:
    """Read a suite file and plan its runs; everything is checked before anything starts.

    Args:
        lab: The lab.
        study: The study whose stages are run.
        path: Suite file, relative to the current folder or to the lab.
        suite_id: Id of the suite; None continues the newest equal suite, or creates one.
        new: Create a new suite even if an equal one exists.
    """
    file = path if path.exists() or not (lab.folder / path).exists() else lab.folder / path
    settings, base, source = read_suite(file, lab.folder, study.suite)
    if suite_id is not None:
        check_name(suite_id, "a suite's id")
    stages = pick_stages(study, settings.stages)
    configs = {dataset.called: dataset_config(settings, base, dataset) for dataset in settings.datasets}
    key = hashlib.sha256(canonical_json({"stages": stages, "configs": configs, "study": study.name})).hexdigest()
    hashes = Hashes(lab.folder)  # shared: the datasets read the same model
    plans = {name: make_plan(lab, study, config, source, stages, (), hashes) for name, config in configs.items()}
    for plan in plans.values():
        if plan.needs:
            raise LabError(
                f"suite.stages: {', '.join(plan.called)} builds on {', '.join(plan.needs)}",
                file=file,
                hint=f"add {plan.needs[0]}, or name a run that has it in the config ({study.pipeline.artifacts})",
            )
    roots = {name: plan.root for name, plan in plans.items()}
    folder = inside(lab.folder, next(iter(roots.values())).parent / "_suite", "the suite's folder")
    chosen = suite_id or (None if new else _same_suite(folder, key)) or make_id()
    inside(lab.folder, folder / chosen / "tables", "the suite's folder")
    labelled = any(dataset.label for dataset in settings.datasets)
    jobs = []
    for dataset in settings.datasets:
        run = RunFolder(inside(lab.folder, roots[dataset.called] / chosen, "the run's folder"))
        columns = {"dataset": dataset.name, **({"label": dataset.called} if labelled else {})}
        columns["run"] = f"{run.path.parent.name}/{run.name}"
        jobs.append(SuiteJob(dataset.called, columns, plans[dataset.called], run))
    places: dict[Path, str] = {}
    for job in jobs:
        if job.run.path in places:
            raise LabError(
                f"the datasets {places[job.run.path]} and {job.name} have the same run folder {job.run.path}",
                file=file,
                hint="set suite.run_name, a config key, and use it in pipeline.root of lab.yaml",
            )
        places[job.run.path] = job.name
    return Suite(chosen, folder / chosen, settings, tuple(jobs), key)


def _same_suite(folder: Path, key: str) -> str | None:
    """Return the id of the newest suite with this key."""
    found = [read_record(path) for path in folder.glob("*/suite.json")]
    same = [about for about in found if about is not None and about.get("key") == key]
    return check_name(max(same, key=lambda about: about["created"])["id"], "a suite's id") if same else None


def make_runs(
    suite: Suite, say: Callable[[str, str], None], *, force: bool = False, record: PipelineLedger | None = None
) -> list[StageRun]:
    """Return one run per dataset; `say` receives the job's name and a message."""

    def speaker(name: str) -> Callable[[str], None]:
        return lambda text: say(name, text)

    return [
        StageRun(job.plan, job.run, job.name, force=force, record=record, say=speaker(job.name)) for job in suite.jobs
    ]
