"""Setting of a communication benchmark, and allocation of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator


@dataclass
class Place:
    """Ranks, device, dtype and algorithms of a benchmark; ``world`` is mpi4py's communicator."""

    comm: Communicator
    device: torch.device
    dtype: torch.dtype
    algorithms: list[str] = field(default_factory=lambda: ["auto"])
    chosen: bool = False  # the user named the algorithms, so one that cannot take part is an error
    _shared: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def world(self) -> Any:
        """Return mpi4py's communicator of the same ranks."""
        return self.comm.transport.comm  # type: ignore[attr-defined]

    @property
    def rank(self) -> int:
        """Return this rank's number."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.comm.size

    def plain(self, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a private tensor of zeros on the device."""
        return torch.zeros(numel, dtype=dtype or self.dtype, device=self.device)

    def common(self, numel: int) -> Tensor:
        """Return a tensor that all ranks of a node share; larger sizes must come first. Collective."""
        key = "common", self.dtype
        if key not in self._shared or self._shared[key].numel() < numel:
            self._shared[key] = self.comm.common(numel, self.dtype)
        return self._shared[key][:numel]

    def shared(self, owner: str, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros from ``comm.empty``. Collective.

        That memory lives as long as the communicator. Therefore an owner gets the beginning of its
        earlier tensor, and larger sizes must come first.
        """
        key = owner, dtype or self.dtype
        if key not in self._shared or self._shared[key].numel() < numel:
            self._shared[key] = self.comm.empty(numel, key[1])
        return self._shared[key][:numel].zero_()
