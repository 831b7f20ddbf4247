"""Let dropout draw alike on all tensor ranks where they hold the same, and apart where each holds its own.

Note: tensor ranks share one seed, so their generators go the same way. Between a column-parallel layer and the next
row-parallel one each rank holds other numbers and must draw others: on entering, a number is drawn, the generator's
state is kept, and the generator is seeded with the number and the rank; on leaving, the state comes back. Where a
generator stands is written in its seed alone. So when activations are computed again, with the generator set back to
where it was, everything happens once more by itself, wherever in between that begins or ends.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from hpctrain.collectives.communicator import Communicator

KEPT = 256  # states: only for regions that are computed again from their middle


class Region:
    """Be the part of a model in which tensor rank ``rank`` draws for itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._states: OrderedDict[int, Tensor] = OrderedDict()  # before generators entered, by their seeds since
        self._devices: set[torch.device] = set()

    def enter(self, device: torch.device) -> bool:
        """Let the generator of a device draw for this rank alone; tell whether it did not already."""
        generator = generator_of(device)
        if generator.initial_seed() in self._states:
            return False
        number = _number(generator)
        seed = number << 32 | mixed(number, self.rank)
        self._devices.add(device)
        self._states[seed] = generator.get_state()
        if len(self._states) > KEPT:
            self._states.popitem(last=False)
        generator.manual_seed(seed)
        return True

    def leave(self, device: torch.device) -> None:
        """Let the generator of a device go on as if this rank had not drawn for itself."""
        generator = generator_of(device)
        state = self._states.get(generator.initial_seed())
        if state is not None:
            generator.set_state(state)

    def end(self) -> None:
        """Leave wherever this rank is inside: a forward pass may have been broken off."""
        for device in self._devices:
            self.leave(device)

    @contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        """Enter for the length of a ``with`` block, unless that has happened."""
        entered = self.enter(device)
        try:
            yield
        finally:
            if entered:
                self.leave(device)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that dropout on a device draws from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def agree(comm: Communicator, *devices: torch.device) -> None:
    """Let the generators of devices go on from where those of rank 0 are."""
    for device in devices:
        generator = generator_of(device)
        generator.set_state(comm.broadcast(generator.get_state()))


def can_drop(model: nn.Module) -> bool:
    """Tell whether anything in a model draws: a dropout module, or a number called ``dropout``, above 0."""
    for module in model.modules():
        rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        if isinstance(rate, (int, float)) and rate > 0:
            return True
    return False


def _number(generator: torch.Generator) -> int:
    """Return 32 bits of a generator, which goes on, without waiting for its device."""
    if generator.device.type == "cpu":
        return int(torch.randint(2**32, (), dtype=torch.int64, generator=generator))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # it counts in fours
    return mixed(generator.initial_seed(), offset)


def mixed(*numbers: int) -> int:
    """Return 32 bits that follow from numbers; a generator of the host takes no more of a seed."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")
