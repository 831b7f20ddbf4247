"""Execution of a schedule: what a rank of a pipeline computes, receives and sends in one step.

Note: between the forward and the backward pass of a microbatch, a stage stores its outputs and its
received input. The input is made a leaf of its own autograd graph. The previous stage receives the
gradients that autograd accumulates in the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain import trace
from hpctrain.errors import UsageError
from hpctrain.parallel.objective import ONE_TENSOR, Objective, unflatten
from hpctrain.parallel.pipeline.channels import Channel, ChunkChannels
from hpctrain.parallel.pipeline.layers import MicrobatchCall
from hpctrain.parallel.pipeline.schedules import Action, ActionKind, Schedule
from hpctrain.parallel.pipeline.split_backward import WeightGradStore
from hpctrain.parallel.pipeline.stage import Chunk, Tensors, backward


@dataclass(eq=False)
class StepExecutor:
    """Executor of one step on this rank's chunks, by chunk number, with a method per ``ActionKind.word``.

    ``inputs`` and ``targets`` are microbatches. The last of all ``count`` chunks computes the loss,
    which ``weight_of_loss`` scales.
    """

    chunks: Mapping[int, Chunk]
    count: int
    device: torch.device
    versions: StashedWeights | None
    undeferred: Sequence[nn.Parameter]  # see ``WeightGradStore``
    schedule: Schedule
    channels: ChunkChannels
    inputs: Sequence[MicrobatchCall]
    targets: Sequence[Any]
    objective: Objective
    weight_of_loss: float

    def __post_init__(self) -> None:
        self._last, self._splits = self.count - 1, self.schedule.splits_backward
        # If every microbatch has its own update, its gradient counts in full; the loss is a mean in any case.
        self._mean_scale = self.weight_of_loss / self.schedule.microbatches
        self._loss_scale = self.weight_of_loss if self.versions is not None else self._mean_scale
        self._saved: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}  # inputs and outputs of forward passes
        self._weight_gradients = WeightGradStore(self.undeferred)
        self._total = torch.zeros((), device=self.device)

    def run(self, rank: int) -> Tensor:
        """Return the loss on the rank that computes it, elsewhere 0; accumulate gradients in this rank's parameters.

        The schedule has backward passes if gradients are enabled, and forward passes only otherwise.
        """
        self.channels.begin(self.schedule.microbatches)
        for action in self.schedule.actions[rank]:
            self.channels.channel_set.progress()
            getattr(self, action.kind.word)(action)
        self.channels.channel_set.finish()
        return self._total

    def forward(self, action: Action) -> None:
        chunk, microbatch = action.chunk, action.microbatch
        inputs = self._inputs(action)
        message_formats = self.channels.message_formats
        received = message_formats[chunk - 1].structure if chunk else ONE_TENSOR
        with _span(action), self._version(action):
            with self._deferring(action), self.objective.computing(self.device):
                returned = self.chunks[chunk](inputs, received, self.inputs[microbatch])
            outputs = returned.tensors
            if chunk == self._last:
                result = unflatten(returned.structure, outputs)
                mean = self.objective.compare(result, self.targets[microbatch])
                self._total += mean.detach() * self._mean_scale
                outputs = (mean * self._loss_scale,)
        if chunk != self._last:
            message_formats[chunk].check_structure(returned.structure, self.chunks[chunk].layers[-1].name)
            with trace.span("send", chunk=chunk, microbatch=microbatch):
                self.channels.activations_out[chunk].send([tensor.detach() for tensor in outputs])
        if torch.is_grad_enabled():
            self._saved[chunk, microbatch] = inputs, outputs
        elif chunk:
            self.channels.activations_in[chunk].release()

    def _inputs(self, action: Action) -> Tensors:
        if action.chunk == 0:
            return ()  # the first chunk starts from the arguments of the model
        received = self._receive(self.channels.activations_in[action.chunk], action, "activations")
        requires_grad = torch.is_grad_enabled()
        return tuple(each.detach().requires_grad_(requires_grad and each.is_floating_point()) for each in received)

    def backward(self, action: Action) -> None:
        chunk, key = action.chunk, (action.chunk, action.microbatch)
        inputs, outputs = self._saved[key] if action.kind is ActionKind.INPUT else self._saved.pop(key)
        gradients: Tensors | None = None
        if chunk != self._last:
            gradients = self._receive(self.channels.gradients_in[chunk], action, "gradients")
        with _span(action), self._version(action), self._deferring(action):
            found = backward(outputs, gradients, inputs)
        if chunk:
            with trace.span("send", chunk=chunk, microbatch=action.microbatch):
                self.channels.gradients_out[chunk].send(found)
        if action.kind is ActionKind.BACKWARD:
            self._release(action)

    input = backward

    def weight(self, action: Action) -> None:
        with _span(action):
            self._weight_gradients.flush((action.chunk, action.microbatch))
        del self._saved[action.chunk, action.microbatch]
        self._release(action)

    def update(self, action: Action) -> None:
        assert self.versions is not None, "only pipedream updates inside a step"
        with trace.span("optimizer", microbatch=action.microbatch):
            self.versions.update()

    def _release(self, action: Action) -> None:
        if action.chunk:
            self.channels.activations_in[action.chunk].release()
        if action.chunk != self._last:
            self.channels.gradients_in[action.chunk].release()

    def _receive(self, channel: Channel, action: Action, what: str) -> Tensors:
        with trace.span("receive", chunk=action.chunk, microbatch=action.microbatch):
            return self.channels.channel_set.receive(channel, f"{what} of microbatch {action.microbatch}")

    def _version(self, action: Action) -> AbstractContextManager[None]:
        versions = self.versions
        if versions is None or not torch.is_grad_enabled():
            return nullcontext()
        forward = action.kind is ActionKind.FORWARD
        return versions.forward(action.microbatch) if forward else versions.backward(action.microbatch)

    def _deferring(self, action: Action) -> AbstractContextManager[object]:
        if not self._splits or not torch.is_grad_enabled():
            return nullcontext()
        return self._weight_gradients.deferring((action.chunk, action.microbatch))


def _span(action: Action) -> AbstractContextManager[None]:
    return trace.span(action.kind.word, chunk=action.chunk, microbatch=action.microbatch)


# Weight stashing: the weights of a forward pass are stored until its backward pass (PipeDream) ------------------------
#
# See Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018, and
# Narayanan et al., SOSP 2019. A version is a copy of this stage's parameters. It lives as long as a
# microbatch that used it. A stage with only one microbatch at a time uses the parameters themselves.


Update = Callable[[torch.optim.Optimizer, float], None]


class StashedWeights:
    """Weight versions of one stage; ``live`` is the number of microbatches in flight."""

    def __init__(self, model: nn.Module, live: int) -> None:
        self._model, self._copies = model, live > 1
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
            self._current = _WeightVersion(self._owners)
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

    @cached_property
    def _owners(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [
            (module, name, parameter)
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]


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
