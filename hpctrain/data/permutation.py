"""Permutation of very many numbers of which any part is computed without the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of the SplitMix64 generator


class IndexPermutation:
    """Permutation of the numbers below ``length``, a function of ``seed`` and ``epoch``, in memory for a few bytes.

    It is a Feistel network over the next power of four: each round replaces one half of the bits by its sum with a
    hash of the other half and a key, which is invertible for any hash. Numbers that come out too large go through
    the network again until they fit, so that each number below ``length`` comes out once.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self.length = length
        self._bits = max((max(length - 1, 1).bit_length() + 1) // 2, 1)  # of each half
        self._mask = np.uint64((1 << self._bits) - 1)
        draw = np.random.Generator(np.random.PCG64([seed, epoch]))
        self._keys = draw.integers(0, 1 << 64, ROUNDS, dtype=np.uint64)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers at positions, which are below ``length``."""
        found = self._network(positions.astype(np.uint64))
        outside = np.flatnonzero(found >= self.length)
        while len(outside):
            found[outside] = self._network(found[outside])
            outside = outside[found[outside] >= self.length]
        return found.astype(np.int64)

    def _network(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        bits = np.uint64(self._bits)
        left, right = numbers >> bits, numbers & self._mask
        for key in self._keys:
            left, right = right, (left + _hash(right ^ key)) & self._mask
        return (left << bits) | right


def _hash(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number, modulo 2 ** 64."""
    shifts = (np.uint64(30), np.uint64(27), np.uint64(31))
    for shift, multiplier in zip(shifts, _MULTIPLIERS):
        numbers = (numbers ^ (numbers >> shift)) * multiplier
    return numbers ^ (numbers >> shifts[2])
