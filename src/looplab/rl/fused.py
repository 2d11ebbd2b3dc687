"""Two small tanh MLPs, an actor and a critic, evaluated and trained with PPO by a C library (fused.c).

For networks of this size, most of the time of an update in torch is the overhead of its operations. The library works
on the memory of the torch parameters, gradients and optimizer state, so checkpoints do not change. Its results differ
from torch's in rounding only; see `native` for how it is compiled. torch remains the reference, and is used where the
library is not available or does not support the policy.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab.rl.flat import FlatParameters
from looplab.rl.native import ISA_FLAGS, detect_isa, load_library

SOURCE = Path(__file__).with_name("fused.c")
GROUP, MAX_LAYERS, MAX_OUTPUTS = 16, 8, 64
"""Limits of the library: hidden layers are multiples of `GROUP` wide."""
STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")

Array = NDArray[Any]
POINTER, INT, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Loss(ctypes.Structure):
    """Hyperparameters of the PPO loss."""

    _fields_ = [
        ("clip", DOUBLE), ("value_clip", DOUBLE), ("value_coef", DOUBLE), ("value_scale", DOUBLE),
        ("entropy_coef", DOUBLE), ("min_log_std", DOUBLE), ("max_log_std", DOUBLE), ("normalise", INT),
    ]  # fmt: skip


class AdamSettings(ctypes.Structure):
    """Hyperparameters of Adam; of AdamW if `decay` is not 0."""

    _fields_ = [("lr", DOUBLE), ("beta1", DOUBLE), ("beta2", DOUBLE), ("eps", DOUBLE), ("decay", DOUBLE)]


class _Columns(ctypes.Structure):
    _fields_ = [
        (name, POINTER)
        for name in ("obs", "actions", "log_probs", "advantages", "returns", "old_values", "choices", "scripted")
    ]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The samples of a rollout, one row each: C-contiguous arrays."""

    obs: Array
    actions: Array
    """float32 [n, outputs] of a Gaussian policy, int64 [n] of a categorical one."""
    log_probs: Array
    advantages: Array
    returns: Array
    old_values: Array | None = None
    """Values of the behaviour policy; None: the value function is not clipped."""
    scripted: Array | None = None
    """Rows whose action the policy did not choose; None: none."""

    def as_c(self) -> _Columns:
        """Return the addresses of the arrays, which must outlive the result."""
        dtypes = {"scripted": (np.bool_,), "actions": (np.float32, np.int64)}
        addresses = {}
        for name, array in vars(self).items():
            if array is None:
                continue
            if array.dtype not in dtypes.get(name, (np.float32,)) or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be a contiguous array of another type, not {array.dtype}")
            addresses["choices" if array.dtype == np.int64 else name] = array.ctypes.data
        return _Columns(**addresses)


@dataclass(frozen=True, kw_only=True)
class MlpLayout:
    """Where the parameters of the two networks are."""

    inputs: int
    weights: Sequence[Sequence[Tensor]]
    """Hidden layers of the actor, and of the critic."""
    biases: Sequence[Sequence[Tensor]]
    heads: Sequence[tuple[Tensor, Tensor]]
    """Weight [outputs, width] and bias of the actor's last layer, and of the critic's."""
    transposed: bool
    """Whether hidden weights are [out, in], as in nn.Linear, and not [in, out]."""
    log_std: Tensor | None = None
    """Log standard deviations of a Gaussian policy; None: categorical."""


def load() -> Any:
    """Return the library; None if it cannot be compiled or the machine has no fused multiply-add."""
    return _load(detect_isa())


@functools.cache
def _load(isa: str) -> Any:
    library = load_library(SOURCE, "-ffp-contract=fast", "-Wno-psabi", *ISA_FLAGS[isa])
    if library is None:
        return None
    library.looplab_scratch_size.argtypes = [POINTER]
    library.looplab_muon_size.argtypes = [INT, INT]
    library.looplab_scratch_size.restype = library.looplab_muon_size.restype = INT
    library.looplab_forward.argtypes = [POINTER, POINTER, POINTER, POINTER, INT, POINTER, POINTER]
    gradient: list[Any] = [POINTER, POINTER, POINTER, POINTER, INT, POINTER, POINTER, POINTER]
    library.looplab_gradient.argtypes = [*gradient, INT, DOUBLE, POINTER]
    library.looplab_epoch.argtypes = [
        *gradient, POINTER, INT, DOUBLE, POINTER, POINTER, INT, POINTER, POINTER,
    ]  # fmt: skip
    library.looplab_adam.argtypes = [POINTER, POINTER, POINTER, POINTER, INT, INT, POINTER]
    library.looplab_muon.argtypes = [POINTER, POINTER, POINTER, INT, INT, DOUBLE, DOUBLE, DOUBLE, POINTER]
    for name in ("forward", "gradient", "epoch", "adam", "muon"):
        getattr(library, f"looplab_{name}").restype = None
    return library


