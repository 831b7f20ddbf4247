"""Time of a model's layers: one of each kind timed on this machine, and the times that follow for a rank's passes.

Rates of products and memory are those of large operators; the rates of a given model's operators
depend on their shapes. If the ranks will use processors like this one, one layer of each kind is
therefore run on one thread, at two numbers of samples. Its times at other numbers lie on the line
through both. Each layer is timed with caches in the state that they would have in a model, where
other layers have run since its last run. For busy machines, see the note in ``machine``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.forecast.machine import MachineRates, RankShare, repeated, restored_threads
from hpctrain.forecast.run import Group, ModelFacts, PlannedRun, group_of
from hpctrain.forecast.time_communication import Network
from hpctrain.forecast.time_work import LayerWork, ModelWork, OpCounts, as_leaf
from hpctrain.parallel.fsdp.units import find_units
from hpctrain.parallel.objective import loss_named, map_leaves, tensors_of
from hpctrain.parallel.pipeline.channels import MessageFormat
from hpctrain.parallel.pipeline.skip import carrying

REPEATS, LONGEST = 5, 0.3  # repeats of each layer at each number of samples; seconds after which no more are made
MOST_SECONDS, MOST_BYTES = 1.0, 2**30  # limits of time and size for a layer to be timed
CPU = torch.device("cpu")
_CACHES = 2**26  # bytes: more than the caches of a core have


@dataclass(frozen=True)
class LinearFit:
    """Straight line over the number of samples."""

    fixed: float
    each: float

    def at(self, samples: float) -> float:
        """Return the value at ``samples``, at least zero."""
        return max(self.fixed + self.each * samples, 0.0)


@dataclass(frozen=True)
class LayerFit:
    """Seconds of a layer's two passes on one thread, as lines over the number of samples."""

    forward: LinearFit
    backward: LinearFit


def time_layers(
    facts: ModelFacts, work: ModelWork, samples: int, rank_share: RankShare, loss: str, dtype: torch.dtype | None = None
) -> dict[int, LayerFit] | None:
    """Return the times by kind of layer; None if a layer is too large to be timed here.

    ``samples`` is the microbatch size of a rank; fewer samples are timed if they would take long.
    ``dtype`` is the dtype of autocast. torch's generators and its number of threads are restored.
    """
    chosen = _samples(work, samples, rank_share)
    largest = max(sum(one.nbytes for one in layer.module.parameters()) for layer in facts.layers)
    if chosen is None or largest > MOST_BYTES:
        return None
    low, high = chosen
    with restored_threads(), torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        first, second = (_time_layers(facts, count, loss, dtype) for count in (low, high))
    return {
        kind: LayerFit(*(_fit(low, first[kind][direction], high, second[kind][direction]) for direction in (0, 1)))
        for kind in first
    }


