"""Say what forward and backward passes take on one rank of a machine, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hpctrain.estimate.facts import Facts
from hpctrain.estimate.machine import Machine, Seat
from hpctrain.estimate.run import PlannedRun
from hpctrain.estimate.time_collectives import Group, Network, group_of
from hpctrain.estimate.time_layers import Timed
from hpctrain.estimate.time_tally import Work
from hpctrain.estimate.time_work import LayerWork, ModelWork
from hpctrain.parallel.fsdp.units import find_units


@dataclass(frozen=True)
class Passes:
    """Hold the seconds of a layer's forward and backward pass, and of what tensor ranks exchange in them."""

    forward: float
    backward: float
    exchange_forward: float = 0.0
    exchange_backward: float = 0.0

    @property
    def exchange(self) -> float:
        """Return what the exchanges of both passes take."""
        return self.exchange_forward + self.exchange_backward


@dataclass(frozen=True)
class Clock:
    """Time layers, by what one of each kind took on this machine (``timed``) or by the machine's rates."""

    machine: Machine
    whole: ModelWork  # of the whole model
    local: ModelWork  # of what a tensor rank has of it; the same without tensor ranks
    timed: Mapping[int, Timed] | None = None  # whole layers
    recomputed: frozenset[int] = field(default=frozenset())  # numbers of layers that compute forward twice
    together: tuple[float, float] = (1.0, 1.0)  # what all layers of a pass take, against the sum of each by itself

    def layers(self, run: PlannedRun, network: Network) -> list[Passes]:
        """Return the passes of every layer on a microbatch, the loss last."""
        tensor = group_of(run.shape, "tensor", run.ranks_per_node)
        found = []
        for number, (layer, whole) in enumerate(zip(self.local.at(run.microbatch), self.whole.at(run.microbatch))):
            forward, backward = self._seconds(layer, whole, run.microbatch, network.seat)
            sent = [exchange_seconds(work, network, tensor) for work in (layer.forward, layer.backward)]
            if number in self.recomputed:
                backward, sent[1] = backward + forward, sent[1] + sent[0]
            found.append(Passes(forward, backward, *sent))
        return found

    def _seconds(self, layer: LayerWork, whole: LayerWork, samples: float, seat: Seat) -> tuple[float, float]:
        forward, backward = self._alone(layer, whole, samples, seat)
        return forward * self.together[0], backward * self.together[1]

    def _alone(self, layer: LayerWork, whole: LayerWork, samples: float, seat: Seat) -> tuple[float, float]:
        forward, backward = (seconds_of(work, self.machine, seat) for work in (layer.forward, layer.backward))
        if self.timed is None:
            return forward, backward
        alone, times = one_thread(self.machine), self.timed[layer.kind]
        # What one thread took for all of it, as much quicker as the rates say that this seat's share is.
        before = [seconds_of(work, self.machine, alone) for work in (whole.forward, whole.backward)]
        return (
            times.forward.at(samples) * _ratio(forward, before[0], seat),
            times.backward.at(samples) * _ratio(backward, before[1], seat),
        )


def _ratio(here: float, there: float, seat: Seat) -> float:
    return here / there if there > 0 else seat.crowd


def one_thread(machine: Machine) -> Seat:
    """Return the seat that layers are timed on."""
    return Seat(1, machine.flops[min(machine.flops)], machine.bandwidth[min(machine.bandwidth)], machine.call, 1.0, 0.0)


def seconds_of(work: Work, machine: Machine, seat: Seat) -> float:
    """Return the time of a pass by the rates of a seat.

    Products take what their operations or their memory takes, whichever is longer; everything else its memory. The host
    starts operators while a GPU is at work; on a CPU the same core does both.
    """
    products = max(work.flops / seat.flops, work.product_bytes / seat.bandwidth)
    kernels, calls = products + work.other_bytes / seat.bandwidth, work.calls * seat.call
    return kernels + calls if machine.kind == "cpu" else max(kernels, calls)


def exchange_seconds(work: Work, network: Network, tensor: Group) -> float:
    """Return the time of what tensor ranks exchange in a pass."""
    found = 0.0
    if work.reductions >= 0.5:
        found += work.reductions * network.seconds("all_reduce", work.reduced / work.reductions, tensor)
    if work.moves >= 0.5:
        # Both ways of a move are half of a sum.
        found += work.moves * network.seconds("all_reduce", work.moved / work.moves, tensor) / 2
    return found


def recomputed_layers(facts: Facts, run: PlannedRun) -> frozenset[int]:
    """Return the numbers of the layers that are computed again in the backward pass."""
    if not run.parallel.recompute:
        return frozenset()
    again = {module for unit in find_units(facts.model, run.parallel.units)[1:] for module in unit.module.modules()}
    return frozenset(number for number, layer in enumerate(facts.layers) if layer.module in again)


def dtype_of(run: PlannedRun) -> torch.dtype | None:
    """Return what floating-point numbers are computed in, where that is not what the model is in."""
    narrow = run.settings.train.precision == "bfloat16" or run.parallel.mixed_precision == "bfloat16"
    return torch.bfloat16 if narrow else None
