"""Split backward pass of linear layers: input gradients at once, weight gradients on request.

After Qi et al., "Zero Bubble Pipeline Parallelism", 2023: a stage's neighbour waits only for the
gradient of the stage's input. Gradients of weights can fill the time in which the stage itself
would wait.

Note: within ``deferring``, ``torch.nn.functional.linear`` computes with detached weights, so
autograd computes the gradient of the input only. The result passes an autograd node that stores its
incoming gradient. ``flush`` then multiplies as autograd would (same products, same order, same
bits). It accumulates the result in the parameter through autograd, so that the parameter's hooks
run. Norms, embeddings, convolutions and all other functions are not deferred. Neither are layers
inside a ``torch.utils.checkpoint`` of the user's code.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a linear layer: the parameters whose gradients are due, and how autograd would have computed them."""

    store: WeightGradStore
    key: Hashable
    weight: Tensor | None  # None if it is frozen
    bias: Tensor | None
    columns: bool  # whether autograd stores the weight's gradient in column-major order
    rows: bool  # whether the bias was added to a matrix of rows


_Deferred = tuple[_Call, Tensor, Tensor]  # a call, its input, and the gradient of its result


class WeightGradStore:
    """Store of deferred weight gradients, by a key: one key per microbatch of each chunk.

    It corresponds to the ``WeightGradStore`` of Zero Bubble. Parameters in ``undeferred`` are not
    deferred. These are parameters that other functions than a linear layer also use. Their
    gradients would not add up in autograd's order.
    """

    def __init__(self, undeferred: Iterable[Tensor] = ()) -> None:
        self._undeferred = {id(parameter) for parameter in undeferred}
        self.deferred: dict[Hashable, list[_Deferred]] = {}

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Defer the weight gradients of linear layers that this thread calls in the ``with`` block.

        The operands are stored when the backward pass reaches the layer.
        """
        mode = _DeferringMode(self, key)
        _ACTIVE.modes.append(mode)
        try:
            with mode:
                yield
        finally:
            _ACTIVE.modes.pop()

    def flush(self, key: Hashable) -> None:
        """Compute the deferred weight gradients of a key, add them to the parameters' own, and free the operands."""
        deferred = deque(self.deferred.pop(key, ()))
        uses = Counter(parameter for call, *_ in deferred for parameter in (call.weight, call.bias))
        sums: dict[Tensor, Tensor] = {}
        while deferred:
            for parameter, gradient in _gradients(deferred.popleft()):
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
                uses[parameter] -= 1
                if not uses[parameter]:
                    backward_from([parameter], [sums.pop(parameter)])

    def defers(self, weight: Any, bias: Any) -> bool:
        """Return whether the gradients of a weight and a bias can be deferred."""
        wanted = [one for one in (weight, bias) if one is not None and one.requires_grad]
        return bool(wanted) and all(one.is_leaf and id(one) not in self._undeferred for one in wanted)

    def put(self, call: _Call, x: Tensor, gradient: Tensor) -> None:
        """Store the operands of a call."""
        self.deferred.setdefault(call.key, []).append((call, x, gradient))


