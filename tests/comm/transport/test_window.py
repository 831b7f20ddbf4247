"""Node memory: visibility of other ranks' buffers, synchronization, and the names of ranks that miss a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpctrain.comm.transport.window import ARRIVED, FINISHED, NodeMemory
from hpctrain.errors import CommunicationError, DeadlineError

pytestmark = pytest.mark.ranks


@pytest.fixture(params=["ordered", "fenced"])
def memory(comm: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return node memory of all ranks, with the fences of strongly and of weakly ordered processors."""
    memory = NodeMemory(comm.transport.split_node(), ordered=request.param == "ordered")
    yield memory
    memory.free()


def meet(memory: Any) -> None:
    number = memory.arrive()
    memory.wait(lambda: memory.reached(ARRIVED, number), "meeting", number)


def test_every_rank_sees_the_writes_of_the_others(memory: Any) -> None:
    buffer, offset = memory.allocate(80)
    views = buffer.views(offset, 20, torch.float32)
    assert all(view.eq(0).all() for view in views)
    meet(memory)
    views[memory.rank].fill_(memory.rank + 1)
    meet(memory)
    assert [view.unique().tolist() for view in views] == [[rank + 1] for rank in range(memory.size)]
    meet(memory)
    views[(memory.rank + 1) % memory.size][3] = 100 + memory.rank
    meet(memory)
    assert views[memory.rank][3] == 100 + (memory.rank - 1) % memory.size


def test_small_allocations_share_a_buffer_and_start_on_cache_lines(memory: Any) -> None:
    places = [memory.allocate(nbytes) for nbytes in (1, 64, 65, 0, 1)]
    assert all(buffer is places[0][0] for buffer, _ in places)
    assert [offset for _, offset in places] == [0, 64, 128, 256, 256]


def test_large_allocations_and_full_buffers_get_a_new_buffer(memory: Any) -> None:
    small, _ = memory.allocate(2**19)
    large, offset = memory.allocate(2**20)
    assert large is not small and offset == 0 and large.ranks[memory.rank].numel() == 2**20
    assert memory.allocate(2**19 - 64) == (small, 2**19)
    next_one, offset = memory.allocate(65)
    assert next_one is not small and offset == 0
    assert memory.allocate(2**20 + 1)[0].ranks[0].numel() == 2**20 + 4096


def test_finds_only_its_own_allocations(memory: Any) -> None:
    first, second = memory.allocate(2**20)[0], memory.allocate(2**20)[0]
    mine, others = second.ranks[memory.rank], second.ranks[memory.rank - 1]
    assert memory.find(mine) == (second, 0)
    assert memory.find(mine[100:200]) == (second, 100)
    assert memory.find(mine.view(torch.float64)[-1:]) == (second, 2**20 - 8)
    assert memory.find(first.ranks[memory.rank][5:]) == (first, 5)
    assert memory.find(others) is None and memory.find(torch.zeros(3)) is None and memory.find(mine[5:5]) is None


def test_operations_are_identified_by_number(memory: Any) -> None:
    first, second = memory.arrive(), memory.arrive()
    assert (first, second) == (1, 2)
    memory.wait(lambda: memory.reached(ARRIVED, second), "arrival", second)
    assert memory.reached(ARRIVED, first) and not memory.reached(ARRIVED, second + 1)
    memory.finish(second)
    memory.wait(lambda: memory.reached(FINISHED, second), "end", second)
    assert memory.reached(FINISHED, first) and not memory.reached(FINISHED, second + 1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.25")


def test_a_rank_that_does_not_arrive_is_named_at_the_deadline(comm: Any, memory: Any, impatient: None) -> None:
    late = memory.size - 1
    if memory.rank != late:
        number = memory.arrive()
        with pytest.raises(DeadlineError) as caught:
            memory.wait(lambda: memory.reached(ARRIVED, number), "all_reduce", number)
        assert str(caught.value) == (
            f"all_reduce number 1: local ranks [{late}] have not arrived within 0.25 s (HPCTRAIN_TIMEOUT)"
        )
    comm.barrier()


def test_a_rank_that_does_not_finish_is_named(comm: Any, memory: Any, impatient: None) -> None:
    number = memory.arrive()
    memory.wait(lambda: memory.reached(ARRIVED, number), "arrival", number)
    if memory.rank:
        memory.finish(number)
        with pytest.raises(DeadlineError, match=r"all_reduce number 1: local ranks \[0\] have not finished within"):
            memory.wait(lambda: memory.reached(FINISHED, number), "all_reduce", number)
    comm.barrier()


def test_freed_memory_finds_no_tensor(comm: Any) -> None:
    memory = NodeMemory(comm.transport.split_node())
    plain = torch.zeros(4)
    memory.allocate(2**20)
    memory.free()
    assert memory.find(plain) is None


def test_memory_that_exceeds_the_node_is_refused_on_all_ranks(memory: Any) -> None:
    with pytest.raises(CommunicationError, match=r"/dev/shm has .* MiB left, .* MiB of node memory are needed"):
        memory.allocate(2**50)
    buffer, _ = memory.allocate(64)  # existing memory stays usable
    assert buffer.ranks
