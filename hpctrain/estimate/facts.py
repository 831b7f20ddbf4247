"""Know a model without its memory: its parameters, its layers, and what it takes and is compared with."""

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
from hpctrain.train.settings import Settings

META = torch.device("meta")


@dataclass(frozen=True)
class Spec:
    """Hold shape (without the batch's dim) and dtype of what one sample is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of one sample."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, samples: int, device: torch.device | str = META) -> Tensor:
        """Return a tensor of zeros for so many samples."""
        return torch.zeros(samples, *self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Parameter:
    """Hold what is known of one parameter; ``layer`` is the number of the first layer that uses it."""

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
        """Return the bytes of its elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Layer:
    """Hold one layer of the row that the model is; layers of one ``kind`` are equal but for their names and values.

    A model that is no row is one layer.
    """

    name: str
    module: nn.Module  # on the meta device
    kind: int


@dataclass(frozen=True, eq=False)
class Facts:
    """Hold what is known of a model; ``why_no_row`` says why it cannot be cut into stages, if it cannot."""

    name: str
    model: nn.Module  # on the meta device
    parameters: tuple[Parameter, ...]  # each once, under the first of its names
    layers: tuple[Layer, ...]
    inputs: Spec
    targets: Spec
    why_no_row: str = ""
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(one.numel for one in self.parameters)

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(one.nbytes for one in self.parameters)

    @cached_property
    def trained_bytes(self) -> int:
        """Return the bytes of those parameters that get gradients."""
        return sum(one.nbytes for one in self.parameters if one.trained)

    @cached_property
    def units(self) -> dict[tuple[str, ...], dict[str, str]]:
        """Hold the units that were asked for so far, by their patterns: see ``unit_of``."""
        return {}

    def unit_of(self, patterns: tuple[str, ...]) -> dict[str, str]:
        """Return the name of the unit that each parameter belongs to, where units are chosen by these patterns."""
        if patterns not in self.units:
            found = find_units(self.model, patterns)
            self.units[patterns] = {name: unit.name for unit in found for name, _ in unit.parameters}
        return self.units[patterns]

    @cached_property
    def inside(self) -> tuple[dict[str, str], ...]:
        """Return for each layer the parameters that it uses: from their names in the layer to those in the model."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        return tuple(
            {own: names[id(one)] for own, one in layer.module.named_parameters()} for layer in self.layers
        )

    @property
    def is_row(self) -> bool:
        """Tell whether the model can be cut between its layers."""
        return not self.why_no_row


def facts_of(settings: Settings) -> Facts:
    """Return the facts of the model that settings ask for.

    Where token files are not there yet, the vocabulary is the settings' own; a model of arrays needs its data. Raises
    ``SettingsError`` and ``DataError``.
    """
    sample, known, notes = _data(settings)
    model = _on_meta(settings, known)
    return describe(model, settings.model.factory or settings.model.name, *sample, notes=tuple(notes))


def describe(model: nn.Module, name: str, inputs: Spec, targets: Spec, *, notes: tuple[str, ...] = ()) -> Facts:
    """Return the facts of a model on the meta device."""
    try:
        named = [(layer.name, layer.module) for layer in find_layers(model)]
        why = ""
    except UsageError as error:
        named, why = [("model", model)], str(error)
    kinds: dict[Any, int] = {}
    layers = tuple(Layer(own, module, kinds.setdefault(_kind(module, own), len(kinds))) for own, module in named)
    users: dict[nn.Parameter, int] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.module.parameters():
            users.setdefault(parameter, number)
    parameters = tuple(
        Parameter(own, tuple(one.shape), one.dtype, one.requires_grad, users[one])
        for own, one in model.named_parameters()
    )
    return Facts(name, model, parameters, layers, inputs, targets, why, notes)


def _kind(module: nn.Module, name: str) -> Any:
    """Return what two layers have in common that compute alike; one that keeps tensors for others is like none."""
    inside = list(module.modules())
    if any(isinstance(one, (Keep, Join)) for one in inside):
        return name
    tensors = [(own, tuple(one.shape), one.dtype, one.requires_grad) for own, one in module.named_parameters()]
    tensors += [(own, tuple(one.shape), one.dtype, False) for own, one in module.named_buffers()]
    plain = [
        tuple((key, value) for key, value in vars(one).items() if isinstance(value, (bool, int, float, str)))
        for one in inside
    ]
    return repr(module), tuple(map(type, inside)), tuple(tensors), tuple(plain)


# Data -----------------------------------------------------------------------------------------------------------------


def _data(settings: Settings) -> tuple[tuple[Spec, Spec], Mapping[str, Any], list[str]]:
    """Return what a sample is, what the data say of the model, and what had to be assumed."""
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
    """Build the model without memory; a factory that cannot do so builds it for real, once."""
    with torch.random.fork_rng(devices=[]):
        try:
            with META:
                return build(settings.model, **known)
        except HpctrainError:
            raise
        except Exception:
            if settings.model.factory is None:
                raise
        try:
            return build(settings.model, **known).to(META)
        except HpctrainError:
            raise
        except Exception as error:
            raise SettingsError(f"model.factory {settings.model.factory}: {type(error).__name__}: {error}") from error