def backend_name() -> str:
    """Return the name of the library's variant, which results depend on by rounding; "torch" without the library."""
    return "torch" if load() is None else f"c-{detect_isa()}"


class FusedMlp:
    """The networks, evaluated and trained by the library. An instance must not be used by two threads at once."""

    def __init__(self, flat: FlatParameters, layout: MlpLayout) -> None:
        """
        Args:
            flat: The parameters, on the CPU; those in `layout` are views of its vector.
            layout: Where the parameters of the two networks are.

        Raises:
            ValueError: The library does not support these networks, or is not available; see `supports`.
        """
        self._library = load()
        if self._library is None or not supports(flat, layout):
            raise ValueError("the library does not support these networks")
        self.flat, self.inputs = flat, layout.inputs
        self.outputs = len(layout.heads[0][1])
        numbers = [layout.inputs, len(layout.weights[0]), self.outputs, layout.log_std is not None, layout.transposed]
        numbers.append(0 if layout.log_std is None else self._offset(layout.log_std))
        numbers += [bias.numel() for bias in layout.biases[0]]
        for weights, biases, (weight, bias) in zip(layout.weights, layout.biases, layout.heads, strict=True):
            for w, b in zip((*weights, weight), (*biases, bias), strict=True):
                numbers += [self._offset(w), self._offset(b)]
        self._shape = np.array(numbers, np.int64)
        self._scratch = torch.zeros(self._library.looplab_scratch_size(self._shape.ctypes.data))
        self._start = (self._shape.ctypes.data, flat.vector.data_ptr())
        self._size = flat.vector.numel()

    def _offset(self, parameter: Tensor) -> int:
        return (parameter.data_ptr() - self.flat.vector.data_ptr()) // 4

    def forward(self, obs: Array) -> tuple[Array, Array]:
        """Return the actor's outputs [n, outputs] and the values [n] of float32 observations [n, inputs]."""
        outputs, values = np.empty((len(obs), self.outputs), np.float32), np.empty(len(obs), np.float32)
        self._library.looplab_forward(
            *self._start, self._scratch.data_ptr(), obs.ctypes.data, len(obs), outputs.ctypes.data, values.ctypes.data
        )
        return outputs, values

    def gradient(self, loss: Loss, columns: Columns, rows: Array, max_norm: float) -> Array:
        """Write the gradient over these rows, clipped to `max_norm`, into `flat.grad`; return its `STATS`."""
        stats = np.empty(len(STATS))
        addresses = columns.as_c()
        self._library.looplab_gradient(
            self._shape.ctypes.data, ctypes.addressof(loss), ctypes.addressof(addresses), self.flat.vector.data_ptr(),
            self._size, self.flat.grad.data_ptr(), self._scratch.data_ptr(), rows.ctypes.data, len(rows), max_norm,
            stats.ctypes.data,
        )  # fmt: skip
        return stats

    def epoch(
        self, loss: Loss, columns: Columns, minibatches: Sequence[Array], max_norm: float, optimizer: torch.optim.Adam
    ) -> Array:
        """Take one step of Adam per minibatch of rows; return `STATS`, one row each."""
        group = optimizer.param_groups[0]
        state = optimizer.state[self.flat.vector]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(self.flat.vector) for _ in range(2))
        beta1, beta2 = group["betas"]
        adam = AdamSettings(group["lr"], beta1, beta2, group["eps"], 0.0)
        rows = np.concatenate(minibatches)
        bounds = np.cumsum([0, *map(len, minibatches)], dtype=np.int64)
        stats = np.empty((len(minibatches), len(STATS)))
        addresses = columns.as_c()
        self._library.looplab_epoch(
            self._shape.ctypes.data, ctypes.addressof(loss), ctypes.addressof(addresses), self.flat.vector.data_ptr(),
            self._size, self.flat.grad.data_ptr(), self._scratch.data_ptr(), rows.ctypes.data, bounds.ctypes.data,
            len(minibatches), max_norm, state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(),
            int(state["step"]), ctypes.addressof(adam), stats.ctypes.data,
        )  # fmt: skip
        state["step"] += len(minibatches)
        return stats


def supports(flat: FlatParameters, layout: MlpLayout) -> bool:
    """Return whether the library can evaluate and train these networks."""
    widths = [[bias.numel() for bias in biases] for biases in layout.biases]
    return (
        flat.vector.device.type == "cpu"
        and flat.vector.dtype == torch.float32
        and widths[0] == widths[1]
        and 1 <= len(widths[0]) <= MAX_LAYERS
        and all(width % GROUP == 0 for width in widths[0])
        and len(layout.heads[0][1]) <= MAX_OUTPUTS
    )
