"""Nested batches: tuples, lists, dicts and tensors, counted and sliced along the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hpctrain.errors import UsageError


def leaves(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from leaves(value)


def samples_in(batch: Any) -> int:
    """Return the number of samples, the first dimension of all tensors.

    Raises ``UsageError`` if the tensors differ in it, or if no tensor has one.
    """
    sizes = {leaf.shape[0] for leaf in leaves(batch) if leaf.dim()}
    if len(sizes) != 1:
        found = "no tensor with a first dim" if not sizes else f"tensors of first dims {sorted(sizes)}"
        raise UsageError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it has {found}; allowed are tensors, "
            "and tuples, lists and dicts of tensors with one first dim"
        )
    return sizes.pop()


def cut(batch: Any, begin: int, end: int) -> Any:
    """Return the samples from ``begin`` to ``end`` of a batch, as a batch of the same structure."""
    count = samples_in(batch)
    return _mapped(batch, lambda leaf: leaf[begin:end] if leaf.dim() else leaf, count, slice(begin, end))


def rows_of(batch: Any, rows: Tensor) -> Any:
    """Return samples by index, as a batch of the same structure."""
    count = samples_in(batch)
    numbers = rows.tolist()
    return _mapped(batch, lambda leaf: leaf[rows.to(leaf.device)] if leaf.dim() else leaf, count, numbers)


def _mapped(batch: Any, take: Callable[[Tensor], Tensor], count: int, which: slice | list[int]) -> Any:
    if isinstance(batch, Tensor):
        return take(batch)
    if isinstance(batch, Mapping):
        values = {key: _mapped(value, take, count, which) for key, value in batch.items()}
        return values if type(batch) is dict else _remade(batch, values)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, take, count, which) for value in batch))
    if isinstance(batch, (tuple, list)):
        if any(True for _ in leaves(batch)):
            return type(batch)(_mapped(value, take, count, which) for value in batch)
        if len(batch) == count:  # one value per sample, such as names
            return batch[which] if isinstance(which, slice) else type(batch)(batch[number] for number in which)
    return batch


def _remade(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    kind: Any = type(batch)
    try:
        return kind(values)
    except TypeError:
        return values
