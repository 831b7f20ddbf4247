"""Simulated memory of the passes of a sequence of layers: pure arithmetic on the memory of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.forecast.passes import LayerPass


@dataclass(frozen=True)
class Moment:
    """Memory event: bytes at one moment of a step, in addition to persistent memory."""

    when: str
    activations: int = 0
    gradients: int = 0
    gathered: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """Return their sum."""
        return self.activations + self.gradients + self.gathered + self.temporary


@dataclass(frozen=True)
class Step:
    """Layer of a sequence: the memory of its passes, its gradients by name, and the bytes gathered for it."""

    name: str
    found: LayerPass
    gradients: dict[str, int]
    gathered: int = 0
    away: bool = False  # its input is offloaded to the host until the backward pass


@dataclass(frozen=True)
class PassMemory:
    """Bytes that a sequence keeps between its forward and its backward pass, and the memory events of both.

    The events exclude activations that were kept, and gradients that existed, before the pass
    began.
    """

    kept: int
    away: int  # kept bytes that are offloaded to the host
    forward: list[Moment]
    fresh: list[Moment]  # of the backward pass, if all parameter gradients are kept
    passing: list[Moment]  # of the backward pass, if gradients are removed or accumulated at once
    held: int  # bytes kept for deferred weight gradients
    weights: list[Moment]  # while deferred weight gradients are computed


def walk(steps: Sequence[Step], loss: LayerPass | None, *, outputs_stay: bool) -> PassMemory:
    """Simulate a sequence that ends in ``loss``, if any; ``outputs_stay``: its outputs live until backward ends."""
    row = [*steps, Step("loss", loss, {})] if loss is not None else list(steps)
    last = len(steps) - 1  # index of the layer whose outputs stay
    live = away = 0
    forward = []
    stays = [_stays(row, place) or outputs_stay and place == last for place in range(len(row))]
    for place, step in enumerate(row):
        forward.append(Moment(f"forward of {step.name}", live, 0, step.gathered, step.found.forward))
        if place:
            before = row[place - 1].found.output
            if not stays[place - 1]:
                live -= before
            elif step.away:
                live, away = live - before, away + before
        live += step.found.inside + step.found.output
    if not outputs_stay and loss is None and not row[-1].found.keeps_output:
        live -= row[-1].found.output
    return PassMemory(
        live,
        away,
        forward,
        _backward(row, live, stays, last if outputs_stay else -1, fresh=True),
        _backward(row, live, stays, last if outputs_stay else -1, fresh=False),
        sum(step.found.held for step in row),
        _weights(row),
    )


def _stays(row: Sequence[Step], place: int) -> bool:
    """Return whether autograd keeps the output of a layer."""
    return row[place].found.keeps_output or place + 1 < len(row) and row[place + 1].found.needs_input


def _backward(row: Sequence[Step], live: int, stays: Sequence[bool], held: int, *, fresh: bool) -> list[Moment]:
    """Return the memory events of the backward pass; the output of layer ``held`` is live until its end."""
    moments = []
    gradients: dict[str, int] = {}
    for place in reversed(range(len(row))):
        step = row[place]
        found = step.found
        new = fresh and not step.gradients.keys() <= gradients.keys()
        if step.away and place:
            live += row[place - 1].found.output  # it has been copied back to the device
        temporary = found.fresh if new else found.passing
        if place > 1 and row[place - 1].away:
            temporary += row[place - 2].found.output  # prefetched meanwhile
        moments.append(Moment(f"backward of {step.name}", live, sum(gradients.values()), step.gathered, temporary))
        if fresh:
            gradients.update(step.gradients)
        live -= found.inside
        if found.keeps_output and place != held:
            live -= found.output
        if place and stays[place - 1] and not row[place - 1].found.keeps_output and place - 1 != held:
            live -= row[place - 1].found.output
    return moments


def _weights(row: Sequence[Step]) -> list[Moment]:
    """Return the memory events of computing deferred weight gradients, from the values that are kept for them."""
    return [Moment(f"weights of {step.name}", 0, 0, 0, step.found.weights) for step in row if step.found.weights]
