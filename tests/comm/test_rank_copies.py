"""Copies of the data of each rank that the other ranks of its node can read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.comm.rank_copies import RankCopies


@pytest.mark.ranks(2, 3)
def test_other_ranks_read_both_copies_and_what_is_fixed(comm: Any) -> None:
    copies = RankCopies(comm, {"moving": 40, "fixed": 100}, ["fixed"], serial=7)
    copies.of(copies.own, "fixed", 0).fill_(100 + comm.rank)
    for number in (1, 2):
        copies.mark(number, complete=False)
        copies.of(copies.own, "moving", number).fill_(10 * number + comm.rank)
        copies.mark(number, complete=True)
    comm.barrier()
    for rank, memory in copies.ranks.items():
        for number in (1, 2):
            assert copies.of(memory, "moving", number).tolist() == [10 * number + rank] * 40
            assert copies.of(memory, "fixed", number).tolist() == [100 + rank] * 100
    assert set(copies.ranks) == set(range(comm.size)) and copies.nbytes == 64 + 128 + 2 * 64
    comm.barrier()


@pytest.mark.ranks(2, 3)
def test_a_copy_that_a_rank_has_not_completed_is_known(comm: Any) -> None:
    copies = RankCopies(comm, {"moving": 8}, [], serial=0)
    assert copies.complete(0) == copies.complete(1) == []
    comm.barrier()
    copies.mark(3, complete=False)
    if comm.rank:
        copies.mark(3, complete=True)
    comm.barrier()
    assert copies.complete(3) == list(range(1, comm.size)) and copies.complete(1) == []
    comm.barrier()


@pytest.mark.ranks(1)
def test_a_single_process_has_its_own_copy(comm: Any) -> None:
    copies = RankCopies(comm, {"moving": 8}, [], serial=0)
    copies.of(copies.own, "moving", 5).view(torch.float32).fill_(0.5)
    copies.mark(5, complete=True)
    assert copies.complete(5) == []
    copies.mark(5, complete=False)
    assert copies.complete(5) == [comm.rank] and copies.of(copies.own, "moving", 3).sum() > 0
