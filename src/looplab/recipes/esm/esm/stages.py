"""The stages as functions of a config file and a run folder; what run.py and a pipeline call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from looplab import trainkit
from looplab.errors import LabError

from . import cases, evaluate, files, memory, mine, select, stats, tables
from .backends.base import make_backend
from .config import Settings, load
from .data import Example, splits
from .evaluate import Method, Report

Say = Callable[[str], None]
TUNE_SHARE = 0.5
"""`tune` uses this share of the dev questions, drawn by `seed`. The method itself is deterministic; what varies from
one seed to the next, and what a difference must stand out from, is which questions are asked."""


def _settings(config: Path, run_dir: Path, say: Say) -> Settings:
    settings = load(config)
    for note in settings.notes:
        say(f"note: {note}")
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / "config_resolved.json").is_file():
        files.write_json(run_dir / "config_resolved.json", settings.plain())
    return settings


def _questions(settings: Settings, part: str, say: Say) -> list[Example]:
    found = splits(settings.task)
    for note in found.notes:
        say(f"note: {note}")
    examples: list[Example] = getattr(found, part)
    return examples


def _require_memory(settings: Settings, run_dir: Path, wanted: Sequence[Method]) -> None:
    """Before the model is loaded, which takes its time."""
    if any(method.name != "greedy" for method in wanted):
        memory.require(evaluate.artifact_dir(settings, run_dir) / "memory")


def run_mine(config: Path, run_dir: Path, say: Say = print) -> dict[str, Any]:
    settings = _settings(config, run_dir, say)
    examples = _questions(settings, "train", say)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        return mine.run(settings, backend, examples, run_dir, say)
    finally:
        backend.close()


def run_select(config: Path, run_dir: Path, say: Say = print) -> dict[str, Any]:
    return select.run(_settings(config, run_dir, say), run_dir)


def run_memory(config: Path, run_dir: Path, say: Say = print) -> dict[str, Any]:
    return memory.run(_settings(config, run_dir, say), run_dir)


def run_eval(config: Path, run_dir: Path, say: Say = print) -> dict[str, Any]:
    """The split, methods and ablations of the config; tables, figure and cases."""
    settings = _settings(config, run_dir, say)
    examples = _questions(settings, settings.eval.split, say)
    wanted = evaluate.methods(settings)
    _require_memory(settings, run_dir, wanted)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        report = evaluate.run(settings, backend, examples, run_dir, split=settings.eval.split, wanted=wanted, say=say)
    finally:
        backend.close()
    for note in tables.write(report, settings, run_dir):
        say(f"note: {note}")
    cases.write_cases(report, settings, run_dir)
    return tables.main_row(report, settings)


def run_tune(config: Path, run_dir: Path, say: Say = print) -> dict[str, Any]:
    """Greedy and ESM on a seeded half of dev; metrics.jsonl gets a row after each batch of questions."""
    settings = _settings(config, run_dir, say)
    examples = _tuning_questions(_questions(settings, "dev", say), settings.seed)
    logger = trainkit.Logger(run_dir / "metrics.jsonl")
    wanted = [Method("greedy", 0), Method("esm", 0)]
    _require_memory(settings, run_dir, wanted)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        report = evaluate.run(
            settings, backend, examples, run_dir, split="dev", wanted=wanted, say=say,
            after_batch=lambda so_far: logger.log(_metrics(so_far), step=len(so_far.rows["esm"][0])),
        )  # fmt: skip
    finally:
        backend.close()
    found = _metrics(report)
    logger.summary(found)
    return found


def _tuning_questions(dev: list[Example], seed: int) -> list[Example]:
    order = sorted(dev, key=lambda example: mine.row_seed("tune", seed, example.fingerprint))
    return order[: max(1, round(TUNE_SHARE * len(dev)))]


def _metrics(report: Report) -> dict[str, float]:
    esm, greedy = tables.diagnostics(report, "esm"), report.accuracy("greedy")
    seen = stats.paired(report.correct("greedy"), report.correct("esm"), 1)
    return {
        "dev/delta": esm["acc"] - greedy, "dev/accuracy": esm["acc"], "dev/greedy_accuracy": greedy,
        "dev/win": seen.win, "dev/lose": seen.lose, "dev/tool_step_rate": esm["tool_step_rate"],
        "dev/probe_overhead": esm["overhead_ratio"], "dev/tokens_mean": esm["tokens_mean"],
        "dev/trunc_rate": esm["trunc_rate"], "dev/pred_none_rate": esm["pred_none_rate"],
    }  # fmt: skip


STAGES: dict[str, Callable[[Path, Path, Say], dict[str, Any]]] = {
    "mine": run_mine, "select": run_select, "memory": run_memory, "eval": run_eval, "tune": run_tune,
}  # fmt: skip


def case(
    config: Path, run_dir: Path, ids: str, methods: str, tag: str, max_new_tokens: int | None = None, say: Say = print
) -> Path:
    """Answer a few questions of eval.split and write them down in full."""
    settings = _settings(config, run_dir, say)
    if max_new_tokens is not None:
        settings = settings.changed({"decode.max_new_tokens": max_new_tokens})
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", tag):
        raise LabError(f"the tag {tag!r} cannot be part of a file's name", hint="letters, digits, `_`, `-`, `.`")
    known = ("greedy", "esm", "no_memory", "no_probing", "random_direction", "shuffled_retrieval", "mean_vector")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise LabError(f"there is no method {name!r}", hint=f"there are {', '.join(known)}")
    examples = cases.pick(_questions(settings, settings.eval.split, say), ids)
    wanted = [method for method in evaluate.methods(settings, names) if method.first]
    _require_memory(settings, run_dir, wanted)
    backend = make_backend(settings.model, settings.prompt.chat)
    try:
        report = evaluate.run(
            settings, backend, examples, run_dir, split=settings.eval.split, wanted=wanted, prefix=f"{tag}_", say=say
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
