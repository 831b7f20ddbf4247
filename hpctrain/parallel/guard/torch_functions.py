"""Replacements of torch functions that read all gradients at once, for parameters that are split over ranks.

``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` compute norms
over the ranks. ``clip_grad_value_`` and ``zero_grad`` work on the parts without communication.
Tensors that no strategy splits are left to torch.

Note: how they are replaced. A program may have imported a function before the model was wrapped, so
replacing the name in the module is not enough. Torch wraps each of these functions in a closure
that disables gradients. The content of its cell is replaced, so every name leads to the new
function. If a torch version has no such cell, the names in torch's modules are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from hpctrain.errors import UsageError
from hpctrain.parallel.guard.shard_tensor import ShardInfo, ShardParameter, ShardTensor, part_of
from hpctrain.parallel.strategy import SplitStrategy
from hpctrain.plain_tensors import on_shards, plain_tensors

_installed = 0
_strategies: WeakSet[SplitStrategy] = WeakSet()
_undo = contextlib.ExitStack()
_originals: dict[str, Callable[..., Any]] = {}


def install(strategy: SplitStrategy) -> None:
    """Replace the functions, for the parameters of a strategy; calls are counted."""
    global _installed
    _strategies.add(strategy)
    _installed += 1
    if _installed > 1:
        return
    _replace("clip_grad_norm_", "clip_grad_norm_", _clip_grad_norm)
    _replace("_get_total_norm", "get_total_norm", _get_total_norm)
    _replace("_clip_grads_with_norm_", "clip_grads_with_norm_", _clip_grads_with_norm)
    _replace("clip_grad_value_", "clip_grad_value_", None)
    scaler: Any = torch.amp.GradScaler
    _set(scaler, "_unscale_grads_", _agreed_unscale(scaler._unscale_grads_))
    for kind in (torch.optim.Optimizer, nn.Module):
        _set(kind, "zero_grad", on_shards(kind.zero_grad))


def uninstall() -> None:
    """Restore torch's functions at the last call."""
    global _installed
    _installed -= 1
    if not _installed:
        _undo.close()


def _replace(inside: str, outside: str, new: Callable[..., Any] | None) -> None:
    outer: Any = getattr(clip_grad, inside)
    cell = _cell(outer)
    original = outer if cell is None else cell.cell_contents
    _originals[inside] = original
    new = on_shards(original) if new is None else new
    if cell is None:
        for module, name in ((clip_grad, inside), (torch.nn.utils, outside)):
            if hasattr(module, name):
                _set(module, name, torch.no_grad()(new))
        return
    _set(cell, "cell_contents", new)


def _cell(function: Any) -> Any:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index("func")] if "func" in names else None


def _set(owner: Any, name: str, new: Any) -> None:
    _undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


def _agreed_unscale(unscale: Callable[..., Any]) -> Callable[..., Any]:
    """Make a GradScaler find infinities in the parts of all ranks; otherwise only some ranks would skip a step."""

    @functools.wraps(unscale)
    def called(scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any) -> Any:
        with plain_tensors():
            found: dict[torch.device, Tensor] = unscale(scaler, optimizer, inv_scale, found_inf, *args)
            strategies = _strategies_of(part_of(each) for group in optimizer.param_groups for each in group["params"])
            if not strategies:
                return found
            found = found or {found_inf.device: found_inf}
            worst = torch.stack([each.to(found_inf.device) for each in found.values()]).max().reshape(1)
            for strategy in strategies.values():
                for comm in strategy.norm_groups():
                    comm.all_reduce(worst, "max")
            return {device: worst.reshape(()).to(device) for device in found}

    return called


def _strategies_of(parts: Iterable[ShardInfo | None]) -> dict[int, SplitStrategy]:
    return {id(one): one for part in parts if part is not None and (one := part.strategy()) is not None}


# Norms ----------------------------------------------------------------------------------------------------------------


