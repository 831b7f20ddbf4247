"""Datasets: their interface, windows of tokens, images or vectors with targets, and the concatenation of files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.data.hdf5 import BLOCK, attribute, check_whole, dataset_of, find_dataset, map_dataset, open_file
from hpctrain.data.pack import FORMAT, FORMAT_VERSION, SEPARATOR, TOKENIZER, new_file
from hpctrain.errors import DataError, SettingsError

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
        self.path, self.facts = ", ".join(part.path for part in parts), parts[0].facts
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        import torch

        check_indices(indices, len(self), self.path)
        owners = np.searchsorted(self._ends, indices, side="right")
        rows = [np.flatnonzero(owners == owner) for owner in range(len(self._parts))]
        begins = [0, *self._ends[:-1]]
        found = [part.batch(indices[row] - begin) for part, row, begin in zip(self._parts, rows, begins)]
        back = torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable"))
        inputs, targets = (torch.cat(pieces)[back] for pieces in zip(*found))
        return inputs, targets

    def hold(self, replace: Callable[[Any], Any]) -> None:
        """Replace each array by what a function returns for it."""
        for part in self._parts:
            holder: Any = part
            holder.hold(replace)


def check_indices(indices: Indices, length: int, path: str) -> None:
    if len(indices) and not (0 <= indices.min() and indices.max() < length):
        wrong = indices.min() if indices.min() < 0 else indices.max()
        raise DataError(f"no sample {wrong} in {path}: samples are numbered 0 to {length - 1}")


class TokenDataset:
    """Windows of ``context + 1`` tokens, each starting where the inputs of the previous one end.

    Inputs are a window without its last token, targets the same window without its first. So every
    token of the split except the first is a target exactly once (up to a tail shorter than the
    context).
    """

    scan_block = 1 << 20  # tokens
    scan_blocks = 64
    scan_documents = 1024

    def __init__(self, path: str | Path, split: str, context: int, *, documents: bool = False) -> None:
        """Open and check a split of a token file; with ``documents``, ``facts`` contain the separator.

        Raises ``DataError`` with the fault and the allowed values.
        """
        if context < 1:
            raise SettingsError(f"context of {context} tokens: allowed is 1 or more")
        self.path, self.split, self.context = str(path), split, context
        file = open_file(path)
        self.vocab_size = _vocab_size(file)
        self.facts = {"vocab_size": self.vocab_size}
        tokens = dataset_of(file, f"{split}/tokens")
        self._check_layout(tokens)
        self._tokens = map_dataset(tokens)
        if documents:
            self.facts["separator"] = _separator(file, self.vocab_size)
            offsets = _offsets(file, split, len(tokens))
        if not isinstance(self._tokens, h5py.Dataset):
            file.close()
        self._scan()
        if documents:
            self._check_separator(offsets, self.facts["separator"])

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

    def hold(self, replace: Callable[[Any], Any]) -> None:
        """Replace the array of tokens by what a function returns for it."""
        self._tokens = replace(self._tokens)

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
        last = max(len(self._tokens) - self.scan_block, 0)
        blocks = min(-(-len(self._tokens) // self.scan_block), self.scan_blocks)
        for start in np.linspace(0, last, blocks, dtype=np.int64):
            self._check_range(self._tokens[start : start + self.scan_block])

    def _check_separator(self, offsets: Indices, separator: int) -> None:
        """Check that documents end with the separator, for documents spread evenly over the split."""
        for end in offsets[np.linspace(0, len(offsets) - 1, min(len(offsets), self.scan_documents), dtype=np.int64)]:
            if end and self._tokens[end - 1] != separator:
                raise DataError(
                    f"{self.path}: /{self.split}: the document before token {end} ends with the token "
                    f"{self._tokens[end - 1]}, not with the separator {separator}; data.document_masks = true needs "
                    "the separator at the end of each document; correct the attribute separator, or pack the file again"
                )

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


def _separator(file: h5py.File, vocab_size: int) -> int:
    """Return the token that ends each document. Raises ``DataError`` if the file does not define it."""
    found = attribute(file, "separator")
    if found is None and (tokenizer := attribute(file, "tokenizer")) != TOKENIZER:
        raise DataError(
            f"{file.filename} has no attribute separator, and its tokenizer is {tokenizer!r}; data.document_masks = "
            f"true needs the token that ends each document (known for {TOKENIZER!r}); write it as the attribute "
            "separator of the file, or remove the setting"
        )
    separator = SEPARATOR[0] if found is None else found
    if not isinstance(separator, int) or not 0 <= separator < vocab_size:
        raise DataError(
            f"{file.filename} declares separator {separator!r}, allowed are 0 to {vocab_size - 1} "
            "(vocab_size of the file)"
        )
    return separator


def _offsets(file: h5py.File, split: str, tokens: int) -> Indices:
    """Return the starts of the documents of a split, and the end of the last one; empty if the file has none."""
    found = find_dataset(file, f"{split}/offsets")
    if found is None:
        return np.empty(0, np.int64)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise DataError(
            f"{file.filename}: /{split}/offsets is {found.dtype} with {found.ndim} dims, expected 1 of int64"
        )
    offsets = np.asarray(map_dataset(found)[:]).astype(np.int64)
    if len(offsets) and not (0 <= offsets.min() and offsets.max() <= tokens):
        raise DataError(f"{file.filename}: /{split}/offsets are beyond the {tokens} tokens of the split")
    return offsets


ARRAY_FORMAT = "hpctrain-arrays"
ARRAY_VERSION = 1
Pair = tuple[npt.ArrayLike, npt.ArrayLike]


class ArrayDataset:
    """Samples of a split of plain HDF5 arrays: inputs as float32, targets as int64 classes or float32.

    The file contains ``/train/inputs``, ``/train/targets`` and the same under ``/validation``.
    Inputs are ``[n, ...]``: uint8 images (scaled to 0..1) or floats; images are ``[n, height,
    width]`` or ``[n, channels, height, width]``. Targets are classes, integers of shape ``[n]``, or
    floats ``[n, ...]``.
    """

    def __init__(self, path: str | Path, split: str) -> None:
        """Open and check a split of an array file. Raises ``DataError`` with the fault and the allowed values."""
        self.path, self.split = str(path), split
        file = open_file(path)
        kind = attribute(file, "format", ARRAY_FORMAT)
        if kind != ARRAY_FORMAT:
            raise DataError(f"{path} is not an array file: its format attribute is {kind!r}, expected {ARRAY_FORMAT!r}")
        inputs, targets = dataset_of(file, f"{split}/inputs"), dataset_of(file, f"{split}/targets")
        _check(str(path), split, inputs, targets)
        self._classes = targets.dtype.kind in "iu"
        outputs = _count_classes(file, split) if self._classes else int(np.prod(targets.shape[1:]))
        # A model needs the shape of an input and the number of outputs per target.
        self.facts: dict[str, Any] = {"input_shape": tuple(map(int, inputs.shape[1:])), "outputs": outputs}
        self._inputs, self._targets = map_dataset(inputs), map_dataset(targets)
        if not isinstance(self._inputs, h5py.Dataset) and not isinstance(self._targets, h5py.Dataset):
            file.close()

    def __len__(self) -> int:
        return len(self._inputs)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs ``[len(indices), ...]`` in float32 and targets in int64 or float32."""
        import torch

        check_indices(indices, len(self), self.path)
        for array in (self._inputs, self._targets):
            check_whole(array, self.path)
        rows = _rows(self._inputs, indices)
        inputs = rows.astype(np.float32)
        if rows.dtype == np.uint8:
            inputs /= np.float32(255)
        targets = _rows(self._targets, indices).astype(np.int64 if self._classes else np.float32)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def hold(self, replace: Callable[[Any], Any]) -> None:
        """Replace the arrays of inputs and targets by what a function returns for them."""
        self._inputs, self._targets = replace(self._inputs), replace(self._targets)