def _samples(work: ModelWork, samples: int, rank_share: RankShare) -> tuple[int, int] | None:
    """Return the two numbers of samples to time: the requested number, halved while too slow, and a quarter of it."""
    high = samples
    while high > 1 and _longest(work.at(high), rank_share) > MOST_SECONDS:
        high //= 2
    if _longest(work.at(high), rank_share) > MOST_SECONDS:
        return None
    return (high // 4, high) if high >= 4 else (1, max(high, 2))


def _longest(layers: tuple[LayerWork, ...], rank_share: RankShare) -> float:
    return max(
        (layer.forward.flops + layer.backward.flops) / rank_share.flops
        + (layer.forward.other_bytes + layer.backward.other_bytes) / rank_share.bandwidth
        for layer in layers
    )


def _fit(low: int, first: float, high: int, second: float) -> LinearFit:
    slope = max((second - first) / (high - low), 0.0)
    return LinearFit(max(second - slope * high, 0.0), slope if slope > 0 else 0.0)


def _time_layers(
    facts: ModelFacts, samples: int, loss: str, dtype: torch.dtype | None
) -> dict[int, tuple[float, float]]:
    """Return the seconds of a forward and a backward pass of each kind of layer."""
    x: Any = facts.inputs.of(samples, CPU)
    targets = facts.targets.of(samples, CPU)
    known: dict[Any, tuple[tuple[float, float], Any]] = {}
    skips: dict[str, Tensor] = {}
    found: dict[int, tuple[float, float]] = {}
    for layer in facts.layers:
        key = (layer.kind, MessageFormat.of(tensors_of(x)).specs)
        if key not in known:
            module = real_copy(layer.module)
            known[key] = _time(module, x, skips, dtype, [*module.parameters()])
        times, x = known[key]
        found[layer.kind] = times
    compare = loss_named(loss)
    found[-1], _ = _time(lambda outputs: compare(outputs, targets), x, skips, None, [])
    return found


def _time(
    call: Callable[[Any], Any],
    x: Any,
    skips: dict[str, Tensor],
    dtype: torch.dtype | None,
    parameters: Sequence[nn.Parameter],
) -> tuple[tuple[float, float], Any]:
    """Return the median seconds of both passes, as single times vary, and the layer's output."""
    before = {name: one.detach() for name, one in skips.items()}

    def passes() -> tuple[Any, float, float]:
        skips.clear()
        skips.update(before)
        inputs = map_leaves(x, as_leaf)
        _evict_caches(inputs)
        start = time.thread_time()
        with carrying(skips), torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = call(inputs)
        middle = time.thread_time()
        outputs = [one for one in tensors_of(result) if one.requires_grad]
        gradients = [torch.ones_like(one) for one in outputs]
        _evict_caches(gradients)
        begin = time.thread_time()
        if outputs:
            torch.autograd.backward(outputs, gradients)
        end = time.thread_time()
        for one in parameters:
            one.grad = None
        return result, middle - start, end - begin

    runs = repeated(passes, REPEATS, LONGEST)
    return (median(run[1] for run in runs), median(run[2] for run in runs)), map_leaves(runs[0][0], Tensor.detach)


@cache
def _filler() -> Tensor:
    return torch.zeros(_CACHES // 4)


def _evict_caches(values: Any) -> None:
    """Evict all from the caches except the values that the neighbouring layer has just written."""
    _filler().add_(1)
    for one in tensors_of(values):
        one.detach().clone()


def real_copy(module: nn.Module) -> nn.Module:
    """Return a copy with allocated memory, filled with small numbers; their values do not affect the time."""
    made = copy.deepcopy(module).to_empty(device=CPU)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02) if parameter.is_floating_point() else parameter.zero_()
        for buffer in made.buffers():
            buffer.fill_(1)
    return made


# Time of forward and backward passes on one rank of a machine, layer by layer -----------------------------------------


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer's forward and backward pass, and of the tensor-parallel communication in them."""

    forward: float
    backward: float
    exchange_forward: float = 0.0
    exchange_backward: float = 0.0

    @property
    def exchange(self) -> float:
        return self.exchange_forward + self.exchange_backward


@dataclass(frozen=True)
class LayerTimer:
    """Timing of layers, from measured layers of each kind (``timed``) or from the machine's rates."""

    machine: MachineRates
    whole: ModelWork  # of the whole model
    local: ModelWork  # of the part of a tensor rank; the same without tensor parallelism
    timed: Mapping[int, LayerFit] | None = None  # unsplit layers
    recomputed: frozenset[int] = field(default=frozenset())  # numbers of recomputed layers
    dry_run_ratio: tuple[float, float] = (1.0, 1.0)  # time of each whole pass, relative to the sum of its layers

    def layers(self, run: PlannedRun, network: Network) -> list[LayerTime]:
        """Return the times of every layer on a microbatch, the loss last."""
        tensor = group_of(run, "tensor")
        found = []
        for number, (layer, whole) in enumerate(zip(self.local.at(run.microbatch), self.whole.at(run.microbatch))):
            forward, backward = self._seconds(layer, whole, run.microbatch, network.rank_share)
            sent = [exchange_seconds(work, network, tensor) for work in (layer.forward, layer.backward)]
            if number in self.recomputed:
                backward, sent[1] = backward + forward, sent[1] + sent[0]
            found.append(LayerTime(forward, backward, *sent))
        return found

    def _seconds(
        self, layer: LayerWork, whole: LayerWork, samples: float, rank_share: RankShare
    ) -> tuple[float, float]:
        """Return the seconds of both passes of a layer."""
        forward, backward = (seconds_of(work, self.machine, rank_share) for work in (layer.forward, layer.backward))
        if self.timed is not None:
            single, times = one_thread(self.machine), self.timed[layer.kind]
            # Scale the time on one thread by the ratio of the rates of this rank's share to those of
            # one thread.
            before = [seconds_of(work, self.machine, single) for work in (whole.forward, whole.backward)]
            forward = times.forward.at(samples) * _ratio(forward, before[0], rank_share)
            backward = times.backward.at(samples) * _ratio(backward, before[1], rank_share)
        return forward * self.dry_run_ratio[0], backward * self.dry_run_ratio[1]


def _ratio(here: float, there: float, rank_share: RankShare) -> float:
    return here / there if there > 0 else rank_share.oversubscription


def one_thread(machine: MachineRates) -> RankShare:
    """Return the rates of a single thread, on which layers are timed."""
    return RankShare(
        1, machine.flops[min(machine.flops)], machine.bandwidth[min(machine.bandwidth)], machine.op_overhead, 1.0, 0.0
    )


def seconds_of(work: OpCounts, machine: MachineRates, rank_share: RankShare) -> float:
    """Return the time of a pass at the rates of a rank.

    Products take the time of their operations or of their memory traffic, whichever is longer;
    everything else takes the time of its memory traffic. On a GPU, the host launches operators
    while the device computes; on a CPU the same core does both.
    """
    products = max(work.flops / rank_share.flops, work.product_bytes / rank_share.bandwidth)
    kernels, calls = products + work.other_bytes / rank_share.bandwidth, work.calls * rank_share.op_overhead
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
