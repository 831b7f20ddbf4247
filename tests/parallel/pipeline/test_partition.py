"""Partition of layers: optimal, or as the user specifies; costs of layers equal counts by hand."""

from __future__ import annotations

import random
import weakref
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.build import MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.partition import balance, costs, explicit_partition, partition
from hpctrain.parallel.pipeline.skip import Join, Keep

NAMES = ["embedding", "blocks.0", "blocks.1", "norm", "head"]


def all_cuts(count: int, parts: int) -> list[list[range]]:
    return [
        [range(start, end) for start, end in pairwise([0, *cuts, count])]
        for cuts in combinations(range(1, count), parts - 1)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_a_partition_minimises_the_largest_part_and_then_the_imbalance(seed: int) -> None:
    dice = random.Random(seed)
    costs = [float(dice.choice([0, 0, 1, 2, 5, 30])) for _ in range(dice.randint(1, 9))]
    for parts in range(1, len(costs) + 1):

        def badness(cut: list[range]) -> tuple[float, float]:
            sums = [sum(costs[number] for number in part) for part in cut]
            return max(sums), sum(one**2 for one in sums)

        found = partition(costs, parts)
        assert badness(found) == min(badness(cut) for cut in all_cuts(len(costs), parts))
        assert found in all_cuts(len(costs), parts)


def test_layers_without_cost_stay_with_the_previous_layer() -> None:
    assert partition([0, 4, 0, 4, 0, 4], 3) == [range(0, 3), range(3, 5), range(5, 6)]
    assert partition([0, 0, 0], 2) == [range(0, 2), range(2, 3)]


def test_an_expensive_head_is_a_separate_part() -> None:
    assert [len(part) for part in partition([0, *[1] * 12, 0, 5], 4)] == [5, 4, 5, 1]
    assert partition([3.0], 1) == [range(0, 1)]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_negative_and_infinite_costs_are_refused(cost: float) -> None:
    with pytest.raises(UsageError, match="costs must be finite and not negative"):
        partition([1.0, cost], 1)


def test_manual_parts_are_numbers_of_layers_or_names_of_first_layers() -> None:
    wanted = [range(0, 2), range(2, 5)]
    assert explicit_partition(NAMES, 2, [2, 3]) == wanted
    assert explicit_partition(NAMES, 2, ["blocks.1"]) == wanted
    assert explicit_partition(NAMES, 2, ["embedding", "blocks.1"]) == wanted
    assert explicit_partition(NAMES, 1, [5]) == explicit_partition(NAMES, 1, ["embedding"]) == [range(0, 5)]


@pytest.mark.parametrize(
    "chosen, why",
    [
        ([2, 2], "must be 2 numbers above 0 with the sum 5, the model's layers"),
        ([5, 0], "must be 2 numbers above 0 with the sum 5, the model's layers"),
        ([1, 1, 3], "must be 2 numbers above 0 with the sum 5, the model's layers"),
        ([], "must be numbers of layers, or names of layers at which stages begin"),
        ([True, 4], "must be numbers of layers, or names of layers at which stages begin"),
        ([2, "head"], "must be numbers of layers, or names of layers at which stages begin"),
        (["tail"], "there is no layer tail, layers are embedding, blocks.0, blocks.1, norm, head"),
        (["embedding"], "makes 1 stages of the 2 that are needed"),
        (["norm", "head"], "makes 3 stages of the 2 that are needed"),
        (["head", "norm"], "layers must be named in the order of the model, each once"),
    ],
)
def test_an_impossible_manual_partition_is_refused(chosen: list[int | str], why: str) -> None:
    with pytest.raises(UsageError) as error:
        explicit_partition(NAMES, 2, chosen)
    assert str(error.value) == f"setting parallel.partition = {chosen}: {why}"


def test_an_error_lists_some_of_many_layers() -> None:
    with pytest.raises(UsageError, match=r"layers are 0, 1, 2, 3, 4, 5, \.\.\. 95, 96, 97, 98, 99$"):
        explicit_partition([str(number) for number in range(100)], 2, ["x"])


def test_hundreds_of_layers_are_partitioned_quickly() -> None:
    parts = partition([1.0 + number % 3 for number in range(400)], 16)
    assert len(parts) == 16 and parts[-1].stop == 400


# Costs ----------------------------------------------------------------------------------------------------------------


CONFIG = GPTConfig(layers=2, heads=2, width=16, context=8, vocab_size=31, tied=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_by_compute_an_embedding_is_free_and_a_head_is_not(device: str) -> None:
    with torch.device(device):
        row = find_layers(GPT(CONFIG))
    width, vocabulary, length = 16, 31, 8
    matrices, biases, norms = 12 * width**2, (3 + 1 + 4 + 1) * width, 4 * width
    attention = 2 * 2 * width * length / 2  # query times key, and times value, for half of the sequence on average
    block = 2 * matrices + biases + norms + attention
    assert costs(row, "compute") == [0, block, block, 2 * width, 2 * width * vocabulary]


def test_costs_by_parameters_are_their_numbers() -> None:
    row = find_layers(GPT(CONFIG))
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
    found = costs(find_layers(model), "compute", example)
    assert found == [2 * 5 * 64 * 4 * 2 * 9, 0, 0, 0, 2 * 5 * 16 * 4 * 4, 0, 0, 2 * 5 * 64 * 3]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_attention_is_counted_on_an_example() -> None:
    found = costs(find_layers(GPT(CONFIG)), "compute", torch.zeros(3, 8, dtype=torch.int64))
    tokens, width = 3 * 8, 16
    assert found == [0, *[tokens * (2 * 12 * width**2 + 2 * 2 * width * 8)] * 2, 0, tokens * 2 * width * 31]


class Clock:
    """Fake clock, whose time passes as layers run."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
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
    row = find_layers(nn.Sequential(Slow(clock, 1, 2), nn.ReLU(), Slow(clock, 3, 5)))
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
    found = costs(find_layers(model), "time", torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert len(found) == 6 and min(found) >= 0 and found[0] > 0
    assert torch.equal(torch.rand(3), wanted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is not None and bool((parameter.grad == 1).all()) for parameter in model.parameters())


def test_a_model_without_memory_is_measured_one_layer_at_a_time() -> None:
    with torch.device("meta"):
        row = find_layers(GPT(CONFIG))
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
        costs(find_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))), "time", torch.ones(2, 4))
    assert error.value.__notes__[-1] == "(in layer 1, run on an example to find out what it costs)"


def test_unknown_or_impossible_measures_are_refused() -> None:
    row = find_layers(MultiLayerPerceptron((4,), 2, hidden=(3,)))
    with pytest.raises(UsageError, match="^setting parallel.partition = 'fair': must be one of compute, time, param"):
        costs(row, "fair")
    with pytest.raises(UsageError, match="^parallel.partition = 'time' measures layers on an example microbatch, and"):
        costs(row, "time")


def test_stages_follow_the_requested_partition() -> None:
    row = find_layers(GPT(CONFIG))
    assert balance(row, 2) == [range(0, 2), range(2, 5)]
    assert balance(row, 3, "parameters") == [range(0, 1), range(1, 2), range(2, 5)]
    assert balance(row, 2, [4, 1]) == balance(row, 2, ("head",)) == [range(0, 4), range(4, 5)]
    for parts, message in {
        6: "5 layers cannot make 6 stages: use at most 5 ",
        0: "a model in 0 stages: must be at least 1$",
    }.items():
        with pytest.raises(UsageError, match=f"^{message}") as error:
            balance(row, parts, "time")
        assert error.value.everywhere
