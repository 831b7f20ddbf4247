"""Update parameters in one pass over the host's memory: scale the gradient, update, write the master and its copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.offload.alone import keeps_to_states, step_alone
from hpctrain.parallel.offload.hands import shared
from hpctrain.parallel.offload.kernels import LINE, Kernel, Options, kernel_for
from hpctrain.parallel.offload.slices import Batch, Cut, Row, batches

SLICE_BYTES = 2 << 20  # of float32 parameters, which a thread takes at a time
_ITEM = 4

_Job = tuple[nn.Parameter, Tensor, Tensor | None]  # a parameter, its gradient, and where its copy goes


class OnePass:
    """Update an optimizer's parameters, in the host's memory, to the very bits that the optimizer itself would give.

    In the main thread torch's own threads compute; in others, beside a main thread that does, ``threads`` of this
    module, and where their number is given, always. ``elements`` and ``seconds`` add up what was updated in slices.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, slice_bytes: int = SLICE_BYTES, threads: int | None = None
    ) -> None:
        self.elements, self.seconds = 0, 0.0
        self._optimizer = optimizer
        self._numel = max(slice_bytes // _ITEM // LINE, 1) * LINE
        self._hands, self._hands_always = shared(threads), threads is not None
        self._places: dict[int, int] = {}  # parameter: number of its group
        self._cuts: dict[int, Cut] = {}

    def options(self) -> list[Options]:
        """Return what the optimizer's groups say now, for an update to be made later."""
        return [
            {name: _kept(value) for name, value in group.items() if name != "params"}
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
        """Update parameters with gradients times ``scale``, by what ``options`` say, or the optimizer's groups do now.

        Gradients are as large as their parameters; those in bfloat16 are taken as float32. What they hold afterwards is
        not defined. ``copies[i]`` gets the new values of ``parameters[i]``, in its own dtype.
        """
        said = self.options() if options is None else options
        kernels = [kernel_for(self._optimizer, each) for each in said]
        sliced: dict[int, list[tuple[Row, Cut]]] = {}
        alone: dict[int, list[_Job]] = {}
        copies = copies or [None] * len(parameters)
        for job in zip(parameters, gradients, copies, strict=True):
            group = self._group(job[0])
            row = self._row(kernels[group], job)
            if row is None:
                alone.setdefault(group, []).append(job)
            else:
                sliced.setdefault(group, []).append((row, self._cut_of(job[0], row)))
        with torch.no_grad():
            cut = [batch for group, rows in sliced.items() for batch in self._cut(kernels[group], rows)]
            self._update(cut, scale)
            self._alone(said, alone, scale)

    @property
    def runs_beside(self) -> bool:
        """Tell whether a step may be made in another thread beside whatever is done with model and optimizer.

        Not so where the optimizer may keep more than states, which is updated for all parameters at once.
        """
        return keeps_to_states(self._optimizer)

    def slices(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter can be updated in slices now.

        Then neither its ``grad`` nor what holds the gradient is touched, so that it can be done in another thread.
        """
        kernel = kernel_for(self._optimizer, self._optimizer.param_groups[self._group(parameter)])
        return self._row(kernel, (parameter, parameter.detach(), None)) is not None

    def forget(self, parameter: nn.Parameter) -> None:
        """Let go what is kept of a parameter that is updated elsewhere from now on, and its memory with it."""
        self._cuts.pop(id(parameter), None)

    def _group(self, parameter: nn.Parameter) -> int:
        """Return the number of the group that a parameter is in."""
        if id(parameter) not in self._places:
            groups = self._optimizer.param_groups
            self._places = {id(each): number for number, group in enumerate(groups) for each in group["params"]}
        if id(parameter) not in self._places:
            raise UsageError(f"a parameter of shape {list(parameter.shape)} is not in the optimizer that updates it")
        return self._places[id(parameter)]

    def _row(self, kernel: Kernel | None, job: _Job) -> Row | None:
        """Return what belongs to a parameter; none where it cannot be updated in slices."""
        parameter, gradient, copy = job
        state = self._optimizer.state.get(parameter, {})
        columns = None if kernel is None else kernel.columns(state)
        if columns is None:
            return None
        row = Row(parameter.detach(), gradient, copy, columns, state.get("step"))
        return row if row.fits() else None

    def _cut_of(self, parameter: nn.Parameter, row: Row) -> Cut:
        """Return the slices of a parameter, those of its last update where they lie in the same place."""
        cut = self._cuts.get(id(parameter))
        if cut is None or cut.made_for != (self._numel, row.place):
            cut = self._cuts[id(parameter)] = Cut(row, self._numel)
        return cut

    def _cut(self, kernel: Kernel | None, rows: Sequence[tuple[Row, Cut]]) -> Sequence[Batch]:
        """Count the update, and cut it into what a thread does at a time."""
        assert kernel is not None, "rows were made by it"
        steps = [row.step for row, _ in rows if row.step is not None]
        if steps:
            torch._foreach_add_(steps, 1)
        return list(batches(kernel, rows, self._numel))

    def _update(self, cut: Sequence[Batch], scale: float) -> None:
        began = time.perf_counter()
        # As a tensor, because a number would cost each call twice as much.
        factor = torch.tensor(scale, dtype=torch.float32) if scale != 1 else None

        def update(batch: Batch) -> None:
            batch.update(factor, self._numel)

        # While others compute, torch's threads wait for each other at every call (see hands); alone they are faster.
        if self._hands_always or threading.current_thread() is not threading.main_thread():
            self._hands.each(update, cut)
        else:
            for batch in cut:
                update(batch)
        self.seconds += time.perf_counter() - began
        self.elements += sum(parameter.numel() for batch in cut for parameter in batch.parameters)

    def _alone(self, said: Sequence[Options], jobs: dict[int, list[_Job]], scale: float) -> None:
        """Let the optimizer update what it alone can, in passes over all of memory."""
        gradients = {}
        for parameter, gradient, _ in (job for group in jobs.values() for job in group):
            gradient = _as_laid_out(gradient.view_as(parameter), parameter)
            gradients[parameter] = gradient.mul_(scale) if scale != 1 else gradient
        if not gradients:
            return
        groups = [(said[group], [job[0] for job in some]) for group, some in jobs.items()]
        step_alone(self._optimizer, groups, gradients)
        for parameter, _, copy in (job for group in jobs.values() for job in group):
            if copy is not None:
                copy.view_as(parameter).copy_(parameter)


def _as_laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient whose elements lie as the parameter's do: torch's fused kernels look at memory alone."""
    if gradient.dtype is parameter.dtype and gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _kept(value: Any) -> Any:
    """Return a value that stays when the group's is changed in place."""
    return value.clone() if isinstance(value, Tensor) else value
