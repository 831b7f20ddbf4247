"""Conformance suites of algorithms: a module's tests subclass one suite per operation.

The values can be added in any order without loss, so that results must equal NumPy's exactly: 16-bit floats hold whole
numbers whose sums they cannot represent, and must be rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import product
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from support.reductions import DTYPES, FLOATS, INTEGERS, reduced, same_bits, values
from support.threads import ThreadWorld
from torch import Tensor

from hpctrain.comm.algorithms.base import slices
from hpctrain.comm.reduction import Reducer
from hpctrain.comm.transport.base import Transport

SIZES = tuple(range(1, 9))
LENGTHS = (0, 1, 7, 251)
BITWISE: dict[str, Any] = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
MOVED = (*DTYPES, torch.bool)
CASES = [
    *((dtype, op) for dtype in FLOATS for op in ("sum", "average", "min", "max", "product")),
    *((dtype, op) for dtype in INTEGERS for op in ("sum", "min", "max", "product", *BITWISE)),
    *((torch.bool, op) for op in ("min", "max", *BITWISE)),
]
SOME_CASES = [(torch.float32, "sum"), (torch.bfloat16, "average"), (torch.float16, "product"), (torch.int64, "bxor")]
ROUNDED = list(product(FLOATS, ("sum", "average", "product", "max")))
SOME_ROUNDED = list(zip(FLOATS, ("product", "sum", "max", "average")))

Body = Callable[[Transport], Any]
Play = Callable[[Body], Any]


def cases(transport: Transport) -> list[tuple[tuple[torch.dtype, str], int]]:
    """Return the types and operations to test, each with a length.

    Some of each kind at every length; with three ranks also all of them at the longest.
    """
    some = list(product(SOME_CASES, LENGTHS))
    return some + [(case, LENGTHS[-1]) for case in CASES] if transport.size == 3 else some


def rounded(transport: Transport) -> list[tuple[torch.dtype, str]]:
    """Return the types and operations to test if sums are rounded: likewise, each type and each operation once."""
    return ROUNDED if transport.size == 3 else SOME_ROUNDED


def moved(transport: Transport) -> Sequence[torch.dtype]:
    """Return the types to test if nothing is computed: likewise."""
    return MOVED if transport.size == 3 else (torch.float32, torch.bool)


def exact(rank: int, numel: int, dtype: torch.dtype, op: str) -> Tensor:
    """Return a rank's input: numbers that are reduced exactly in the type of the sums."""
    generator = torch.Generator().manual_seed(rank)
    if op == "product" and dtype.is_floating_point:
        return torch.tensor([0.5, -1.0, 1.0, 2.0])[torch.randint(0, 4, (numel,), generator=generator)].to(dtype)
    top = 2 if dtype is torch.bool else 100
    return torch.randint(0, top, (numel,), generator=generator).to(dtype)


@cache
def wanted(size: int, numel: int, dtype: torch.dtype, op: str) -> Tensor:
    """Return the expected result over all ranks by NumPy; callers must not write to it."""
    pieces = [exact(rank, numel, dtype, op) for rank in range(size)]
    if op in BITWISE:
        return torch.from_numpy(reduce(BITWISE[op], [piece.numpy() for piece in pieces]))
    return reduced(pieces, op)


@cache
def plain(size: int, dtype: torch.dtype, op: str) -> Tensor:
    """Return NumPy's result for 500 values per rank; callers must not write to it."""
    return reduced([values(rank, 500, dtype) for rank in range(size)], op)


def all_same(transport: Transport, tensor: Tensor) -> bool:
    return all(same_bits(tensor, other) for other in transport.all_gather_object(tensor.clone()))


class Suite:
    """Base class of the suites, with the fixture ``play``."""

    algorithm: Any

    @pytest.fixture(params=[*SIZES, pytest.param("mpi", marks=pytest.mark.ranks(2, 3, 4))])
    def play(self, request: pytest.FixtureRequest) -> Play:
        """Return a runner of a function on ranks: on 1 to 8 threads, or on those of MPI."""
        if request.param != "mpi":
            return ThreadWorld(request.param).run
        comm = request.getfixturevalue("comm")
        return lambda body: body(comm.transport)


