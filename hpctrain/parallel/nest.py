"""Nested values (tuples, lists, dicts, dataclasses): flattening into tensors and a skeleton, and the inverse.

A skeleton is the same nest with a ``Slot`` in place of each tensor. Skeletons can be pickled and
compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hpctrain.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Slot:
    """Placeholder of a tensor in a skeleton, with its index."""

    number: int


ONE_TENSOR = Slot(0)  # the skeleton of a plain tensor


def mapped(value: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] = Tensor) -> Any:
    """Return a nest with all leaves of a class transformed; other leaves stay unchanged."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return _remade(value, {key: mapped(each, change, kind) for key, each in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change, kind) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(each, change, kind) for each in value)
    if _is_node(value):
        return dataclasses.replace(value, **{name: mapped(each, change, kind) for name, each in _fields(value)})
    return value


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest with the expressions that address them, in the order of ``mapped``."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_leaves(each, f"{name}[{key!r}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key, each in zip(value._fields, value):
            yield from named_leaves(each, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for number, each in enumerate(value):
            yield from named_leaves(each, f"{name}[{number}]")
    elif _is_node(value):
        for key, each in _fields(value):
            yield from named_leaves(each, f"{name}.{key}")
    else:
        yield name, value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nest, in order."""
    return [leaf for _, leaf in named_leaves(value, "") if isinstance(leaf, Tensor)]


def take_apart(value: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the skeleton of a nest, and its tensors in the order of the slots."""
    found: list[Tensor] = []

    def slot(tensor: Tensor) -> Slot:
        found.append(tensor)
        return Slot(len(found) - 1)

    return mapped(value, slot), tuple(found)


def put_together(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the nest that was flattened, with other tensors."""
    return mapped(skeleton, lambda slot: tensors[slot.number], Slot)


def check_leaves(value: Any, name: str) -> None:
    """Raise ``UsageError`` for an object with tensors in its attributes, which cannot be cut or sent."""
    for place, leaf in named_leaves(value, name):
        inside = getattr(leaf, "__dict__", None)
        if isinstance(leaf, Tensor) or callable(leaf) or not isinstance(inside, dict):
            continue
        hidden = next((key for key, each in inside.items() if tensors_of(each)), None)
        if hidden is not None:
            raise UsageError(
                f"{place} is a {type(leaf).__name__} with a tensor in its attribute {hidden}; allowed are tensors, and "
                "tuples, lists, dicts and dataclasses of tensors; pass the tensors themselves",
                everywhere=True,
            )


def _is_node(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Slot))


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]


def _remade(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return values in a mapping of the same class; a plain dict if that class cannot be constructed from one."""
    kind: Any = type(mapping)
    if kind is dict:
        return values
    try:
        return kind(values)
    except TypeError:
        return values
