"""Offset between the clocks of two ranks, by round-trip messages (Cristian, 1989).

The fastest of several round trips is the most accurate: the other clock was read at its midpoint,
with an error of at most half of the round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

Clock = Callable[[], float]
ClockSample = tuple[float, float, float]  # times: sent here, received there, returned here


def ask_clock(comm: Communicator, peer: int, rounds: int, clock: Clock) -> list[ClockSample]:
    """Return samples of the clock of a peer, which calls ``answer_clock`` with as many rounds."""
    import torch

    message = torch.zeros(1, dtype=torch.float64)
    samples = []
    for _ in range(rounds):
        sent = clock()
        comm.send(message, peer)
        comm.recv(message, peer)
        samples.append((sent, message.item(), clock()))
    return samples


def answer_clock(comm: Communicator, peer: int, rounds: int, clock: Clock) -> None:
    """Send this rank's clock to a peer that calls ``ask_clock``."""
    import torch

    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        comm.recv(message, peer)
        message.fill_(clock())
        comm.send(message, peer)


def offset(samples: Sequence[ClockSample]) -> tuple[float, float]:
    """Return by how much the other clock is ahead, and the error bound: half of the fastest round trip."""
    sent, there, back = min(samples, key=lambda sample: sample[2] - sample[0])
    return there - (sent + back) / 2, (back - sent) / 2
