"""Backward pass from tensors with given gradients.

``torch.autograd.backward`` with gradients imports ``torch.fx.experimental.symbolic_shapes``, and
with it sympy, to compare shapes. This costs 34 MB and seconds of CPU time on every rank (torch
2.13). From a scalar it imports nothing. The tensors are therefore made the inputs of one scalar,
whose backward pass returns the given gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
        """Return a scalar."""
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Return the gradients and release them."""
        gradients, ctx.gradients = ctx.gradients, ()
        return (None, *gradients)
