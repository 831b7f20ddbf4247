"""On a device collectives run beside the computation: enough is waited for, and never by the host.

The device is a fake one whose collectives come only when the computing stream has waited for them, and whose memory is
used again as soon as it is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.beside import LAYERS, Bench, Log, batch
from torch import Tensor, nn

from hpctrain.parallel.fsdp import parts
from hpctrain.parallel.fsdp.flow import Flow

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
def test_learns_what_plain_torch_learns(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    bench = Bench(monkeypatch, **settings)
    optimizers = sgd(bench.model, bench.plain)
    for step in range(4):
        bench.gradients(batch(step))
        bench.check_gradients()
        bench.step(*optimizers)
    bench.check_weights()


@every_form
def test_nothing_synchronises_the_host(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    bench = Bench(monkeypatch, **settings)
    optimizers = sgd(bench.model, bench.plain)
    for step in range(3):
        if settings.get("accumulate") == "local":
            with bench.strategy.no_sync():
                bench.gradients(batch(9 + step))
        bench.gradients(batch(step))
        bench.step(*optimizers)
    bench.check_weights()
    assert bench.streams.log and not [line for line in bench.streams.log if "host waits" in line]
    # One byte a parameter says which of them were used: all that the host itself sends in a step.
    count = len(list(bench.model.parameters()))
    assert [entry for entry in bench.log if entry[0] == "all_reduce"] == [("all_reduce", count)] * 3


@pytest.mark.parametrize("depth", range(4))
def test_units_are_gathered_ahead_and_no_more_of_them_than_may_be(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    bench = Bench(monkeypatch, data="fsdp", units=("Linear",), prefetch=depth)
    for step in range(3):
        bench.log.clear()
        bench.gradients(batch(step))
        bench.model.zero_grad()
        bench.plain.zero_grad()
    # The first step shows the order; after it, whoever computes has the next units under way, and no other.
    found = [entry[1:] for entry in bench.log if entry[0] == "compute"]
    assert found == [
        (number, {-1, *range(number, min(number + depth + 1, LAYERS))}) for number in range(LAYERS)
    ]
    found = [entry[1:] for entry in bench.log if entry[0] == "back"]
    assert found == [
        (number, {-1, *range(max(number - depth, 0), number + 1)}) for number in reversed(range(LAYERS))
    ]


def test_the_first_pass_gathers_what_is_needed_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, data="fsdp", units=("Linear",), prefetch=2)
    bench.gradients(batch(0))
    for kind, number, whole in (entry for entry in bench.log if entry[0] in ("compute", "back")):
        assert whole == {-1, number}, kind


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_all_ranks_would_gather_and_reduce_in_one_order(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    bench = Bench(monkeypatch, data="fsdp", units=("Linear",), prefetch=depth)
    orders = []
    for step in range(3):
        bench.log.clear()
        bench.gradients(batch(step))
        names = bench.names()
        orders.append([(kind, names.get(place[0], "")) for kind, *place in bench.log if kind in ("gather", "reduce")])
    gathered = [name for kind, name in orders[2] if kind == "gather"]
    assert gathered == [-1, *range(LAYERS), *reversed(range(LAYERS))]  # the model's own unit stays for the whole step
    assert orders[1] == orders[2] and len(orders[2]) == 2 * LAYERS + 1 + LAYERS + 1
    # Reductions hold up no gathering: those that come next were handed over before them.
    back = orders[2][LAYERS + 1 :]
    before = [sum(kind == "reduce" for kind, _ in back[:place]) for place, one in enumerate(back) if one[0] == "gather"]
    assert before == [max(number + 1 - depth, 0) for number in range(LAYERS)]


@pytest.mark.parametrize("data", ["zero2", "fsdp"])
def test_whole_gradients_of_so_many_pieces_are_there_together(monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    bench = Bench(monkeypatch, data=data, units=("Linear",), bucket_mib=1e-6)
    flows = bench.strategy._reduction.flows
    assert len(flows) > LAYERS
    counts, opened = [], Flow.open

    def count(flow: Flow, memory: Tensor) -> None:
        opened(flow, memory)
        counts.append(sum(each.flat is not None for each in flows))

    monkeypatch.setattr(Flow, "open", count)
    for step in range(3):
        bench.gradients(batch(step))
        assert all(flow.flat is None for flow in flows)
    assert max(counts) == parts.ON_DEVICE


# Whole parameters that stay ------------------------------------------------------------------------------------------


def kinds(log: Log) -> list[str]:
    return [entry[0] for entry in log if entry[0] in ("gather", "reduce", "compute")]


def test_an_update_is_followed_by_gathering_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, data="zero1", bucket_mib=1e-6, mixed_precision="bfloat16")
    pieces = len(list(bench.model.parameters()))
    (optimizer,) = sgd(bench.model)
    bench.model(batch(0)).float().square().mean().backward()
    bench.log.clear()
    bench.step(optimizer)
    assert kinds(bench.log) == ["gather"] * pieces
    bench.log.clear()
    with torch.no_grad():
        found = bench.model(batch(1))
    assert kinds(bench.log) == ["compute"] * LAYERS  # nothing is gathered twice
    assert found.isfinite().all(), "computed with what had not come yet"


@pytest.mark.parametrize("data", ["zero1", "zero2"])
def test_an_update_does_not_meet_the_gathering_of_another(monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    bench = Bench(monkeypatch, data=data)
    halves: list[Callable[[nn.Module], list[Any]]] = [
        lambda model: list(model.parameters())[:5],
        lambda model: list(model.parameters())[5:],
    ]
    ours, theirs = ([torch.optim.SGD(half(model), lr=0.1) for half in halves] for model in (bench.model, bench.plain))
    for optimizer in ours:  # an update is work of the caller's stream, behind all that this waits for
        optimizer.register_step_pre_hook(lambda *_: bench.compute())
    for step in range(3):
        bench.gradients(batch(step))
        bench.step(*ours, *theirs)
    bench.check_weights()
