"""Samples of different sizes: a batch of them in few tensors, and the collation into padded or concatenated tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpctrain.data.ragged.layout import Kind
from hpctrain.errors import DataError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Column:
    """A field of several samples: their rows one after the other, and the number of rows of each.

    Without ``lengths``, all have one size, and ``rows`` is ``[samples, ...]``. With ``shapes``, the elements of a
    sample are reshaped.
    """

    rows: Tensor
    lengths: Array | None = None
    shapes: Array | None = None
    kind: Kind = ""
    objects: Sequence[Any] = ()  # values of another type, such as parsed JSON

    def __len__(self) -> int:
        return len(self.rows) if self.lengths is None else len(self.lengths)

    def sample(self, number: int, start: int) -> Any:
        """Return the value of a sample, whose rows begin at ``start``."""
        if self.lengths is None:
            return self.rows[number]
        found = self.rows[start : start + int(self.lengths[number])]
        if self.kind:
            content = found.numpy().tobytes()
            return content.decode("utf-8", "replace") if self.kind == "text" else content
        return found if self.shapes is None else found.view(tuple(self.shapes[number].tolist()))


class RaggedBatch(Sequence[dict[str, Any]]):
    """Samples of a data set, which are dicts of the fields; ``columns`` has all of them in few tensors."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        self._starts: dict[str, Array] = {}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        return {name: column.sample(number, self._start(name, number)) for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    def _start(self, name: str, number: int) -> int:
        lengths = self.columns[name].lengths
        if lengths is None:
            return 0
        if name not in self._starts:
            self._starts[name] = np.concatenate([[0], np.cumsum(lengths)])
        return int(self._starts[name][number])


def columns_of(samples: Sequence[Any]) -> dict[str, Column]:
    """Return the fields of samples as columns; samples are dicts, or tuples whose fields are named 0, 1, ...

    Raises ``DataError`` if samples have different fields, or dims other than the first differ.
    """
    if isinstance(samples, RaggedBatch):
        return dict(samples.columns)
    named = [_named(sample) for sample in samples]
    for number, sample in enumerate(named):
        if sample.keys() != named[0].keys():
            raise DataError(
                f"sample {number} of a batch has the fields {', '.join(sample)}, and sample 0 {', '.join(named[0])}"
            )
    return {name: _column(name, [sample[name] for sample in named]) for name in named[0]}


