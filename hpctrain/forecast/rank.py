"""Part of a model that one rank has: its parameters, the record of its strategy, and the memory of its passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.forecast.fake_tensors import FakeCommunicator, comparison, fake_copy, fake_mode, split_tensors, to_fake
from hpctrain.forecast.pass_memory import (
    LayerMemory,
    MeasuredLayer,
    PassMemory,
    SequenceLayer,
    measure,
    simulate_passes,
)
from hpctrain.forecast.recorder import Transient
from hpctrain.forecast.run import Group, ModelFacts, ParameterFacts, PlannedRun, cuts_of, group_of
from hpctrain.forecast.simulate import MOST_PASSES, StrategyRecord, Task, simulate
from hpctrain.parallel.config import SHARDED, ParallelSettings
from hpctrain.parallel.objective import tensors_of
from hpctrain.parallel.pipeline.channels import MessageFormat
from hpctrain.parallel.pipeline.skip import carrying
from hpctrain.parallel.recompute import recompute
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
        split = split_tensors(model, ranks, config.tensor_plan, sequence=config.sequence) if config.tensor > 1 else None
        compare, outputs = comparison(config.loss, split)
        with outputs:
            layers, last = _layers(facts, layer_modules, config)
        targets = to_fake(facts.targets.of(config.samples))
        loss = measure(lambda inputs: compare(inputs, targets), tensors_of(last)[0], []).memory
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


@lru_cache(maxsize=64)
def split_counts(facts: ModelFacts, tensor: int, tensor_plan: tuple[str, ...], *, sequence: bool) -> dict[str, int]:
    """Return the number of elements of each parameter on a tensor rank; raises ``UsageError`` as ``local_model``."""
    if tensor == 1:
        return {one.name: one.numel for one in facts.parameters}
    with fake_mode():
        model = fake_copy(facts.model)
        split_tensors(model, FakeCommunicator(tensor), tensor_plan, sequence=sequence)
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
        key = layer.kind, MessageFormat.of(tensors_of(inputs)).specs
        if key not in done:
            done[key] = measure(
                _layer_call(module, skips, config),
                inputs,
                list(module.parameters()),
                split_backward=config.split_backward,
            )
        measured = done[key]
        inputs = measured.next_input
        layers.append(LocalLayer(layer.name, measured.memory, MessageFormat.of(tensors_of(inputs))))
    return layers, inputs


def _layer_call(module: nn.Module, skips: dict[str, Tensor], config: PassSettings) -> Callable[[Any], Any]:
    """Return a function that runs a layer; each call sees the skip tensors that earlier layers have stored."""
    before = dict(skips)

    def call(inputs: Any) -> Any:
        skips.clear()
        skips.update(before)
        with carrying(skips), torch.autocast("cpu", torch.bfloat16, enabled=config.autocast):
            return module(inputs)

    return call


# Strategy of the data axis, and the passes of a rank -----------------------------------------------------------------


# Settings on which the strategy of the data axis depends
_SETTINGS = "shard_within prefetch mixed_precision accumulate bucket_mib compression broadcast_buffers".split()


@dataclass(frozen=True, eq=False)
class RankModel:
    """Part of the model that a rank of one stage has, before it is sharded along the data axis."""

    run: PlannedRun
    stage: int
    cuts: tuple[range, ...]  # layers of all chunks of the whole model
    chunks: dict[int, range]  # layers of each of the rank's own chunks
    parameters: tuple[ParameterFacts, ...]  # in the model's order
    buffers: tuple[int, ...]  # bytes of each
    data: Group

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.run.facts.layers[number].name for chunk in self.chunks.values() for number in chunk)

    def record(self, most_nodes: int | None = None) -> StrategyRecord:
        """Return the record of the strategy of the data axis; with at most ``most_nodes`` nodes in the group."""
        run, group = self.run, self.data
        if most_nodes is not None and group.nodes > most_nodes and group.uniform:
            group = Group(group.local * most_nodes, most_nodes, group.local)
        offloaded, parallel = run.offload.any_update, run.parallel
        settings = ParallelSettings(
            data="zero1" if offloaded and parallel.data not in SHARDED else parallel.data,
            **{name: getattr(parallel, name) for name in _SETTINGS},
        )
        task = Task(
            parameters=self.parameters,
            modules=self._modules(),
            settings=settings,
            group=group,
            on_cpu=run.device == "cpu",
            passes=min(run.settings.train.accumulate, MOST_PASSES),
            in_parts=parallel.pipe > 1,
            buffers=self.buffers,
            sharded=offloaded and group.size == 1,
        )
        return simulate(task)

    def _modules(self) -> tuple[tuple[str, bool], ...]:
        facts = self.run.facts
        of_parameters = facts.unit_of(self.run.parallel.units)
        units = dict.fromkeys(of_parameters[one.name] for one in self.parameters if of_parameters[one.name])
        layers = self.layers if facts.is_sequential else ()
        return tuple((name, name in units) for name in dict.fromkeys((*layers, *units)))

    @cached_property
    def local(self) -> LocalModel:
        return local_model(self.run.facts, PassSettings.of(self.run.settings, self.run.microbatch, self.run.device))

    @cached_property
    def strategy(self) -> StrategyRecord:
        return self.record()

    @property
    def buffer_bytes(self) -> int:
        return sum(self.buffers)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of all its parameters, unsharded."""
        return sum(one.nbytes for one in self.parameters)

    @cached_property
    def trained(self) -> list[ParameterFacts]:
        return [one for one in self.parameters if one.trained]

    @cached_property
    def gradients(self) -> dict[str, int]:
        """Return the bytes of gradients as autograd creates them, by name."""
        narrow = self.run.parallel.mixed_precision == "bfloat16"
        return {
            one.name: one.numel * (2 if narrow and one.dtype is torch.float32 else one.dtype.itemsize)
            for one in self.trained
        }

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients, unsharded."""
        return sum(self.gradients.values())

    def chunk(self, number: int) -> PassMemory:
        """Simulate a pass of one of its chunks; the last chunk computes the loss."""
        facts, parallel = self.run.facts, self.run.parallel
        last = self.chunks[number].stop == len(facts.layers)
        steps = [self._step(index) for index in self.chunks[number]]
        at_loss = self.strategy.unsharded_at_loss if parallel.pipe == 1 else 0
        loss = self.local.loss if last else None
        return simulate_passes(steps, loss, keep_outputs=parallel.pipe == 1 or not last, at_loss=at_loss)

    def input_bytes(self, number: int) -> int:
        """Return the bytes of a microbatch's input to a chunk if the input is copied to a device, else 0."""
        copied = self.run.device != "cpu" and number > 0
        return self.local.layers[self.cuts[number].start - 1].outputs.nbytes if copied else 0

    def chunk_gradients(self, number: int) -> int:
        names = {name for index in self.chunks[number] for name in self._gradients(index)}
        return sum(self.gradients[name] for name in names)

    def _gradients(self, index: int) -> dict[str, int]:
        names = self.run.facts.layer_parameters[index]
        return {name: self.gradients[name] for name in names if name in self.gradients}

    def _step(self, index: int) -> SequenceLayer:
        layer = self.local.layers[index]
        forward = backward = 0
        if self.run.parallel.pipe == 1:  # a pipeline gathers all of them for a step
            forward, backward = (
                self._transient(found, layer.name) for found in (self.strategy.forward, self.strategy.backward)
            )
        offloaded = self.run.offload.activations and self.run.parallel.recompute and layer.name in self._unit_names
        return SequenceLayer(layer.name, layer.memory, self._gradients(index), forward, backward, offloaded)

    def _transient(self, found: Mapping[str, Transient], layer: str) -> int:
        """Return the bytes that the strategy has while a layer runs; with offload, its buffers are other ones."""
        names = [name for name in found if not self.run.facts.is_sequential or f"{name}.".startswith(f"{layer}.")]
        buffers = 0 if self.run.offload.any_update else max((found[name].buffers for name in names), default=0)
        return buffers + max((found[name].unsharded for name in names), default=0)

    @cached_property
    def _unit_names(self) -> set[str]:
        return set(self.run.facts.unit_of(self.run.parallel.units).values()) - {""}


def rank_models(run: PlannedRun) -> list[RankModel]:
    """Return the model part of one rank of each stage; raises ``UsageError`` if the model cannot be split this way."""
    parallel = run.parallel
    counts = split_counts(run.facts, parallel.tensor, parallel.tensor_plan, sequence=parallel.sequence)
    cuts = cuts_of(run) if parallel.pipe > 1 else [range(len(run.facts.layers))]
    found = []
    for stage in range(parallel.pipe):
        chunks = {number: cut for number, cut in enumerate(cuts) if number % parallel.pipe == stage}
        layers = [number for cut in chunks.values() for number in cut]
        names = {name for index in layers for name in run.facts.layer_parameters[index]}
        parameters = [replace(one, numel=counts[one.name]) for one in run.facts.parameters if one.name in names]
        buffers = [buffer.nbytes for index in layers for buffer in run.facts.layers[index].module.buffers()]
        data = group_of(run, "data", stage * run.shape.stride("pipe"))
        found.append(RankModel(run, stage, tuple(cuts), chunks, tuple(parameters), tuple(buffers), data))
    return found
