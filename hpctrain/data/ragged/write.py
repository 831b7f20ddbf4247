"""Writing of ragged data files (``hpctrain.data.RaggedWriter``): sample by sample, atomically.

In memory are the sizes of the samples, 8 bytes per dim; their values are in temporary files.
"""

from __future__ import annotations

import contextlib
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.data.pack import new_file
from hpctrain.data.ragged.layout import FORMAT, NUMBERS, VERSION, Kind
from hpctrain.errors import DataError, UsageError
from hpctrain.util.text import short_repr

Array = npt.NDArray[Any]
SPLITS = ("train", "validation")  # groups that one model reads
BLOCK = 16 << 20  # bytes that are copied at a time


class RaggedWriter:
    """Writer of a ragged file; it is complete, and has its name, when the ``with`` block ends without an error.

    The first sample of a group decides its fields, their element types and their numbers of dims. Fields whose
    samples turn out to have one size, in all groups, are written as plain datasets.
    """

    def __init__(self, path: str | Path, *, attributes: Mapping[str, Any] | None = None) -> None:
        self.path, self._attributes = Path(path), dict(attributes or {})
        self._groups: dict[str, dict[str, _Spool]] = {}
        self._samples: dict[str, int] = {}

    def __enter__(self) -> RaggedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for spools in self._groups.values():
                for spool in spools.values():
                    spool.close()

    def append(self, sample: Mapping[str, Any], group: str = "train") -> None:
        """Add a sample, a dict of arrays, numbers, texts and bytes. Raises ``DataError`` if it does not fit."""
        if not isinstance(sample, Mapping) or not sample:
            raise DataError(f"a sample is a dict with at least one field, not {short_repr(sample)}")
        for name in sample:
            if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
                raise DataError(f"the field {short_repr(name)}: allowed are names without a slash")
        number = self._samples.get(group, 0)
        spools = self._groups.get(group)
        values = {name: _array(name, value) for name, value in sample.items()}
        if spools is None:
            folder = self.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in values.items():
                for each in (one for one in self._groups.values() if name in one):
                    each[name].check(*value, f"sample 0 of {group}: {name}")
            self._check_splits(group, values)
            spools = self._groups[group] = {name: _Spool(*value, folder) for name, value in values.items()}
        if values.keys() != spools.keys():
            raise DataError(
                f"sample {number} of {group} has the fields {', '.join(values)}, and the first one {', '.join(spools)}"
            )
        for name, (content, kind) in values.items():
            spools[name].check(content, kind, f"sample {number} of {group}: {name}")
        try:
            for name, (content, _) in values.items():
                spools[name].add(content)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._samples[group] = number + 1

    def _check_splits(self, group: str, fields: Iterable[str]) -> None:
        """Raise ``DataError`` if the first sample of a split has other fields than the other split."""
        for other in SPLITS if group in SPLITS else ():
            if other in self._groups and set(self._groups[other]) != set(fields):
                raise DataError(
                    f"sample 0 of {group} has the fields {', '.join(fields)}, and those of {other} "
                    f"{', '.join(self._groups[other])}; both splits need the same"
                )

    def _finish(self) -> None:
        if not self._groups:
            raise DataError(f"{self.path} would have no samples")
        with new_file(self.path, FORMAT, VERSION) as file:
            file.attrs.update(self._attributes)
            for group, spools in self._groups.items():
                place = file.create_group(group)
                for name, spool in spools.items():
                    shapes = [each[name].shapes for each in self._groups.values() if name in each]
                    spool.write(place, name, np.concatenate(shapes))


class _Spool:
    """Values of a field in a temporary file beside the target, because their number is not known yet."""

    def __init__(self, first: Array, kind: Kind, folder: Path) -> None:
        self._dtype, self._dims, self.kind = first.dtype, first.ndim, kind
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)
        self._sizes = array("q")
        self._samples = 0

    @property
    def shapes(self) -> npt.NDArray[np.int64]:
        """The shapes of all samples, ``[samples, dims]``."""
        return np.frombuffer(self._sizes, np.int64).reshape(self._samples, self._dims)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def check(self, values: Array, kind: Kind, where: str) -> None:
        if (values.dtype, values.ndim, kind) != (self._dtype, self._dims, self.kind):
            raise DataError(
                f"{where} is {_form(values, kind)}, and that of the first sample is {self.kind or self._dtype} with "
                f"{self._dims} dims; convert it"
            )

    def add(self, values: Array) -> None:
        self._file.write(np.ascontiguousarray(values).data if values.size else b"")
        self._sizes.extend(values.shape)
        self._samples += 1

    def write(self, place: h5py.Group, name: str, everywhere: npt.NDArray[np.int64]) -> None:
        """Write the values as datasets of a file; ``everywhere`` are the shapes of the field in all groups."""
        shapes, varies = self.shapes, (everywhere != everywhere[0]).any(axis=0)
        self._file.flush()
        self._file.seek(0)
        if not self.kind and not varies.any():
            self._fill(place, name, (len(shapes), *everywhere[0].tolist()))
            return
        inner = place.create_group(name)
        if not varies[1:].any():
            rows, tail = shapes[:, 0], everywhere[0, 1:].tolist()
        else:
            rows, tail = shapes.prod(axis=1), []
            _put(inner, "shapes", shapes)
        values = self._fill(inner, "values", (int(rows.sum()), *tail))
        if self.kind:
            values.attrs["kind"] = self.kind
        _put(inner, "offsets", np.concatenate([[0], np.cumsum(rows)]).astype(np.int64))

    def _fill(self, place: h5py.Group, name: str, shape: tuple[int, ...]) -> h5py.Dataset:
        dataset = place.create_dataset(name, shape=shape, dtype=self._dtype)
        width = int(np.prod(shape[1:], dtype=np.int64)) * self._dtype.itemsize
        crc32 = done = 0
        step = max(BLOCK // max(width, 1), 1)
        while width and done < shape[0]:
            count = min(step, shape[0] - done)
            data = self._file.read(count * width)
            dataset[done : done + count] = np.frombuffer(data, self._dtype).reshape(count, *shape[1:])
            done, crc32 = done + count, zlib.crc32(data, crc32)
        dataset.attrs["crc32"] = crc32
        return dataset


def _put(place: h5py.Group, name: str, values: Array) -> None:
    dataset = place.create_dataset(name, data=values)
    dataset.attrs["crc32"] = zlib.crc32(np.ascontiguousarray(values).data)


def _array(name: str, value: Any) -> tuple[Array, Kind]:
    """Return a value of a sample as an array and its kind."""
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8), "text"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(bytes(value), np.uint8), "bytes"
    try:
        found = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise DataError(f"the field {name} is a {type(value).__name__} that is no array: {error}") from error
    if found.dtype.kind not in NUMBERS or found.dtype.itemsize > 8:
        raise DataError(f"the field {name} is {found.dtype}, allowed are numbers of at most 8 bytes, texts and bytes")
    return found, ""


def _form(values: Array, kind: Kind) -> str:
    return f"{kind or values.dtype} with {values.ndim} dims"


def write_ragged(
    path: str | Path,
    *,
    train: Iterable[Mapping[str, Any]],
    validation: Iterable[Mapping[str, Any]] = (),
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Write a ragged file of samples, which are dicts; an existing file is replaced when the new one is complete."""
    if isinstance(train, Mapping):
        raise UsageError("write_ragged(train=...) is a dict: expected is an iterable of samples, which are dicts")
    with RaggedWriter(path, attributes=attributes) as writer:
        for group, samples in (("train", train), ("validation", validation)):
            for sample in samples:
                writer.append(sample, group)
