"""Peak memory of a run, per rank and per node, by category.

Note: composition. Persistent memory exists from the second step on: parameters, states, buckets,
windows (``persistent_memory``). Memory that is allocated and freed within a step is simulated layer
by layer (``pass_memory``), or action by action of a schedule. The peak is the largest event of that
simulation, and the categories are those of that event. Memory that ranks of a node share is divided
equally among them, so that the needs of ranks add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.nn.modules.conv import _ConvNd

from hpctrain.forecast.pass_memory import MemoryEvent, PassMemory
from hpctrain.forecast.persistent_memory import MemoryItem, memory_items
from hpctrain.forecast.rank import RankModel, rank_models
from hpctrain.forecast.run import PlannedRun
from hpctrain.parallel.pipeline.schedules import ActionKind

# Memory events of one step of a rank, in addition to its persistent memory --------------------------------------------


def memory_events(run: PlannedRun, model: RankModel) -> list[MemoryEvent]:
    """Return the memory events of a step, including the optimizer step."""
    if run.parallel.pipe > 1:
        found = _pipeline_events(run, model)
    else:
        (number,) = model.chunks
        found = _pass_events(run, model, model.chunk(number))
    remaining = model.gradient_bytes if model.keeps_gradients else 0
    return [*found, MemoryEvent("update", 0, remaining)]


def _pass_events(run: PlannedRun, model: RankModel, passes: PassMemory) -> list[MemoryEvent]:
    """Return the memory events of a step's passes without a pipeline; with accumulation there are several passes."""
    whole = model.gradient_bytes
    several = run.settings.train.accumulate > 1
    if model.keeps_gradients:
        again = _with_gradients(passes.backward_in_place, whole) if several else []
        return passes.forward + passes.backward + (again + _with_gradients(passes.forward, whole) if several else [])
    reduces_each = bool(model.strategy.groups) and run.parallel.reduces_early
    if several and not reduces_each:
        return passes.backward + _with_gradients(passes.forward + passes.backward_in_place, whole)
    return passes.forward + passes.backward_in_place


def _with_gradients(events: Iterable[MemoryEvent], gradients: int) -> list[MemoryEvent]:
    return [replace(one, gradients=gradients) for one in events]


# Pipelines ------------------------------------------------------------------------------------------------------------


def _pipeline_events(run: PlannedRun, model: RankModel) -> list[MemoryEvent]:
    """Simulate a rank's actions: twice if gradients accumulate over several passes, else once."""
    found, gradients = _simulate_schedule(run, model, {})
    if run.settings.train.accumulate > 1:
        found += _simulate_schedule(run, model, gradients)[0]
    extra = _gathered(run, model)
    return [replace(one, gathered=one.gathered + extra) for one in found]


def _gathered(run: PlannedRun, model: RankModel) -> int:
    """Return the bytes of parameters that are gathered for a step, or stashed in several versions (pipedream)."""
    found = model.strategy.forward.values() if model.is_synchronous else ()
    gathered = max((one.unsharded for one in found), default=0)
    schedule = run.schedule
    assert schedule is not None
    live = schedule.live(model.stage)
    stashed = schedule.name == "pipedream" and live > 1
    return gathered + (live * model.parameter_bytes if stashed else 0)


def _simulate_schedule(
    run: PlannedRun, model: RankModel, before: dict[int, int]
) -> tuple[list[MemoryEvent], dict[int, int]]:
    """Return the memory events of a rank's actions, and the remaining gradient bytes by chunk."""
    schedule = run.schedule
    assert schedule is not None
    chunks = {number: model.chunk(number) for number in model.chunks}
    gradients = dict(before)
    live, found = 0, []
    for action in schedule.actions[model.stage]:
        if action.kind is ActionKind.UPDATE:
            gradients.clear()
            continue
        passes, input_bytes = chunks[action.chunk], model.input_bytes(action.chunk)
        present = sum(gradients.values())
        if action.kind is ActionKind.FORWARD:
            events, change = passes.forward, passes.saved + input_bytes
        elif action.kind is ActionKind.WEIGHT:
            events, change = passes.weight_grads, -passes.deferred
        else:
            new = action.chunk not in gradients
            events = [
                _without_saved(one, passes.saved) for one in (passes.backward if new else passes.backward_in_place)
            ]
            change = -passes.saved - input_bytes + (passes.deferred if action.kind is ActionKind.INPUT else 0)
        found += [_added_to(one, live, present, str(action)) for one in events]
        if action.kind is not ActionKind.FORWARD:
            gradients[action.chunk] = model.chunk_gradients(action.chunk)
        live += change
    return found, gradients


def _without_saved(event: MemoryEvent, saved: int) -> MemoryEvent:
    """Subtract the activations that the forward pass saves, which are already part of the live bytes."""
    return replace(event, activations=event.activations - saved)


def _added_to(event: MemoryEvent, live: int, gradients: int, when: str) -> MemoryEvent:
    return replace(event, activations=event.activations + live, gradients=event.gradients + gradients)


# Peak memory of a run, per rank and per node, by category -------------------------------------------------------------


# The program's tensors; on CPUs also malloc's overhead on tensors of a step, and the program
# itself.
TENSORS = ("parameters", "gradients", "optimizer states", "activations", "buffers", "temporary")
CATEGORIES = (*TENSORS, "allocator", "program")
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
        return sum(self.device[category] + self.host[category] for category in TENSORS)


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
    event, allocations = max(memory_events(run, model), key=lambda one: one.total), memory_items(run, model)
    peak = [
        MemoryItem("activations", event.activations),
        MemoryItem("gradients", event.gradients),
        MemoryItem("buffers", event.gathered),
        MemoryItem("temporary", event.temporary),
    ]
    if run.device == "cpu":
        program = PROGRAM_WITH_MPI if run.ranks > 1 else PROGRAM
        if run.parallel.pipe > 1 and any(isinstance(module, _ConvNd) for module in run.facts.model.modules()):
            program += CONVOLUTIONS_COUNTED
        peak += [MemoryItem("allocator", _between(run, allocations, event.total)), MemoryItem("program", program)]
    device = _add(allocations + peak, on_host=False)
    host = _add(allocations, on_host=True)
    if run.device == "cpu":
        return Need(
            {category: 0 for category in CATEGORIES},
            {category: device[category] + host[category] for category in CATEGORIES},
            event.when,
        )
    return Need(device, host, event.when)


def _between(run: PlannedRun, allocations: Sequence[MemoryItem], moving: int) -> int:
    """Return the free bytes between tensors of the heap; ``moving`` bytes are allocated and freed per step."""
    if not run.offload.any_update:
        return int(HEAP_SHARE * moving)
    buffers = sum(one.nbytes // one.shared_by for one in allocations if one.category == "buffers")
    return int(HEAP_SHARE_OF_OFFLOAD * moving + HEAP_SHARE_OF_ITS_BUFFERS * buffers)


def _add(allocations: Sequence[MemoryItem], *, on_host: bool) -> Split:
    chosen = [one for one in allocations if one.on_host is on_host]
    return {
        category: sum(one.nbytes // one.shared_by for one in chosen if one.category == category)
        for category in CATEGORIES
    }


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
    device = {category: sum(need.device[category] * count for need, count in needs) for category in CATEGORIES}
    host = {category: sum(need.host[category] * count for need, count in needs) for category in CATEGORIES}
    return Need(device, host, "")


def _weight(need: Need) -> tuple[int, int]:
    return need.device_total, need.host_total
