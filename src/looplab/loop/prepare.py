"""Turn a planned run into a run folder and a launch spec for the executor."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from looplab.config.files import dump_config, dump_json, has_non_finite, write_atomic
from looplab.config.lab import RUN_FOLDER, ConfigRendering, StudyConfig
from looplab.config.paths import get, has, leaves, show
from looplab.errors import LabError
from looplab.launch.base import LATE_DEVICES, LaunchSpec, Resources, Slot
from looplab.launch.command import build_argv, fill_template, find_program, render, render_environment
from looplab.launch.executors import script_of
from looplab.launch.slots import slot_environment
from looplab.launch.tracking import wandb_environment
from looplab.ledger.plan import Job, RunPlan
from looplab.ledger.view import RunRow
from looplab.loop.freezing import Freezer, FrozenState
from looplab.loop.setup import FIRST_SEED, SEEDS, Setup
from looplab.loop.warm_start import check_start
from looplab.runs import folder
from looplab.runs.capsule import Capsules, doubt
from looplab.runs.names import inside
from looplab.runs.redact import HIDDEN, redact_argv, redact_env

PREPARED = ("run.json", "config.json", "config.yaml", "config.toml")
"""Files that the record of a run may contain before the run starts."""

TIME_MARGIN_S = 60.0
"""Seconds between the latest end of a run by its own timeout and the time limit of its job."""
WANDB_CONFIG = "wandb.yaml"
"""Name of the config file for `as: wandb`."""
WANDB_PARAMETERS = "WANDB_SWEEP_PARAM_PATH"
"""Variable that names the file from which `wandb.init` takes the parameters of a sweep; they win over its `config`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Files of a run's record before the run starts, by path relative to the run folder."""

    hashes: dict[str, str]
    """SHA-256 by path."""
    contents: dict[str, bytes]
    doubt: str | None = None
    """Why the exact code of the run is unknown; None if it is known."""
    code: Mapping[str, Any] | None = None
    """The `code` entry of the capsule; None if the run uses code other than the lab's."""


