"""Reuse of the memory of units: whole parameters are correct at an address where others were before."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.shards import VARIANTS, communicator
from torch import nn

from hpctrain.parallel.fsdp.param_group import ParamGroup

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
NUMEL = 2**16


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def make(comm: Any, value: float) -> ParamGroup:
    parameter = nn.Parameter(torch.full((NUMEL,), value))
    cpu = torch.device("cpu")
    group = ParamGroup(["x"], [parameter], [[]], comm, empty, dtype=torch.float32, on_demand=True, device=cpu)
    group.fill((lambda _: parameter.detach()) if comm.rank == 0 else None)
    return group


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_equal_groups_reuse_the_same_memory_in_turn(
    comm: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with communicator(comm, VARIANTS["fsdp_alone"]) as own:
        monkeypatch.setattr(own, "all_gather", partial(own.all_gather, algorithm=algorithm))
        groups = [make(own, 1.0), make(own, 2.0)]
        before, again = -1, 0
        for turn in range(40):
            group = groups[turn % 2]
            group.allocate()
            again += group.flat.data_ptr() == before
            group.flat.zero_()
            group.gather()
            assert group.flat[:NUMEL].eq(1.0 + turn % 2).all()
            before = group.flat.data_ptr()
            group.free()
        assert any(own.all_gather_object(again)), "no address was used again: nothing was tested"
