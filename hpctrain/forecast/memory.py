"""Peak memory of a run, per rank and per node, by category.

Note: composition. Persistent memory exists from the second step on: parameters, states, buckets,
windows. That of synchronous strategies is what the strategy owns in a simulation (``simulate``).
Formulas describe what does not run there: asynchronous strategies, CPU offload, and the buffers
between the stages of a pipeline. Memory that is allocated and freed within a step is simulated layer
by layer (``pass_memory``), or action by action of a schedule. The peak is the largest event of that
simulation, and the categories are those of that event. Memory that ranks of a node share is divided
equally among them, so that the needs of ranks add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.nn.modules.conv import _ConvNd

from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.forecast.pass_memory import MemoryEvent, PassMemory
from hpctrain.forecast.rank import RankModel, rank_models
from hpctrain.forecast.run import PlannedRun, group_of
from hpctrain.forecast.simulate import GroupBytes, MemoryItem
from hpctrain.parallel.asynchronous.config import PER_WORKER_UPDATES, is_asynchronous
from hpctrain.parallel.fsdp.setup import IN_FLIGHT, ON_DEVICE
from hpctrain.parallel.offload.gradients import STAGING_BUFFERS
from hpctrain.parallel.offload.memory import CHUNK
from hpctrain.parallel.pipeline.channels import ACTIVATIONS, EXTRA_SLOTS, GRADIENTS, peak_messages
from hpctrain.parallel.pipeline.schedules import ActionKind
from hpctrain.train.failure_policy import keeps_state
from hpctrain.train.health import keeps_weights
from hpctrain.train.optimizer import state_per_element

# Memory events of one step of a rank, in addition to its persistent memory --------------------------------------------


def memory_events(run: PlannedRun, model: RankModel) -> list[MemoryEvent]:
    """Return the memory events of a step, including the optimizer step."""
    if run.parallel.pipe > 1:
        found = _pipeline_events(run, model)
    else:
        (number,) = model.chunks
        found = _pass_events(run, model, model.chunk(number))
    remaining = model.gradient_bytes if model.strategy.keeps_gradients else 0
    return [*found, MemoryEvent("update", 0, remaining)]


def _pass_events(run: PlannedRun, model: RankModel, passes: PassMemory) -> list[MemoryEvent]:
    """Return the memory events of a step's passes without a pipeline; with accumulation there are several passes."""
    whole = model.gradient_bytes
    several = run.settings.train.accumulate > 1
    if model.strategy.keeps_gradients:
        again = _with_gradients(passes.backward_in_place, whole) if several else []
        return passes.forward + passes.backward + (again + _with_gradients(passes.forward, whole) if several else [])
    reduces_each = bool(model.strategy.groups) and run.parallel.reduces_early
    if several and not reduces_each:
        return passes.backward + _with_gradients(passes.forward + passes.backward_in_place, whole)
    return passes.forward + passes.backward_in_place


def _with_gradients(events: Iterable[MemoryEvent], gradients: int) -> list[MemoryEvent]:
    return [replace(one, gradients=gradients) for one in events]


def _pipeline_events(run: PlannedRun, model: RankModel) -> list[MemoryEvent]:
    """Simulate a rank's actions: twice if gradients accumulate over several passes, else once."""
    found, gradients = _simulate_schedule(run, model, {})
    if run.settings.train.accumulate > 1:
        found += _simulate_schedule(run, model, gradients)[0]
    extra = _gathered(run, model)
    return [replace(one, gathered=one.gathered + extra) for one in found]


def _gathered(run: PlannedRun, model: RankModel) -> int:
    """Return the bytes of parameters that are gathered for a step, or stashed in several versions (pipedream)."""
    gathered = max((one.unsharded for one in model.strategy.forward.values()), default=0)
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
            events, base, change = passes.forward, live, passes.saved + input_bytes
        elif action.kind is ActionKind.WEIGHT:
            events, base, change = passes.weight_grads, live, -passes.deferred
        else:
            new = action.chunk not in gradients
            events = passes.backward if new else passes.backward_in_place
            base = live - passes.saved  # which the events contain, too
            change = -passes.saved - input_bytes + (passes.deferred if action.kind is ActionKind.INPUT else 0)
        found += [replace(one, activations=one.activations + base, gradients=one.gradients + present) for one in events]
        if action.kind is not ActionKind.FORWARD:
            gradients[action.chunk] = model.chunk_gradients(action.chunk)
        live += change
    return found, gradients


