"""All benchmarks, one after the other: `make bench`, `make bench ONLY=launch,cli`, `make bench FULL=1`.

    python benchmarks/run.py [--full] [--only launch,cli] [--plots FOLDER]

Each benchmark ends with one line of JSON, its figures. They are appended to `benchmarks/history.jsonl`, with command,
date, machine, load and commit. A figure that is worse than its history by more than its own noise is named, and the
exit code is 1. It is compared with earlier figures of the same command on the same machine, busy ones with busy ones.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
HISTORY = HERE / "history.jsonl"
ONLY_FULL = ("mario_train", "esm_smollm2", "survive", "night", "storm", "onboard")
"""Benchmarks that take minutes even with --quick, or need the network; run by --full, or by name."""
NO_BENCHMARK = ("run", "decide_peers")
"""Scripts that are not benchmarks; modules without `__main__` are not either."""
DIRECTIONS: Sequence[tuple[str, Literal["less", "more", "none"]]] = (
    # benchmark.figure, which way is better; the first pattern that matches counts
    ("*.repeats", "none"), ("*.load*", "none"), ("*.seed*", "none"), ("*.python_s", "none"), ("*.bare_*", "none"),
    ("*.peer_*", "none"), ("*.plain_*", "none"), ("*_95", "none"), ("judge.*ratchet*", "none"),
    ("judge.*unconfirmed*", "none"),
    ("launch_peers.looplab_ms", "less"), ("launch_peers.*_ms", "none"), ("launch_peers.x_*", "more"),
    # ratios of which ours is the numerator
    ("launch.x_*", "less"), ("decide.*_x_*", "less"), ("decide.*_vs_*", "less"), ("fidelity.epochs_x_*", "less"),
    ("judge.aa_*", "less"), ("judge.runs_*", "less"), ("ingest.lag*", "less"), ("ingest.*_share", "less"),
    ("onboard.*_share", "more"), ("onboard.*_median", "less"), ("page.*lag*", "less"), ("page.csp*", "less"),
    ("storm.tried", "none"), ("storm.held", "none"), ("storm.classes", "none"), ("storm.*", "less"),
    ("esm_study.tok_*", "more"), ("esm_study.esm*", "more"), ("esm_study.*", "none"),
    ("scaling.*_bends_at", "more"), ("*overhead*", "less"), ("*_x_*", "more"), ("*.x_*", "more"),
    ("*per_s", "more"), ("*per_second", "more"), ("*steps_s", "more"), ("*sps", "more"), ("*_ms", "less"),
    ("*_ms_*", "less"), ("*ms_per_*", "less"), ("*_us", "less"), ("*_s", "less"), ("*_mb", "less"), ("*_kb", "less"),
    ("*regret*", "less"), ("*failed*", "less"), ("*lost*", "less"), ("*broken*", "less"), ("*power*", "more"),
    ("*solved*", "more"),
)  # fmt: skip
FEWEST = 4
"""Earlier figures that a comparison needs."""
LEAST_NOISE = 0.05
"""Noise of a figure whose history happens to be equal, as a fraction."""


@dataclass(frozen=True)
class Entry:
    """One benchmark, run once."""

    benchmark: str
    command: list[str]
    date: str
    machine: dict[str, Any]
    commit: str
    load_before: float
    load_after: float
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    """Why there are no figures; empty: there are."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What figures must have in common to be compared."""
        busy = self.load_before > self.machine["cores"]
        return self.benchmark, *self.command[1:], self.machine["cpu"], self.machine["cores"], busy


def direction_of(benchmark: str, figure: str) -> str:
    name = f"{benchmark}.{figure}"
    return next((way for pattern, way in DIRECTIONS if fnmatch.fnmatchcase(name, pattern)), "none")


def spread_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the noise: three robust standard deviations, at least 5 % of the median."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, max(3 * deviation, LEAST_NOISE * abs(middle))


def worse_figures(entry: Entry, history: Sequence[Entry]) -> list[str]:
    """Return a sentence for each figure that is worse than its history by more than its noise."""
    found = []
    earlier = [old for old in history if old.kind == entry.kind and not old.failure]
    for name, value in entry.figures.items():
        way = direction_of(entry.benchmark, name)
        values = [old.figures[name] for old in earlier if is_number(old.figures.get(name))]
        if way == "none" or not is_number(value) or len(values) < FEWEST:
            continue
        middle, noise = spread_of(values)
        if (value - middle if way == "less" else middle - value) > noise:
            found.append(f"{entry.benchmark}: {name} is {value:g}, was {middle:g} ± {noise:.2g} ({way} is better)")
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_history(path: Path) -> list[Entry]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Entry(**json.loads(line)) for line in lines if line.strip()]


def append_to_history(path: Path, entry: Entry) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(entry), ensure_ascii=False) + "\n")


