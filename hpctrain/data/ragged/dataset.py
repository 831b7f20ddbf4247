"""Data sets of samples whose fields have different sizes, in one or many HDF5 files: ``RaggedDataset``."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.data.ragged.batch import Column, RaggedBatch, positions
from hpctrain.data.ragged.layout import Field, FileFacts, OpenFile, OpenFiles, read_facts, unified
from hpctrain.data.shards.files import Path, find_files
from hpctrain.errors import DataError, SettingsError

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]
LARGE = 32 << 10  # bytes of a sample from which on it is read from the file, not copied from the map
SHORT = 128  # rows of a sample up to which all rows of a batch are copied at once


class RaggedDataset:
    """Map-style dataset of the samples in HDF5 files; a sample is a dict of its fields.

    ``files`` are paths, wildcards or ranges in braces, which are one data set in this order. ``group`` is that of the
    samples in each file. ``fields`` selects fields, or gives them own names: ``{"x": "positions"}``. ``dtypes``
    converts fields, by own name. With ``comm``, each rank looks into a part of the files, and all get what the others
    have found; the construction is then collective.
    """

    varies = True  # samples may have different sizes: job.loader explains why they cannot be stacked

    def __init__(
        self,
        files: Path | Iterable[Path],
        group: str = "train",
        *,
        fields: str | Sequence[str] | Mapping[str, str] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        comm: Communicator | None = None,
    ) -> None:
        """Open the files. Raises ``DataError`` if one is missing or damaged, or if they do not fit together."""
        fields = [fields] if isinstance(fields, str) else fields
        self._facts = _alike(_facts_of(find_files(files), group, fields, comm))
        self._fields: dict[str, Field] = dict(self._facts[0].fields)
        self._dtypes = dict(dtypes or {})
        _check_dtypes(self._dtypes, self._fields)
        self._ends = np.cumsum([facts.samples for facts in self._facts], dtype=np.int64)
        self._files = OpenFiles(self._facts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(self._fields)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample."""
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"no sample {index}: the data set has {len(self)}")
        found: dict[str, Any] = self.__getitems__([index % len(self)])[0]
        return found

    def __getitems__(self, indices: Sequence[int]) -> RaggedBatch:
        """Return several samples."""
        next(iter(indices), None)  # a run seeds the generators there, which a collate_fn may draw from
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and not (0 <= wanted.min() and wanted.max() < len(self)):
            wrong = wanted.min() if wanted.min() < 0 else wanted.max()
            raise IndexError(f"no sample {wrong}: the data set has {len(self)}")
        parts = list(self._by_file(wanted))
        for part in parts:
            part.file.check()
        return RaggedBatch({name: self._column(name, parts, len(wanted)) for name in self._fields})

    def lengths(self, field: str) -> Numbers:
        """Return the number of rows of every sample, such as tokens or points, to form batches of similar ones."""
        if field not in self._fields:
            raise SettingsError(f"no field {field}: the fields are {', '.join(self._fields)}")
        found = [_lengths(self._files[number], facts, field) for number, facts in enumerate(self._facts)]
        return np.concatenate(found)

    def largest(self, field: str) -> tuple[int, ...]:
        """Return the largest size of a field over all samples, in each dim."""
        form = self._fields[field]
        if form.is_fixed:
            return form.size
        if not len(self):
            return (0,) * form.dims
        if form.shapes is None and form.tail is None:
            return int(self.lengths(field).max()), *form.size
        found = []
        for number, facts in enumerate(self._facts):
            everything = np.arange(facts.samples)
            counts = _span(self._files[number], facts, field, everything)[1]
            found.append(_shapes(self._files[number], facts, field, everything, counts).max(axis=0, initial=0))
        return tuple(np.max(found, axis=0).tolist())

    # Reading ----------------------------------------------------------------------------------------------------------

    def _by_file(self, wanted: Numbers) -> Iterator[_Part]:
        """Yield the samples by file, each with its place in the batch."""
        owners = np.searchsorted(self._ends, wanted, side="right")
        for owner in np.unique(owners).tolist():
            places = np.flatnonzero(owners == owner)
            begin = 0 if owner == 0 else self._ends[owner - 1]
            yield _Part(self._files[owner], self._facts[owner], wanted[places] - begin, places)

    def _column(self, name: str, parts: Sequence[_Part], samples: int) -> Column:
        field = self._fields[name]
        if field.elements:
            return self._converted(name, _variable(name, parts, samples))
        dtype = np.dtype(field.dtype).newbyteorder("=")
        if field.is_fixed:
            rows = np.empty((samples, *field.size), dtype)
            for part in parts:
                own = part.facts.fields[name]
                _copy(part.file, own, rows, part.indices, np.ones(len(part.indices), np.int64), part.places)
            return self._converted(name, Column(_tensor(rows), kind=field.kind))
        lengths, spans = np.zeros(samples, np.int64), list[Numbers]()
        flat = field.shapes is not None or field.tail is not None
        shapes = np.zeros((samples, self._dims(field)), np.int64) if flat else None
        for part in parts:
            starts, counts = _span(part.file, part.facts, name, part.indices)
            lengths[part.places] = counts
            spans.append(starts)
            if shapes is not None:
                shapes[part.places] = _shapes(part.file, part.facts, name, part.indices, counts)
        places = np.cumsum(lengths) - lengths
        rows = np.empty((int(lengths.sum()), *field.values.shape[1:]), dtype)
        for part, starts in zip(parts, spans):
            own = part.facts.fields[name]
            _copy(part.file, own, rows, starts, lengths[part.places], places[part.places])
        return self._converted(name, Column(_tensor(rows), lengths, shapes, field.kind))

    def _dims(self, field: Field) -> int:
        return field.dims if field.tail is None else 1 + len(field.tail)

    def _converted(self, name: str, column: Column) -> Column:
        dtype = self._dtypes.get(name)
        if dtype is None or column.kind:
            return column
        return Column(column.rows.to(dtype), column.lengths, column.shapes)


