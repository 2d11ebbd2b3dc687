"""The stages as functions of a config file and a run folder, for run.py and pipelines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from looplab import trainkit
from looplab.errors import LabError

from . import cases, evaluate, files, memory, mine, select, stats, tables
from .backends.base import make_backend
from .config import EsmSettings, load
from .data import Example, splits
from .evaluate import Method, Report

Log = Callable[[str], None]
TUNE_FRACTION = 0.5
"""Fraction of the dev questions that `tune` uses, sampled by `seed`. The method is deterministic; the choice of
questions is the noise that a difference must exceed."""


def check(config: Path) -> dict[str, Any]:
    """Return a config with all defaults; LabError if it is not valid."""
    return load(config).plain()


def _settings(config: Path, run_dir: Path, log: Log) -> EsmSettings:
    settings = load(config)
    for note in settings.notes:
        log(f"note: {note}")
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "config_resolved.json").is_file():
        files.write_json(run_dir / "config_resolved.json", settings.plain())
    return settings


def _questions(settings: EsmSettings, part: str, log: Log) -> list[Example]:
    found = splits(settings.task)
    for note in found.notes:
        log(f"note: {note}")
    examples: list[Example] = getattr(found, part)
    return examples


def _require_memory(settings: EsmSettings, run_dir: Path, methods: Sequence[Method]) -> None:
    """Raise LabError if a method needs a memory and there is none; called before the model is loaded."""
    if any(method.name not in evaluate.PLAIN for method in methods):
        memory.require(evaluate.artifact_dir(settings, run_dir) / "memory")


def run_mine(config: Path, run_dir: Path, log: Log = print) -> dict[str, Any]:
    settings = _settings(config, run_dir, log)
    examples = _questions(settings, "train", log)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        return mine.run(settings, backend, examples, run_dir, log)
    finally:
        backend.close()


def run_select(config: Path, run_dir: Path, log: Log = print) -> dict[str, Any]:
    return select.run(_settings(config, run_dir, log), run_dir)


def run_memory(config: Path, run_dir: Path, log: Log = print) -> dict[str, Any]:
    return memory.run(_settings(config, run_dir, log), run_dir)


def run_eval(config: Path, run_dir: Path, log: Log = print) -> dict[str, Any]:
    """Evaluate the config's split, methods and ablations; write tables, figure and cases."""
    settings = _settings(config, run_dir, log)
    examples = _questions(settings, settings.eval.split, log)
    methods = evaluate.requested_methods(settings)
    _require_memory(settings, run_dir, methods)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        report = evaluate.run(
            settings, backend, examples, run_dir, split=settings.eval.split, methods=methods, log=log,
            own=settings.own(),
        )  # fmt: skip
    finally:
        backend.close()
    for note in tables.write(report, settings, run_dir):
        log(f"note: {note}")
    cases.write_cases(report, settings, run_dir)
    return tables.main_row(report, settings)


def run_tune(config: Path, run_dir: Path, log: Log = print) -> dict[str, Any]:
    """Evaluate greedy and ESM on a seeded half of dev; metrics.jsonl gets a row after each batch of questions."""
    settings = _settings(config, run_dir, log)
    examples = _tuning_questions(_questions(settings, "dev", log), settings.seed)
    logger = trainkit.Logger(run_dir / "metrics.jsonl")
    methods = [Method("greedy", 0), Method("esm", 0)]
    _require_memory(settings, run_dir, methods)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        report = evaluate.run(
            settings, backend, examples, run_dir, split="dev", methods=methods, log=log,
            after_batch=lambda so_far: logger.log(_metrics(so_far), step=len(so_far.rows["esm"][0])),
        )  # fmt: skip
    finally:
        backend.close()
    found = _metrics(report)
    logger.summary(found)
    return found


def _tuning_questions(dev: list[Example], seed: int) -> list[Example]:
    order = sorted(dev, key=lambda example: mine.row_seed("tune", seed, example.fingerprint))
    return order[: max(1, round(TUNE_FRACTION * len(dev)))]


def _metrics(report: Report) -> dict[str, float]:
    esm, greedy = tables.diagnostics(report, "esm"), report.accuracy("greedy")
    seen = stats.paired(report.correct("greedy"), report.correct("esm"), 1)
    return {
        "dev/delta": esm["acc"] - greedy, "dev/accuracy": esm["acc"], "dev/greedy_accuracy": greedy,
        "dev/win": seen.win, "dev/lose": seen.lose, "dev/tool_step_rate": esm["tool_step_rate"],
        "dev/probe_overhead": esm["overhead_ratio"], "dev/tokens_mean": esm["tokens_mean"],
        "dev/trunc_rate": esm["trunc_rate"], "dev/pred_none_rate": esm["pred_none_rate"],
    }  # fmt: skip


STAGES: dict[str, Callable[[Path, Path, Log], dict[str, Any]]] = {
    "mine": run_mine, "select": run_select, "memory": run_memory, "eval": run_eval, "tune": run_tune,
}  # fmt: skip


def case(
    config: Path,
    run_dir: Path,
    ids: str,
    requested_methods: str,
    tag: str,
    max_new_tokens: int | None = None,
    log: Log = print,
) -> Path:
    """Answer a few questions of eval.split and write a full report."""
    settings = _settings(config, run_dir, log)
    if max_new_tokens is not None:
        settings = settings.changed({"decode.max_new_tokens": max_new_tokens})
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", tag):
        raise LabError(f"the tag {tag!r} cannot be part of a file name", hint="use letters, digits, `_`, `-`, `.`")
    known = tuple(tables.NAMES)
    names = [name.strip() for name in requested_methods.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise LabError(f"unknown method {name!r}", hint=f"choose from {', '.join(known)}")
    examples = cases.pick(_questions(settings, settings.eval.split, log), ids)
    methods = [method for method in evaluate.requested_methods(settings, names) if method.first]
    _require_memory(settings, run_dir, methods)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        report = evaluate.run(
            settings, backend, examples, run_dir, split=settings.eval.split, methods=methods, prefix=f"{tag}_", log=log
        )
    finally:
        backend.close()
    return cases.write_case(report, settings, run_dir, tag)


def fetch(target: Path) -> None:
    from .fetch import fetch_model

    fetch_model(target)


def demo(model: Path, backend: str, run_dir: Path | None, quick: bool) -> None:
    from .demo import show

    show(model, backend, run_dir, quick)


def study(
    lab: Path, name: str, out: Path | None, model: Path | None, *, backend: str | None, quick: bool, only_report: bool,
    log: Log = print,
) -> None:  # fmt: skip
    """Run the study of a plan in studies/, print its tables, and one JSON object as the last line."""
    from .study import load_plan, markdown, prepare, report, run

    plan = load_plan(lab / "studies" / f"{name}.yaml")
    plan = plan.rehearsal() if quick else plan
    wanted = Path(plan.config["model"]["name_or_path"])
    model = model or (lab / wanted if (lab / wanted).is_dir() else wanted)
    folder = out or Path("outputs") / (f"study-{name}-quick" if quick else f"study-{name}")
    if name == "habits" and backend is None and not only_report and not model.is_dir():
        fetch(model)
    made = prepare(name, plan, model, folder, backend=backend)
    result = report(made, log) if only_report else run(made, log)
    log(markdown(made, result))
    rows = {row["method"]: row["acc"] for row in result["methods"]}
    summary = {"study": name, "headline": result["headline"], **rows, "n_test": result["n_test"]}
    log(json.dumps(summary | {"best_rival": result["best_rival"], "tables": str(folder / "tables")}))
