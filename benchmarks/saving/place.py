"""Hold where the benchmark runs, and let ranks wait without taking the cores of those still at work."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.collectives.communicator import Communicator

_NAP = 0.001  # seconds


@dataclass(frozen=True)
class Place:
    """Hold the ranks and the folder that they all see."""

    comm: Communicator
    folder: Path

    @property
    def world(self) -> Any:
        """Return mpi4py's communicator of the same ranks."""
        return self.comm.transport.comm  # type: ignore[attr-defined]

    @property
    def rank(self) -> int:
        """Return this rank's number."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.comm.size

    def share(self, nbytes: int) -> slice:
        """Return this rank's part of so many bytes."""
        return slice(nbytes * self.rank // self.size, nbytes * (self.rank + 1) // self.size)

    def rest(self) -> None:
        """Wait for all ranks asleep: a rank that spins would take a core from the disk and its writers."""
        meeting = self.world.Ibarrier()
        while not meeting.Test():
            time.sleep(_NAP)

    def quiet(self) -> None:
        """Return when nothing waits to be written to the disk any more."""
        self.rest()
        if self.rank == 0:
            os.sync()
        self.rest()
