"""Order of the samples as a function of seed and position alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpctrain.errors import SettingsError


class SampleOrder:
    """Endless sequence of sample indices: every epoch is a permutation of its own of all ``length`` samples.

    Position p is in epoch ``p // length``. Epoch e is
    ``Generator(PCG64([seed, e])).permutation(length)``, so any position can be computed without the
    previous ones, on any number of ranks.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        if length < 1 or seed < 0:
            raise SettingsError(f"order of {length} samples with seed {seed}: needs at least 1 sample and a seed >= 0")
        self.length, self.seed = length, seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the samples at positions ``start`` to ``start + count - 1``, across the boundaries of epochs."""
        pieces = [self._permutation[:0]]
        while count > 0:
            epoch, offset = divmod(start, self.length)
            piece = self._shuffled(epoch)[offset : offset + count]
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._permutation = epoch, generator.permutation(self.length)
        return self._permutation
