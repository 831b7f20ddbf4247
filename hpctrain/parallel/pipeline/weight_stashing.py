"""Weight stashing: the weights of a forward pass are stored until its backward pass (PipeDream).

See Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018, and
Narayanan et al., SOSP 2019. A version is a copy of this stage's parameters. It lives as long as a
microbatch that used it. A stage with only one microbatch at a time uses the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.objective import Objective

Update = Callable[[torch.optim.Optimizer, float], None]


class StashedWeights:
    """Weight versions of one stage (``executor.WeightVersions``); ``live`` is the number of microbatches in flight."""

    def __init__(self, model: nn.Module, live: int) -> None:
        self._model, self._copies = model, live > 1
        self._owners: list[tuple[nn.Module, str, nn.Parameter]] | None = None
        self._current: _WeightVersion | None = None
        self._stashed: dict[int, _WeightVersion] = {}  # by microbatch
        self._max_norm = float("inf")
        self.optimizer: torch.optim.Optimizer | None = None
        self.make_update: Update = lambda optimizer, max_norm: optimizer.step()

    def begin(self, objective: Objective) -> None:
        """Begin a step: parameters may have changed since the last one."""
        if self.optimizer is None:
            raise UsageError(
                "pipedream makes updates inside a step: pass it the optimizer, by job.run or by "
                "job.strategy(model).check_optimizer(optimizer)",
                everywhere=True,
            )
        self._max_norm, self._current, self._stashed = objective.max_norm, None, {}

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Compute forward with the newest weights, and store them for the backward pass."""
        if not self._copies:
            yield
            return
        if self._current is None:
            self._current = _WeightVersion(self._parameter_owners())
        self._stashed[microbatch] = self._current
        with self._current.installed():
            yield

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Compute backward with the weights of the forward pass, and add their gradients to the parameters."""
        version = self._stashed.pop(microbatch, None)
        with version.installed() if version is not None else nullcontext():
            yield
        if version is not None:
            version.add_gradients()

    def update(self) -> None:
        """Make an update with the gradients of one microbatch."""
        assert self.optimizer is not None
        self.make_update(self.optimizer, self._max_norm)
        self._current = None

    def _parameter_owners(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        if self._owners is None:
            self._owners = [
                (module, name, parameter)
                for module in self._model.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
        return self._owners


class _WeightVersion:
    """Copy of the parameters that can replace them in their modules."""

    def __init__(self, owners: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        self._owners = owners
        self._copies = {
            parameter: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for _, _, parameter in owners
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the copies into the modules for the ``with`` block."""
        for module, name, parameter in self._owners:
            module._parameters[name] = self._copies[parameter]
        try:
            yield
        finally:
            for module, name, parameter in self._owners:
                module._parameters[name] = parameter

    def add_gradients(self) -> None:
        """Add the gradients of the copies to the parameters."""
        for parameter, copy in self._copies.items():
            if copy.grad is None:
                continue
            parameter.grad = copy.grad if parameter.grad is None else parameter.grad + copy.grad
            copy.grad = None
