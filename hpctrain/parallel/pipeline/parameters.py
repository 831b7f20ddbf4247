"""Parameters of a rank's stages: removal of those of other stages, and gradient reduction of tied ones.

A removed parameter or buffer becomes None in its module; ``state_dict``, ``parameters()`` and
``to()`` skip it. If it was on the meta device, its module remembers it, which takes no memory.
``materialise`` then draws the module's initial values as in the whole model, because the values
that a module draws may depend on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.meta_init import REMOVED
from hpctrain.parallel.pipeline.layers import Layer


@dataclass(frozen=True, eq=False)
class TiedParameter:
    """Parameter that several chunks of a model share: all its names, and the chunks that contain one of them."""

    names: tuple[str, ...]
    chunks: tuple[int, ...]
    parameter: nn.Parameter


def prune(model: nn.Module, layers: Sequence[Layer], held: Collection[int]) -> None:
    """Remove the parameters and buffers of all layers except the ``held`` ones from their modules, in place.

    Tensors that a held layer shares stay in every module. ``layers`` is the result of
    ``find_layers``.
    """
    kept_ids = {id(tensor) for number in held for tensor in _tensors(layers[number].module)}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in list(own.items()):
                if tensor is not None and id(tensor) not in kept_ids:
                    _remove(module, name, tensor)


def _remove(module: nn.Module, name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        vars(module).setdefault(REMOVED, {})[name] = tensor
    setattr(module, name, None)  # not through the dictionary: recurrent layers keep their own list


def tied_parameters(layers: Sequence[Layer], chunks: Sequence[Collection[int]]) -> list[TiedParameter]:
    """Return the parameters that layers of different chunks share, in the model's order; call it before ``prune``."""
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


# Gradient reduction for parameters tied across stages, such as an embedding that is also the output layer -------------


class TiedGradients:
    """Tied parameters of this stage. Collective over all stages.

    Every stage that holds a tied parameter updates it alike, with the sum of the gradients. The
    copies therefore stay equal bit for bit.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, shared: Sequence[TiedParameter], held: Collection[int]
    ) -> None:
        self._model = model
        self._groups: list[tuple[str, Communicator]] = []
        self._counted_elsewhere: set[str] = set()  # names that an earlier stage counts
        for each in shared:
            owners = sorted({chunk % comm.size for chunk in each.chunks})
            if len(owners) == 1:
                continue
            group = comm.split(0 if comm.rank in owners else 1)
            if comm.rank not in owners:
                group.free()
                continue
            self._groups.append((each.names[0], group))
            if comm.rank != each.chunks[0] % comm.size:
                self._counted_elsewhere |= set(each.names)

    def reduce(self) -> None:
        """Sum the gradients of tied parameters over their stages; the gradients must be complete. Collective."""
        for name, group in self._groups:
            parameter = self._model.get_parameter(name)
            if any(group.all_gather_object(parameter.grad is not None)):
                if parameter.grad is None:
                    parameter.grad = parameter.new_zeros(parameter.shape)
                group.all_reduce(parameter.grad)

    def counts(self, name: str) -> bool:
        """Return whether this stage is the one that counts a parameter, where each parameter counts once."""
        return name not in self._counted_elsewhere
