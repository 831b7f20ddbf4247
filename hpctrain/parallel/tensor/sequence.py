"""Sequence parallelism: between split layers, norms and dropout compute on a part of the sequence per rank.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. The
all_reduce after a row-parallel layer becomes a reduce_scatter along the sequence, followed by an
all_gather before the next column-parallel layer: the same bytes. A parameter outside split layers
sees a part of the tokens on each rank, so its gradient is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.rng import RngRegion
from hpctrain.parallel.tensor import functional

_SPLIT_AFTER = {"scatter": True, "gather": False, "vocabulary": False}  # whether sequences are split after the module


def split_sequences(
    model: nn.Module,
    comm: Communicator,
    kinds: Mapping[nn.Module, str],
    split: Sequence[nn.Module],
    region: RngRegion | None,
    layers: Sequence[nn.Module],
) -> None:
    """Split sequences from modules of kind scatter to those of kind gather or vocabulary.

    All other modules there see a part of the sequence, except those in ``split`` and modules of
    kind whole. ``layers`` is the sequence of layers that the stages of a pipeline call.
    """
    sequence_region = SequenceRegion(model, layers, kinds)

    def scatter(result: Any) -> Any:
        sequence_region.change(True)
        return _map_activations(functional.scatter_to_sequence_parallel_region, result, comm)

    def gather(args: Any) -> Any:
        sequence_region.change(False)
        return gather_activations(args, comm)

    excluded = set(split)
    for module, kind in kinds.items():
        if kind == "scatter":
            module.register_forward_hook(lambda _, args, result: scatter(result))
        elif kind == "gather":
            module.register_forward_pre_hook(lambda _, args: gather(args))
        elif kind == "vocabulary" and module in split:
            module.register_forward_pre_hook(lambda *_: sequence_region.change(False))
        if kind in ("scatter", "gather", "whole"):
            excluded |= set(module.modules())
    for module in model.modules():
        if module in excluded:
            continue
        if any(parameter is not None for parameter in module._parameters.values()):
            sum_gradients(module, comm, sequence_region)
        if region is not None and isinstance(module, _DropoutNd):
            draw_per_rank(module, region)


class SequenceRegion:
    """Parts of a forward pass in which sequences are split, and the modules that see a part of them.

    The first pass determines this per module. Stages of a pipeline do not call the model. For them,
    ``layers`` (the sequence of layers that the stages call) and ``kinds`` (of the modules that a
    plan names) determine the state at each layer.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], kinds: Mapping[nn.Module, str]) -> None:
        self.split: bool | None = None  # at the current point of a pass; None: unknown
        self.changes = 0
        self.sees_part: dict[nn.Module, bool] = {}
        self._names = {module: name for name, module in model.named_modules()}
        model.register_forward_pre_hook(lambda *_: self._begin(False), prepend=True)
        for layer, split in zip(layers, split_before(layers, kinds)):
            if any(True for _ in layer.parameters()):  # a layer with parameters occurs once in the sequence of layers
                layer.register_forward_pre_hook(lambda *_, split=split: self._begin(split), prepend=True)

    def _begin(self, split: bool) -> None:
        self.split = split

    def change(self, split: bool) -> None:
        """Record that sequences are split, or whole, from here on."""
        self.changes += 1
        if self.split is not None:
            self.split = split

    def check_not_inside(self, module: nn.Module, changes: int) -> None:
        """Raise ``UsageError`` if sequences were split or gathered while a module with its own parameters ran."""
        if self.split is None or changes == self.changes:
            return
        parameters = [name for name, one in module._parameters.items() if one is not None]
        raise UsageError(
            f"parameters {', '.join(parameters)} of {self._names[module] or 'the model itself'} "
            f"({type(module).__name__}): sequences are split, or joined, while it runs, so its gradients cannot be "
            "told apart; allowed are parameters of modules that see whole sequences or parts of them; put these "
            "parameters into a module of their own, or name a module around the first layers as scatter",
            everywhere=True,
        )


def split_before(layers: Iterable[nn.Module], kinds: Mapping[nn.Module, str]) -> list[bool]:
    """Return whether sequences are split before each layer, and after the last one."""
    found, split = [False], False
    for layer in layers:
        for module in layer.modules():
            split = _SPLIT_AFTER.get(kinds.get(module, ""), split)
        found.append(split)
    return found


def split_before_chunks(chunks: Sequence[Sequence[nn.Module]], kinds: Mapping[nn.Module, str]) -> list[bool]:
    """Return whether sequences are split before each chunk of a pipeline, and at the end."""
    before = split_before((layer for layers in chunks for layer in layers), kinds)
    return [before[begin] for begin in (0, *accumulate(len(layers) for layers in chunks))]


def gather_activations(values: Any, comm: Communicator) -> Any:
    """Return a nest of values with the sequences of all activations gathered, for all ranks."""
    gathered = partial(functional.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False)
    return _map_activations(gathered, values, comm)


def _map_activations(communicate: Callable[..., Tensor], values: Any, comm: Communicator) -> Any:
    def changed(leaf: Any) -> Any:
        return communicate(leaf, comm) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(changed, values)


def sum_gradients(module: nn.Module, comm: Communicator, sequence_region: SequenceRegion | None = None) -> None:
    """Sum the gradients of a module's own parameters over the ranks, if this rank applies them to a part only.

    ``sequence_region`` determines where that is the case; without it, always. The sum uses hooks
    around ``forward``, so it works with the parameters of any strategy of the data axis.
    """
    before: list[tuple[Any, int]] = []

    def install_summed(_: nn.Module, args: Any) -> None:
        before.append((module._parameters, sequence_region.changes if sequence_region is not None else 0))
        if sequence_region is not None and not sequence_region.sees_part.setdefault(
            module, sequence_region.split is not False
        ):
            return
        trained = {name: one for name, one in module._parameters.items() if one is not None and one.requires_grad}
        if trained and torch.is_grad_enabled():
            summed = functional.copy_parameters_to_region(list(trained.values()), comm)
            module.__dict__["_parameters"] = {**module._parameters, **dict(zip(trained, summed))}

    def restore(_: nn.Module, args: Any, result: Any) -> None:
        if before:
            module.__dict__["_parameters"], changes = before.pop()
            if sequence_region is not None and result is not None:  # None: forward has raised
                sequence_region.check_not_inside(module, changes)

    module.register_forward_pre_hook(install_summed)
    module.register_forward_hook(restore, always_call=True)


def draw_per_rank(module: nn.Module, region: RngRegion) -> None:
    """Make a dropout module draw per rank, for each rank's own part."""
    entered: list[torch.device] = []

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        device = args[0].device
        if module.training and region.enter(device):
            entered.append(device)

    def leave(_: nn.Module, args: Any, result: Any) -> None:
        if entered:
            region.leave(entered.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
