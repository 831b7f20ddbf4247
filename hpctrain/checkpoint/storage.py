"""Storage: how the ranks write a checkpoint, each by itself or by collective MPI-IO, and the writer for it.

Writes of each rank by itself suit local disks and most parallel filesystems. Collective MPI-IO passes
the bytes to a few ranks first, which write long ranges: some filesystems are faster that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.writer import ShareWriter
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

IO = Literal["posix", "mpiio"]


@dataclass(frozen=True)
class Storage:
    """Method of writing files: ``pwrite`` by each rank, or collective MPI-IO with hints.

    Tensors of at least ``alignment`` bytes start at multiples of ``alignment``, a power of two. The
    stripe size of a parallel filesystem is a good choice.
    """

    io: IO = "posix"
    alignment: int = layout.ALIGNMENT
    hints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.io not in get_args(IO):
            raise UsageError(f"io = {self.io!r}: allowed are {', '.join(get_args(IO))}", everywhere=True)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise UsageError(f"alignment = {self.alignment}: must be a power of two", everywhere=True)
        if self.hints and self.io != "mpiio":
            raise UsageError("hints are for io = 'mpiio'", everywhere=True)


def writer_for(comm: Communicator, storage: Storage, background: bool) -> ShareWriter:
    """Return a new writer of this rank's share. Raises ``UsageError`` if there is none for these ranks."""
    if storage.io == "posix" and not background:
        return ShareWriter()
    if storage.io == "posix":
        from hpctrain.checkpoint.background import BackgroundWriter

        return BackgroundWriter()
    if background:
        raise UsageError(
            "io = 'mpiio' writes by calls of all ranks, which a separate process per rank cannot make: "
            "write in the foreground, or by io = 'posix'",
            everywhere=True,
        )
    if comm.transport.name != "mpi":
        raise UsageError("io = 'mpiio' needs ranks that MPI has started: use io = 'posix'", everywhere=True)
    from hpctrain.checkpoint.mpi_io import MpiIoWriter
    from hpctrain.comm.transport.mpi import MpiTransport

    assert isinstance(comm.transport, MpiTransport)
    return MpiIoWriter(comm.transport, storage.hints)
