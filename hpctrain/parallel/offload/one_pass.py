"""Update of parameters in one pass over host memory, in slices that fit the caches: scale, update, write.

Note: why slices. Separate passes over all of memory cost, per float32 parameter, 8 bytes to clip
its gradient, 28 for the update by AdamW and 6 for its copy in bfloat16. With slices that stay in a
core's cache, each call finds the result of the previous call there: the scaled gradient never
reaches main memory, and the copy reads the values that the update has just written. The Python
overhead per slice must be small compared with the time for its bytes. Therefore views are created
once and kept.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.hooks import ELEMENTWISE
from hpctrain.parallel.offload.kernels import (
    LINE,
    Options,
    ParameterRow,
    ParameterSlices,
    SliceGroup,
    UpdateKernel,
    kernel_for,
    slice_groups,
    step_subset,
)
from hpctrain.parallel.offload.threads import shared_threads

SLICE_BYTES = 2 << 20  # of float32 parameters, which a thread takes at a time
_ITEM = 4

_Job = tuple[nn.Parameter, Tensor, Tensor | None]  # a parameter, its gradient, and the target of its copy


class OnePass:
    """Update of an optimizer's parameters in host memory, bitwise equal to the optimizer's own.

    In the main thread, torch's own threads compute. In other threads, while the main thread
    computes, the thread pool of this process is used (see ``SliceThreads``). If ``threads`` is given, the
    pool is always used, with that number of threads. ``elements`` and ``seconds`` accumulate the
    updates that were made in slices.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, slice_bytes: int = SLICE_BYTES, threads: int | None = None
    ) -> None:
        self.elements, self.seconds = 0, 0.0
        self._optimizer = optimizer
        self._numel = max(slice_bytes // _ITEM // LINE, 1) * LINE
        self._threads, self._always_threads = shared_threads(threads), threads is not None
        self._group_of: dict[int, int] = {}  # maps the id of a parameter to the index of its group
        self._slices: dict[int, ParameterSlices] = {}

    def options(self) -> list[Options]:
        """Return the current options of the optimizer's groups, for an update to be made later."""
        return [
            {
                name: value.clone() if isinstance(value, Tensor) else value  # the group's own may be changed in place
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def step(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        scale: float = 1.0,
        copies: Sequence[Tensor | None] = (),
        options: Sequence[Options] | None = None,
    ) -> None:
        """Update parameters with gradients times ``scale``, by ``options``, or by the current options of the optimizer.

        Gradients have the sizes of their parameters; those in bfloat16 are converted to float32.
        Their contents are undefined afterwards. ``copies[i]`` receives the new values of
        ``parameters[i]``, in its own dtype.
        """
        options_of_groups = self.options() if options is None else options
        kernels = [kernel_for(self._optimizer, each) for each in options_of_groups]
        sliced: dict[int, list[tuple[ParameterRow, ParameterSlices]]] = {}
        unsliced: dict[int, list[_Job]] = {}
        copies = copies or [None] * len(parameters)
        for job in zip(parameters, gradients, copies, strict=True):
            group = self._group(job[0])
            row = self._row(kernels[group], job)
            if row is None:
                unsliced.setdefault(group, []).append(job)
            else:
                sliced.setdefault(group, []).append((row, self._slices_of(job[0], row)))
        with torch.no_grad():
            slices = [batch for group, rows in sliced.items() for batch in self._batches(kernels[group], rows)]
            self._update(slices, scale)
            self._update_unsliced(options_of_groups, unsliced, scale)

    @property
    def runs_concurrently(self) -> bool:
        """Return whether a step may run in another thread, concurrently with any use of the model and the optimizer.

        This is false if the optimizer may store more than states: a second object would lose such
        data, which is updated for all parameters at once.
        """
        return inspect.unwrap(type(self._optimizer).step) in {inspect.unwrap(known.step) for known in ELEMENTWISE}

    def slices(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter can be updated in slices now.

        Such an update touches neither its ``grad`` nor the object that holds the gradient, so it
        may run in another thread.
        """
        kernel = kernel_for(self._optimizer, self._optimizer.param_groups[self._group(parameter)])
        return self._row(kernel, (parameter, parameter.detach(), None)) is not None

    def forget(self, parameter: nn.Parameter) -> None:
        """Release the cached slices of a parameter that is updated elsewhere from now on, and their memory."""
        self._slices.pop(id(parameter), None)

    def _group(self, parameter: nn.Parameter) -> int:
        """Return the index of the group of a parameter."""
        if id(parameter) not in self._group_of:
            groups = self._optimizer.param_groups
            self._group_of = {id(each): number for number, group in enumerate(groups) for each in group["params"]}
        if id(parameter) not in self._group_of:
            raise UsageError(f"a parameter of shape {list(parameter.shape)} is not in the optimizer that updates it")
        return self._group_of[id(parameter)]

    def _row(self, kernel: UpdateKernel | None, job: _Job) -> ParameterRow | None:
        """Return the tensors of a parameter; None if it cannot be updated in slices."""
        parameter, gradient, copy = job
        state = self._optimizer.state.get(parameter, {})
        columns = None if kernel is None else kernel.columns(state)
        if columns is None:
            return None
        row = ParameterRow(parameter.detach(), gradient, copy, columns, state.get("step"))
        return row if row.fits() else None

    def _slices_of(self, parameter: nn.Parameter, row: ParameterRow) -> ParameterSlices:
        """Return the slices of a parameter; those of its last update are reused if the memory is the same."""
        slices = self._slices.get(id(parameter))
        if slices is None or slices.made_for != (self._numel, row.memory_key):
            slices = self._slices[id(parameter)] = ParameterSlices(row, self._numel)
        return slices

    def _batches(
        self, kernel: UpdateKernel | None, rows: Sequence[tuple[ParameterRow, ParameterSlices]]
    ) -> Sequence[SliceGroup]:
        """Increment the step counts, and divide the update into batches for the threads."""
        assert kernel is not None, "rows were made by it"
        steps = [row.step for row, _ in rows if row.step is not None]
        if steps:
            torch._foreach_add_(steps, 1)
        return list(slice_groups(kernel, rows, self._numel))

    def _update(self, slices: Sequence[SliceGroup], scale: float) -> None:
        began = time.perf_counter()
        # A tensor, because a Python number would double the cost of each call.
        factor = torch.tensor(scale, dtype=torch.float32) if scale != 1 else None

        def update(batch: SliceGroup) -> None:
            batch.update(factor, self._numel)

        # While other threads compute, torch's threads wait for each other in every call (see
        # ``SliceThreads``). Otherwise torch's threads are faster.
        if self._always_threads or threading.current_thread() is not threading.main_thread():
            self._threads.each(update, slices)
        else:
            for batch in slices:
                update(batch)
        self.seconds += time.perf_counter() - began
        self.elements += sum(parameter.numel() for batch in slices for parameter in batch.parameters)

    def _update_unsliced(self, options_of_groups: Sequence[Options], jobs: dict[int, list[_Job]], scale: float) -> None:
        """Run the optimizer's own step on parameters that cannot be sliced, in passes over all of memory."""
        gradients = {}
        for parameter, gradient, _ in (job for group in jobs.values() for job in group):
            gradient = _as_laid_out(gradient.view_as(parameter), parameter)
            gradients[parameter] = gradient.mul_(scale) if scale != 1 else gradient
        if not gradients:
            return
        groups = [(options_of_groups[group], [job[0] for job in some]) for group, some in jobs.items()]
        step_subset(self._optimizer, groups, gradients)
        for parameter, _, copy in (job for group in jobs.values() for job in group):
            if copy is not None:
                copy.view_as(parameter).copy_(parameter)


def _as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the memory layout of the parameter: torch's fused kernels ignore strides."""
    if gradient.dtype is parameter.dtype and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