def _tensor(array: Array) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)


def _check_dtypes(dtypes: Mapping[str, torch.dtype], fields: Mapping[str, Field]) -> None:
    import torch

    for name, dtype in dtypes.items():
        if name not in fields:
            raise SettingsError(f"dtypes has no field {name}: the fields are {', '.join(fields)}")
        if not isinstance(dtype, torch.dtype) or fields[name].kind:
            what = (
                f"the field is {fields[name].kind}" if fields[name].kind else "allowed are types such as torch.float32"
            )
            raise SettingsError(f"dtypes[{name!r}] = {dtype!r}: {what}")


class _Part:
    """Samples of a batch that are in one file; ``places`` are their numbers in the batch."""

    def __init__(self, file: OpenFile, facts: FileFacts, indices: Numbers, places: Numbers) -> None:
        self.file, self.facts, self.indices, self.places = file, facts, indices, places


def _facts_of(
    paths: Sequence[str], group: str, fields: Sequence[str] | Mapping[str, str] | None, comm: Communicator | None
) -> list[FileFacts]:
    """Return the facts of all files, of which each rank of ``comm`` reads a part. Collective over it."""
    if comm is None or comm.size == 1:
        return [read_facts(path, group, fields) for path in paths]
    found: list[FileFacts] | DataError
    try:
        found = [read_facts(path, group, fields) for path in paths[comm.rank :: comm.size]]
    except DataError as error:
        found = error
    everyone: list[list[FileFacts] | DataError] = comm.all_gather_object(found)
    for one in everyone:
        if isinstance(one, DataError):
            raise DataError(str(one), everywhere=True)
    lists = [one for one in everyone if not isinstance(one, DataError)]
    return [lists[number % comm.size][number // comm.size] for number in range(len(paths))]


def _alike(files: list[FileFacts]) -> list[FileFacts]:
    """Return files with their fields in one form. Raises ``DataError`` unless they have the same fields."""
    first = files[0]
    for other in files[1:]:
        if other.fields.keys() != first.fields.keys():
            raise DataError(
                f"data files do not fit together: {first.path} has the fields {', '.join(first.fields)}, {other.path} "
                f"has {', '.join(other.fields)}; select those that all have by fields"
            )
    forms: dict[str, list[Field]] = {}
    for name in first.fields:
        found = unified([each.fields[name] for each in files])
        if found is None:
            field = first.fields[name]
            other = next(each for each in files if unified([field, each.fields[name]]) is None)
            raise DataError(
                f"data files do not fit together: {name} is {field.described()} in {first.path}, and "
                f"{other.fields[name].described()} in {other.path}"
            )
        forms[name] = found
    return [replace(each, fields={name: forms[name][at] for name in forms}) for at, each in enumerate(files)]


def _lengths(file: OpenFile, facts: FileFacts, name: str) -> Numbers:
    field = facts.fields[name]
    if field.elements:
        return np.array([len(value) for value in file.dataset(field.values)[()]], np.int64)
    if field.is_fixed:
        return np.full(facts.samples, field.size[0] if field.size else 1, np.int64)
    if field.shapes is not None:
        view = file.view(field.shapes)
        return np.asarray(file.dataset(field.shapes)[()] if view is None else view)[:, 0].astype(np.int64)
    counts = _span(file, facts, name, np.arange(facts.samples))[1]
    return counts // math.prod(field.tail or ())


def _span(file: OpenFile, facts: FileFacts, name: str, indices: Numbers) -> tuple[Numbers, Numbers]:
    """Return the first row of samples in the file, and the number of their rows."""
    field = facts.fields[name]
    if field.offsets is None:
        return indices * field.stride, np.full(len(indices), field.stride, np.int64)
    offsets = file.view(field.offsets)
    if offsets is None:
        whole = _rows_by_hdf5(file.dataset(field.offsets), np.concatenate([indices, indices + 1]))
        starts, stops = whole[: len(indices)].astype(np.int64), whole[len(indices) :].astype(np.int64)
    else:
        starts, stops = offsets[indices].astype(np.int64), offsets[indices + 1].astype(np.int64)
    wrong = (starts < 0) | (stops < starts) | (stops * field.scale > field.values.shape[0])
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"{facts.path}: /{field.offsets.name} is damaged: sample {int(indices[at])} has the rows {int(starts[at])} "
            f"to {int(stops[at])} of {field.values.shape[0] // field.scale}"
        )
    return starts * field.scale, (stops - starts) * field.scale


def _shapes(file: OpenFile, facts: FileFacts, name: str, indices: Numbers, counts: Numbers) -> Numbers:
    """Return the shapes of samples. Raises ``DataError`` if they do not fit the number of their elements."""
    field = facts.fields[name]
    if field.shapes is None:
        tail = field.tail or ()
        rows = counts // max(math.prod(tail), 1)
        return np.stack([rows, *(np.full(len(rows), size, np.int64) for size in tail)], axis=1)
    block = field.shapes
    view = file.view(block)
    shapes: Numbers = (_rows_by_hdf5(file.dataset(block), indices) if view is None else view[indices]).astype(np.int64)
    wrong = (shapes < 0).any(axis=1) | (shapes.prod(axis=1) != counts)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"{facts.path}: /{block.name} is damaged: sample {int(indices[at])} has the shape {shapes[at].tolist()} "
            f"and {int(counts[at])} elements"
        )
    return shapes


