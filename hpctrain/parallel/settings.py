"""Hold the settings of the strategies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import SettingsError


@dataclass(frozen=True)
class ParallelSettings:
    """Choose how the ranks share the work."""

    # The strategy of the data axis.
    data: Literal["ddp"] = "ddp"
    # Gradients that are reduced together, in MiB; the first bucket is kept small, so that reducing starts early.
    bucket_mib: float = 4.0
    # Round gradients to bfloat16 for the reduction, which halves its bytes; sums are still taken in float32.
    compression: Literal["none", "bfloat16"] = "none"
    # Give every rank the batch-norm statistics (and all other buffers) of rank 0 before each forward pass in training.
    broadcast_buffers: bool = True
    # Turn batch norms into ones that take their statistics over the batches of all ranks.
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bucket_mib < math.inf:
            raise SettingsError(f"setting parallel.bucket_mib = {self.bucket_mib}: must be a number of MiB above 0")
