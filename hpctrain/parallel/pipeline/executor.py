"""Execution of a schedule: what a rank of a pipeline computes, receives and sends in one step.

Note: between the forward and the backward pass of a microbatch, a stage stores its outputs and its
received input. The input is made a leaf of its own autograd graph. The previous stage receives the
gradients that autograd accumulates in the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain import trace
from hpctrain.parallel.inputs import ONE_TENSOR, unflatten
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.pipeline.calls import MicrobatchCall
from hpctrain.parallel.pipeline.channels import Channel
from hpctrain.parallel.pipeline.chunk_channels import ChunkChannels
from hpctrain.parallel.pipeline.parameters import used_twice
from hpctrain.parallel.pipeline.schedules import Action, ActionKind, Schedule
from hpctrain.parallel.pipeline.split_backward import WeightGradStore
from hpctrain.parallel.pipeline.stage import Chunk, backward


class WeightVersions(Protocol):
    """Interface to weight stashing: the weights that passes use if they change between forward and backward."""

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Compute forward with the newest weights."""

    def backward(self, microbatch: int) -> AbstractContextManager[None]:
        """Compute backward with the weights of the forward pass, and add the gradients to the parameters."""

    def update(self) -> None:
        """Make an update."""


@dataclass(frozen=True)
class StepInput:
    """Input of one step: microbatches of inputs and targets, their objective, and the weight of the loss."""

    inputs: Sequence[MicrobatchCall]
    targets: Sequence[Any]
    objective: Objective
    weight: float


class ScheduleExecutor:
    """Executor of schedules on this rank's chunks, by chunk number; the last of ``count`` chunks computes the loss."""

    def __init__(
        self, chunks: Mapping[int, Chunk], count: int, device: torch.device, versions: WeightVersions | None = None
    ) -> None:
        self._chunks, self._last, self._device, self._versions = chunks, count - 1, device, versions
        layers = [layer for chunk in chunks.values() for layer in chunk.layers]
        self._weight_gradients = WeightGradStore(used_twice(layers))

    def train(self, schedule: Schedule, channels: ChunkChannels, step_input: StepInput, rank: int) -> Tensor:
        """Accumulate gradients in this rank's parameters; return the loss on the rank that computes it, elsewhere 0."""
        step = _Step(self, schedule, channels, step_input)
        channels.begin(schedule.microbatches)
        for action in schedule.actions[rank]:
            channels.channel_set.progress()
            step.do(action)
        channels.channel_set.finish()
        return step.total

    @torch.no_grad()
    def measure(self, schedule: Schedule, channels: ChunkChannels, step_input: StepInput, rank: int) -> Tensor:
        """Return the loss on the rank that computes it, elsewhere 0."""
        step = _Step(self, schedule, channels, step_input)
        channels.begin(schedule.microbatches)
        for action in schedule.actions[rank]:
            channels.channel_set.progress()
            step.do(action)
            step.forget(action)
        channels.channel_set.finish()
        return step.total


