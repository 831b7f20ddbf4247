"""Reuse of the memory of units: whole parameters are correct at an address where others were before."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.shards import FORMS, communicator
from torch import nn

from hpctrain.parallel.fsdp.param_group import ParamGroup

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
NUMEL = 2**16


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def make(comm: Any, value: float) -> ParamGroup:
    parameter = nn.Parameter(torch.full((NUMEL,), value))
    cpu = torch.device("cpu")
    piece = ParamGroup(["x"], [parameter], [[]], comm, empty, dtype=torch.float32, passing=True, device=cpu)
    piece.fill((lambda _: parameter.detach()) if comm.rank == 0 else None)
    return piece


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_equal_pieces_reuse_the_same_memory_in_turn(
    comm: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with communicator(comm, FORMS["fsdp_alone"]) as own:
        monkeypatch.setattr(own, "all_gather", partial(own.all_gather, algorithm=algorithm))
        pieces = [make(own, 1.0), make(own, 2.0)]
        before, again = -1, 0
        for turn in range(40):
            piece = pieces[turn % 2]
            piece.make_room()
            again += piece.flat.data_ptr() == before
            piece.flat.zero_()
            piece.gather()
            assert piece.flat[:NUMEL].eq(1.0 + turn % 2).all()
            before = piece.flat.data_ptr()
            piece.free()
        assert any(own.all_gather_object(again)), "no address was used again: nothing was tested"
