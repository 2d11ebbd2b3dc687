"""Classify printed names by their words: metric, setting, or neither."""

from __future__ import annotations

import re
from functools import lru_cache

from looplab.measure.rows import NOT_METRICS, STEP_NAMES
from looplab.measure.summary import METRIC_WORDS

EPOCH = len(STEP_NAMES)
"""Rank of `epoch` and `episode` among the names of the step."""
BATCH = EPOCH - 1
"""Rank of a batch of an epoch without its own name: `Epoch: [3][10/391]`."""
INDEX = EPOCH + 1
"""Rank of a number without a name: `[10] loss: 0.3`, or the position of a progress bar."""
RANK = {name: rank for rank, name in enumerate(STEP_NAMES) if name != "epoch"} | {
    "steps": STEP_NAMES.index("step"),
    "it": STEP_NAMES.index("iter"),
    **dict.fromkeys(("global step", "optimizer step"), STEP_NAMES.index("global_step")),
    **dict.fromkeys(("num_timesteps", "timestep", "env_step", "env_steps"), STEP_NAMES.index("total_timesteps")),
    **dict.fromkeys(("num_updates", "train_num_updates", "valid_num_updates"), STEP_NAMES.index("timesteps")),
    **dict.fromkeys(("epoch", "episode", "generation", "gen", "round"), EPOCH),
}
"""Reliability of each name of the step; 0 is the most reliable."""
ITERATIONS = frozenset({RANK["iter"], RANK["iteration"]})

_NEVER = NOT_METRICS | {
    *("debug", "info", "warn", "warning", "error", "critical", "fatal", "trace"),
    *("cuda", "gpu", "cpu", "mps", "xpu", "tpu", "device", "localhost", "host", "port", "http", "https", "errno"),
    *("pid", "rank", "local_rank", "world_size", "seed", "line", "version", "date", "data", "v_num", "dur", "code"),
    "taken",
}  # fmt: skip
"""Names that are never metrics."""
_NEVER_WORDS = frozenset({
    *("mem", "memory", "vram", "allocated", "reserved", "eta", "elapsed", "remaining", "speed", "port", "version"),
})  # fmt: skip
"""Words of names that are never metrics."""
_SETTINGS = frozenset(
    """
    num n number nb size dim dims layer layers head heads hidden batch batches workers dropout beta betas eps
    epsilon coef coeff weight weights decay warmup momentum patience interval every freq frequency channels kernel
    stride padding width height depth features vocab param params parameters threshold scale target clip clipping
    steps epochs iters iterations examples samples images instances config limit delay delta tol tolerance gpus
    devices nodes world bins points set dataset split support nevals smoothing crop idx billions
    capabilities classes groups seq block bias
    """.split()  # noqa: SIM905
)
"""Words of settings and sizes; with one of them, a metric word does not make a name a metric."""
_QUALITY = (METRIC_WORDS - {"lr", "time", "fps", "sps", "throughput", "l1", "l2", "map", "kl", "cost"}) | {
    *("metric", "fitness", "accuracy", "perplexity", "xent", "entropy", "bpb", "ret", "mfu", "miou", "ap", "ar"),
    *("result", "results"),
}  # fmt: skip
"""Words that occur in the names of results, and hardly in those of settings."""


def words_of(name: str) -> frozenset[str]:
    """Return the words of a name in lower case, both with and without the boundaries of camel case and digits."""
    plain = re.split(r"[^a-z0-9]+", name.lower())
    camel = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return frozenset(plain) | {word.rstrip("0123456789") for word in plain} | {word.lower() for word in camel}


@lru_cache(maxsize=4096)
def is_never_metric(name: str) -> bool:
    return name.lower() in _NEVER or not _NEVER_WORDS.isdisjoint(words_of(name))


@lru_cache(maxsize=4096)
def is_setting(name: str) -> bool:
    """Return whether a name probably means a setting, a size or a count: `batch_size`, `loss_weight`."""
    return not _SETTINGS.isdisjoint(words_of(name))


@lru_cache(maxsize=4096)
def has_metric_word(name: str) -> bool:
    return not METRIC_WORDS.isdisjoint(words_of(name)) or not _QUALITY.isdisjoint(words_of(name))


@lru_cache(maxsize=4096)
def is_result(name: str) -> bool:
    """Return whether a name means a result even without context: `val_loss`, `accuracy`."""
    return not _QUALITY.isdisjoint(words_of(name)) and not is_setting(name)
