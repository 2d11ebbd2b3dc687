"""Tables of an evaluation: accuracy with confidence intervals, cost, and diagnostics of the steering.

The headline compares ESM with the best of its rivals, the methods that one would use instead of it. Controls and
ablations show where a gain comes from; they are not rivals.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import files, stats

if TYPE_CHECKING:
    from .config import EsmSettings
    from .evaluate import Report

Row = dict[str, Any]
NAMES = {
    "greedy": "greedy", "prompt": "one more line in the prompt", "majority": "majority vote",
    "mean_vector": "one mean vector", "esm": "ESM", "no_probing": "ESM without probing",
    "shuffled_retrieval": "shuffled memory", "random_direction": "random direction", "no_memory": "no memory",
}  # fmt: skip
"""Names for people, in the order of the tables."""
RIVALS = ("greedy", "prompt", "majority", "mean_vector")


def write(report: Report, settings: EsmSettings, run_dir: Path) -> list[str]:
    """Write all tables and the figure of a run; return notes for the user."""
    tables, t_max = run_dir / "tables", report.t_max
    write_csv(tables / "main_results_single.csv", [main_row(report, settings)])
    if len(report.rows) > 2 or settings.eval.ablations:
        write_csv(tables / "ablation.csv", [variant_row(report, settings, name) for name in report.rows])
    found = {name: diagnostics(report, name) for name in report.rows}
    files.write_json(tables / f"diagnostics_T{t_max}.json", found)
    write_csv(
        tables / f"diagnostics_T{t_max}.csv",
        [{"method": name, **{k: v for k, v in row.items() if k != "gates"}} for name, row in found.items()],
    )
    if {"greedy", "esm"} <= set(report.rows):
        files.write_json(tables / f"compare_T{t_max}.json", compare(report))
    notes = figure(report, run_dir / "figures" / f"tokens_hist_T{t_max}.pdf")
    if "esm" in report.rows:
        sentence = headline({name: report.correct(name) for name in report.rows})
        files.atomic_write(tables / "headline.txt", (sentence + "\n").encode())
        notes.append(sentence)
    if "mean_vector" in report.rows and "mean_vector" not in settings.eval.own:
        notes.append("mean_vector has the layers and scale of ESM; tune its own on dev, and set eval.own.mean_vector")
    if differing := differing_from_greedy(report):
        notes.append(
            f"without a memory {differing} answers differ from greedy: rounding broke ties differently in other "
            "batches (another batch size or number of questions, or vLLM), or the backend is faulty"
        )
    return notes


def differing_from_greedy(report: Report) -> int:
    """Return how many no_memory answers differ from greedy in any token; 0 if decoded in the same batches."""
    both = [report.rows.get(name, [[]])[0] for name in ("greedy", "no_memory")]
    return sum(one["tokens_hash"] != other["tokens_hash"] for one, other in zip(*both, strict=False))


def versus_greedy(report: Report, name: str, samples: int) -> stats.PairedComparison | None:
    """Return the paired comparison with greedy; None if greedy was not run."""
    if "greedy" not in report.rows or name == "greedy":
        return None
    greedy, method = report.correct("greedy"), report.correct(name)
    return stats.paired(greedy, method, samples or 1)


def headline(correct: Mapping[str, Sequence[Sequence[bool]]], name: str = "esm", samples: int = 10_000) -> str:
    """Return one sentence that names the winner: ESM, its best rival, or neither. `correct` is [seed][question]."""
    found = best_rival(correct, name, samples)
    missing = [NAMES[rival] for rival in ("majority", "mean_vector") if rival not in correct]
    if found is None:
        return f"{NAMES[name]} was compared with nothing"
    rival, own, other, delta, low, high = found
    numbers = f"{own:.3f} against {other:.3f}, {delta:+.3f} [{low:+.3f}, {high:+.3f}]"
    if low > 0:
        verdict = f"{NAMES[name]} wins against its best rival, {NAMES[rival]}: {numbers}"
    elif high < 0:
        verdict = f"{NAMES[name]} loses to {NAMES[rival]}: {numbers}"
    else:
        verdict = f"Undecided between {NAMES[name]} and its best rival, {NAMES[rival]}: {numbers}"
    return verdict + (f"; not compared with {' and '.join(missing)}" if missing else "")


def best_rival(
    correct: Mapping[str, Sequence[Sequence[bool]]], name: str = "esm", samples: int = 10_000
) -> tuple[str, float, float, float, float, float] | None:
    """Return the most accurate rival: its name, both accuracies, and the difference with its interval."""
    means = {rival: float(np.mean(correct[rival])) for rival in RIVALS if rival in correct}
    if not means or name not in correct:
        return None
    rival = max(means, key=lambda one: means[one])
    delta, low, high = difference(correct[rival], correct[name], samples)
    return rival, float(np.mean(correct[name])), means[rival], delta, low, high


def difference(
    baseline: Sequence[Sequence[bool]], method: Sequence[Sequence[bool]], samples: int
) -> tuple[float, float, float]:
    """Return the paired difference, and its interval over questions and over seeds, if there are several."""
    before, after = np.asarray(baseline, dtype=np.float64), np.asarray(method, dtype=np.float64)
    if 1 not in (len(before), len(after)) and len(before) != len(after):
        before = before.mean(axis=0, keepdims=True)
    delta = after - before  # what has no seed is compared with every seed of the other
    return float(delta.mean()), *stats.bootstrap_nested(delta, samples)


def _difference(report: Report, settings: EsmSettings, name: str) -> Row:
    found = versus_greedy(report, name, settings.eval.bootstrap) if name in report.rows else None
    if found is None:
        return dict.fromkeys(("delta", "ci_low", "ci_high", "mcnemar_p"))
    bounds = (found.ci_low, found.ci_high) if settings.eval.bootstrap else (None, None)
    return {"delta": found.delta, "ci_low": bounds[0], "ci_high": bounds[1], "mcnemar_p": found.mcnemar_p}


def _cost(report: Report, name: str) -> Row:
    if name not in report.rows:
        return dict.fromkeys(("tokens", "probe_tokens", "probe_overhead", "cpu_seconds"))
    rows = [row for several in report.rows[name] for row in several]
    tokens = float(np.mean([row["tokens_used"] for row in rows]))
    probes = float(np.mean([row["probe_tokens_used"] for row in rows]))
    overhead = probes / tokens if tokens else 0.0
    seconds = report.seconds.get(name)
    return {"tokens": tokens, "probe_tokens": probes, "probe_overhead": overhead, "cpu_seconds": seconds}


def main_row(report: Report, settings: EsmSettings) -> Row:
    greedy, esm = (report.accuracy(name) if name in report.rows else None for name in ("greedy", "esm"))
    return {
        "dataset": settings.task.dataset, "split": report.split, "T_max": report.t_max, "Greedy-CoT": greedy,
        "ESM": esm, **_difference(report, settings, "esm"), "n": len(report.examples),
        "greedy_tokens": _cost(report, "greedy")["tokens"], **_cost(report, "esm"), "test_reads": report.test_reads,
    }  # fmt: skip


def variant_row(report: Report, settings: EsmSettings, name: str) -> Row:
    """Return a row of ablation.csv. With several seeds, acc is the mean, acc_min and acc_max the range."""
    by_seed = [float(np.mean(rows)) for rows in report.correct(name)]
    return {
        "variant": name, "T_max": report.t_max, "acc": float(np.mean(by_seed)), "acc_min": min(by_seed),
        "acc_max": max(by_seed), "seeds": len(by_seed), **_difference(report, settings, name),
        "n": len(report.examples), **_cost(report, name), "split": report.split, "test_reads": report.test_reads,
    }  # fmt: skip


def diagnostics(report: Report, name: str) -> Row:
    """Return statistics of a method's answers and of the memory, the latter over the steps that could be steered."""
    rows = [row for several in report.rows[name] for row in several]
    used = np.array([row["tokens_used"] for row in rows])
    probes = np.array([row["probe_tokens_used"] for row in rows])
    steps = [step for row in rows for step in row["steps"] if step["m"] > 1]
    tools = sum(step["chosen"] is not None for step in steps)
    share = _share(rows)
    return {
        "n": len(rows), "acc": share(lambda row: row["correct"]),
        "pred_none_rate": share(lambda row: row["pred"] is None),
        "hash_rate": share(lambda row: "####" in row["text"]),
        "trunc_rate": share(lambda row: row["finish_reason"] == "length"),
        "tokens_mean": float(used.mean()), "tokens_p50": float(np.quantile(used, 0.5)),
        "tokens_p90": float(np.quantile(used, 0.9)), "tokens_max": int(used.max()),
        "budget_mean": float((used + probes).mean()), "overhead_mean": float(probes.mean()),
        "overhead_ratio": float(probes.sum() / max(1, int(used.sum()))), "steps": len(steps),
        "tool_step_rate": tools / len(steps) if steps else 0.0,
        "null_step_rate": 1 - tools / len(steps) if steps else 0.0,
        "gates": dict(Counter(step["mem_reason"] for step in steps if step["mem_reason"])),
    }  # fmt: skip


