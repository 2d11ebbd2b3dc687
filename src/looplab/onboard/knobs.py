"""Which settings look like hyperparameters, and in which ranges to search them.

By the words of their names, their types and their defaults. What is doubtful is offered, not taken.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from looplab.config.expression import compile_expression
from looplab.errors import LabError
from looplab.onboard.base import MISSING, ScriptSetting

Role = Literal["knob", "doubtful", "seed", "length", "other"]
HUGE = 1e12
"""Defaults beyond it mean "no limit"."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LENGTH = _words("epoch epochs steps iters iterations iter timesteps updates episodes samples rounds round patience")
"""How long to train: a budget, not a hyper-parameter."""
EVALUATION = _words("eval evaluation test val valid validation dev sync fold folds cv splits holdout metric metrics")
"""Words of settings that change what is measured, or where, but not how well the model learns."""
OTHER = _words(
    """path dir directory file folder root out output log logs logger logging save load checkpoint checkpoints ckpt
    resume restore name project entity run exp experiment tag tags notes group id device devices cuda gpu gpus
    cpu mps accelerator worker workers thread threads nthread nthreads proc procs processes jobs world rank local port
    host backend dist distributed ddp fsdp deepspeed strategy node nodes verbose verbosity debug quiet silent progress
    bar print interval freq frequency every track wandb tensorboard tb mlflow capture video render upload push hub token
    key url classes vocab data dataset datasets split version dtype precision compile fp16 bf16 amp tf32 cache
    deterministic benchmark pin prefetch config help plot show mode env environment task torch past index limit image
    img input labels report overwrite dry demo profile sanity points timeout hours minutes seconds memory queue buckets
    year date download pretrained buffers"""
)
"""Where, what and how to run, not how to learn."""
CADENCE = _words("log logging save saving saves print prints display checkpoint checkpoints ckpt report dump plot")
"""With a word of `LENGTH`, how often something is written: `logging_steps`."""
PROCESSES = _words("local world global node process dist distributed")
"""With `rank`, the number of a process, rather than the size of a matrix."""
RATES = _words("lr lrs lrate eta blr learningrate shrinkage")
DECAYS = _words("wd l1 l2 reg regularization penalty tol")
SHARES = _words(
    "dropout drop droprate pdrop prob probability ratio fraction frac smoothing subsample colsample bytree bylevel"
)
NEAR_ONE = _words("momentum beta gamma discount gae lambda lmbda lam ema polyak rho")
BELOW_ONE = _words("gamma discount gae momentum ema polyak rho")
"""Those of `NEAR_ONE` that mean nothing above one."""
SIZES = _words(
    "hidden hid nhid width dim dims units embd embed embedding emb channels filters features inner ff ffn latent model"
)
COUNTS = _words(
    "layers layer depth head heads blocks estimators trees leaves leaf neighbors neighbours components clusters factors"
)
WEIGHTS = _words("coef coeff coefficient weight scale clip margin alpha beta lambda lmbda norm c temperature temp")
CHOICES = _words(
    """optimizer optim opt activation act scheduler sched schedule loss model arch architecture kernel solver criterion
    penalty init objective booster boosting pooling norm algo algorithm cell"""
)
SWITCHES = _words("nesterov amsgrad anneal norm bias batchnorm bn augment augmentation residual layernorm")
DEVICES = _words("cpu cuda gpu mps auto tpu xpu")
MOST_CHOICES = 8
"""Choices of a knob; a longer list, such as all models of a package, is not searched without being asked."""
FROM_ZERO = {"choices": [0.0, 1e-5, 1e-4, 1e-3, 1e-2]}
"""A coefficient that is off by default."""
CLIP_FROM_ZERO = {"choices": [0.0, 0.5, 1.0, 5.0]}
MIX_FROM_ZERO = {"choices": [0.0, 0.1, 0.2, 0.4, 0.8]}
SEEDS = ("seed", "random_seed", "random_state", "rng_seed", "manual_seed", "seed_everything", "manualseed", "rand_seed")
"""Names of the seed of a training, the most usual first."""
NOT_TRAINING = _words(
    "data dataset split splits fold folds eval evaluation test val valid validation dev sample sampling"
)
"""Words of seeds that choose what is measured, or on what, other than the seed of the training."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What a setting is, and the knob that it may become."""

    role: Role
    spec: Mapping[str, Any] | None = None
    """The knob as in the lab file; None: it should not be one."""


