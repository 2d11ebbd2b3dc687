"""Demo on two small tasks, with held-out questions, controls and confidence intervals: one that steering can fix, and
one whose errors are random. Layer and scale are tuned on dev; test is read once."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.errors import LabError

from . import evaluate, memory, mine, select, tables
from .backends.base import Backend, make_backend
from .config import EsmSettings, parse_settings
from .data import Example, Splits, splits
from .evaluate import Report

Log = Callable[[str], None]
CONTROLS = ["no_probing", "no_memory", "random_direction", "shuffled_retrieval", "mean_vector"]
SCALES = (0.5, 1.0, 2.0)
"""Values of k_scale tried on dev, with each layer."""
NAMES = {name: shown for name, shown in tables.NAMES.items() if name != "prompt"}


@dataclass(frozen=True)
class DemoTask:
    """One task of the demo."""

    title: str
    kind: str
    questions: Splits
    settings: EsmSettings


@dataclass(frozen=True)
class DemoResult:
    """Result on the test questions."""

    report: Report
    settings: EsmSettings


def show(model: Path, backend: str, run_dir: Path | None, quick: bool, log: Log | None = None) -> dict[str, Any]:
    """Run both tasks; print a table for each, and one JSON object as the last line."""
    from rich.console import Console

    console = Console(highlight=False)
    log = log or (lambda text: console.print(text, style="dim", markup=False, soft_wrap=True))
    start_time = time.process_time()
    found: dict[str, DemoResult] = {}
    with tempfile.TemporaryDirectory(prefix="esm-demo-") as temporary:
        root = run_dir or Path(temporary)
        tasks = _tasks(model, backend, root, quick)
        engine = make_backend(tasks[0].settings.model)
        try:
            for task in tasks:
                found[task.kind] = run_task(task, engine, root / task.kind, log)
                console.print(_table(task, found[task.kind]))
                console.print(_headline(found[task.kind]), style="bold", markup=False)
        finally:
            engine.close()
    summary = _summary(found) | {"backend": backend, "cpu_seconds": round(time.process_time() - start_time, 1)}
    print(json.dumps(summary), flush=True)
    return summary


def _tasks(model: Path, backend: str, root: Path, quick: bool) -> list[DemoTask]:
    if backend == "transformers" and not (model / "config.json").is_file():
        raise LabError(
            "the tiny model is missing", file=model, hint="train it: python -m esm.tiny.train; or use --backend toy"
        )
    train, dev, test = (48, 48, 100) if quick else (160, 128, 400)
    made = []
    for kind, title in (
        ("steerable", "a task that steering can fix: a hasty author omits the last step"),
        ("slips", "a task that it cannot fix: every error is a random slip"),
    ):
        chosen = parse_settings({
            "model": {"name_or_path": str(model), "backend": backend, "max_num_seqs": 256},
            "task": {"dataset": "tiny", "generator": {"kind": kind, "n_train": train, "n_dev": dev, "n_test": test}},
            "prompt": {"template": "tiny"},
            "decode": {"max_new_tokens": 64},
            "control_points": {"M": 4},
            "offline_mine": {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 64, "keep_top_C": 2048,
                             "candidate_layers": [0, 1, 2, 3], "batch_size_examples": 32},
            "offline_select": {"B": 384, "min_per_control_point": 24},
            "online": {"probe_tokens": 4, "batch_size_examples": 128},
            "eval": {"split": "test", "methods": ["greedy", "esm", "majority"], "ablations": CONTROLS,
                     "bootstrap": 10_000},
            "outputs": {"root_dir": str(root), "run_name": kind},
        })  # fmt: skip
        questions = _toy_questions(kind, train, dev, test) if backend == "toy" else splits(chosen.task)
        made.append(DemoTask(title, kind, questions, chosen))
    return made


def _toy_questions(kind: str, train: int, dev: int, test: int) -> Splits:
    """Return questions of the toy model, all different."""
    from .backends.toy import make_problem

    rows = [make_problem(number, kind == "slips") for number in range(train + dev + test)]
    made = [Example(str(i), row.question, row.gold, "number", solution=row.solution) for i, row in enumerate(rows)]
    return Splits(made[:train], made[train : train + dev], made[train + dev :])


def run_task(task: DemoTask, backend: Backend, run_dir: Path, log: Log) -> DemoResult:
    """Mine, select, build the memory; tune layer and scale on dev; then evaluate on test, once."""
    given = task.settings
    counts = mine.run(given, backend, task.questions.train, run_dir, lambda _: None)
    accuracy = counts["rollout_accuracy"]
    log(f"{task.kind}: {counts['rollouts']} rollouts, {accuracy:.0%} correct, {counts['pairs']} pairs")
    select.run(given, run_dir)
    memory.run(given, run_dir)
    chosen, rival = (_tune(task, backend, run_dir, name, log) for name in ("esm", "mean_vector"))
    report = evaluate.run(
        chosen, backend, task.questions.test, run_dir, split="test", methods=evaluate.requested_methods(chosen),
        log=lambda _: None, own={"mean_vector": rival},
    )  # fmt: skip
    return DemoResult(report, chosen)


def _tune(task: DemoTask, backend: Backend, run_dir: Path, name: str, log: Log) -> EsmSettings:
    """Return the settings with the best layer and k_scale on dev; ties: the smaller scale."""
    best, best_accuracy = task.settings, -1.0
    held, _ = memory.load(run_dir / "memory")
    for scale in SCALES:
        for layer in held.layers:
            trial = task.settings.changed({"online.layers": [layer], "online.k_scale": scale})
            report = evaluate.run(
                trial, backend, task.questions.dev, run_dir, split="dev", prefix="dev_", log=lambda _: None,
                methods=evaluate.requested_methods(trial, [name]),
            )  # fmt: skip
            if report.accuracy(name) > best_accuracy:
                best, best_accuracy = trial, report.accuracy(name)
    log(
        f"{task.kind}: {NAMES[name]}: best on {len(task.questions.dev)} dev questions with layer "
        f"{best.online.layers}, k_scale {best.online.k_scale:g}: {best_accuracy:.3f}"
    )
    return best


def _headline(result: DemoResult) -> str:
    report = result.report
    return tables.headline({name: report.correct(name) for name in report.rows})


def _table(task: DemoTask, result: DemoResult) -> Any:
    from rich.table import Table

    report = result.report
    n = len(report.examples)
    table = Table(
        title=f"{task.title}\n{n} test questions, reading {report.test_reads} of the test set",
        caption="the mean vector has its own layer and scale, tuned on dev",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for column in ("method", "accuracy", "gain over greedy [95 %]", "p", "tokens+probes", "CPU ms"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name in NAMES:
        row = tables.variant_row(report, result.settings, name)
        compared = row["delta"] is not None
        table.add_row(
            NAMES[name], f"{row['acc']:.3f}",
            f"{row['delta']:+.3f} \\[{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]" if compared else "",
            f"{row['mcnemar_p']:.1g}" if compared else "", f"{row['tokens']:.1f}+{row['probe_tokens']:.1f}",
            "" if row["cpu_seconds"] is None else f"{1000 * row['cpu_seconds']:.0f}",
        )  # fmt: skip
    return table


def _summary(found: dict[str, DemoResult]) -> dict[str, Any]:
    main, other = found["steerable"], found["slips"]
    summary: dict[str, Any] = {name: main.report.accuracy(name) for name in NAMES}
    gain = tables.variant_row(main.report, main.settings, "esm")
    none = tables.variant_row(other.report, other.settings, "esm")
    if any(tables.differing_from_greedy(result.report) for result in found.values()):
        raise LabError("without a memory the answers differ from greedy: the backend is faulty")
    return summary | {
        "delta": gain["delta"], "ci_low": gain["ci_low"], "ci_high": gain["ci_high"], "mcnemar_p": gain["mcnemar_p"],
        "headline": _headline(main), "no_memory_identical": True,
        "layer": next(iter(main.settings.online.layers or [])),
        "k_scale": main.settings.online.k_scale, "n": len(main.report.examples),
        "unsteerable_greedy": other.report.accuracy("greedy"), "unsteerable_esm": other.report.accuracy("esm"),
        "unsteerable_delta": none["delta"], "unsteerable_ci_low": none["ci_low"],
        "unsteerable_ci_high": none["ci_high"], "test_reads": main.report.test_reads,
    }  # fmt: skip
