"""Candidates of hpctrain: on tensors of ``comm.empty``, by any algorithm, and on other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from comm.candidates import Call, Candidate
from comm.names import COMMON, OURS, OUTSIDE
from comm.operations import ROOT, Operation, share
from comm.place import Place
from torch import Tensor

from hpctrain.comm.communicator import Communicator


def candidates(place: Place, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield hpctrain's candidates. Collective."""
    if place.device.type == "cuda":
        yield from _on_device(place, operation, numel)
        return
    second = operation.second(numel, place.size)
    for algorithm in place.algorithms:
        name = OURS if algorithm == "auto" else f"{OURS} {algorithm}"
        tensors = [place.shared(f"{name} {which}", count) for which, count in enumerate((numel, second))]
        yield _candidate(place, operation, name, tensors, algorithm, needed=place.chosen or algorithm == "auto")
    if operation.name == "all_gather":
        yield _common(place, numel)
    yield _candidate(place, operation, OUTSIDE, [place.plain(numel), place.plain(second)], "auto", needed=True)
    if operation.name == "all_reduce" and place.dtype in (torch.float32, torch.bfloat16):
        twin = twin_of(place.dtype)
        tensors = [place.shared("twin", numel, twin), place.shared("twin 1", second, twin)]
        yield _candidate(place, operation, twin_name(place.dtype), tensors, "auto")


def _common(place: Place, numel: int) -> Candidate:
    """Return the gather of shares that are already in place in one tensor."""
    whole, each = place.common(numel), numel // place.size
    call = _all_gather(place.comm, whole, whole, "auto")
    own = slice(place.rank * each, (place.rank + 1) * each)
    return Candidate(COMMON, call, [whole], whole, needed=True, own=own)


def twin_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose reduction of equally many elements is measured for comparison."""
    return torch.float32 if dtype == torch.bfloat16 else torch.bfloat16


def twin_name(dtype: torch.dtype) -> str:
    """Return the name of the candidate of that dtype."""
    return f"{OURS} {str(twin_of(dtype)).removeprefix('torch.')}"


def _on_device(place: Place, operation: Operation, numel: int) -> Iterator[Candidate]:
    second = operation.second(numel, place.size)
    paths = place.algorithms if place.chosen else ["auto", "nccl", "mpi", "staged"]
    for path in ["auto"] if operation.name == "pingpong" else paths:
        name = OURS if path == "auto" else f"{OURS} {path}"
        tensors = [place.plain(numel), place.plain(second)]
        yield _candidate(place, operation, name, tensors, path, needed=place.chosen or path == "auto")


def _candidate(
    place: Place, operation: Operation, name: str, tensors: list[Tensor], algorithm: str, *, needed: bool = False
) -> Candidate:
    first, second = tensors
    call = CALLS[operation.name](place.comm, first, second, algorithm)
    result = share(first, place.rank, place.size) if operation.name == "reduce_scatter" else first
    if operation.name == "pingpong" and place.rank == ROOT:
        result = tensors[1]
    return Candidate(name, call, tensors, result, needed=needed)


def _all_reduce(comm: Communicator, first: Tensor, _: Tensor, algorithm: str) -> Call:
    return partial(comm.all_reduce, first, "sum", algorithm=algorithm)


def _reduce_scatter(comm: Communicator, first: Tensor, _: Tensor, algorithm: str) -> Call:
    return partial(comm.reduce_scatter, share(first, comm.rank, comm.size), first, "sum", algorithm=algorithm)


def _all_gather(comm: Communicator, first: Tensor, _: Tensor, algorithm: str) -> Call:
    return partial(comm.all_gather, first, share(first, comm.rank, comm.size), algorithm=algorithm)


def _broadcast(comm: Communicator, first: Tensor, _: Tensor, algorithm: str) -> Call:
    return partial(comm.broadcast, first, ROOT, algorithm=algorithm)


def _pingpong(comm: Communicator, first: Tensor, second: Tensor, _: str) -> Call:
    def ping() -> None:
        comm.send(first, 1)
        comm.recv(second, 1)

    def pong() -> None:
        comm.recv(first, ROOT)
        comm.send(first, ROOT)

    return ping if comm.rank == ROOT else pong


CALLS = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "pingpong": _pingpong,
}
