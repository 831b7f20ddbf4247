"""Backward pass from tensors whose gradients are given.

``torch.autograd.backward`` with gradients imports ``torch.fx.experimental.symbolic_shapes``, and with it sympy, to
compare shapes: 34 MB and seconds of a core on every rank (torch 2.13). From a number it imports nothing. So the tensors
are made the inputs of one number, whose backward pass hands them the gradients that were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def backward_from(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add to the leaves' gradients what the ``gradients`` of these outputs make; each output requires one."""
    for output, gradient in zip(outputs, gradients, strict=True):
        if output.shape != gradient.shape:
            raise ValueError(f"gradient of shape {tuple(gradient.shape)} for an output of {tuple(output.shape)}")
    _Root.apply(list(gradients), *outputs).backward()  # type: ignore[no-untyped-call]


class _Root(torch.autograd.Function):
    """A number whose inputs get gradients that were given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        """Return a number."""
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Return the gradients, and let go of them."""
        gradients, ctx.gradients = ctx.gradients, ()
        return (None, *gradients)
