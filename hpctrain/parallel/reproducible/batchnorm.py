"""Running statistics of batch norms that depend on the microbatches of a step alone.

In one process, every forward pass in training mode updates the running statistics with those of its
microbatch. Here, a rank computes some of the microbatches. Their statistics are recorded, and at the
end of the step all ranks apply the updates of all microbatches in order.

Note: recording. Before each forward pass of a batch norm, a hook replaces its buffers by new ones
of zeros, and its momentum by 1. The kernel then leaves exactly the statistics of the microbatch:
1 x statistic + 0 x 0. Afterwards the hook restores both. The buffers are replaced and not set to
zero, because autograd refuses a backward pass after such a change.

Note: recomputation. A forward pass during a backward pass repeats an earlier one (activation
checkpointing). It counts once.

Note: arithmetic. The CPU kernel of torch rounds the momentum m to the dtype P of the buffers. The
new mean is m x + (1 - m) y in P. The new variance adds m x in the accumulation type (float64 for
float32, float32 for 16-bit floats) to (1 - m) y in P. For an input that is neither contiguous nor
in channels_last, all of it is in float64. ``_updated`` repeats this bit for bit, with two exceptions,
whose last bits may differ from torch's. For such an input, the kernel does not round the variance
to P before it is added, but the recorded one is rounded. And buffers in float16 are rounded less
often by the kernel. In no case do the statistics depend on the number of ranks. This also holds on
a GPU, whose kernels may round otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.compiled import ModuleHook
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of dims


class _NormUpdate(NamedTuple):
    """Statistics of one forward pass of a batch norm, as the kernel computed them."""

    number: int  # of the batch norm
    statistics: Tensor  # mean and unbiased variance, one after the other
    wide: torch.dtype  # accumulation type of the kernel
    in_order: bool  # whether the input was contiguous or in channels_last


class _Recorder:
    """Hooks of one batch norm; if ``active``, its forward passes are kept from the running statistics.

    ``updates`` is the list to append to, None outside of a recording.
    """

    def __init__(self, number: int, module: _BatchNorm) -> None:
        self._number, self.module = number, module
        self.active = False
        self.updates: list[_NormUpdate] | None = None
        self._replaced: tuple[float | None, dict[str, Tensor | None]] | None = None
        self.handles = [
            module.register_forward_pre_hook(ModuleHook(lambda *_: self._before())),
            module.register_forward_hook(
                ModuleHook(lambda _, args, kwargs, result: self._after(args, kwargs, result)),
                with_kwargs=True,
                always_call=True,  # also if a recomputation ends early, which torch does by an exception
            ),
        ]

    def _before(self) -> None:
        module = self.module
        if not (self.active and module.training and module.track_running_stats):
            return
        self.restore()
        held = {name: module._buffers[name] for name in BUFFERS}
        self._replaced = module.momentum, held
        for name, buffer in held.items():
            module._buffers[name] = None if buffer is None else torch.zeros_like(buffer)
        module.momentum = 1.0

    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        if self._replaced is None:
            return
        mean, variance = self.module.running_mean, self.module.running_var
        self.restore()
        if result is not None and self.updates is not None and not _in_backward():
            assert mean is not None and variance is not None
            given: Tensor = args[0] if args else kwargs["input"]
            wide = torch.float64 if given.dtype in (torch.float32, torch.float64) else torch.float32
            self.updates.append(_NormUpdate(self._number, torch.cat([mean, variance]), wide, _in_order(given)))

    def restore(self) -> None:
        """Restore momentum and buffers if they are replaced."""
        if self._replaced is not None:
            self.module.momentum, buffers = self._replaced
            self.module._buffers.update(buffers)
            self._replaced = None


def _in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def _in_order(given: Tensor) -> bool:
    """Return whether torch's CPU kernel reads an input in the order of memory."""
    other = MEMORY_FORMATS.get(given.dim())
    return given.is_contiguous() or (other is not None and given.is_contiguous(memory_format=other))


