"""Collectives overlap the computation on a device: all necessary waits are there, and none is by the host.

The fake device completes collectives only when the computing stream waits for them, and reuses memory as soon as it is
given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fsdp_overlap import LAYERS, Bench, Log, batch
from torch import nn

from hpctrain.parallel.fsdp import setup

SETTINGS: list[dict[str, Any]] = [
    *({"data": "fsdp", "units": ("Linear",), "prefetch": depth} for depth in range(4)),
    {"data": "fsdp", "units": ("Linear",), "accumulate": "local"},
    {"data": "zero1", "bucket_mib": 1e-6},
    {"data": "zero2", "bucket_mib": 1e-6},
    {"data": "zero2"},
]
every_form = pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: "-".join(map(str, each.values())))


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


@every_form
def test_training_equals_that_of_plain_torch(settings: dict[str, Any]) -> None:
    bench = Bench(**settings)
    optimizers = sgd(bench.model, bench.plain)
    for step in range(4):
        bench.gradients(batch(step))
        bench.check_gradients()
        bench.step(*optimizers)
    bench.check_weights()


@every_form
def test_the_host_is_never_synchronised(settings: dict[str, Any]) -> None:
    bench = Bench(**settings)
    optimizers = sgd(bench.model, bench.plain)
    for step in range(3):
        if settings.get("accumulate") == "local":
            with bench.strategy.no_sync():
                bench.gradients(batch(9 + step))
        bench.gradients(batch(step))
        bench.step(*optimizers)
    bench.check_weights()
    assert bench.streams.log and not [line for line in bench.streams.log if "host waits" in line]
    # The host itself sends only one byte per parameter and step, which says whether it was used.
    count = len(list(bench.model.parameters()))
    assert [entry for entry in bench.log if entry[0] == "all_reduce"] == [("all_reduce", count)] * 3


@pytest.mark.parametrize("depth", range(4))
def test_units_are_prefetched_up_to_the_limit(depth: int) -> None:
    bench = Bench(data="fsdp", units=("Linear",), prefetch=depth)
    for step in range(3):
        bench.log.clear()
        bench.gradients(batch(step))
        bench.model.zero_grad()
        bench.plain.zero_grad()
    # The first step records the order; from then on each computation has only the next units under way.
    found = [entry[1:] for entry in bench.log if entry[0] == "compute"]
    assert found == [(number, {-1, *range(number, min(number + depth + 1, LAYERS))}) for number in range(LAYERS)]
    found = [entry[1:] for entry in bench.log if entry[0] == "back"]
    assert found == [(number, {-1, *range(max(number - depth, 0), number + 1)}) for number in reversed(range(LAYERS))]


def test_the_first_pass_gathers_units_on_demand() -> None:
    bench = Bench(data="fsdp", units=("Linear",), prefetch=2)
    bench.gradients(batch(0))
    for kind, number, whole in (entry for entry in bench.log if entry[0] in ("compute", "back")):
        assert whole == {-1, number}, kind


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gathers_and_reductions_have_a_fixed_order(depth: int) -> None:
    bench = Bench(data="fsdp", units=("Linear",), prefetch=depth)
    orders = []
    for step in range(3):
        bench.log.clear()
        bench.gradients(batch(step))
        names = bench.names()
        orders.append([(kind, names.get(memory[0], "")) for kind, *memory in bench.log if kind in ("gather", "reduce")])
    gathered = [name for kind, name in orders[2] if kind == "gather"]
    assert gathered == [-1, *range(LAYERS), *reversed(range(LAYERS))]  # the model's own unit stays for the whole step
    assert orders[1] == orders[2] and len(orders[2]) == 2 * LAYERS + 1 + LAYERS + 1
    # Reductions do not delay gathers: the next gathers were issued before them.
    back = orders[2][LAYERS + 1 :]
    before = [sum(kind == "reduce" for kind, _ in back[:index]) for index, one in enumerate(back) if one[0] == "gather"]
    assert before == [max(number + 1 - depth, 0) for number in range(LAYERS)]


@pytest.mark.parametrize("data", ["zero2", "fsdp"])
def test_whole_gradients_exist_for_a_limited_number_of_groups(data: str) -> None:
    bench = Bench(data=data, units=("Linear",), bucket_mib=1e-6)
    reductions = bench.strategy.components.reduction.reductions
    assert len(reductions) > LAYERS
    for step in range(3):
        bench.gradients(batch(step))
        assert all(reduction.flat is None for reduction in reductions)
    assert max(bench.open_reductions) == setup.ON_DEVICE


# Whole parameters that stay -------------------------------------------------------------------------------------------


def kinds(log: Log) -> list[str]:
    return [entry[0] for entry in log if entry[0] in ("gather", "reduce", "compute")]


def test_an_update_is_followed_immediately_by_gathers() -> None:
    bench = Bench(data="zero1", bucket_mib=1e-6, mixed_precision="bfloat16")
    groups = len(list(bench.model.parameters()))
    (optimizer,) = sgd(bench.model)
    bench.model(batch(0)).float().square().mean().backward()
    bench.log.clear()
    bench.step(optimizer)
    assert kinds(bench.log) == ["gather"] * groups
    bench.log.clear()
    with torch.no_grad():
        found = bench.model(batch(1))
    assert kinds(bench.log) == ["compute"] * LAYERS  # nothing is gathered twice
    assert found.isfinite().all(), "computed with values that had not arrived yet"


@pytest.mark.parametrize("data", ["zero1", "zero2"])
def test_an_update_does_not_overlap_the_gather_of_another_optimizer(data: str) -> None:
    bench = Bench(data=data)
    halves: list[Callable[[nn.Module], list[Any]]] = [
        lambda model: list(model.parameters())[:5],
        lambda model: list(model.parameters())[5:],
    ]
    ours, theirs = ([torch.optim.SGD(half(model), lr=0.1) for half in halves] for model in (bench.model, bench.plain))
    for optimizer in ours:  # an update is work of the caller's stream, after everything that the stream waits for
        optimizer.register_step_pre_hook(lambda *_: bench.compute())
    for step in range(3):
        bench.gradients(batch(step))
        bench.step(*ours, *theirs)
    bench.check_weights()
