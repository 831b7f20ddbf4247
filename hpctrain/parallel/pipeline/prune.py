"""Take out of a model what this rank does not hold, without changing a name.

A parameter or buffer that goes becomes None in its module, where ``state_dict``, ``parameters()`` and ``to()`` pass
over it. One that goes from the meta device is remembered there, without memory: ``materialise`` then draws its module's
first values as it would in the whole model, as what a module draws may depend on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hpctrain.parallel.materialise import GONE
from hpctrain.parallel.pipeline.layers import Layer


@dataclass(frozen=True, eq=False)
class TiedParameter:
    """Name a parameter that several chunks of a model share: all its names, and the chunks that have one of them."""

    names: tuple[str, ...]
    chunks: tuple[int, ...]
    parameter: nn.Parameter


def prune(model: nn.Module, layers: Sequence[Layer], held: Collection[int]) -> None:
    """Take parameters and buffers of all layers but the ``held`` ones out of their modules, in place.

    Those that a held layer has too stay wherever they are. ``layers`` is the row that ``find_layers`` gave.
    """
    stay = {id(tensor) for number in held for tensor in _tensors(layers[number].module)}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in list(own.items()):
                if tensor is not None and id(tensor) not in stay:
                    _take_out(module, name, tensor)


def _take_out(module: nn.Module, name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        vars(module).setdefault(GONE, {})[name] = tensor
    setattr(module, name, None)  # not in the dictionary: recurrent layers keep a list of their own


def tied(layers: Sequence[Layer], chunks: Sequence[Collection[int]]) -> list[TiedParameter]:
    """Return the parameters that layers of different chunks share, in the model's order; before anything is pruned."""
    uses: dict[nn.Parameter, list[tuple[str, int]]] = {}
    home = {number: chunk for chunk, numbers in enumerate(chunks) for number in numbers}
    for number, layer in enumerate(layers):
        for name, parameter in layer.module.named_parameters(layer.name, remove_duplicate=False):
            uses.setdefault(parameter, []).append((name, home[number]))
    found = []
    for parameter, used in uses.items():
        within = tuple(sorted({chunk for _, chunk in used}))
        if len(within) > 1:
            found.append(TiedParameter(tuple(name for name, _ in used), within, parameter))
    return found


def used_twice(layers: Sequence[Layer]) -> list[nn.Parameter]:
    """Return the parameters that layers hold under several names."""
    counts: dict[nn.Parameter, int] = {}
    for layer in layers:
        for _, parameter in layer.module.named_parameters(remove_duplicate=False):
            counts[parameter] = counts.get(parameter, 0) + 1
    return [parameter for parameter, count in counts.items() if count > 1]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
