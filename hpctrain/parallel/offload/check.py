"""Checks of offload settings before anything is built, and a warning if offload has no benefit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import SettingsError
from hpctrain.log import logger
from hpctrain.parallel.offload.settings import OffloadSettings
from hpctrain.parallel.settings import ParallelSettings

if TYPE_CHECKING:
    import torch

    from hpctrain.collectives.communicator import Communicator


def check(offload: OffloadSettings, parallel: ParallelSettings) -> None:
    """Raise ``SettingsError`` if the strategy does not support what is to be offloaded."""
    if offload.parameters and parallel.data != "fsdp":
        _refuse(
            f'setting offload.parameters = true: parallel.data = "{parallel.data}" keeps whole parameters on the '
            'device; take parallel.data = "fsdp", which on one rank only lets them come and go'
        )
    if offload.activations and not parallel.recompute:
        _refuse(
            "setting offload.activations = true: what is offloaded is what recomputed units keep between forward and "
            "backward; set parallel.recompute = true"
        )
    if offload.any_update:
        _check_update(offload, parallel)


def _check_update(offload: OffloadSettings, parallel: ParallelSettings) -> None:
    if parallel.data == "dp":
        _refuse('setting offload: parallel.data = "dp" has one optimizer for all GPUs; take "ddp", and a rank a GPU')
    if parallel.pipe > 1 and parallel.schedule == "pipedream":
        _refuse(
            'setting offload: parallel.schedule = "pipedream" makes an update after every microbatch, on versions that '
            'the device keeps; take another schedule, such as "1f1b"'
        )
    if offload.delayed and offload.device_fraction > 0:
        _refuse(
            "setting offload.delayed = true: what stays on the device (offload.device_fraction) is updated at once; "
            "set one of the two"
        )


def _refuse(message: str) -> None:
    raise SettingsError(message)


def tell_what_is_gained(device: torch.device, comm: Communicator) -> None:
    """Log on rank 0 that offload has no benefit if the device is the CPU itself."""
    if comm.rank == 0 and device.type == "cpu":
        logger.info("offload moves nothing on a CPU, whose memory is the host's: it costs some copies, gains nothing")
