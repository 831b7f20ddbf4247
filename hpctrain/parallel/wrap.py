"""Attachment of the configured strategy; the modules of other strategies are not imported.

Before training, modules whose result changes if the samples of a batch are divided cause an error
or a warning.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.config import check as check_asynchronous
from hpctrain.parallel.asynchronous.config import is_asynchronous
from hpctrain.parallel.config import SHARDED, ParallelSettings, shape_of
from hpctrain.parallel.meta_init import materialise
from hpctrain.parallel.model_agreement import trainable
from hpctrain.parallel.offload.config import OffloadSettings, check, warn_if_useless
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.sync_batchnorm import SYNCHRONOUS, synchronise


def attach(
    model: nn.Module,
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device = torch.device("cpu"),
    example: Any = None,
    offload: OffloadSettings = OffloadSettings(),
    asynchronous: AsynchronousSettings = AsynchronousSettings(),
) -> Strategy:
    """Attach the configured strategy to a module, in place, and move the module to this rank's device. Collective.

    ``example`` is a microbatch of inputs, for pipelines: a tensor, a tuple of positional arguments
    or a dict of keyword arguments. ``offload`` selects the tensors in host memory.
    ``asynchronous`` configures the exchange between workers with their own replicas. Raises
    ``SettingsError`` if the strategy does not support the settings.
    """
    agreed(comm, lambda: check_asynchronous(asynchronous, settings, offload))
    if offload.any_update or offload.activations:
        agreed(comm, lambda: check(offload, settings))
        warn_if_useless(device, comm)
    agreed(comm, lambda: _check_modules(model, comm, settings))
    synchronise(model, comm, settings)
    strategy = _attach(model, comm, settings, device, offload, example, asynchronous)
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
    asynchronous: AsynchronousSettings = AsynchronousSettings(),
) -> Strategy:
    if settings.recompute:
        _recompute(model, settings, offload, device, comm.rank)
    if settings.splits_model:
        from hpctrain.parallel.hybrid import ModelParallel

        within = partial(_attach, offload=replace(offload, activations=False))
        return ModelParallel(model, comm, settings, device, within, example)
    if offload.any_update and settings.data not in SHARDED:
        # Otherwise every rank would make every update, which needs the host's memory and cores once
        # per rank.
        settings = replace(settings, data="zero1")
    # A single rank has nothing to split. It trains the plain model, except with another precision.
    divides = comm.size > 1 or settings.mixed_precision != "none" or offload.any_update
    if settings.reproducible:
        return _attach_reproducible(model, comm, settings, device, offload, divides=divides)
    if settings.data in SHARDED and divides:
        from hpctrain.parallel.fsdp.strategy import ShardedDataParallel

        if not offload.any_update:
            return ShardedDataParallel(model, comm, settings, device)
        from hpctrain.parallel.offload.host_optimizer import HostOptimizer

        return ShardedDataParallel(model, comm, settings, device, partial(HostOptimizer, offload, device))
    materialise(model, device)
    model.to(device)
    if settings.data == "dp":
        from hpctrain.parallel.dp import ThreadedDataParallel

        return ThreadedDataParallel(model, comm)
    if settings.data == "server":
        from hpctrain.parallel.asynchronous.parameter_server import ParameterServer

        return ParameterServer(model, comm, asynchronous)
    if settings.data == "hogwild":
        from hpctrain.parallel.asynchronous.hogwild import Hogwild

        return Hogwild(model, comm, asynchronous)
    if settings.data == "easgd":
        if is_asynchronous(asynchronous, settings):
            from hpctrain.parallel.asynchronous.easgd import AsyncElasticAveraging

            return AsyncElasticAveraging(model, comm, asynchronous)
        from hpctrain.parallel.asynchronous.easgd import ElasticAveraging

        return ElasticAveraging(model, comm, asynchronous)
    from hpctrain.parallel.ddp import DataParallel

    return DataParallel(model, comm, settings)


def _attach_reproducible(
    model: nn.Module,
    comm: Communicator,
    settings: ParallelSettings,
    device: torch.device,
    offload: OffloadSettings,
    *,
    divides: bool,
) -> Strategy:
    if settings.data in SHARDED and divides:
        from hpctrain.parallel.reproducible.sharded import ReproducibleSharded

        if not offload.any_update:
            return ReproducibleSharded(model, comm, settings, device)
        from hpctrain.parallel.offload.host_optimizer import HostOptimizer

        return ReproducibleSharded(model, comm, settings, device, partial(HostOptimizer, offload, device))
    materialise(model, device)
    model.to(device)
    from hpctrain.parallel.reproducible.ddp import ReproducibleDataParallel

    return ReproducibleDataParallel(model, comm, settings)


def _recompute(
    model: nn.Module, settings: ParallelSettings, offload: OffloadSettings, device: torch.device, rank: int
) -> None:
    """Enable activation recomputation for every unit but the model itself; offload their inputs if requested."""
    from hpctrain.parallel.fsdp.units import find_units
    from hpctrain.parallel.recompute import recompute

    units = [unit.module for unit in find_units(model, settings.units)[1:]]
    if settings.pipe > 1:
        from hpctrain.parallel.pipeline.layers import find_layers

        # A container that the pipeline flattens into layers is never called.
        inside = {module for layer in find_layers(model) for module in layer.module.modules()}
        units = [unit for unit in units if unit in inside]
    recompute(units)
    if offload.activations:
        from hpctrain.parallel.offload.transfer import offload_activations

        offload_activations(units, offload, device, rank)


def _check_modules(model: nn.Module, comm: Communicator, settings: ParallelSettings) -> None:
    """Raise ``UsageError`` for modules that cannot train as in one process; warn of differences in evaluation."""
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        text = f"the parameter {lazy[0]} has no shape yet: call the model once on a sample, then give it to job.wrap"
        raise UsageError(text, everywhere=True)
    if settings.data not in SYNCHRONOUS or shape_of(settings, comm.size).data == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(name or "the model", module)
    _warn_of_evaluation(model, comm)


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        text = (
            f"{name} has max_norm, by which each forward pass changes the rows that its samples look up: ranks with "
            "other samples would change others; remove max_norm, or train in one process"
        )
        raise UsageError(text, everywhere=True)
    if module.scale_grad_by_freq:
        text = (
            f"{name} has scale_grad_by_freq, which divides gradients by how often a row is looked up in the batch: a "
            "rank counts only its own share; remove it, or train in one process"
        )
        raise UsageError(text, everywhere=True)


def _warn_of_evaluation(model: nn.Module, comm: Communicator) -> None:
    """Warn of batch norms without running statistics: in evaluation, too, they normalise by each rank's samples."""
    names = [
        name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.running_mean is None
    ]
    if names and comm.rank == 0:
        logger.warning(
            "%s %s no running statistics (track_running_stats=False): an evaluation normalises by the samples of each "
            "rank, so its result depends on the number of ranks; evaluate in one process where that matters",
            ", ".join(names[:3]) + (" ..." if len(names) > 3 else ""),
            "has" if len(names) == 1 else "have",
        )
