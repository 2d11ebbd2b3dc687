"""From a planned run to its folder and the order for the executor."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.config.files import dump_json, write_config
from looplab.config.paths import leaves, show
from looplab.launch.base import Order, Slot
from looplab.launch.command import build_argv, fill, find_program, render, render_environment
from looplab.launch.slots import slot_environment
from looplab.launch.tracking import wandb_environment
from looplab.ledger.study import RunRow
from looplab.loop.setup import SEEDS, Setup
from looplab.loop.warm import check_start
from looplab.runs import folder
from looplab.runs.capsule import Capsules
from looplab.runs.names import inside
from looplab.runs.redact import redact_argv, redact_env

PREPARED = ("run.json", "config.json", "override.json", "config_diff.json", "capsule.json")
"""The files that a run folder has before the run starts."""


class Preparer:
    """Prepares the runs of one study; what does not change between runs is worked out once."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        study = setup.study
        self._launch = study.launch
        self._outputs = folder.study_folder(setup.lab, study.study)
        self._rendering = self._launch.config
        self._capsules = Capsules(setup.lab, self._outputs, setup.prints)
        self._host = socket.gethostname()
        live = {"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1")}  # train.log grows as the trainer prints
        self._slot_env = {slot.name: {**live, **slot_environment(slot)} for slot in setup.slots}
        self._cwds: dict[tuple[str, str], Path] = {}
        self._elsewhere: dict[Path, Capsules] = {}
        self._programs: dict[tuple[str, Path], str] = {}

    def prepare(self, run: RunRow, plan: Mapping[str, Any], slot: Slot) -> tuple[Order, dict[str, str]]:
        """Make the run's folder, whole; gives the order and the hashes of the files."""
        run_dir = self._outputs / run.id
        config = plan["config"]
        lab = plan.get("place") or str(self._setup.lab)
        job = config if plan.get("job") else None  # a submitted command: its config says what to run, and where
        where = (lab, job["cwd"] if job is not None else self._launch.cwd)
        cwd = self._cwds.get(where)
        if cwd is None:
            cwd = self._cwds[where] = inside(Path(lab), where[1], "launch.cwd")
        config_file = self._config_file(str(run_dir))
        variables = self._variables(run.id, str(run_dir), config_file, slot, lab)
        start = plan.get("start")
        if start is not None and self._setup.study.warm_start is not None:
            check_start(start)
        argv = self._fill_command(plan, variables)
        own = self._own_environment(run, variables, slot)
        if job is not None:
            del own["LOOPLAB_CONFIG"]  # its trainer has a config of its own
        given = self._given_environment(config, variables)
        env = {**own, **given}
        if (argv[0], cwd) not in self._programs:
            self._programs[argv[0], cwd] = find_program(argv[0], cwd, env)
        program = self._programs[argv[0], cwd]
        seeds = {show(path): value for path, value in leaves(config) if str(path[-1]).lower() in SEEDS}
        about = {
            "id": run.id,
            "study": run.study,
            "n": run.n,
            "round": run.round,
            "parent": run.parent,
            "base": run.base,
            "proposer": run.proposer,
            "source": plan.get("source"),
            "reason": run.reason,
            "hypothesis": plan["hypothesis"],
            "formal": not self._setup.options.informal,
            "notes": plan["notes"],
            "config_hash": run.config_hash,
            "role": run.role,
            "point": run.point,
            "seed": run.seed,
            "twin": run.twin,
            "warm": run.warm,
            "warm_start": start,
            "fingerprint": self._setup.prints.digest(),
            "created": run.created,
            "launched": time.time(),
            "host": self._host,
            "slot": slot.name,
            "devices": list(slot.devices),
            "cores": list(slot.cores),
            "argv": redact_argv(argv),
        }
        capsules = self._capsules if job is None else self._capsules_of(cwd)
        capsule = capsules.make(argv, program, {**own, **redact_env(given)}, seeds)
        if job is not None:
            capsule["cwd"] = str(cwd)
        override = {"parent": run.parent, "base": run.base, "proposer": run.proposer, "edits": plan["edits"]}
        files = {
            "run.json": dump_json(about, finite=True),
            "config.json": dump_json(config),
            "override.json": dump_json(override, finite=True),
            "config_diff.json": dump_json({"parent": plan["diff_parent"], "base": plan["diff_base"]}),
            "capsule.json": dump_json(capsule, finite=True),
        }
        hashes = folder.create(run_dir, files)
        if not config_file.endswith(".json"):
            write_config(Path(config_file), config, sync=False)
        order = Order(
            run.id,
            run_dir,
            argv,
            program,
            cwd,
            slot,
            env,
            min(filter(None, (self._launch.timeout, job and job.get("timeout"))), default=None),
            self._launch.grace,
            self._launch.linger,
        )
        return order, hashes

    def argv(self, run_id: str, plan: Mapping[str, Any], slot: Slot) -> list[str]:
        """The argv that `prepare` would give this run, secrets hidden; touches no file."""
        run_dir = f"{self._outputs}/{run_id}"
        lab = plan.get("place") or str(self._setup.lab)
        variables = self._variables(run_id, run_dir, self._config_file(run_dir), slot, lab)
        return redact_argv(self._fill_command(plan, variables))

    def _config_file(self, run_dir: str) -> str:
        return f"{run_dir}/config.{self._rendering.format if self._rendering.as_ == 'file' else 'json'}"

    def _fill_command(self, plan: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
        config, warm, start = plan["config"], self._setup.study.warm_start, plan.get("start")
        if plan.get("job"):
            argv = list(config["argv"])
        else:
            changed = {key: "old" not in change for key, change in plan["diff_base"].items()}
            arguments = render(config, self._rendering, changed)
            argv = build_argv(self._launch.command, variables, arguments, self._setup.options.extra)
        if start is not None and warm is not None:
            named = {**variables, "checkpoint": start["path"]}
            argv += [fill(text, named, "warm_start.arguments") for text in warm.arguments]
        return argv

    def _capsules_of(self, cwd: Path) -> Capsules:
        """For a command whose folder lies in a checkout of its own: the code is the one of that checkout."""
        lab = self._setup.lab.resolve()
        root = next((folder for folder in (cwd, *cwd.parents) if folder == lab or (folder / ".git").exists()), lab)
        if root == lab:
            return self._capsules
        if root not in self._elsewhere:
            self._elsewhere[root] = Capsules(root, self._outputs, self._setup.prints)
        return self._elsewhere[root]

    def _variables(self, run_id: str, run_dir: str, config_file: str, slot: Slot, lab: str) -> dict[str, str]:
        return {
            "run_dir": run_dir,
            "out_dir": run_dir if self._launch.output_dir == "run" else f"{run_dir}/out",
            "config": config_file,
            "run_id": run_id,
            "study": self._setup.study.study,
            "lab": lab,
            "slot": slot.name,
            "devices": ",".join(slot.devices),
            "python": sys.executable,
        }

    def _own_environment(self, run: RunRow, variables: Mapping[str, str], slot: Slot) -> dict[str, str]:
        """What looplab tells the run."""
        run_dir = variables["run_dir"]
        return {
            **self._slot_env[slot.name],
            **wandb_environment(self._setup.study.track.wandb, self._setup.lab, run_dir, run.study, run.id),
            "LOOPLAB_RUN_ID": run.id,
            "LOOPLAB_RUN_DIR": run_dir,
            "LOOPLAB_OUT_DIR": variables["out_dir"],
            "LOOPLAB_CONFIG": f"{run_dir}/config.json",
            "LOOPLAB_METRICS": f"{run_dir}/metrics.jsonl",
            "LOOPLAB_STUDY": run.study,
            "LOOPLAB_ROUND": str(run.round),
            "LOOPLAB_LAB": variables["lab"],
            **({"LOOPLAB_SEED": str(run.seed)} if run.seed is not None else {}),
        }

    def _given_environment(self, config: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
        """What the lab file and the config tell the run; may hold secrets."""
        return {
            **render_environment(config, self._rendering),
            **{name: fill(value, variables, f"launch.env.{name}") for name, value in self._launch.env.items()},
        }
