"""Hold the settings of the strategies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import SettingsError

SHARDED = ("zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class ParallelSettings:
    """Choose how the ranks share the work."""

    # The strategy of the data axis. ddp: every rank holds the whole model; zero1: the optimizer's states are split over
    # the ranks; zero2: gradients too; fsdp: parameters too (ZeRO 3); dp: torch's DataParallel, one process, many GPUs.
    data: Literal["ddp", "zero1", "zero2", "fsdp", "dp"] = "ddp"
    # Split over all ranks, or only inside each node, with a replica on every node.
    shard_within: Literal["world", "node"] = "world"
    # What is gathered together (fsdp) or recomputed together: names of classes ("Block") or modules ("blocks.*");
    # empty: repeated blocks, and what is large enough.
    units: tuple[str, ...] = ()
    # Units that are gathered ahead of the one that computes, where a GPU can do both at once.
    prefetch: int = 1
    # Compute and communicate in bfloat16, with shards, moments and updates in float32 (zero1, zero2, fsdp).
    mixed_precision: Literal["none", "bfloat16"] = "none"
    # Gradients of all but the last backward pass of a step: keep them whole on each rank (local), or reduce them at
    # once (reduced), which takes messages and no memory; auto: reduced for zero2 and fsdp.
    accumulate: Literal["auto", "local", "reduced"] = "auto"
    # Compute the activations of each unit again in the backward pass instead of keeping them.
    recompute: bool = False
    # Classes of optimizers that are known to update every element by itself, besides those of torch.
    elementwise: tuple[str, ...] = ()
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
        if self.prefetch < 0:
            raise SettingsError(f"setting parallel.prefetch = {self.prefetch}: must not be negative")
        sharded = self.data in SHARDED
        for name, chosen in {
            "shard_within": self.shard_within != "world",
            "mixed_precision": self.mixed_precision != "none",
        }.items():
            if chosen and not sharded:
                raise SettingsError(
                    f"setting parallel.{name} = {getattr(self, name)!r}: is for parallel.data = {', '.join(SHARDED)}, "
                    f"not {self.data}"
                )

    @property
    def reduces_early(self) -> bool:
        """Tell whether every backward pass of a step is reduced by itself."""
        return self.accumulate == "reduced" or self.accumulate == "auto" and self.data in ("zero2", "fsdp")
