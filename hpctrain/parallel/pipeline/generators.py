"""Random generators of torch that differ between pipeline stages and data ranks during a batch.

Programs seed all ranks alike, which shuffling and initial weights need. The stages would then draw
the same dropout masks for different layers. The passes of a batch therefore draw from a separate
stream. Its seed combines the state of the host's generator, a counter, the stage and the data rank
(Megatron-LM also seeds by the stage). Tensor ranks of one stage draw alike. Afterwards the
program's own stream is restored, so all ranks continue to draw alike, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpctrain.parallel.tensor.rng import generator_of, mixed


class PassGenerators:
    """Generators of the host and of ``device`` for passes; ``place`` is the pipeline stage and the data rank."""

    def __init__(self, device: torch.device, place: tuple[int, int]) -> None:
        self._devices = {torch.device("cpu"), device}
        self._place = place
        self._passes, self._last = 0, 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stage's stream in the ``with`` block, from a new one each time."""
        generators = [generator_of(device) for device in self._devices]
        states = [generator.get_state() for generator in generators]
        number = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        # A program that draws nothing between two steps must not get the same masks twice.
        self._passes = self._passes + 1 if number == self._last else 0
        self._last = number
        try:
            for generator in generators:
                generator.manual_seed(mixed(number, self._passes, *self._place))
            yield
        finally:
            for generator, state in zip(generators, states):
                generator.set_state(state)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore the generators after the ``with`` block."""
        generators = [generator_of(device) for device in self._devices]
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states):
                generator.set_state(state)
