"""Self-test of MPI's one-sided operations on known data, made before they are used."""

from __future__ import annotations

import torch
from mpi4py import MPI

from hpctrain.transport.onesided.rma import ExposedByRma

LENGTH = 1000  # elements per rank


def trial(comm: MPI.Intracomm) -> str:
    """Return a description of a failure; empty if the test passes. Collective.

    Each rank writes and adds to the memory of the rank farthest from it, and reads it back. All
    ranks add to one counter.
    """
    try:
        exposed = ExposedByRma(comm, [LENGTH] * comm.size, torch.float32, 1)
    except MPI.Exception as error:
        return f"cannot be set up ({str(error).splitlines()[0]})"
    try:
        return _tried(exposed, comm)
    except MPI.Exception as error:
        return f"fails ({str(error).splitlines()[0]})"
    finally:
        exposed.free()


def _tried(exposed: ExposedByRma, comm: MPI.Intracomm) -> str:
    target = (comm.rank + (comm.size + 1) // 2) % comm.size
    written, back = torch.arange(float(LENGTH)), torch.zeros(LENGTH)
    exposed.put(target, written[: LENGTH // 2])
    exposed.add(target, written[LENGTH // 2 :], LENGTH // 2)
    exposed.add(target, torch.ones(LENGTH))
    exposed.get(target, back)
    exposed.fetch_add(0, 0, comm.rank + 1)
    exposed.barrier()
    found = _wrong(exposed, back, written + 1, comm.size * (comm.size + 1) // 2)
    exposed.barrier()  # in any case: no rank may free memory that another rank still reads
    return found


def _wrong(exposed: ExposedByRma, back: torch.Tensor, expected: torch.Tensor, total: int) -> str:
    if not torch.equal(back, expected):
        return "reads back other numbers than were written"
    own = exposed.view(exposed.rank)
    if own is None or not torch.equal(own, expected):
        return "leaves other numbers in memory than were written"
    return "loses additions to a counter" if exposed.fetch_add(0, 0) != total else ""
