"""Comparison of replicas: one changed bit always changes a tensor's sum, and the majority is found per tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import SingleTransport
from hpctrain.train.replicas import Differences, bit_sums, compare_replicas, parameters_of, replicated

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", (1, 3, 8))
def test_every_changed_bit_changes_the_sum(dtype: torch.dtype, length: int) -> None:
    tensor = torch.arange(1, length + 1).to(dtype)
    before = bit_sums({"a": tensor})
    octets = tensor.view(torch.uint8).numpy()
    for place in range(len(octets)):
        for bit in range(8):
            octets[place] ^= 1 << bit
            assert bit_sums({"a": tensor}) != before
            octets[place] ^= 1 << bit
    assert bit_sums({"a": tensor}) == before


def test_the_sum_is_that_of_the_words_in_memory() -> None:
    tensor = torch.randn(6, 4)
    words = tensor.numpy().reshape(-1).view(np.int64)
    assert bit_sums({"a": tensor}) == {"a": int(np.add.reduce(words, dtype=np.int64))}


def test_copies_at_other_addresses_and_strides_have_equal_sums() -> None:
    tensor = torch.randn(4, 6)
    shifted = torch.zeros(25)
    shifted[1:] = tensor.reshape(-1)
    forms = (tensor, shifted[1:].view(4, 6), tensor.t().contiguous().t(), tensor.expand(4, 6))
    assert len({bit_sums({"a": each})["a"] for each in forms}) == 1
    assert bit_sums({"a": torch.complex(tensor, tensor)}) == bit_sums({"a": torch.stack([tensor, tensor], -1)})


def test_all_parameters_and_moments_have_a_name() -> None:
    models = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 1, bias=False)}
    optimizers = {"one": torch.optim.AdamW(models["first"].parameters())}
    models["first"](torch.ones(1, 2)).sum().backward()
    optimizers["one"].step()
    assert list(parameters_of(models)) == [
        "parameter weight of model 'first'",
        "parameter bias of model 'first'",
        "parameter weight of model 'second'",
    ]
    found = list(replicated(models, optimizers))
    assert found[:3] == list(parameters_of(models))
    assert found[3:6] == [f"{name} of weight of optimizer 'one'" for name in ("step", "exp_avg", "exp_avg_sq")]
    assert len(found) == 9


def differences(*sums: dict[str, int]) -> Differences:
    return Differences([(f"node{rank}", each) for rank, each in enumerate(sums)])


def test_the_majority_is_found_for_each_tensor() -> None:
    found = differences({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 1}, {"a": 3, "b": 1, "c": 1})
    assert found.names == ["a", "b"] and found.majorities == {"a": 1, "b": 1}
    assert found.deviating == [(2, "a"), (1, "b")] and found.place(2) == "rank 2 on node2"
    assert found.holders("a", 1) == [0, 1]


@pytest.mark.parametrize("sums", ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}, {"a": 3}], [{"a": 1}, {"a": 1}] * 1))
def test_without_a_majority_no_rank_deviates(sums: list[dict[str, int]]) -> None:
    assert differences(*sums).deviating == []


def test_a_tensor_that_other_ranks_lack_differs() -> None:
    assert differences({"a": 1}, {"a": 1, "b": 2}).names == ["b"]
    assert differences({"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2}).deviating == [(0, "b")]


@pytest.mark.parametrize("value", (0, -1, 2**63 - 1, -(2**63)))
def test_one_rank_agrees_with_itself(value: int) -> None:
    assert compare_replicas(Communicator(SingleTransport()), {"a": value}) is None
