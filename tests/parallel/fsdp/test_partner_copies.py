"""Copies of shards on other nodes: partners, messages and checksums."""

from __future__ import annotations

from typing import Any

import pytest
from support.nodes import on_nodes, one_per_node

from hpctrain.parallel.fsdp.partner_copies import PartnerMemory, PartnerTransfer, partners
from hpctrain.parallel.fsdp.shard_copies import Copies, Values
from hpctrain.parallel.fsdp.sharding import lay_out


@pytest.mark.parametrize(
    "nodes, expected",
    [
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 2], [1, 2, 0]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),
        ([0, 0, 0, 1], [3, 3, 3, 0]),  # one rank holds the copies of three
    ],
)
def test_partners_are_on_the_next_node(nodes: list[int], expected: list[int]) -> None:
    assert partners(nodes) == expected
    assert all(nodes[rank] != nodes[partner] for rank, partner in enumerate(expected))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("fixed", [set(), {1}])
def test_damaged_copies_do_not_count(comm: Any, fixed: set[int]) -> None:
    nodes = on_nodes(comm, one_per_node)
    layouts = [lay_out([10, 6], comm.size, 4), lay_out([40], comm.size, 4)]
    values = [Values(0, "", "", "float32"), Values(0, "adam", "exp_avg", "float32"), Values(1, "", "", "float32")]
    memory = PartnerMemory(nodes, Copies(nodes, layouts, values, fixed, 0), 0, [])
    (origin,) = memory.origins[comm.rank]
    for number in (0, 1):
        memory.own.whole(memory.own.own, number).fill_(10 * number + comm.rank)
        memory.own.fixed_part(memory.own.own).fill_(50 + comm.rank)
        memory.own.mark(number, complete=True)
        memory.own.mark(number, complete=False)
        transfer = PartnerTransfer(nodes, memory, number, first=number == 0)
        transfer.wait()
        assert transfer.done()
        (copies,) = memory.others
        assert copies.whole(copies.own, number).eq(10 * number + origin).all()
        assert copies.fixed_part(copies.own).eq(50 + origin).all()
        if number:
            copies.whole(copies.own, number)[3] += 1
        assert transfer.verify() is (number == 0)
        assert sorted(memory.complete(number)) == sorted({comm.rank, *([] if number else [origin])})
    nodes.free()
