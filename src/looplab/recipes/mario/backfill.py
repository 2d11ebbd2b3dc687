"""Reconstruct the `global_step` of old checkpoints that did not record it, with an audit field.

    python backfill.py FOLDER [--num-envs N] [--rollout-steps N] [--dry-run]

For every JSON file under the folder with a `global_update` above 0 and no `global_step` (missing, null or 0), at the
top level or in `save_state`:

    global_step = global_update × num_envs × rollout_steps

Both factors are taken from the file itself, at any depth; or from the nearest metrics.jsonl, in the file's folder or
above it, whose rows contain them or show how many steps an update has; or from the command line. Nothing is assumed,
and if two sources disagree the file is left alone. A `global_step` that an earlier tool reconstructed from an assumed
factor (`reconstructed_step_source`) is reconstructed again.

The original is kept as `.bak`, and the file is replaced atomically. Running the script twice changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import gcd
from pathlib import Path
from typing import Any

from looplab.errors import LabError
from looplab.trainkit import atomic_write

AUDIT = "global_step_reconstructed"
"""Audit field: formula, factors and their sources, previous value, time."""
_ASSUMED = "reconstructed_step_source"
_FACTORS = {
    "num_envs": ("num_envs", "n_envs", "num_environments"),
    "rollout_steps": ("rollout_steps", "rollout_length", "num_steps", "n_steps"),
}


@dataclass(frozen=True)
class BackfillResult:
    """The outcome for one checkpoint without `global_step`."""

    path: Path
    """JSON file of the checkpoint."""
    step: int | None
    """The reconstructed `global_step`; None if that was not possible."""
    explanation: str
    """How it was reconstructed, or why not."""


def backfill(
    folder: str | os.PathLike[str],
    num_envs: int | None = None,
    rollout_steps: int | None = None,
    dry_run: bool = False,
) -> list[BackfillResult]:
    """Reconstruct `global_step` wherever possible; return one result for each file that lacked it."""
    top = Path(folder)
    if not top.is_dir():
        raise LabError("no such folder", file=top)
    given = {"num_envs": num_envs, "rollout_steps": rollout_steps}
    for name, value in given.items():
        if value is not None and value < 1:
            raise LabError(f"{name} must be at least 1, not {value}")
    results = []
    for path in sorted(top.rglob("*.json")):
        content = _read_object(path)
        counts = _counts_without_step(content)
        if content is None or counts is None:
            continue
        try:
            factors, sources = _find_factors(path, top, content, given)
        except LabError as error:
            results.append(BackfillResult(path, None, str(error)))
            continue
        step = counts["global_update"]
        for value in factors.values():
            step *= value
        formula = " × ".join(["global_update", *factors])
        if not dry_run:
            audit = {
                "formula": f"global_step = {formula}",
                "global_update": counts["global_update"],
                **factors,
                "from": sources,
                "before": counts.get("global_step"),
                "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            _write_step(path, content, counts, step, audit)
        product = " × ".join(map(str, (counts["global_update"], *factors.values())))
        origins = "; ".join(f"{name}: {source}" for name, source in sources.items())
        results.append(BackfillResult(path, step, f"{formula} = {product}; {origins}"))
    return results


def _read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it contains anything else."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _counts_without_step(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a checkpoint's JSON that lacks a `global_step`; None if there is nothing to reconstruct."""
    if content is None:
        return None
    inner = content.get("save_state")
    counts: dict[str, Any] = inner if isinstance(inner, dict) else content
    update = counts.get("global_update")
    if type(update) is not int or update < 1 or AUDIT in counts:
        return None
    return counts if not counts.get("global_step") or _ASSUMED in content else None


