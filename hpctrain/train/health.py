"""Settings for the detection of memory errors and of slow ranks. Needs neither torch nor MPI.

Ranks that compare after every update, at least three of them, repair a wrong rank from the others.
All others keep a copy of weights and optimizer states in memory, from which they repeat steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import SettingsError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most

OnCorruption = Literal["repair", "stop"]
LEAST_FACTOR = 1.1  # ranks without a defect differ by up to a tenth


@dataclass(frozen=True)
class HealthSettings:
    """Detection of bits of weights or optimizer states that change by themselves, and of slow ranks."""

    # Steps between comparisons of the weights and optimizer states of all ranks, which must be equal
    # (parallel.data = "ddp"); 0: no comparisons. They are also compared before each checkpoint.
    fingerprint_every: int = 0
    # Reaction to a rank that differs. repair: copy the tensor of the other ranks, or repeat the steps
    # since the last comparison from a copy in memory. stop: end the run.
    on_corruption: OnCorruption = "repair"
    # A rank whose own time per step (without waiting for other ranks) is this many times that of the
    # others is slow: log and receipt name it, its host and the cause. 0: no such check.
    straggler_factor: float = 1.5
    # Consecutive steps after which a slow rank is named.
    straggler_steps: int = 20

    def __post_init__(self) -> None:
        check_fields(self, "health")
        if self.fingerprint_every < 0:
            raise SettingsError(
                f"setting health.fingerprint_every = {self.fingerprint_every}: must not be negative; 0: no comparisons"
            )
        check_straggler(self.straggler_factor, self.straggler_steps, "setting health.")
        check_most(self, "health", fingerprint_every=2**53, straggler_steps=2**53)


def check_straggler(factor: float, steps: int, where: str) -> None:
    """Raise ``SettingsError`` for values that would name ranks which are not slow; ``where`` is put before the name."""
    if factor and not LEAST_FACTOR <= factor < math.inf:
        raise SettingsError(
            f"{where}straggler_factor = {factor}: must be at least {LEAST_FACTOR}, or 0 for no check", everywhere=True
        )
    if steps < 1:
        raise SettingsError(f"{where}straggler_steps = {steps}: must be at least 1", everywhere=True)


def check_health(health: HealthSettings, parallel: ParallelSettings, offload: OffloadSettings) -> None:
    """Raise ``SettingsError`` if replicas are to be compared and the ranks do not hold the whole state."""
    if health.fingerprint_every and (parallel.data != "ddp" or parallel.splits_model or offload.any_update):
        raise SettingsError(
            f"setting health.fingerprint_every = {health.fingerprint_every}: compares ranks that hold the whole state; "
            'allowed is parallel.data = "ddp" without pipelines, tensor parallelism and offload; set it to 0'
        )


def has_majority(every: int, ranks: int) -> bool:
    """Return whether a wrong rank can be repaired from the others.

    It needs a majority of right ranks, and a comparison before the error has spread to them.
    """
    return every == 1 and ranks > 2


def keeps_weights(health: HealthSettings, ranks: int) -> bool:
    """Return whether each rank of a run keeps a copy of weights and optimizer states in memory."""
    compares = health.fingerprint_every > 0 and ranks > 1
    return compares and health.on_corruption == "repair" and not has_majority(health.fingerprint_every, ranks)
