"""Name what a rank of a pipeline does: one kind of work, for one chunk of the model and one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Be a kind of work; the letter stands in texts and pictures."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights
    INPUT = "I"  # gradients of inputs only
    WEIGHT = "W"  # gradients of weights, after those of the inputs
    UPDATE = "U"  # the optimizer's step

    @property
    def word(self) -> str:
        """Return the name that traces and pictures have for it."""
        return self.name.lower()


@dataclass(frozen=True)
class Action:
    """Be one piece of work; ``chunk`` counts through the whole model, from its input."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Actions = list[Action]  # of one rank, in the order in which it carries them out


def forward(chunk: int, microbatch: int) -> Action:
    """Return a forward pass."""
    return Action(Kind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """Return a whole backward pass."""
    return Action(Kind.BACKWARD, chunk, microbatch)
