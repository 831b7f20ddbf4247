"""Batches that a thread reads ahead are those of a loader without it, and it reads while the program computes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data.loader import Loader


class Numbers:
    """Data set that notes the thread of each read, and fails at one sample."""

    def __init__(self, broken: int = -1) -> None:
        self.broken, self.reads = broken, list[str]()
        self.third = threading.Event()

    def __len__(self) -> int:
        return 103

    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(threading.current_thread().name)
        if len(self.reads) == 3:
            self.third.set()
        if self.broken in indices:
            raise OSError("broken")
        return torch.from_numpy(indices), torch.from_numpy(np.asarray(indices))


@pytest.mark.parametrize("depth", (1, 3))
@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"epochs": 3, "drop_last": False}])
def test_the_batches_and_positions_are_the_same(depth: int, options: dict[str, Any]) -> None:
    plain, ahead = (Loader(Numbers(), batch=10, prefetch=each, **options) for each in (0, depth))
    saved = plain.state_dict()
    for number in range(40):
        wanted, found = next(plain, None), next(ahead, None)
        assert (wanted is None) == (found is None) and plain.position == ahead.position
        if wanted is not None and found is not None:
            assert torch.equal(wanted.inputs, found.inputs) and wanted.weight == found.weight
        if number == 8:
            saved = plain.state_dict()
        if number == 11:  # a run that goes back
            plain.load_state_dict(saved)
            ahead.load_state_dict(saved)


def test_a_thread_reads_while_the_program_computes() -> None:
    data = Numbers()
    loader = Loader(data, batch=10, prefetch=2)
    next(loader)
    assert data.third.wait(10), "the next two batches are read without being requested"
    assert all(name.startswith("hpctrain-read-ahead") for name in data.reads)
    assert loader.position == 10, "the position is that of the batch that was returned"


def test_batches_for_another_number_of_ranks_are_dropped() -> None:
    """A run may continue with fewer ranks, when others have died."""
    data = Numbers()
    plain, ahead = (Loader(data, batch=12, rank=2, size=3, prefetch=each) for each in (0, 2))
    for loader in (ahead, plain):
        next(loader)
        assert data.third.wait(10), "the next two are being read"
        loader.rank, loader.size = 1, 2
    for _ in range(3):
        wanted, found = next(plain), next(ahead)
        assert torch.equal(wanted.inputs, found.inputs) and found.samples == 6 and found.weight == 1.0


def test_an_error_comes_with_its_batch() -> None:
    wanted = Loader(Numbers(), batch=10)
    sample = [next(wanted) for _ in range(4)][3].inputs[0]
    loader = Loader(Numbers(broken=int(sample)), batch=10, prefetch=5)
    for _ in range(3):
        next(loader)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            next(loader)
    assert loader.position == 30
