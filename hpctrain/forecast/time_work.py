"""Operation count of a model's passes, layer by layer, on tensors without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hpctrain.forecast.fake_tensors import FakeCommunicator, comparison, fake_copy, fake_mode, split_tensors, to_fake
from hpctrain.forecast.run import Group, LayerFacts, ModelFacts
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Compare, loss_named, map_leaves, tensors_of
from hpctrain.parallel.pipeline.channels import MessageFormat
from hpctrain.parallel.pipeline.skip import carrying

_LOOKUPS = ("embedding", "index_select", "gather")
_READS = (Tensor.__int__, Tensor.item)


@dataclass(frozen=True)
class OpCounts:
    """Operations and memory traffic of a pass."""

    flops: float = 0.0  # of products
    product_bytes: float = 0.0  # bytes that products read and write
    other_bytes: float = 0.0  # bytes that all other operators read and write
    calls: float = 0.0  # number of operators
    reduced: float = 0.0  # bytes of tensor-parallel all-reduces
    reductions: float = 0.0
    moved: float = 0.0  # bytes of tensor-parallel scatters and gathers
    moves: float = 0.0

    def __add__(self, other: OpCounts) -> OpCounts:
        """Return the work of one pass after the other."""
        return OpCounts(*(one + two for one, two in zip(astuple(self), astuple(other))))

    def __mul__(self, times: float) -> OpCounts:
        """Return the work of ``times`` such passes."""
        return OpCounts(*(one * times for one in astuple(self)))


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operation counter: counts in ``work`` the operators that run in a ``with`` block, which may be entered again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = OpCounts()
        self._attention_mode = _FusedAttentionMode(self)

    def __enter__(self) -> OpCounter:
        self.work = OpCounts()
        self._attention_mode.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._attention_mode.__exit__(*error)  # type: ignore[no-untyped-call]

    def communicated(self, operation: str, tensor: Tensor, group: Group) -> None:
        """Add an operation of a tensor-parallel group, which is not visible as an operator."""
        nbytes = float(tensor.nbytes)
        reduces = operation == "all_reduce"
        self.work += OpCounts(reduced=nbytes, reductions=1) if reduces else OpCounts(moved=nbytes, moves=1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work += work_of(func, args, kwargs or {}, result)
        return result


def work_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> OpCounts:
    """Return the work of one operator."""
    inputs, outputs = tensors_of([*args, *kwargs.values()]), tensors_of(result)
    memories = {one.untyped_storage()._cdata for one in inputs}
    writes = func._schema.is_mutable
    if not inputs or not outputs or not writes and all(one.untyped_storage()._cdata in memories for one in outputs):
        return OpCounts()  # a view, or an uninitialized allocation
    if func._overloadpacket.__name__ in _LOOKUPS:
        inputs = outputs  # only the selected rows of a table are read
    moved = float(sum(one.nbytes for one in chain(inputs, outputs)))
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return OpCounts(other_bytes=moved, calls=1)
    return OpCounts(float(formula(*args, **kwargs, out_val=result)), moved, 0.0, 1)


class _FusedAttentionMode(TorchFunctionMode):
    """Function mode that makes attention one operator, as in its fused kernels, and replaces reads of values."""

    def __init__(self, counter: OpCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = {**dict(zip(("query", "key", "value"), args)), **(kwargs or {})}
            vectors = named["query"], named["key"], named["value"]
            return _Attention.apply(*vectors, self._counter)  # type: ignore[no-untyped-call]
        if func in _READS:
            return 0  # the value is unknown: only assertions read it, and they hold here
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Attention that produces only shapes, without computing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, counter: OpCounter) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.counter = counter
        counter.work += attention(query, key, value)
        return torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        ctx.counter.work += attention(query, key, value) * 2
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def attention(query: Tensor, key: Tensor, value: Tensor) -> OpCounts:
    """Return the products of queries with keys and of scores with values; memory traffic is that of the vectors."""
    queries, result = query[..., 0].numel(), value.shape[-1]
    flops = 2.0 * queries * key.shape[-2] * (query.shape[-1] + result)
    moved = query.nbytes + key.nbytes + value.nbytes + queries * result * query.itemsize
    return OpCounts(flops, float(moved), 0.0, 1)


# Layers on tensors without memory -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ProfiledLayers:
    """Layers on tensors without memory, and the functions to run them with."""

    layers: Sequence[LayerFacts]
    compare: Compare
    make: Callable[[Tensor], Tensor]  # converts a tensor on the meta device to one that the layers accept
    counter: OpCounter


@contextmanager
def profiled_layers(
    facts: ModelFacts, loss: str, dtype: torch.dtype | None, parallel: ParallelSettings
) -> Iterator[ProfiledLayers]:
    """Provide a model's layers for the ``with`` block, with floating-point parameters in ``dtype``.

    Raises ``UsageError`` if the model cannot be split over that number of tensor ranks.
    """
    counter = OpCounter()
    if parallel.tensor == 1:
        model = facts.model if dtype is None else copy.deepcopy(facts.model).to(dtype)
        yield ProfiledLayers(_layers(facts, model), loss_named(loss), lambda tensor: tensor, counter)
        return
    with fake_mode():
        model = fake_copy(facts.model, dtype)
        ranks = FakeCommunicator(parallel.tensor, counter.communicated)
        split = split_tensors(model, ranks, parallel.tensor_plan, sequence=parallel.sequence)
        compare, outputs = comparison(loss, split)
        with outputs:
            yield ProfiledLayers(_layers(facts, model), compare, to_fake, counter)


def _layers(facts: ModelFacts, model: nn.Module) -> list[LayerFacts]:
    """Return the layers of a copy that correspond to those of the facts; other layers are kept unchanged."""
    inside = dict(model.named_modules())
    copies = {module: inside[name] for name, module in facts.model.named_modules()}
    return [replace(layer, module=copies.get(layer.module, layer.module)) for layer in facts.layers]


# Count of a model's passes, layer by layer ----------------------------------------------------------------------------
#
# Note: method. Every layer runs forward and backward on the meta device, at two numbers of samples; a
# line through both separates work that grows with the samples from fixed work (such as reading
# weights). Layers of one kind run once. The count has three parts. First, the operations of matrix
# products, convolutions and attention, as torch's own counter counts them (a multiplication and an
# addition are two). Second, the bytes that operators read and write, with those of products apart.
# Third, the number of operators. Views cost nothing. Attention counts as one operator that does not
# write its scores to memory, like its fused kernels; its backward pass counts as two products for
# each product of the forward pass.


_COUNTED_AT = (2, 4)  # samples; batch norm rejects a single one
LOSS, LOSS_KIND = "loss", -1


@dataclass(frozen=True)
class LayerWork:
    """Work of a layer's two passes at a number of samples, the bytes of its output, and its parameters."""

    name: str
    kind: int
    forward: OpCounts
    backward: OpCounts
    output: float
    numel: float = 0.0  # trained elements; a shared parameter counts in the first layer that has it
    tensors: float = 0.0  # number of these parameters


