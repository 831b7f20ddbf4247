"""Cut a model into chunks, keep this rank's, and train and measure them as a schedule says."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import SettingsError, UsageError
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.pipeline.balance import balance
from hpctrain.parallel.pipeline.costs import MEASURES
from hpctrain.parallel.pipeline.engine import Engine, Work
from hpctrain.parallel.pipeline.layers import Layer, find_layers
from hpctrain.parallel.pipeline.parcel import Parcel
from hpctrain.parallel.pipeline.prune import TiedParameter, prune, tied
from hpctrain.parallel.pipeline.route import Route
from hpctrain.parallel.pipeline.schedule import Schedule, forward_only, make
from hpctrain.parallel.pipeline.stage import Chunk, Tensors, make_chunks
from hpctrain.parallel.pipeline.tied import TiedGradients
from hpctrain.parallel.pipeline.versions import StashedWeights
from hpctrain.parallel.plan import A_STAGE, even_pieces, microbatches_for
from hpctrain.parallel.settings import ParallelSettings


class Pipeline:
    """Hold this rank's chunks of a model; a call by all ranks of ``comm``, the stages, with the same model.

    The model loses, in place, what other stages hold. Called with inputs it computes forward through all stages, and
    every rank gets the outputs; gradients are for ``train``.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: ParallelSettings,
        device: torch.device,
        example: Tensor | None = None,
    ) -> None:
        self.model, self.comm, self.settings, self.device = model, comm, settings, device
        count = comm.size * settings.chunks_a_rank
        make(settings.schedule, comm.size, comm.size * count, settings.chunks_a_rank)  # whether there is such a one
        layers = find_layers(model)
        cuts = self._cuts(layers, count, example)
        shared = tied(layers, cuts)
        self._count = count
        self.held = held = [chunk for chunk in range(count) if chunk % comm.size == comm.rank]
        chunks = make_chunks(layers, cuts)
        self._chunks: dict[int, Chunk] = {chunk: chunks[chunk] for chunk in held}
        prune(model, layers, [number for chunk in held for number in cuts[chunk]])
        self.layers = [[layers[number].name for number in cut] for cut in cuts]
        self.carried = [bool(chunk.carried_in or chunk.carried_out) for chunk in chunks]
        self.tied = TiedGradients(model, comm, shared, held)
        self.versions: StashedWeights | None = None
        if settings.schedule == "pipedream":
            self._refuse_tied(shared)
            self.versions = StashedWeights(model, make("pipedream", comm.size, count).live(comm.rank))
        self._engine = Engine(self._chunks, count, device, self.versions)
        self._routes: dict[Hashable, Route] = {}

    # Passes -----------------------------------------------------------------------------------------------------------

    def train(self, inputs: Tensor, targets: Tensor, objective: Objective, weight: float) -> Tensor:
        """Leave the gradients of weight x loss in this rank's parameters; return that loss on every rank."""
        pieces = microbatches_for(self.settings, len(inputs))
        schedule = make(self.settings.schedule, self.comm.size, pieces, self.settings.chunks_a_rank)
        route, work = self._prepare(schedule, inputs, targets, objective, weight)
        if self.versions is not None:
            self.versions.begin(objective)
        total = self._engine.train(schedule, route, work, self.comm.rank)
        return self._tell(total)

    def measure(self, inputs: Tensor, targets: Tensor, objective: Objective) -> Tensor:
        """Return the loss on every rank."""
        pieces = even_pieces(len(inputs), self.settings.microbatches or A_STAGE * self.comm.size)
        schedule = forward_only(self.comm.size, pieces, self.settings.chunks_a_rank)
        route, work = self._prepare(schedule, inputs, targets, objective, 1.0)
        return self._tell(self._engine.measure(schedule, route, work, self.comm.rank))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Compute forward through all stages, one after the other; every rank gets the outputs."""
        if torch.is_grad_enabled():
            raise UsageError(
                "a model in a pipeline trains by job.strategy(model).forward_backward(inputs, targets, objective); "
                "call it under torch.no_grad() to compute forward only",
                everywhere=True,
            )
        values: tuple[Tensor, ...] = (inputs,)
        for chunk in range(self._count):
            mine = chunk in self._chunks
            if mine:
                values = self._chunks[chunk](values)
            parcel = self._agree(Parcel.of(values, self._chunks[chunk].gives_tuple) if mine else None, chunk)
            values = self._spread(values, parcel, chunk % self.comm.size)
        return values[0]

    def watch(self, after: Callable[[int, Tensors, Tensors], None]) -> None:
        """Call ``after(chunk, inputs, outputs)`` behind each forward pass of a chunk that this rank holds."""
        for number, chunk in self._chunks.items():
            chunk.after = partial(after, number)

    def held_layers(self, chunk: int) -> Sequence[Layer]:
        """Return the layers of a chunk that this rank holds."""
        return self._chunks[chunk].layers

    def _spread(self, values: tuple[Tensor, ...], parcel: Parcel, root: int) -> tuple[Tensor, ...]:
        """Give every rank what a chunk returned: more than is needed, by passes for which nobody is in a hurry."""
        if self.comm.rank != root:
            values = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in parcel.specs)
        return tuple(self.comm.broadcast(value.contiguous(), root) for value in values)

    # How --------------------------------------------------------------------------------------------------------------

    def _prepare(
        self, schedule: Schedule, inputs: Tensor, targets: Tensor, objective: Objective, weight: float
    ) -> tuple[Route, Work]:
        """Cut a batch, and return the links for microbatches of its shape; laid when the first of them comes."""
        pieces = inputs.chunk(schedule.microbatches)
        key = (schedule.name, schedule.microbatches, tuple(pieces[0].shape), pieces[0].dtype, objective.dtype)
        if key not in self._routes:
            parcels = self._parcels(pieces[0], objective)
            self._routes[key] = Route(self.comm, schedule, parcels, self.device)
        work = Work(pieces, targets.chunk(schedule.microbatches), objective, weight)
        return self._routes[key], work

    @torch.no_grad()
    def _parcels(self, example: Tensor, objective: Objective) -> list[Parcel]:
        """Find out what chunks give to each other, by a pass that computes with zeros."""
        parcels: list[Parcel] = []
        values: tuple[Tensor, ...] = (example,)
        with self._judging():
            for chunk in range(self._count - 1):
                found = None
                if chunk in self._chunks:
                    if chunk:
                        specs = parcels[-1].specs
                        values = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in specs)
                    with objective.computing(self.device):
                        found = Parcel.of(self._chunks[chunk](values), self._chunks[chunk].gives_tuple)
                parcels.append(self._agree(found, chunk))
        return parcels

    def _agree(self, found: Parcel | None, chunk: int) -> Parcel:
        """Let all stages know what a chunk gives, which the one that holds it has found."""
        parcel: Parcel = self.comm.broadcast_object(found, root=chunk % self.comm.size)
        if chunk + 1 in self._chunks:
            self._chunks[chunk + 1].takes_tuple = parcel.as_tuple
        return parcel

    def _cuts(self, layers: Sequence[Layer], count: int, example: Tensor | None) -> list[range]:
        """Return the layers of each chunk: what rank 0 finds, because measured times differ."""
        how = by_hand_or(self.settings.partition)
        # Counting takes torch's compiler, which takes seconds; where there are no convolutions weights tell enough.
        convolves = any(isinstance(module, _ConvNd) for layer in layers for module in layer.module.modules())
        shown = example if how == "time" or convolves else None
        found = balance(layers, count, how, shown, self.device) if self.comm.rank == 0 or how != "time" else None
        cuts: list[range] = self.comm.broadcast_object(found)
        return cuts

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Let modules compute without dropping or learning statistics."""
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            yield
        finally:
            for module, before in training.items():
                module.training = before

    def _tell(self, total: Tensor) -> Tensor:
        """Give every rank what the last stage knows."""
        self.comm.broadcast(total, root=self.comm.size - 1)
        return total

    def _refuse_tied(self, shared: Sequence[TiedParameter]) -> None:
        if shared:
            raise SettingsError(
                f"parallel.schedule = \"pipedream\": the parameter {' = '.join(shared[0].names)} is on several stages, "
                "which update it at different times: untie it (model.tied = false), or take another schedule",
                everywhere=True,
            )


def by_hand_or(partition: str) -> str | list[int | str]:
    """Return what ``parallel.partition`` says: a measure, or numbers or names that stand between commas."""
    words = [word.strip() for word in partition.split(",")]
    if words == [partition] and partition in MEASURES:
        return partition
    return [int(word) if word.isdecimal() else word for word in words]