def _clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with plain_tensors():
        gradients = [(each.grad, part_of(each)) for each in chosen if each.grad is not None]
        norm = _norm(gradients, norm_type, error_if_nonfinite, foreach)
        _originals["_clip_grads_with_norm_"](chosen, max_norm, norm, foreach)
    return norm


def _get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    chosen = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    with plain_tensors():
        return _norm([(each, _required_part(each)) for each in chosen], norm_type, error_if_nonfinite, foreach)


def _clip_grads_with_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    with plain_tensors():
        _originals["_clip_grads_with_norm_"](parameters, max_norm, total_norm, foreach)


def _required_part(tensor: Tensor) -> ShardInfo | None:
    part = part_of(tensor)
    if part is None and isinstance(tensor, (ShardTensor, ShardParameter)):
        raise UsageError(
            "get_total_norm of a tensor that was made of parts of several parameters; allowed are gradients, "
            "parameters and what is computed from one of them; pass these as a list"
        )
    return part


def _norm(
    gradients: Sequence[tuple[Tensor, ShardInfo | None]],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Return the norm of whole tensors and of parts together. Collective over the ranks that share the parts."""
    strategies = _strategies_of(part for _, part in gradients)
    if not gradients:
        pipelined = _pipelined_strategies()
        strategies |= {id(one): one for one in pipelined if len(pipelined) == 1}
    whole = [tensor for tensor, part in gradients if part is None]
    if not strategies:
        plain: Tensor = _originals["_get_total_norm"](whole, norm_type, error_if_nonfinite, foreach)
        return plain
    if any(strategy.reproducible for strategy in strategies.values()):
        raise UsageError(
            "norm of shards by torch under parallel.reproducible = true: it depends on how parameters are divided over "
            "the ranks; allowed is run.clip(max_norm), which returns the norm; run.clip(0) only computes it",
            everywhere=True,
        )
    order = float(norm_type)
    if order == 0 or math.isnan(order):
        raise UsageError(
            f"norm of gradients: norm_type={norm_type}; allowed is any but 0 if parameters are split over ranks",
            everywhere=True,
        )
    device = gradients[0][0].device if gradients else torch.device("cpu")
    total = _sum_of_powers(whole, order, device)
    for strategy in strategies.values():
        parts = [(tensor, part) for tensor, part in gradients if part is not None and part.strategy() is strategy]
        total = _combined(total, _over_ranks(strategy, parts, order, device), order)
    norm = total if math.isinf(order) else total ** (1.0 / order)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return norm.to(gradients[0][0].dtype if gradients else torch.float32)


def _pipelined_strategies() -> list[SplitStrategy]:
    """Return the strategies of pipelines: a stage takes part in a norm even if it has none of the parameters."""
    return [strategy for strategy in _strategies if strategy.guard is not None and strategy.pipe is not None]


def _over_ranks(
    strategy: SplitStrategy, parts: Sequence[tuple[Tensor, ShardInfo]], order: float, device: torch.device
) -> Tensor:
    strategy.gradients_final()
    counted = [tensor for tensor, part in parts if strategy.counts(part.name)]
    total = _sum_of_powers(counted, order, device).reshape(1)
    kind = "sum" if not math.isinf(order) else "max" if order > 0 else "min"
    for comm in strategy.norm_groups():
        comm.all_reduce(total, kind)
    return total.reshape(())


def _sum_of_powers(tensors: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """Return the sum of the powers of all elements; for an infinite order, the largest (or smallest) magnitude."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        nothing = math.inf if order == -math.inf else 0.0
        return torch.tensor(nothing, dtype=torch.float64, device=device)
    norms = torch.stack([each.double().to(device) for each in _norms(filled, order)])
    if math.isinf(order):
        return norms.max() if order > 0 else norms.min()
    return (norms**order).sum()


def _norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    found: list[Tensor] = []
    for one_device in devices:
        found += torch._foreach_norm([tensor for tensor in tensors if tensor.device == one_device], order)
    return found


def _combined(one: Tensor, other: Tensor, order: float) -> Tensor:
    if not math.isinf(order):
        return one + other
    return torch.maximum(one, other) if order > 0 else torch.minimum(one, other)
