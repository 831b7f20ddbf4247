"""Ring slots: messages are read in order and in place, and no slot is overwritten before it is freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.nodes import on_nodes, one_per_node

from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.comm.transport.waiting import until


def wait(ready: Any) -> None:
    until(ready, "a slot", lambda: "no slot came")


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("count", [1, 2, 5])
def test_messages_arrive_in_order_and_stay_until_they_are_freed(own: Any, count: int) -> None:
    ring, back = own.slots([RingHandle(0, 1, count, 40), RingHandle(1, 0, 1, 4)])
    if own.rank == 0:
        for number in range(20):
            wait(ring.has_free_slot)
            ring.next().view(torch.int32).fill_(number)
            ring.fill()
            if number == count - 1:
                assert not ring.has_free_slot() or count == 20
        wait(back.ready)
        assert back.take().view(torch.int32).item() == 20
    elif own.rank == 1:
        held = []
        for number in range(20):
            wait(ring.ready)
            held.append((number, ring.take().view(torch.int32)))
            if len(held) == count:  # the oldest slot is freed only now
                first, slot = held.pop(0)
                assert slot.eq(first).all() and slot.numel() == 10
                ring.free()
        back.next().view(torch.int32).fill_(20)
        back.fill()
    else:
        assert ring is None and back is None


def test_slots_are_memory_shared_by_writer_and_reader(own: Any) -> None:
    """The writer sees what the reader writes back into a slot: there is one memory and no copy."""
    (ring,) = own.slots([RingHandle(0, 1, 1, 8)])
    if own.rank == 0:
        slot = ring.next()
        slot.fill_(3)
        ring.fill()
        wait(ring.has_free_slot)
        assert slot.eq(7).all()
    elif own.rank == 1:
        wait(ring.ready)
        slot = ring.take()
        assert slot.eq(3).all()
        slot.fill_(7)
        ring.free()


def test_bytes_through_the_slots_are_counted(own: Any) -> None:
    with own.recording() as recorder:
        (ring,) = own.slots([RingHandle(0, 1, 2, 100)])
        if own.rank == 0:
            ring.fill()
            ring.fill()
    if own.rank == 0:
        assert recorder.calls["handover"] == 2 and recorder.bytes["handover"] == 200


def test_ranks_of_different_nodes_get_no_slots(comm: Any) -> None:
    spread = on_nodes(comm, one_per_node)
    assert spread.slots([RingHandle(0, 1, 2, 100)]) == [None]
    spread.free()


@pytest.mark.ranks(4)
def test_each_node_has_its_own_slots(comm: Any) -> None:
    spread = on_nodes(comm, lambda rank: rank // 2)
    rings = spread.slots([RingHandle(0, 1, 1, 8), RingHandle(1, 2, 1, 8), RingHandle(2, 3, 1, 8)])
    mine = 0 if comm.rank < 2 else 2
    assert [ring is not None for ring in rings] == [number == mine for number in range(3)]
    ring = rings[mine]
    if comm.rank % 2 == 0:
        ring.next().fill_(comm.rank)
        ring.fill()
    else:
        wait(ring.ready)
        assert ring.take().eq(comm.rank - 1).all()
    spread.free()
