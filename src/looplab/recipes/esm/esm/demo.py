"""The method on two small tasks, with held-out questions, controls and intervals: one that steering can mend, and one
whose errors have no cause that could be steered. Layer and strength are chosen on dev; test is looked at once."""

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
from .config import Settings, settings
from .data import Example, Splits, splits
from .evaluate import Report

Say = Callable[[str], None]
CONTROLS = ["no_probing", "no_memory", "random_direction", "shuffled_retrieval", "mean_vector"]
SCALES = (0.5, 1.0, 2.0)
"""Values of k_scale that are tried on dev, with each layer."""
NAMES = {
    "greedy": "greedy", "esm": "ESM", "no_probing": "no probing", "no_memory": "no memory",
    "random_direction": "random direction", "shuffled_retrieval": "shuffled memory", "mean_vector": "one mean vector",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What is shown."""

    title: str
    kind: str
    questions: Splits
    settings: Settings


@dataclass(frozen=True)
class Result:
    """What came of it on the test questions."""

    report: Report
    settings: Settings


def show(model: Path, backend: str, run_dir: Path | None, quick: bool, say: Say | None = None) -> dict[str, Any]:
    """Run both tasks, print a table for each, and as the last line one JSON object."""
    from rich.console import Console

    console = Console(highlight=False)
    say = say or (lambda text: console.print(text, style="dim", markup=False, soft_wrap=True))
    began = time.process_time()
    found: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="esm-demo-") as temporary:
        root = run_dir or Path(temporary)
        tasks = _tasks(model, backend, root, quick)
        engine = make_backend(tasks[0].settings.model)
        try:
            for task in tasks:
                found[task.kind] = play(task, engine, root / task.kind, say)
                console.print(_table(task, found[task.kind]))
        finally:
            engine.close()
    summary = _summary(found) | {"backend": backend, "cpu_seconds": round(time.process_time() - began, 1)}
    print(json.dumps(summary), flush=True)
    return summary


def _tasks(model: Path, backend: str, root: Path, quick: bool) -> list[Task]:
    if backend == "transformers" and not (model / "config.json").is_file():
        raise LabError(
            "the tiny model is not there", file=model, hint="train it: python -m esm.tiny.train; or --backend toy"
        )
    train, dev, test = (48, 48, 100) if quick else (160, 128, 400)
    made = []
    for kind, title in (
        ("steerable", "a task that steering can mend: a hasty author omits the last step"),
        ("slips", "a task that it cannot: every error is a random slip"),
    ):
        chosen = settings({
            "model": {"name_or_path": str(model), "backend": backend},
            "task": {"dataset": "tiny", "generator": {"kind": kind, "n_train": train, "n_dev": dev, "n_test": test}},
            "prompt": {"template": "tiny"},
            "decode": {"max_new_tokens": 64},
            "control_points": {"M": 4},
            "offline_mine": {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 64, "keep_top_C": 2048,
                             "candidate_layers": [0, 1, 2, 3], "batch_size_examples": 32},
            "offline_select": {"B": 384, "min_per_control_point": 24},
            "online": {"probe_tokens": 4, "batch_size_examples": 128},
            "eval": {"split": "test", "ablations": CONTROLS, "bootstrap": 10_000},
            "outputs": {"root_dir": str(root), "run_name": kind},
        })  # fmt: skip
        questions = _toy_questions(kind, train, dev, test) if backend == "toy" else splits(chosen.task)
        made.append(Task(title, kind, questions, chosen))
    return made


def _toy_questions(kind: str, train: int, dev: int, test: int) -> Splits:
    """The toy's own questions, all different."""
    from .backends.toy import problem

    rows = [problem(number, kind == "slips") for number in range(train + dev + test)]
    made = [Example(str(i), row.question, row.gold, "number", solution=row.solution) for i, row in enumerate(rows)]
    return Splits(made[:train], made[train : train + dev], made[train + dev :])


def play(task: Task, backend: Backend, run_dir: Path, say: Say) -> Result:
    """Mine, select, remember; choose layer and strength on dev; then the test questions, once."""
    given = task.settings
    counts = mine.run(given, backend, task.questions.train, run_dir, lambda _: None)
    say(f"{task.kind}: {counts['rollouts']} rollouts, {counts['rollout_accuracy']:.0%} right, {counts['pairs']} pairs")
    select.run(given, run_dir)
    memory.run(given, run_dir)
    chosen, rival = (_choose(task, backend, run_dir, name, say) for name in ("esm", "mean_vector"))
    report = evaluate.run(
        chosen, backend, task.questions.test, run_dir, split="test", wanted=evaluate.methods(chosen),
        say=lambda _: None, own={"mean_vector": rival},
    )  # fmt: skip
    return Result(report, chosen)


def _choose(task: Task, backend: Backend, run_dir: Path, name: str, say: Say) -> Settings:
    """The layer and k_scale with which a method is best on dev; of equal ones the first, which is the gentler one."""
    best, best_accuracy = task.settings, -1.0
    held, _ = memory.load(run_dir / "memory")
    for scale in SCALES:
        for layer in held.layers:
            trial = task.settings.changed({"online.layers": [layer], "online.k_scale": scale})
            report = evaluate.run(
                trial, backend, task.questions.dev, run_dir, split="dev", wanted=evaluate.methods(trial, [name]),
                prefix="dev_", say=lambda _: None,
            )  # fmt: skip
            if report.accuracy(name) > best_accuracy:
                best, best_accuracy = trial, report.accuracy(name)
    say(
        f"{task.kind}: {NAMES[name]}: best on {len(task.questions.dev)} dev questions with layer "
        f"{best.online.layers}, k_scale {best.online.k_scale:g}: {best_accuracy:.3f}"
    )
    return best


def _table(task: Task, result: Result) -> Any:
    from rich.table import Table

    report = result.report
    n = len(report.examples)
    table = Table(
        title=f"{task.title}\n{n} test questions, reading {report.test_reads} of the test set",
        caption="the mean vector has a layer and strength of its own, from dev",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for column in ("method", "right", "gain over greedy [95 %]", "p", "tokens+probes"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name in NAMES:
        row = tables.variant_row(report, result.settings, name)
        compared = row["delta"] is not None
        table.add_row(
            NAMES[name], f"{row['acc']:.3f}",
            f"{row['delta']:+.3f} \\[{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]" if compared else "",
            f"{row['mcnemar_p']:.1g}" if compared else "", f"{row['tokens']:.1f}+{row['probe_tokens']:.1f}",
        )  # fmt: skip
    return table


def _summary(found: dict[str, Result]) -> dict[str, Any]:
    main, other = found["steerable"], found["slips"]
    summary: dict[str, Any] = {name: main.report.accuracy(name) for name in NAMES}
    gain = tables.variant_row(main.report, main.settings, "esm")
    none = tables.variant_row(other.report, other.settings, "esm")
    if any(tables.unlike_greedy(result.report) for result in found.values()):
        raise LabError("without a memory the answers differ from greedy ones: the backend is not sound")
    return summary | {
        "delta": gain["delta"], "ci_low": gain["ci_low"], "ci_high": gain["ci_high"], "mcnemar_p": gain["mcnemar_p"],
        "no_memory_identical": True, "layer": next(iter(main.settings.online.layers or [])),
        "k_scale": main.settings.online.k_scale, "n": len(main.report.examples),
        "unsteerable_greedy": other.report.accuracy("greedy"), "unsteerable_esm": other.report.accuracy("esm"),
        "unsteerable_delta": none["delta"], "unsteerable_ci_low": none["ci_low"],
        "unsteerable_ci_high": none["ci_high"], "test_reads": main.report.test_reads,
    }  # fmt: skip
