"""Datasets and their splits: train for mining, dev for tuning, test for a single final evaluation.

No two splits share a question (compared ignoring case, spacing and trailing punctuation). Datasets without splits are
split by a seeded hash of the question, so neither the order of a file nor a sample size moves a question from one split
to another. With `task.train_dataset`, train and dev come from one dataset and test is all of another. If published
files share a few questions, these stay in test and are dropped from train and dev, with a note; if they share many,
that is an error.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from looplab.errors import LabError

from .config import TaskSettings
from .example import LETTERS, Example, Kind
from .grading import number
from .sources import PUBLISHED, Dataset, in_segments, read_splits

__all__ = ["LETTERS", "PUBLISHED", "Example", "Kind", "Splits", "check_disjoint", "load_split", "splits"]

SplitName = Literal["train", "dev", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "dev", "test")
MAX_OVERLAP = 0.02
"""Maximum fraction of questions that published files may share; more is an error in the files."""


@dataclass(frozen=True)
class Splits:
    """The three splits of a task."""

    train: list[Example]
    dev: list[Example]
    test: list[Example]
    notes: tuple[str, ...] = ()
    """Notes for the user, such as dropped questions."""


def load_split(task: TaskSettings, split: SplitName) -> list[Example]:
    """Return one split of the task. Raises LabError if it is empty."""
    found: list[Example] = getattr(splits(task), split)
    if not found:
        raise LabError(
            f"the {split} split of {task.dataset} is empty",
            hint="change task.dev_fraction, task.test_fraction, task.split_seed or the sizes in task.generator",
        )
    return found


def splits(task: TaskSettings) -> Splits:
    """Return all three splits, in the requested sizes, without shared questions."""
    notes: list[str] = []
    mined = task.train_dataset or task.dataset
    if mined == task.dataset:
        pools = _pools(task, mined, [task.train_split, task.dev_split, task.eval_split], notes)
        if set(pools) == {"all"}:
            train, test = _split_off(pools["all"], task.test_fraction, task.split_seed, "test")
            pools = {"train": train, "test": test}
            note = "to evaluate all of it, mine another dataset: task.train_dataset"
            notes.append(f"{mined} is one file; its questions were divided by their hash ({note})")
        train, dev = _pick(task, "train_split", mined, pools), _pick_dev(task, mined, pools)
        test = _pick(task, "eval_split", mined, pools)
    else:
        pools = _pools(task, mined, [task.train_split, task.dev_split], notes)
        train, dev = _pick(task, "train_split", mined, pools), _pick_dev(task, mined, pools)
        test = _pick(task, "eval_split", task.dataset, _pools(task, task.dataset, [task.eval_split], notes))
    names = f"{mined} {task.train_split}", f"{mined} {task.dev_split or 'dev'}", f"{task.dataset} {task.eval_split}"
    train = _drop_shared(train, names[0], test, names[2], notes)
    if dev is None:
        train, dev = _split_off(train, task.dev_fraction, task.split_seed, "dev")
    else:
        dev = _drop_shared(dev, names[1], test, names[2], notes)
        train = _drop_shared(train, names[0], dev, names[1], notes)
    found = Splits(train, dev, test, tuple(notes))
    check_disjoint(found)
    most_dev = task.max_dev_examples or task.max_eval_examples
    return Splits(
        _sample(found.train, task.max_train_examples, task.split_seed),
        _sample(found.dev, most_dev, task.split_seed),
        _sample(found.test, task.max_eval_examples, task.split_seed),
        found.notes,
    )


def _pools(task: TaskSettings, name: str, wanted: Sequence[str | None], notes: list[str]) -> dict[str, list[Example]]:
    """Return the questions of a dataset by split; of one file without splits, as `all`."""
    generator, _, kind = name.partition("/")
    if name in task.sources:
        dataset = Dataset(name=name, source=task.sources[name])
    elif name in PUBLISHED:
        dataset = PUBLISHED[name]
    elif name == "tiny":
        return _tiny(task)
    elif generator == "reasoning-gym" and kind:
        return _reasoning_gym(task, kind)
    else:
        names = [*task.sources, *PUBLISHED, "reasoning-gym/gsm_symbolic", "tiny"]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}, or add it to task.sources"
        key = "dataset" if name == task.dataset else "train_dataset"
        raise LabError(f"unknown dataset {name!r} in task.{key}", hint=hint)
    return read_splits(dataset, Path(task.data_root), [split for split in wanted if split is not None], notes)


def _pick(task: TaskSettings, key: str, dataset: str, pools: Mapping[str, list[Example]]) -> list[Example]:
    """Return the split that the task names; a file without splits is used whole."""
    name = getattr(task, key)
    if name in pools:
        return pools[name]
    if set(pools) == {"all"} and name in ("train", "test"):
        return pools["all"]
    raise LabError(
        f"task.{key} is {name!r}, but {dataset} has {' and '.join(pools) if set(pools) != {'all'} else 'no splits'}",
        hint="omit dev_split to split the training questions" if key == "dev_split" else None,
    )


def _pick_dev(task: TaskSettings, dataset: str, pools: Mapping[str, list[Example]]) -> list[Example] | None:
    """Return the dev questions; None if they are to be split off the training questions."""
    if task.dev_split is not None:
        return _pick(task, "dev_split", dataset, pools)
    if not _generated(dataset) or dataset in task.sources:
        return None
    keys = ("train_split", "eval_split") if dataset == task.dataset else ("train_split",)
    used = [key for key in keys if getattr(task, key) == "dev"]
    if used:
        raise LabError(
            f"task.{used[0]} is 'dev', which {dataset} has for tuning", hint="set task.dev_split to another split"
        )
    return pools["dev"]


def _generated(dataset: str) -> bool:
    return dataset == "tiny" or dataset.startswith("reasoning-gym/")


def check_disjoint(parts: Splits) -> None:
    """Raise LabError if two splits share a question."""
    for one, other in (("train", "test"), ("dev", "test"), ("train", "dev")):
        pairs = _shared(getattr(parts, one), getattr(parts, other))
        if pairs:
            mine, theirs = pairs[0]
            raise LabError(
                f"{one} and {other} share {len(pairs)} questions, "
                f"the first {mine.id} = {theirs.id}: {mine.question[:80]!r}",
                hint="questions used for mining or tuning must not be in test",
            )


def _shared(one: Iterable[Example], other: Iterable[Example]) -> list[tuple[Example, Example]]:
    """Return the questions of `one` that are also in `other`, as pairs."""
    twins = {example.fingerprint: example for example in other}
    return [(example, twins[example.fingerprint]) for example in one if example.fingerprint in twins]


def _hash_fraction(seed: int, purpose: str, text: str) -> float:
    """Hash seed and text to a number in [0, 1)."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _sample(examples: list[Example], limit: int | None, seed: int) -> list[Example]:
    """Return a seeded sample in file order; smaller samples are subsets of larger ones."""
    if limit is None or limit >= len(examples):
        return examples
    by_chance = sorted(
        range(len(examples)), key=lambda i: _hash_fraction(seed, "sample", f"{examples[i].fingerprint}/{i}")
    )
    return [examples[i] for i in sorted(by_chance[:limit])]


