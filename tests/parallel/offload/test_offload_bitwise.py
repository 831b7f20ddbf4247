"""Offloading on a CPU gives the bits of a run without it: losses, norms, weights, moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.nodes import on_nodes, one_per_node
from support.offloading import HOST, Loop, attached

from hpctrain.parallel.offload.config import OffloadSettings

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMETERS = replace(HOST, parameters=True)
LOOPS = {
    "plain": Loop(),
    "clipped": Loop(clip=0.05),
    "accumulated": Loop(accumulate=2, clip=0.05),
    "reduced at once": Loop(accumulate=2, synced=True, clip=0.05),
}
loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


@pytest.mark.few(2)
@loops
def test_one_process_gives_the_same_bits(comm: Any, loop: Loop) -> None:
    plain = loop.run(attached(comm))
    for data in ("ddp", "zero2", "fsdp"):
        loop.run(attached(comm, HOST, data=data)).check_same(plain)
    loop.run(attached(comm, PARAMETERS, data="fsdp")).check_same(plain)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_other_optimizers_give_the_same_bits(comm: Any, make: Any) -> None:
    loop = Loop(clip=0.05, make=make)
    loop.run(attached(comm, HOST)).check_same(loop.run(attached(comm)))


def test_a_share_that_stays_on_the_device_gives_the_same_bits(comm: Any) -> None:
    loop = Loop(clip=0.05)
    plain = loop.run(attached(comm))
    for data, fraction in {"zero2": 0.5, "fsdp": 0.5, "ddp": 1.0}.items():
        strategy = attached(comm, replace(HOST, device_fraction=fraction), data=data, bucket_mib=0.005)
        offloaded = len(strategy.components.host_optimizer.host_groups)  # type: ignore[attr-defined]
        assert (offloaded == 0) is (fraction == 1.0)
        loop.run(strategy).check_same(plain)


@pytest.mark.parametrize("offload", [HOST, PARAMETERS], ids=["optimizer", "parameters"])
def test_bfloat16_gives_the_same_bits(comm: Any, offload: OffloadSettings) -> None:
    loop = Loop(clip=0.05)
    how: dict[str, Any] = {"data": "fsdp", "mixed_precision": "bfloat16"}
    loop.run(attached(comm, offload, **how)).check_same(loop.run(attached(comm, **how)))


def test_small_chunks_give_the_same_bits(comm: Any) -> None:
    loop = Loop(clip=0.05)
    offload = replace(HOST, piece_mib=0.001)
    loop.run(attached(comm, offload, data="zero2", bucket_mib=0.01)).check_same(loop.run(attached(comm)))


FEW = 8  # steps of a loop on ranks, except for the clipped loops, which run all steps


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "data, kind", [("zero1", "clipped"), ("zero2", "plain"), ("zero2", "accumulated"), *zip(["fsdp"] * 4, LOOPS)]
)
def test_ranks_of_a_node_give_the_same_bits(own: Any, data: str, kind: str) -> None:
    loop = LOOPS[kind] if kind == "clipped" else replace(LOOPS[kind], steps=FEW)
    plain = loop.run(attached(own, data=data))
    loop.run(attached(own, HOST, data=data)).check_same(plain)
    if data == "fsdp":
        loop.run(attached(own, PARAMETERS, data=data)).check_same(plain)


@pytest.mark.few(1)
@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["none", "bfloat16"])
@pytest.mark.parametrize("data", ["zero1", "fsdp"])
def test_ranks_of_several_nodes_give_the_same_bits(comm: Any, data: str, precision: str) -> None:
    spread = on_nodes(comm, one_per_node)
    loop, how = Loop(clip=0.05, steps=FEW), {"data": data, "mixed_precision": precision}
    plain = loop.run(attached(spread, **how))
    loop.run(attached(spread, HOST, **how)).check_same(plain)
    if data == "fsdp":
        loop.run(attached(spread, PARAMETERS, **how)).check_same(plain)
    spread.free()


@pytest.mark.few(1)
@pytest.mark.ranks
@pytest.mark.parametrize("data", ["zero1", "fsdp"])
def test_replicas_on_nodes_give_the_same_bits(comm: Any, data: str) -> None:
    spread = on_nodes(comm, one_per_node)
    loop, how = Loop(clip=0.05, accumulate=2, synced=True, steps=FEW), {"data": data, "shard_within": "node"}
    loop.run(attached(spread, HOST, **how)).check_same(loop.run(attached(spread, **how)))
    spread.free()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["accumulated", "reduced at once"])
def test_ddp_splits_updates_like_zero1(own: Any, kind: str) -> None:
    loop = replace(LOOPS[kind], steps=FEW)
    loop.run(attached(own, HOST)).check_same(loop.run(attached(own, data="zero1")))