class MicrobatchStatistics:
    """Statistics of all batch norms of some models in the microbatches of a step.

    Without batch norms, all methods do nothing. The hooks are removed with this object.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._recorders = [_Recorder(number, module) for number, module in enumerate(batch_norms(models))]
        self._found: dict[int, list[_NormUpdate]] = {}
        handles = [handle for recorder in self._recorders for handle in recorder.handles]
        self._finalizer = weakref.finalize(self, _remove, handles)

    @contextmanager
    def step(self, comm: Communicator | None) -> Iterator[None]:
        """Keep forward passes from the running statistics; set these at the end of the ``with`` block. Collective.

        Microbatches are recorded inside the block, their backward passes run there, with or without
        ``recording``. After an exception, the statistics are those before the block.
        """
        self._found.clear()
        with self._active():
            yield
        self.finish(None, comm)

    @contextmanager
    def recording(self, index: int) -> Iterator[None]:
        """Record the forward passes of a microbatch; outside of ``step`` the block includes the backward pass.

        An exception drops all that was recorded since the last ``finish``.
        """
        updates = self._found[index] = []
        for recorder in self._recorders:
            recorder.updates = updates
        try:
            with self._active():
                yield
        finally:
            for recorder in self._recorders:
                recorder.updates = None

    @contextmanager
    def _active(self) -> Iterator[None]:
        before = [recorder.active for recorder in self._recorders]
        for recorder in self._recorders:
            recorder.active = True
        try:
            yield
        except BaseException:
            self._found.clear()
            raise
        finally:
            for recorder, active in zip(self._recorders, before):
                recorder.active = active
                recorder.restore()

    @torch.no_grad()
    def finish(self, count: int | None, comm: Communicator | None) -> None:
        """Set the statistics after all microbatches, each of which one rank has recorded. Collective.

        ``count`` is their number, if the caller knows it.
        """
        own, self._found = self._found, {}
        if not self._recorders:
            return
        sent = [_packed(index, updates) for index, updates in own.items() if count is None or index < count]
        ranks = [sent] if comm is None or comm.size == 1 else comm.all_gather_object(sent)
        if comm is not None and comm.failed:
            return  # the step will be repeated
        packed = {each[0]: each for found in ranks for each in found}
        total = sum(map(len, ranks))
        assert sorted(packed) == list(range(total if count is None else count)) and len(packed) == total, sorted(packed)
        for update in (one for index in range(total) for one in self._unpacked(*packed[index])):
            self._apply(update)

    def _unpacked(self, index: int, calls: list[tuple[int, torch.dtype, bool]], data: Tensor) -> Iterator[_NormUpdate]:
        begin = 0
        for number, wide, in_order in calls:
            mean = self._recorders[number].module.running_mean
            assert mean is not None
            end = begin + 2 * mean.numel()
            yield _NormUpdate(number, data[begin:end].to(mean.device, mean.dtype), wide, in_order)
            begin = end

    def _apply(self, update: _NormUpdate) -> None:
        """Update the statistics of a batch norm as its forward pass would."""
        module = self._recorders[update.number].module
        mean, variance, tracked = module.running_mean, module.running_var, module.num_batches_tracked
        assert mean is not None and variance is not None
        momentum = 0.0 if module.momentum is None else module.momentum
        if tracked is not None:
            tracked.add_(1)
            if module.momentum is None:
                momentum = 1.0 / float(tracked)
        own_mean, own_variance = update.statistics.chunk(2)
        wide = update.wide if update.in_order else torch.float64
        mean.copy_(_updated(mean, own_mean, momentum, mean.dtype if update.in_order else wide, update.in_order))
        variance.copy_(_updated(variance, own_variance, momentum, wide, update.in_order))


def _updated(old: Tensor, own: Tensor, momentum: float, wide: torch.dtype, in_order: bool) -> Tensor:
    """Return new statistics; the own ones are weighted, and both are added, in the dtype ``wide``."""
    narrow = old.dtype if in_order else torch.float64
    share = torch.tensor(momentum, dtype=narrow, device=old.device)
    return own.to(wide) * share.to(wide) + (old.to(narrow) * (1 - share)).to(wide)


def _packed(index: int, updates: Sequence[_NormUpdate]) -> tuple[int, list[tuple[int, torch.dtype, bool]], Tensor]:
    """Return the updates of a microbatch as few objects; float64 holds all other dtypes exactly."""
    data = [one.statistics.to("cpu", torch.float64) for one in updates]
    calls = [(one.number, one.wide, one.in_order) for one in updates]
    return index, calls, torch.cat(data) if data else torch.empty(0, dtype=torch.float64)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def batch_norms(models: Sequence[nn.Module]) -> list[_BatchNorm]:
    """Return the batch norms with running statistics, each once, without those that synchronise the ranks."""
    found = dict.fromkeys(module for model in models for module in model.modules() if isinstance(module, _BatchNorm))
    return [one for one in found if not isinstance(one, SyncBatchNorm) and one.running_mean is not None]


# Other buffers --------------------------------------------------------------------------------------------------------


def other_buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return, by name, the floating-point buffers outside of batch norms.

    The names are preceded by the number of the model if there are several.
    """
    return {name: tensor for name, (_, tensor) in _owned_buffers(models).items()}


def _owned_buffers(models: Sequence[nn.Module]) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return other buffers with the modules that hold them."""
    norms, found = set(batch_norms(models)), {}
    for number, model in enumerate(models):
        before = f"{number}." if len(models) > 1 else ""
        for path, module in model.named_modules():
            for name, tensor in module._buffers.items():
                if tensor is None or module in norms or not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                found[f"{before}{path}.{name}" if path else f"{before}{name}"] = module, tensor
    return found


def check_unchanged(before: Mapping[str, Tensor], after_models: Sequence[nn.Module]) -> None:
    """Raise ``UsageError`` that names the first buffer that differs; ``before`` are copies of ``other_buffers``."""
    for name, (module, tensor) in _owned_buffers(after_models).items():
        if name in before and not _same_bits(before[name], tensor):
            raise UsageError(
                f"parallel.reproducible = true: forward passes have changed buffer {name} of {type(module).__name__}, "
                "so its value depends on how many microbatches a rank computes; allowed are buffers that keep their "
                "values during forward passes, and those of BatchNorm; replace the module, update the buffer after "
                "run.backward from values that all ranks share, or set parallel.reproducible = false"
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same, bit for bit: NaN equals itself."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    first, second = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)
