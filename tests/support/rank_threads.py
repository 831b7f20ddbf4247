"""Ranks as threads of one process, with the collectives of small tensors and objects that exact sums need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PATIENCE = 20.0  # seconds that a rank waits for another before the test fails


class RankThreads:
    """World of ``size`` ranks; ``run`` calls a function once per rank with its communicator."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.items: list[Any] = [None] * size
        self.comms = [ThreadComm(self, rank) for rank in range(size)]

    def run(self, body: Callable[[Any], Any]) -> list[Any]:
        """Return what the function returned for every rank; raise the first error."""
        results: list[Any] = [None] * len(self.comms)
        errors: list[BaseException] = []

        def one(comm: ThreadComm) -> None:
            try:
                results[comm.rank] = body(comm)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(comm,)) for comm in self.comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
        return results


class ThreadComm:
    """One rank of ``RankThreads``."""

    failed = False

    def __init__(self, world: RankThreads, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, len(world.items)

    def all_gather_object(self, item: Any) -> list[Any]:
        self.world.items[self.rank] = item
        self.world.barrier.wait(PATIENCE)
        found = list(self.world.items)
        self.world.barrier.wait(PATIENCE)
        return found

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        stacked = torch.stack(self.all_gather_object(tensor.clone()))
        return tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))
