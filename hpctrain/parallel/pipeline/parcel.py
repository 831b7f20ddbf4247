"""Message format between two chunks of a model: shapes of the tensors and their offsets in one buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.parallel.nest import ONE_TENSOR, Slot, named_leaves

_BLOCK = 64  # bytes: alignment of tensors for vector loads

_NONE = object()
Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Parcel:
    """Message format: shape and dtype of each tensor, and the skeleton of what a layer returned."""

    specs: tuple[Spec, ...]
    structure: Any = ONE_TENSOR

    @classmethod
    def of(cls, tensors: Sequence[Tensor], structure: Any = ONE_TENSOR) -> Parcel:
        """Return the format of a message with these tensors."""
        return cls(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), structure)

    def gradients(self) -> Parcel:
        """Return the format of the message back: a gradient for each floating-point tensor."""
        return Parcel(tuple(spec for spec in self.specs if spec[1].is_floating_point))

    @property
    def nbytes(self) -> int:
        """Return the bytes of a buffer that holds all tensors."""
        return self._places()[-1]

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return views of the tensors in a buffer of ``nbytes`` bytes."""
        places = self._places()
        return tuple(
            flat[place : place + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for place, (shape, dtype) in zip(places, self.specs)
        )

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``UsageError`` if tensors do not have the agreed shapes and dtypes."""
        found = Parcel.of(tensors)
        if found.specs != self.specs:
            raise UsageError(
                f"a stage of the pipeline returned {found} after {self} for inputs of the same shape: "
                "shapes must follow from the shape of the inputs"
            )

    def check_structure(self, structure: Any, layer: str) -> None:
        """Raise ``UsageError`` if a layer returned another structure, or other values that are not tensors."""
        if structure == self.structure:
            return
        before, now = (dict(named_leaves(each, "output")) for each in (self.structure, structure))
        name = next((name for name in {**before, **now} if before.get(name, _NONE) != now.get(name, _NONE)), "output")
        told = [_tell(each[name]) if name in each else "missing" for each in (now, before)]
        raise UsageError(
            f"layer {layer}, after which the model is cut, returned another structure than before for inputs of "
            f"the same shape: {name} is {told[0]} and was {told[1]}; what is no tensor must follow from the shape of "
            "the inputs; make it a tensor, or an argument of the model that later layers name in their forward"
        )

    def __str__(self) -> str:
        told = (f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in self.specs)
        return ", ".join(told) or "nothing"

    def _places(self) -> list[int]:
        places = [0]
        for shape, dtype in self.specs:
            nbytes = prod(shape) * dtype.itemsize
            places.append(places[-1] + -(-nbytes // _BLOCK) * _BLOCK)
        return places


def _tell(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, Slot) else repr(leaf)
