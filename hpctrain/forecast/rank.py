"""Model part of one rank, and its sharding along the data axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hpctrain.forecast.local import How, LocalModel, local_model
from hpctrain.forecast.pass_memory import PassMemory, Step, walk
from hpctrain.forecast.run import AxisGroup, PlannedRun, cuts_of, line_of
from hpctrain.forecast.shard_layout import HeldParameter, Pieces, gathered_for, pieces_of
from hpctrain.parallel.config import SHARDED


@dataclass(frozen=True, eq=False)
class RankModel:
    """Model part of a rank of one stage, and its sharding along the data axis."""

    run: PlannedRun
    stage: int
    local: LocalModel
    cuts: tuple[range, ...]  # layers of all chunks of the whole model
    chunks: dict[int, range]  # layers of each of the rank's own chunks
    held: tuple[HeldParameter, ...]  # its parameters, in the model's order
    buffer_bytes: int
    data: AxisGroup

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of its layers."""
        return tuple(self.run.facts.layers[number].name for chunk in self.chunks.values() for number in chunk)

    @property
    def sharded(self) -> bool:
        """Return whether a sharded strategy runs the model."""
        parallel = self.run.parallel
        if self.run.offload.any_update:
            return True
        return parallel.data in SHARDED and (self.data.size > 1 or parallel.mixed_precision != "none")

    @property
    def sharers(self) -> int:
        """Return the number of ranks that share one replica."""
        within = self.run.parallel.shard_within == "node" and self.data.nodes > 1
        return self.data.on_node if within else self.data.size

    @property
    def mapped(self) -> bool:
        """Return whether the node keeps a single copy of the unsharded parameters, in shared memory."""
        return self.run.device == "cpu" and self.data.shares_memory

    @property
    def passing(self) -> bool:
        """Return whether parameters are unsharded on demand and resharded afterwards."""
        return self.run.parallel.data == "fsdp" and not self.mapped

    @cached_property
    def pieces(self) -> Pieces:
        """Return the parameter groups of a sharded strategy."""
        units = self.run.facts.unit_of(self.run.parallel.units) if self.passing else None
        return pieces_of(self.held, self.run.parallel, self.sharers, units=units)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of all its parameters, unsharded."""
        return sum(one.nbytes for one in self.held)

    @cached_property
    def trained(self) -> list[HeldParameter]:
        """Return the parameters that require gradients."""
        return [one for one in self.held if one.trained]

    @cached_property
    def gradients(self) -> dict[str, int]:
        """Return the bytes of gradients as autograd creates them, by name."""
        narrow = self.run.parallel.mixed_precision == "bfloat16"
        return {
            one.name: one.count * (2 if narrow and one.dtype is torch.float32 else one.dtype.itemsize)
            for one in self.trained
        }

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients, unsharded."""
        return sum(self.gradients.values())

    def chunk(self, number: int) -> PassMemory:
        """Simulate a pass of one of its chunks; the last chunk computes the loss."""
        facts, parallel = self.run.facts, self.run.parallel
        last = self.chunks[number].stop == len(facts.layers)
        steps = [self._step(place) for place in self.chunks[number]]
        return walk(steps, self.local.loss if last else None, outputs_stay=parallel.pipe == 1 or not last)

    def entering(self, number: int) -> int:
        """Return the bytes of a microbatch's input to a chunk if the input is copied to a device, else 0."""
        return self.local.layers[self.cuts[number].start - 1].gives.nbytes if self.run.device != "cpu" and number else 0

    def chunk_gradients(self, number: int) -> int:
        """Return the bytes of a chunk's gradients."""
        names = {name for place in self.chunks[number] for name in self._gradients(place)}
        return sum(self.gradients[name] for name in names)

    def _gradients(self, place: int) -> dict[str, int]:
        names = self.run.facts.inside[place].values()
        return {name: self.gradients[name] for name in names if name in self.gradients}

    def _step(self, place: int) -> Step:
        layer = self.local.layers[place]
        gathered = 0
        if self.sharded and self.passing and self.run.parallel.pipe == 1:  # a pipeline gathers all of them for a step
            units = list(dict.fromkeys(one.unit for one in self.pieces.pieces))
            gathered = self.pieces.of_unit("") + gathered_for(layer.name, units, self.pieces)
        away = self.run.offload.activations and self.run.parallel.recompute and layer.name in self._unit_names
        return Step(layer.name, layer.found, self._gradients(place), gathered, away)

    @cached_property
    def _unit_names(self) -> set[str]:
        return set(self.run.facts.unit_of(self.run.parallel.units).values()) - {""}


def rank_models(run: PlannedRun) -> list[RankModel]:
    """Return the model part of one rank of each stage."""
    local = local_model(run.facts, How.of(run.settings, run.microbatch, run.device))
    cuts = cuts_of(run) if run.parallel.pipe > 1 else [range(len(run.facts.layers))]
    found = []
    for stage in range(run.parallel.pipe):
        chunks = {number: cut for number, cut in enumerate(cuts) if number % run.parallel.pipe == stage}
        held = [number for cut in chunks.values() for number in cut]
        rank = stage * run.shape.stride("pipe")
        data = line_of(run, "data", rank)
        parameters, buffers = _held(run, local, held)
        found.append(RankModel(run, stage, local, tuple(cuts), chunks, parameters, buffers, data))
    return found


def _held(run: PlannedRun, local: LocalModel, layers: Sequence[int]) -> tuple[tuple[HeldParameter, ...], int]:
    """Return the parameters of some layers, each once, and the bytes of their buffers."""
    facts = run.facts
    names = {name for place in layers for name in facts.inside[place].values()}
    held = tuple(
        HeldParameter(one.name, local.numels[one.name], one.dtype, one.trained)
        for one in facts.parameters
        if one.name in names
    )
    return held, sum(buffer.nbytes for place in layers for buffer in facts.layers[place].module.buffers())
