"""Running statistics of batch norms that depend on the microbatches of a step alone.

In one process, each forward pass updates the running statistics from the samples of its microbatch.
Here a rank runs some of the microbatches. During a step, every forward pass therefore leaves the
statistics of its own samples (running values 0, momentum 1). At the end of the step, all ranks
apply the updates of all microbatches, in their order: new = (1 - momentum) x old + momentum x own,
in float64, rounded once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError

Own = tuple[int, Tensor, Tensor]  # number of the batch norm, mean and variance of one forward pass


@dataclass(eq=False)
class _Saved:
    """State of one batch norm before a step."""

    module: _BatchNorm
    momentum: float | None
    mean: Tensor
    variance: Tensor
    tracked: Tensor | None
    handles: list[Any] = field(default_factory=list)


class MicrobatchStatistics:
    """Statistics of all batch norms of some models in the microbatches of a step."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._saved: list[_Saved] = []
        self._found: dict[int, list[Own]] = {}
        self._index: int | None = None  # of the microbatch whose forward pass runs

    @contextmanager
    def step(self, comm: Communicator) -> Iterator[None]:
        """Record the forward passes in the ``with`` block; its end updates the statistics. Collective."""
        self._found = {}
        self._saved = [_saved(module) for module in batch_norms(self._models)]
        for number, saved in enumerate(self._saved):
            saved.module.momentum = 1.0
            saved.handles = [
                saved.module.register_forward_pre_hook(_reset),
                saved.module.register_forward_hook(self._recorder(number)),
            ]
        try:
            yield
            if self._saved:
                self._update(comm)
        finally:
            for saved in self._saved:
                _restore(saved)
            self._saved = []

    @contextmanager
    def recording(self, index: int) -> Iterator[None]:
        """Record the forward pass of a microbatch; a forward pass that backward repeats is outside of the block."""
        self._index = index
        self._found[index] = []
        try:
            yield
        finally:
            self._index = None

    def _recorder(self, number: int) -> Any:
        @_disable_dynamo
        def record(module: _BatchNorm, args: Any, result: Any) -> None:
            if self._index is not None and module.training:
                assert module.running_mean is not None and module.running_var is not None
                own = number, module.running_mean.detach().clone(), module.running_var.detach().clone()
                self._found[self._index].append(own)

        return record

    @torch.no_grad()
    def _update(self, comm: Communicator) -> None:
        sent = {
            index: [(number, mean.cpu(), var.cpu()) for number, mean, var in own] for index, own in self._found.items()
        }
        everyone = comm.all_gather_object(sent) if comm.size > 1 else [sent]
        found: dict[int, list[Own]] = {index: own for each in everyone for index, own in each.items()}
        means = [saved.mean.double().cpu() for saved in self._saved]
        variances = [saved.variance.double().cpu() for saved in self._saved]
        for index in sorted(found):
            for number, mean, variance in found[index]:
                saved = self._saved[number]
                if saved.tracked is not None:
                    saved.tracked.add_(1)
                share = saved.momentum if saved.momentum is not None else 1.0 / float(saved.tracked or 1)
                means[number] = (1.0 - share) * means[number] + share * mean.double()
                variances[number] = (1.0 - share) * variances[number] + share * variance.double()
        for saved, mean, variance in zip(self._saved, means, variances):
            saved.mean.copy_(mean)
            saved.variance.copy_(variance)


def batch_norms(models: Sequence[nn.Module]) -> list[_BatchNorm]:
    """Return the batch norms with running statistics, each once."""
    found = (module for model in models for module in model.modules())
    return list(dict.fromkeys(one for one in found if isinstance(one, _BatchNorm) and one.running_mean is not None))


def _saved(module: _BatchNorm) -> _Saved:
    assert module.running_mean is not None and module.running_var is not None
    tracked = module.num_batches_tracked
    return _Saved(
        module,
        module.momentum,
        module.running_mean.clone(),
        module.running_var.clone(),
        None if tracked is None else tracked.clone(),
    )


@torch.no_grad()
def _restore(saved: _Saved) -> None:
    """Set the statistics that are saved, and remove the hooks."""
    module = saved.module
    for handle in saved.handles:
        handle.remove()
    module.momentum = saved.momentum
    assert module.running_mean is not None and module.running_var is not None
    module.running_mean.copy_(saved.mean)
    module.running_var.copy_(saved.variance)
    if saved.tracked is not None and module.num_batches_tracked is not None:
        module.num_batches_tracked.copy_(saved.tracked)


@_disable_dynamo
def _reset(module: _BatchNorm, args: Any) -> None:
    """Set the running statistics to zero before a forward pass in training."""
    if module.training:
        with torch.no_grad():
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.zero_()
            module.running_var.zero_()


# Other buffers --------------------------------------------------------------------------------------------------------


def other_buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return, by name, the floating-point buffers that do not belong to batch norms."""
    norms = {id(buffer) for norm in batch_norms(models) for buffer in norm.buffers()}
    return {
        name: buffer
        for model in models
        for name, buffer in model.named_buffers()
        if id(buffer) not in norms and buffer.is_floating_point()
    }


def check_unchanged(before: Mapping[str, Tensor], models: Sequence[nn.Module]) -> None:
    """Raise ``UsageError`` if forward passes have changed a buffer; ``before`` are copies of ``other_buffers``."""
    after = other_buffers(models)
    for name, tensor in before.items():
        if name in after and not torch.equal(after[name], tensor):
            raise UsageError(
                f"the buffer {name} under parallel.reproducible = true: a forward pass has changed it, so it depends "
                "on how many microbatches this rank computes; allowed are buffers that stay constant and batch norms; "
                "remove the module (spectral norm, moving average), or update it outside of run.backward"
            )
