"""Hold the settings of offload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import SettingsError
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most, section_of

CHOOSE = -1.0  # device_fraction: by the balance of device, host and the link between them


@dataclass(frozen=True)
class OffloadSettings:
    """Say what lives in the host's memory instead of the device's."""

    # Master weights, gradients and states of the optimizer; the host's cores make the update.
    optimizer: bool = False
    # Parameters too: a unit visits the device when it computes (parallel.data = "fsdp").
    parameters: bool = False
    # What is kept of recomputed units between forward and backward (parallel.recompute).
    activations: bool = False
    # A folder for files that hold masters and states, where the host's memory is short too; empty: memory.
    disk: str = ""
    # Share of the update that stays on the device; -1: as much as keeps the device from waiting for the host.
    device_fraction: float = CHOOSE
    # Apply each update one step late, behind the next step's passes: other results, and no waiting.
    delayed: bool = False
    # Size of the pieces that travel, in MiB.
    piece_mib: float = 32.0

    def __post_init__(self) -> None:
        check_fields(self, "offload")
        fraction = self.device_fraction
        if fraction != CHOOSE and not 0 <= fraction <= 1:
            raise SettingsError(
                f"setting offload.device_fraction = {fraction}: must be between 0 and 1, or -1 to choose"
            )
        if not 0 < self.piece_mib < math.inf:
            raise SettingsError(f"setting offload.piece_mib = {self.piece_mib}: must be a number of MiB above 0")
        check_most(self, "offload", piece_mib=2**24)
        for name in ("disk", "delayed"):
            if getattr(self, name) and not self.any_update:
                raise SettingsError(f"setting offload.{name}: is for offload.optimizer = true")

    @property
    def any_update(self) -> bool:
        """Tell whether the host makes updates; offloaded parameters are updated where they live."""
        return self.optimizer or self.parameters


def offload_settings(value: OffloadSettings | Mapping[str, Any] | None) -> OffloadSettings:
    """Return the settings that a program gave: themselves, or a dict of them; raise ``SettingsError`` otherwise."""
    return section_of(OffloadSettings, value, "offload")