def _share(rows: Sequence[Row]) -> Any:
    return lambda holds: sum(bool(holds(row)) for row in rows) / len(rows)


def compare(report: Report) -> Row:
    """Compare ESM with greedy question by question (first seed)."""
    both = list(zip(report.correct("greedy")[0], report.correct("esm")[0], report.examples, strict=True))
    win = [example.id for greedy, esm, example in both if esm and not greedy]
    lose = [example.id for greedy, esm, example in both if greedy and not esm]
    hard = [esm for greedy, esm, _ in both if not greedy]
    return {
        "n": len(both), "win": len(win), "lose": len(lose), "both_correct": sum(g and e for g, e, _ in both),
        "both_wrong": sum(not g and not e for g, e, _ in both), "net_win": len(win) - len(lose), "hard_n": len(hard),
        "hard_acc": sum(hard) / len(hard) if hard else None, "mcnemar_p": stats.mcnemar(len(win), len(lose)),
        "win_ids": win, "lose_ids": lose, "split": report.split, "test_reads": report.test_reads,
    }  # fmt: skip


def figure(report: Report, file: Path) -> list[str]:
    """Plot the histogram of answer lengths; return a note if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [f"no {file.name}: matplotlib is missing (pip install 'looplab[plots]')"]
    drawing = Figure(figsize=(6, 3.5), layout="constrained")
    axes = drawing.subplots()
    for name, several in report.rows.items():
        axes.hist([row["tokens_used"] for row in several[0]], bins=30, histtype="step", label=name)
    axes.axvline(report.t_max, color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel("tokens per answer (without probes)")
    axes.set_ylabel("questions")
    axes.legend()
    save_figure(drawing, file)
    return []


def save_figure(drawing: Any, file: Path) -> None:
    """Write a figure as PDF; the same figure has the same bytes."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    files.atomic_write(file, buffer.getvalue())


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()})
    files.atomic_write(file, text.getvalue().encode())
