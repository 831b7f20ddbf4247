"""Description of a planned run: its model without memory, its settings and ranks, and its division into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hpctrain.comm.mesh import Shape
from hpctrain.data.settings import open_dataset
from hpctrain.errors import DataError, HpctrainError, SettingsError, UsageError
from hpctrain.models.build import build
from hpctrain.parallel.config import ParallelSettings, microbatches_for
from hpctrain.parallel.fsdp.units import find_units
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.partition import balance, parse_partition
from hpctrain.parallel.pipeline.schedules import Schedule, make
from hpctrain.parallel.pipeline.skip import Join, Keep
from hpctrain.settings import UserCodeError
from hpctrain.train.config import Settings, check_sizes

META = torch.device("meta")


@dataclass(frozen=True)
class Spec:
    """Shape (without the batch dimension) and dtype of one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def of(self, samples: int, device: torch.device | str = META) -> Tensor:
        """Return a tensor of zeros for ``samples`` samples."""
        return torch.zeros(samples, *self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ParameterFacts:
    """Elements and dtype of one parameter of a model, or of the part of it that a rank has."""

    name: str
    numel: int
    dtype: torch.dtype
    trained: bool

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """Layer of a sequential model; layers of the same ``kind`` differ only in their names and values.

    A model that is not sequential is a single layer.
    """

    name: str
    module: nn.Module  # on the meta device
    kind: int


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """Description of a model; ``not_sequential`` is the reason why it cannot be partitioned into stages, else empty."""

    name: str
    model: nn.Module  # on the meta device
    parameters: tuple[ParameterFacts, ...]  # each once, under its first name
    layers: tuple[LayerFacts, ...]
    inputs: Spec
    targets: Spec
    not_sequential: str = ""
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def numel(self) -> int:
        return sum(one.numel for one in self.parameters)

    @lru_cache(maxsize=64)  # noqa: B019 (few models exist)
    def unit_of(self, patterns: tuple[str, ...]) -> dict[str, str]:
        """Return the name of the unit of each parameter if units are chosen by these patterns."""
        return {name: unit.name for unit in find_units(self.model, patterns) for name, _ in unit.parameters}

    @cached_property
    def layer_parameters(self) -> tuple[list[str], ...]:
        """Return the names in the model of the parameters that each layer uses."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        return tuple([names[id(one)] for one in layer.module.parameters()] for layer in self.layers)

    @property
    def is_sequential(self) -> bool:
        """Return whether the model is sequential, so that it can be partitioned between its layers."""
        return not self.not_sequential


def facts_of(settings: Settings) -> ModelFacts:
    """Return the description of the model that the settings select.

    If the token files do not exist yet, the vocabulary size comes from the settings; a model of
    arrays needs its data. Raises ``SettingsError`` and ``DataError``.
    """
    if settings.model.pretrained is not None:
        text = f"a plan of model.factory = {settings.model.factory}: models of Transformers compute with values"
        raise SettingsError(f"{text}, a plan has none; allowed are models that run on the meta device")
    sample, known, notes = _data(settings)
    model = _on_meta(settings, known)
    return describe(model, settings.model.factory or settings.model.name, *sample, notes=tuple(notes))


def describe(model: nn.Module, name: str, inputs: Spec, targets: Spec, *, notes: tuple[str, ...] = ()) -> ModelFacts:
    """Return the description of a model on the meta device."""
    try:
        named = [(layer.name, layer.module) for layer in find_layers(model)]
        why = ""
    except UsageError as error:
        named, why = [("model", model)], str(error)
    kinds: dict[Any, int] = {}
    layers = tuple(
        LayerFacts(local_name, module, kinds.setdefault(_kind(module, local_name), len(kinds)))
        for local_name, module in named
    )
    parameters = tuple(
        ParameterFacts(local_name, one.numel(), one.dtype, one.requires_grad)
        for local_name, one in model.named_parameters()
    )
    return ModelFacts(name, model, parameters, layers, inputs, targets, why, notes)


def _kind(module: nn.Module, name: str) -> Any:
    """Return a key that is equal for layers with the same computation.

    A layer that stores or joins skip tensors gets its name as a key, so that it equals no other
    layer.
    """
    modules = list(module.modules())
    if any(isinstance(one, (Keep, Join)) for one in modules):
        return name
    tensors = [
        (local_name, tuple(one.shape), one.dtype, one.requires_grad) for local_name, one in module.named_parameters()
    ]
    tensors += [(local_name, tuple(one.shape), one.dtype, False) for local_name, one in module.named_buffers()]
    plain = [
        tuple((key, value) for key, value in vars(one).items() if isinstance(value, (bool, int, float, str)))
        for one in modules
    ]
    return repr(module), tuple(map(type, modules)), tuple(tensors), tuple(plain)


# Data -----------------------------------------------------------------------------------------------------------------


def _data(settings: Settings) -> tuple[tuple[Spec, Spec], Mapping[str, Any], list[str]]:
    """Return the specs of a sample, the facts that the data provide about the model, and the assumptions made."""
    window, notes = settings.model.window, []
    if settings.data.document_masks:
        notes.append("the forecast is without document masks, with which attention computes later tokens too")
    try:
        dataset = open_dataset(replace(settings.data, document_masks=False), "train", window)
    except (SettingsError, DataError) as error:
        if settings.data.format != "tokens" or window is None:
            raise
        tokens = Spec((window,), torch.int64)
        why = f"the data cannot be read ({error})" if settings.data.files else "no data are named"
        vocabulary = "the vocabulary is the model's own" if settings.model.gpt_name else "tokens are the inputs"
        return (tokens, tokens), {}, [*notes, f"{why}: {vocabulary}"]
    inputs, targets = (Spec(tuple(batch.shape[1:]), batch.dtype) for batch in dataset.batch(np.arange(1)))
    return (inputs, targets), dataset.facts, notes


def _on_meta(settings: Settings, known: Mapping[str, Any]) -> nn.Module:
    """Build the model on the meta device; if the factory does not support that, build it once in memory."""
    with torch.random.fork_rng(devices=[]):
        try:
            with META:
                return build(settings.model, **known)
        except UserCodeError:
            pass  # the factory may need values
        try:
            return build(settings.model, **known).to(META)
        except UserCodeError as error:
            raise SettingsError(str(error)) from error
        except HpctrainError:
            raise
        except Exception as error:
            raise SettingsError(f"model.factory {settings.model.factory}: {type(error).__name__}: {error}") from error


# Ranks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Placement of the ranks of a group: their number, the number of nodes, and the number on the rank's own node."""

    size: int
    nodes: int
    local: int
    uniform: bool = True  # equally many ranks on each node

    @property
    def shares_memory(self) -> bool:
        return self.uniform and self.local > 1


def group_of(run: PlannedRun, axis: str, rank: int = 0) -> Group:
    """Return the placement of the group along a mesh axis through a rank."""
    ranks = run.shape.line(axis, rank)
    counts = Counter(map(run.node_of, ranks))
    return Group(len(ranks), len(counts), counts[run.node_of(rank)], len(set(counts.values())) == 1)


def cuts_of(run: PlannedRun) -> list[range]:
    """Return the layers of each chunk of a pipeline, as the run will partition them.

    If the run will measure layer times, the partition of equal work is returned. Raises
    ``UsageError`` if the model cannot be partitioned.
    """
    if not run.facts.is_sequential:
        raise UsageError(run.facts.not_sequential)
    parallel = run.parallel
    return _cut(run.facts, parallel.pipe * parallel.chunks_a_rank, parallel.partition, run.microbatch)


@lru_cache(maxsize=256)
def _cut(facts: ModelFacts, count: int, partition: str, samples: int) -> list[range]:
    layers = find_layers(facts.model)
    how = parse_partition(partition)
    convolves = any(isinstance(module, _ConvNd) for layer in layers for module in layer.module.modules())
    example = facts.inputs.of(samples) if convolves else None
    return balance(layers, count, "compute" if how == "time" else how, example)


Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class PlannedRun:
    """Settings of a run, description of its model, and the ranks that it will have.

    Raises ``UsageError`` or ``SettingsError`` if the settings do not fit that number of ranks.
    """

    settings: Settings
    facts: ModelFacts
    ranks: int
    ranks_per_node: int
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise UsageError(f"{self.ranks} ranks, {self.ranks_per_node} per node: there must be at least 1 of each")
        check_sizes(self.settings, self.ranks)

    @property
    def parallel(self) -> ParallelSettings:
        return self.settings.parallel

    @property
    def offload(self) -> OffloadSettings:
        return self.settings.offload

    @cached_property
    def shape(self) -> Shape:
        return check_sizes(self.settings, self.ranks)

    @property
    def nodes(self) -> int:
        """Return the number of nodes; the last may be only partly filled."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def ranks_on_node(self) -> int:
        """Return the number of ranks on the fullest node."""
        return min(self.ranks, self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank; nodes are filled one after the other."""
        return rank // self.ranks_per_node

    @property
    def samples(self) -> int:
        """Return the samples per backward pass of a rank, or of a pipeline."""
        train = self.settings.train
        return train.batch // self.shape.data // train.accumulate

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches per backward pass of a pipeline; 1 without one."""
        return microbatches_for(self.parallel, self.samples) if self.parallel.pipe > 1 else 1

    @property
    def microbatch(self) -> int:
        return self.samples // self.microbatches

    @cached_property
    def schedule(self) -> Schedule | None:
        """Return the pipeline schedule; None without a pipeline."""
        if self.parallel.pipe == 1:
            return None
        parallel = self.parallel
        return make(parallel.schedule, parallel.pipe, self.microbatches, parallel.chunks_a_rank)
