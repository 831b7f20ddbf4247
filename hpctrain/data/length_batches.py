"""Batches of samples of similar sizes, in an order that depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hpctrain.data.loader import SampleOrder
from hpctrain.errors import DataError, SettingsError

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
        if batch < 1 or window < 1 or (most is not None and most < 1):
            raise SettingsError(f"batches of {batch} samples, most {most}, window {window}: each must be 1 or more")
        longest = int(self.lengths.max())
        if most is not None and longest > most:
            raise DataError(
                f"sample {int(self.lengths.argmax())} has the length {longest}, more than the {most} of a whole batch; "
                "raise it, or leave out longer samples by torch.utils.data.Subset"
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
