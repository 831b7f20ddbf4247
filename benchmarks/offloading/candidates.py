"""Candidates for the same optimizer step: torch's separate passes, and hpctrain's single pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from offloading.names import ALONE, OURS, OURS_16, TORCH, TORCH_16
from offloading.task import Piece, Task, lay_out, optimizer_of
from torch import nn

from hpctrain.parallel.offload.one_pass import OnePass

SCALE = 0.999  # factor of clipping; gradients that torch scales in place each time hardly change


class Side:
    """Parameters, gradients in float32 and bfloat16, optimizer states, and memory for copies in bfloat16."""

    def __init__(self, task: Task) -> None:
        shapes = task.pieces
        self.masters = [lay_out(piece, torch.float32, number) for number, piece in enumerate(shapes)]
        self.gradients = [lay_out(piece, torch.float32, 100 + number) for number, piece in enumerate(shapes)]
        self.gradients_16 = [lay_out(piece, torch.bfloat16, 100 + number) for number, piece in enumerate(shapes)]
        self.copies = [lay_out(piece, torch.bfloat16, number) for number, piece in enumerate(shapes)]
        self.parameters = [[nn.Parameter(view) for view in piece.views] for piece in self.masters]
        self.optimizer = optimizer_of([one for piece in self.parameters for one in piece])

    def same(self, other: Side) -> bool:
        """Return whether another side has the same master weights and copies, bit for bit."""
        pairs = [*zip(self.masters, other.masters), *zip(self.copies, other.copies)]
        return all(one.flat.equal(two.flat) for one, two in pairs)


class Torch(Side):
    """Optimizer step of torch, in several passes over all of memory."""

    def step(self) -> None:
        """Clip, update, and copy."""
        for piece in self.gradients:
            piece.flat.mul_(SCALE)
        self.update()
        for master, copy in zip(self.masters, self.copies):
            copy.flat.copy_(master.flat)

    def step_16(self) -> None:
        """Convert the gradients from bfloat16 first."""
        for source, target in zip(self.gradients_16, self.gradients):
            target.flat.copy_(source.flat)
        self.step()

    def update(self) -> None:
        """Update only."""
        for parameters, gradients in zip(self.parameters, self.gradients):
            for parameter, gradient in zip(parameters, gradients.views):
                parameter.grad = gradient
        self.optimizer.step()


class Ours(Side):
    """Optimizer step of hpctrain, in one pass, chunk by chunk."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.one_pass = OnePass(self.optimizer)

    def step(self) -> None:
        """Update with gradients in float32."""
        self._step(self.gradients)

    def step_16(self) -> None:
        """Update with gradients in bfloat16."""
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
    """Return the thread counts to measure: torch's default, and one."""
    return sorted({torch.get_num_threads(), 1}, reverse=True)