def words_of(name: str) -> list[str]:
    """Return the lower-case words of a name: `optim.learningRate` has `optim`, `learning`, `rate`."""
    parts = re.split(r"[^A-Za-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name))
    return [part.lower() for part in parts if part]


def is_seed(setting: ScriptSetting) -> bool:
    """Return whether a setting is a seed: of the training, or of something else such as the data."""
    last = words_of(setting.name.rpartition(".")[2])
    if last == ["seed", "everything"]:
        return True
    named = "seed" in last or last in (["random", "state"], ["manualseed"], ["randomseed"])
    return named and setting.kind in ("int", "unknown") and not isinstance(setting.default, bool | float | str)


def find_seed(settings: Sequence[ScriptSetting]) -> str | None:
    """Return the name of the seed of the training; None: there is none."""
    seeds = [setting.name for setting in settings if is_seed(setting) and not setting.positional]

    def rank(name: str) -> tuple[bool, int, int, bool]:
        words = words_of(name)
        plain = "_".join(words_of(name.rpartition(".")[2]))
        return (
            bool(NOT_TRAINING & set(words)),
            SEEDS.index(plain) if plain in SEEDS else len(SEEDS),
            name.count("."),
            name.partition(".")[0] not in ("train", "training", "trainer"),  # beside `prepare.seed`
        )

    return min(seeds, key=rank, default=None)


def unused_settings(settings: Sequence[ScriptSetting], values: Mapping[str, Any]) -> set[str]:
    """Return the settings of features that are switched off, or of choices that are not selected.

    `swa_lr` is not used without `--swa`, nor `adafactor_beta` with `--optimizer adam`.

    Args:
        values: What was typed, by name; other settings have their defaults.
    """
    off: set[tuple[str, ...]] = set()
    not_taken: set[str] = set()
    for setting in settings:
        value = values.get(setting.name, setting.default)
        words = words_of(setting.name)
        if setting.kind == "bool" and value is False:
            off.add(tuple(words[1:] if words[0] in SWITCH and len(words) > 1 else words))
        elif setting.choices is not None and set(words_of(setting.name.rpartition(".")[2])) & CHOICES:
            others = [words_of(choice) for choice in setting.choices if isinstance(choice, str) and choice != value]
            taken = set(words_of(value)) if isinstance(value, str) else set()
            not_taken |= {one[0] for one in others if len(one) == 1 and len(one[0]) > 2} - taken
    off -= {(word,) for word in GENERIC}
    not_taken -= GENERIC
    found = set()
    for setting in settings:
        words = words_of(setting.name)
        heads = {tuple(words[:size]) for size in range(1, len(words))}
        if heads & off or (len(words) > 1 and {words[0], words[-1]} & not_taken):
            found.add(setting.name)
    return found


SWITCH = _words("use enable enabled with do is has apply")
"""Words before the name of what a bool switches on."""
GENERIC = _words(
    "train training data model eval test batch step layer group weight learning hidden max min num lr loss mean sum"
)
"""Words that begin the names of many settings, even if a switch or a choice has that name."""


def suggest(setting: ScriptSetting) -> Suggestion:
    """Return what a setting looks like; the range of its knob has only values that the script takes."""
    choices = setting.choices
    if choices is not None and len(choices) > 2 and all(type(choice) is int for choice in choices):
        first, last = min(choices), max(choices)
        if sorted(choices) == list(range(first, last + 1)):  # choices=range(1, 51)
            setting = replace(setting, kind="int", choices=None, low=first, high=last)
    suggestion = _suggest(setting)
    if suggestion.spec is None or (setting.low is None and setting.high is None):
        return suggestion
    default = setting.default
    spec = _within(suggestion.spec, -math.inf if setting.low is None else setting.low, setting.high)
    return _checked(replace(suggestion, spec=spec), default)


def _within(spec: Mapping[str, Any], low: float, high: float | None) -> dict[str, Any] | None:
    """Return a knob without the values that are too small or too large; None: nothing is left to search."""
    high = math.inf if high is None else high
    if "choices" in spec:
        kept = [choice for choice in spec["choices"] if isinstance(choice, str) or low <= choice <= high]
        return {**spec, "choices": kept} if len(kept) > 1 else None
    bounds = max(spec["low"], low), min(spec["high"], high)
    if spec["type"] == "int":
        bounds = math.ceil(bounds[0]), math.floor(bounds[1])
    return {**spec, "low": bounds[0], "high": bounds[1]} if bounds[0] < bounds[1] else None


def inside(bound: Any, kind: str, *, upper: bool) -> float | None:
    """Return the bound of an open interval as one of a closed interval: `< 1` is `<= 0` of an int, `<= 0.999` of a
    float; None if it is not a number."""
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return None
    step = 1 if kind == "int" else 1e-3 * (abs(bound) or 1e-3)
    return bound - step if upper else bound + step


def _suggest(setting: ScriptSetting) -> Suggestion:
    last = words_of(setting.name.rpartition(".")[2])
    known = {word.rstrip("0123456789") or word for word in last} | set(last)
    if is_seed(setting):
        return Suggestion("seed")
    default = setting.default
    if default is MISSING or default is None or known & EVALUATION or "seed" in known:
        return Suggestion("other")
    # `prior_precision: 1.0` is not the precision of numbers.
    is_other = bool(known & OTHER - ({"precision"} if setting.kind == "float" else set()))
    if setting.kind == "bool":
        role: Role = "other" if is_other else "knob" if known & SWITCHES else "doubtful"
        return Suggestion(role, {"choices": [False, True]})
    if setting.choices is not None and len(setting.choices) > 1:
        # `--depth`, one of 18, 34, 50
        is_number = all(type(choice) in (int, float) for choice in setting.choices)
        is_knob = is_number and _suggest(replace(setting, choices=None)).role == "knob"
        return _choice(setting.choices, default, is_other=is_other, is_knob=is_knob or bool(known & CHOICES))
    if setting.kind not in ("int", "float") or isinstance(default, bool) or not isinstance(default, int | float):
        return Suggestion("other")
    if not math.isfinite(default) or abs(default) > HUGE:
        return Suggestion("other")
    pairs = {f"{a}_{b}" for a, b in pairwise(last)}
    if setting.kind == "float":
        return _checked(_float(setting, known, pairs, float(default), is_other=is_other), default)
    return _checked(_int(known, pairs, int(default), is_other=is_other), default)


def _checked(suggestion: Suggestion, default: float) -> Suggestion:
    """Return a suggestion without its range if the default is outside; a knob without a range is doubtful."""
    spec = suggestion.spec
    if spec is not None:
        inside = default in spec["choices"] if "choices" in spec else spec["low"] <= default <= spec["high"]
        if inside and ("choices" in spec or spec["low"] < spec["high"]):
            return suggestion
    return Suggestion("doubtful" if suggestion.role == "knob" else suggestion.role)


def _choice(choices: Sequence[Any], default: Any, *, is_other: bool, is_knob: bool) -> Suggestion:
    """Return what a setting with a list of choices looks like."""
    usable = [choice for choice in choices if isinstance(choice, bool | int | float | str)]
    if is_other or default not in usable or {str(choice).lower() for choice in usable} <= DEVICES or len(usable) < 2:
        return Suggestion("other")
    role: Role = "knob" if is_knob and len(usable) <= MOST_CHOICES else "doubtful"
    return Suggestion(role, {"choices": usable} if len(usable) <= 4 * MOST_CHOICES else None)


def _float(setting: ScriptSetting, known: set[str], pairs: set[str], default: float, *, is_other: bool) -> Suggestion:
    """Return what a setting with a real default looks like."""
    if known & RATES or pairs & {"learning_rate", "learn_rate", "base_rate", "step_size"}:
        return _rate(known, default)
    if "weight_decay" in pairs or (known & DECAYS and not (known & SHARES and 0 <= default <= 1)):
        return Suggestion("knob", _log(default, 100) or FROM_ZERO)
    if "warmup" in known and not is_other:
        high = min(1.0, max(0.2, default * 5)) if default <= 1 else 4 * default
        return Suggestion("knob", {"type": "float", "low": 0.0, "high": high})
    if known & SHARES and 0 <= default <= 1:
        return _share(known, default, is_other=is_other)
    if is_other:
        return Suggestion("other")
    if "p" in known and 0 <= default <= 1:
        return Suggestion("doubtful", {"type": "float", "low": 0.0, "high": 1.0})
    if known & {"eps", "epsilon", "exploration"}:
        share = {"type": "float", "low": 0.0, "high": 1.0}
        if default < 1e-3:
            return Suggestion("doubtful", _log(default, 100))
        return Suggestion("doubtful" if default == 1 or "decay" in known else "knob", share)
    if known & NEAR_ONE and 0.5 <= default < 1:
        return Suggestion("knob", _near_one(default))
    if "gamma" in known and 0 < default < 0.5:  # of a kernel or a schedule: a discount is near one
        return Suggestion("knob", _log(default, 100, most=1.0))
    if "momentum" in known and 0 <= default < 0.5:
        return Suggestion("knob", {"type": "float", "low": 0.0, "high": 0.99})
    if known & BELOW_ONE and default == 1 and not known & WEIGHTS:
        return Suggestion("doubtful", {"type": "float", "low": 0.9, "high": 1.0})
    if known & {"tau", "polyak", "decay"} and 0 < default < 1:
        return Suggestion("knob", _near_one(default) if default >= 0.5 else _log(default, 10, most=1.0))
    if known & WEIGHTS:
        off = (
            CLIP_FROM_ZERO if known & {"clip", "norm"} else MIX_FROM_ZERO if known & {"mixup", "cutmix"} else FROM_ZERO
        )
        # The weight of a term of the loss changes what the loss means.
        role: Role = "doubtful" if "weight" in known and "loss" in f"{setting.help} {setting.name}".lower() else "knob"
        return Suggestion(role, _log(default, 10) or off)
    return Suggestion("doubtful", _log(default, 10))


def _rate(known: set[str], default: float) -> Suggestion:
    """Return what a learning rate looks like, or something about one."""
    if known & {"decay", "gamma", "factor", "drop"}:
        if not 0 < default < 1:
            return Suggestion("doubtful")
        return Suggestion("knob", _near_one(default) if default >= 0.5 else _log(default, 10, most=1.0))
    if known & {"mult", "multiplier", "scale", "ratio", "power", "noise", "pct", "warmup", "min", "final", "end"}:
        return Suggestion("knob" if known & {"min", "final", "end"} else "doubtful", _log(default, 10))
    most = 1.0 if "eta" in known else max(1.0, 10 * default)
    return Suggestion("knob" if default > 0 else "doubtful", _log(default, 100, most=most))


def _share(known: set[str], default: float, *, is_other: bool) -> Suggestion:
    """Return what a probability or a fraction looks like."""
    if known & {"dropout", "drop", "droprate", "pdrop"}:
        high = 0.7 if default <= 0.7 else 0.95
        return Suggestion("knob", {"type": "float", "low": 0.0, "high": high})
    if "smoothing" in known:
        return Suggestion("knob", {"type": "float", "low": 0.0, "high": 0.3 if default <= 0.3 else 0.9})
    if is_other or "train" in known:
        return Suggestion("other")
    if "clip" in known:
        return Suggestion("knob", _log(default, 4, most=1.0))
    low = 0.0 if known & {"prob", "probability"} else min(0.1, default)
    role: Role = "doubtful" if default == 0 else "knob"
    return Suggestion(role, {"type": "float", "low": low, "high": 1.0})


def _int(known: set[str], pairs: set[str], default: int, *, is_other: bool) -> Suggestion:
    """Return what a setting with a whole default looks like."""
    if default < 0:
        return Suggestion("other" if is_other else "doubtful")
    if "warmup" in known:
        return Suggestion("knob", {"type": "int", "low": 0, "high": 10 * default or 1000})
    if known & {"batch", "bs", "minibatch", "minibatches", "batchsize", "microbatch"} and "norm" not in known:
        return Suggestion("knob" if default > 1 else "other", _batch_sizes(default))
    if known & COUNTS and default > 0 and (not is_other or "leaf" in known):
        return Suggestion("knob", {"type": "int", "low": max(1, default // 2), "high": max(3, 2 * default)})
    if known & LENGTH and known & CADENCE:
        return Suggestion("other")
    if known & LENGTH:
        return Suggestion("length", _around(default, least=2 if "split" in known else 1))
    if default > 1 and (known >= {"lora", "r"} or ("rank" in known and not known & PROCESSES)):
        return Suggestion("knob", _powers(default))
    if is_other:
        return Suggestion("other")
    if (known & SIZES or "alpha" in known) and default > 3:
        return Suggestion("knob", _powers(default))
    return Suggestion("doubtful", _around(default))


def _log(default: float, factor: float, *, most: float = math.inf) -> dict[str, Any] | None:
    """Return a logarithmic range around a default, up to `most`; None if the default is zero or next to it."""
    low = _short(default / factor)
    if low <= 0:
        return None
    high = max(_short(min(default * factor, most)), default)
    return {"type": "float", "low": min(low, default), "high": high, "log": True}


def _near_one(default: float) -> dict[str, Any]:
    """Return a range in which the distance to one is between a tenth and ten times that of the default."""
    rest = 1 - default
    low, high = max(0.0, round(1 - 10 * rest, 9)), 1 - rest / 10
    return {"type": "float", "low": min(float(f"{low:.6g}"), default), "high": max(float(f"{high:.9g}"), default)}


def _around(default: int, least: int = 1) -> dict[str, Any] | None:
    if default < 2:
        return None
    return {"type": "int", "low": max(least, default // 4), "high": 4 * default, "log": True}


def _powers(default: int) -> dict[str, Any] | None:
    if default < 2:
        return None
    return {"choices": sorted({max(1, default // 4), max(1, default // 2), default, 2 * default, 4 * default})}


def _batch_sizes(default: int) -> dict[str, Any] | None:
    """Return powers of two around a default, and the default itself."""
    if default < 2:
        return None
    near = 2 ** round(math.log2(default))
    return {"choices": sorted({max(1, near // 4), max(1, near // 2), near, 2 * near, 4 * near, default})}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


WIDTHS = (
    *("n_embd", "embed_dim", "hidden_size", "d_model", "dim", "hidden_dim", "emb_dim", "embedding_dim", "n_embed"),
    *("hidden", "model_dim", "dim_model", "embd_dim"),
)
HEADS = ("n_head", "n_heads", "num_heads", "nhead", "heads", "num_attention_heads", "nheads", "num_head", "head")
RULES: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "({0} * {1}) % {2} == 0",
        (
            ("num_envs", "n_envs"),
            ("num_steps", "n_steps", "rollout_length", "horizon"),
            ("num_minibatches", "n_minibatches", "minibatches", "nminibatches", "num_mini_batch"),
        ),
    ),
    ("{0} % {1} == 0", (WIDTHS, HEADS)),
    ("{0} % {1} == 0", (("n_heads", "num_heads", "n_head"), ("n_kv_heads", "num_kv_heads", "n_query_groups"))),
    ("{0} % {1} == 0", (("batch_size", "global_batch_size"), ("micro_batch_size", "minibatch_size"))),
    ("{0} <= {1}", (("min_lr", "lr_min", "final_lr", "end_lr"), ("lr", "learning_rate", "max_lr"))),
    (
        "{0} <= {1}",
        (
            ("warmup_steps", "warmup_iters", "warmup_epochs", "num_warmup_steps", "warmup"),
            ("max_steps", "max_iters", "epochs", "num_epochs", "max_epochs", "steps", "num_steps", "train_steps"),
        ),
    ),
    ("{0} <= {1}", (("micro_batch_size",), ("batch_size",))),
)
"""Constraints between settings that many trainers share, with the names of their settings."""


def constraints(knobs: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return constraints between settings that many trainers share.

    Args:
        knobs: The knobs; a constraint has at least one of them.
        values: The base config by dotted name; a constraint that it does not satisfy is left out.
    """
    groups: dict[str, dict[str, str]] = {}
    for name in values:
        parent, _, last = name.rpartition(".")
        groups.setdefault(parent, {})["_".join(words_of(last))] = name
    found: dict[str, None] = {}
    for group in groups.values():
        for rule, places in RULES:
            names = [next((group[word] for word in words if word in group), None) for words in places]
            chosen = [name for name in names if name is not None]
            if len(chosen) != len(places) or not set(chosen) & set(knobs):
                continue
            text = rule.format(*map(_quoted, chosen))
            if _holds(text, values):
                found[text] = None
    return list(found)


def _quoted(name: str) -> str:
    """Return a dotted name as an expression has it: `train["batch-size"]`."""
    first, *rest = name.split(".")
    if all(part.isidentifier() and not keyword.iskeyword(part) for part in (first, *rest)):
        return name
    return (first if first.isidentifier() else f"`{first}`") + "".join(f'["{part}"]' for part in rest)


def _holds(text: str, values: Mapping[str, Any]) -> bool:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        node = nested
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    try:
        return compile_expression(text).evaluate(nested) is True
    except LabError:
        return False
