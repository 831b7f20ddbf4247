"""Part of a model that one rank has, and the memory of its forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpctrain.comm.communicator import Communicator
from hpctrain.forecast.facts import ModelFacts
from hpctrain.forecast.fake_tensors import FakeCommunicator, fake_copy, fake_mode, to_fake
from hpctrain.forecast.pass_memory import LayerMemory, MeasuredLayer, measure
from hpctrain.parallel.objective import Compare, cross_entropy, loss_named
from hpctrain.parallel.pipeline.channels import MessageFormat
from hpctrain.parallel.pipeline.skip import carrying
from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.tensor.plan import apply, check, choose, plan_of
from hpctrain.parallel.tensor.sharding import TensorSplit
from hpctrain.train.config import Settings


@dataclass(frozen=True)
class PassSettings:
    """Settings that determine the memory of a microbatch's passes on one rank."""

    samples: int
    device: str
    loss: str
    autocast: bool
    narrow: bool  # float32 parameters are used in bfloat16
    recompute: bool
    units: tuple[str, ...]
    sequential: bool  # layers are called one by one instead of through the model
    tensor: int
    tensor_plan: tuple[str, ...]
    sequence: bool
    split_backward: bool  # weight gradients are deferred

    @classmethod
    def of(cls, settings: Settings, samples: int, device: str) -> PassSettings:
        """Return the settings for microbatches of ``samples`` samples."""
        parallel = settings.parallel
        return cls(
            samples=samples,
            device=device,
            loss=settings.train.loss,
            autocast=settings.train.precision == "bfloat16",
            narrow=parallel.mixed_precision == "bfloat16",
            recompute=parallel.recompute,
            units=parallel.units,
            sequential=parallel.pipe > 1,
            tensor=parallel.tensor,
            tensor_plan=parallel.tensor_plan if parallel.tensor > 1 else (),
            sequence=parallel.sequence,
            split_backward=parallel.pipe > 1 and parallel.schedule == "zb-h1",
        )


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """Memory of the passes of one layer, and its output specs."""

    name: str
    memory: LayerMemory
    outputs: MessageFormat


@dataclass(frozen=True, eq=False)
class LocalModel:
    """Part of a model that a rank of a tensor group has, with the memory of its layers' passes."""

    layers: tuple[LocalLayer, ...]
    loss: LayerMemory
    reduction_bytes: int  # bytes of the buffers for tensor-parallel reductions


@lru_cache(maxsize=512)
def local_model(facts: ModelFacts, config: PassSettings) -> LocalModel:
    """Return the part of the model that a rank has; raises ``UsageError`` if the model cannot be split this way."""
    firsts: dict[int, nn.Module] = {}
    same = {layer.module: firsts.setdefault(layer.kind, layer.module) for layer in facts.layers}
    with fake_mode(config.device):
        model = fake_copy(facts.model, torch.bfloat16 if config.narrow else None, same if facts.is_sequential else None)
        model.train()
        modules = dict(model.named_modules(remove_duplicate=False))
        layer_modules = (
            [modules.get(layer.name, layer.module) for layer in facts.layers] if facts.is_sequential else [model]
        )
        if config.recompute:
            recompute(_recomputed(facts, modules, layer_modules, config))
        ranks = FakeCommunicator(config.tensor)
        split = _split(model, ranks, config) if config.tensor > 1 else None
        compare, outputs = _comparison(split, config)
        with outputs:
            layers, last = _layers(facts, layer_modules, config)
        loss = _loss(facts, last, compare, config)
        return LocalModel(tuple(layers), loss, ranks.requested_bytes)


def _recomputed(
    facts: ModelFacts, modules: dict[str, nn.Module], layer_modules: Sequence[nn.Module], config: PassSettings
) -> list[nn.Module]:
    """Return the units that are recomputed (activation checkpointing), chosen as the strategies choose them."""
    names = [name for name in dict.fromkeys(facts.unit_of(config.units).values()) if name]
    units = list(dict.fromkeys(modules[name] for name in names))
    if config.sequential:
        inside = {module for sequential in layer_modules for module in sequential.modules()}
        units = [unit for unit in units if unit in inside]
    return units


def _split(model: nn.Module, ranks: FakeCommunicator, config: PassSettings) -> TensorSplit:
    plan = plan_of(model, config.tensor_plan)
    check(choose(model, plan), config.tensor)
    return apply(model, cast(Communicator, ranks), plan, sequence=config.sequence)


@lru_cache(maxsize=64)
def split_counts(facts: ModelFacts, tensor: int, tensor_plan: tuple[str, ...], *, sequence: bool) -> dict[str, int]:
    """Return the number of elements of each parameter on a tensor rank; raises ``UsageError`` as ``local_model``."""
    if tensor == 1:
        return {one.name: one.numel for one in facts.parameters}
    with fake_mode():
        model = fake_copy(facts.model)
        plan = plan_of(model, tensor_plan)
        check(choose(model, plan), tensor)
        apply(model, cast(Communicator, FakeCommunicator(tensor)), plan, sequence=sequence)
        return {name: one.numel() for name, one in model.named_parameters()}


# Passes ---------------------------------------------------------------------------------------------------------------


def _layers(
    facts: ModelFacts, layer_modules: Sequence[nn.Module], config: PassSettings
) -> tuple[list[LocalLayer], Any]:
    """Measure all layers, once per kind; return the results and the output of the last layer."""
    inputs: Any = facts.inputs.of(config.samples)
    inputs = to_fake(inputs.to(torch.bfloat16) if config.narrow and inputs.is_floating_point() else inputs)
    done: dict[Any, MeasuredLayer] = {}
    skips: dict[str, Tensor] = {}
    layers = []
    for layer, module in zip(facts.layers, layer_modules):
        key = layer.kind, MessageFormat.of(_tensors(inputs)).specs
        if key not in done:
            done[key] = measure(
                _layer_call(module, skips, config),
                inputs,
                list(module.parameters()),
                split_backward=config.split_backward,
            )
        measured = done[key]
        inputs = measured.next_input
        layers.append(LocalLayer(layer.name, measured.memory, MessageFormat.of(_tensors(inputs))))
    return layers, inputs


def _layer_call(module: nn.Module, skips: dict[str, Tensor], config: PassSettings) -> Callable[[Any], Any]:
    """Return a function that runs a layer; each call sees the skip tensors that earlier layers have stored."""
    before = dict(skips)

    def call(inputs: Any) -> Any:
        skips.clear()
        skips.update(before)
        with carrying(skips), _autocast(config):
            return module(inputs)

    return call


def _autocast(config: PassSettings) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if config.autocast else nullcontext()


def _comparison(split: TensorSplit | None, config: PassSettings) -> tuple[Compare, AbstractContextManager[None]]:
    """Return the loss function, and the context in which outputs are computed: vocabulary-parallel where possible."""
    compare = loss_named(config.loss)
    if split is None or not split.has_head or compare is not cross_entropy:
        return compare, nullcontext()
    return split.cross_entropy, split.split_outputs()


def _loss(facts: ModelFacts, outputs: Any, compare: Compare, config: PassSettings) -> LayerMemory:
    """Measure the loss function."""
    targets = to_fake(facts.targets.of(config.samples))
    return measure(lambda inputs: compare(inputs, targets), _tensors(outputs)[0], []).memory


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]
