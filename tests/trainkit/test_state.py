"""State to JSON plus tensors and back: lossless, and readable by the safetensors library."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import numpy as np
import torch

from looplab import trainkit
from looplab.errors import LabError
from looplab.trainkit.tensors import pack, read_header, read_tensor

TORCH = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip
NUMPY = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8", ">f4", ">i8"]
SHAPES = [(), (1,), (0,), (3,), (2, 3), (0, 4), (2, 1, 5)]


def filled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a tensor of any dtype, filled bytewise."""
    width = torch.empty((), dtype=dtype).element_size()
    count = math.prod(shape)
    raw = torch.arange(count * width, dtype=torch.uint8) * 37 % (2 if dtype is torch.bool else 120)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same(one: Any, other: Any) -> bool:
    """Equal in type and bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.numel() == 0 or torch.equal(*(it.reshape(-1).view(torch.uint8) for it in (one, other)))
    if isinstance(one, np.ndarray | np.generic):  # in native byte order
        a, b = (it.astype(it.dtype.newbyteorder("=")) for it in (one, other))
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(1 << 200), 1 << 200), st.floats(), st.text(max_size=5)
)
tensors = st.one_of(
    st.builds(filled, st.sampled_from(SHAPES), st.sampled_from(TORCH)),
    st.builds(
        lambda s, d: np.arange(math.prod(s)).reshape(s).astype(d), st.sampled_from(SHAPES), st.sampled_from(NUMPY)
    ),
    st.builds(lambda d: np.dtype(d).type(1), st.sampled_from(NUMPY)),
    st.binary(max_size=9),
)
keys = st.one_of(plain, st.sampled_from(["$", "__metadata__", "a/b", "a"]), st.tuples(plain, plain))
states = st.recursive(
    plain | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(states)
@settings(max_examples=100, deadline=None)
def test_every_state_round_trips(state: Any) -> None:
    tree, flat = trainkit.flatten(state)
    assert same(trainkit.unflatten(tree, flat), state)
    read = json.loads(json.dumps(tree, allow_nan=False))
    data, size = pack(flat)
    header = read_header(memoryview(data)[:size], "memory")
    kinds = dict(_kinds(tree))
    assert same(trainkit.unflatten(read, {name: read_tensor(data, header[name], kinds[name]) for name in flat}), state)


def _kinds(tree: Any) -> Any:
    if isinstance(tree, dict) and tree.get("$") == "tensor":
        yield tree["name"], tree["kind"]
    elif isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _kinds(item)


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {str(dtype): {str(shape): filled(shape, dtype) for shape in SHAPES} for dtype in TORCH}
    _, flat = trainkit.flatten({**state, "__metadata__": torch.ones(2), "odd \ud800 näme": torch.ones(3)})
    data, size = pack(flat)
    (tmp_path / "a.safetensors").write_bytes(data[:size])
    read = safetensors.load_file(tmp_path / "a.safetensors")
    assert set(read) == set(flat)
    assert all(same(read[name], flat[name]) for name in flat)


def test_views_and_parameters_are_saved_by_their_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    odd = {
        "turned": base.T,
        "every other": base[:, ::2],
        "of a module": torch.nn.Parameter(base[1]),
        "many": base[:1].expand(5, 4),
    }
    odd |= {"conjugated": torch.tensor([1 + 2j], dtype=torch.complex64).conj(), "array": np.arange(6).reshape(2, 3).T}
    _, flat = trainkit.flatten(odd)
    data, size = pack(flat)
    header = read_header(memoryview(data)[:size], "memory")
    for name, tensor in odd.items():
        kind = "numpy" if name == "array" else "torch"
        assert (read_tensor(data, header[name], kind) == tensor).all(), name


def test_a_buffer_is_reused_if_it_is_large_enough() -> None:
    small, large = {"a": torch.ones(10)}, {"a": torch.ones(1000)}
    first, size = pack(large)
    again, less = pack(small, first)
    assert again is first
    assert less < size
    more, _ = pack({"a": torch.ones(2000)}, first)
    assert more is not first


def test_other_dict_types_come_back_as_dicts_but_counters_stay() -> None:
    tree, flat = trainkit.flatten([OrderedDict(a=1), Counter({30: 2})])
    read = trainkit.unflatten(tree, flat)
    assert [type(item) for item in read] == [dict, Counter]
    assert read == [{"a": 1}, Counter({30: 2})]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({1, 2}, "set"), (deque([1]), "deque"), (object(), "object"), (namedtuple("Pair", "a b")(1, 2), "Pair"), (1j, "complex"),
        (np.array(["a"]), "str"), (np.array([{}]), "object"), (np.zeros(2, "c16"), "complex128"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"), (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "float32"),
    ],
)  # fmt: skip
def test_unsupported_values_are_rejected_with_their_path(value: Any, what: str) -> None:
    with pytest.raises(LabError, match=what) as rejected:
        pack(trainkit.flatten({"parts": [{}, {"x": value}]})[1])
    assert "at parts/1/x" in str(rejected.value)


def test_unsupported_keys_are_rejected() -> None:
    with pytest.raises(LabError, match="a key of type bytes at a"):
        trainkit.flatten({"a": {b"k": 1}})