# Persistent memory of a rank: the allocations that exist from the second step on --------------------------------------


def memory_items(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return all persistent allocations of a rank."""
    train, facts = run.settings.train, run.facts
    batch = (facts.inputs.nbytes + facts.targets.nbytes) * run.samples * train.accumulate
    found = [MemoryItem("buffers", batch), MemoryItem("buffers", model.local.reduction_bytes, on_host=True)]
    if run.offload.any_update or run.parallel.data in PER_WORKER_UPDATES:
        found.append(MemoryItem("buffers", model.buffer_bytes))
        found += _offloaded(run, model) if run.offload.any_update else _asynchronous(run, model)
    else:
        found += model.strategy.owned
        found.append(MemoryItem("optimizer states", _states(run, model.strategy.trained_bytes)))
    found += _offloaded_activations(run, model)
    continues = keeps_state(run.settings.run.on_failure, run.ranks)
    if keeps_weights(run.settings.health, run.ranks) or continues:
        found.append(_kept_shards(run, model) if continues else _kept_state(run, model))
    return found + (_stage_buffers(run, model) if run.parallel.pipe > 1 else [])


def _kept_state(run: PlannedRun, model: RankModel) -> MemoryItem:
    """Return the copy of the whole state, from which steps are repeated."""
    states = _states(run, model.strategy.trained_bytes)
    return MemoryItem("buffers", model.parameter_bytes + model.buffer_bytes + states)


def _kept_shards(run: PlannedRun, model: RankModel) -> MemoryItem:
    """Return the two copies of the shards that change; without shards, other ranks have all but the buffers."""
    states, groups = _states(run, model.strategy.trained_bytes), model.strategy.groups
    if not groups:
        return _kept_state(run, model) if run.parallel.splits_model else MemoryItem("buffers", model.buffer_bytes)
    # Copies on other nodes: two of its own that a rank sends, and two of another rank that it holds.
    copies = 3 if run.settings.checkpoint.replicate and run.nodes > 1 else 1
    shards = sum((2 if one.trained else 1) * one.shard for one in groups)
    return MemoryItem("buffers", copies * (shards + model.buffer_bytes + 2 * states), on_host=True)


def _states(run: PlannedRun, nbytes: int) -> int:
    """Return the bytes of optimizer state for ``nbytes`` bytes of parameters."""
    return int(state_per_element(run.settings.optimizer) * nbytes)


def _asynchronous(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the allocations of a worker that exchanges parameters instead of gradients (asynchronous strategies)."""
    trained, data = sum(one.nbytes for one in model.trained), run.parallel.data
    parameters = MemoryItem("parameters", model.parameter_bytes)
    states = MemoryItem("optimizer states", _states(run, trained))
    if data == "hogwild":  # shared copy of the node; on a GPU, or with several nodes, each worker also has its own copy
        shared = run.device == "cpu" and run.nodes == 1
        copy = MemoryItem("parameters", trained, on_host=True, shared_by=run.ranks_on_node)
        return [copy, MemoryItem("parameters", model.parameter_bytes - trained) if shared else parameters, states]
    if data == "server":  # flat gradients, and the window to average them; a parameter shard, and its states
        owners = run.settings.asynchronous.ranks or run.ranks
        vectors = [MemoryItem("gradients", trained, on_host=True), MemoryItem("buffers", trained, on_host=True)]
        shard = [MemoryItem("parameters", trained // owners, on_host=True)]
        states = MemoryItem("optimizer states", _states(run, trained // owners), on_host=True)
        return [parameters, *vectors, *shard, states]
    if not is_asynchronous(run.settings.asynchronous, run.parallel):  # the EASGD centre, and the window of the sum
        return [parameters, states, *[MemoryItem("buffers", trained, on_host=True)] * 2]
    return [parameters, states, MemoryItem("buffers", trained // run.ranks, on_host=True)]  # a shard of the centre


def _offloaded(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the allocations of a rank with CPU offload.

    Master weights, gradients and optimizer states live in host memory, except for the fraction that
    stays on the device.
    """
    groups, offload = model.strategy.groups, run.offload
    largest = max(one.shard for one in groups if one.trained)
    trained, frozen = (sum(one.shard for one in groups if one.trained is kind) for kind in (True, False))
    narrow = sum(one.narrow_shard for one in groups)
    shared_copy = run.device == "cpu" and model.data.shares_memory
    on_demand = run.parallel.data == "fsdp" and not shared_copy
    on_device = int(max(offload.device_fraction, 0.0) * trained)
    moved = trained - on_device
    mixed = run.parallel.mixed_precision != "none"
    keeps_parameters = on_demand and not offload.parameters
    host_parameters = 0 if offload.disk else moved + (frozen if offload.parameters else 0)
    accumulates = run.settings.train.accumulate > 1 and run.parallel.reduces_early
    on_host = [
        MemoryItem("parameters", host_parameters, on_host=True),
        MemoryItem("gradients", moved * (2 if offload.delayed else 1), on_host=True),
        MemoryItem("buffers", narrow if mixed or offload.delayed and offload.parameters else 0, on_host=True),
        MemoryItem("buffers", STAGING_BUFFERS * largest if accumulates else 0, on_host=True),
    ]
    found = [
        *on_host,
        _slack(run, sum(one.nbytes for one in on_host)),
        MemoryItem("optimizer states", 0 if offload.disk else _states(run, moved), on_host=True),
        MemoryItem("parameters", narrow if keeps_parameters else 0),
        MemoryItem("parameters", on_device if on_demand or mixed else 0),
        MemoryItem("optimizer states", _states(run, on_device)),
        MemoryItem("gradients", on_device),
        MemoryItem("buffers", STAGING_BUFFERS * min(int(offload.piece_mib * 2**20), largest)),
        MemoryItem("buffers", _gradient_buffers(run, groups)),
    ]
    if not on_demand:
        found.append(
            MemoryItem("parameters", sum(one.whole for one in groups), shared_by=model.data.local if shared_copy else 1)
        )
    return found


def _gradient_buffers(run: PlannedRun, groups: Sequence[GroupBytes]) -> int:
    """Return the bytes of the buffers for unsharded gradients, which hold a few groups at a time."""
    sizes = sorted((one.whole for one in groups if one.trained), reverse=True)
    few = max(sizes[0], IN_FLIGHT * int(run.parallel.bucket_mib * 2**20))
    return min(few, sum(sizes)) if run.device == "cpu" else sum(sizes[:ON_DEVICE])


def _offloaded_activations(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the activations that are offloaded to the host."""
    live = run.schedule.live(model.stage) if run.schedule is not None else 1
    offloaded = live * sum(model.chunk(number).offloaded for number in model.chunks)
    return [MemoryItem("activations", offloaded, on_host=True), _slack(run, offloaded)]


def _slack(run: PlannedRun, nbytes: int) -> MemoryItem:
    """Return the unused rest of the host's pinned memory, which is allocated in chunks."""
    return MemoryItem("buffers", 0 if run.device == "cpu" else -nbytes % CHUNK, on_host=True)


def _stage_buffers(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the buffers between a stage and its neighbours; ranks that share a buffer count half each."""
    schedule = run.schedule
    assert schedule is not None
    rank = model.stage * run.shape.stride("pipe")
    ranks, shares_memory = run.shape.line("pipe", rank), group_of(run, "pipe", rank).shares_memory
    found = []
    for chunk, cut in enumerate(model.cuts[:-1]):
        parcel = model.local.layers[cut.stop - 1].outputs  # what the chunk passes to the next
        sender, receiver = schedule.rank_of(chunk), schedule.rank_of(chunk + 1)
        if model.stage not in (sender, receiver):
            continue
        directions = (
            (sender, receiver, peak_messages(schedule, chunk + 1, *ACTIVATIONS) + EXTRA_SLOTS, parcel.nbytes),
            (receiver, sender, peak_messages(schedule, chunk, *GRADIENTS) + EXTRA_SLOTS, parcel.gradients().nbytes),
        )
        same_node = shares_memory and run.node_of(ranks[sender]) == run.node_of(ranks[receiver])
        for source, target, count, nbytes in directions:
            room = count * RingHandle(source, target, count, nbytes).slot_bytes
            if same_node:
                found.append(MemoryItem("buffers", room, on_host=True, shared_by=2))
            elif model.stage == target:
                found.append(MemoryItem("buffers", count * nbytes, on_host=True))
    return found


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
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
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
    if run.parallel.reproducible and run.parallel.data in ("zero2", "fsdp"):
        # Parameters and gradients are unsharded during the whole step.
        run = replace(run, settings=replace(run.settings, parallel=replace(run.parallel, data="zero1")))
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
