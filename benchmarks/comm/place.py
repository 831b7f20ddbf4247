"""Hold where a benchmark runs, and hand out its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.collectives.communicator import Communicator


@dataclass
class Place:
    """Hold the ranks, the device, the dtype and the algorithms that were asked for; ``world`` is mpi4py's."""

    comm: Communicator
    device: torch.device
    dtype: torch.dtype
    algorithms: list[str] = field(default_factory=lambda: ["auto"])
    chosen: bool = False  # the algorithms were named by the user, who shall hear of one that cannot serve
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
        """Return a tensor of zeros of this rank's own, on the device."""
        return torch.zeros(numel, dtype=dtype or self.dtype, device=self.device)

    def common(self, numel: int) -> Tensor:
        """Return a tensor that is one and the same for all ranks of a node; a call by all ranks, larger sizes first."""
        key = "common", self.dtype
        if key not in self._shared or self._shared[key].numel() < numel:
            self._shared[key] = self.comm.common(numel, self.dtype)
        return self._shared[key][:numel]

    def shared(self, owner: str, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of zeros from ``comm.empty``; a call by all ranks.

        That memory lives as long as the communicator, so an owner gets the beginning of what it had before: larger
        sizes must come first.
        """
        key = owner, dtype or self.dtype
        if key not in self._shared or self._shared[key].numel() < numel:
            self._shared[key] = self.comm.empty(numel, key[1])
        return self._shared[key][:numel].zero_()
