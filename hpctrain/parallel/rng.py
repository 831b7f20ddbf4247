"""Random numbers of dropout: equal on all tensor ranks for replicated values, different for each rank's own values.

Note: tensor ranks share one seed, so their generators advance alike. Between a column-parallel
layer and the next row-parallel one, each rank holds different values and must draw different random
numbers. On entry to this region, a number is drawn, the generator's state is saved, and the
generator is seeded with the number and the rank. On exit, the state is restored.

Whether a generator is inside a region is encoded in its seed alone. If activations are recomputed
with the generator reset to its earlier state, the same random numbers therefore result, wherever
the recomputation begins or ends.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hpctrain.comm.communicator import Communicator

MAX_STATES = 256  # states: needed only for regions that are recomputed from their middle


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class RngRegion:
    """Region of a model in which tensor rank ``rank`` draws its own random numbers; ``generators`` are by device."""

    def __init__(self, rank: int, generators: Callable[[torch.device], torch.Generator] = generator_of) -> None:
        self.rank, self._generator_of = rank, generators
        self._states: OrderedDict[int, Tensor] = OrderedDict()  # states before entry, by the seeds since then
        self._devices: set[torch.device] = set()

    def enter(self, device: torch.device) -> bool:
        """Make the generator of a device draw for this rank only; return whether it did not already."""
        generator = self._generator_of(device)
        if generator.initial_seed() in self._states:
            return False
        number = _draw(generator)
        seed = number << 32 | hash32(number, self.rank)
        self._devices.add(device)
        self._states[seed] = generator.get_state()
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        generator.manual_seed(seed)
        return True

    def leave(self, device: torch.device) -> None:
        """Restore the generator of a device to its state before entry."""
        generator = self._generator_of(device)
        state = self._states.get(generator.initial_seed())
        if state is not None:
            generator.set_state(state)

    def end(self) -> None:
        """Leave the region on all devices: a forward pass may have been aborted inside."""
        for device in self._devices:
            self.leave(device)


@contextmanager
def restored_generators(devices: Iterable[torch.device]) -> Iterator[list[tuple[torch.Generator, Tensor]]]:
    """Restore the generators of devices after the ``with`` block; yield them with their states."""
    generators = [generator_of(device) for device in devices]
    saved = [(generator, generator.get_state()) for generator in generators]
    try:
        yield saved
    finally:
        for generator, state in saved:
            generator.set_state(state)


def synchronize_generators(comm: Communicator, *devices: torch.device) -> None:
    """Set the generators of devices to the state of rank 0. Collective."""
    for device in devices:
        generator = generator_of(device)
        generator.set_state(comm.broadcast(generator.get_state()))


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model has dropout: a dropout module, or a number called ``dropout``, above 0."""
    for module in model.modules():
        rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        if isinstance(rate, (int, float)) and rate > 0:
            return True
    return False


def _draw(generator: torch.Generator) -> int:
    """Return 32 bits from a generator and advance it, without waiting for its device."""
    if generator.device.type == "cpu":
        return int(torch.randint(2**32, (), dtype=torch.int64, generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # the offset counts in fours
    return hash32(generator.initial_seed(), offset)


def hash32(*numbers: int) -> int:
    """Return a 32-bit hash of numbers; a generator of the host uses no more bits of a seed."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")