def _named(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return sample
    values = sample if isinstance(sample, (tuple, list)) else (sample,)
    return {str(number): value for number, value in enumerate(values)}


def _column(name: str, values: Sequence[Any]) -> Column:
    import torch

    if isinstance(values[0], (str, bytes)):
        contents = [value.encode() if isinstance(value, str) else value for value in values]
        rows = torch.from_numpy(np.frombuffer(b"".join(contents), np.uint8).copy())
        kind: Kind = "text" if isinstance(values[0], str) else "bytes"
        return Column(rows, np.array([len(each) for each in contents]), kind=kind)
    if not all(isinstance(value, (int, float, complex, np.ndarray, np.generic, torch.Tensor)) for value in values):
        return Column(torch.empty(len(values), 0), kind="objects", objects=values)
    tensors = [torch.as_tensor(value) for value in values]
    if not tensors[0].dim():
        return Column(torch.stack(tensors))
    shapes = {tuple(each.shape) for each in tensors}
    if len(shapes) == 1:
        return Column(torch.stack(tensors))
    if len({shape[1:] for shape in shapes}) == 1:
        return Column(torch.cat(tensors), np.array([len(each) for each in tensors]))
    if len({each.dim() for each in tensors}) > 1:
        raise DataError(f"the samples of a batch have {name} with different numbers of dims: {sorted(shapes)[:3]}")
    lengths = np.array([each.numel() for each in tensors])
    return Column(torch.cat([each.flatten() for each in tensors]), lengths, np.array([each.shape for each in tensors]))


def _varies(name: str, column: Column, fields: Collection[str] | None, *, is_dataset: bool) -> bool:
    """Return whether a field is one of different sizes, in every batch alike; ``fields`` are those that the user names.

    Otherwise these are the fields that a file says so of, and of other samples all that have dims.
    """
    if fields is None:
        varies = column.lengths is not None
        return varies if is_dataset else varies or column.rows.dim() > 1
    if name in fields and column.lengths is None and column.rows.dim() == 1:
        raise DataError(f"the samples of a batch have a single number as {name}: leave it out of fields")
    if name not in fields and column.lengths is not None:
        raise DataError(f"the samples of a batch have different sizes of {name}: add it to fields")
    return name in fields


def _by_rows(column: Column) -> Column:
    """Return a field of one size as one whose samples may have different numbers of rows."""
    if column.lengths is not None:
        return column
    samples, rows = column.rows.shape[:2]
    return Column(column.rows.reshape(samples * rows, *column.rows.shape[2:]), np.full(samples, rows))


def _check_known(names: Collection[str], batch: Mapping[str, object], what: str) -> None:
    for name in names:
        if name not in batch:
            raise SettingsError(f"{what} has no field {name}: the fields are {', '.join(batch)}")


class Padding:
    """Collation of samples of different sizes into padded tensors: ``collate_fn=Padding()``.

    The batch is a dict. A field of one size is ``[samples, ...]``. Of any other field, each sample is extended to
    the largest size of the batch by ``value``, or by ``values[field]``; ``FIELD_lengths`` are the sizes of the first
    dim, and ``FIELD_shapes`` ``[samples, dims]`` those of all if several may differ. Sizes are rounded up to a multiple
    of ``multiple``. Texts and bytes are lists. ``fields`` names the fields of different sizes; by default these are
    those of a ``RaggedDataset``, and of other samples all that have dims.
    """

    def __init__(
        self,
        value: float = 0,
        values: Mapping[str, float] | None = None,
        *,
        fields: Collection[str] | None = None,
        multiple: int = 1,
    ) -> None:
        if multiple < 1:
            raise SettingsError(f"Padding(multiple={multiple}): allowed is 1 or more")
        self.value, self.values, self.multiple = value, dict(values or {}), multiple
        self.fields = (fields,) if isinstance(fields, str) else fields

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return a batch of the samples."""
        import torch

        columns, is_dataset = columns_of(samples), isinstance(samples, RaggedBatch)
        _check_known({*self.values, *(self.fields or ())}, columns, "Padding")
        batch: dict[str, Any] = {}
        for name, column in columns.items():
            if column.kind or not _varies(name, column, self.fields, is_dataset=is_dataset):
                batch[name] = _contents(column) if column.kind else column.rows
                continue
            column, shapes = _by_rows(column), column.shapes
            assert column.lengths is not None
            if shapes is None:
                batch[name] = self._rows(name, column.rows, column.lengths)
                if not is_dataset and column.rows.dim() > 1:
                    tail = [np.full(len(column), size) for size in column.rows.shape[1:]]
                    shapes = np.stack([column.lengths, *tail], axis=1)
            else:
                batch[name] = self._blocks(name, column.rows, column.lengths, shapes)
            lengths = column.lengths if column.shapes is None else column.shapes[:, 0]
            batch[f"{name}_lengths"] = torch.from_numpy(np.asarray(lengths, np.int64))
            if shapes is not None:
                batch[f"{name}_shapes"] = torch.from_numpy(np.asarray(shapes, np.int64))
        return batch

    def _rows(self, name: str, rows: Tensor, lengths: Array) -> Tensor:
        longest = self._rounded(int(lengths.max(initial=0)))
        padded = self._filled(name, (len(lengths), longest, *rows.shape[1:]), rows)
        put_rows(padded, rows, lengths)
        return padded

    def _blocks(self, name: str, elements: Tensor, lengths: Array, shapes: Array) -> Tensor:
        largest = [self._rounded(int(each)) for each in shapes.max(axis=0, initial=0)]
        padded = self._filled(name, (len(shapes), *largest), elements)
        put_blocks(padded, elements, lengths, shapes)
        return padded

    def _filled(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        import torch

        value = self.values.get(name, self.value)
        if not like.dtype.is_floating_point and value != int(value):
            raise SettingsError(f"Padding of {name} by {value}: allowed are whole numbers, as {like.dtype} has")
        return torch.full(shape, value, dtype=like.dtype)

    def _rounded(self, size: int) -> int:
        return -(-size // self.multiple) * self.multiple


class Concatenation:
    """Collation of samples of different sizes one after the other, without padding: ``collate_fn=Concatenation()``.

    The batch is a dict. A field of one size is ``[samples, ...]``. Of any other field it has the rows of all samples;
    ``FIELD_offsets`` ``[samples + 1]`` are their beginnings and the end, and ``FIELD_samples`` is the number of the
    sample of each row, as graphs and variable-length attention use them. Fields with several varying dims are
    refused. Texts and bytes are lists. ``fields`` names the fields of different sizes; it may be left out for the
    samples of a ``RaggedDataset``.
    """

    def __init__(self, fields: Collection[str] | None = None) -> None:
        self.fields = (fields,) if isinstance(fields, str) else fields

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return a batch of the samples."""
        import torch

        columns, is_dataset = columns_of(samples), isinstance(samples, RaggedBatch)
        if self.fields is None and not is_dataset:
            raise SettingsError(
                "Concatenation of samples that do not come from a RaggedDataset: name the fields of different sizes, "
                f'as in Concatenation(fields=("x",)); the fields are {", ".join(columns)}'
            )
        _check_known(self.fields or (), columns, "Concatenation")
        batch: dict[str, Any] = {}
        for name, column in columns.items():
            if column.kind or not _varies(name, column, self.fields, is_dataset=is_dataset):
                batch[name] = _contents(column) if column.kind else column.rows
            elif column.shapes is not None:
                raise DataError(
                    f"the field {name} varies in several dims, so its samples cannot be concatenated: take Padding, or "
                    "a collate_fn of your own"
                )
            else:
                column = _by_rows(column)
                lengths = torch.from_numpy(np.asarray(column.lengths, np.int64))
                batch[name] = column.rows
                batch[f"{name}_offsets"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
                batch[f"{name}_samples"] = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return batch


def equal_sizes(samples: Sequence[Any]) -> dict[str, Any]:
    """Collation of samples that all have one size. Raises ``DataError`` with the way out if they do not."""
    batch: dict[str, Any] = {}
    for name, column in columns_of(samples).items():
        if column.kind:
            batch[name] = _contents(column)
        elif column.lengths is None:
            batch[name] = column.rows
        elif column.shapes is None and (column.lengths == column.lengths[0]).all():
            batch[name] = column.rows.view(len(column), int(column.lengths[0]), *column.rows.shape[1:])
        elif column.shapes is not None and (column.shapes == column.shapes[0]).all():
            batch[name] = column.rows.view(len(column), *column.shapes[0].tolist())
        else:
            sizes = column.lengths if column.shapes is None else column.shapes
            different = int(np.flatnonzero(~(sizes == sizes[0]).reshape(len(sizes), -1).all(axis=1))[0])
            raise DataError(
                f"the samples of a batch have different sizes of {name}: {sizes[0].tolist()} and "
                f"{sizes[different].tolist()}; pass collate_fn=hpctrain.data.Padding(), hpctrain.data.Concatenation(), "
                "or one of your own"
            )
    return batch


def put_rows(padded: Tensor, rows: Tensor, lengths: Array) -> None:
    """Fill the beginning of each sample of ``[samples, longest, ...]`` with its rows."""
    import torch

    samples, longest = padded.shape[:2]
    starts = np.arange(samples, dtype=np.int64) * longest
    flat = _bits(padded.view(samples * longest, *padded.shape[2:]))
    flat[torch.from_numpy(positions(starts, np.asarray(lengths, np.int64)))] = _bits(rows)


def put_blocks(padded: Tensor, elements: Tensor, lengths: Array, shapes: Array) -> None:
    """Fill the beginning, in all dims, of each sample of ``[samples, ...]`` with its elements."""
    import torch

    for number, (part, shape) in enumerate(zip(torch.split(elements, lengths.tolist()), shapes.tolist())):
        padded[number][tuple(slice(size) for size in shape)] = part.view(shape)


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as one whose element type PyTorch can index: not unsigned ones of 2 to 8 bytes."""
    import torch

    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(signed[tensor.dtype]) if tensor.dtype in signed else tensor


def _contents(column: Column) -> list[Any]:
    if column.kind == "objects":
        return list(column.objects)
    assert column.lengths is not None
    starts = np.concatenate([[0], np.cumsum(column.lengths)])
    return [column.sample(number, int(starts[number])) for number in range(len(column))]


def positions(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers from each start on, as many as the length says, one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
