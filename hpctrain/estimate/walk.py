"""Follow what a row of layers holds, forward and back: pure arithmetic on what was found out about each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.estimate.passes import LayerPass


@dataclass(frozen=True)
class Moment:
    """Hold the bytes, beyond what is there all the time, at one moment of a step."""

    when: str
    activations: int = 0
    gradients: int = 0
    gathered: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        """Return all of them."""
        return self.activations + self.gradients + self.gathered + self.temporary


@dataclass(frozen=True)
class Step:
    """Be one layer of a row: its pass, the gradients of its parameters by name, and what is gathered for it."""

    name: str
    found: LayerPass
    gradients: dict[str, int]
    gathered: int = 0
    away: bool = False  # its input waits on the host for the backward pass


@dataclass(frozen=True)
class Walk:
    """Hold what a row keeps between its forward and its backward pass, and the moments of both.

    The moments leave out what was kept, and what gradients were there, before the pass began.
    """

    kept: int
    away: int  # of what is kept, what waits on the host instead
    forward: list[Moment]
    fresh: list[Moment]  # of the backward pass, where gradients of parameters are kept one after the other
    passing: list[Moment]  # where they are taken away, or added to those that are there
    held: int  # what gradients of weights that are put off hold
    weights: list[Moment]  # while those are computed


def walk(steps: Sequence[Step], loss: LayerPass | None, *, outputs_stay: bool) -> Walk:
    """Follow a row; ``loss`` ends it, if it does. ``outputs_stay``: its outputs live until the backward pass ends."""
    row = [*steps, Step("loss", loss, {})] if loss is not None else list(steps)
    last = len(steps) - 1  # whose outputs stay
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
    return Walk(
        live,
        away,
        forward,
        _backward(row, live, stays, last if outputs_stay else -1, fresh=True),
        _backward(row, live, stays, last if outputs_stay else -1, fresh=False),
        sum(step.found.held for step in row),
        _weights(row),
    )


def _stays(row: Sequence[Step], place: int) -> bool:
    """Tell whether autograd keeps what a layer gives."""
    return row[place].found.keeps_output or place + 1 < len(row) and row[place + 1].found.needs_input


def _backward(row: Sequence[Step], live: int, stays: Sequence[bool], held: int, *, fresh: bool) -> list[Moment]:
    """Return the moments of the backward pass; the output of layer ``held`` stays to its end."""
    moments = []
    gradients: dict[str, int] = {}
    for place in reversed(range(len(row))):
        step = row[place]
        found = step.found
        new = fresh and not step.gradients.keys() <= gradients.keys()
        if step.away and place:
            live += row[place - 1].found.output  # it has come up
        temporary = found.fresh if new else found.passing
        if place > 1 and row[place - 1].away:
            temporary += row[place - 2].found.output  # comes up meanwhile
        moments.append(
            Moment(f"backward of {step.name}", live, sum(gradients.values()), step.gathered, temporary)
        )
        if fresh:
            gradients.update(step.gradients)
        live -= found.inside
        if found.keeps_output and place != held:
            live -= found.output
        if place and stays[place - 1] and not row[place - 1].found.keeps_output and place - 1 != held:
            live -= row[place - 1].found.output
    return moments


def _weights(row: Sequence[Step]) -> list[Moment]:
    """Return the moments in which gradients that were put off are computed, of what is held already."""
    return [Moment(f"weights of {step.name}", 0, 0, 0, step.found.weights) for step in row if step.found.weights]
