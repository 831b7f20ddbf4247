"""Orders of samples and of batches: functions of seed and epoch, with direct access to any position."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, SettingsError


class SampleOrder:
    """Endless sequence of sample indices: every epoch is a permutation of its own of all ``length`` samples.

    Position p is in epoch ``p // length``. Epoch e is ``Generator(PCG64([seed, e])).permutation(length)``, above
    ``most_held`` samples an ``IndexPermutation``, which needs no memory. So any position can be computed without the
    previous ones, on any number of ranks.
    """

    most_held = 1 << 20  # samples of which the permutation of an epoch is held in memory: 8 MiB per rank

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
            piece = self._piece(epoch, offset, min(offset + count, self.length))
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def _piece(self, epoch: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        if self.length > self.most_held:
            return IndexPermutation(self.length, self.seed, epoch)(np.arange(begin, end))
        return self._shuffled(epoch)[begin:end]

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._permutation = epoch, generator.permutation(self.length)
        return self._permutation


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


class BatchOrder:
    """Batch sampler with direct access to any batch of any epoch."""

    def __init__(self, samples: int, batch: int, *, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.samples, self.batch, self.shuffle, self.drop_last = samples, batch, shuffle, drop_last
        self.epoch = 0
        self._order = SampleOrder(samples, seed)

    def __len__(self) -> int:
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        return self.start_at(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def start_at(self, number: int) -> Iterator[list[int]]:
        """Yield the batches of this epoch from batch ``number`` on."""
        for index in range(number, len(self)):
            begin = index * self.batch
            end = min(begin + self.batch, self.samples)
            if self.shuffle:
                yield self._order.indices(self.epoch * self.samples + begin, end - begin).tolist()
            else:
                yield list(range(begin, end))


WINDOW = 64  # batches whose samples are sorted by length together


class LengthBatches:
    """Batch sampler of samples of similar lengths, for padding that wastes little.

    Each epoch shuffles all samples, sorts each ``window`` batches of them by length, cuts them into batches, and
    shuffles these. With ``most`` (such as tokens), a batch has as many samples as fit, padded to the longest of them,
    but at most ``batch``. It is passed to a ``DataLoader`` as ``batch_sampler``; ``job.loader(lengths=...)`` makes one.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        batch: int,
        *,
        most: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        window: int = WINDOW,
    ) -> None:
        self.lengths = np.asarray(lengths)
        if self.lengths.ndim != 1 or self.lengths.dtype.kind not in "iu" or not len(self.lengths):
            raise DataError(
                f"lengths are {self.lengths.dtype} of shape {self.lengths.shape}, expected one whole number per sample"
            )
        if int(self.lengths.min()) < 0:
            raise DataError(f"lengths hold {int(self.lengths.min())}, allowed are 0 and above")
        if batch < 1 or window < 1 or (most is not None and most < 1):
            raise SettingsError(f"batches of {batch} samples, most {most}, window {window}: each must be 1 or more")
        longest = int(self.lengths.max())
        if most is not None and longest > most:
            raise DataError(
                f"sample {int(self.lengths.argmax())} has the length {longest}, more than the {most} of a whole batch; "
                "raise most, or leave out longer samples by torch.utils.data.Subset"
            )
        self.batch, self.most, self.shuffle, self.drop_last, self.window = batch, most, shuffle, drop_last, window
        self.epoch = 0
        self._order = SampleOrder(len(self.lengths), seed)
        self._count: tuple[int, int] = (-1, 0)  # an epoch, and the number of its batches

    @property
    def samples(self) -> int:
        return len(self.lengths)

    def __len__(self) -> int:
        """Return the number of batches of the epoch."""
        if self.most is None:
            return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)
        if self._count[0] != self.epoch:
            self._count = self.epoch, sum(len(self._cut(number)) for number in range(self._windows))
        return self._count[1]

    def __iter__(self) -> Iterator[list[int]]:
        return self.start_at(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def start_at(self, number: int) -> Iterator[list[int]]:
        """Yield the batches of this epoch from batch ``number`` on."""
        first = 0
        if self.most is None:  # all windows but the last have the same number of batches
            first, number = divmod(number, self.window)
        for window in range(first, self._windows):
            batches = self._cut(window)
            if number >= len(batches):
                number -= len(batches)
                continue
            for batch in self._shuffled(window, batches)[number:]:
                yield batch.tolist()
            number = 0

    @property
    def _windows(self) -> int:
        return -(-self.samples // (self.batch * self.window))

    def _cut(self, window: int) -> list[npt.NDArray[np.int64]]:
        """Return the batches of a window, from short to long samples."""
        begin = window * self.batch * self.window
        drops = self.drop_last and self.most is None
        end = min(begin + self.batch * self.window, len(self) * self.batch if drops else self.samples)
        chosen = np.arange(begin, end)
        if self.shuffle:
            chosen = self._order.indices(self.epoch * self.samples + begin, end - begin)
        lengths = self.lengths[chosen]
        order = np.argsort(lengths, kind="stable")
        chosen, lengths = chosen[order], lengths[order]
        if self.most is None:
            bounds = list(range(0, len(chosen), self.batch))
        else:
            bounds = self._fitting(lengths, self.most)
        return np.split(chosen, bounds[1:]) if len(chosen) else []

    def _fitting(self, lengths: npt.NDArray[np.int64], most: int) -> list[int]:
        """Return the beginnings of batches whose samples fit when they are padded; ``lengths`` ascend."""
        bounds, begin = [0], 0
        for place, length in enumerate(lengths.tolist()):
            if (place + 1 - begin) * length > most or place - begin == self.batch:
                bounds.append(place)
                begin = place
        return bounds

    def _shuffled(self, window: int, batches: list[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
        if not self.shuffle:
            return batches
        draw = np.random.Generator(np.random.PCG64([self._order.seed, self.epoch, window]))
        # The last batch may be smaller: it stays the last, as in other loaders.
        whole = sum(len(batch) == self.batch for batch in batches) if self.most is None else len(batches)
        return [batches[number] for number in draw.permutation(whole).tolist()] + batches[whole:]
