"""Hooks around every update of a run's optimizers: gradients are checked before it, the step is counted after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain import trace
from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.strategy import Strategy
from hpctrain.plain_tensors import as_parts
from hpctrain.train.first_step import FirstStepChecks
from hpctrain.train.health import Health, Policy, check_policy
from hpctrain.train.scaler import watch_scalers

Optimizers = Mapping[str, torch.optim.Optimizer]


class Updates:
    """Hooks on the optimizers of a run; ``healths`` and ``strategies`` have the keys of the models.

    ``checks`` inspects the first update of this start unless it is disabled.
    """

    def __init__(
        self,
        comm: Communicator,
        models: Mapping[str, nn.Module],
        optimizers: Optimizers,
        strategies: Mapping[str, Strategy],
        policy: Policy,
    ) -> None:
        self._optimizers, self._strategies = optimizers, strategies
        self._held = {key: _models_of(one, models) for key, one in optimizers.items()}
        for key, one in optimizers.items():
            for held in self._held[key] or list(models):
                strategies[held].check_optimizer(one)
        for strategy in strategies.values():
            check_policy(strategy, policy)
        self.healths = {key: Health(one, strategies[key], comm, policy) for key, one in models.items()}
        self.checks: FirstStepChecks | None = None  # for the first update, until it is done
        self._handles: list[RemovableHandle] = []
        self._unwatch: Callable[[], None] = lambda: None
        self._began = 0.0

    def attach(self, begin: Callable[[], int], note: Callable[[], None]) -> None:
        """Attach the hooks: ``begin`` is called before each update and returns its number, ``note`` after it."""
        for key, optimizer in self._optimizers.items():
            healths = [self.healths[name] for name in self._held[key]]
            self._handles += [
                optimizer.register_step_pre_hook(lambda *_, own=healths: self._before(own, begin)),
                optimizer.register_step_post_hook(lambda *_: self._after(note)),
            ]
        self._unwatch = watch_scalers(list(self._optimizers.values()), note)
        if self.checks is not None:
            self.checks.attach()

    def detach(self) -> None:
        """Remove all hooks."""
        self._unwatch()
        for handle in self._handles:
            handle.remove()
        if self.checks is not None:
            self.checks.close()

    @property
    def _one_ranks_own(self) -> bool:
        """Whether a strategy makes the current update by itself, without the other ranks."""
        return any(strategy.updates_itself for strategy in self._strategies.values())

    @as_parts
    def _before(self, healths: Sequence[Health], begin: Callable[[], int]) -> None:
        if self._one_ranks_own:
            return
        step = begin()
        if self.checks is not None:
            self.checks.before_update()
        for health in healths:
            health.before_update(step)
        self._began = time.monotonic()

    @as_parts
    def _after(self, note: Callable[[], None]) -> None:
        if self._one_ranks_own:
            return
        note()
        trace.add("optimizer", self._began, time.monotonic())
        if self.checks is not None:
            checks, self.checks = self.checks, None
            checks.compare_copies("after the first update")
            checks.warn_of_buffers()


def _models_of(optimizer: torch.optim.Optimizer, models: Mapping[str, nn.Module]) -> list[str]:
    """Return the keys of the models whose parameters an optimizer has."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [key for key, model in models.items() if any(id(one) in held for one in model.parameters())]
