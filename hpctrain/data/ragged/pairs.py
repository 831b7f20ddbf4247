"""Inputs and targets for ``hpctrain train`` from ragged files: inputs padded to the longest sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.data.dataset import Indices, check_indices
from hpctrain.data.ragged.batch import Column, put_blocks, put_rows
from hpctrain.data.ragged.dataset import RaggedDataset
from hpctrain.errors import DataError

SPLITS = ("train", "validation")
MANY = 1 << 16  # samples that are read at once to find the largest class


class RaggedPairs:
    """Samples of a split of ragged files: inputs of one size, with zeros after the end of shorter ones, and targets.

    Whole numbers with one dim are token ids, int64. ``uint8`` with more dims are images, which are divided by 255;
    all other inputs are float32. Targets have one size: classes, int64, or floats. The size of the inputs is that of
    the longest sample of both splits, so it depends neither on the batch nor on the number of ranks.
    """

    def __init__(self, files: Sequence[str], split: str, inputs: str, targets: str) -> None:
        """Open a split. Raises ``DataError`` if fields are missing, or targets have different sizes."""
        self.path, self._inputs, self._targets = ", ".join(files), inputs, targets
        names = dict.fromkeys((inputs, targets))
        both = {each: RaggedDataset(files, each, fields=list(names)) for each in {*SPLITS, split}}
        self._samples = both[split]
        self._size = _largest([each.largest(inputs) for each in both.values()])
        first = self._samples.__getitems__([0]).columns if len(self._samples) else {}
        if not first:
            raise DataError(f"{self.path}: /{split} is empty, needs at least 1 sample")
        for name in names:
            if first[name].kind:
                raise DataError(f"{self.path}: the field {name} is {first[name].kind}, allowed are numbers")
        if first[targets].lengths is not None:
            raise DataError(
                f"{self.path}: the targets ({targets}) have different sizes; hpctrain train takes targets of one size, "
                "own programs may return a sum and a count from the function of run.backward"
            )
        rows = first[inputs].rows
        self._tokens = not rows.dtype.is_floating_point and len(self._size) == 1
        self._image = rows.dtype == torch.uint8 and len(self._size) > 1
        self._classes = not first[targets].rows.dtype.is_floating_point
        outputs = int(np.prod(first[targets].rows.shape[1:]))
        if self._classes:
            outputs = 1 + max(_highest(each, targets, self.path) for each in both.values())
        self.facts: dict[str, Any] = {"input_shape": self._size, "outputs": outputs}
        if self._tokens:
            self.facts = {"vocab_size": 1 + max(_highest(each, inputs, self.path) for each in both.values())}

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs ``[len(indices), ...]`` and targets."""
        check_indices(indices, len(self), self.path)
        columns = self._samples.__getitems__(indices.tolist()).columns
        inputs = self._padded(columns[self._inputs])
        targets = columns[self._targets].rows
        return inputs, targets.to(torch.int64 if self._classes else torch.float32)

    def _padded(self, column: Column) -> Tensor:
        dtype = torch.int64 if self._tokens else torch.float32
        rows = column.rows.to(dtype)
        if self._image:
            rows = rows / 255
        padded = torch.zeros((len(column), *self._size), dtype=dtype)
        if column.lengths is None:
            padded[(slice(None), *map(slice, rows.shape[1:]))] = rows
        elif column.shapes is None:
            put_rows(padded, rows, column.lengths)
        else:
            put_blocks(padded, rows, column.lengths, column.shapes)
        return padded


def _largest(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(each) for each in zip(*sizes, strict=True))


def _highest(samples: RaggedDataset, field: str, path: str) -> int:
    """Return the highest value of a field of whole numbers."""
    lowest, highest = 0, -1
    for begin in range(0, len(samples), MANY):
        rows = samples.__getitems__(range(begin, min(begin + MANY, len(samples)))).columns[field].rows
        if len(rows):
            found = rows.to(torch.int64)
            lowest, highest = min(lowest, int(found.min())), max(highest, int(found.max()))
    if lowest < 0:
        raise DataError(f"{path}: the field {field} holds {lowest}, allowed are 0 and above")
    return highest
