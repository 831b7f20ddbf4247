"""Describe the tensors that go from one chunk of a model to the next: their shapes and where they lie in one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hpctrain.errors import UsageError

_BLOCK = 64  # bytes: tensors begin where vector loads like it

Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Parcel:
    """Hold shape and dtype of each tensor of a message, and whether a layer takes them as one tuple."""

    specs: tuple[Spec, ...]
    as_tuple: bool = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor], as_tuple: bool = False) -> Parcel:
        """Describe tensors."""
        return cls(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors), as_tuple)

    def gradients(self) -> Parcel:
        """Describe what comes back: a gradient for each tensor that can have one."""
        return Parcel(tuple(spec for spec in self.specs if spec[1].is_floating_point))

    @property
    def nbytes(self) -> int:
        """Return the bytes of a memory that holds all of them."""
        return self._places()[-1]

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that lie in a memory of ``nbytes`` bytes."""
        places = self._places()
        return tuple(
            flat[place : place + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for place, (shape, dtype) in zip(places, self.specs)
        )

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ``UsageError`` where tensors are not those that were agreed on."""
        found = Parcel.of(tensors)
        if found.specs != self.specs:
            raise UsageError(
                f"a stage of the pipeline returned {found} after {self} for inputs of the same shape: "
                "shapes must follow from the shape of the inputs"
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
