"""Attach the strategy that the settings name; the others are not even loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain.collectives.agreement import agreed
from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.materialise import materialise
from hpctrain.parallel.offload.check import check, tell_what_is_gained
from hpctrain.parallel.offload.settings import OffloadSettings
from hpctrain.parallel.server.settings import ServerSettings, at_own_pace
from hpctrain.parallel.server.settings import check as check_server
from hpctrain.parallel.settings import SHARDED, ParallelSettings
from hpctrain.parallel.strategy import Strategy, trainable
from hpctrain.parallel.sync_batchnorm import synchronise


def attach(
    model: nn.Module,
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device = torch.device("cpu"),
    example: Any = None,
    offload: OffloadSettings = OffloadSettings(),
    server: ServerSettings = ServerSettings(),
) -> Strategy:
    """Attach the strategy of the settings to a module, in place, and bring it to this rank's device.

    ``example`` is a microbatch of inputs, for pipelines: a tensor, a tuple of positional arguments or a dict of keyword
    arguments. ``offload`` says what is
    to lie in the host's memory, ``server`` how workers with replicas of their own exchange what they have learnt;
    raises ``SettingsError`` where the strategy cannot do that.
    """
    agreed(comm, lambda: check_server(server, settings, offload))
    if offload.any_update or offload.activations:
        agreed(comm, lambda: check(offload, settings))
        tell_what_is_gained(device, comm)
    synchronise(model, comm, settings)
    strategy = _attach(model, comm, settings, device, offload, example, server)
    held = model.parameters() if strategy.adopts_frozen else (parameter for _, parameter in trainable(model))
    strategy.held = {id(parameter): parameter for parameter in held}
    return strategy


def _attach(
    model: nn.Module,
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device,
    offload: OffloadSettings,
    example: Any = None,
    server: ServerSettings = ServerSettings(),
) -> Strategy:
    if settings.recompute:
        units = _recompute(model, settings)
        if offload.activations:
            from hpctrain.parallel.offload.activations import offload_activations

            offload_activations(units, offload, device, comm.rank)
    if settings.splits_model:
        from hpctrain.parallel.hybrid import ModelParallel

        within = partial(_attach, offload=replace(offload, activations=False))
        return ModelParallel(model, comm, settings, device, within, example)
    if offload.any_update and settings.data not in SHARDED:
        # That every rank made every update would take the host's memory and its cores once a rank.
        settings = replace(settings, data="zero1")
    # One rank has nothing to split: it trains the plain model, unless it is to compute in another precision.
    divides = comm.size > 1 or settings.mixed_precision != "none" or offload.any_update
    if settings.data in SHARDED and divides:
        from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

        return ShardedDataParallel(model, comm, settings, device, offload)
    materialise(model, device)
    model.to(device)
    if settings.data == "dp":
        from hpctrain.parallel.dp import ThreadedDataParallel

        return ThreadedDataParallel(model, comm)
    if settings.data == "server":
        from hpctrain.parallel.server.server import ParameterServer

        return ParameterServer(model, comm, server)
    if settings.data == "hogwild":
        from hpctrain.parallel.server.hogwild import Hogwild

        return Hogwild(model, comm, server)
    if settings.data == "easgd":
        if at_own_pace(server, settings):
            from hpctrain.parallel.server.apart import ElasticAveragingApart

            return ElasticAveragingApart(model, comm, server)
        from hpctrain.parallel.server.easgd import ElasticAveraging

        return ElasticAveraging(model, comm, server)
    from hpctrain.parallel.ddp import DataParallel

    return DataParallel(model, comm, settings)


def _recompute(model: nn.Module, settings: ParallelSettings) -> list[nn.Module]:
    """Let every unit but the model itself compute its activations again; return these units."""
    from hpctrain.parallel.fsdp.units import find_units
    from hpctrain.parallel.recompute import recompute

    units = [unit.module for unit in find_units(model, settings.units)[1:]]
    if settings.pipe > 1:
        from hpctrain.parallel.pipeline.layers import find_layers

        # A container that the pipeline takes apart is never called.
        inside = {module for layer in find_layers(model) for module in layer.module.modules()}
        units = [unit for unit in units if unit in inside]
    recompute(units)
    return units
