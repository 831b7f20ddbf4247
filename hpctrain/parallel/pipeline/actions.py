"""Actions of a pipeline rank: one kind of pass for one chunk of the model and one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """Kind of an action; its letter is used in texts and plots."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights
    INPUT = "I"  # gradients of inputs only
    WEIGHT = "W"  # gradients of weights, after those of the inputs
    UPDATE = "U"  # the optimizer step

    @property
    def word(self) -> str:
        """Return the name of the kind in traces and plots."""
        return self.name.lower()


@dataclass(frozen=True)
class Action:
    """One action of a schedule; chunks are numbered through the whole model, from its input."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Actions = list[Action]  # of one rank, in execution order


def forward(chunk: int, microbatch: int) -> Action:
    """Return the forward pass of a microbatch on a chunk."""
    return Action(ActionKind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """Return the whole backward pass of a microbatch on a chunk."""
    return Action(ActionKind.BACKWARD, chunk, microbatch)
