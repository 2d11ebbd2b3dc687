"""Words for the splits of a dataset: training, validation, test."""

from __future__ import annotations

import re
from functools import lru_cache

KINDS = {
    "train": ("train", "training", "trn", "tr"),
    "val": (
        *("val", "valid", "validation", "validate", "validating"),
        *("eval", "evaluation", "evaluate", "evaluating", "dev"),
    ),
    "test": ("test", "testing", "tst", "holdout", "heldout"),
}
"""Kind of split → the words that trainers use for it."""
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}

_WORDS = "|".join(sorted((word for word in KIND_OF if not word.endswith("out")), key=len, reverse=True))
SPLIT = rf"(?i:{_WORDS}|(?:hold|held)[ _-]?out)(?:[_-]?\d{{1,2}})?(?![a-z0-9]|(?<=[A-Z])[A-Z])"
"""A split word in any case that ends a word or a part of one: `val`, `Val` in `ValMetrics`, `valid_0`."""
_IN_NAME = re.compile(rf"(?<![A-Za-z0-9]){SPLIT}", re.ASCII)


@lru_cache(maxsize=4096)
def has_split(name: str) -> bool:
    """Return whether a name contains a split word, such as `best/val_loss`."""
    return _IN_NAME.search(name) is not None


@lru_cache(maxsize=4096)
def kind_of_split(word: str) -> str | None:
    """Return the kind of a split word: `val` for `Validation` and `valid_0`; None for other words."""
    return KIND_OF.get(re.sub(r"[ _-]", "", word.lower()).rstrip("0123456789"))
