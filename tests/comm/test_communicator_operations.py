"""Every operation of the communicator by every algorithm that it accepts by name, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hpctrain.comm.prepared import ALGORITHMS
from hpctrain.errors import CommunicationError

LENGTH = 1003  # not a multiple of any number of ranks


@pytest.fixture(scope="module")
def node(comm: Any) -> Iterator[Any]:
    """Return a communicator of the ranks of this node."""
    node = comm.split(comm.node)
    yield node
    node.free()


@pytest.fixture
def those(comm: Any, node: Any, algorithm: str) -> Any:
    """Return a communicator of the ranks that an algorithm supports: those of one node, or all."""
    return node if algorithm == "window" else comm


def lent(comm: Any, tensor: torch.Tensor, algorithm: str) -> torch.Tensor:
    """Return a tensor that an algorithm accepts: on several nodes some need ``comm.empty``."""
    needed = algorithm == "hierarchical" and comm.nodes > 1
    return comm.empty(tensor.numel()).copy_(tensor) if needed else tensor


def mine(rank: int, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(length) * 7 + 13 * rank) % 31).to(dtype)


def total(size: int, length: int = LENGTH) -> torch.Tensor:
    return torch.stack([mine(rank, length) for rank in range(size)]).sum(0)  # whole numbers: any order is exact


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["all_reduce"]])
def test_all_reduce_by_name(those: Any, algorithm: str) -> None:
    tensor = mine(those.rank).view(17, 59)
    assert those.all_reduce(tensor, algorithm=algorithm) is tensor
    assert torch.equal(tensor.view(-1), total(those.size))
    averaged = those.all_reduce(mine(those.rank), "average", algorithm=algorithm)
    torch.testing.assert_close(averaged, total(those.size) / those.size)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["broadcast"]])
def test_broadcast_by_name(those: Any, algorithm: str) -> None:
    for root in range(those.size):
        tensor = those.broadcast(lent(those, mine(those.rank), algorithm), root, algorithm=algorithm)
        assert torch.equal(tensor, mine(root))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ["auto", "mpi", "tree", "double_tree"])
def test_reduce_by_name(those: Any, algorithm: str) -> None:
    root = those.size - 1
    tensor = those.reduce(mine(those.rank), "sum", root, algorithm=algorithm)
    assert torch.equal(tensor, total(those.size) if those.rank == root else mine(those.rank))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["reduce_scatter"]])
def test_reduce_scatter_by_name(those: Any, algorithm: str) -> None:
    length = 10 * those.size
    tensor = lent(those, mine(those.rank, length), algorithm)
    share = those.reduce_scatter(torch.empty(10), tensor, algorithm=algorithm)
    assert torch.equal(share, total(those.size, length)[10 * those.rank : 10 * (those.rank + 1)])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["reduce_scatter"]])
@pytest.mark.parametrize("place", ["window", "host"])
def test_reduce_scatter_into_its_own_slice(comm: Any, algorithm: str, place: str) -> None:
    if comm.nodes > 1 and (algorithm == "window" or algorithm == "hierarchical" and place == "host"):
        pytest.skip("refused over several nodes")
    for share in (1, 10, 5000):
        tensor = mine(comm.rank, share * comm.size)
        tensor = comm.empty(tensor.numel()).copy_(tensor) if place == "window" else tensor
        own = tensor[share * comm.rank : share * (comm.rank + 1)]
        assert comm.reduce_scatter(own, tensor, algorithm=algorithm) is own
        assert torch.equal(own, total(comm.size, share * comm.size)[share * comm.rank : share * (comm.rank + 1)])


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["all_gather"]])
def test_all_gather_by_name(those: Any, algorithm: str) -> None:
    out = lent(those, torch.empty(LENGTH * those.size), algorithm)
    whole = those.all_gather(out, mine(those.rank), algorithm=algorithm)
    assert torch.equal(whole, torch.cat([mine(rank) for rank in range(those.size)]))


@pytest.mark.ranks(1, 2, 3, 4)
def test_gather_and_scatter_on_every_root(comm: Any) -> None:
    everything = torch.cat([mine(rank) for rank in range(comm.size)])
    for root in range(comm.size):
        out = torch.empty(LENGTH * comm.size) if comm.rank == root else None
        whole = comm.gather(out, mine(comm.rank), root)
        assert whole is out and (whole is None or torch.equal(whole, everything))
        share = comm.scatter(torch.empty(LENGTH), everything if comm.rank == root else None, root)
        assert torch.equal(share, mine(comm.rank))


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_to_all_is_a_transposition(comm: Any) -> None:
    given = torch.arange(3 * comm.size) + 100 * comm.rank
    out = comm.all_to_all(torch.empty_like(given), given)
    columns = [torch.arange(3 * comm.rank, 3 * comm.rank + 3) + 100 * rank for rank in range(comm.size)]
    assert torch.equal(out, torch.cat(columns))


@pytest.mark.ranks(1, 2, 3, 4)
def test_bitwise_reductions_of_integers_and_booleans(comm: Any) -> None:
    flags = torch.arange(8, dtype=torch.int32) << comm.rank
    expected = flags.clone() * 0
    for rank in range(comm.size):
        expected |= torch.arange(8, dtype=torch.int32) << rank
    assert torch.equal(comm.all_reduce(flags, "bor"), expected)
    truth = torch.tensor([True, comm.rank == 0, False])
    assert comm.all_reduce(truth, "band").tolist() == [True, comm.size == 1, False]


@pytest.mark.ranks(1, 2, 3, 4)
def test_invalid_arguments_are_refused(comm: Any) -> None:
    one, several = torch.zeros(1), torch.zeros(comm.size)
    with pytest.raises(CommunicationError, match="rank 99 is not in 0"):
        comm.reduce(one, "sum", 99)
    with pytest.raises(CommunicationError, match="expected equal tensors"):
        comm.all_to_all(torch.zeros(comm.size + 1), several)
    with pytest.raises(CommunicationError, match="tag 32764 is not in 0..32763"):
        comm.send(one, 0, 32764)
    if comm.rank == 0:
        with pytest.raises(CommunicationError, match="the root, rank 0, needs out"):
            comm.gather(None, one, 0)
