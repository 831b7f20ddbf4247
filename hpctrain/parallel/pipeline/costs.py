"""Costs of layers, and a partition of the layers into stages of equal cost.

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

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.errors import UsageError
from hpctrain.parallel.backward_from import backward_from
from hpctrain.parallel.inputs import map_leaves, tensors_of
from hpctrain.parallel.pipeline.calls import MicrobatchCall, call_layer
from hpctrain.parallel.pipeline.layers import Layer
from hpctrain.parallel.pipeline.partition import check_parts, explicit_partition, partition
from hpctrain.parallel.skip import carrying

LayerCall = Callable[[Any], Any]
MEASURES = ("compute", "time", "parameters")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_MATRIX_DIMS = 2  # a parameter with at least this many dims is multiplied with the input


def costs(
    layers: Sequence[Layer], how: str, example: Any = None, device: torch.device = torch.device("cpu")
) -> list[float]:
    """Return the cost of each layer by ``how``: compute, time (in seconds) or parameters.

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
    return measured(layers, example, device)


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
    found = []

    def run(call: LayerCall, x: Any) -> Any:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            result = call(x)
        found.append(float(counter.get_total_flops()))
        return result

    _run_each(layers, example, torch.device("meta"), run)
    return found


def measured(layers: Sequence[Layer], example: Any, device: torch.device, repeats: int = 5) -> list[float]:
    """Return the seconds of each layer's forward and backward pass on an example, as a median of ``repeats`` passes.

    The layers are copied to the device one after the other, so a model on the meta device never
    needs all its memory. The model and torch's generators are left unchanged.
    """
    found = []

    def run(call: LayerCall, x: Any) -> Any:
        result, _ = _timed(call, x, device)  # warm-up
        found.append(statistics.median(_timed(call, x, device)[1] for _ in range(repeats)))
        return result

    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        _run_each(layers, example, device, run)
    return found


def _run_each(
    layers: Sequence[Layer], example: Any, device: torch.device, run: Callable[[LayerCall, Any], Any]
) -> None:
    """Pass ``run`` a callable for a copy of each layer, and the output of the previous layer."""
    given = map_leaves(MicrobatchCall.of(example), lambda one: one.detach().to(device))
    x: Any = given
    stored: dict[str, Tensor] = {}
    for layer in layers:
        try:
            x = run(_callable(replace(layer, module=_copy(layer.module, device)), given, stored), x)
        except Exception as error:
            error.add_note(f"(in layer {layer.name}, run on an example to find out what it costs)")
            raise
        x = map_leaves(x, lambda one: one.detach())


def _callable(layer: Layer, given: MicrobatchCall, stored: dict[str, Tensor]) -> LayerCall:
    """Return a function that runs a layer; each run sees the same tensors stored by earlier ``Keep`` layers."""
    before = {name: one.detach() for name, one in stored.items()}

    def call(x: Any) -> Any:
        stored.clear()
        stored.update(before)
        with carrying(stored):
            return x.call_first(layer) if isinstance(x, MicrobatchCall) else call_layer(layer, x, given.named)

    return call


def _timed(call: LayerCall, x: Any, device: torch.device) -> tuple[Any, float]:
    x = map_leaves(x, lambda one: one.detach().requires_grad_(one.is_floating_point()))
    _synchronize(device)
    start = time.perf_counter()
    with torch.enable_grad():
        result = call(x)
    outputs = [one for one in tensors_of(result) if one.requires_grad]
    if outputs:
        backward_from(outputs, [torch.ones_like(one) for one in outputs])
    _synchronize(device)
    return result, time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy on a device; tensors without memory get small numbers, whose magnitude does not change the cost."""
    memo: dict[int, Any] = {}
    with _without_gradients(module):
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.device != device:
                memo[id(tensor)] = _copied_tensor(tensor, device)
        return copy.deepcopy(module, memo)


def _copied_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    copied = torch.empty_like(tensor, device=device)
    if not tensor.is_meta and device.type != "meta":
        copied.copy_(tensor.detach())
    elif device.type != "meta":
        copied.fill_(0.01) if copied.is_floating_point() else copied.zero_()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Exclude gradients from copies for the ``with`` block."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.no_grad():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


# Partition of a sequence of layers into stages, by the costs of the layers or as the user specifies -------------------


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
    the result.
    """
    check_parts(len(layers), parts)
    if not isinstance(how, str):
        return explicit_partition([layer.name for layer in layers], parts, how)
    return partition(costs(layers, how, example, device), parts)
