"""Interface of datasets, and the concatenation of several files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Indices = npt.NDArray[np.int64]


class Dataset(Protocol):
    """A numbered set of samples that returns several of them at once; users may provide their own."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples; the first dimension is in the order of ``indices``."""


class FileDataset(Dataset, Protocol):
    """A dataset with its file and the facts about its samples that a model needs."""

    @property
    def path(self) -> str:
        """Return the path of the file."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the keyword arguments for ``hpctrain.models.build``: vocabulary, or shapes."""


class JoinedDataset:
    """Concatenation of several datasets; all must have the same facts for a model."""

    def __init__(self, parts: Sequence[FileDataset]) -> None:
        for part in parts[1:]:
            if part.facts != parts[0].facts:
                raise DataError(
                    f"data files do not fit together: {parts[0].path} has {parts[0].facts}, "
                    f"{part.path} has {part.facts}"
                )
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    @property
    def path(self) -> str:
        """Return the paths of the files."""
        return ", ".join(part.path for part in self._parts)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that a model needs, which all parts have in common."""
        return self._parts[0].facts

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples from the files that contain them."""
        import torch

        check_indices(indices, len(self), self.path)
        owners = np.searchsorted(self._ends, indices, side="right")
        rows = [np.flatnonzero(owners == owner) for owner in range(len(self._parts))]
        begins = [0, *self._ends[:-1]]
        found = [part.batch(indices[row] - begin) for part, row, begin in zip(self._parts, rows, begins)]
        back = torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable"))
        inputs, targets = (torch.cat(pieces)[back] for pieces in zip(*found))
        return inputs, targets


def check_indices(indices: Indices, length: int, path: str) -> None:
    """Raise ``DataError`` for a sample that does not exist."""
    if len(indices) and not (0 <= indices.min() and indices.max() < length):
        wrong = indices.min() if indices.min() < 0 else indices.max()
        raise DataError(f"no sample {wrong} in {path}: samples are numbered 0 to {length - 1}")
