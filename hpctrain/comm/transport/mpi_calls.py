"""Prepared MPI collectives, whose calls cost little more than the library itself.

A prepared call stores addresses and counts. Beyond the MPI call, it only records the operation that
this rank waits for. It does not keep its memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.transport.base import PreparedCall, Recordable
from hpctrain.comm.transport.waiting import waiting

# Both MPI libraries lose a factor of two on messages above 32 MiB: they allocate temporaries of the
# message's size, and glibc maps and unmaps such large blocks on every call.
MESSAGE_BYTES = 16 * 2**20

# Collectives of shares cannot be cut without strided types. Up to the largest count that every
# library supports, they are one call.
SHARES_BYTES = 2**31 - 1

# MPI does not support 16-bit floats, or not in every library. Sums of 8- and 16-bit integers
# saturate in Open MPI's vector code, and wrap around elsewhere.
DTYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
}
OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}

Spec = tuple[Any, ...]  # mpi4py buffer specification: memory, count, type; a tuple is parsed faster than a list


def reduces(dtype: torch.dtype, op: str) -> bool:
    """Return whether MPI reduces this dtype as torch does; min and max of floats may drop NaN in MPI."""
    return dtype in DTYPES and op in OPS and not (dtype.is_floating_point and op in ("min", "max"))


def memory(tensor: Tensor) -> MPI.buffer:
    """Return the bytes of a contiguous tensor."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def in_bytes(tensor: Tensor) -> list[Spec]:
    """Return the tensor's bytes as messages; an empty tensor gives one empty message."""
    address, total = tensor.data_ptr(), tensor.nbytes
    sizes = [min(MESSAGE_BYTES, total - start) for start in range(0, max(total, 1), MESSAGE_BYTES)]
    return [
        (MPI.buffer.fromaddress(address + number * MESSAGE_BYTES, nbytes), nbytes, MPI.BYTE)
        for number, nbytes in enumerate(sizes)
    ]


def in_elements(tensor: Tensor) -> list[Spec]:
    """Return the tensor's elements as messages."""
    pieces = torch.split(tensor.view(-1), MESSAGE_BYTES // tensor.element_size())
    return [(memory(piece), piece.numel(), DTYPES[tensor.dtype]) for piece in pieces]


def broadcast(comm: MPI.Intracomm, tensor: Tensor, root: int) -> list[PreparedCall]:
    """Return the calls of a broadcast."""
    return [partial(comm.Bcast, spec, root) for spec in in_bytes(tensor)]


def all_reduce(comm: MPI.Intracomm, tensor: Tensor, op: str) -> list[PreparedCall]:
    """Return the calls of an all_reduce, in place."""
    return [partial(comm.Allreduce, MPI.IN_PLACE, spec, OPS[op]) for spec in in_elements(tensor)]


def reduce(comm: MPI.Intracomm, tensor: Tensor, op: str, root: int) -> list[PreparedCall]:
    """Return the calls of a reduce into the root's tensor."""
    if comm.Get_rank() == root:
        return [partial(comm.Reduce, MPI.IN_PLACE, spec, OPS[op], root) for spec in in_elements(tensor)]
    return [partial(comm.Reduce, spec, None, OPS[op], root) for spec in in_elements(tensor)]


def reduce_scatter(comm: MPI.Intracomm, out: Tensor, tensor: Tensor, op: str) -> list[PreparedCall]:
    """Return the calls of a reduce_scatter into equal shares; large tensors use one reduce per share."""
    kind = DTYPES[tensor.dtype]
    if tensor.nbytes <= SHARES_BYTES:
        whole, part = (memory(tensor), out.numel(), kind), (memory(out), out.numel(), kind)
        return [partial(comm.Reduce_scatter_block, whole, part, OPS[op])]
    calls: list[PreparedCall] = []
    for root, share in enumerate(torch.split(tensor.view(-1), out.numel())):
        for source, target in zip(in_elements(share), in_elements(out)):
            calls.append(partial(comm.Reduce, source, target if root == comm.Get_rank() else None, OPS[op], root))
    return calls


def all_gather(comm: MPI.Intracomm, out: Tensor, tensor: Tensor) -> list[PreparedCall]:
    """Return the calls of an all_gather of shares that are in place; large tensors use one broadcast per share."""
    if out.nbytes <= SHARES_BYTES:
        return [partial(comm.Allgather, MPI.IN_PLACE, (memory(out), MPI.BYTE))]
    return [call for root, share in enumerate(out.view(-1).chunk(comm.size)) for call in broadcast(comm, share, root)]


def prepared(operation: str, calls: Sequence[PreparedCall], counted: Recordable, nbytes: int) -> PreparedCall:
    """Return one call that makes them all, records the wait, and counts the bytes handed over."""
    call = calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
    return waiting.around(operation, call, counted, nbytes)