@dataclass(frozen=True, slots=True)
class FilledCommand:
    """Command and environment of a run for display, with secrets hidden."""

    argv: list[str]
    env: dict[str, str]
    """Variables that looplab adds to the engine's environment."""
    folder: str
    """The run folder."""
    cwd: str
    """Working directory of the trainer."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Preparer:
    """Prepares the runs of one study; values that are the same for all runs are computed once.

    Args:
        setup: The study.
        freezes: Whether runs get a copy of the code, because they may wait before they start.
    """

    def __init__(self, setup: Setup, *, freezes: bool = False) -> None:
        self._setup = setup
        study = setup.study
        self._launch = study.launch
        self._outputs = folder.study_folder(setup.lab, study.name)
        self._rendering = self._launch.config
        self._config_name = _config_name(self._rendering)
        self._config_files = tuple(dict.fromkeys(("config.json", self._config_name)))
        self._capsules = Capsules(setup.lab, self._outputs, setup.prints)
        self.freezer = Freezer(setup.lab, self._outputs, self._capsules) if freezes else None
        self._host = socket.gethostname()
        live = {"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1")}  # keeps train.log up to date
        self._live = live
        self._resources = resources_of(study)
        self._slot_env: dict[Slot, dict[str, str]] = {}
        self._homes: dict[tuple[str, str], Path] = {}
        """Folders that the paths in a command are relative to, by lab and `cwd`."""
        self._elsewhere: dict[Path, Capsules] = {}
        self._programs: dict[tuple[str, Path], str] = {}

    def current_code(self) -> Mapping[str, Any]:
        """Return the `code` entry of the capsule of a run that would start now."""
        self._capsules.refresh()
        return self._capsules.current

    def refresh(self) -> None:
        """Inspect and freeze the lab's code in advance, so that `prepare` need not run git."""
        self._capsules.refresh()
        if self.freezer is not None:
            with contextlib.suppress(LabError):  # `prepare` reports it
                self.freezer.current()

    def prepare(self, run: RunRow, plan: RunPlan, slot: Slot) -> tuple[LaunchSpec, Prepared]:
        """Create the run folder with its record.

        Returns:
            The launch spec for the executor, and the files of the record.

        Raises:
            LabError: The run cannot be started, for example because a secret or its checkpoint is missing.
        """
        run_path = f"{self._outputs}/{run.id}"
        run_dir, record_dir = Path(run_path), Path(f"{run_path}/{folder.RECORD}")
        plan = self._revealed(run, plan)
        config = plan.config
        lab = plan.place or str(self._setup.lab)
        job = plan.job
        home = self._home(lab, job)
        capsules = self._capsules if job is None else self._capsules_of(home)
        frozen, not_frozen = self._freeze(run, plan, capsules)
        config_file = f"{run_path}/{folder.RECORD}/{self._config_name}"
        variables = self._variables(run.id, run.seed, run_path, config_file, slot, lab)
        start = plan.start
        if start is not None and self._setup.study.warm_start is not None:
            check_start(start)
        argv = self._fill_command(plan, run.base, variables, home)
        if frozen is not None:
            argv, home = frozen.tree.moved_argv(argv), frozen.tree.moved(home)
        cwd = run_dir if job is None and self._launch.cwd == RUN_FOLDER else home
        own = self._own_environment(run.id, run.seed, run.round, variables, slot)
        if job is not None:
            del own["LOOPLAB_CONFIG"]  # a submitted command has its own config
        if run.attempt > 1:
            folder.set_aside(record_dir, run.attempt)
            own |= {"LOOPLAB_ATTEMPT": str(run.attempt), "LOOPLAB_RESUME": run_path}
        given = self._given_environment(config, variables)
        given_shown = redact_env(given)
        secrets = frozenset(name for name, value in given.items() if given_shown[name] != value)
        env = {**own, **given}
        if (argv[0], home) not in self._programs:
            self._programs[argv[0], home] = find_program(argv[0], home, env)
        program = self._programs[argv[0], home]
        imports = self.freezer.environment(frozen.tree, program, env) if frozen and self.freezer else {}
        env |= imports
        seeds = {show(path): value for path, value in leaves(config) if str(path[-1]).lower() in SEEDS}
        shown = redact_argv(argv)
        about = {
            **_about(run, plan),
            "formal": not self._setup.options.informal,
            "fingerprint": self._setup.prints.digest(),
            "launched": time.time(),
            "attempt": run.attempt,
            "host": self._host if slot.fixed else None,
            "slot": slot.name,
            "devices": list(slot.devices) if slot.fixed else None,
            "cores": list(slot.cores) if slot.fixed else None,
            "argv": shown,
        }
        capsule = capsules.make(
            shown, program, {**own, **given_shown, **imports}, seeds, frozen.code if frozen else None
        )
        capsule["cwd"] = str(cwd)
        unknown = doubt(capsule["code"]) or not_frozen
        if unknown is not None:
            about["notes"] = [*about["notes"], unknown]
        own_code = capsule["code"] if job is None and plan.place is None else None
        about["capsule"] = capsule
        files = {**self._config_contents(config), "run.json": _dump_about(about)}
        if job is None and HIDDEN.encode() in files["config.json"]:
            self._check_revealed(run, config)
        private = self._config_files if job is None and self.hides(run) else ()
        prepared = Prepared(folder.create(run_dir, files, private=private), _by_path(files), unknown, own_code)
        if cwd == run_dir:
            folder.link_inputs(run_dir, self._launch.links, (home, Path(lab)))
        limits = (self._launch.timeout, None if job is None else job.timeout)
        spec = LaunchSpec(
            run_id=run.id,
            run_dir=run_dir,
            argv=argv,
            path=program,
            cwd=cwd,
            slot=slot,
            env=env,
            timeout=min(filter(None, limits), default=None),
            grace=self._launch.grace,
            cleanup_timeout=self._launch.cleanup_timeout,
            record_dir=record_dir,
            resources=self._resources,
            attempt=run.attempt,
            secrets=secrets,
            code=frozen.tree.path if frozen is not None else None,
        )
        return spec, prepared

    def _freeze(self, run: RunRow, plan: RunPlan, capsules: Capsules) -> tuple[FrozenState | None, str | None]:
        """Return the frozen code of a run, and why it has none if it should have; None, None: it needs none."""
        if self.freezer is None or plan.place is not None or capsules is not self._capsules:
            return None, None  # code in a checkout of its own
        try:
            return self.freezer.of_run(run.id, run.attempt), None
        except LabError as error:
            return None, f"its code is not frozen while it waits: {error}"

    def rebuild(self, run: RunRow, plan: RunPlan | None) -> dict[str, bytes]:
        """Rebuild the prepared files of a run of an earlier engine from the ledger.

        Args:
            plan: The run's plan; None if the ledger no longer has it, so that only `run.json` can be rebuilt.

        Returns:
            Contents by path relative to the run folder.
        """
        files = {"run.json": _dump_about(_about(run, plan or RunPlan({})))}
        if plan is not None:
            files |= self._config_contents(self._revealed(run, plan).config)
        return _by_path(files)

    def hide_secrets(self, run: RunRow, config: dict[str, Any]) -> dict[str, str]:
        """Remove the secrets from the config files of an ended run.

        Args:
            config: The run's config from the ledger, with secrets hidden.

        Returns:
            The new SHA-256 of these files, by path relative to the run folder.
        """
        contents = self.hidden_files(config)
        for name, content in contents.items():
            write_atomic(self._outputs / run.id / name, content, sync=False)
        return {name: folder.hash_bytes(content) for name, content in contents.items()}

    def hidden_files(self, config: dict[str, Any]) -> dict[str, bytes]:
        """Return the contents of a run's config files for this config, by path relative to the run folder."""
        return _by_path(self._config_contents(config))

    def hides(self, run: RunRow) -> bool:
        """Whether the base config of a run contains secrets."""
        return bool(self._setup.bases) and bool(self._setup.base(run.base).secrets)

    def _revealed(self, run: RunRow, plan: RunPlan) -> RunPlan:
        """Return the plan with the config as the trainer receives it, secrets included."""
        if plan.job is not None or not self.hides(run):
            return plan
        return replace(plan, config=self._setup.reveal(plan.config, self._setup.base(run.base)))

    def _check_revealed(self, run: RunRow, config: Mapping[str, Any]) -> None:
        """Check that every secret of the run's config could be restored.

        Raises:
            LabError: The base config no longer contains a secret of the run.
        """
        base = self._setup.base(run.base)
        missing = [
            show(path)
            for path, value in leaves(config)
            if value == HIDDEN and not (has(base.config, path) and get(base.config, path) == HIDDEN)
        ]
        if missing:
            raise LabError(
                f"{base.name} no longer has the secret {', '.join(missing)}",
                hint="it is in no other place: write it there",
            )

    def _config_contents(self, config: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the config files of a run's record, by name."""
        return {name: _config_content(name, config) for name in self._config_files}

    def command(
        self, run_id: str, plan: RunPlan, slot: Slot, *, base: str | None, seed: int | None, round_: int
    ) -> FilledCommand:
        """Return the command that `prepare` would build for this run, with secrets hidden; writes no files."""
        run_dir = f"{self._outputs}/{run_id}"
        lab = plan.place or str(self._setup.lab)
        job = plan.job
        config_file = f"{run_dir}/{folder.RECORD}/{self._config_name}"
        variables = self._variables(run_id, seed, run_dir, config_file, slot, lab)
        home = self._home(lab, job)
        own = self._own_environment(run_id, seed, round_, variables, slot)
        if job is not None:
            del own["LOOPLAB_CONFIG"]
        given = self._given_environment(plan.config, variables)
        cwd = run_dir if job is None and self._launch.cwd == RUN_FOLDER else str(home)
        argv = redact_argv(self._fill_command(plan, base, variables, home))
        return FilledCommand(argv, {**own, **redact_env(given)}, run_dir, cwd)

    def _home(self, lab: str, job: Job | None) -> Path:
        """Return the folder that the paths in a command are relative to.

        Args:
            job: The submitted command; None for a run of the study's trainer.
        """
        inner = "." if self._launch.cwd == RUN_FOLDER else self._launch.cwd
        where = (lab, job.cwd if job is not None else inner)
        if where not in self._homes:
            self._homes[where] = inside(Path(lab), where[1], "launch.cwd")
        return self._homes[where]

    def _fill_command(self, plan: RunPlan, base: str | None, variables: Mapping[str, str], home: Path) -> list[str]:
        """Return the argv of a run, with all template variables filled in."""
        config, warm, start = plan.config, self._setup.study.warm_start, plan.start
        if plan.job is not None:
            argv = list(plan.job.argv)
        else:
            changed = {key: "old" not in change for key, change in plan.diff_base.items()}
            changed |= self._setup.base(base).tracked
            arguments = render(config, self._rendering, changed)
            files_in = home if self._launch.cwd == RUN_FOLDER else None
            argv = build_argv(self._launch.command, variables, arguments, self._extra_of(plan), files_in, config)
        if start is not None and warm is not None:
            named = {**variables, "checkpoint": start["path"]}
            argv += [fill_template(text, named, "warm_start.arguments", config) for text in warm.arguments]
        return argv

    def _extra_of(self, plan: RunPlan) -> Sequence[str]:
        """Return the extra arguments that the run was planned with, which may differ from those of the current call.

        Raises:
            LabError: They contained a secret, and the current call does not repeat them.
        """
        if plan.extra is None or list(plan.extra) == self._redacted_extra:
            return self._setup.options.extra
        if any(HIDDEN in word for word in plan.extra):
            raise LabError("its arguments had a secret, which is not kept", hint="give the same arguments after `--`")
        return [str(word) for word in plan.extra]

    @cached_property
    def _redacted_extra(self) -> list[str]:
        return redact_argv(self._setup.options.extra)

    def _capsules_of(self, cwd: Path) -> Capsules:
        """Return the capsules of the checkout that contains `cwd`: the lab's own, or those of a separate checkout."""
        lab = self._setup.lab.resolve()
        root = next((folder for folder in (cwd, *cwd.parents) if folder == lab or (folder / ".git").exists()), lab)
        if root == lab:
            return self._capsules
        if root not in self._elsewhere:
            self._elsewhere[root] = Capsules(root, self._outputs, self._setup.prints)
        return self._elsewhere[root]

    def _variables(
        self, run_id: str, seed: int | None, run_dir: str, config_file: str, slot: Slot, lab: str
    ) -> dict[str, str]:
        """Return the template variables of a run's command and environment."""
        return {
            "run_dir": run_dir,
            "out_dir": run_dir if self._launch.output_dir == "run" else f"{run_dir}/out",
            "config": config_file,
            "run_id": run_id,
            "study": self._setup.study.name,
            "lab": lab,
            "slot": slot.name,
            "devices": ",".join(slot.devices) if slot.fixed else LATE_DEVICES,
            "python": sys.executable,
            "seed": str(FIRST_SEED if seed is None else seed),
        }

    def _own_environment(
        self, run_id: str, seed: int | None, round_: int, variables: Mapping[str, str], slot: Slot
    ) -> dict[str, str]:
        """Return the variables that looplab itself sets for a run."""
        run_dir, study = variables["run_dir"], variables["study"]
        if slot not in self._slot_env:
            self._slot_env[slot] = {**self._live, **slot_environment(slot)}
        return {
            **self._slot_env[slot],
            **wandb_environment(self._setup.study.track.wandb, self._setup.lab, run_dir, study, run_id),
            "LOOPLAB_RUN_ID": run_id,
            "LOOPLAB_RUN_DIR": run_dir,
            "LOOPLAB_OUT_DIR": variables["out_dir"],
            "LOOPLAB_CONFIG": f"{run_dir}/{folder.RECORD}/config.json",
            "LOOPLAB_METRICS": f"{run_dir}/metrics.jsonl",
            "LOOPLAB_STUDY": study,
            "LOOPLAB_ROUND": str(round_),
            "LOOPLAB_LAB": variables["lab"],
            **({"LOOPLAB_SEED": str(seed)} if seed is not None else {}),
        }

    def _given_environment(self, config: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that the lab file and the config set for a run; may contain secrets."""
        return {
            **render_environment(config, self._rendering),
            **({WANDB_PARAMETERS: variables["config"]} if self._rendering.as_ == "wandb" else {}),
            **{
                name: fill_template(value, variables, f"launch.env.{name}", config)
                for name, value in self._launch.env.items()
            },
        }


def resources_of(study: StudyConfig) -> Resources:
    """Return what a run of this study needs."""
    wanted, launch = study.resources, study.launch
    time_s = wanted.time
    if time_s is None and launch.timeout is not None:
        time_s = launch.timeout + launch.grace + launch.cleanup_timeout + TIME_MARGIN_S
    return Resources(wanted.devices, wanted.cores, wanted.memory_mb, time_s, dict(wanted.constraints))


def batch_script_of(setup: Setup, command: FilledCommand) -> str | None:
    """Return the script that a scheduler would get for this run; None: the executor uses none."""
    run_dir = Path(command.folder)
    spec = LaunchSpec(
        run_id=run_dir.name, run_dir=run_dir, argv=command.argv, path=command.argv[0], cwd=Path(command.cwd),
        slot=setup.slots[0], grace=setup.study.launch.grace, record_dir=run_dir / folder.RECORD,
        resources=resources_of(setup.study),
    )  # fmt: skip
    return script_of(setup.study.executor, spec)


def _about(run: RunRow, plan: RunPlan) -> dict[str, Any]:
    """Return the fields of `run.json` that the ledger alone determines."""
    return {
        "id": run.id,
        "study": run.study,
        "n": run.n,
        "round": run.round,
        "parent": run.parent,
        "base": run.base,
        "proposer": run.proposer,
        "source": plan.source,
        "reason": run.reason,
        "hypothesis": plan.hypothesis,
        "notes": list(plan.notes),
        "config_hash": run.config_hash,
        "role": run.role,
        "point": run.point,
        "seed": run.seed,
        "twin": run.twin,
        "warm": run.warm,
        "warm_start": plan.start,
        "extra": list(plan.extra or ()),
        "edits": list(plan.edits),
        "call_edits": list(plan.call_edits),
        "changes": {"parent": plan.diff_parent, "base": plan.diff_base},
        "created": run.created,
    }


def _dump_about(about: Mapping[str, Any]) -> bytes:
    """Return the content of `run.json`; only the changes may contain NaN or infinities, which a config may have."""
    return dump_json(about, finite=not has_non_finite(about["changes"]))


def _by_path(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return record files by path relative to the run folder, from record files by name."""
    return {f"{folder.RECORD}/{name}": content for name, content in files.items()}


def _config_name(rendering: ConfigRendering) -> str:
    """Return the name of the config file at {config}."""
    if rendering.as_ == "wandb":
        return WANDB_CONFIG
    return f"config.{rendering.format if rendering.as_ == 'file' else 'json'}"


def _config_content(name: str, config: Mapping[str, Any]) -> bytes:
    """Return a config in the format of a file; for W&B, as the parameters of a sweep."""
    if name == "config.json":
        return dump_json(config)
    return dump_config(
        Path(name), {key: {"value": value} for key, value in config.items()} if name == WANDB_CONFIG else config
    )
