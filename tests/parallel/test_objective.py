"""Nested inputs: cut leaf by leaf, and reassembled with the same types."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.parallel.objective import CallArguments, cut, flatten, samples_of, unflatten

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    """Batch class of a user."""

    x: Tensor
    name: str = "r"


class Hidden:
    """Object with a tensor inside."""

    def __init__(self) -> None:
        self.inside = {"x": torch.ones(2)}


A, B = torch.arange(12).view(6, 2), torch.arange(6)
NESTS: list[Any] = [
    A,
    (A, B),
    [A, None, "name", 3],
    {"a": A, "b": (B, {"c": A, "d": [B]})},
    OrderedDict(a=A, b=B),
    UserDict(a=A),
    Pair(A, B),
    Record(A),
    (A, torch.tensor(2.0)),
]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_nested_inputs_are_flattened_cut_and_unflattened(nest: Any) -> None:
    skeleton, tensors = flatten(nest)
    again = unflatten(pickle.loads(pickle.dumps(skeleton)), tensors)
    assert type(again) is type(nest) and str(again) == str(nest)
    chunks = cut(nest, 3)
    assert len(chunks) == 3 and all(type(chunk) is type(nest) for chunk in chunks)
    flat = [flatten(chunk) for chunk in chunks]
    assert all(one == skeleton for one, _ in flat)
    for number, whole in enumerate(tensors):
        found = [chunk[number] for _, chunk in flat]
        assert torch.equal(torch.cat(found), whole) if whole.dim() else all(one is whole for one in found)


@pytest.mark.parametrize(
    "inputs, args, kwargs",
    [
        (A, (A,), {}),
        ((A, B), (A, B), {}),
        ([A, B], (A, B), {}),
        ({"x": A, "mask": B}, (), {"x": A, "mask": B}),
        (Pair(A, B), (Pair(A, B),), {}),
        ({1: A}, ({1: A},), {}),
        (((A, B),), ((A, B),), {}),
        (CallArguments((A,), {"mask": B}), (A,), {"mask": B}),
    ],
)
def test_inputs_become_the_arguments_of_the_model(inputs: Any, args: Any, kwargs: Any) -> None:
    assert str(CallArguments.of(inputs).call(lambda *a, **k: (a, k))) == str((args, kwargs))


def test_samples_are_counted_over_all_leaves() -> None:
    assert CallArguments((A, {"b": [B]}), {"mask": B, "scale": torch.tensor(2.0), "names": ["x"]}).samples == 6
    named = r"inputs\[0\] has 6, mask\['a'\]\[0\] has 6, mask\['a'\]\[1\] has 3; "
    with pytest.raises(UsageError, match=rf"^inputs of the model have different numbers of samples: {named}"):
        _ = CallArguments((A,), {"mask": {"a": (B, B[:3])}}).samples
    with pytest.raises(UsageError, match=r"^targets: no tensor with a first dim"):
        samples_of({"targets": [torch.tensor(1), "x"]}, "targets")
    with pytest.raises(UsageError, match=r"^inputs\[0\]\[1\] is a Hidden with a tensor in its attribute inside"):
        _ = CallArguments(([A, Hidden()],)).samples


def test_keys_of_calls_depend_on_shapes_and_flags() -> None:
    same = CallArguments((A,), {"deep": True, "step": 3}).key()
    assert same == CallArguments((A + 1,), {"deep": True, "step": 4}).key()
    for other in (
        CallArguments((A,), {"deep": False, "step": 3}),
        CallArguments((A.float(),), {"deep": True, "step": 3}),
        CallArguments((B,), {"deep": True, "step": 3}),
        CallArguments((), {"x": A, "deep": True, "step": 3}),
        CallArguments((A,), {"deep": None, "step": 3}),
    ):
        assert other.key() != same
    assert len({same, CallArguments((A,)).key()}) == 2
