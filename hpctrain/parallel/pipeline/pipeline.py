"""Pipeline parallelism: partition of a model into chunks; training and evaluation by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hpctrain.comm.agreement import on_first_rank
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import MismatchError, SettingsError, UsageError
from hpctrain.parallel.config import MICROBATCHES_PER_STAGE, ParallelSettings, largest_divisor, microbatches_for
from hpctrain.parallel.objective import ONE_TENSOR, CallArguments, Objective, cut, samples_of, unflatten
from hpctrain.parallel.pipeline.channels import ChunkChannels, MessageFormat
from hpctrain.parallel.pipeline.compare import LayersCheck
from hpctrain.parallel.pipeline.executor import ScheduleExecutor, StashedWeights, StepInput
from hpctrain.parallel.pipeline.layers import ArgumentBinder, Layer, MicrobatchCall, find_layers, tensors_in
from hpctrain.parallel.pipeline.partition import balance, parse_partition
from hpctrain.parallel.pipeline.schedules import Schedule, forward_only, make
from hpctrain.parallel.pipeline.stage import (
    Chunk,
    PassGenerators,
    Run,
    Tensors,
    TiedGradients,
    TiedParameter,
    evaluation_mode,
    make_chunks,
    prune,
    tied_parameters,
)


class Pipeline:
    """This rank's chunks of a model. Collective over ``comm``, the stages, with the same model.

    Parameters and buffers of other stages are removed from the model, in place. A call with inputs
    computes forward through all stages, and every rank gets the outputs; ``train`` computes
    gradients. ``replica`` is this rank's index on the data axis, ``local_ranks`` the number of ranks
    on this node.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: ParallelSettings,
        device: torch.device,
        example: Any = None,
        *,
        replica: int = 0,
        local_ranks: int = 1,
    ) -> None:
        self.model, self.comm, self.settings, self.device = model, comm, settings, device
        count = comm.size * settings.chunks_a_rank
        make(settings.schedule, comm.size, comm.size * count, settings.chunks_a_rank)  # validates the schedule
        layers = find_layers(model)
        self._caller = ArgumentBinder(model, layers)
        example_call = None if example is None else CallArguments.of(example)
        cuts = self._cuts(layers, count, None if example_call is None else self._caller.bind(example_call))
        shared = tied_parameters(layers, cuts)
        self._count = count
        self.held = held = [chunk for chunk in range(count) if chunk % comm.size == comm.rank]
        chunks = make_chunks(layers, cuts)
        self._chunks: dict[int, Chunk] = {chunk: chunks[chunk] for chunk in held}
        kept_ids = {id(one) for chunk in held for layer in chunks[chunk].layers for one in tensors_in(layer.module)}
        self.check = LayersCheck(model, comm, local_ranks, device, kept_ids)
        if example_call is not None:
            self.check(example_call.changed(lambda tensor: tensor.to(device)))
        prune(model, layers, [number for chunk in held for number in cuts[chunk]])
        self.layers = [[layers[number].name for number in cut] for cut in cuts]
        self.modules = [[layers[number].module for number in cut] for cut in cuts]
        self.carried = [bool(chunk.carried_in or chunk.carried_out) for chunk in chunks]
        self.tied = TiedGradients(model, comm, shared, held)
        self.versions: StashedWeights | None = None
        if settings.schedule == "pipedream":
            self._refuse_tied(shared)
            self.versions = StashedWeights(model, make("pipedream", comm.size, count).live(comm.rank))
        self._executor = ScheduleExecutor(self._chunks, count, device, self.versions)
        self._generators = PassGenerators(device, (comm.rank, replica))
        self._channels: dict[Hashable, ChunkChannels] = {}
        self._check_inputs = True  # the inputs of the stages

    def skip_checks(self) -> None:
        """Skip the checks of the first pass."""
        self._check_inputs = False
        self.check.drop()

    # Passes -----------------------------------------------------------------------------------------------------------

    def train(self, inputs: Any, targets: Any, objective: Objective, weight: float) -> Tensor:
        """Accumulate the gradients of weight x loss in this rank's parameters; return that loss on every rank."""
        arguments = CallArguments.of(inputs)
        microbatches = microbatches_for(self.settings, arguments.samples)
        schedule = make(self.settings.schedule, self.comm.size, microbatches, self.settings.chunks_a_rank)
        channels, step_input = self._prepare(schedule, arguments, targets, objective, weight)
        if self.versions is not None:
            self.versions.begin(objective)
        with self._generators.own_stream():
            return self._broadcast_loss(self._executor.run(schedule, channels, step_input, self.comm.rank))

    @torch.no_grad()
    def measure(self, inputs: Any, targets: Any, objective: Objective) -> Tensor:
        """Return the loss on every rank."""
        arguments = CallArguments.of(inputs)
        microbatches = largest_divisor(
            arguments.samples, self.settings.microbatches or MICROBATCHES_PER_STAGE * self.comm.size
        )
        schedule = forward_only(self.comm.size, microbatches, self.settings.chunks_a_rank)
        channels, step_input = self._prepare(schedule, arguments, targets, objective, 1.0)
        with self._generators.own_stream():
            return self._broadcast_loss(self._executor.run(schedule, channels, step_input, self.comm.rank))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute forward through all stages, one after the other; every rank gets the outputs."""
        if torch.is_grad_enabled():
            raise UsageError(
                "a model in a pipeline trains by run.backward(batch, compute), or by "
                "job.strategy(model).forward_backward(inputs, targets, objective); call it under torch.no_grad() to "
                "compute forward only",
                everywhere=True,
            )
        arguments = CallArguments(args, kwargs)
        self.check(arguments)
        call = self._caller.bind(arguments)
        values: tuple[Tensor, ...] = ()
        message_format = MessageFormat(())
        with self._generators.own_stream():
            for chunk in range(self._count):
                found = None
                if chunk in self._chunks:
                    outputs = self._chunks[chunk](values, message_format.structure, call)
                    values, found = outputs.tensors, MessageFormat.of(outputs.tensors, outputs.structure)
                message_format = self._broadcast_format(found, chunk)
                values = self._broadcast_outputs(values, message_format, chunk % self.comm.size)
        return unflatten(message_format.structure, values)

    def watch(self, after: Callable[[int, Tensors, Tensors, Run], None]) -> None:
        """Call ``after(chunk, inputs, outputs, run)`` after each forward pass of a chunk that this rank holds.

        ``run(layers, inputs)`` returns the result of other layers for inputs, with the same
        arguments of the model.
        """
        for number, chunk in self._chunks.items():
            chunk.after = partial(after, number)

    def held_layers(self, chunk: int) -> Sequence[Layer]:
        """Return the layers of a chunk that this rank holds."""
        return self._chunks[chunk].layers

    def _broadcast_outputs(
        self, values: tuple[Tensor, ...], message_format: MessageFormat, root: int
    ) -> tuple[Tensor, ...]:
        """Broadcast a chunk's outputs to all ranks: more than is needed, in passes that are not time-critical."""
        if self.comm.rank != root:
            values = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in message_format.specs)
        return tuple(self.comm.broadcast(value.contiguous(), root) for value in values)

    # Implementation ---------------------------------------------------------------------------------------------------

    def _prepare(
        self, schedule: Schedule, arguments: CallArguments, targets: Any, objective: Objective, weight: float
    ) -> tuple[ChunkChannels, StepInput]:
        """Split a batch into microbatches; return it with the channels for their shape, created on first use."""
        samples = samples_of({"targets": targets}, "targets")
        if samples != arguments.samples:
            raise UsageError(
                f"inputs of {arguments.samples} samples and targets of {samples}; allowed are equal numbers of samples",
                everywhere=True,
            )
        microbatches = arguments.cut(schedule.microbatches)
        key = (schedule.name, schedule.microbatches, microbatches[0].key(), objective.dtype)
        calls = [self._caller.bind(microbatch) for microbatch in microbatches]
        if key not in self._channels:
            self._check_same_inputs(arguments)
            self.check(microbatches[0])
            message_formats = self._message_formats(calls[0], objective)
            self._channels[key] = ChunkChannels(self.comm, schedule, message_formats, self.device)
        step_input = StepInput(calls, cut(targets, schedule.microbatches), objective, weight)
        return self._channels[key], step_input

    def _check_same_inputs(self, arguments: CallArguments) -> None:
        """Raise ``MismatchError`` if the stages get different inputs in the first pass."""
        if not self._check_inputs:
            return
        self._check_inputs = False
        digests = self.comm.all_gather_object(arguments.digest())
        other = next((stage for stage, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise MismatchError(
                f"inputs of the pipeline in its first pass: stages 0 and {other} got different ones; all stages of a "
                "pipeline need the same samples, without random numbers of their own; give the loader "
                "strategy.data.rank and strategy.data.size, or pass the DataLoader itself to job.run",
                everywhere=True,
            )

    @torch.no_grad()
    def _message_formats(self, call: MicrobatchCall, objective: Objective) -> list[MessageFormat]:
        """Return the message formats between chunks, from a forward pass on zeros."""
        message_formats: list[MessageFormat] = []
        values: tuple[Tensor, ...] = ()
        with evaluation_mode(self.model), self._generators.preserved():
            for chunk in range(self._count - 1):
                found = None
                if chunk in self._chunks:
                    if chunk:
                        specs = message_formats[-1].specs
                        values = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in specs)
                    structure = message_formats[-1].structure if chunk else ONE_TENSOR
                    with objective.computing(self.device):
                        outputs = self._chunks[chunk](values, structure, call)
                    found = MessageFormat.of(outputs.tensors, outputs.structure)
                message_formats.append(self._broadcast_format(found, chunk))
        return message_formats

    def _broadcast_format(self, found: MessageFormat | None, chunk: int) -> MessageFormat:
        """Broadcast the message format that the holder of a chunk has found."""
        message_format: MessageFormat = self.comm.broadcast_object(found, root=chunk % self.comm.size)
        return message_format

    def _cuts(self, layers: Sequence[Layer], count: int, example: MicrobatchCall | None) -> list[range]:
        """Return the layers of each chunk: the result of rank 0, because measured times differ between ranks."""
        how = parse_partition(self.settings.partition)
        # Counting loads torch's compiler, which takes seconds; without convolutions the weights suffice.
        convolves = any(isinstance(module, _ConvNd) for layer in layers for module in layer.module.modules())
        example_call = example if how == "time" or convolves else None
        return on_first_rank(self.comm, lambda: balance(layers, count, how, example_call, self.device))

    def _broadcast_loss(self, total: Tensor) -> Tensor:
        """Broadcast a value of the last stage to every rank."""
        self.comm.broadcast(total, root=self.comm.size - 1)
        return total

    def _refuse_tied(self, shared: Sequence[TiedParameter]) -> None:
        if shared:
            raise SettingsError(
                f"parallel.schedule = \"pipedream\": the parameter {' = '.join(shared[0].names)} is on several stages, "
                "which update it at different times: untie it (model.tied = false), or take another schedule",
                everywhere=True,
            )
