"""ZeRO 1, 2 and 3 whose results do not depend on the number of ranks (see ``ddp``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.reproducible.gradients import (
    HOOKS_REFUSED,
    ReproducibleStrategy,
    Sums,
    plain_backward,
    reduce_shards,
)
from hpctrain.parallel.reproducible.norm import clip_exactly, exact_norm
from hpctrain.parallel.reproducible.tree_reduce import TreeReduce
from hpctrain.plain_tensors import on_shards

if TYPE_CHECKING:
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer


class ReproducibleSharded(ShardedDataParallel, ReproducibleStrategy):
    """ZeRO 1, 2 or 3 of a module in place; parameters are unsharded during all passes of a step."""

    reproducible = True

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: ParallelSettings,
        device: torch.device,
        make_host_optimizer: Callable[[Communicator], HostOptimizer] | None = None,
    ) -> None:
        super().__init__(model, comm, settings, device, make_host_optimizer, hooks_refused=HOOKS_REFUSED)
        self._inside = False

    def join_empty(self, *, backward: bool = True) -> None:
        if not self._inside:
            super().join_empty(backward=backward)

    def rejoin(self) -> None:
        super().rejoin()
        self._inside = False

    @contextmanager
    def local_passes(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with self.deferred_reduction(reduces=False):
                yield
        finally:
            self._inside = False

    def computed_with(self) -> Iterable[tuple[str, nn.Parameter]]:
        return [(member.name, member.unsharded) for member in self.components.members]

    @on_shards
    def reduce_sums(self, sums: Sums, reduction: TreeReduce, microbatches: int) -> None:
        reduce_shards(self.components.reduction.reductions, sums, reduction, microbatches)

    @on_shards
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        if self._host_optimizer is not None:
            return self._host_optimizer.clip(
                self._shards, max_norm, lambda held: exact_norm(held, self.comm, torch.device("cpu"))
            )
        gradients = [shard.grad for shard in self._shards if shard.grad is not None and shard.numel()]
        norm = exact_norm(gradients, self.comm, self._shards[0].device)
        clip_exactly(gradients, norm, max_norm)
        return norm

    def _after_gradient(self, index: int, number: int, parameter: Tensor) -> None:
        if not self._inside:
            raise plain_backward()
