"""Partition of the layers of a model into stages of equal cost, or as the user specifies, and costs of layers.

``compute`` counts multiplications and additions. With an example, it runs the layers on the meta
device, where nothing is computed, and counts every matrix product, convolution and attention.

Without an example, it estimates from the weights. Each element of a weight of a linear layer or
convolution is used once per position, so it counts twice (multiply and add). An embedding only
looks up a row, which costs next to nothing. Other parameters count once per element. The products
of some modules, such as attention, are not visible in their weights. Such a module may return their
number for one position from a method ``flops_beside_weights()``.

A head as wide as the vocabulary therefore counts in full, and the embedding does not. The number of
positions of an image after a layer does not follow from the weights: a model with convolutions
needs an example.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.errors import UsageError
from hpctrain.parallel.objective import map_leaves, tensors_of
from hpctrain.parallel.pipeline.layers import Layer, MicrobatchCall, call_layer, copied
from hpctrain.parallel.pipeline.skip import carrying
from hpctrain.parallel.pipeline.split_backward import backward_from
from hpctrain.parallel.rng import restored_generators

LayerCall = Callable[[Any], Any]
Floats = npt.NDArray[np.float64]
MEASURES = ("compute", "time", "parameters")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
REPEATS = 5  # timed passes per layer
_MATRIX_DIMS = 2  # a parameter with at least this many dims is multiplied with the input


def balance(
    layers: Sequence[Layer],
    parts: int,
    how: str | Sequence[int | str] = "compute",
    example: Any = None,
    device: torch.device = torch.device("cpu"),
) -> list[range]:
    """Return the layers of each part as ranges of indices into ``layers``.

    ``how`` is a measure of ``costs``, the number of layers of each part, or the names of the layers
    at which parts begin. Time is measured on the calling rank. Call this on one rank and broadcast
    the result. Raises ``UsageError`` if there are more parts than layers.
    """
    if parts < 1:
        raise UsageError(f"a model in {parts} stages: must be at least 1", everywhere=True)
    if len(layers) < parts:
        raise UsageError(
            f"{len(layers)} layers cannot make {parts} stages: use at most {len(layers)} (parallel.pipe times the "
            "chunks that each rank holds), or a model with more layers",
            everywhere=True,
        )
    if not isinstance(how, str):
        return explicit_partition([layer.name for layer in layers], parts, how)
    return partition(costs(layers, how, example, device), parts)


def parse_partition(partition: str) -> str | list[int | str]:
    """Return the value of ``parallel.partition``: a measure, or its comma-separated numbers or names."""
    words = [word.strip() for word in partition.split(",")]
    if words == [partition] and partition in MEASURES:
        return partition
    return [int(word) if word.isdecimal() else word for word in words]


def partition(costs: Sequence[float], parts: int) -> list[range]:
    """Cut a sequence into contiguous parts of at least one layer each, and minimise the largest sum of costs.

    Among the optimal partitions, choose the one with the most equal parts (smallest sum of
    squares). Among those, choose the one with the latest cuts, so that layers of cost zero stay
    with the layers before them. The result is exact, by dynamic programming in ``parts *
    len(costs)**2`` steps.
    """
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise UsageError(f"layers that cost {list(costs)}: costs must be finite and not negative", everywhere=True)
    cumulative = np.concatenate([[0.0], np.cumsum(np.array(costs, np.float64))])
    sizes = cumulative - cumulative[:, None]  # [start, end]: cost of the layers in between
    sizes[np.tri(len(sizes), dtype=bool)] = np.inf  # no part without a layer
    limit, _ = _cheapest(sizes, parts, np.maximum)
    sizes[sizes > limit] = np.inf
    _, cuts = _cheapest(sizes, parts, lambda total, size: total + size**2)
    return [range(start, end) for start, end in pairwise(cuts)]


def _cheapest(sizes: Floats, parts: int, combine: Callable[[Floats, Floats], Floats]) -> tuple[float, list[int]]:
    """Return the smallest total of parts, and their ends; ``combine`` adds a part to the total of those before it."""
    totals = np.full(len(sizes), np.inf)  # [end]: for the layers before `end`, in the parts so far
    totals[0] = 0.0
    starts = []  # [end]: index at which the last of those parts begins, the latest of equally good ones
    for _ in range(parts):
        candidates = combine(totals[:, None], sizes)
        starts.append(len(sizes) - 1 - candidates[::-1].argmin(0))
        totals = candidates.min(0)
    cuts = [len(sizes) - 1]
    for start_of in reversed(starts):
        cuts.append(int(start_of[cuts[-1]]))
    return float(totals[-1]), cuts[::-1]


def explicit_partition(names: Sequence[str], parts: int, chosen: Sequence[int | str]) -> list[range]:
    """Cut a sequence of named layers as the user specifies: by numbers of layers, or by the names at which parts begin.

    The names are those of the layers at which the second and later parts begin. The first layer may
    be named too.
    """
    kinds = {type(one) for one in chosen}
    if kinds == {str}:
        starts = _starts(names, parts, [str(one) for one in chosen])
    elif kinds == {int}:
        starts = _sums(names, parts, [int(one) for one in chosen])
    else:
        raise _error(chosen, "must be numbers of layers, or names of layers at which stages begin")
    return [range(start, end) for start, end in pairwise([*starts, len(names)])]


def _starts(names: Sequence[str], parts: int, chosen: list[str]) -> list[int]:
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise _error(chosen, f"there is no layer {unknown[0]}, layers are {_listed(names)}")
    indices = [names.index(name) for name in chosen]
    if indices != sorted(set(indices)):
        raise _error(chosen, "layers must be named in the order of the model, each once")
    starts = sorted({0, *indices})
    if len(starts) != parts:
        raise _error(chosen, f"makes {len(starts)} stages of the {parts} that are needed")
    return starts


def _sums(names: Sequence[str], parts: int, chosen: list[int]) -> list[int]:
    if len(chosen) != parts or min(chosen) < 1 or sum(chosen) != len(names):
        raise _error(chosen, f"must be {parts} numbers above 0 with the sum {len(names)}, the model's layers")
    return [0, *accumulate(chosen)][:-1]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:6])}, ... {', '.join(names[-5:])}"


def _error(chosen: Sequence[int | str], reason: str) -> UsageError:
    return UsageError(f"setting parallel.partition = {list(chosen)}: {reason}", everywhere=True)


# Costs of layers ------------------------------------------------------------------------------------------------------


def costs(
    layers: Sequence[Layer],
    how: str,
    example: Any = None,
    device: torch.device = torch.device("cpu"),
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the cost of each layer by ``how``: compute, time (in seconds of ``clock``) or parameters.

    ``example`` is a ``MicrobatchCall`` with a microbatch, or the input of the first layer. Only time requires
    it.
    """
    if how == "parameters":
        return [float(sum(one.numel() for one in layer.module.parameters())) for layer in layers]
    if how == "compute":
        return counted(layers, example) if example is not None else [estimated(layer.module) for layer in layers]
    if how != "time":
        allowed = ", ".join(MEASURES)
        raise UsageError(f"setting parallel.partition = {how!r}: must be one of {allowed}, or a list", everywhere=True)
    if example is None:
        raise UsageError(
            "parallel.partition = 'time' measures layers on an example microbatch, and there is none; write "
            "job.wrap(model, example=inputs) with what the model is called with, or example=loader to take it from a "
            "DataLoader's first batch, or choose 'compute' or 'parameters'",
            everywhere=True,
        )
    return measured(layers, example, device, clock)


