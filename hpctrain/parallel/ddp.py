"""Data parallelism with a replicated model (DDP): gradients are averaged while the backward pass runs.

After Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020: buckets in reverse order of the parameters, reduced from autograd hooks, and rebuilt once in
the observed order of the gradients.

Note: gradients are stored in buckets, and buckets in node-shared memory. When autograd has produced
a gradient, the hook writes it to its place in the bucket while it is in cache, divided by the
number of ranks in the same pass. The hook then makes that place the parameter's ``grad``. The
gradient is reduced in place (see the note in ``comm.shm.in_place``), and the optimizer reads
it there without a copy.

All ranks start the buckets in the same order, whatever the order of their gradients. No rank waits
before the end of the backward pass: a rank that is ahead continues to compute. If ranks share no
memory, a reduction cannot remain in progress. In this case all reductions run at the end, so that
they never interleave with the collectives of the model's own backward pass.

A bucket of another dtype (compression) or device (a GPU without a device transport) is a copy of
the gradients, so the result is copied back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Work
from hpctrain.errors import UsageError
from hpctrain.parallel.buckets import GradBucket, assign_buckets, make_buckets, memory_needed
from hpctrain.parallel.compiled import ModuleHook
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.guard.gradient_hooks import GradientHooks
from hpctrain.parallel.hooks import AddedParameters, StepHooks, after_gradient, parameters_of
from hpctrain.parallel.model_agreement import broadcast_model, check_same_model, trainable
from hpctrain.parallel.strategy import SyncStrategy, broadcast_buffers
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm

FIRST_BUCKET = 2**20  # bytes


class DataParallel(SyncStrategy):
    """Data parallelism of a module: same parameters on all ranks, gradients averaged over them.

    Raises ``MismatchError`` if the ranks' models differ. With one rank no hooks are registered.
    """

    adopts_frozen = True
    continues = True

    def __init__(self, model: nn.Module, comm: Communicator, settings: ParallelSettings = ParallelSettings()) -> None:
        super().__init__(model, comm)
        self.settings, self.copies = settings, comm
        check_same_model(model, comm)
        broadcast_model(model, comm)
        named = trainable(model)
        if not named:
            raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
        self._handles: list[StepHooks] = []
        self._parameter_handles: list[RemovableHandle] = []  # for buckets that are rebuilt if parameters are added
        self._running = False  # between the first gradient and the end of a backward pass
        self._works: list[Work] = []
        self._buckets: list[GradBucket] = []
        self._reductions = 0
        self._used: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._averaged: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # with averaged closure losses
        self._gradient_hooks = GradientHooks({})
        self._added_parameters = AddedParameters(model, model.parameters())
        if comm.size > 1:
            self._set_parameters(named)
            self._handles.append(StepHooks(self, DataParallel._before_update))

    @property
    def _scale(self) -> float:
        """Return this rank's share of the average; it scales each gradient on copy, so no extra pass divides them."""
        return self._sample_weight / self.comm.size

    def join_empty(self, *, backward: bool = True) -> None:
        if not self._buckets or not backward:
            return
        if any(isinstance(module, SyncBatchNorm) for module in self.model.modules()):
            raise UsageError(
                f"rank {self.comm.rank} has no sample in this step, but synchronised batch norm needs some of every "
                "rank: make the batch larger, or drop the last one"
            )
        self._before_forward()
        self._finish()

    @contextmanager
    def deferred_reduction(self, *, reduces: bool = True) -> Iterator[None]:
        if reduces and self._buckets:
            self._before_forward()
        with self.no_sync():
            yield
        if reduces and self._buckets:
            self._finish()

    def rejoin(self) -> None:
        self._works.clear()
        self._running = False
        self.gradients.drop()
        if self.comm.size > 1:
            self._set_parameters(trainable(self.model))
        else:
            self.detach()

    def detach(self) -> None:
        """Remove all hooks from the module; its gradients stay in the communicator's memory."""
        for handle in self._parameter_handles:
            handle.remove()
        for hooks in self._handles:
            hooks.remove()
        self._handles.clear()
        self._parameter_handles.clear()
        self._buckets.clear()
        self._gradient_hooks.close()

    def average_gradients(self) -> None:
        if self._buckets:
            self._finish()

    # Construction -----------------------------------------------------------------------------------------------------

    def _set_parameters(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Reduce the gradients of these parameters from now on. Collective."""
        for handle in self._parameter_handles:
            handle.remove()
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        self._move_gradients()  # their memory is released
        self._gradient_hooks.close()
        self._gradient_hooks = GradientHooks(dict(named))
        for name, parameter in named:
            self._gradient_hooks.take_over(name, parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        self._memory = self._allocate()
        self._rebuilt = False
        self._observed: list[int] = []
        self._build(list(reversed(range(len(named)))))
        self._parameter_handles = [
            after_gradient(parameter, self._after_gradient, number) for number, parameter in enumerate(self._parameters)
        ]
        before = ModuleHook(lambda module, args: self._before_forward())
        self._parameter_handles.append(self.model.register_forward_pre_hook(before))

    def _has_changed(self) -> bool:
        """Return whether parameters were unfrozen or converted after the model was wrapped."""
        return any(parameter.requires_grad for parameter in self._frozen) or any(
            parameter.dtype is not dtype for parameter, dtype in zip(self._parameters, self._dtypes)
        )

    def _move_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _allocate(self) -> dict[torch.dtype, Tensor]:
        """Return one memory block per dtype of the reduction."""
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            kinds.setdefault(self._reduce_dtype(parameter), []).append(parameter)
        return {dtype: self.comm.empty(memory_needed(held, dtype), dtype) for dtype, held in kinds.items()}

    def _reduce_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        compressed = self.settings.compression == "bfloat16" and parameter.dtype is torch.float32
        return torch.bfloat16 if compressed else parameter.dtype

    def _build(self, order: list[int]) -> None:
        """Cut the memory into buckets with their members in the given order."""
        limit = int(self.settings.bucket_mib * 2**20)
        sizes = [parameter.numel() * self._reduce_dtype(parameter).itemsize for parameter in self._parameters]
        buckets: list[GradBucket] = []
        for dtype, memory in self._memory.items():
            members = [number for number in order if self._reduce_dtype(self._parameters[number]) is dtype]
            groups = assign_buckets(sizes, members, min(FIRST_BUCKET, limit), limit)
            buckets += make_buckets(memory, self._parameters, groups)
        position = {number: rank for rank, number in enumerate(order)}
        # A bucket can start when its last gradient is available.
        self._buckets = sorted(buckets, key=lambda bucket: max(position[member] for member in bucket.members))
        self._bucket_of = {
            member: (bucket, index) for bucket in self._buckets for index, member in enumerate(bucket.members)
        }
        self._next = 0

    def _rebuild(self) -> None:
        """Rebuild once, in the order of gradients that rank 0 observed in the first backward pass."""
        self._move_gradients()  # their places are reassigned
        order = self.comm.broadcast_object(self._observed)
        unseen = [number for number in reversed(range(len(self._parameters))) if number not in set(order)]
        self._rebuilt = True
        self._observed = []
        self._build(order + unseen)

    # Hooks ------------------------------------------------------------------------------------------------------------

    def _before_forward(self) -> None:
        if torch.is_grad_enabled() and self._has_changed():
            self._set_parameters(trainable(self.model))
        if not (self.model.training and torch.is_grad_enabled()):
            return
        self.gradients.check_weight(self._sample_weight)
        if self._syncing and self.settings.broadcast_buffers:
            broadcast_buffers(self.model, self.comm)

    def _after_gradient(self, number: int, parameter: Tensor) -> None:
        if self._syncing:
            self._add_gradient(number, parameter)
        else:
            self._gradient_hooks.check_reduced(self._names[number])
            self.gradients.local_weight = self._sample_weight

    def _add_gradient(self, number: int, parameter: Tensor) -> None:
        """Copy one gradient into its bucket; start the buckets that are full."""
        if not self._running:
            self._running = True
            Variable._execution_engine.queue_callback(self._finish)
        bucket, index = self._bucket_of[number]
        if number not in bucket.missing:
            raise UsageError(
                f"parameter {self._names[number]} got its gradient twice in one backward pass: "
                "use non-reentrant activation checkpointing (use_reentrant=False)"
            )
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UsageError(f"parameter {self._names[number]} got a sparse gradient: only dense ones can be reduced")
        bucket.copy_in(index, gradient, self._scale)
        if self._is_bucket_view(parameter, bucket.views[index]):
            parameter.grad = bucket.views[index]
        bucket.missing.discard(number)
        if not self._rebuilt:
            self._observed.append(number)
        if not bucket.missing and self.comm.shares_memory:
            self._start_full_buckets()

    @staticmethod
    def _is_bucket_view(parameter: Tensor, view: Tensor) -> bool:
        return parameter.dtype is view.dtype and parameter.device == view.device

    def _start_full_buckets(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            work = self.comm.all_reduce(bucket.flat, "sum", async_op=True)
            assert not isinstance(work, Tensor)
            self._works.append(work)
            self._next += 1
        if self._works:
            self._works[-1].done()  # progresses all reductions for which the other ranks are ready

    def _finish(self) -> None:
        """Reduce the remaining buckets at the end of the backward pass, and wait for all of them."""
        unused: set[int] = set()
        hooked = bool(self._gradient_hooks.hooked)
        received: set[int] = set()
        if hooked:
            received = {member for bucket in self._buckets for member in set(bucket.members) - bucket.missing}
        gradients = [parameter.grad for parameter in self._parameters]
        for bucket in self._buckets:
            unused |= bucket.fill_missing(gradients, self._scale)
        self._start_full_buckets()
        for work in self._works:
            work.wait()
        for bucket in self._buckets:
            self._assign_gradients(bucket, unused)
            received |= {each for each, flag in zip(bucket.members, bucket.flags) if hooked and each in unused and flag}
            bucket.reset()
        self._works.clear()
        self._next = 0
        self._running = False
        self.gradients.local_weight = None
        self._reductions += 1
        if not self._rebuilt:
            self._rebuild()
        if hooked:
            self._gradient_hooks.call(lambda name: self._names.index(name) in received)

    # Updates ----------------------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` for gradients that no backward pass has produced, and for parameters added later."""
        self._added_parameters.check(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS) and optimizer not in self._averaged and self._held_by(optimizer):
            self._averaged.add(optimizer)
            # This hook itself runs as a global optimizer hook. Hooks of an instance run later,
            # hence also before this update.
            optimizer.register_step_pre_hook(self._average_closure)
        if self._used.get(optimizer, 0) != self._reductions:
            self._used[optimizer] = self._reductions
            return
        if self.comm.failed:  # within the backward pass: the step is repeated
            return
        for number in self._held_by(optimizer):
            gradient = self._parameters[number].grad
            if gradient is not None and not self._is_reduced(number, gradient):
                raise UsageError(
                    f"update of {self._names[number]} with a gradient that is this rank's own: it was set without a "
                    "backward pass, as by torch.autograd.grad; call loss.backward(), or call "
                    "job.average_gradients(model) on all ranks when the gradients are set",
                    everywhere=True,
                )

    def _held_by(self, optimizer: torch.optim.Optimizer) -> list[int]:
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        return [numbers[id(each)] for each in parameters_of(optimizer) if id(each) in numbers]

    def _average_closure(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make a closure return the loss of all ranks, so that LBFGS selects the same steps on all ranks."""
        given = [one for one in (*args[1:], kwargs.get("closure")) if callable(one)]
        if len(given) != 1 or not self._buckets:
            return None

        def averaged() -> float:
            found = given[0]()
            found = float(found.detach() if isinstance(found, Tensor) else found)
            loss = torch.tensor(found * self._scale, dtype=torch.float64)
            self.comm.all_reduce(loss)
            return float(loss)

        return (args[0],), {"closure": averaged}

    def _is_reduced(self, number: int, gradient: Tensor) -> bool:
        """Return whether a gradient was written by a reduction: it is in a bucket unless buckets are copies."""
        if not self._reductions:
            return False
        bucket, index = self._bucket_of[number]
        view = bucket.views[index]
        copied = self._reductions == 1 or not self._is_bucket_view(self._parameters[number], view)
        return copied or gradient.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()

    def _assign_gradients(self, bucket: GradBucket, unused: set[int]) -> None:
        """Assign the reduced gradients that are not in place yet."""
        for index, (member, view) in enumerate(zip(bucket.members, bucket.views)):
            parameter = self._parameters[member]
            # No rank used it: its gradient stays unchanged, as in a plain backward pass.
            if member in unused and bucket.flags[index] == 0:
                continue
            if self._is_bucket_view(parameter, view):
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.device, parameter.dtype)
            else:
                parameter.grad.copy_(view)
