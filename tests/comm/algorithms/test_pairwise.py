"""All-to-all by pairwise exchange."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from suites.algorithms import Play, Suite, moved
from support.reductions import same_bits, values

from hpctrain.comm.algorithms.direct import all_to_all, partners
from hpctrain.comm.transport.base import Transport


class TestAllToAll(Suite):
    def test_equal_shares_are_transposed(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            size, me = transport.size, transport.rank
            for dtype, share in product(moved(transport), (0, 1, 13)):
                tensor, out = values(me, share * size, dtype), torch.zeros(share * size, dtype=dtype)
                all_to_all(transport, out, tensor)
                pieces = [values(rank, share * size, dtype)[me * share :][:share] for rank in range(size)]
                assert same_bits(out, torch.cat(pieces)) and same_bits(tensor, values(me, share * size, dtype))

        play(body)

    def test_unequal_shares_are_transposed(self, play: Play) -> None:
        # Rank s sends s + 2 r elements to rank r, so that one of the parts is empty.
        def body(transport: Transport) -> None:
            me, ranks = transport.rank, range(transport.size)
            sent, received = [me + 2 * rank for rank in ranks], [rank + 2 * me for rank in ranks]
            tensor = torch.cat([torch.full((count,), 10 * me + rank) for rank, count in enumerate(sent)])
            out = torch.zeros(sum(received), dtype=torch.int64)
            all_to_all(transport, out, tensor, sent, received)
            assert torch.equal(out, torch.cat([torch.full((n,), 10 * rank + me) for rank, n in enumerate(received)]))

        play(body)


@pytest.mark.parametrize("size", range(1, 20))
def test_partners_of_a_step_match(size: int) -> None:
    table = [partners(rank, size) for rank in range(size)]
    for rank, row in enumerate(table):
        assert sorted(to for to, _ in row) == [other for other in range(size) if other != rank]
        assert all(table[to][step][1] == rank for step, (to, _) in enumerate(row))
