"""Split what lies between split layers along the sequence: norms and dropout are then computed once, not on all ranks.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. The sum over the ranks
behind a row-parallel layer becomes a reduce_scatter along the sequence, and an all_gather comes before the next
column-parallel one: the same bytes. A parameter outside of split layers sees a part of the tokens on each rank, so its
gradient is summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.tensor import moves
from hpctrain.parallel.tensor.rng import Region


def begin_behind(module: nn.Module, comm: Communicator) -> None:
    """Let each rank go on with its part of what a module returns."""

    def split(_: nn.Module, args: Any, result: Any) -> Any:
        return tree_map(lambda leaf: moves.split_sequence(leaf, comm) if _is_activation(leaf) else leaf, result)

    module.register_forward_hook(split)


def end_before(module: nn.Module, comm: Communicator) -> None:
    """Let all ranks give a module the whole sequence."""

    def join(_: nn.Module, args: Any) -> Any:
        return tree_map(lambda leaf: moves.join_sequence(leaf, comm) if _is_activation(leaf) else leaf, args)

    module.register_forward_pre_hook(join)


def sum_gradients(module: nn.Module, comm: Communicator) -> None:
    """Sum the gradients of a module's own parameters, each of which this rank applies to its part alone.

    By hooks around ``forward``, which find whatever the strategy of the data axis has made of the parameters.
    """
    before: list[Any] = []

    def lend(_: nn.Module, args: Any) -> None:
        before.append(module._parameters)
        trained = {name: one for name, one in module._parameters.items() if one is not None and one.requires_grad}
        if trained and torch.is_grad_enabled():
            summed = moves.summed(list(trained.values()), comm)
            module.__dict__["_parameters"] = {**module._parameters, **dict(zip(trained, summed))}

    def give_back(_: nn.Module, args: Any, result: Any) -> None:
        if before:
            module.__dict__["_parameters"] = before.pop()

    module.register_forward_pre_hook(lend)
    module.register_forward_hook(give_back, always_call=True)


def draw_apart(module: nn.Module, region: Region) -> None:
    """Let a dropout draw for each rank's own part."""
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


def prepare(
    model: nn.Module,
    comm: Communicator,
    split: Collection[nn.Module],
    whole: Collection[nn.Module],
    region: Region | None,
) -> None:
    """Prepare all modules that see a part of the sequence: those that are neither split nor see the ``whole`` of it."""
    apart = {inner for module in whole for inner in module.modules()} | set(split)
    for module in model.modules():
        if module in apart:
            continue
        if any(parameter is not None for parameter in module._parameters.values()):
            sum_gradients(module, comm)
        if region is not None and isinstance(module, _DropoutNd):
            draw_apart(module, region)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