@dataclass(frozen=True)
class _SavedPass:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class _Step:
    """Execution state of one step."""

    def __init__(
        self, executor: ScheduleExecutor, schedule: Schedule, channels: ChunkChannels, step_input: StepInput
    ) -> None:
        self._executor, self._channels, self._step_input = executor, channels, step_input
        self._splits = schedule.splits_backward
        # If every microbatch has its own update, its gradient counts in full; the loss is a mean in any case.
        self._count = schedule.microbatches
        self._loss_scale = step_input.weight if executor._versions is not None else step_input.weight / self._count
        self._saved: dict[tuple[int, int], _SavedPass] = {}
        self.total = torch.zeros((), device=executor._device)

    def do(self, action: Action) -> None:
        """Execute one action."""
        {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT: self._backward,
            ActionKind.WEIGHT: self._weight,
            ActionKind.UPDATE: self._update,
        }[action.kind](action)

    def forget(self, action: Action) -> None:
        """Release the tensors that a backward pass would have needed."""
        del self._saved[action.chunk, action.microbatch]
        if action.chunk:
            self._channels.activations_in[action.chunk].release()

    def _forward(self, action: Action) -> None:
        chunk, microbatch, executor = action.chunk, action.microbatch, self._executor
        inputs = self._inputs(action)
        message_formats = self._channels.message_formats
        received = message_formats[chunk - 1].structure if chunk else ONE_TENSOR
        with _span(action), self._version(action):
            with self._deferring(action), self._step_input.objective.computing(executor._device):
                returned = executor._chunks[chunk](inputs, received, self._step_input.inputs[microbatch])
            outputs = returned.tensors
            if chunk == executor._last:
                result = unflatten(returned.structure, outputs)
                mean = self._step_input.objective.compare(result, self._step_input.targets[microbatch])
                self.total += mean.detach() * (self._step_input.weight / self._count)
                outputs = (mean * self._loss_scale,)
        if chunk != executor._last:
            message_formats[chunk].check_structure(returned.structure, executor._chunks[chunk].layers[-1].name)
            with trace.span("send", chunk=chunk, microbatch=microbatch):
                self._channels.activations_out[chunk].send([tensor.detach() for tensor in outputs])
        self._saved[chunk, microbatch] = _SavedPass(inputs, outputs)

    def _inputs(self, action: Action) -> tuple[Tensor, ...]:
        if action.chunk == 0:
            return ()  # the first chunk starts from the arguments of the model
        received = self._receive(self._channels.activations_in[action.chunk], action, "activations")
        requires_grad = torch.is_grad_enabled()
        return tuple(each.detach().requires_grad_(requires_grad and each.is_floating_point()) for each in received)

    def _backward(self, action: Action) -> None:
        chunk, executor, key = action.chunk, self._executor, (action.chunk, action.microbatch)
        saved = self._saved[key] if action.kind is ActionKind.INPUT else self._saved.pop(key)
        gradients: tuple[Tensor, ...] | None = None
        if chunk != executor._last:
            gradients = self._receive(self._channels.gradients_in[chunk], action, "gradients")
        with _span(action), self._version(action), self._deferring(action):
            found = backward(saved.outputs, gradients, saved.inputs)
        if chunk:
            with trace.span("send", chunk=chunk, microbatch=action.microbatch):
                self._channels.gradients_out[chunk].send(found)
        if action.kind is ActionKind.BACKWARD:
            self._release(action)

    def _weight(self, action: Action) -> None:
        with _span(action):
            self._executor._weight_gradients.flush((action.chunk, action.microbatch))
        del self._saved[action.chunk, action.microbatch]
        self._release(action)

    def _update(self, action: Action) -> None:
        assert self._executor._versions is not None, "only pipedream updates inside a step"
        with trace.span("optimizer", microbatch=action.microbatch):
            self._executor._versions.update()

    def _release(self, action: Action) -> None:
        if action.chunk:
            self._channels.activations_in[action.chunk].release()
        if action.chunk != self._executor._last:
            self._channels.gradients_in[action.chunk].release()

    def _receive(self, channel: Channel, action: Action, what: str) -> tuple[Tensor, ...]:
        with trace.span("receive", chunk=action.chunk, microbatch=action.microbatch):
            return self._channels.channel_set.receive(channel, f"{what} of microbatch {action.microbatch}")

    def _version(self, action: Action) -> AbstractContextManager[None]:
        versions = self._executor._versions
        if versions is None or not torch.is_grad_enabled():
            return nullcontext()
        forward = action.kind is ActionKind.FORWARD
        return versions.forward(action.microbatch) if forward else versions.backward(action.microbatch)

    def _deferring(self, action: Action) -> AbstractContextManager[object]:
        if not self._splits or not torch.is_grad_enabled():
            return nullcontext()
        return self._executor._weight_gradients.deferring((action.chunk, action.microbatch))


def _span(action: Action) -> AbstractContextManager[None]:
    return trace.span(action.kind.word, chunk=action.chunk, microbatch=action.microbatch)