def write_arrays(path: str | Path, *, train: Pair, validation: Pair) -> None:
    """Write an array file of two ``(inputs, targets)`` pairs; an existing file is replaced atomically."""
    splits = {"train": train, "validation": validation}
    with new_file(Path(path), ARRAY_FORMAT, ARRAY_VERSION) as file:
        for split, pair in splits.items():
            for name, values in zip(("inputs", "targets"), pair):
                array = np.ascontiguousarray(values)
                dataset = file.create_dataset(f"{split}/{name}", data=array)
                dataset.attrs["crc32"] = zlib.crc32(array.data)
            _check(str(path), split, file[split]["inputs"], file[split]["targets"])


def _check(path: str, split: str, inputs: h5py.Dataset, targets: h5py.Dataset) -> None:
    if inputs.dtype.kind != "f" and inputs.dtype != np.uint8 or inputs.ndim < 2:
        raise DataError(
            f"{path}: /{split}/inputs is {inputs.dtype} of shape {inputs.shape}, "
            "allowed are uint8 or floats with at least 2 dims, samples first"
        )
    classes = targets.dtype.kind in "iu" and targets.ndim == 1
    if not classes and (targets.dtype.kind != "f" or targets.ndim < 1):
        raise DataError(
            f"{path}: /{split}/targets is {targets.dtype} of shape {targets.shape}, "
            "allowed are classes (integers with 1 dim) or floats, samples first"
        )
    if len(inputs) != len(targets):
        raise DataError(f"{path}: /{split} has {len(inputs)} inputs and {len(targets)} targets, allowed is as many")
    if not len(inputs):
        raise DataError(f"{path}: /{split} is empty, needs at least 1 sample")


def _count_classes(file: h5py.File, split: str) -> int:
    """Return one more than the highest class of any split, so that both splits need the same model."""
    lowest, highest = 0, -1
    for name in {"train", "validation", split}:
        targets = find_dataset(file, f"{name}/targets")
        if targets is not None and targets.dtype.kind in "iu":
            for start in range(0, len(targets), BLOCK):
                block = targets[start : start + BLOCK]
                lowest, highest = min(lowest, int(block.min())), max(highest, int(block.max()))
    if lowest < 0:
        raise DataError(f"{file.filename}: the targets hold the class {lowest}, allowed are 0 and above")
    return highest + 1


def _rows(array: Any, indices: Indices) -> npt.NDArray[Any]:
    """Return rows in any order and with repetition; h5py itself supports neither."""
    if isinstance(array, h5py.Dataset):
        unique, back = np.unique(indices, return_inverse=True)
        return np.asarray(array[unique])[back]
    return np.asarray(array[indices])
