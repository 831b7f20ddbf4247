"""Hooks on the optimizers of the process: which of them update shards, and whether they can."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.elementwise import check_elementwise
from hpctrain.parallel.update_hooks import UpdateHooks


class Owners:
    """Hooks that call ``before`` and ``after`` around each update of ``shards`` by any optimizer.

    ``replaced`` holds the parameters that the model had before sharding, by name. An optimizer that
    still holds them would update tensors that the model no longer uses.
    """

    def __init__(
        self,
        shards: Iterable[nn.Parameter],
        replaced: Mapping[str, weakref.ref[nn.Parameter]],
        trusted: tuple[str, ...],
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._shards = {id(shard) for shard in shards}
        living = {name: old() for name, old in replaced.items()}
        self._replaced = {id(living[name]): (name, old) for name, old in replaced.items() if living[name] is not None}
        self._trusted, self._before, self._after = trusted, before, after

    def attach(self) -> UpdateHooks:
        """Hook all optimizers of the process; the hooks last as long as this object."""
        return UpdateHooks(self, Owners._first, Owners._last)

    def _first(self, optimizer: torch.optim.Optimizer) -> None:
        if self.check(optimizer):
            self._before(optimizer)

    def _last(self, optimizer: torch.optim.Optimizer) -> None:
        if self.holds(optimizer):
            self._after(optimizer)

    def check(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates shards; raise ``UsageError`` if it cannot update them correctly."""
        for parameter in _parameters(optimizer):
            name, old = self._replaced.get(id(parameter), ("", None))
            if old is not None and old() is parameter:
                raise UsageError(
                    f"the optimizer holds parameter {name} as it was before job.wrap(model) split it: "
                    "make the optimizer after job.wrap(model)",
                    everywhere=True,
                )
        if not self.holds(optimizer):
            return False
        check_elementwise(optimizer, self._trusted)
        return True

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer updates shards."""
        return any(id(parameter) in self._shards for parameter in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
