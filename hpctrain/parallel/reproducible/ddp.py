"""Data parallelism whose results do not depend on the number of ranks.

A step has a fixed number of microbatches. Every rank computes some of them, and their gradients are
added along a fixed tree (``tree``). All passes of a step are local, and all gradients are reduced at
its end: the order in which they become available depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.guard.gradient_hooks import GradientHooks
from hpctrain.parallel.hooks import AddedParameters, StepHooks, after_gradient
from hpctrain.parallel.model_agreement import broadcast_model, check_same_model, trainable
from hpctrain.parallel.reproducible.gradients import (
    HOOKS_REFUSED,
    ReproducibleStrategy,
    Sums,
    plain_backward,
    reduce_whole,
)
from hpctrain.parallel.reproducible.norm import clip_exactly, exact_norm, share_of
from hpctrain.parallel.reproducible.tree_reduce import TreeReduce
from hpctrain.parallel.strategy import SyncStrategy


class ReproducibleDataParallel(SyncStrategy, ReproducibleStrategy):
    """Data parallelism of a module in place: same parameters on all ranks. The constructor is collective."""

    continues = True

    def __init__(self, model: nn.Module, comm: Communicator, settings: ParallelSettings) -> None:
        super().__init__(model, comm)
        self.settings, self.copies = settings, comm
        check_same_model(model, comm)
        broadcast_model(model, comm)
        named = trainable(model)
        if not named:
            raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
        self._inside = False
        self._added_parameters = AddedParameters(model, model.parameters())
        self._gradient_hooks = GradientHooks(dict(named), HOOKS_REFUSED)
        for name, parameter in named:
            self._gradient_hooks.take_over(name, parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        self._handles: list[RemovableHandle | StepHooks] = [
            *(after_gradient(parameter, self._after_gradient) for _, parameter in named),
            StepHooks(self, lambda strategy, optimizer: strategy._added_parameters.check(optimizer)),
        ]

    def join_empty(self, *, backward: bool = True) -> None:
        """Do nothing: passes are local."""

    @contextmanager
    def local_passes(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            with self.no_sync():
                yield
        finally:
            self._inside = before

    def computed_with(self) -> Iterable[tuple[str, nn.Parameter]]:
        return trainable(self.model)

    def reduce_sums(self, sums: Sums, reduction: TreeReduce, microbatches: int) -> None:
        reduce_whole(trainable(self.model), sums, reduction, microbatches)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        gradients = [gradient for _, gradient in self.gradients.averaged()]
        device = gradients[0].device if gradients else torch.device("cpu")
        norm = exact_norm(share_of(gradients, self.comm.rank, self.comm.size), self.comm, device)
        clip_exactly(gradients, norm, max_norm)
        return norm

    def rejoin(self) -> None:
        self.gradients.drop()  # all else is made anew for each step

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._gradient_hooks.close()

    def _after_gradient(self, _: Tensor) -> None:
        if not self._inside:
            raise plain_backward()