def estimated(module: nn.Module) -> float:
    """Return the operations of a module's forward pass for one position, estimated from its weights."""
    total = 0.0
    for part in module.modules():
        extra = getattr(part, "flops_beside_weights", None)
        total += float(extra()) if callable(extra) else 0.0
        for parameter in part.parameters(recurse=False):
            if not isinstance(part, _EMBEDDINGS):
                total += parameter.numel() * (2 if parameter.ndim >= _MATRIX_DIMS else 1)
    return total


def counted(layers: Sequence[Layer], example: Any) -> list[float]:
    """Return the operations of each layer's forward pass on an example, of which only shape and dtype are used."""

    def count(call: LayerCall, x: Any) -> tuple[Any, float]:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            result = call(x)
        return result, float(counter.get_total_flops())

    return _costs_of_each(layers, example, torch.device("meta"), count)


def measured(layers: Sequence[Layer], example: Any, device: torch.device, clock: Callable[[], float]) -> list[float]:
    """Return the seconds of each layer's forward and backward pass on an example, as a median of 5 passes.

    The layers are copied to the device one after the other, so a model on the meta device never
    needs all its memory. The model and torch's generators are left unchanged.
    """

    def measure(call: LayerCall, x: Any) -> tuple[Any, float]:
        result, _ = _timed(call, x, device, clock)  # warm-up
        return result, statistics.median(_timed(call, x, device, clock)[1] for _ in range(REPEATS))

    with restored_generators({torch.device("cpu"), device}):
        return _costs_of_each(layers, example, device, measure)


def _costs_of_each(
    layers: Sequence[Layer], example: Any, device: torch.device, run: Callable[[LayerCall, Any], tuple[Any, float]]
) -> list[float]:
    """Return costs by ``run(call, x)``, for a copy of each layer and the output of the previous layer.

    ``run`` returns the layer's output and cost.
    """
    found, on_device = [], partial(_copied_tensor, device=device)
    given = map_leaves(MicrobatchCall.of(example), lambda one: one.detach().to(device))
    x: Any = given
    stored: dict[str, Tensor] = {}
    for layer in layers:
        try:
            x, cost = run(_callable(replace(layer, module=copied(layer.module, on_device)), given, stored), x)
        except Exception as error:
            error.add_note(f"(in layer {layer.name}, run on an example to find out what it costs)")
            raise
        x = map_leaves(x, lambda one: one.detach())
        found.append(cost)
    return found


def _callable(layer: Layer, given: MicrobatchCall, stored: dict[str, Tensor]) -> LayerCall:
    """Return a function that runs a layer; each run sees the same tensors stored by earlier ``Keep`` layers."""
    before = {name: one.detach() for name, one in stored.items()}

    def call(x: Any) -> Any:
        stored.clear()
        stored.update(before)
        with carrying(stored):
            return x.call_first(layer) if isinstance(x, MicrobatchCall) else call_layer(layer, x, given.named)

    return call


def _timed(call: LayerCall, x: Any, device: torch.device, clock: Callable[[], float]) -> tuple[Any, float]:
    x = map_leaves(x, lambda one: one.detach().requires_grad_(one.is_floating_point()))
    _synchronize(device)
    start = clock()
    with torch.enable_grad():
        result = call(x)
    outputs = [one for one in tensors_of(result) if one.requires_grad]
    if outputs:
        backward_from(outputs, [torch.ones_like(one) for one in outputs])
    _synchronize(device)
    return result, clock() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copied_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device; without memory, it gets small numbers, whose magnitude does not change the cost."""
    made = torch.empty_like(tensor, device=device)
    if not (tensor.is_meta or made.is_meta):
        made.copy_(tensor.detach())
    elif not made.is_meta:
        made.fill_(0.01) if made.is_floating_point() else made.zero_()
    return made
