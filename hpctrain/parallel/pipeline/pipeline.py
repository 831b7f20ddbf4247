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
from hpctrain.parallel.objective import CallArguments, Objective, cut, samples_of, unflatten
from hpctrain.parallel.pipeline.channels import ChunkChannels, MessageFormat
from hpctrain.parallel.pipeline.compare import LayersCheck
from hpctrain.parallel.pipeline.executor import StashedWeights, StepExecutor
from hpctrain.parallel.pipeline.layers import ArgumentBinder, Layer, MicrobatchCall, find_layers, tensors_in
from hpctrain.parallel.pipeline.partition import balance, parse_partition
from hpctrain.parallel.pipeline.schedules import Schedule, forward_only, make
from hpctrain.parallel.pipeline.stage import (
    Chunk,
    PassGenerators,
    Run,
    Tensors,
    TiedGradients,
    evaluation_mode,
    make_chunks,
    prune,
    tied_parameters,
    used_twice,
)
from hpctrain.parallel.rng import restored_generators


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
        chunks = make_chunks(layers, cuts)
        self.chunks: dict[int, Chunk] = {chunk: chunks[chunk] for chunk in range(comm.rank, count, comm.size)}
        held = [number for chunk in self.chunks for number in cuts[chunk]]
        kept_ids = {id(one) for number in held for one in tensors_in(layers[number].module)}
        self.check = LayersCheck(model, comm, local_ranks, device, kept_ids)
        if example_call is not None:
            self.check(example_call.changed(lambda tensor: tensor.to(device)))
        prune(model, layers, held)
        self.modules = [[layers[number].module for number in cut] for cut in cuts]
        self.carried = [bool(chunk.carried_in or chunk.carried_out) for chunk in chunks]
        self.tied = TiedGradients(model, comm, shared)
        self.versions: StashedWeights | None = None
        if settings.schedule == "pipedream":
            if shared:
                raise SettingsError(
                    f"parallel.schedule = \"pipedream\": the parameter {' = '.join(shared[0].names)} is on several "
                    "stages, which update it at different times: untie it (model.tied = false), or take another "
                    "schedule",
                    everywhere=True,
                )
            self.versions = StashedWeights(model, make("pipedream", comm.size, count).live(comm.rank))
        undeferred = used_twice([layer for chunk in self.chunks.values() for layer in chunk.layers])
        self._executor = partial(StepExecutor, self.chunks, count, device, self.versions, undeferred)
        self._generators = PassGenerators(device, (comm.rank, replica))
        self._channels: dict[Hashable, ChunkChannels] = {}
        self._check_inputs = True  # the inputs of the stages

    def skip_checks(self) -> None:
        """Skip the checks of the first pass."""
        self._check_inputs = False
        self.check.drop()

    def rejoin(self, replica: int) -> None:
        """Forget messages of a pass that has failed; ``replica`` is this rank's new index on the data axis."""
        self._channels.clear()
        self._generators = PassGenerators(self.device, (self.comm.rank, replica))

    # Passes -----------------------------------------------------------------------------------------------------------

    def train(self, inputs: Any, targets: Any, objective: Objective, weight: float) -> Tensor:
        """Accumulate the gradients of weight x loss in this rank's parameters; return that loss on every rank."""
        arguments = CallArguments.of(inputs)
        microbatches = microbatches_for(self.settings, arguments.samples)
        schedule = make(self.settings.schedule, self.comm.size, microbatches, self.settings.chunks_a_rank)
        if self.versions is not None:
            self.versions.begin(objective)
        return self._run(schedule, arguments, targets, objective, weight)

    @torch.no_grad()
    def measure(self, inputs: Any, targets: Any, objective: Objective) -> Tensor:
        """Return the loss on every rank."""
        arguments = CallArguments.of(inputs)
        microbatches = largest_divisor(
            arguments.samples, self.settings.microbatches or MICROBATCHES_PER_STAGE * self.comm.size
        )
        schedule = forward_only(self.comm.size, microbatches, self.settings.chunks_a_rank)
        return self._run(schedule, arguments, targets, objective, 1.0)

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
        values: Tensors = ()
        message_format = MessageFormat(())
        with self._generators.own_stream():
            for chunk in range(self._count):
                values, message_format = self._outputs(chunk, values, message_format, call)
                root = chunk % self.comm.size
                if self.comm.rank != root:
                    values = self._empty(message_format)
                # More than is needed, in passes that are not time-critical.
                values = tuple(self.comm.broadcast(value.contiguous(), root) for value in values)
        return unflatten(message_format.structure, values)

    def watch(self, after: Callable[[int, Tensors, Tensors, Run], None]) -> None:
        """Call ``after(chunk, inputs, outputs, run)`` after each forward pass of a chunk that this rank holds.

        ``run(layers, inputs)`` returns the result of other layers for inputs, with the same
        arguments of the model.
        """
        for number, chunk in self.chunks.items():
            chunk.after = partial(after, number)

    # Implementation ---------------------------------------------------------------------------------------------------

    def _run(
        self, schedule: Schedule, arguments: CallArguments, targets: Any, objective: Objective, weight: float
    ) -> Tensor:
        """Execute a schedule on the microbatches of a batch, with channels for their shape; return the loss."""
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
        parts = cut(targets, schedule.microbatches)
        step = self._executor(schedule, self._channels[key], calls, parts, objective, weight)
        with self._generators.own_stream():
            total = step.run(self.comm.rank)
            self.comm.broadcast(total, root=self.comm.size - 1)
        return total

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
        message_format = MessageFormat(())
        generators = restored_generators({torch.device("cpu"), self.device})
        with evaluation_mode(self.model), generators, objective.computing(self.device):
            for chunk in range(self._count - 1):
                zeros = tuple(value.zero_() for value in self._empty(message_format)) if chunk in self.chunks else ()
                _, message_format = self._outputs(chunk, zeros, message_format, call)
                message_formats.append(message_format)
        return message_formats

    def _outputs(
        self, chunk: int, inputs: Tensors, received: MessageFormat, call: MicrobatchCall
    ) -> tuple[Tensors, MessageFormat]:
        """Return a chunk's outputs on the rank that holds it, and their format on all ranks."""
        if chunk not in self.chunks:
            return (), self.comm.broadcast_object(None, root=chunk % self.comm.size)
        outputs = self.chunks[chunk](inputs, received.structure, call)
        found = MessageFormat.of(outputs.tensors, outputs.structure)
        return outputs.tensors, self.comm.broadcast_object(found, root=chunk % self.comm.size)

    def _empty(self, message_format: MessageFormat) -> Tensors:
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in message_format.specs)

    def _cuts(self, layers: Sequence[Layer], count: int, example: MicrobatchCall | None) -> list[range]:
        """Return the layers of each chunk: the result of rank 0, because measured times differ between ranks."""
        how = parse_partition(self.settings.partition)
        if any(layer.adapter is not None for layer in layers):
            if how == "time":
                raise SettingsError(
                    "parallel.partition = 'time': layers of a model that is cut at its blocks cannot be measured one "
                    "by one; allowed are 'compute', 'parameters', numbers and names of layers",
                    everywhere=True,
                )
            example = None
        # Counting loads torch's compiler, which takes seconds; without convolutions the weights suffice.
        convolves = any(isinstance(module, _ConvNd) for layer in layers for module in layer.module.modules())
        example_call = example if how == "time" or convolves else None
        return on_first_rank(self.comm, lambda: balance(layers, count, how, example_call, self.device))
