"""Timing of a model's layers on this machine, one of each kind, to learn the rates that its operators reach.

Rates of products and memory are those of large operators; the rates of a given model's operators
depend on their shapes. If the ranks will use processors like this one, one layer of each kind is
therefore run on one thread, at two numbers of samples. Its times at other numbers lie on the line
through both. Each layer is timed with caches in the state that they would have in a model, where
other layers have run since its last run. For busy machines, see the note in ``machine_probe``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.forecast.facts import ModelFacts
from hpctrain.forecast.machine import RankShare
from hpctrain.forecast.machine_probe import threads_as_before
from hpctrain.forecast.time_work import LayerWork, ModelWork, Values, calling, each, looks
from hpctrain.parallel.objective import loss_named
from hpctrain.parallel.skip import carrying

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
class Timed:
    """Seconds of a layer's two passes on one thread, as lines over the number of samples."""

    forward: LinearFit
    backward: LinearFit


def time_layers(
    facts: ModelFacts, work: ModelWork, samples: int, seat: RankShare, loss: str, dtype: torch.dtype | None = None
) -> dict[int, Timed] | None:
    """Return the times by kind of layer; None if a layer is too large to be timed here.

    ``samples`` is the microbatch size of a rank; fewer samples are timed if they would take long.
    ``dtype`` is the dtype of autocast. torch's generators and its number of threads are restored.
    """
    chosen = _samples(work, samples, seat)
    largest = max(sum(one.nbytes for one in layer.module.parameters()) for layer in facts.layers)
    if chosen is None or largest > MOST_BYTES:
        return None
    low, high = chosen
    with threads_as_before(), torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        first, second = (_walk(facts, count, loss, dtype) for count in (low, high))
    return {
        kind: Timed(*(_through(low, first[kind][way], high, second[kind][way]) for way in (0, 1))) for kind in first
    }


def _samples(work: ModelWork, samples: int, seat: RankShare) -> tuple[int, int] | None:
    """Return the two numbers of samples to time: the requested number, halved while too slow, and a quarter of it."""
    high = samples
    while high > 1 and _longest(work.at(high), seat) > MOST_SECONDS:
        high //= 2
    if _longest(work.at(high), seat) > MOST_SECONDS:
        return None
    return (high // 4, high) if high >= 4 else (1, max(high, 2))


def _longest(layers: tuple[LayerWork, ...], seat: RankShare) -> float:
    return max(
        (layer.forward.flops + layer.backward.flops) / seat.flops
        + (layer.forward.other_bytes + layer.backward.other_bytes) / seat.bandwidth
        for layer in layers
    )


def _through(low: int, first: float, high: int, second: float) -> LinearFit:
    slope = max((second - first) / (high - low), 0.0)
    return LinearFit(max(second - slope * high, 0.0), slope if slope > 0 else 0.0)


def _walk(facts: ModelFacts, samples: int, loss: str, dtype: torch.dtype | None) -> dict[int, tuple[float, float]]:
    """Return the seconds of a forward and a backward pass of each kind of layer."""
    x: Values = facts.inputs.of(samples, CPU)
    targets = facts.targets.of(samples, CPU)
    known: dict[Any, tuple[tuple[float, float], Values]] = {}
    kept: dict[str, Tensor] = {}
    found: dict[int, tuple[float, float]] = {}
    for layer in facts.layers:
        key = (layer.kind, looks(x))
        if key not in known:
            known[key] = _time(real_copy(layer.module), x, kept, dtype)
        times, x = known[key]
        found[layer.kind] = times
    compare = loss_named(loss)
    found[-1], _ = _time(calling(lambda outputs: compare(outputs, targets)), x, kept, None)
    return found


def _time(
    module: nn.Module, x: Values, kept: dict[str, Tensor], dtype: torch.dtype | None
) -> tuple[tuple[float, float], Values]:
    """Return the median seconds of both passes, as single times vary, and the layer's output."""
    before = {name: one.detach() for name, one in kept.items()}

    def passes() -> tuple[Values, float, float]:
        kept.clear()
        kept.update(before)
        inputs = each(x, lambda one: one.detach().requires_grad_(one.is_floating_point()))
        _forget(inputs)
        start = time.thread_time()
        with carrying(kept), torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = module(inputs)
        middle = time.thread_time()
        outputs = [one for one in ((result,) if isinstance(result, Tensor) else result) if one.requires_grad]
        gradients = [torch.ones_like(one) for one in outputs]
        _forget(tuple(gradients))
        begin = time.thread_time()
        if outputs:
            torch.autograd.backward(outputs, gradients)
        end = time.thread_time()
        module.zero_grad(set_to_none=True)
        return result, middle - start, end - begin

    result, forward, backward = _best(passes)
    return (forward, backward), each(result, lambda one: one.detach())


def _best(passes: Callable[[], tuple[Values, float, float]]) -> tuple[Values, float, float]:
    passes()
    end = time.perf_counter() + LONGEST
    runs = [passes()]
    while len(runs) < 2 or len(runs) < REPEATS and time.perf_counter() < end:
        runs.append(passes())
    return runs[0][0], median(run[1] for run in runs), median(run[2] for run in runs)


@cache
def _filler() -> Tensor:
    return torch.zeros(_CACHES // 4)


def _forget(values: Values) -> None:
    """Evict all from the caches except the values that the neighbouring layer has just written."""
    _filler().add_(1)
    each(values, lambda one: one.detach().clone())


def real_copy(module: nn.Module) -> nn.Module:
    """Return a copy with allocated memory, filled with small numbers; their values do not affect the time."""
    made = copy.deepcopy(module).to_empty(device=CPU)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02) if parameter.is_floating_point() else parameter.zero_()
        for buffer in made.buffers():
            buffer.fill_(1)
    return made
