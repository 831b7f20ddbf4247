"""Update the same parameters by torch's separate passes, and by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from offloading.names import ALONE, OURS, OURS_16, TORCH, TORCH_16
from offloading.task import Piece, Task, lay_out, optimizer_of
from torch import nn

from hpctrain.parallel.offload.update import OnePass

SCALE = 0.999  # of clipping; gradients that torch scales in place each time hardly change


class Side:
    """Hold parameters, gradients in float32 and bfloat16, states, and room for copies in bfloat16."""

    def __init__(self, task: Task) -> None:
        shapes = task.pieces
        self.masters = [lay_out(piece, torch.float32, number) for number, piece in enumerate(shapes)]
        self.gradients = [lay_out(piece, torch.float32, 100 + number) for number, piece in enumerate(shapes)]
        self.gradients_16 = [lay_out(piece, torch.bfloat16, 100 + number) for number, piece in enumerate(shapes)]
        self.copies = [lay_out(piece, torch.bfloat16, number) for number, piece in enumerate(shapes)]
        self.parameters = [[nn.Parameter(view) for view in piece.views] for piece in self.masters]
        self.optimizer = optimizer_of([one for piece in self.parameters for one in piece])

    def same(self, other: Side) -> bool:
        """Tell whether another side has the same masters and copies, bit for bit."""
        pairs = [*zip(self.masters, other.masters), *zip(self.copies, other.copies)]
        return all(one.flat.equal(two.flat) for one, two in pairs)


class Torch(Side):
    """Update in passes over all of memory."""

    def step(self) -> None:
        """Clip, update, and copy."""
        for piece in self.gradients:
            piece.flat.mul_(SCALE)
        self.update()
        for master, copy in zip(self.masters, self.copies):
            copy.flat.copy_(master.flat)

    def step_16(self) -> None:
        """Take the gradients from bfloat16 before."""
        for source, target in zip(self.gradients_16, self.gradients):
            target.flat.copy_(source.flat)
        self.step()

    def update(self) -> None:
        """Update alone."""
        for parameters, gradients in zip(self.parameters, self.gradients):
            for parameter, gradient in zip(parameters, gradients.views):
                parameter.grad = gradient
        self.optimizer.step()


class Ours(Side):
    """Update in one pass, piece by piece."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.one_pass = OnePass(self.optimizer)

    def step(self) -> None:
        """Update by gradients in float32."""
        self._step(self.gradients)

    def step_16(self) -> None:
        """Update by gradients in bfloat16."""
        self._step(self.gradients_16)

    def _step(self, gradients: list[Piece]) -> None:
        for parameters, piece, copy in zip(self.parameters, gradients, self.copies):
            self.one_pass.step(parameters, piece.views, SCALE, copy.views)


def make(names: list[str], task: Task) -> tuple[dict[str, Callable[[], None]], list[Side]]:
    """Return the steps of candidates by name, and both sides."""
    theirs, ours = Torch(task), Ours(task)
    steps = {
        OURS: ours.step,
        TORCH: theirs.step,
        OURS_16: ours.step_16,
        TORCH_16: theirs.step_16,
        ALONE: theirs.update,
    }
    return {name: steps[name] for name in names}, [theirs, ours]


def thread_counts() -> list[int]:
    """Return with how many threads is measured: with as many as torch takes, and with one."""
    return sorted({torch.get_num_threads(), 1}, reverse=True)
