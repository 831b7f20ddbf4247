"""Operation counter: floating-point operations of products, memory traffic, and number of operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

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


class OpRecorder:
    """Recorder of work that is not visible as an operator; it adds to the active operation counter."""

    def __init__(self) -> None:
        self.counter: OpCounter | None = None

    def add(self, work: OpCounts) -> None:
        """Add work to the active counter; without one, do nothing."""
        if self.counter is not None:
            self.counter.work += work


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operation counter: counts the operators that run in the ``with`` block in ``work``."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = OpCounts()
        self._recorder, self._attention_mode = recorder, _FusedAttentionMode(recorder)

    def __enter__(self) -> OpCounter:
        self._recorder.counter = self
        self._attention_mode.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._attention_mode.__exit__(*error)  # type: ignore[no-untyped-call]
        self._recorder.counter = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work += work_of(func, args, kwargs or {}, result)
        return result


def work_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> OpCounts:
    """Return the work of one operator."""
    inputs, outputs = list(tensors([*args, *kwargs.values()])), list(tensors(result))
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

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = {**dict(zip(("query", "key", "value"), args)), **(kwargs or {})}
            vectors = named["query"], named["key"], named["value"]
            return _Attention.apply(*vectors, self._recorder)  # type: ignore[no-untyped-call]
        if func in _READS:
            return 0  # the value is unknown: only assertions read it, and they hold here
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Attention that produces only shapes, without computing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, recorder: OpRecorder) -> Tensor:
        """Return a tensor of the result's shape."""
        ctx.save_for_backward(query, key, value)
        ctx.recorder = recorder
        recorder.add(attention(query, key, value))
        return torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return gradients of the inputs' shapes."""
        query, key, value = ctx.saved_tensors
        ctx.recorder.add(attention(query, key, value) * 2)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def attention(query: Tensor, key: Tensor, value: Tensor) -> OpCounts:
    """Return the products of queries with keys and of scores with values; memory traffic is that of the vectors."""
    queries, result = query[..., 0].numel(), value.shape[-1]
    flops = 2.0 * queries * key.shape[-2] * (query.shape[-1] + result)
    moved = query.nbytes + key.nbytes + value.nbytes + queries * result * query.itemsize
    return OpCounts(flops, float(moved), 0.0, 1)


def tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for one in values:
            yield from tensors(one)
