"""Two random streams: one that is equal on all ranks, and one per sample and per step that differs between ranks.

Outside of steps a script draws from the generators as it has seeded them: initial weights, the
order of samples. These draws are equal on all ranks. Inside a step (dropout) and while a sample is
loaded (augmentation), the generators of torch and NumPy are seeded and afterwards restored. The
seed is derived from the run's seed and the position of the step or sample in the run. So a rank
draws other masks than its neighbours even if all of them call ``torch.manual_seed(0)``. The draws
of a step are independent of everything before it, and a resumed run repeats no draws. An evaluation within a step
draws from the outer stream, as in a plain loop, if a resumed run can repeat that.

In a step Python's ``random`` draws the same numbers on all ranks: scripts use it for decisions that
must be equal.

Note: reading and setting the state of NumPy's global generator takes 40 and 108 us, exchanging its
bit generator 3 us. The exchange loses the second number of a pair of normal ones, so that one is
restored separately.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator

_NUMPY_SEED = 2**32
_UNUSED = 624  # position in NumPy's Mersenne twister before its first draw
_GLOBAL: Any = np.random  # get_bit_generator and set_bit_generator have no type annotations


def mix_seed(*numbers: int) -> int:
    """Return a 63-bit seed that depends on all numbers and their order."""
    packed = struct.pack(f"<{len(numbers)}q", *(number % 2**63 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_sample(seed: int) -> None:
    """Seed the generators that transforms use: those of torch, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEED)
    random.seed(seed)


class RandomStreams:
    """Generators of this process, with an outer stream outside of steps and an inner stream within a step.

    ``seed`` is the run's seed. ``coordinates`` distinguishes this rank from those that must draw other
    numbers: its index on the data axis and its pipeline stage. ``drawn`` is called after an evaluation within a step
    has drawn from the outer stream; without it, evaluations leave the generators as they were.
    """

    entered: ClassVar[RandomStreams | None] = None  # those whose step is under way

    def __init__(self, seed: int = 0, coordinates: tuple[int, ...] = (0, 0)) -> None:
        self.seed, self.coordinates = seed, coordinates
        self._inner = np.random.MT19937(0)
        self._fresh: Tensor | None = None  # state of torch's generator when it was seeded last
        self._iteration, self._passes = 0, 0  # backward passes over a batch since enter_step
        self._saved: _OuterStream | None = None  # state of the outer stream while an inner one is in use
        self.drawn: Callable[[], object] | None = None

    @property
    def inside(self) -> bool:
        return self._saved is not None

    def enter_step(self, iteration: int) -> None:
        """Save the outer stream and seed the generators for an iteration, counted over the whole run."""
        self._save()
        self._iteration, self._passes = iteration, 0
        random.seed(mix_seed(self.seed, iteration))
        self._seed(mix_seed(self.seed, iteration, *self.coordinates))

    @contextmanager
    def microbatches(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that seeds the generators for a microbatch of this iteration, given by its index.

        After the ``with`` block, the draws of the iteration do not depend on the microbatches.
        """
        key = (self.seed, self._iteration, self._passes)
        self._passes += 1

        def seed(index: int) -> None:
            random.seed(mix_seed(*key, index))
            self._seed(mix_seed(*key, index, 0))

        yield seed
        seed(-1)

    def has_drawn(self) -> bool:
        """Return whether torch or NumPy has drawn numbers since the generators of this iteration were seeded."""
        if self._saved is None or self._fresh is None:
            return False
        position = _GLOBAL.get_bit_generator().state["state"]["pos"]
        return position != _UNUSED or not torch.equal(torch.default_generator.get_state(), self._fresh)

    def leave_step(self) -> None:
        """Restore the outer stream; no effect outside of a step."""
        if self._saved is not None:
            self._saved.restore()
            self._saved = None
            if RandomStreams.entered is self:
                RandomStreams.entered = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Save the outer stream while this process loads samples, whose transforms seed the generators themselves."""
        self._save()
        try:
            yield
        finally:
            self.leave_step()

    @contextmanager
    def outer(self) -> Iterator[None]:
        """Draw from the outer stream while an inner one is in use; afterwards the inner one must be seeded again."""
        inside = self.inside
        self.leave_step()
        try:
            yield
        finally:
            if inside:
                self._save()

    @contextmanager
    def outer_only(self) -> Iterator[None]:
        """Draw from the outer stream in the ``with`` block; the inner stream continues as if nothing was drawn."""
        inner, inside = _TorchAndPython(), self.inside
        self.leave_step()
        try:
            yield
        finally:
            if inside:
                self._save()  # NumPy's inner generator is a separate object, whose state has not changed
                inner.restore()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Restore all generators at the end of the ``with`` block, if it is within a step that must not notice it."""
        state = OuterState() if self.inside and self.drawn is None else None
        try:
            yield
        finally:
            if state is not None:
                state.restore()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Draw from the outer stream in this part of an evaluation."""
        if not self.inside or self.drawn is None:
            yield
            return
        with self.outer_only():
            yield
            self.drawn()

    def _save(self) -> None:
        if self._saved is None:
            self._saved = _OuterStream(self._inner)
            RandomStreams.entered = RandomStreams.entered or self

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % _NUMPY_SEED)
        self._fresh = torch.default_generator.get_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)


class _TorchAndPython:
    """States of the generators of torch (host and device) and Python at one moment."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda: Tensor | None = torch.cuda.get_rng_state() if on_device else None

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._cuda is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(self._cuda)


class _OuterStream(_TorchAndPython):
    """Saved state of the outer stream of torch, Python and NumPy, whose bit generator is exchanged for another."""

    def __init__(self, inner: np.random.MT19937) -> None:
        super().__init__()
        state = np.random.get_state(legacy=False)
        self._gauss = (state["has_gauss"], state["gauss"]) if state["has_gauss"] else None
        self._numpy = _GLOBAL.get_bit_generator()
        _GLOBAL.set_bit_generator(inner)

    def restore(self) -> None:
        super().restore()
        _GLOBAL.set_bit_generator(self._numpy)
        if self._gauss is not None:
            state: Any = np.random.get_state(legacy=False)
            state["has_gauss"], state["gauss"] = self._gauss
            np.random.set_state(state)


class OuterState(_TorchAndPython):
    """States of the generators of torch, Python and NumPy at one moment; it can be sent to another rank."""

    def __init__(self) -> None:
        super().__init__()
        self._numpy = np.random.get_state(legacy=False)

    def restore(self) -> None:
        super().restore()
        np.random.set_state(self._numpy)


def broadcast_generators(comm: Communicator) -> None:
    """Set the generators of all ranks to the state of rank 0. Collective."""
    outer = comm.broadcast_object(OuterState())
    if comm.rank:
        outer.restore()
