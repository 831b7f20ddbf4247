"""Time of forward and backward passes on one rank of a machine, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hpctrain.forecast.facts import ModelFacts
from hpctrain.forecast.machine import MachineRates, RankShare
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_collectives import Group, Network, group_of
from hpctrain.forecast.time_layers import Timed
from hpctrain.forecast.time_tally import OpCounts
from hpctrain.forecast.time_work import LayerWork, ModelWork
from hpctrain.parallel.fsdp.units import find_units


@dataclass(frozen=True)
class Passes:
    """Seconds of a layer's forward and backward pass, and of the tensor-parallel communication in them."""

    forward: float
    backward: float
    exchange_forward: float = 0.0
    exchange_backward: float = 0.0

    @property
    def exchange(self) -> float:
        """Return the communication time of both passes."""
        return self.exchange_forward + self.exchange_backward


@dataclass(frozen=True)
class Clock:
    """Timing of layers, from measured layers of each kind (``timed``) or from the machine's rates."""

    machine: MachineRates
    whole: ModelWork  # of the whole model
    local: ModelWork  # of the part of a tensor rank; the same without tensor parallelism
    timed: Mapping[int, Timed] | None = None  # unsplit layers
    recomputed: frozenset[int] = field(default=frozenset())  # numbers of recomputed layers
    together: tuple[float, float] = (1.0, 1.0)  # time of each whole pass, relative to the sum of its layers

    def layers(self, run: PlannedRun, network: Network) -> list[Passes]:
        """Return the times of every layer on a microbatch, the loss last."""
        tensor = group_of(run.shape, "tensor", run.ranks_per_node)
        found = []
        for number, (layer, whole) in enumerate(zip(self.local.at(run.microbatch), self.whole.at(run.microbatch))):
            forward, backward = self._seconds(layer, whole, run.microbatch, network.seat)
            sent = [exchange_seconds(work, network, tensor) for work in (layer.forward, layer.backward)]
            if number in self.recomputed:
                backward, sent[1] = backward + forward, sent[1] + sent[0]
            found.append(Passes(forward, backward, *sent))
        return found

    def _seconds(self, layer: LayerWork, whole: LayerWork, samples: float, seat: RankShare) -> tuple[float, float]:
        forward, backward = self._alone(layer, whole, samples, seat)
        return forward * self.together[0], backward * self.together[1]

    def _alone(self, layer: LayerWork, whole: LayerWork, samples: float, seat: RankShare) -> tuple[float, float]:
        forward, backward = (seconds_of(work, self.machine, seat) for work in (layer.forward, layer.backward))
        if self.timed is None:
            return forward, backward
        alone, times = one_thread(self.machine), self.timed[layer.kind]
        # Scale the time on one thread by the ratio of the rates of this rank's share to those of
        # one thread.
        before = [seconds_of(work, self.machine, alone) for work in (whole.forward, whole.backward)]
        return (
            times.forward.at(samples) * _ratio(forward, before[0], seat),
            times.backward.at(samples) * _ratio(backward, before[1], seat),
        )


def _ratio(here: float, there: float, seat: RankShare) -> float:
    return here / there if there > 0 else seat.crowd


def one_thread(machine: MachineRates) -> RankShare:
    """Return the rates of a single thread, on which layers are timed."""
    return RankShare(
        1, machine.flops[min(machine.flops)], machine.bandwidth[min(machine.bandwidth)], machine.call, 1.0, 0.0
    )


def seconds_of(work: OpCounts, machine: MachineRates, seat: RankShare) -> float:
    """Return the time of a pass at the rates of a rank.

    Products take the time of their operations or of their memory traffic, whichever is longer;
    everything else takes the time of its memory traffic. On a GPU, the host launches operators
    while the device computes; on a CPU the same core does both.
    """
    products = max(work.flops / seat.flops, work.product_bytes / seat.bandwidth)
    kernels, calls = products + work.other_bytes / seat.bandwidth, work.calls * seat.call
    return kernels + calls if machine.kind == "cpu" else max(kernels, calls)


def exchange_seconds(work: OpCounts, network: Network, tensor: Group) -> float:
    """Return the time of tensor-parallel communication in a pass."""
    found = 0.0
    if work.reductions >= 0.5:
        found += work.reductions * network.seconds("all_reduce", work.reduced / work.reductions, tensor)
    if work.moves >= 0.5:
        # A scatter and a gather each take half of an all-reduce.
        found += work.moves * network.seconds("all_reduce", work.moved / work.moves, tensor) / 2
    return found


def recomputed_layers(facts: ModelFacts, run: PlannedRun) -> frozenset[int]:
    """Return the numbers of the layers that are recomputed in the backward pass."""
    if not run.parallel.recompute:
        return frozenset()
    again = {module for unit in find_units(facts.model, run.parallel.units)[1:] for module in unit.module.modules()}
    return frozenset(number for number, layer in enumerate(facts.layers) if layer.module in again)


def dtype_of(run: PlannedRun) -> torch.dtype | None:
    """Return the compute dtype of floating-point values; None if it is the model's own."""
    narrow = run.settings.train.precision == "bfloat16" or run.parallel.mixed_precision == "bfloat16"
    return torch.bfloat16 if narrow else None
