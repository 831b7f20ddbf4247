"""Partition of layers: the best of all possible cuts, found by trying them all."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.partition import explicit_partition, partition

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


@pytest.mark.parametrize(
    "cut", [lambda parts: partition([1.0] * 5, parts), lambda parts: explicit_partition(NAMES, parts, [1])]
)
def test_fewer_layers_than_parts_are_refused(cut: object) -> None:
    with pytest.raises(UsageError, match="^5 layers cannot make 8 stages: use at most 5 ") as error:
        cut(8)  # type: ignore[operator]
    assert error.value.everywhere
    with pytest.raises(UsageError, match="^a model in 0 stages: must be at least 1$"):
        cut(0)  # type: ignore[operator]


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
