"""Candidates of the MPI library, by mpi4py directly: one call on the whole buffer, and messages of 16 MiB.

Both are in place if MPI has that form, which is the library's faster one. The shorter messages show
the library at its best: above 32 MiB it allocates and frees temporaries of the message's size on
every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from communication_candidates import ROOT, Call, Candidate, Name, Operation, Setting, result_of, share
from torch import Tensor

MESSAGE_BYTES = 16 * 2**20
REDUCTIONS = ("all_reduce", "reduce_scatter")


@cache
def mpi() -> Any:
    """Return mpi4py's module, which is imported by a job that has started."""
    from mpi4py import MPI

    return MPI


def library_candidates(setting: Setting, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield the library's own call, and the same in messages if the buffer is larger than one."""
    if lack_of_library(setting, operation):
        return
    kind, call = datatype(setting.dtype, reduces=operation.name in REDUCTIONS), _LIBRARY[operation.name]
    first, second = tensors = [setting.plain(numel), setting.plain(operation.second(numel, setting.size))]
    result = result_of(setting, operation, tensors, first[: numel // setting.size])  # MPI's place of each rank's share
    yield Candidate(Name.LIBRARY, call(setting, kind, first, second, numel), tensors, result)
    message = MESSAGE_BYTES // first.element_size()
    if numel > message:
        call = _reduce_by_messages if operation.name == "reduce_scatter" else call
        result = result_of(setting, operation, tensors, share(first, setting.rank, setting.size))
        yield Candidate(Name.MESSAGES, call(setting, kind, first, second, message), tensors, result)


def lack_of_library(setting: Setting, operation: Operation) -> str:
    """Return why the library cannot do an operation; empty if it can."""
    if setting.device.type != "cpu" or operation.name not in REDUCTIONS:
        return ""
    return "" if datatype(setting.dtype, reduces=True) != mpi().DATATYPE_NULL else f"this MPI knows no {setting.dtype}"


def datatype(dtype: torch.dtype, *, reduces: bool) -> Any:
    """Return MPI's datatype for a dtype; the null type if this library cannot reduce it.

    For operations without a reduction, a type of the same width suffices.
    """
    names = {
        torch.float64: mpi().DOUBLE,
        torch.float32: mpi().FLOAT,
        torch.int64: mpi().INT64_T,
        torch.int32: mpi().INT32_T,
        torch.float16: mpi().FLOAT16_T if reduces else mpi().UINT16_T,
        torch.bfloat16: mpi().BFLOAT16_T if reduces else mpi().UINT16_T,
    }
    return names[dtype]


def spec(tensor: Tensor, kind: Any) -> list[Any]:
    nbytes = tensor.numel() * tensor.element_size()
    return [mpi().buffer.fromaddress(tensor.data_ptr(), nbytes), tensor.numel(), kind]


def _specs(tensor: Tensor, kind: Any, message: int) -> list[list[Any]]:
    return [spec(part, kind) for part in torch.split(tensor, message)]


def _each(calls: list[Call]) -> Call:
    """Return the calls as one; a single call is returned unchanged, so that no wrapper is timed."""
    if len(calls) == 1:
        return calls[0]

    def run() -> None:
        for call in calls:
            call()

    return run


def _mpi_all_reduce(setting: Setting, kind: Any, first: Tensor, _: Tensor, message: int) -> Call:
    parts = _specs(first, kind, message)
    return _each([partial(setting.world.Allreduce, mpi().IN_PLACE, part, mpi().SUM) for part in parts])


def _mpi_reduce_scatter(setting: Setting, kind: Any, first: Tensor, _: Tensor, message: int) -> Call:
    # In place, mpi4py interprets the count of a share as that of the whole buffer.
    buffer = [*spec(first, kind)[:1], first.numel() // setting.size, kind]
    return partial(setting.world.Reduce_scatter_block, mpi().IN_PLACE, buffer, mpi().SUM)


def _reduce_by_messages(setting: Setting, kind: Any, first: Tensor, _: Tensor, message: int) -> Call:
    # The shares of a message are not contiguous, and MPI reduces no strided types: reduce to one root
    # after another.
    calls: list[Call] = []
    for root in range(setting.size):
        for part in _specs(share(first, root, setting.size), kind, message):
            buffers = (mpi().IN_PLACE, part) if root == setting.rank else (part, None)
            calls.append(partial(setting.world.Reduce, *buffers, mpi().SUM, root))
    return _each(calls)


def _mpi_all_gather(setting: Setting, kind: Any, first: Tensor, _: Tensor, message: int) -> Call:
    each = first.numel() // setting.size
    if message >= each:
        return partial(setting.world.Allgather, mpi().IN_PLACE, [*spec(first, kind)[:1], each, kind])
    calls: list[Call] = []
    for start in range(0, each, message):
        # The extent of this type is a whole share, so that the messages of all ranks are placed
        # correctly.
        block = kind.Create_contiguous(min(message, each - start))
        strided = block.Create_resized(0, each * first.element_size()).Commit()
        calls.append(partial(setting.world.Allgather, mpi().IN_PLACE, [*spec(first[start:], kind)[:1], 1, strided]))
    return _each(calls)


def _mpi_broadcast(setting: Setting, kind: Any, first: Tensor, _: Tensor, message: int) -> Call:
    return _each([partial(setting.world.Bcast, part, ROOT) for part in _specs(first, kind, message)])


def _mpi_pingpong(setting: Setting, kind: Any, first: Tensor, second: Tensor, message: int) -> Call:
    send, recv = setting.world.Send, setting.world.Recv
    parts = _specs(first, kind, message)
    if setting.rank == ROOT:
        back = _specs(second, kind, message)
        return _each([partial(send, part, 1) for part in parts] + [partial(recv, part, 1) for part in back])
    return _each([partial(recv, part, ROOT) for part in parts] + [partial(send, part, ROOT) for part in parts])


_LIBRARY: dict[str, Callable[[Setting, Any, Tensor, Tensor, int], Call]] = {
    "all_reduce": _mpi_all_reduce,
    "reduce_scatter": _mpi_reduce_scatter,
    "all_gather": _mpi_all_gather,
    "broadcast": _mpi_broadcast,
    "pingpong": _mpi_pingpong,
}
