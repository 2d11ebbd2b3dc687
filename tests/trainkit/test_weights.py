"""Loading weights: compiled or wrapped or not, and never silently only a part of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from looplab import trainkit
from looplab.errors import LabError


class Net(nn.Module):
    """A network with buffers and a submodule that can be compiled on its own."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def part(net: Any) -> Any:
    net.body = torch.compile(net.body, backend="eager")
    return net


class Wrapped(nn.Module):
    """Wraps a module as DistributedDataParallel does."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda net: net,
    "compiled": compiled,
    "compiled in place": in_place,
    "a part compiled": part,
    "wrapped": Wrapped,
    "wrapped, then compiled": lambda net: compiled(Wrapped(net)),
    "compiled, then wrapped": lambda net: Wrapped(compiled(net)),
}


@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("loaded", WAYS)
def test_weights_saved_from_any_wrapper_load_into_any_other(tmp_path: Path, saved: str, loaded: str) -> None:
    torch.manual_seed(1)
    one = WAYS[saved](Net())
    x = torch.randn(5, 3)
    one(x)
    with trainkit.Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(one.state_dict(), 1)
    other = WAYS[loaded](Net())
    assert trainkit.load_into(other, trainkit.load(path).state) == []
    one.eval(), other.eval()
    assert torch.equal(one(x), other(x))


def test_clean_names_are_those_of_the_unwrapped_module() -> None:
    bare = list(Net().state_dict())
    for way in WAYS.values():
        assert list(trainkit.clean(way(Net()).state_dict())) == bare


def test_a_submodule_that_is_really_named_module_keeps_its_name() -> None:
    net = nn.ModuleDict({"module": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    assert list(trainkit.clean(net.state_dict())) == list(net.state_dict())
    assert trainkit.load_into(net, net.state_dict()) == []
    both = nn.ModuleDict({"module": nn.Linear(1, 1), "weight": nn.Linear(1, 1)})
    both.register_parameter("bias", nn.Parameter(torch.zeros(7)))  # module.bias and bias are different weights
    state = {name: torch.full_like(tensor, 3.0) for name, tensor in both.state_dict().items()}
    assert trainkit.load_into(both, state) == []
    assert all(bool((tensor == 3).all()) for tensor in both.parameters())


def test_two_weights_with_the_same_clean_name_are_rejected() -> None:
    with pytest.raises(LabError, match="the same name"):
        trainkit.clean({"a": 1, "_orig_mod.a": 2})


def mismatched() -> dict[str, torch.Tensor]:
    """Weights with one name missing, one unexpected, and one of another shape."""
    state = Net().state_dict()
    del state["head.bias"]
    return {**state, "head.extra": torch.zeros(3), "body.0.weight": torch.zeros(9, 3)}


def test_every_difference_is_listed_and_the_module_is_unchanged() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(LabError) as rejected:
        trainkit.load_into(net, mismatched(), source="some/file")
    message = str(rejected.value)
    assert message.startswith("some/file: ")
    for one in (
        "body.0.weight is (9, 3) in the checkpoint, (4, 3) in the module",
        "head.bias is missing in the checkpoint, (2,) in the module",
        "head.extra is (3,) in the checkpoint, missing in the module",
    ):
        assert one in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_with_allow_what_fits_is_loaded_and_the_rest_is_returned() -> None:
    net, state = Net(), mismatched()
    assert len(trainkit.load_into(net, state, allow="partial")) == 3
    assert torch.equal(net.head.weight, state["head.weight"])
    assert len(trainkit.load_into(Net(), state, allow=("missing", "unexpected", "shape"))) == 3
    with pytest.raises(LabError, match="do not fit"):
        trainkit.load_into(Net(), state, allow=("missing", "shape"))
    with pytest.raises(LabError, match="allow takes"):
        trainkit.load_into(Net(), state, allow="everything")


def test_a_long_list_of_differences_is_counted() -> None:
    with pytest.raises(LabError, match="and 12 more"):
        trainkit.load_into(Net(), {**Net().state_dict(), **{f"x{n}": torch.zeros(1) for n in range(20)}})
