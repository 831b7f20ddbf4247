"""Flat, contiguous host copies of arbitrary tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def hosted(tensor: Tensor, *, back: bool = True) -> Iterator[Tensor]:
    """Yield a flat, contiguous host tensor of the same content; copy it ``back`` afterwards if it is a copy."""
    host = tensor.detach()
    if host.device.type == "cpu" and host.is_contiguous():
        yield host.view(-1)
        return
    host = host.contiguous().cpu()
    yield host.view(-1)
    if back:
        tensor.detach().copy_(host)
