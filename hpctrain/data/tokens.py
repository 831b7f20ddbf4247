"""Dataset of token windows from a packed corpus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

from hpctrain.data.dataset import Indices, check_indices
from hpctrain.data.hdf5 import attribute, check_whole, dataset_of, map_dataset, open_file
from hpctrain.data.pack import FORMAT, FORMAT_VERSION
from hpctrain.errors import DataError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor

_SCAN_BLOCK = 1 << 20  # tokens
_SCAN_BLOCKS = 64


class TokenDataset:
    """Windows of ``context + 1`` tokens, each starting where the inputs of the previous one end.

    Inputs are a window without its last token, targets the same window without its first. So every
    token of the split except the first is a target exactly once (up to a tail shorter than the
    context).
    """

    def __init__(self, path: str | Path, split: str, context: int) -> None:
        """Open and check a split of a token file. Raises ``DataError`` with the fault and the allowed values."""
        if context < 1:
            raise SettingsError(f"context of {context} tokens: allowed is 1 or more")
        self.path, self.split, self.context = str(path), split, context
        file = open_file(path)
        self.vocab_size = _vocab_size(file)
        tokens = dataset_of(file, f"{split}/tokens")
        self._check_layout(tokens)
        mapped = map_dataset(tokens)
        self._tokens: Any = tokens if mapped is None else mapped
        if mapped is not None:
            file.close()
        self._scan()

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that a model needs: the size of the vocabulary."""
        return {"vocab_size": self.vocab_size}

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the split."""
        return len(self._tokens)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.context

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 of shape ``[len(indices), context]``."""
        import torch

        check_indices(indices, len(self), self.path)
        windows = np.empty((len(indices), self.context + 1), np.int64)
        check_whole(self._tokens, self.path)
        for row, index in enumerate(indices):
            start = int(index) * self.context
            windows[row] = self._tokens[start : start + self.context + 1]
        self._check_range(windows)
        inputs, targets = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _check_layout(self, tokens: h5py.Dataset) -> None:
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise DataError(
                f"{self.path}: /{self.split}/tokens is {tokens.dtype} with {tokens.ndim} dims, "
                "allowed are integers (u1, u2, i4, ...) with 1 dim"
            )
        if len(tokens) <= self.context:
            raise DataError(
                f"{self.path}: /{self.split}/tokens has {len(tokens)} tokens, too short for a context of "
                f"{self.context}: needs {self.context + 1}"
            )

    def _scan(self) -> None:
        """Check for ids beyond the vocabulary: all tokens of small files, blocks spread evenly over large ones.

        A corpus may be too large to read before the first step; ``batch`` checks the tokens that it
        returns.
        """
        if np.iinfo(self._tokens.dtype).max < self.vocab_size and np.iinfo(self._tokens.dtype).min == 0:
            return
        last = max(len(self._tokens) - _SCAN_BLOCK, 0)
        blocks = min(-(-len(self._tokens) // _SCAN_BLOCK), _SCAN_BLOCKS)
        for start in np.linspace(0, last, blocks, dtype=np.int64):
            self._check_range(self._tokens[start : start + _SCAN_BLOCK])

    def _check_range(self, tokens: Any) -> None:
        if tokens.size and not (0 <= tokens.min() and tokens.max() < self.vocab_size):
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise DataError(
                f"{self.path}: /{self.split}/tokens holds the id {wrong}, allowed are 0 to {self.vocab_size - 1} "
                "(vocab_size of the file)"
            )


def _vocab_size(file: h5py.File) -> int:
    """Return the vocabulary size in a token file. Raises ``DataError`` if the file is not a token file."""
    kind, version = attribute(file, "format"), attribute(file, "format_version")
    if kind != FORMAT:
        raise DataError(
            f"{file.filename} is not a token file: its format attribute is {kind!r}, expected {FORMAT!r} "
            "(hpctrain data pack makes such files)"
        )
    if version != FORMAT_VERSION:
        raise DataError(f"{file.filename} has format version {version}, this hpctrain reads {FORMAT_VERSION}")
    size = attribute(file, "vocab_size")
    if not isinstance(size, int) or size < 1:
        raise DataError(f"{file.filename} declares vocab_size {size!r}, expected a whole number above 0")
    return size
