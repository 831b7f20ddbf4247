"""Whole tensors in ``model.load_state_dict``: each rank copies its part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UsageError
from hpctrain.parallel.module_hooks import ModuleHook
from hpctrain.plain_tensors import as_parts

if TYPE_CHECKING:
    from hpctrain.parallel.strategy import Strategy


class WholeStates:
    """Hooks that let every module of a split model load whole tensors, on all ranks that hold parts of them.

    ``model.load_state_dict(whole)``, also of a submodule, copies this rank's elements. Names that a
    pipeline has moved to other stages are ignored.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._handles: list[RemovableHandle] = []
        for name, module in strategy.model.named_modules(remove_duplicate=False):
            hook = ModuleHook(self._hook(f"{name}." if name else ""))
            self._handles.append(module.register_load_state_dict_pre_hook(hook))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, path: str) -> Any:
        @as_parts
        def hook(module: nn.Module, given: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
            if metadata.get("assign_to_params_buffers"):
                raise UsageError(
                    "load_state_dict(assign=True) after job.wrap(model): the optimizer and the strategy hold the "
                    "parameters that it would replace; load without assign",
                    everywhere=True,
                )
            for name, tensor in _own(module):
                key = prefix + name
                if tensor is None and self._strategy.pipelined:
                    given.pop(key, None)  # held by another stage
                elif tensor is not None and isinstance(given.get(key), Tensor):
                    given[key] = self._part(path + name, tensor, given[key])

        return hook

    def _part(self, name: str, held: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor; a tensor of another shape is returned unchanged."""
        split = self._strategy.split
        if split is None or whole.shape == held.shape:
            return whole
        if tuple(whole.shape) != self._strategy.whole_shape(name):
            return whole
        part = torch.empty_like(held, dtype=whole.dtype, device=whole.device, requires_grad=False)
        for shard in split.shards(name, part):
            box = tuple(slice(start, start + extent) for start, extent in zip(shard.start, shard.extent))
            shard.tensor.copy_(whole[box])
        return part


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()
