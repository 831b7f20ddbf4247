"""Guard of partial parameters: operations that need other ranks' parts raise, whole tensors load."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.compiled import ModuleHook
from hpctrain.parallel.guard import torch_functions
from hpctrain.parallel.guard.shard_tensor import ATTRIBUTE, ShardInfo, ShardParameter, ShardTensor, mark, part_of
from hpctrain.parallel.hooks import PlainInUpdates, around_forward, before_backward
from hpctrain.parallel.strategy import SplitStrategy, Strategy
from hpctrain.plain_tensors import on_shards, plain_tensors
from hpctrain.shard import WholeStates


def _hooks_on_loading(strategy: SplitStrategy) -> Iterator[RemovableHandle]:
    """Let every module of a split model load whole tensors, on all ranks that hold parts of them; yield the hooks.

    ``model.load_state_dict(whole)``, also of a submodule, copies this rank's elements. Names that a
    pipeline has moved to other stages are ignored.
    """
    for name, module in strategy.model.named_modules(remove_duplicate=False):
        yield module.register_load_state_dict_pre_hook(ModuleHook(_loading(strategy, f"{name}." if name else "")))


def _loading(strategy: SplitStrategy, path: str) -> Any:
    @on_shards
    def hook(module: nn.Module, given: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) after job.wrap(model): the optimizer and the strategy hold the "
                "parameters that it would replace; load without assign",
                everywhere=True,
            )
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            key = prefix + name
            if tensor is None and strategy.pipe is not None:
                given.pop(key, None)  # held by another stage
            elif tensor is not None and isinstance(given.get(key), Tensor):
                given[key] = _own_part(strategy, path + name, tensor, given[key])

    return hook


def _own_part(strategy: SplitStrategy, name: str, held: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor; a tensor of another shape is returned unchanged."""
    split = strategy.split
    if split is None or whole.shape == held.shape or tuple(whole.shape) != strategy.whole_shape(name):
        return whole
    part = torch.empty_like(held, dtype=whole.dtype, device=whole.device, requires_grad=False)
    for shard in split.shards(name, part):
        box = tuple(slice(start, start + extent) for start, extent in zip(shard.start, shard.extent))
        shard.tensor.copy_(whole[box])
    return part


class ParameterGuard(PlainInUpdates):
    """Guard of the parameters (by name) of a strategy; ``description`` describes the part of a parameter in errors.

    The parameters are ``ShardParameter``, which refuses sums over parts, except during updates, and
    during passes if the passes use them (``in_passes``).
    """

    def __init__(
        self, strategy: SplitStrategy, parameters: Mapping[str, nn.Parameter], description: str, *, in_passes: bool
    ) -> None:
        super().__init__(parameters, ShardParameter, ShardTensor)
        self._in_backward = False
        owner = weakref.ref(strategy)
        for name, parameter in parameters.items():
            parameter.__dict__[ATTRIBUTE] = ShardInfo(name, owner, description)
        if in_passes:
            self._handles += around_forward(strategy.model, self._before_forward, self._after_forward)
        self._handles += _hooks_on_loading(strategy)
        torch_functions.install(strategy)
        self._set_class(ShardParameter)

    def close(self) -> None:
        """Make the parameters plain ``nn.Parameter`` for good."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            torch_functions.uninstall()
        self._handles = []
        self._set_class(nn.Parameter)
        for parameter in self.parameters.values():
            parameter.__dict__.pop(ATTRIBUTE, None)

    def first_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles.append(optimizer.register_state_dict_post_hook(self._mark_states))
        self._handles.append(optimizer.register_load_state_dict_post_hook(_unmark_states))

    def _mark_states(self, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
        """Mark the tensors of an optimizer's ``state_dict()`` that are parts, so that writing them raises an error."""
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        with plain_tensors():
            for number, parameter in zip(numbers, parameters):
                part = part_of(parameter)
                state = found["state"].get(number)
                if part is not None and isinstance(state, dict):
                    strategy = part.strategy()
                    split: Any = None if strategy is None else strategy.split
                    is_whole = isinstance(split, WholeStates) and split.holds_state(optimizer, part.name) is not None
                    shape = None if is_whole else parameter.shape  # states of parameters that other ranks own lack here
                    found["state"][number] = {key: _marked_state(one, shape, part) for key, one in state.items()}

    # Passes -----------------------------------------------------------------------------------------------------------

    def _before_forward(self, args: Any, kwargs: Any) -> None:
        self._suspend()

    def _after_forward(self, args: Any, kwargs: Any, result: Any) -> None:
        if torch.is_grad_enabled():
            before_backward(result, self._begin_backward)
        self._resume()

    def _begin_backward(self) -> None:
        """Switch to plain parameters for modules that recompute their activations."""
        if not self._in_backward:
            self._in_backward = True
            self._suspend()
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._resume()


def _marked_state(value: Any, shape: torch.Size | None, part: ShardInfo) -> Any:
    if not isinstance(value, torch.Tensor) or shape not in (None, value.shape) or not value.dim():
        return value
    return mark(value.detach(), replace(part, description="the optimizer's state of " + part.description))


def _unmark_states(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if type(value) is ShardTensor:
                value.__class__ = Tensor  # type: ignore[assignment]


def protect(strategy: Strategy) -> None:
    """Make functions that would need other ranks' parts of the parameters raise ``UsageError``."""
    if isinstance(strategy, SplitStrategy):
        description, parameters, in_passes = strategy.partial_parameters()
        if parameters:
            strategy.guard = ParameterGuard(strategy, parameters, description, in_passes=in_passes)


def unprotect(strategy: Strategy) -> None:
    """Make the parameters of a strategy ordinary ones again."""
    if isinstance(strategy, SplitStrategy) and strategy.guard is not None:
        strategy.guard.close()
        strategy.guard = None
