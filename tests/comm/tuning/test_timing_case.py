"""Cases of a measurement: their memory, their rows of calls, and their expected values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.comm.tuning import measure
from hpctrain.comm.tuning.measure import MAX_CALLS, TensorBuffers, TimingCase

CPU = torch.device("cpu")


def ranks(size: int, rank: int = 0) -> Any:
    return SimpleNamespace(size=size, rank=rank, transport=SimpleNamespace(barrier=lambda: None))


def part(operation: str, size: int, of: int, kind: str = "carried", rank: int = 0) -> TimingCase:
    comm = ranks(of, rank)
    return TimingCase(comm, (operation, "host", kind), size, TensorBuffers(comm, "host", size, CPU))


@pytest.mark.parametrize(
    "operation, kind, size, of, whole, share",
    [
        ("all_reduce", "carried", 4, 3, 1, 0),
        ("all_reduce", "own", 4, 3, 2, 0),
        ("reduce_scatter", "carried", 4, 3, 3, 1),
        ("all_gather", "carried", 100, 7, 28, 4),
        ("reduce_scatter", "own", 4096, 4, 2048, 512),
        ("broadcast", "carried", 5, 2, 2, 1),
    ],
)
def test_sizes_become_elements_that_the_ranks_can_share(
    operation: str, kind: str, size: int, of: int, whole: int, share: int
) -> None:
    one = part(operation, size, of, kind)
    assert (one.whole.numel(), one.share.numel()) == (whole, share)
    assert one.whole.dtype == measure.DTYPES[kind]


@pytest.mark.parametrize("of", [2, 3, 8])
@pytest.mark.parametrize("kind", measure.DTYPES)
def test_expected_values_follow_the_definition(of: int, kind: str) -> None:
    whole = {rank: part("all_reduce", 4 * 24, of, kind, rank) for rank in range(of)}
    for one in whole.values():
        one.fill()
    summed = torch.stack([one.whole.double() for one in whole.values()]).sum(0)
    for one in whole.values():
        assert not one.is_right()  # not yet reduced
        one.whole.copy_(summed)
        assert one.is_right()
        one.whole[-1] += 1
        assert not one.is_right()
    gathering = [part("all_gather", 4 * 24, of, "carried", rank) for rank in range(of)]
    for one in gathering:
        one.fill()
    gathered = torch.cat([one.share for one in gathering])
    for one in gathering:
        one.whole.copy_(gathered)
        assert one.is_right()
    gathering[0].whole.copy_(gathered.flip(0))
    assert not gathering[0].is_right()


def test_each_rank_is_root_in_turn_and_rows_are_whole_rounds() -> None:
    roots: list[int] = []
    comm = ranks(3)
    comm.broadcast = lambda tensor, root, algorithm: roots.append(root)
    case = TimingCase(comm, ("broadcast", "host", "carried"), 64, TensorBuffers(comm, "host", 64, CPU))
    case.time_row("mpi", case.row_length(measure.ROW_SECONDS / 4))
    assert roots == [0, 1, 2, 0, 1, 2]
    assert part("all_reduce", 64, 3).row_length(measure.ROW_SECONDS / 4) == 4
    assert part("all_reduce", 64, 3).row_length(1.0) == 1 and case.row_length(1.0) == 3
    assert part("all_reduce", 64, 3).row_length(1e-9) == MAX_CALLS


@pytest.mark.parametrize("device", ["cuda", "host"])
def test_a_row_ends_when_the_device_has_finished(device: str) -> None:
    happened: list[str] = []
    comm = ranks(2)
    comm.all_reduce = lambda tensor, algorithm: happened.append("call")
    buffers = TensorBuffers(comm, "host", 64, CPU)
    synchronize = (lambda: happened.append("device has finished")) if device == "cuda" else None
    key = ("all_reduce", device, "carried")
    case = TimingCase(comm, key, 64, buffers, clock=lambda: float(len(happened)), synchronize=synchronize)
    assert case.time_row("nccl", 3) == (4 / 3 if device == "cuda" else 1.0)