@dataclass(frozen=True, eq=False)
class ModelWork:
    """Work of all layers, the loss last, as straight lines over the number of samples."""

    fixed: tuple[LayerWork, ...]
    each: tuple[LayerWork, ...]

    @lru_cache(maxsize=64)  # noqa: B019 (few models exist)
    def at(self, samples: float) -> tuple[LayerWork, ...]:
        return tuple(_blend(one, 1.0, two, samples) for one, two in zip(self.fixed, self.each))

    def flops(self, samples: float) -> float:
        """Return the operations of a forward and a backward pass."""
        return sum(layer.forward.flops + layer.backward.flops for layer in self.at(samples))


def count(
    facts: ModelFacts, loss: str, dtype: torch.dtype | None = None, parallel: ParallelSettings = ParallelSettings()
) -> ModelWork:
    """Return the work of one rank on a model and its loss; ``dtype`` is the compute dtype.

    Of ``parallel``, only tensor parallelism matters, as it divides the layers.
    """
    with profiled_layers(facts, loss, dtype, parallel) as profiled:
        low, high = (_count_layers(facts, profiled, samples, dtype) for samples in _COUNTED_AT)
    span = _COUNTED_AT[1] - _COUNTED_AT[0]
    slopes = tuple(_blend(two, 1 / span, one, -1 / span) for one, two in zip(low, high))
    fixed = tuple(_blend(one, 1.0, slope, -float(_COUNTED_AT[0])) for one, slope in zip(low, slopes))
    return ModelWork(fixed, slopes)


def _blend(one: LayerWork, first: float, two: LayerWork, second: float) -> LayerWork:
    return LayerWork(
        one.name,
        one.kind,
        one.forward * first + two.forward * second,
        one.backward * first + two.backward * second,
        one.output * first + two.output * second,
        one.numel * first + two.numel * second,
        one.tensors * first + two.tensors * second,
    )


def _count_layers(
    facts: ModelFacts, profiled: ProfiledLayers, samples: int, dtype: torch.dtype | None
) -> list[LayerWork]:
    """Return the work of each layer; a layer of a known kind with known input shapes is not run again."""
    inputs = facts.inputs.of(samples)
    x: Any = profiled.make(inputs.to(dtype) if dtype is not None and inputs.is_floating_point() else inputs)
    known: dict[Any, tuple[LayerWork, Any]] = {}
    skips: dict[str, Tensor] = {}
    seen: set[nn.Parameter] = set()
    found = []
    for layer in profiled.layers:
        key = (layer.kind, MessageFormat.of(tensors_of(x)).specs)
        if key not in known:
            known[key] = _count_layer(layer, layer.module, x, skips, profiled.counter)
        work, x = known[key]
        own = {one for one in layer.module.parameters() if one.requires_grad} - seen
        seen |= own
        numel = float(sum(one.numel() for one in own))
        found.append(replace(work, name=layer.name, numel=numel, tensors=float(len(own))))
    targets = profiled.make(facts.targets.of(samples))
    loss = LayerFacts(LOSS, nn.Identity(), LOSS_KIND)
    work, _ = _count_layer(loss, lambda outputs: profiled.compare(outputs, targets), x, skips, profiled.counter)
    return [*found, work]


def _count_layer(
    layer: LayerFacts, call: Callable[[Any], Any], x: Any, skips: dict[str, Tensor], counter: OpCounter
) -> tuple[LayerWork, Any]:
    """Return the work of one layer, and its output."""
    inputs = map_leaves(x, as_leaf)
    skips.update({name: as_leaf(one) for name, one in skips.items()})
    try:
        with torch.enable_grad(), carrying(skips), counter:
            result = call(inputs)
        forward = counter.work
        outputs = [one for one in tensors_of(result) if one.requires_grad]
        gradients = [torch.empty_like(one) for one in outputs]
        with counter:
            if outputs:
                torch.autograd.backward(outputs, gradients)
    except Exception as error:
        error.add_note(f"(in layer {layer.name}, run without memory to count what it does)")
        raise
    finally:
        layer.module.zero_grad(set_to_none=True)
    output = float(sum(one.nbytes for one in tensors_of(result)))
    work = LayerWork(layer.name, layer.kind, forward, counter.work, output)
    return work, map_leaves(result, Tensor.detach)


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without its history, which gets a gradient if that is possible."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())
