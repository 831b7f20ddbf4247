"""Loader that divides global batches over the ranks, in an order that depends on seed and position alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpctrain.data.dataset import Dataset, Indices
from hpctrain.data.orders import SampleOrder
from hpctrain.errors import DataError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples of one rank in one step, and their weight.

    ``weight`` is local samples x ranks / global samples. The average over the ranks of weight x
    (mean loss of the local samples) is the mean loss of the global batch. This also holds if ranks
    have different numbers of samples; the weight is 1 if all have the same number. A rank without
    samples has weight 0. The mean of an empty tensor is NaN: the loss of that rank is best written
    as ``0 * outputs.sum()``, which still runs every backward hook.
    """

    inputs: Tensor
    targets: Tensor
    weight: float
    samples: int

    def split(self, count: int) -> list[Batch]:
        """Return microbatches, in order, whose weights add up to that of the batch; sizes differ by at most one."""
        pieces = []
        for index in range(count):
            begin, end = _bounds(self.samples, index, count)
            weight = self.weight * (end - begin) / self.samples if self.samples else 0.0
            pieces.append(Batch(self.inputs[begin:end], self.targets[begin:end], weight, end - begin))
        return pieces

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        inputs = self.inputs.to(device, non_blocking=non_blocking)
        return Batch(inputs, self.targets.to(device, non_blocking=non_blocking), self.weight, self.samples)


