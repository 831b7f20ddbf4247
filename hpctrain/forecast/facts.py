"""Description of a model without its memory: parameters, layers, inputs and targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.data.settings import open_dataset
from hpctrain.errors import DataError, HpctrainError, SettingsError, UsageError
from hpctrain.models.build import build
from hpctrain.parallel.fsdp.units import find_units
from hpctrain.parallel.pipeline.layers import find_layers
from hpctrain.parallel.pipeline.skip import Join, Keep
from hpctrain.settings import UserCodeError
from hpctrain.train.config import Settings

META = torch.device("meta")


@dataclass(frozen=True)
class Spec:
    """Shape (without the batch dimension) and dtype of one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of one sample."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, samples: int, device: torch.device | str = META) -> Tensor:
        """Return a tensor of zeros for ``samples`` samples."""
        return torch.zeros(samples, *self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class ParameterFacts:
    """Shape and dtype of one parameter; ``layer`` is the number of the first layer that uses it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    layer: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
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
        """Return the number of parameters."""
        return sum(one.numel for one in self.parameters)

    @cached_property
    def nbytes(self) -> int:
        """Return the size of all parameters in bytes."""
        return sum(one.nbytes for one in self.parameters)

    @cached_property
    def trained_bytes(self) -> int:
        """Return the size in bytes of the parameters that require gradients."""
        return sum(one.nbytes for one in self.parameters if one.trained)

    @cached_property
    def units(self) -> dict[tuple[str, ...], dict[str, str]]:
        """Return the cache of units that were found so far, by their patterns: see ``unit_of``."""
        return {}

    def unit_of(self, patterns: tuple[str, ...]) -> dict[str, str]:
        """Return the name of the unit of each parameter if units are chosen by these patterns."""
        if patterns not in self.units:
            found = find_units(self.model, patterns)
            self.units[patterns] = {name: unit.name for unit in found for name, _ in unit.parameters}
        return self.units[patterns]

    @cached_property
    def layer_parameters(self) -> tuple[dict[str, str], ...]:
        """Return the parameters that each layer uses: a mapping from their names in the layer to those in the model."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        return tuple(
            {local_name: names[id(one)] for local_name, one in layer.module.named_parameters()} for layer in self.layers
        )

    @property
    def is_sequential(self) -> bool:
        """Return whether the model is sequential, so that it can be partitioned between its layers."""
        return not self.not_sequential


def facts_of(settings: Settings) -> ModelFacts:
    """Return the description of the model that the settings select.

    If the token files do not exist yet, the vocabulary size comes from the settings; a model of
    arrays needs its data. Raises ``SettingsError`` and ``DataError``.
    """
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
    users: dict[nn.Parameter, int] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.module.parameters():
            users.setdefault(parameter, number)
    parameters = tuple(
        ParameterFacts(local_name, tuple(one.shape), one.dtype, one.requires_grad, users[one])
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
    window = settings.model.window
    try:
        dataset = open_dataset(settings.data, "train", window)
    except (SettingsError, DataError) as error:
        if settings.data.format != "tokens" or window is None:
            raise
        tokens = Spec((window,), torch.int64)
        why = f"the data cannot be read ({error})" if settings.data.files else "no data are named"
        vocabulary = "the vocabulary is the model's own" if settings.model.gpt_name else "tokens are the inputs"
        return (tokens, tokens), {}, [f"{why}: {vocabulary}"]
    inputs, targets = dataset.batch(np.arange(1))
    return (_spec(inputs), _spec(targets)), dataset.facts, []


def _spec(batch: Tensor) -> Spec:
    return Spec(tuple(batch.shape[1:]), batch.dtype)


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
