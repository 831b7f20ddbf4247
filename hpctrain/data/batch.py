"""A rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.data.dataset import Dataset, Indices

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
        """Return the batch with its tensors on a device."""
        inputs = self.inputs.to(device, non_blocking=non_blocking)
        return Batch(inputs, self.targets.to(device, non_blocking=non_blocking), self.weight, self.samples)


def take(dataset: Dataset, indices: Indices, rank: int, size: int) -> Batch:
    """Return a rank's contiguous share of a global batch; shares differ by at most one sample."""
    begin, end = _bounds(len(indices), rank, size)
    inputs, targets = dataset.batch(indices[begin:end])
    return Batch(inputs, targets, (end - begin) * size / len(indices), end - begin)


def _bounds(total: int, index: int, parts: int) -> tuple[int, int]:
    return total * index // parts, total * (index + 1) // parts
