"""Notes on a metric that the lab file names and runs do not measure."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

from looplab.measure.discover import CURVES, IGNORED, kind_of
from looplab.measure.splits import KINDS, kind_of_split

MAX_SHOWN = 8
"""Measured names that are listed."""
MAX_SUGGESTED = 2
"""Names that are suggested."""
MAX_COMPARED = 2_000
"""Names that are compared letter by letter."""
MAX_FILES = 3
"""Files that are listed."""
MAX_ENTRIES = 5_000
"""Files and folders below the lab that are examined."""
_MIN_SIMILARITY = 0.75
"""Similarity ratio above which a name is a likely typo."""
_SPLITS = frozenset(f"<{kind}>" for kind in KINDS)
_CLOCK_TICK_S = 0.05


def explain_missing(
    metric: str,
    measured: Collection[str],
    *,
    run_dir: Path,
    lab: Path,
    since: float | None,
    in_run_dir: bool = False,
) -> str:
    """Return a note that a metric was not measured, with likely causes.

    Args:
        metric: The name of the objective.
        measured: The names that the run measured.
        run_dir: The folder in which metrics were searched.
        lab: The folder of the lab; metric files written elsewhere in it during the run are listed.
        since: Start of the run, in seconds since the epoch; None: other files are not searched.
        in_run_dir: Whether the trainer was started in its run folder.
    """
    ranked = _ranked(metric, measured)
    same = [name for distance, name in ranked if distance[0] == 0]
    near = [name for distance, name in ranked if distance[0] <= 3]
    text = f"the objective {metric!r} was not measured"
    if len(same) == 1:
        text += f", but {same[0]!r} was, which differs only in separators or case: name it in objective.metric. The"
    elif near:
        text += f"; did you mean {' or '.join(near[:MAX_SUGGESTED])}? The"
    else:
        text += "; the"
    text += f" run measured {_list_names([name for _, name in ranked])}"
    files = [] if since is None else list(islice(_written_elsewhere(lab, run_dir, since), MAX_FILES))
    if files:
        text += f". {', '.join(files)} {'was' if len(files) == 1 else 'were'} written during the run: "
        text += "point the trainer at {run_dir}" + ("" if in_run_dir else ", or start it there with launch.cwd: run")
    return text


def doubt_about(metric: str, measured: Collection[str], *, complete: bool) -> str | None:
    """Return a warning about a metric that no earlier run has measured; None: there is no reason for one.

    Args:
        metric: Its name in the lab file.
        measured: The names that earlier runs measured.
        complete: Whether any of these runs ended well. A run that was cut short may not have reached the metric, so
            then only a similar name is a reason.
    """
    if not measured or metric in measured:
        return None
    ranked = _ranked(metric, measured)
    near = [name for distance, name in ranked if distance[0] <= 3]
    if near:
        return f"no run so far has measured {metric!r}; did you mean {' or '.join(near[:MAX_SUGGESTED])}?"
    names = _list_names([name for _, name in ranked])
    return f"no run so far has measured {metric!r}, only {names}" if complete else None


def _ranked(metric: str, measured: Collection[str]) -> list[tuple[tuple[int, float], str]]:
    """Return the measured names with their distances from a metric, the nearest first."""
    return sorted((_distance(metric, name, compare=i < MAX_COMPARED), name) for i, name in enumerate(measured))


def _list_names(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    count = f"{len(names)} metric{'s' if len(names) > 1 else ''}"
    return count + (", among them " if len(names) > MAX_SHOWN else ": ") + ", ".join(names[:MAX_SHOWN])


def _distance(target: str, name: str, *, compare: bool) -> tuple[int, float]:
    """Return the distance class of two names, and an order within the class.

    0: they differ only in separators or case. 1: the same words, with split words of the same kind. 2: one has
    additional words. 3: similar spelling. 4: anything else.
    """
    letters, others = (re.sub(r"[\W_]", "", text).lower() for text in (target, name))
    if letters == others:
        return 0, 0.0
    one, other = sorted(_words(target)), sorted(_words(name))
    if one == other:
        return 1, 0.0
    splits = [[word for word in words if word in _SPLITS] for words in (one, other)]
    other_split = bool(splits[0]) and splits[0] != splits[1]
    if not other_split and (set(one) < set(other) or set(other) < set(one)):
        return 2, abs(len(one) - len(other))
    similarity = SequenceMatcher(None, letters, others, autojunk=False).ratio() if compare else 0.0
    return 3 if similarity >= _MIN_SIMILARITY and not other_split else 4, -similarity


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, with split words replaced by their kind."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    return [f"<{kind}>" if (kind := kind_of_split(word)) else word.lower() for word in words]


def _written_elsewhere(lab: Path, run_dir: Path, since: float) -> Iterator[str]:
    """Yield the metric files below the lab, outside the runs, that changed since then, in breadth-first order."""
    skipped = {str(lab / "outputs"), str(run_dir)}
    folders = deque([str(lab)])
    left = MAX_ENTRIES
    while folders and left > 0:
        try:
            with os.scandir(folders.popleft()) as listing:
                entries = sorted(islice(listing, left), key=lambda entry: entry.name)
        except OSError:  # removed meanwhile, or not readable
            continue
        left -= len(entries)
        for entry in entries:
            try:
                if kind_of(entry.name) in CURVES:
                    if entry.is_file() and entry.stat().st_mtime >= since - _CLOCK_TICK_S:
                        yield os.path.relpath(entry.path, lab)
                elif (
                    not entry.name.startswith(".")
                    and entry.name not in IGNORED
                    and entry.path not in skipped
                    and entry.is_dir(follow_symlinks=False)
                ):
                    folders.append(entry.path)
            except OSError:
                continue