def _copy(file: OpenFile, field: Field, out: Array, starts: Numbers, lengths: Numbers, places: Numbers) -> None:
    """Copy the rows of samples from a file to their places in ``out``."""
    block, total = field.values, int(lengths.sum())
    view = file.view(block)
    if not total or not len(starts):
        return
    if view is None:
        _copy_by_hdf5(file, file.dataset(block), out, starts, lengths, places)
    elif total * out[:1].nbytes >= LARGE * len(starts) and np.dtype(block.dtype).isnative:
        assert block.offset is not None
        nbytes = out[:1].nbytes
        for start, stop, place in _merged(starts, lengths, places):
            file.read(out[place : place + stop - start], block.offset + start * nbytes)
    elif total <= SHORT * len(starts):
        sources = starts if (lengths == 1).all() else positions(starts, lengths)
        if len(sources) == len(out) and (places[1:] >= places[:-1]).all():
            np.take(view, sources, axis=0, out=out) if view.dtype == out.dtype else np.copyto(out, view[sources])
        else:
            out[places if (lengths == 1).all() else positions(places, lengths)] = view[sources]
    else:
        for start, length, place in zip(starts.tolist(), lengths.tolist(), places.tolist()):
            out[place : place + length] = view[start : start + length]


def _merged(starts: Numbers, lengths: Numbers, places: Numbers) -> Iterator[tuple[int, int, int]]:
    """Yield the first and last row and the place of samples in the order of the file; neighbours are one range."""
    order = np.argsort(starts, kind="stable")
    begin = end = target = -1
    for start, length, place in zip(starts[order].tolist(), lengths[order].tolist(), places[order].tolist()):
        if start == end and place == target + end - begin:
            end += length
            continue
        if end > begin:
            yield begin, end, target
        begin, end, target = start, start + length, place
    if end > begin:
        yield begin, end, target


# Data that HDF5 must read: chunked, compressed, or of variable-length elements ----------------------------------------


def _rows_by_hdf5(dataset: h5py.Dataset, indices: Numbers) -> Array:
    """Return rows in any order and with repetition; h5py itself supports neither."""
    unique, back = np.unique(indices, return_inverse=True)
    found: Array = np.asarray(dataset[unique])[back]
    return found


def _copy_by_hdf5(
    file: OpenFile, dataset: h5py.Dataset, out: Array, starts: Numbers, lengths: Numbers, places: Numbers
) -> None:
    try:
        for start, stop, place in _merged(starts, lengths, places):
            out[place : place + stop - start] = dataset[start:stop]
    except OSError as error:
        raise DataError(f"{file.facts.path}: /{dataset.name.lstrip('/')} is damaged: {error}") from error


def _variable(name: str, parts: Sequence[_Part], samples: int) -> Column:
    """Return a field of variable-length elements of HDF5."""
    values: list[Any] = [None] * samples
    kind = parts[0].facts.fields[name].kind if parts else ""
    for part in parts:
        field = part.facts.fields[name]
        found = _rows_by_hdf5(part.file.dataset(field.values), part.indices)
        for place, value in zip(part.places.tolist(), found):
            if kind:
                content = value.encode() if isinstance(value, str) else bytes(value)
                values[place] = np.frombuffer(content, np.uint8)
            else:
                values[place] = np.asarray(value)
    lengths = np.array([len(value) for value in values], np.int64)
    dtype = np.dtype(np.uint8) if kind else values[0].dtype.newbyteorder("=") if values else np.dtype(np.float32)
    rows = np.concatenate(values).astype(dtype, copy=True) if values else np.empty(0, dtype)
    return Column(_tensor(rows), lengths, kind=kind)