def _find_factors(
    path: Path, top: Path, content: dict[str, Any], given: Mapping[str, int | None]
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the factors of the steps per update, and the source of each. Raises LabError if that is not possible."""
    metrics = _nearest_metrics(path, top)
    logged, steps_per_update = _read_metrics(metrics) if metrics is not None else ({}, None)
    factors: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name, names in _FACTORS.items():
        candidates = [(value, place) for place, value in _search(content, names)]
        candidates += [(value, f"{metrics}") for value in logged.get(name, ())]
        if (value := given[name]) is not None:
            candidates.append((value, f"--{name.replace('_', '-')}"))
        if len({value for value, _ in candidates}) > 1:
            listed = ", ".join(f"{value} from {source}" for value, source in candidates)
            raise LabError(f"the sources of {name} disagree: {listed}", file=path, hint="left alone")
        if candidates:
            factors[name], sources[name] = candidates[0]
    product = factors.get("num_envs", 1) * factors.get("rollout_steps", 1)
    unknown = [name for name in _FACTORS if name not in factors]
    if steps_per_update is not None:
        if steps_per_update % product or (not unknown and product != steps_per_update):
            raise LabError(
                f"an update has {steps_per_update} steps according to {metrics}, but {' × '.join(factors)} = {product}",
                file=path,
                hint="left alone",
            )
        if unknown:
            missing = unknown[0] if len(unknown) == 1 else "steps_per_update"
            factors[missing] = steps_per_update // product
            sources[missing] = f"growth of global_step with update in {metrics}"
    elif unknown:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in unknown)
        raise LabError(f"cannot find {' and '.join(unknown)}", file=path, hint=f"pass {flags}")
    return factors, sources


def _search(content: Any, names: tuple[str, ...], place: str = "") -> Iterator[tuple[str, int]]:
    """Yield every positive int with one of these names, at any depth, except assumed ones."""
    if isinstance(content, dict):
        for key, value in content.items():
            here = f"{place}.{key}" if place else key
            if key in names and type(value) is int and value > 0:
                yield here, value
            elif key != _ASSUMED:
                yield from _search(value, names, here)
    elif isinstance(content, list):
        for item in content:
            yield from _search(item, names, place)


def _nearest_metrics(path: Path, top: Path) -> Path | None:
    folder = path.parent
    while True:
        if (folder / "metrics.jsonl").is_file():
            return folder / "metrics.jsonl"
        if folder == top or folder == folder.parent:
            return None
        folder = folder.parent


def _read_metrics(path: Path) -> tuple[dict[str, set[int]], int | None]:
    """Return the factors in the rows of a metrics file, and the steps per update; None if the rows disagree on them."""
    logged: dict[str, set[int]] = {}
    differences: set[tuple[int, int]] = set()
    last: tuple[int, int] | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a torn line, or not JSON
            if not isinstance(row, dict):
                continue
            for name, names in _FACTORS.items():
                for value in (row[key] for key in names if type(row.get(key)) is int and row[key] > 0):
                    logged.setdefault(name, set()).add(value)
            now = (row.get("update", row.get("global_update")), row.get("global_step"))
            if type(now[0]) is int and type(now[1]) is int:
                if last is not None and now[0] > last[0] and now[1] > last[1]:
                    differences.add((now[1] - last[1], now[0] - last[0]))
                last = now  # type: ignore[assignment]
    rates = {(steps // gcd(steps, updates), updates // gcd(steps, updates)) for steps, updates in differences}
    steps, updates = rates.pop() if len(rates) == 1 else (0, 0)
    return logged, steps if updates == 1 else None


def _write_step(path: Path, content: dict[str, Any], counts: dict[str, Any], step: int, audit: dict[str, Any]) -> None:
    backup = path.with_name(f"{path.name}.bak")
    if not backup.exists():  # never overwrite the original
        atomic_write(backup, path.read_bytes())
    counts["global_step"] = step
    counts[AUDIT] = audit
    atomic_write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-envs", type=int, help="number of parallel environments")
    parser.add_argument("--rollout-steps", type=int, help="steps per environment and update")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done without doing it")
    options = parser.parse_args(argv)
    try:
        results = backfill(options.folder, options.num_envs, options.rollout_steps, options.dry_run)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    verb = "would be" if options.dry_run else "is now"
    for result in results:
        if result.step is None:
            print(result.explanation, file=sys.stderr)
        else:
            print(f"{result.path}: global_step {verb} {result.step:,} ({result.explanation})")
    done = sum(result.step is not None for result in results)
    verb = "can be" if options.dry_run else "were"
    print(f"{done} of {len(results)} checkpoints without global_step {verb} completed")
    return 0 if done == len(results) else LabError.exit_code


if __name__ == "__main__":
    sys.exit(main())
