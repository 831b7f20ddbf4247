"""Sharded data parallelism: optimizer states, gradients and parameters are divided over the ranks (ZeRO 1, 2, 3).

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020, and Zhao et al., "PyTorch FSDP", VLDB 2023. The notes of the other modules describe the
details: how parameters are divided into shards (``sharding``, ``param_group``), when they are
unsharded and how gradients are reduced (``collectives``, ``unshard``). This module connects these
parts to the model and its optimizer by hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.utils import get_total_norm
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.clip import clip_shards, global_norm
from hpctrain.parallel.compiled import ModuleHook
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.setup import Parts, shard_model
from hpctrain.parallel.fsdp.sharding import FlatSplit, ShardGradients
from hpctrain.parallel.guard.gradient_hooks import GradientHooks
from hpctrain.parallel.hooks import (
    AddedParameters,
    OptimizerHooks,
    StepHooks,
    after_gradient,
    around_forward,
    before_backward,
    cast,
    differentiable,
)
from hpctrain.parallel.strategy import SplitStrategy, broadcast_buffers
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm
from hpctrain.parallel.whole_updates import WholeUpdates
from hpctrain.plain_tensors import on_shards, plain_tensors

if TYPE_CHECKING:
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer


class ShardedDataParallel(SplitStrategy):
    """Strategy that applies ZeRO 1, 2 or 3 (``settings.data``) to a module, in place: its parameters become shards.

    If ``make_host_optimizer`` is given, its result stores this rank's shards in host memory and updates them there.
    ``hooks_refused`` states why the program may not register hooks on parameters; it is empty if it may.

    Create the optimizer afterwards. The constructor is collective. The parameters take the values
    of rank 0. Raises ``MismatchError`` if the ranks' models differ, ``UsageError`` for units that
    are not possible (see ``units``).
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: ParallelSettings = ParallelSettings(data="fsdp"),
        device: torch.device = torch.device("cpu"),
        make_host_optimizer: Callable[[Communicator], HostOptimizer] | None = None,
        parts: Parts = Parts(),
        hooks_refused: str = "",
    ) -> None:
        super().__init__(model, comm)
        self.settings, self.reduces_early = settings, settings.reduces_early
        before = {name: (p._backward_hooks, p._post_accumulate_grad_hooks) for name, p in model.named_parameters()}
        self.components = shard_model(model, comm, settings, device, make_host_optimizer, parts)
        self.early_updates = self._host_optimizer = self.components.host_optimizer
        self._plan, self.copies = self.components.plan, self.components.plan.replicas
        self.continues = self._host_optimizer is None and self.copies is None
        self._residency, self._grad_reduction = self.components.residency, self.components.reduction
        members = self.components.members
        self.gradients = ShardGradients(model, members, self._host_optimizer)
        self._shards = [member.shard for member in members]
        self._in_backward = False  # between the beginning of a backward pass and its end
        self._is_unsharded = False
        self._written = False  # whether the program itself has changed shards since the last pass
        self.writes = self.refills = 0  # changes of parameters other than by the optimizer, or by a pass
        self._optimizer_hooks = OptimizerHooks(
            self._shards,
            self.components.replaced,
            settings.elementwise,
            self._before_update,
            self._after_update,
            settings.whole_parameters,
        )
        self._whole_updates = WholeUpdates(self.components.groups, self._plan.comm, self._optimizer_hooks.updates_whole)
        self._split = FlatSplit(self.components.by_name, self._whole_updates)
        self._gradient_hooks = GradientHooks({member.name: member.shard for member in members}, hooks_refused)
        for member in members:
            self._gradient_hooks.take_over(member.name, *before[member.name])
        self._added_parameters = AddedParameters(
            model, [*model.parameters(), *(member.unsharded for member in members)]
        )
        self._handles: list[RemovableHandle | StepHooks] = [
            *self._register_hooks(),
            *self._residency.register_hooks(self._begin_backward),
            self._optimizer_hooks.attach(),
            StepHooks(self, lambda strategy, optimizer: strategy._added_parameters.check(optimizer)),
        ]

    def set_sample_weight(self, weight: float) -> None:
        super().set_sample_weight(weight)
        self._grad_reduction.scale = self._sample_weight / self.comm.size

    @on_shards
    def join_empty(self, *, backward: bool = True) -> None:
        """Take part in a forward (and ``backward``) pass of the other ranks without a sample.

        Raises ``UsageError`` if the collectives of the pass are unknown: before the first step of
        units that are gathered on demand.
        """
        if backward and any(isinstance(module, SyncBatchNorm) for module in self.model.modules()):
            raise UsageError(
                f"rank {self.comm.rank} has no sample in this step, but synchronised batch norm needs some of every "
                "rank: make the batch larger, or drop the last one"
            )
        self._apply_writes()
        if backward:
            self._begin_training_pass()
        self._residency.join_pass(backward=backward)
        if backward:
            self._finish_reduction()

    @contextmanager
    def deferred_reduction(self, *, reduces: bool = True) -> Iterator[None]:
        """Unshard all parameters for the ``with`` block, as in ZeRO 2; gradients stay unsharded until its end."""
        if reduces:
            self._begin_training_pass()
        self._unshard_all()
        try:
            with self.no_sync():
                yield
        finally:
            self._reshard_all()
        if reduces:
            self._finish_reduction()
        elif any(True for _ in self.gradients.local()):
            self.gradients.local_weight = self._sample_weight

    @on_shards
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        if self._host_optimizer is None:
            return clip_shards(self._shards, self._plan.comm, max_norm)
        # If nothing would be sharded without offload, the norm is that of unsharded gradients.
        plain = self.comm.size == 1 and self._plan.compute_dtype is None
        comm = self._plan.comm
        norm_of = get_total_norm if plain else lambda held: global_norm(held, comm, torch.device("cpu"))
        return self._host_optimizer.clip(self._shards, max_norm, norm_of)

    @on_shards
    def rejoin(self) -> None:
        """Continue with the ranks that the communicator now has; the values of the shards are undefined. Collective."""
        self._in_backward = self._is_unsharded = self._written = False
        self.gradients.drop()
        self.components.rejoin()
        self._grad_reduction.scale = self._sample_weight / self.comm.size

    def detach(self) -> None:
        """Remove all hooks from the module; its parameters stay shards."""
        if self._host_optimizer is not None:
            self._host_optimizer.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._gradient_hooks.close()

    # How the model is sharded -----------------------------------------------------------------------------------------

    @property
    def split(self) -> FlatSplit:
        """Return the boxes of the parameters that this rank holds; complete an overlapped update first."""
        self.drain()
        return self._split

    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        member = self.components.by_name.get(name)
        return None if member is None else tuple(member.shape)

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Unshard the parameters of the model for the ``with`` block, for inspection. Collective.

        They take the memory of the whole model. Change them only with ``write``: then the values
        that rank 0 has written are used. Backward passes are not allowed inside the block.
        """
        if write and self.settings.mixed_precision != "none":
            raise UsageError(
                "unshard(write=True) would round the parameters to bfloat16 (parallel.mixed_precision): "
                "write into a checkpoint and load that",
                everywhere=True,
            )
        self.drain()
        self._unshard_all()
        try:
            if write and self.comm.rank:
                for member in self.components.members:  # writes of other ranks must not change shared memory
                    member.register(
                        nn.Parameter(member.unsharded.detach().clone(), requires_grad=member.unsharded.requires_grad)
                    )
            if write:
                self._residency.wait_for_readers()  # another rank may still read them
            yield
            if write:
                with plain_tensors():
                    for group in self.components.groups:
                        value = (lambda member: member.unsharded.detach()) if self.comm.rank == 0 else None
                        group.fill(value, self.copies)
                self.refresh()
        finally:
            self._reshard_all()

    @on_shards
    def _unshard_all(self) -> None:
        self._apply_writes()
        self._residency.unshard()
        self._is_unsharded = True

    @on_shards
    def _reshard_all(self) -> None:
        self._is_unsharded = False
        self._residency.reshard()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._optimizer_hooks.check(optimizer):
            raise UsageError(
                "the optimizer holds no parameter of the model: make it from model.parameters() after job.wrap(model)",
                everywhere=True,
            )
        self._updates_whole(optimizer)

    def _updates_whole(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer needs whole parameters; raise ``UsageError`` if the host makes the updates."""
        found = self._optimizer_hooks.updates_whole(optimizer)
        if found and self._host_optimizer is not None:
            raise UsageError(
                f"optimizer {type(optimizer).__name__} with offloaded updates: it needs whole parameters, which the "
                "host updates slice by slice; allowed are optimizers that update each element by itself; remove the "
                "settings [offload], or choose AdamW",
                everywhere=True,
            )
        return found

    @on_shards
    def refresh(self) -> None:
        """Mark the parameters as changed by something other than the optimizer. Collective."""
        self.refills += 1
        self._mark_changed()

    def _mark_changed(self) -> None:
        if self._host_optimizer is not None:
            self._host_optimizer.refresh()
        self._residency.mark_stale(frozen=True)

    @on_shards
    def drain(self) -> None:
        """Complete an update that overlaps with the steps, and mark the parameters as changed. Collective."""
        if self._host_optimizer is not None and self._host_optimizer.drain():
            self._residency.mark_stale()

    def before_write(self) -> None:
        """Wait until no rank computes with the shards; the next pass brings unsharded parameters up to date."""
        self.writes += 1
        if not self._written:
            self._written = True
            self._residency.wait_for_readers()

    def _apply_writes(self) -> None:
        if self._written:
            self._written = False
            self._mark_changed()

    def gradients_final(self) -> None:
        if self._host_optimizer is not None:
            self._host_optimizer.gradients.apply_scale()

    def norm_groups(self) -> list[Communicator]:
        return [self._plan.comm]

    def partial_parameters(self) -> tuple[str, dict[str, nn.Parameter], bool]:
        shards = {member.name: member.shard for member in self.components.members}
        return "this rank's shard of parameter", shards if self._plan.comm.size > 1 else {}, False

    # Updates ----------------------------------------------------------------------------------------------------------

    @on_shards
    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._whole_updates.updating:
            return  # a part of the update in progress
        updates_whole = self._updates_whole(optimizer)
        self._residency.wait_for_readers()
        if updates_whole:
            self._whole_updates.begin(optimizer)
        elif self._host_optimizer is not None:
            self._host_optimizer.before(optimizer)

    @on_shards
    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._whole_updates.updating:
            return
        self._whole_updates.end()
        if self._host_optimizer is not None:
            self._host_optimizer.after(optimizer)
        self._residency.mark_stale()

    # Passes -----------------------------------------------------------------------------------------------------------

    def _register_hooks(self) -> list[RemovableHandle]:
        handles = around_forward(self.model, self._before_forward, self._after_forward)
        if (dtype := self._plan.compute_dtype) is not None:
            to_dtype = ModuleHook(lambda module, args, kwargs: cast((args, kwargs), dtype))
            handles += [
                module.register_forward_pre_hook(to_dtype, with_kwargs=True) for module in self.components.units
            ]
        for index, reduction in enumerate(self._grad_reduction.reductions):
            for number, member in enumerate(reduction.group.members):
                handles.append(after_gradient(member.unsharded, self._after_gradient, index, number))
        return handles

    @on_shards
    def _before_forward(self, args: Any, kwargs: Any) -> None:
        if self._is_unsharded or self._in_backward:
            return
        self._whole_updates.undo_failed()
        self._apply_writes()
        if self.model.training and torch.is_grad_enabled():
            self._begin_training_pass()
        self._residency.begin_forward(records=torch.is_grad_enabled())

    def _begin_training_pass(self) -> None:
        if self.gradients.local_weight is not None:
            self.gradients.check_weight(self._sample_weight)
        if self._syncing and self.settings.broadcast_buffers and any(True for _ in self.model.buffers()):
            broadcast_buffers(self.model, self.comm)

    @on_shards
    def _after_forward(self, args: Any, kwargs: Any, result: Any) -> None:
        if self._is_unsharded or self._in_backward:
            return
        needs_backward = torch.is_grad_enabled() and bool(differentiable(result))
        if needs_backward:
            before_backward(result, self._begin_backward)
        self._residency.end_forward(needs_backward=needs_backward)

    @on_shards
    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        if self._host_optimizer is not None and self._host_optimizer.share_finder is not None:
            self._host_optimizer.share_finder.begin()
        Variable._execution_engine.queue_callback(self._end_backward)
        self._residency.begin_backward(reduces=self._syncing)

    @on_shards
    def _after_gradient(self, index: int, number: int, _: Tensor) -> None:
        if self._is_unsharded:
            return
        reduction = self._grad_reduction.reductions[index]
        self._begin_backward()
        if self._syncing:
            self._grad_reduction.add_gradient(reduction, number)
        else:
            self._gradient_hooks.check_reduced(reduction.group.members[number].name)
            self.gradients.local_weight = self._sample_weight

    @on_shards
    def _end_backward(self) -> None:
        self._in_backward = False
        self._residency.end_backward()
        if self._syncing:
            self._finish_reduction()
            self._residency.agree_on_order(self.comm)
        if self._host_optimizer is not None and self._host_optimizer.share_finder is not None:
            self._host_optimizer.share_finder.end()

    @on_shards
    def _finish_reduction(self) -> None:
        """Reduce the remaining gradients; afterwards this rank has no unreduced gradient."""
        hooked = bool(self._gradient_hooks.hooked)
        if hooked:
            self._gradient_hooks.check(lambda found: any(self.comm.all_gather_object(found)))
        self._grad_reduction.finish()
        self.gradients.local_weight = None
        if hooked:
            self._gradient_hooks.call(self._grad_reduction.received().__contains__)
