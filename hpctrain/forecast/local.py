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
from hpctrain.forecast.fake import FakeRanks, fake_copy, faked, faking
from hpctrain.forecast.passes import LayerPass, Passed, measure
from hpctrain.parallel.objective import Compare, cross_entropy, loss_named
from hpctrain.parallel.pipeline.channels import Parcel
from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.skip import carrying
from hpctrain.parallel.tensor.plan import apply, check, choose, plan_of
from hpctrain.parallel.tensor.sharding import TensorSplit
from hpctrain.train.config import Settings


@dataclass(frozen=True)
class How:
    """Settings that determine the memory of a microbatch's passes on one rank."""

    samples: int
    device: str
    loss: str
    autocast: bool
    narrow: bool  # float32 parameters are used in bfloat16
    recompute: bool
    units: tuple[str, ...]
    row: bool  # layers are called one by one instead of through the model
    tensor: int
    tensor_plan: tuple[str, ...]
    sequence: bool
    splits: bool  # weight gradients are deferred

    @classmethod
    def of(cls, settings: Settings, samples: int, device: str) -> How:
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
            row=parallel.pipe > 1,
            tensor=parallel.tensor,
            tensor_plan=parallel.tensor_plan if parallel.tensor > 1 else (),
            sequence=parallel.sequence,
            splits=parallel.pipe > 1 and parallel.schedule == "zb-h1",
        )


@dataclass(frozen=True, eq=False)
class LocalLayer:
    """Memory of the passes of one layer, and its output specs."""

    name: str
    found: LayerPass
    gives: Parcel


@dataclass(frozen=True, eq=False)
class LocalModel:
    """Part of a model that a rank of a tensor group has, with the memory of its layers' passes."""

    numels: dict[str, int]  # elements of each parameter on this rank, by name
    layers: tuple[LocalLayer, ...]
    loss: LayerPass
    rooms: int  # bytes of the buffers for tensor-parallel reductions


@lru_cache(maxsize=512)
def local_model(facts: ModelFacts, how: How) -> LocalModel:
    """Return the part of the model that a rank has; raises ``UsageError`` if the model cannot be split this way."""
    firsts: dict[int, nn.Module] = {}
    same = {layer.module: firsts.setdefault(layer.kind, layer.module) for layer in facts.layers}
    with faking(how.device):
        model = fake_copy(facts.model, torch.bfloat16 if how.narrow else None, same if facts.is_row else None)
        model.train()
        modules = dict(model.named_modules(remove_duplicate=False))
        rows = [modules.get(layer.name, layer.module) for layer in facts.layers] if facts.is_row else [model]
        if how.recompute:
            recompute(_recomputed(facts, modules, rows, how))
        ranks = FakeRanks(how.tensor)
        split = _split(model, ranks, how) if how.tensor > 1 else None
        compare, outputs = _comparison(split, how)
        with outputs:
            layers, last = _layers(facts, rows, how)
        loss = _loss(facts, last, compare, how)
        return LocalModel(_numels(facts, rows), tuple(layers), loss, ranks.taken)


def _recomputed(
    facts: ModelFacts, modules: dict[str, nn.Module], rows: Sequence[nn.Module], how: How
) -> list[nn.Module]:
    """Return the units that are recomputed (activation checkpointing), chosen as the strategies choose them."""
    names = [name for name in dict.fromkeys(facts.unit_of(how.units).values()) if name]
    units = list(dict.fromkeys(modules[name] for name in names))
    if how.row:
        inside = {module for row in rows for module in row.modules()}
        units = [unit for unit in units if unit in inside]
    return units


def _split(model: nn.Module, ranks: FakeRanks, how: How) -> TensorSplit:
    plan = plan_of(model, how.tensor_plan)
    check(choose(model, plan), how.tensor)
    return apply(model, cast(Communicator, ranks), plan, sequence=how.sequence)


def _numels(facts: ModelFacts, rows: Sequence[nn.Module]) -> dict[str, int]:
    """Return the number of elements of each parameter on this rank."""
    numels = {}
    for names, module in zip(facts.inside, rows):
        held = dict(module.named_parameters())
        numels.update({name: held[own].numel() for own, name in names.items()})
    return numels


# Passes ---------------------------------------------------------------------------------------------------------------


def _layers(facts: ModelFacts, rows: Sequence[nn.Module], how: How) -> tuple[list[LocalLayer], Any]:
    """Measure all layers, once per kind; return the results and the output of the last layer."""
    given: Any = facts.inputs.of(how.samples)
    given = faked(given.to(torch.bfloat16) if how.narrow and given.is_floating_point() else given)
    done: dict[Any, Passed] = {}
    kept: dict[str, Tensor] = {}
    layers = []
    for layer, module in zip(facts.layers, rows):
        key = layer.kind, Parcel.of(_tensors(given)).specs
        if key not in done:
            done[key] = measure(_calling(module, kept, how), given, list(module.parameters()), splits=how.splits)
        passed = done[key]
        given = passed.gives
        layers.append(LocalLayer(layer.name, passed.found, Parcel.of(_tensors(given))))
    return layers, given


def _calling(module: nn.Module, kept: dict[str, Tensor], how: How) -> Callable[[Any], Any]:
    """Return a function that runs a layer; each call sees the skip tensors that earlier layers have stored."""
    before = dict(kept)

    def call(given: Any) -> Any:
        kept.clear()
        kept.update(before)
        with carrying(kept), _computing(how):
            return module(given)

    return call


def _computing(how: How) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if how.autocast else nullcontext()


def _comparison(split: TensorSplit | None, how: How) -> tuple[Compare, AbstractContextManager[None]]:
    """Return the loss function, and the context in which outputs are computed: vocabulary-parallel where possible."""
    compare = loss_named(how.loss)
    if split is None or not split.has_head or compare is not cross_entropy:
        return compare, nullcontext()
    return split.cross_entropy, split.split_outputs()


def _loss(facts: ModelFacts, outputs: Any, compare: Compare, how: How) -> LayerPass:
    """Measure the loss function."""
    targets = faked(facts.targets.of(how.samples))
    return measure(lambda given: compare(given, targets), _tensors(outputs)[0], []).found


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]
