"""Update of parameters in one pass over host memory, in slices that fit the caches: scale, update, write.

Note: why slices. Separate passes over all of memory cost, per float32 parameter, 8 bytes to clip
its gradient, 28 for the update by AdamW and 6 for its copy in bfloat16. With slices that stay in a
core's cache, each call finds the result of the previous call there: the scaled gradient never
reaches main memory, and the copy reads the values that the update has just written. The Python
overhead per slice must be small compared with the time for its bytes. Therefore views are created
once and kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.offload.kernels import LINE, Options, UpdateKernel, kernel_for, only_uses_states, step_subset
from hpctrain.parallel.offload.threads import shared_threads

_GRADIENTS = (torch.float32, torch.bfloat16)
_thread_local = threading.local()


@dataclass(slots=True)
class ParameterRow:
    """A parameter with its gradient, copy and states; ``step`` counts the update to be made."""

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None
    columns: list[Tensor]
    step: Tensor | None

    def fits(self) -> bool:
        """Return whether all tensors can be cut alike: on the host, contiguous, parameter and states in float32."""
        numel, columns = self.parameter.numel(), [self.parameter, *self.columns]
        copies = [] if self.copy is None else [self.copy]
        return (
            numel > 0
            and all(one.dtype is torch.float32 for one in columns)
            and self.gradient.dtype in _GRADIENTS
            and all(
                one.numel() == numel and one.device.type == "cpu" and one.is_contiguous()
                for one in (*columns, *copies, self.gradient)
            )
        )

    @property
    def memory_key(self) -> tuple[object, ...]:
        """Return a key that distinguishes the memory that is kept between updates from other memory."""
        copy = () if self.copy is None else (self.copy.data_ptr(), self.copy.dtype)
        return self.parameter.data_ptr(), copy, *(one.data_ptr() for one in self.columns)


class ParameterSlices:
    """Slices of the data that is kept between updates: a parameter, its copy, its states."""

    def __init__(self, row: ParameterRow, numel: int) -> None:
        self.made_for = numel, row.memory_key
        self.parameters: Sequence[Tensor] = torch.split(row.parameter.view(-1), numel)
        nothing = [None] * len(self.parameters)
        self.copies: Sequence[Tensor | None] = nothing if row.copy is None else torch.split(row.copy.view(-1), numel)
        self.columns: list[Sequence[Tensor]] = [torch.split(one.view(-1), numel) for one in row.columns]


@dataclass(slots=True)
class SliceGroup:
    """Slices that a thread updates together, one list per kind."""

    kernel: UpdateKernel
    columns: list[list[Tensor]]  # one list per kind of state
    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    copies: list[Tensor | None] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    aligned_numel: int = 0  # elements, including the alignment of the slices
    exact: bool = True  # whether all gradients are float32

    def update(self, scale: Tensor | None, numel: int) -> None:
        """Update the slices by their gradients times ``scale``, if given, and write the copies."""
        gradients = self.gradients if self.exact and scale is None else _scaled(self.gradients, scale, numel)
        self.kernel(self.parameters, gradients, self.columns, self.steps)
        for copy, parameter in zip(self.copies, self.parameters):
            if copy is not None:
                copy.copy_(parameter)


def slice_groups(
    kernel: UpdateKernel, rows: Iterable[tuple[ParameterRow, ParameterSlices]], numel: int
) -> Iterator[SliceGroup]:
    """Put slices that one kernel updates into batches of at most ``numel`` elements, a multiple of ``LINE``."""
    batch = None
    for row, slices in rows:
        gradients = torch.split(row.gradient.view(-1), numel)
        for number, (parameter, gradient) in enumerate(zip(slices.parameters, gradients)):
            aligned = _aligned(parameter.numel())
            if batch is None or batch.aligned_numel + aligned > numel:
                if batch is not None:
                    yield batch
                batch = SliceGroup(kernel, [[] for _ in row.columns])
            batch.parameters.append(parameter)
            batch.gradients.append(gradient)
            batch.exact &= gradient.dtype is torch.float32
            batch.copies.append(slices.copies[number])
            for kind, column in zip(batch.columns, slices.columns):
                kind.append(column[number])
            if row.step is not None:
                batch.steps.append(row.step)
            batch.aligned_numel += aligned
    if batch is not None:
        yield batch


def _scaled(gradients: list[Tensor], scale: Tensor | None, numel: int) -> list[Tensor]:
    """Return gradients as float32, times ``scale``, in memory of this thread that stays in its cache."""
    scratch: Tensor | None = getattr(_thread_local, "scratch", None)
    if scratch is None or scratch.numel() < numel:
        scratch = _thread_local.scratch = torch.empty(numel, dtype=torch.float32)
    scaled, first = [], 0
    for gradient in gradients:
        size = gradient.numel()
        target = scratch if size == scratch.numel() else scratch[first : first + size]
        first += _aligned(size)
        if gradient.dtype is not torch.float32:
            gradient = target.copy_(gradient)
        if scale is not None:
            gradient = torch.mul(gradient, scale, out=target)
        scaled.append(gradient)
    return scaled


def _aligned(numel: int) -> int:
    return -(-numel // LINE) * LINE


# Update of parameters in one pass over host memory: scale the gradient, update, write the master and its copy ---------


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
            {name: _frozen(value) for name, value in group.items() if name != "params"}
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

        This is false if the optimizer may store more than states; such data is updated for all
        parameters at once.
        """
        return only_uses_states(self._optimizer)

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


def _frozen(value: Any) -> Any:
    """Return a value that does not change if the group's value is changed in place."""
    return value.clone() if isinstance(value, Tensor) else value
