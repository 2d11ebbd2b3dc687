"""Old checkpoints that lost count of their steps: `global_step` worked out again, and how it was is written beside it.

    python -m looplab.trainkit.backfill FOLDER [--num-envs N] [--rollout-steps N] [--dry-run]

For every JSON file under the folder that has a `global_update` above 0 and no `global_step` (missing, null or 0), at
its top or in its `save_state`:

    global_step = global_update × num_envs × rollout_steps

Both factors come from the file itself, wherever in it they stand; else from the nearest metrics.jsonl, in the file's
folder or above it, whose rows either have them or show by how much the steps grow with every update; else from the
command. None is ever assumed, and where two of these disagree the file is left alone. A reconstruction by an assumed
factor, as `reconstructed_step_source` records it, is not taken for a count: it is made again.

The file as it was stays beside it as `.bak`; the new one replaces it whole; a second run changes nothing.
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
from looplab.trainkit.atomic import atomic_write

AUDIT = "global_step_reconstructed"
"""The field that says how: its formula, the factors, where they are from, the value before, and when."""
_ASSUMED = "reconstructed_step_source"
_FACTORS = {
    "num_envs": ("num_envs", "n_envs", "num_environments"),
    "rollout_steps": ("rollout_steps", "rollout_length", "num_steps", "n_steps"),
}


@dataclass(frozen=True)
class Found:
    """One checkpoint without a count, and what became of it."""

    path: Path
    """Its JSON file."""
    step: int | None
    """The count that was worked out; None where that was not possible."""
    said: str
    """How, or why not."""


def backfill(
    folder: str | os.PathLike[str],
    num_envs: int | None = None,
    rollout_steps: int | None = None,
    dry_run: bool = False,
) -> list[Found]:
    """Reconstruct what can be, and give everything that lacked it."""
    top = Path(folder)
    if not top.is_dir():
        raise LabError("there is no such folder", file=top)
    given = {"num_envs": num_envs, "rollout_steps": rollout_steps}
    for name, value in given.items():
        if value is not None and value < 1:
            raise LabError(f"{name} must be at least 1, not {value}")
    found = []
    for path in sorted(top.rglob("*.json")):
        content = _read(path)
        where = _counts(content)
        if content is None or where is None:
            continue
        try:
            factors, sources = _factors(path, top, content, given)
        except LabError as error:
            found.append(Found(path, None, str(error)))
            continue
        step = where["global_update"]
        for value in factors.values():
            step *= value
        formula = " × ".join(["global_update", *factors])
        if not dry_run:
            audit = {
                "formula": f"global_step = {formula}",
                "global_update": where["global_update"],
                **factors,
                "from": sources,
                "before": where.get("global_step"),
                "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            _replace(path, content, where, step, audit)
        said = f"{formula} = {' × '.join(map(str, (where['global_update'], *factors.values())))}"
        found.append(Found(path, step, f"{said}; {'; '.join(f'{name}: {it}' for name, it in sources.items())}"))
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """The object in a file; None for what is no JSON object, which is not ours to judge."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _counts(content: dict[str, Any] | None) -> dict[str, Any] | None:
    """The part of a checkpoint's JSON that lacks its global_step; None if nothing is lacking."""
    if content is None:
        return None
    inner = content.get("save_state")
    where: dict[str, Any] = inner if isinstance(inner, dict) else content
    update = where.get("global_update")
    if type(update) is not int or update < 1 or AUDIT in where:
        return None
    return where if not where.get("global_step") or _ASSUMED in content else None


def _factors(
    path: Path, top: Path, content: dict[str, Any], given: Mapping[str, int | None]
) -> tuple[dict[str, int], dict[str, str]]:
    """What an update's steps are the product of, and where each is from."""
    metrics = _nearest_metrics(path, top)
    seen, growth = _measured(metrics) if metrics is not None else ({}, None)
    factors: dict[str, int] = {}
    sources: dict[str, str] = {}
    for name, names in _FACTORS.items():
        said = [(value, place) for place, value in _search(content, names)]
        said += [(value, f"{metrics}") for value in seen.get(name, ())]
        if (value := given[name]) is not None:
            said.append((value, f"--{name.replace('_', '-')}"))
        if len({value for value, _ in said}) > 1:
            listed = ", ".join(f"{value} by {place}" for value, place in said)
            raise LabError(f"{name} is not the same everywhere: {listed}", file=path, hint="left alone")
        if said:
            factors[name], sources[name] = said[0]
    product = factors.get("num_envs", 1) * factors.get("rollout_steps", 1)
    unknown = [name for name in _FACTORS if name not in factors]
    if growth is not None:
        if growth % product or (not unknown and product != growth):
            raise LabError(
                f"an update has {growth} steps by {metrics}, but {' × '.join(factors)} = {product}",
                file=path,
                hint="left alone",
            )
        if unknown:
            missing = unknown[0] if len(unknown) == 1 else "steps_per_update"
            factors[missing], sources[missing] = growth // product, f"growth of global_step with update in {metrics}"
    elif unknown:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in unknown)
        raise LabError(f"{' and '.join(unknown)} cannot be found", file=path, hint=f"give {flags}")
    return factors, sources


def _search(content: Any, names: tuple[str, ...], place: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number by one of these names, anywhere in a file, except in what was only assumed."""
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


def _measured(path: Path) -> tuple[dict[str, set[int]], int | None]:
    """The factors that stand in rows of metrics; and the steps an update, where the rows' counts agree on a number."""
    seen: dict[str, set[int]] = {}
    growths: set[tuple[int, int]] = set()
    last: tuple[int, int] | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a torn line, or another program's
            if not isinstance(row, dict):
                continue
            for name, names in _FACTORS.items():
                for value in (row[key] for key in names if type(row.get(key)) is int and row[key] > 0):
                    seen.setdefault(name, set()).add(value)
            now = (row.get("update", row.get("global_update")), row.get("global_step"))
            if type(now[0]) is int and type(now[1]) is int:
                if last is not None and now[0] > last[0] and now[1] > last[1]:
                    growths.add((now[1] - last[1], now[0] - last[0]))
                last = now  # type: ignore[assignment]
    rates = {(steps // gcd(steps, updates), updates // gcd(steps, updates)) for steps, updates in growths}
    steps, updates = rates.pop() if len(rates) == 1 else (0, 0)
    return seen, steps if updates == 1 else None


def _replace(path: Path, content: dict[str, Any], where: dict[str, Any], step: int, audit: dict[str, Any]) -> None:
    kept = path.with_name(f"{path.name}.bak")
    if not kept.exists():  # the first is the original
        atomic_write(kept, path.read_bytes())
    where["global_step"] = step
    where[AUDIT] = audit
    atomic_write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m looplab.trainkit.backfill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-envs", type=int, help="environments that ran side by side")
    parser.add_argument("--rollout-steps", type=int, help="steps of each environment in one update")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    options = parser.parse_args(argv)
    try:
        found = backfill(options.folder, options.num_envs, options.rollout_steps, options.dry_run)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for one in found:
        if one.step is None:
            print(one.said, file=sys.stderr)
        else:
            print(f"{one.path}: global_step {'would be' if options.dry_run else 'is now'} {one.step:,} ({one.said})")
    done = sum(one.step is not None for one in found)
    print(f"{done} of {len(found)} checkpoints without global_step {'can be' if options.dry_run else 'were'} completed")
    return 0 if done == len(found) else LabError.exit_code


if __name__ == "__main__":
    sys.exit(main())
