"""Candidates of the MPI library, by mpi4py directly: one call on the whole buffer, and messages of 16 MiB.

Both are in place if MPI has that form, which is the library's faster one. The shorter messages show
the library at its best: above 32 MiB it allocates and frees temporaries of the message's size on
every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from comm.candidates import Call, Candidate
from comm.names import LIBRARY, PIECES
from comm.operations import ROOT, Operation, share
from comm.place import Place
from torch import Tensor

PIECE_BYTES = 16 * 2**20
REDUCTIONS = ("all_reduce", "reduce_scatter")


def candidates(place: Place, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield the library's own call, and the same in pieces if the buffer is larger than a piece."""
    if lack(place, operation):
        return
    first = place.plain(numel)
    kind = datatype(place.dtype, reduces=operation.name in REDUCTIONS)
    second = place.plain(operation.second(numel, place.size))
    whole = first.numel()
    result = _result(place, operation, first, second)
    yield Candidate(LIBRARY, CALLS[operation.name](place, kind, first, second, whole), [first, second], result)
    piece = PIECE_BYTES // first.element_size()
    if whole > piece:
        call = (_reduce_by_pieces if operation.name == "reduce_scatter" else CALLS[operation.name])(
            place, kind, first, second, piece
        )
        if operation.name == "reduce_scatter":
            result = share(first, place.rank, place.size)
        yield Candidate(PIECES, call, [first, second], result)


def lack(place: Place, operation: Operation) -> str:
    """Return why the library cannot do an operation; empty if it can."""
    from mpi4py import MPI

    if place.device.type != "cpu" or operation.name not in REDUCTIONS:
        return ""
    return "" if datatype(place.dtype, reduces=True) != MPI.DATATYPE_NULL else f"this MPI knows no {place.dtype}"


def datatype(dtype: torch.dtype, *, reduces: bool) -> Any:
    """Return MPI's datatype for a dtype; the null type if this library cannot reduce it.

    For operations without a reduction, a type of the same width suffices.
    """
    from mpi4py import MPI

    names = {
        torch.float64: MPI.DOUBLE,
        torch.float32: MPI.FLOAT,
        torch.int64: MPI.INT64_T,
        torch.int32: MPI.INT32_T,
        torch.float16: MPI.FLOAT16_T if reduces else MPI.UINT16_T,
        torch.bfloat16: MPI.BFLOAT16_T if reduces else MPI.UINT16_T,
    }
    return names[dtype]


def _result(place: Place, operation: Operation, first: Tensor, second: Tensor) -> Tensor:
    if operation.name == "reduce_scatter":  # in place, MPI stores each rank's share at the beginning
        return first[: first.numel() // place.size]
    return second if operation.name == "pingpong" and place.rank == ROOT else first


def spec(tensor: Tensor, kind: Any) -> list[Any]:
    """Return a buffer specification for mpi4py."""
    from mpi4py import MPI

    nbytes = tensor.numel() * tensor.element_size()
    return [MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), tensor.numel(), kind]


def _specs(tensor: Tensor, kind: Any, piece: int) -> list[list[Any]]:
    return [spec(part, kind) for part in torch.split(tensor, piece)]


def _each(calls: list[Call]) -> Call:
    """Return the calls as one; a single call is returned unchanged, so that no wrapper is timed."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


def _all_reduce(place: Place, kind: Any, first: Tensor, _: Tensor, piece: int) -> Call:
    from mpi4py import MPI

    return _each(
        [partial(place.world.Allreduce, MPI.IN_PLACE, part, MPI.SUM) for part in _specs(first, kind, piece)]
    )


def _reduce_scatter(place: Place, kind: Any, first: Tensor, _: Tensor, piece: int) -> Call:
    from mpi4py import MPI

    # In place, mpi4py interprets the count of a share as that of the whole buffer.
    buffer = [*spec(first, kind)[:1], first.numel() // place.size, kind]
    return partial(place.world.Reduce_scatter_block, MPI.IN_PLACE, buffer, MPI.SUM)


def _reduce_by_pieces(place: Place, kind: Any, first: Tensor, _: Tensor, piece: int) -> Call:
    # The shares of a piece are not contiguous, and MPI reduces no strided types: reduce to one root
    # after another.
    from mpi4py import MPI

    calls: list[Call] = []
    for root in range(place.size):
        for part in _specs(share(first, root, place.size), kind, piece):
            buffers = (MPI.IN_PLACE, part) if root == place.rank else (part, None)
            calls.append(partial(place.world.Reduce, *buffers, MPI.SUM, root))
    return _each(calls)


def _all_gather(place: Place, kind: Any, first: Tensor, _: Tensor, piece: int) -> Call:
    from mpi4py import MPI

    each = first.numel() // place.size
    if piece >= each:
        return partial(place.world.Allgather, MPI.IN_PLACE, [*spec(first, kind)[:1], each, kind])
    calls: list[Call] = []
    for start in range(0, each, piece):
        # The extent of this type is a whole share, so that the pieces of all ranks are placed
        # correctly.
        block = kind.Create_contiguous(min(piece, each - start))
        strided = block.Create_resized(0, each * first.element_size()).Commit()
        calls.append(partial(place.world.Allgather, MPI.IN_PLACE, [*spec(first[start:], kind)[:1], 1, strided]))
    return _each(calls)


def _broadcast(place: Place, kind: Any, first: Tensor, _: Tensor, piece: int) -> Call:
    return _each([partial(place.world.Bcast, part, ROOT) for part in _specs(first, kind, piece)])


def _pingpong(place: Place, kind: Any, first: Tensor, second: Tensor, piece: int) -> Call:
    send, recv = place.world.Send, place.world.Recv
    parts = _specs(first, kind, piece)
    if place.rank == ROOT:
        back = _specs(second, kind, piece)
        return _each([partial(send, part, 1) for part in parts] + [partial(recv, part, 1) for part in back])
    return _each([partial(recv, part, ROOT) for part in parts] + [partial(send, part, ROOT) for part in parts])


CALLS: dict[str, Callable[[Place, Any, Tensor, Tensor, int], Call]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "pingpong": _pingpong,
}
