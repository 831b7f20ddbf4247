"""Argument checks of transports that carry the tensors of one device."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.errors import CommunicationError
from hpctrain.transport.base import TAGS


class OnDevice:
    """Mixin that replaces the checks of ``Transport`` for tensors on ``device`` instead of the host."""

    name: str
    size: int
    device: torch.device
    tags = TAGS

    def _check(self, tensor: Tensor, peer: int = 0, tag: int = 0) -> None:
        if tensor.device != self.device:
            raise CommunicationError(
                f"transport {self.name} of this rank carries tensors on {self.device}, not one on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise CommunicationError(
                f"transport {self.name} carries contiguous tensors, not strides {tuple(tensor.stride())}"
            )
        if not 0 <= peer < self.size:
            raise CommunicationError(f"rank {peer} is not in 0..{self.size - 1}")
        if not 0 <= tag < self.tags:
            raise CommunicationError(f"tag {tag} is not in 0..{self.tags - 1} (transport {self.name})")
