"""Dataset of images or vectors with their targets, from plain HDF5 arrays.

The file contains ``/train/inputs``, ``/train/targets`` and the same under ``/validation``. Inputs
are ``[n, ...]``: uint8 images (scaled to 0..1) or floats; images are ``[n, height, width]`` or
``[n, channels, height, width]``. Targets are classes, integers of shape ``[n]``, or floats
``[n, ...]``.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.data.dataset import Indices, check_indices
from hpctrain.data.hdf5 import BLOCK, attribute, check_whole, dataset_of, find_dataset, map_dataset, open_file
from hpctrain.data.pack import new_file
from hpctrain.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "hpctrain-arrays"
FORMAT_VERSION = 1
Pair = tuple[npt.ArrayLike, npt.ArrayLike]


class ArrayDataset:
    """Samples of a split: inputs as float32, targets as int64 classes or float32."""

    def __init__(self, path: str | Path, split: str) -> None:
        """Open and check a split of an array file. Raises ``DataError`` with the fault and the allowed values."""
        self.path, self.split = str(path), split
        file = open_file(path)
        kind = attribute(file, "format", FORMAT)
        if kind != FORMAT:
            raise DataError(f"{path} is not an array file: its format attribute is {kind!r}, expected {FORMAT!r}")
        inputs, targets = dataset_of(file, f"{split}/inputs"), dataset_of(file, f"{split}/targets")
        _check(str(path), split, inputs, targets)
        self._input_shape = inputs.shape[1:]
        self._classes = targets.dtype.kind in "iu"
        self._outputs = _count_classes(file, split) if self._classes else int(np.prod(targets.shape[1:]))
        self._inputs, self._targets = _mapped(inputs), _mapped(targets)
        if not isinstance(self._inputs, h5py.Dataset) and not isinstance(self._targets, h5py.Dataset):
            file.close()

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that a model needs: the shape of an input and the number of outputs per target."""
        return {"input_shape": tuple(int(size) for size in self._input_shape), "outputs": self._outputs}

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


def write_arrays(path: str | Path, *, train: Pair, validation: Pair) -> None:
    """Write an array file of two ``(inputs, targets)`` pairs; an existing file is replaced atomically."""
    splits = {"train": train, "validation": validation}
    with new_file(Path(path), FORMAT, FORMAT_VERSION) as file:
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


def _mapped(dataset: h5py.Dataset) -> Any:
    mapped = map_dataset(dataset)
    return dataset if mapped is None else mapped


def _rows(array: Any, indices: Indices) -> npt.NDArray[Any]:
    """Return rows in any order and with repetition; h5py itself supports neither."""
    if isinstance(array, h5py.Dataset):
        unique, back = np.unique(indices, return_inverse=True)
        return np.asarray(array[unique])[back]
    return np.asarray(array[indices])
