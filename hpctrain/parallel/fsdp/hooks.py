"""Hooks on the forward pass of a module, and on the beginning and end of its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hpctrain.parallel.module_hooks import ModuleHook


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors in a nest of values that a backward pass can reach."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def when_backward_comes_to(outputs: Any, call: Callable[[], None]) -> None:
    """Call ``call`` once when the first gradient of a module's outputs has been computed."""
    tensors = differentiable(outputs)
    if tensors:
        register_multi_grad_hook(tensors, lambda _: call(), mode="any")


def when_backward_has_left(inputs: Any, call: Callable[[], None]) -> None:
    """Call ``call`` once when the gradients of all inputs of a module have been computed.

    It is never called if no input requires a gradient.
    """
    tensors = differentiable(inputs)
    if tensors:
        register_multi_grad_hook(tensors, lambda _: call(), mode="all")


def around_forward(
    module: nn.Module, before: Callable[[Any, Any], Any], after: Callable[[Any, Any, Any], None]
) -> list[RemovableHandle]:
    """Call ``before(args, kwargs)``, which may return replacements, and ``after(args, kwargs, result)``.

    If the forward pass raises, ``after`` is called with None as the result.
    """

    def first(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return before(args, kwargs)

    def last(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        after(args, kwargs, result)

    return [
        module.register_forward_pre_hook(ModuleHook(first), with_kwargs=True, prepend=True),
        module.register_forward_hook(ModuleHook(last), with_kwargs=True, always_call=True),
    ]


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return a nest of values with its floating-point tensors converted to another dtype."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, values)
