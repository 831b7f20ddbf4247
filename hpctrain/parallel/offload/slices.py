"""Cache-sized slices of parameters, gradients and states, and updates of a few slices at a time.

Note: why slices. Separate passes over all of memory cost, per float32 parameter, 8 bytes to clip
its gradient, 28 for the update by AdamW and 6 for its copy in bfloat16. With slices that stay in a
core's cache, each call finds the result of the previous call there: the scaled gradient never
reaches main memory, and the copy reads the values that the update has just written. The Python
overhead per slice must be small compared with the time for its bytes. Therefore views are created
once and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpctrain.parallel.offload.kernels import LINE, Kernel

_GRADIENTS = (torch.float32, torch.bfloat16)
_own = threading.local()


@dataclass(slots=True)
class Row:
    """A parameter with its gradient, copy and states; ``step`` counts the update to be made."""

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None
    columns: list[Tensor]
    step: Tensor | None

    def fits(self) -> bool:
        """Return whether all tensors can be cut alike: on the host, contiguous, parameter and states in float32."""
        numel, columns = self.parameter.numel(), [self.parameter, *self.columns]
        copies = [] if self.copy is None else [self.copy]
        return (
            numel > 0
            and all(one.dtype is torch.float32 for one in columns)
            and self.gradient.dtype in _GRADIENTS
            and all(
                one.numel() == numel and one.device.type == "cpu" and one.is_contiguous()
                for one in (*columns, *copies, self.gradient)
            )
        )

    @property
    def place(self) -> tuple[object, ...]:
        """Return a key that distinguishes the memory that is kept between updates from other memory."""
        copy = () if self.copy is None else (self.copy.data_ptr(), self.copy.dtype)
        return self.parameter.data_ptr(), copy, *(one.data_ptr() for one in self.columns)


class Cut:
    """Slices of the data that is kept between updates: a parameter, its copy, its states."""

    def __init__(self, row: Row, numel: int) -> None:
        self.made_for = numel, row.place
        self.parameters: Sequence[Tensor] = torch.split(row.parameter.view(-1), numel)
        nothing = [None] * len(self.parameters)
        self.copies: Sequence[Tensor | None] = nothing if row.copy is None else torch.split(row.copy.view(-1), numel)
        self.columns: list[Sequence[Tensor]] = [torch.split(one.view(-1), numel) for one in row.columns]


@dataclass(slots=True)
class Batch:
    """Slices that a thread updates together, one list per kind."""

    kernel: Kernel
    columns: list[list[Tensor]]  # one list per kind of state
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    copies: list[Tensor | None] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    room: int = 0  # elements, including the alignment of the slices
    exact: bool = True  # whether all gradients are float32

    def update(self, scale: Tensor | None, numel: int) -> None:
        """Update the slices by their gradients times ``scale``, if given, and write the copies."""
        gradients = self.gradients if self.exact and scale is None else _scaled(self.gradients, scale, numel)
        self.kernel(self.parameters, gradients, self.columns, self.steps)
        for copy, parameter in zip(self.copies, self.parameters):
            if copy is not None:
                copy.copy_(parameter)


def batches(kernel: Kernel, rows: Iterable[tuple[Row, Cut]], numel: int) -> Iterator[Batch]:
    """Put slices that one kernel updates into batches of at most ``numel`` elements, a multiple of ``LINE``."""
    batch = None
    for row, cut in rows:
        gradients = torch.split(row.gradient.view(-1), numel)
        for number, (parameter, gradient) in enumerate(zip(cut.parameters, gradients)):
            room = _aligned(parameter.numel())
            if batch is None or batch.room + room > numel:
                if batch is not None:
                    yield batch
                batch = Batch(kernel, [[] for _ in row.columns])
            batch.parameters.append(parameter)
            batch.gradients.append(gradient)
            batch.exact &= gradient.dtype is torch.float32
            batch.copies.append(cut.copies[number])
            for kind, column in zip(batch.columns, cut.columns):
                kind.append(column[number])
            if row.step is not None:
                batch.steps.append(row.step)
            batch.room += room
    if batch is not None:
        yield batch


def _scaled(gradients: list[Tensor], scale: Tensor | None, numel: int) -> list[Tensor]:
    """Return gradients as float32, times ``scale``, in memory of this thread that stays in its cache."""
    room: Tensor | None = getattr(_own, "room", None)
    if room is None or room.numel() < numel:
        room = _own.room = torch.empty(numel, dtype=torch.float32)
    scaled, first = [], 0
    for gradient in gradients:
        size = gradient.numel()
        target = room if size == room.numel() else room[first : first + size]
        first += _aligned(size)
        if gradient.dtype is not torch.float32:
            gradient = target.copy_(gradient)
        if scale is not None:
            gradient = torch.mul(gradient, scale, out=target)
        scaled.append(gradient)
    return scaled


def _aligned(numel: int) -> int:
    return -(-numel // LINE) * LINE