def last_json(text: str) -> dict[str, Any] | None:
    """Return the figures in the last line of an output that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.lstrip().startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return found if isinstance(found, dict) else None
    return None


def run_benchmark(script: Path, arguments: Sequence[str], limit: float) -> Entry:
    """Run a benchmark and everything that it starts in a process group of its own, for at most `limit` seconds."""
    command = [script.name, *arguments]
    about = {"machine": machine(), "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    before, began, failure = os.getloadavg()[0], time.monotonic(), ""
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", start_new_session=True, cwd=script.parent.parent,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=limit)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        failure = f"took longer than {limit:.0f} s"
        if isinstance(stopped, KeyboardInterrupt):
            raise
    print(out, end="")
    figures = last_json(out) or {}
    if not failure and (process.returncode != 0 or not figures):
        lines = errors.strip().splitlines() or ["no output"]
        failure = f"exit code {process.returncode}: {lines[-1][:300]}" if process.returncode else "no line of figures"
    return Entry(
        benchmark=script.stem, command=command, seconds=round(time.monotonic() - began, 1),
        load_before=round(before, 2), load_after=round(os.getloadavg()[0], 2), figures=figures,
        failure=failure, **about,
    )  # fmt: skip


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {"cpu": cpu, "cores": os.cpu_count() or 1, "python": platform.python_version(), "system": platform.release()}


def commit() -> str:
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def benchmarks(only: Sequence[str], full: bool) -> list[Path]:
    """Return the scripts to run, by name; raise SystemExit for a name that there is not."""
    scripts = [path for path in sorted(HERE.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
    known = {path.stem: path for path in scripts if path.stem not in NO_BENCHMARK}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise SystemExit(f"there is no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in (only or known) if only or full or name not in ONLY_FULL]


def plot(history: Sequence[Entry], folder: Path) -> list[Path]:
    """Draw the history of each benchmark: one panel per figure that has a direction, by number of the measurement."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in sorted({entry.benchmark for entry in history}):
        entries = [entry for entry in history if entry.benchmark == name and not entry.failure]
        figures = [
            f for f in dict.fromkeys(f for entry in entries for f in entry.figures) if direction_of(name, f) != "none"
        ]
        if not figures:
            continue
        rows = -(-len(figures) // 3)
        canvas, axes = pyplot.subplots(rows, 3, figsize=(12, 2.6 * rows), squeeze=False, layout="constrained")
        for panel, figure in zip(axes.flat, figures, strict=False):
            for kind in dict.fromkeys(entry.kind for entry in entries):
                points = [(i, e.figures[figure]) for i, e in enumerate(entries)
                          if e.kind == kind and is_number(e.figures.get(figure))]  # fmt: skip
                label = f"{' '.join(kind[1:-3]) or 'full'}{', busy' if kind[-1] else ''}"
                panel.plot(*zip(*points, strict=True), "o-", markersize=3, label=label) if points else None
            panel.set_title(f"{figure} ({direction_of(name, figure)} is better)", fontsize=9)
            panel.set_ylim(bottom=0)
        for panel in axes.flat[len(figures) :]:
            panel.set_visible(False)
        axes.flat[0].legend(fontsize=7)
        canvas.suptitle(f"benchmarks/{name}.py")
        canvas.savefig(folder / f"{name}.png", dpi=110)
        pyplot.close(canvas)
        written.append(folder / f"{name}.png")
    return written


def table(entry: Entry, history: Sequence[Entry]) -> str:
    """Return the figures of an entry beside their history, as Markdown for RESULTS.md."""
    about: Mapping[str, Any] = entry.machine
    lines = [
        f"**`python benchmarks/{' '.join(entry.command)}`**, {entry.date[:10]}, commit {entry.commit}, {about['cpu']}, "
        f"{about['cores']} cores, Python {about['python']}, load {entry.load_before} before, {entry.load_after} after:",
        "", "| figure | now | history | |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, value in entry.figures.items():
        earlier = [o.figures[name] for o in history if o.kind == entry.kind and is_number(o.figures.get(name))]
        middle = "{:.4g} ± {:.2g} ({})".format(*spread_of(earlier), len(earlier)) if earlier else ""
        way = direction_of(entry.benchmark, name)
        lines.append(f"| {name} | {value} | {middle} | {'' if way == 'none' else way + ' is better'} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="without --quick, and those that take long")
    parser.add_argument("--only", default="", metavar="NAMES", help="separated by commas")
    parser.add_argument(
        "--limit", type=float, default=0.0, metavar="S", help="of each (default: 600; with --full 14400)"
    )
    parser.add_argument("--history", type=Path, default=HISTORY)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the history")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="append tables for RESULTS.md")
    options = parser.parse_args()
    history = read_history(options.history)
    worse, failed = [], []
    for script in benchmarks([name for name in options.only.split(",") if name], options.full):
        quick = [] if options.full or "--quick" not in script.read_text(encoding="utf-8") else ["--quick"]
        print(f"\n== benchmarks/{script.name} {' '.join(quick)}", flush=True)
        entry = run_benchmark(script, quick, options.limit or (14_400 if options.full else 600))
        append_to_history(options.history, entry)
        if options.tables is not None and not entry.failure:
            with options.tables.open("a", encoding="utf-8") as file:
                file.write(table(entry, history) + "\n")
        worse += worse_figures(entry, history)
        failed += [f"{entry.benchmark}: {entry.failure}"] if entry.failure else []
        history.append(entry)
    if options.plots is not None:
        print(*plot(history, options.plots), sep="\n")
    for line in [*(f"WORSE {line}" for line in worse), *(f"FAILED {line}" for line in failed)]:
        print(line)
    if not worse and not failed:
        print("no figure is worse than its noise")
    return 1 if worse or failed else 0


if __name__ == "__main__":
    sys.exit(main())
