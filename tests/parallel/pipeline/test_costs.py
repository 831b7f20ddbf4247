"""Costs of layers: equal to counts by hand, and measurements leave the model unchanged."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.build import MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.pipeline.layers import Layer, find_layers
from hpctrain.parallel.pipeline.partition import balance, costs, partition
from hpctrain.parallel.pipeline.skip import Join, Keep

CONFIG = GPTConfig(layers=2, heads=2, width=16, context=8, vocab_size=31, tied=True)


def layers(model: nn.Module) -> list[Layer]:
    return find_layers(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_by_compute_an_embedding_is_free_and_a_head_is_not(device: str) -> None:
    with torch.device(device):
        row = layers(GPT(CONFIG))
    width, vocabulary, length = 16, 31, 8
    matrices, biases, norms = 12 * width**2, (3 + 1 + 4 + 1) * width, 4 * width
    attention = 2 * 2 * width * length / 2  # query times key, and times value, for half of the sequence on average
    block = 2 * matrices + biases + norms + attention
    assert costs(row, "compute") == [0, block, block, 2 * width, 2 * width * vocabulary]


def test_costs_by_parameters_are_their_numbers() -> None:
    row = layers(GPT(CONFIG))
    block = 12 * 16**2 + 13 * 16
    assert costs(row, "parameters") == [(31 + 8) * 16, block, block, 2 * 16, 31 * 16]


def test_operations_on_an_example_follow_from_its_shapes() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
        Keep("x"),
        nn.Conv2d(4, 4, 1),
        Join("x"),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    example = torch.randn(5, 2, 8, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = costs(layers(model), "compute", example)
    assert found == [2 * 5 * 64 * 4 * 2 * 9, 0, 0, 0, 2 * 5 * 16 * 4 * 4, 0, 0, 2 * 5 * 64 * 3]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_attention_is_counted_on_an_example() -> None:
    found = costs(layers(GPT(CONFIG)), "compute", torch.zeros(3, 8, dtype=torch.int64))
    tokens, width = 3 * 8, 16
    assert found == [0, *[tokens * (2 * 12 * width**2 + 2 * 2 * width * 8)] * 2, 0, tokens * 2 * width * 31]


class Clock:
    """Fake clock, whose time passes as layers run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class Slow(nn.Module):
    """Layer whose forward and backward passes take time of the clock."""

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds, self.linear = (forward, backward), nn.Linear(4, 4)
        self.clock = [clock]

    def __deepcopy__(self, memo: dict[int, Any]) -> Slow:
        twin = Slow(self.clock[0], *self.seconds)
        twin.linear = nn.Linear(4, 4)
        return twin

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, 4]`` to the same shape."""
        y = self.linear(x)
        self.clock[0].now += self.seconds[0]
        if torch.is_grad_enabled():
            y.register_hook(lambda gradient: self.tick())
        return y  # type: ignore[no-any-return]

    def tick(self) -> None:
        """Advance the clock by the time of the backward pass."""
        self.clock[0].now += self.seconds[1]


def test_time_is_the_sum_of_forward_and_backward() -> None:
    clock = Clock()
    row = layers(nn.Sequential(Slow(clock, 1, 2), nn.ReLU(), Slow(clock, 3, 5)))
    example = torch.randn(2, 4)
    found = costs(row, "time", example, clock=clock)
    assert found == [3, 0, 8]
    assert partition(found, 2) == [range(0, 2), range(2, 3)]


def test_measuring_leaves_the_model_unchanged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Keep("x"), nn.Dropout(0.5), Join("x"), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    found = costs(layers(model), "time", torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert len(found) == 6 and min(found) >= 0 and found[0] > 0
    assert torch.equal(torch.rand(3), wanted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in model.parameters())


def test_a_model_without_memory_is_measured_one_layer_at_a_time() -> None:
    with torch.device("meta"):
        row = layers(GPT(CONFIG))
    measured: list[list[weakref.ref[Tensor]]] = []

    def watch(copied: nn.Module, args: Any) -> None:
        parameters = list(copied.parameters())
        if not measured or measured[-1][0]() is not parameters[0]:
            assert not any(one() is not None for refs in measured for one in refs), "an earlier layer has its memory"
            assert not any(one.is_meta for one in parameters)
            measured.append([weakref.ref(one) for one in parameters])

    for layer in row:
        layer.module.register_forward_pre_hook(watch)
    found = costs(row, "time", torch.zeros(2, 8, dtype=torch.int64))
    assert len(found) == len(measured) == 5 and all(cost > 0 for cost in found)
    assert all(one.is_meta for layer in row for one in layer.module.parameters())


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError) as error:
        costs(layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))), "time", torch.ones(2, 4))
    assert error.value.__notes__[-1] == "(in layer 1, run on an example to find out what it costs)"


def test_unknown_or_impossible_measures_are_refused() -> None:
    row = layers(MultiLayerPerceptron((4,), 2, hidden=(3,)))
    with pytest.raises(UsageError, match="^setting parallel.partition = 'fair': must be one of compute, time, param"):
        costs(row, "fair")
    with pytest.raises(UsageError, match="^parallel.partition = 'time' measures layers on an example microbatch, and"):
        costs(row, "time")


def test_stages_follow_the_requested_partition() -> None:
    row = layers(GPT(CONFIG))
    assert balance(row, 2) == [range(0, 2), range(2, 5)]
    assert balance(row, 3, "parameters") == [range(0, 1), range(1, 2), range(2, 5)]
    assert balance(row, 2, [4, 1]) == balance(row, 2, ("head",)) == [range(0, 4), range(4, 5)]
    with pytest.raises(UsageError, match="^5 layers cannot make 6 stages"):
        balance(row, 6, "time")