class _Active(threading.local):
    """Active modes of the thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[_DeferringMode] = []


_ACTIVE = _Active()


def recompute_context() -> Callable[[], AbstractContextManager[None]]:
    """Return a context factory for layers that run twice, perhaps in another thread, so that both runs defer as here.

    Each of the two runs must be inside such a context; otherwise none of their gradients is
    deferred.
    """
    if not _ACTIVE.modes:
        return nullcontext
    mode = _ACTIVE.modes[-1]
    return lambda: mode.store.deferring(mode.key)


class _DeferringMode(TorchFunctionMode):
    """Torch function mode that replaces calls of linear layers."""

    def __init__(self, store: WeightGradStore, key: Hashable) -> None:
        super().__init__()
        self.store, self.key = store, key
        self._anchor = torch.empty(0, requires_grad=True)
        self._hooks = _hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and torch.is_grad_enabled() and not self._in_checkpoint():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _in_checkpoint(self) -> bool:
        """Return whether the current call will be recomputed outside this mode, and must therefore not be deferred."""
        hooks = _hooks()
        return hooks is not None and hooks != self._hooks and hooks[0].__module__ == checkpoint.__module__

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.ndim < 2 or not self.store.defers(weight, bias):
            return F.linear(input, weight, bias)
        x, cast_weight, cast_bias = (_cast(one, input.device.type) for one in (input, weight, bias))
        assert x is not None and cast_weight is not None
        # For a matrix, and for a tensor that can be viewed as one, torch adds the bias while it multiplies.
        rows = x.ndim == 2 or x.is_contiguous()
        x = x if rows else x.reshape(-1, x.shape[-1])  # as torch does for a weight that requires a gradient
        call = _Call(
            self.store,
            self.key,
            weight if weight.requires_grad else None,
            bias if bias is not None and bias.requires_grad else None,
            cast_weight.t().stride() == (1, cast_weight.shape[1]),
            rows,
        )
        added = cast_bias.detach() if cast_bias is not None else None
        if rows:
            y = F.linear(x, cast_weight.detach(), added)
        else:
            y = F.linear(x, cast_weight.detach()).view(*input.shape[:-1], -1)
            y = y if added is None else y + added
        result: Tensor = _Tap.apply(y, self._anchor, x.detach(), call)  # type: ignore[no-untyped-call]
        return result


def _hooks() -> tuple[Callable[..., Any], ...] | None:
    """Return the hooks by which autograd packs and unpacks saved tensors; checkpoints replace them."""
    found: tuple[Callable[..., Any], ...] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


def _cast(tensor: Tensor | None, device: str) -> Tensor | None:
    """Return a tensor in the precision in which autocast would multiply it."""
    if tensor is None or not torch.is_autocast_enabled(device) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device)) if tensor.is_floating_point() else tensor


class _Tap(torch.autograd.Function):
    """Autograd node that stores the gradient of a linear layer's result."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, x: Tensor, call: _Call) -> Tensor:
        """Return ``y``; ``anchor`` makes it require a gradient even if the layer's input does not."""
        ctx.call = call
        ctx.save_for_backward(x)  # not stored if a checkpoint recomputes it
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Store the incoming gradient and pass it on."""
        (x,) = ctx.saved_tensors
        ctx.call.store.put(ctx.call, x, gradients[0])
        return gradients[0], None, None, None


@torch.no_grad()
def _gradients(deferred: _Deferred) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of a call with their gradients."""
    call, x, gradient = deferred
    rows = gradient.reshape(-1, gradient.shape[-1])
    if call.weight is not None:
        columns = x.reshape(-1, x.shape[-1])
        product = rows.t().mm(columns) if call.columns else columns.t().mm(rows).t()
        yield call.weight, product.to(call.weight.dtype)
    if call.bias is not None:
        summed = rows if call.rows else gradient
        yield call.bias, summed.sum(tuple(range(summed.ndim - 1))).to(call.bias.dtype)


# Backward pass from tensors with given gradients ----------------------------------------------------------------------
#
# ``torch.autograd.backward`` with gradients imports ``torch.fx.experimental.symbolic_shapes``, and
# with it sympy, to compare shapes. This costs 34 MB and seconds of CPU time on every rank (torch
# 2.13). From a scalar it imports nothing. The tensors are therefore made the inputs of one scalar,
# whose backward pass returns the given gradients.


def backward_from(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Backpropagate ``gradients`` from these outputs into the leaves; each output requires a gradient."""
    for output, gradient in zip(outputs, gradients, strict=True):
        if output.shape != gradient.shape:
            raise ValueError(f"gradient of shape {tuple(gradient.shape)} for an output of {tuple(output.shape)}")
    _Root.apply(list(gradients), *outputs).backward()  # type: ignore[no-untyped-call]


class _Root(torch.autograd.Function):
    """Scalar whose inputs receive given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, ()
        return (None, *gradients)
