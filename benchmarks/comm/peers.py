"""Candidates of torch.distributed: gloo on the host, NCCL on GPUs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from comm.candidates import Call, Candidate
from comm.names import GLOO, NCCL
from comm.operations import ROOT, Operation, share
from comm.place import Place
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

GLOO_EVERY = 4  # rounds per turn: it takes ten times as long as the others together


@contextmanager
def process_group(place: Place) -> Iterator[None]:
    """Initialize torch.distributed on the same ranks for the block."""
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=_store(place), rank=place.rank, world_size=place.size)
    try:
        yield
    finally:
        place.world.Barrier()
        dist.destroy_process_group()


def _store(place: Place) -> Store:
    # A TCP store instead of a file, because nodes may have no common folder; MPI broadcasts the
    # port.
    host = "127.0.0.1" if place.comm.nodes == 1 else socket.gethostname()
    limit = timedelta(minutes=5)
    own = TCPStore(host, 0, place.size, True, limit, False) if place.rank == ROOT else None
    host, port = place.comm.broadcast_object((host, own.port if own else 0))
    return own or TCPStore(host, port, place.size, False, limit)


def candidates(place: Place, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield torch.distributed's candidate."""
    first, second = place.plain(numel), place.plain(operation.second(numel, place.size))
    result = second if operation.name == "reduce_scatter" else first
    if operation.name == "pingpong" and place.rank == ROOT:
        result = second
    name, every = (NCCL, 1) if place.device.type == "cuda" else (GLOO, GLOO_EVERY)
    yield Candidate(name, CALLS[operation.name](place, first, second), [first, second], result, every)


def _all_reduce(place: Place, first: Tensor, _: Tensor) -> Call:
    return partial(dist.all_reduce, first)


def _reduce_scatter(place: Place, first: Tensor, second: Tensor) -> Call:
    # PyTorch 2.13 renamed both.
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return partial(call, second, first)


def _all_gather(place: Place, first: Tensor, _: Tensor) -> Call:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return partial(call, first, share(first, place.rank, place.size))


def _broadcast(place: Place, first: Tensor, _: Tensor) -> Call:
    return partial(dist.broadcast, first, ROOT)


def _pingpong(place: Place, first: Tensor, second: Tensor) -> Call:
    def ping() -> None:
        dist.send(first, 1)
        dist.recv(second, 1)

    def pong() -> None:
        dist.recv(first, ROOT)
        dist.send(first, ROOT)

    return ping if place.rank == ROOT else pong


CALLS: dict[str, Callable[[Place, Tensor, Tensor], Call]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "pingpong": _pingpong,
}
