"""Persistent memory of a rank: the allocations that exist from the second step on.

Those of synchronous strategies are what the strategy owns in a simulation (``simulate``). Formulas describe what
does not run there: asynchronous strategies, CPU offload, and the buffers between the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.forecast.rank import RankModel
from hpctrain.forecast.run import PlannedRun, line_of
from hpctrain.forecast.simulate import GroupBytes
from hpctrain.parallel.asynchronous.config import is_asynchronous
from hpctrain.parallel.fsdp.setup import IN_FLIGHT, ON_DEVICE
from hpctrain.parallel.offload.gradients import STAGING_BUFFERS
from hpctrain.parallel.offload.memory import CHUNK
from hpctrain.parallel.pipeline.channels import ACTIVATIONS, EXTRA_SLOTS, GRADIENTS, MessageFormat, peak_messages
from hpctrain.train.optimizer import state_per_element


@dataclass(frozen=True)
class MemoryItem:
    """Persistent bytes of one category; ``shared_by`` ranks of a node share them."""

    category: str
    nbytes: int
    on_host: bool = False
    shared_by: int = 1


def memory_items(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return all persistent allocations of a rank."""
    train, facts = run.settings.train, run.facts
    batch = (facts.inputs.nbytes + facts.targets.nbytes) * run.samples * train.accumulate
    found = [MemoryItem("buffers", batch), MemoryItem("buffers", model.local.reduction_bytes, on_host=True)]
    if run.offload.any_update or not model.is_synchronous:
        found.append(MemoryItem("buffers", model.buffer_bytes))
        found += _offloaded(run, model) if run.offload.any_update else _asynchronous(run, model)
    else:
        owned = model.strategy.owned
        found += [MemoryItem(one.category, one.nbytes, one.on_host, one.shared_by) for one in owned]
        found.append(MemoryItem("optimizer states", _states(run, model.strategy.trained_bytes)))
    found += _offloaded_activations(run, model)
    return found + (_stage_buffers(run, model) if run.parallel.pipe > 1 else [])


def _states(run: PlannedRun, nbytes: int) -> int:
    """Return the bytes of optimizer state for ``nbytes`` bytes of parameters."""
    return int(state_per_element(run.settings.optimizer) * nbytes)


# Along the data axis --------------------------------------------------------------------------------------------------


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
            MemoryItem(
                "parameters", sum(one.whole for one in groups), shared_by=model.data.on_node if shared_copy else 1
            )
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


# Along the pipe axis --------------------------------------------------------------------------------------------------


def _stage_buffers(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the buffers between a stage and its neighbours; ranks that share a buffer count half each."""
    schedule = run.schedule
    assert schedule is not None
    rank = model.stage * run.shape.stride("pipe")
    line = line_of(run, "pipe", rank)
    found = []
    boundaries = boundary_tensors(model)
    for chunk, parcel in boundaries.items():
        sender, receiver = schedule.rank_of(chunk), schedule.rank_of(chunk + 1)
        if model.stage not in (sender, receiver):
            continue
        directions = (
            (sender, receiver, peak_messages(schedule, chunk + 1, *ACTIVATIONS) + EXTRA_SLOTS, parcel.nbytes),
            (receiver, sender, peak_messages(schedule, chunk, *GRADIENTS) + EXTRA_SLOTS, parcel.gradients().nbytes),
        )
        same_node = run.node_of(line.ranks[sender]) == run.node_of(line.ranks[receiver]) and line.shares_memory
        for source, target, count, nbytes in directions:
            room = count * RingHandle(source, target, count, nbytes).slot_bytes
            if same_node:
                found.append(MemoryItem("buffers", room, on_host=True, shared_by=2))
            elif not same_node and model.stage == target:
                found.append(MemoryItem("buffers", count * nbytes, on_host=True))
    return found


def boundary_tensors(model: RankModel) -> dict[int, MessageFormat]:
    """Return the boundary tensors that each chunk except the last passes to the next."""
    cuts = model.cuts[:-1]
    return {number: model.local.layers[cut.stop - 1].outputs for number, cut in enumerate(cuts)}