class AllReduceSuite(Suite):
    """Tests of ``all_reduce(transport, reducer, tensor, op)``."""

    def test_all_reduce_equals_numpy(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            reducer = Reducer()
            for (dtype, op), numel in cases(transport):
                tensor = exact(transport.rank, numel, dtype, op)
                self.algorithm(transport, reducer, tensor, op)
                assert same_bits(tensor, wanted(transport.size, numel, dtype, op)), (dtype, op, numel)

        play(body)

    def test_all_ranks_get_the_same_bits_and_so_does_a_rerun(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            for dtype, op in rounded(transport):
                first, again = values(transport.rank, 500, dtype), values(transport.rank, 500, dtype)
                self.algorithm(transport, Reducer(), first, op)
                self.algorithm(transport, Reducer(), again, op)
                assert same_bits(first, again) and all_same(transport, first), (dtype, op)
                torch.testing.assert_close(first, plain(transport.size, dtype, op))

        play(body)

    def test_nan_reaches_all_ranks(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            for op in ("sum", "min", "max"):
                tensor = torch.ones(transport.size + 1)
                tensor[transport.rank] = torch.nan
                self.algorithm(transport, Reducer(), tensor, op)
                assert tensor.isnan().tolist() == [True] * transport.size + [False], op

        play(body)

    def test_signed_zeros_and_nans_give_all_ranks_the_same_bits(self, play: Play) -> None:
        # Here addition and minimum do not commute: the first operand's bits are kept.
        def body(transport: Transport) -> None:
            for op in ("sum", "min", "max"):
                zeros = torch.full((40,), -0.0 if transport.rank % 2 else 0.0)
                nans = torch.full((40,), 0x7FC00000 + transport.rank, dtype=torch.int32).view(torch.float32)
                for tensor in (zeros, nans):
                    self.algorithm(transport, Reducer(), tensor, op)
                    assert all_same(transport, tensor), op

        play(body)

    def test_average_of_large_numbers_does_not_overflow(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            tensor = torch.full((20,), 60000, dtype=torch.float16)
            self.algorithm(transport, Reducer(), tensor, "average")
            assert tensor.tolist() == [60000] * 20

        play(body)

    def test_an_asynchronous_all_reduce_completes(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            tensor = exact(transport.rank, 60, torch.float32, "sum")
            work = self.algorithm.start(transport, Reducer(), tensor, "sum")
            while not work.done():
                sleep(0)
            work.wait()
            assert same_bits(tensor, wanted(transport.size, 60, torch.float32, "sum"))

        play(body)


class ReduceSuite(Suite):
    """Tests of ``reduce(transport, reducer, tensor, op, root)``."""

    def test_reduce_equals_numpy_at_the_root_and_leaves_other_ranks_unchanged(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            roots = sorted({0, transport.size // 2, transport.size - 1})
            for root, ((dtype, op), numel) in product(roots, cases(transport)):
                tensor = exact(transport.rank, numel, dtype, op)
                self.algorithm(transport, Reducer(), tensor, op, root)
                result = wanted(transport.size, numel, dtype, op)
                mine = exact(transport.rank, numel, dtype, op)
                assert same_bits(tensor, result if transport.rank == root else mine), (root, dtype, op, numel)

        play(body)

    def test_reduce_is_reproducible_bit_for_bit(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            for dtype in FLOATS:
                tensors = [values(transport.rank, 500, dtype) for _ in range(2)]
                for tensor in tensors:
                    self.algorithm(transport, Reducer(), tensor, "sum", 0)
                assert same_bits(*tensors)
                if transport.rank == 0:
                    torch.testing.assert_close(tensors[0], plain(transport.size, dtype, "sum"))

        play(body)


class ReduceScatterSuite(Suite):
    """Tests of ``reduce_scatter(transport, reducer, out, tensor, op)``."""

    def test_reduce_scatter_gives_each_rank_its_slice(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            for (dtype, op), numel in cases(transport):
                counts = slices(numel, transport.size)
                tensor = exact(transport.rank, numel, dtype, op)
                out = torch.empty(counts[transport.rank], dtype=dtype)
                self.algorithm(transport, Reducer(), out, tensor, op)
                assert same_bits(out, torch.split(wanted(transport.size, numel, dtype, op), counts)[transport.rank])
                assert same_bits(tensor, exact(transport.rank, numel, dtype, op))

        play(body)


class AllGatherSuite(Suite):
    """Tests of ``all_gather(transport, out, tensor)``."""

    @pytest.mark.parametrize("in_place", [False, True])
    def test_all_gather_puts_the_slices_in_order(self, play: Play, in_place: bool) -> None:
        def body(transport: Transport) -> None:
            for dtype, numel in product(moved(transport), LENGTHS):
                counts = slices(numel, transport.size)
                parts = [values(rank, count, dtype) for rank, count in enumerate(counts)]
                out, tensor = torch.zeros(numel, dtype=dtype), parts[transport.rank]
                if in_place:
                    tensor = torch.split(out, counts)[transport.rank].copy_(tensor)
                self.algorithm(transport, out, tensor)
                assert same_bits(out, torch.cat(parts)), (dtype, numel)

        play(body)


class BroadcastSuite(Suite):
    """Tests of ``broadcast(transport, tensor, root)``."""

    def test_broadcast_sends_the_tensor_of_any_root(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            for root, dtype, numel in product(range(transport.size), moved(transport), LENGTHS):
                tensor = values(transport.rank, numel, dtype)
                self.algorithm(transport, tensor, root)
                assert same_bits(tensor, values(root, numel, dtype)), (root, dtype, numel)

        play(body)