def take(dataset: Dataset, indices: Indices, rank: int, size: int, microbatch: int = 1) -> Batch:
    """Return a rank's contiguous share of a global batch; shares differ by at most one microbatch."""
    total = len(indices)
    first, last = _bounds(-(-total // microbatch), rank, size)
    begin, end = min(first * microbatch, total), min(last * microbatch, total)
    inputs, targets = dataset.batch(indices[begin:end])
    return Batch(inputs, targets, (end - begin) * size / len(indices), end - begin)


def _bounds(total: int, index: int, parts: int) -> tuple[int, int]:
    return total * index // parts, total * (index + 1) // parts


class Loader:
    """Iterator over a rank's shares of the global batches, endless or for a number of epochs.

    Without ``epochs`` the stream crosses the boundaries of epochs and every batch is full. With
    ``epochs`` each epoch is divided into its own batches; the remaining samples at its end are
    dropped, or with ``drop_last=False`` form a smaller batch whose shares may differ by one sample
    (see ``Batch.weight``).

    ``position`` counts samples of the whole run over all ranks; it is the only state.

    Batches are read when they are requested, or with ``prefetch`` by a thread, as many ahead. The dataset must then
    draw no random numbers. A window of a memory map takes microseconds, and on a full node a thread takes a core from
    the compute.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        position: int = 0,
        microbatches: int = 1,
        epochs: int | None = None,
        drop_last: bool = True,
        microbatch: int = 0,
        prefetch: int = 0,
    ) -> None:
        """Check that ``batch`` samples can be divided evenly over ``size`` ranks x ``microbatches``.

        With ``microbatch``, shares are whole microbatches of this many samples, and may differ by
        one.
        """
        if not microbatch:
            check_batch(batch, size, microbatches)
        if not 0 <= rank < size:
            raise SettingsError(f"rank {rank} of {size}: ranks are numbered 0 to {size - 1}")
        if position < 0 or (epochs is not None and epochs < 1):
            raise SettingsError(f"position {position} and epochs {epochs}: allowed are 0 or more, and 1 or more")
        if epochs is not None and drop_last and len(dataset) < batch:
            raise DataError(f"{len(dataset)} samples do not fill a batch of {batch}: take a smaller one or more data")
        self.dataset, self.batch, self.rank, self.size = dataset, batch, rank, size
        self.microbatches, self.epochs, self.drop_last = microbatches, epochs, drop_last
        self.microbatch = microbatch or 1
        self.position = position
        self._order = SampleOrder(len(dataset), seed)
        self._ahead = ReadAhead(prefetch)

    @property
    def epoch(self) -> int:
        """Return the number of complete epochs before the position."""
        return self.position // len(self.dataset)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """Return this rank's share of the next global batch and advance the position."""
        share, self.position = self._ahead(self.position, self._read, (self.rank, self.size))
        return share

    def _read(self, position: int) -> tuple[Batch, int]:
        """Return the batch at a position, and the position after it."""
        position, count = self._bounds(position)
        indices = self._order.indices(position, count)
        return take(self.dataset, indices, self.rank, self.size, self.microbatch), position + count

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data: plain numbers, the same on every rank, for any batch size."""
        return {"position": self.position, "seed": self._order.seed, "samples": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of a run. Raises ``DataError`` if the order or the data differ."""
        mine = self.state_dict()
        missing = sorted(set(mine) - set(state))
        if missing:
            raise DataError(f"the saved position in the data lacks {', '.join(missing)}")
        for key, what in (("seed", "order"), ("samples", "data")):
            if state[key] != mine[key]:
                raise DataError(
                    f"cannot resume with different {what}: the run had {key} = {state[key]}, this one has {mine[key]}"
                )
        if int(state["position"]) < 0:
            raise DataError(f"the saved position in the data is {state['position']}, expected 0 or more")
        self.position = int(state["position"])

    def _bounds(self, position: int) -> tuple[int, int]:
        """Return the position of the next global batch after dropped samples, and its size."""
        if self.epochs is None:
            return position, self.batch
        left = len(self.dataset) - position % len(self.dataset)
        if self.drop_last and left < self.batch:
            position += left
            left = len(self.dataset)
        if position >= self.epochs * len(self.dataset):
            raise StopIteration
        return position, min(self.batch, left)


# Reading ahead -------------------------------------------------------------------------------------------------------


T = TypeVar("T")
Read = Callable[[int], tuple[T, int]]  # returns what is at a position, and the next position


class ReadAhead:
    """Function that returns what is at a position, and lets a thread read what follows, ``depth`` times ahead.

    Without ``depth``, there is no thread. Errors are raised when what could not be read is due.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[Any]] = deque()
        self._expected: object = None  # position of the first one of these, and how it is divided

    def __call__(self, position: int, read: Read[T], division: object = None) -> tuple[T, int]:
        """Return what is at ``position``, and the next position; what was read for another ``division`` is dropped."""
        if not self._depth:
            return read(position)
        if self._expected != (position, division):  # the first one, or the run goes back, or ranks have died
            self._pending.clear()
        if not self._pending:
            self._submit(lambda: read(position))
        for _ in range(self._depth + 1 - len(self._pending)):
            before = self._pending[-1]
            self._submit(lambda before=before: read(before.result()[1]))  # type: ignore[misc]
        self._expected = None
        found: tuple[T, int] = self._pending.popleft().result()
        self._expected = found[1], division
        return found

    def _submit(self, call: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="hpctrain-read-ahead")
        self._pending.append(self._thread.submit(call))


def check_batch(batch: int, size: int, microbatches: int = 1) -> None:
    """Raise ``SettingsError`` unless all ranks get the same number of samples in each of their microbatches."""
    if batch < 1 or size < 1 or microbatches < 1:
        raise SettingsError(f"batch of {batch} for {size} ranks x {microbatches} microbatches: each must be 1 or more")
    unit = size * microbatches
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        parts = f"{size} ranks" + (f" x {microbatches} microbatches" if microbatches > 1 else "")
        nearest = f"{below} and {above}" if below else f"{above}"
        raise SettingsError(
            f"a batch of {batch} samples cannot be divided evenly over {parts}: nearest are {nearest} samples"
        )


def evaluation_batches(
    dataset: Dataset, *, batch: int, rank: int = 0, size: int = 1, limit: int | None = None, microbatch: int = 1
) -> Iterator[Batch]:
    """Yield a rank's shares of at most ``limit`` samples, with ``batch`` samples at a time over all ranks.

    With a limit, the samples are always the same ones, spread evenly over the split: its beginning
    alone would be the documents whose names sort first. Every rank gets the same number of batches,
    so that a forward pass may communicate. Shares differ by at most one ``microbatch`` and may be empty. To
    compute the mean loss of the split, add up ``mean loss x samples`` and ``samples`` over batches
    with samples, then over ranks, and divide.
    """
    if batch < 1 or (limit is not None and limit < 1):
        raise SettingsError(f"evaluation with batch {batch} and limit {limit}: each must be 1 or more")
    total = len(dataset)
    count = total if limit is None else min(limit, total)
    chosen = np.arange(count, dtype=np.int64) * total // count
    for start in range(0, count, batch):
        yield take(dataset, chosen[start : start + batch], rank, size, microbatch)
