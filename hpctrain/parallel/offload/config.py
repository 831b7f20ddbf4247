"""Settings of offload, and their checks before anything is built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.errors import SettingsError
from hpctrain.log import logger
from hpctrain.parallel.config import ParallelSettings
from hpctrain.settings import check as check_fields
from hpctrain.settings import check_most, section_of

if TYPE_CHECKING:
    import torch

    from hpctrain.comm.communicator import Communicator

CHOOSE = -1.0  # device_fraction: chosen by the balance of device, host and the link between them


@dataclass(frozen=True)
class OffloadSettings:
    """Settings of offload: which data lives in host memory instead of device memory."""

    # Master weights, gradients and optimizer states; the host's cores make the update.
    optimizer: bool = False
    # Parameters too: a unit is on the device only while it computes (parallel.data = "fsdp").
    parameters: bool = False
    # Inputs of recomputed units between forward and backward (parallel.recompute).
    activations: bool = False
    # Folder for files with masters and states, if host memory is too small for them; empty: memory.
    disk: str = ""
    # Share of the update that stays on the device; -1: as much as keeps the device from waiting for
    # the host.
    device_fraction: float = CHOOSE
    # Apply each update one step late, overlapped with the next step's passes: results differ, and
    # steps do not wait.
    delayed: bool = False
    # Size of the chunks that are transferred, in MiB.
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
                raise SettingsError(f"setting offload.{name}: needs offload.optimizer = true")

    @property
    def any_update(self) -> bool:
        """Return whether the host makes updates; offloaded parameters are updated where they are stored."""
        return self.optimizer or self.parameters


def offload_settings(value: OffloadSettings | Mapping[str, Any] | None) -> OffloadSettings:
    """Return the settings that a program gave: an object, or a dict of them; raise ``SettingsError`` otherwise."""
    return section_of(OffloadSettings, value, "offload")


# Checks of offload settings before anything is built, and a warning if offload has no benefit -------------------------


def check(offload: OffloadSettings, parallel: ParallelSettings) -> None:
    """Raise ``SettingsError`` if the strategy does not support what is to be offloaded."""
    updates = offload.any_update
    for refused, message in (
        (
            offload.parameters and parallel.data != "fsdp",
            f'offload.parameters = true: parallel.data = "{parallel.data}" keeps whole parameters on the device; take '
            'parallel.data = "fsdp", which on one rank only lets them come and go',
        ),
        (
            offload.activations and not parallel.recompute,
            "offload.activations = true: what is offloaded is what recomputed units keep between forward and backward; "
            "set parallel.recompute = true",
        ),
        (
            updates and parallel.data == "dp",
            'offload: parallel.data = "dp" has one optimizer for all GPUs; take "ddp", and a rank a GPU',
        ),
        (
            updates and parallel.pipe > 1 and parallel.schedule == "pipedream",
            'offload: parallel.schedule = "pipedream" makes an update after every microbatch, on versions that the '
            'device keeps; take another schedule, such as "1f1b"',
        ),
        (
            updates and offload.delayed and offload.device_fraction > 0,
            "offload.delayed = true: what stays on the device (offload.device_fraction) is updated at once; set one of "
            "the two",
        ),
    ):
        if refused:
            raise SettingsError(f"setting {message}")


def warn_if_useless(device: torch.device, comm: Communicator) -> None:
    """Log on rank 0 that offload has no benefit if the device is the CPU itself."""
    if comm.rank == 0 and device.type == "cpu":
        logger.info("offload moves nothing on a CPU, whose memory is the host's: it costs some copies, gains nothing")
