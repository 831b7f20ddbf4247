"""Attach the strategy that the settings name."""

from __future__ import annotations

from torch import nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.settings import ParallelSettings
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.sync_batchnorm import convert


def attach(model: nn.Module, comm: Communicator, settings: ParallelSettings) -> Strategy:
    """Attach the strategy of ``settings.data`` to a module, in place."""
    if settings.sync_batchnorm and convert(model, comm) is not model:
        raise UsageError("sync_batchnorm cannot replace a model that is itself a batch norm", everywhere=True)
    return DataParallel(model, comm, settings)