def _split_off(
    examples: list[Example], fraction: float, seed: int, purpose: str
) -> tuple[list[Example], list[Example]]:
    """Split off about `fraction` of the examples; duplicates and families stay together. Return (rest, split)."""
    chosen = [_hash_fraction(seed, purpose, example.family or example.fingerprint) < fraction for example in examples]
    return (
        [example for example, yes in zip(examples, chosen, strict=True) if not yes],
        [example for example, yes in zip(examples, chosen, strict=True) if yes],
    )


def _drop_shared(
    examples: list[Example], name: str, kept: list[Example], kept_name: str, notes: list[str]
) -> list[Example]:
    """Return `examples` without the questions of `kept`."""
    pairs = _shared(examples, kept)
    if not pairs:
        return examples
    mine, theirs = pairs[0]
    seen = f"{len(pairs)} of {len(examples)} questions of {name} are also in {kept_name}"
    # The stem of a multiple-choice question may recur with other choices.
    same = [pair for pair in pairs if set(pair[0].choices) == set(pair[1].choices)]
    if len(same) > MAX_OVERLAP * min(len(examples), len(kept)):
        raise LabError(
            f"{seen}, the first {mine.id} = {theirs.id}: {mine.question[:80]!r}",
            hint="questions used for mining or tuning must not be in test; check the files, and the splits in `task`",
        )
    notes.append(f"{seen} and were dropped from {name}: {', '.join(f'{a.id} = {b.id}' for a, b in pairs)}")
    dropped = {mine.id for mine, _ in pairs}
    return [example for example in examples if example.id not in dropped]


# ---------------------------------------------------------------------------------------------- generated questions


def _tiny(task: TaskSettings) -> dict[str, list[Example]]:
    from .tiny.task import examples

    make = task.generator
    sizes = {"train": make.n_train, "dev": make.n_dev, "test": make.n_test}
    return {part: examples(make.kind, part, sizes[part], make.seed) for part in SPLIT_NAMES}


def _reasoning_gym(task: TaskSettings, kind: str) -> dict[str, list[Example]]:
    """Assign the questions of one stream to splits by their hash, until all splits are full."""
    make = task.generator
    name = f"reasoning-gym/{kind}"
    wanted = {"train": make.n_train, "dev": make.n_dev, "test": make.n_test}
    total = sum(wanted.values())
    found: dict[str, dict[str, Example]] = {part: {} for part in SPLIT_NAMES}
    for i, item in enumerate(_stream(kind, 1000 + 20 * total, make.seed, make.options)):
        if number(item["answer"]) is None:
            raise LabError(
                f"{name} has answers that are not numbers, such as {item['answer'][:40]!r}",
                hint="choose a task with one number as the answer: gsm_symbolic, basic_arithmetic, chain_sum",
            )
        steps = item["metadata"].get("answer_cot")
        solution = in_segments(steps) if isinstance(steps, str) else None
        example = Example(f"{kind}-{make.seed}-{i}", item["question"].strip(), item["answer"], "number", (), solution)
        part = SPLIT_NAMES[int(_hash_fraction(task.split_seed, "part", example.fingerprint) * len(SPLIT_NAMES))]
        if len(found[part]) < wanted[part]:
            found[part].setdefault(example.fingerprint, example)
        if all(len(found[part]) == wanted[part] for part in SPLIT_NAMES):
            return {part: list(found[part].values()) for part in SPLIT_NAMES}
    sizes = ", ".join(f"{len(found[part])} of {wanted[part]} for {part}" for part in SPLIT_NAMES)
    raise LabError(f"{name} has too few different questions: {sizes}", hint="request fewer in task.generator")


def _stream(kind: str, size: int, seed: int, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise LabError("reasoning-gym is not installed", hint="pip install reasoning-gym") from None
    if kind not in DATASETS:
        near = difflib.get_close_matches(kind, DATASETS, n=1)
        raise LabError(f"reasoning-gym has no task {kind!r}", hint=f"did you mean {near[0]}?" if near else None)
    try:
        made = reasoning_gym.create_dataset(kind, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise LabError(f"reasoning-gym rejects task.generator.options for {kind}: {error}") from None
    for i in range(size):
        yield made[i]
