"""Setting of the checkpoint benchmark; its ranks wait without using cores that others need."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.comm.communicator import Communicator

_NAP = 0.001  # seconds


@dataclass(frozen=True)
class Place:
    """Ranks of the benchmark, and the folder that they share."""

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
        """Return this rank's part of ``nbytes`` bytes."""
        return slice(nbytes * self.rank // self.size, nbytes * (self.rank + 1) // self.size)

    def rest(self) -> None:
        """Wait for all ranks while sleeping: a spinning rank would take a core from the disk and its writers."""
        meeting = self.world.Ibarrier()
        while not meeting.Test():
            time.sleep(_NAP)

    def quiet(self) -> None:
        """Return once all pending writes have reached the disk."""
        self.rest()
        if self.rank == 0:
            os.sync()
        self.rest()
