"""Peak memory of a run, per rank and per node, by category.

Note: composition. Persistent memory exists from the second step on: parameters, states, buckets,
windows (``holdings``). Memory that is allocated and freed within a step is simulated layer by layer
(``walk``), or action by action of a schedule. The peak is the largest moment of that simulation,
and the categories are those of that moment. Memory that ranks of a node share is divided equally
among them, so that the needs of ranks add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn.modules.conv import _ConvNd

from hpctrain.forecast.holdings import Holding, holdings_of
from hpctrain.forecast.memory_events import moments_of
from hpctrain.forecast.rank import RankModel, rank_models
from hpctrain.forecast.run import PlannedRun

# The program's tensors; on CPUs also malloc's overhead on tensors of a step, and the program
# itself.
TENSORS = ("parameters", "gradients", "optimizer states", "activations", "buffers", "temporary")
PARTS = (*TENSORS, "allocator", "program")
# Both are derived from the measurements of `make -C benchmarks forecast` (glibc 2.36, torch 2.13,
# MPICH 5), without mapped files. Heap: free memory between tensors that is too small for the next
# tensor, as a share of the memory that is allocated and freed in a step. Program: memory of a rank
# that trains a model with a few parameters, 168 MB alone and 186 MB with MPI and its node memory;
# plus 5 MB for the packed operands and the kernels of matrix products and convolutions.
HEAP_SHARE, PROGRAM, PROGRAM_WITH_MPI = 0.33, 173_000_000, 191_000_000
# For a model with convolutions that is partitioned into stages: the modules that torch loads to
# count its operations on the meta device (sympy).
CONVOLUTIONS_COUNTED = 20_000_000
# With offload on a CPU, host and device memory are the same, and offloading copies from heap to
# heap. Heap overhead as a share of the step's allocations, and of buffers.
HEAP_SHARE_OF_OFFLOAD, HEAP_SHARE_OF_ITS_BUFFERS = 0.8, 0.2
Split = dict[str, int]  # bytes per category


@dataclass(frozen=True)
class Need:
    """Memory that a rank needs on its device and in host memory; on CPUs all of it is host memory."""

    device: Split
    host: Split
    when: str  # the moment of the peak

    @property
    def device_total(self) -> int:
        """Return the bytes on the device."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """Return the bytes on the host."""
        return sum(self.host.values())

    @property
    def tensors_total(self) -> int:
        """Return the bytes of tensors, on the device and on the host."""
        return sum(self.device[part] + self.host[part] for part in TENSORS)


@dataclass(frozen=True)
class Memory:
    """Memory needs of the ranks of each stage, and of the fullest node."""

    stages: tuple[Need, ...]
    node: Need
    layers: tuple[tuple[str, ...], ...]  # layer names, by stage

    @property
    def fullest(self) -> int:
        """Return the number of the stage whose ranks need the most."""
        return max(range(len(self.stages)), key=lambda stage: _weight(self.stages[stage]))

    @property
    def rank(self) -> Need:
        """Return the need of a rank of the fullest stage."""
        return self.stages[self.fullest]


def memory_of(run: PlannedRun) -> Memory:
    """Return the memory that a run needs; raises ``UsageError`` if the model cannot be split as configured."""
    models = rank_models(run)
    needs = {model.stage: _need(run, model) for model in models}
    stages = tuple(needs[stage] for stage in range(run.parallel.pipe))
    return Memory(stages, _fullest_node(run, stages), tuple(model.layers for model in models))


def _need(run: PlannedRun, model: RankModel) -> Need:
    """Return the need of a rank at the peak of its device's memory."""
    moment, holdings = max(moments_of(run, model), key=lambda one: one.total), holdings_of(run, model)
    peak = [
        Holding("activations", moment.activations),
        Holding("gradients", moment.gradients),
        Holding("buffers", moment.gathered),
        Holding("temporary", moment.temporary),
    ]
    if run.device == "cpu":
        program = PROGRAM_WITH_MPI if run.ranks > 1 else PROGRAM
        if run.parallel.pipe > 1 and any(isinstance(module, _ConvNd) for module in run.facts.model.modules()):
            program += CONVOLUTIONS_COUNTED
        peak += [Holding("allocator", _between(run, holdings, moment.total)), Holding("program", program)]
    device = _add(holdings + peak, on_host=False)
    host = _add(holdings, on_host=True)
    if run.device == "cpu":
        return Need({part: 0 for part in PARTS}, {part: device[part] + host[part] for part in PARTS}, moment.when)
    return Need(device, host, moment.when)


def _between(run: PlannedRun, holdings: Sequence[Holding], moving: int) -> int:
    """Return the free bytes between tensors of the heap; ``moving`` bytes are allocated and freed per step."""
    if not run.offload.any_update:
        return int(HEAP_SHARE * moving)
    buffers = sum(one.nbytes // one.sharers for one in holdings if one.part == "buffers")
    return int(HEAP_SHARE_OF_OFFLOAD * moving + HEAP_SHARE_OF_ITS_BUFFERS * buffers)


def _add(holdings: Sequence[Holding], *, on_host: bool) -> Split:
    chosen = [one for one in holdings if one.on_host is on_host]
    return {part: sum(one.nbytes // one.sharers for one in chosen if one.part == part) for part in PARTS}


def _fullest_node(run: PlannedRun, stages: Sequence[Need]) -> Need:
    """Return the sum over the ranks of the node that needs the most."""
    nodes: dict[tuple[int, ...], Need] = {}
    for node in range(run.nodes):
        ranks = range(node * run.ranks_per_node, min((node + 1) * run.ranks_per_node, run.ranks))
        held = [run.shape.coordinate("pipe", rank) for rank in ranks]
        counts = tuple(held.count(stage) for stage in range(len(stages)))
        if counts not in nodes:
            nodes[counts] = _sum([(stages[stage], count) for stage, count in enumerate(counts)])
    return max(nodes.values(), key=_weight)


def _sum(needs: Sequence[tuple[Need, int]]) -> Need:
    device = {part: sum(need.device[part] * count for need, count in needs) for part in PARTS}
    host = {part: sum(need.host[part] * count for need, count in needs) for part in PARTS}
    return Need(device, host, "")


def _weight(need: Need) -> tuple[int, int]:
    return need.device_total, need.host_total
