"""The command ``hpctrain`` with its ranks on two simulated nodes, the first half on one, for the table of faults."""

from __future__ import annotations

import sys

from mpi4py import MPI

from hpctrain.cli.main import main
from hpctrain.comm.transport.mpi import MpiTransport


def simulate_nodes() -> None:
    """Divide the ranks over two nodes that share no memory."""
    world = MPI.COMM_WORLD

    def split_node(self: MpiTransport) -> MpiTransport:
        here = self.split(2 * world.rank // world.size, self.rank)
        assert isinstance(here, MpiTransport)
        return here

    MpiTransport.split_node = split_node  # type: ignore[method-assign]


if __name__ == "__main__":
    simulate_nodes()
    sys.exit(main())
