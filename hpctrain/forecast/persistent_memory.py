"""Persistent memory of a rank: the allocations that strategies make once and keep to the last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.forecast.rank import RankModel, RankParameter
from hpctrain.forecast.run import PlannedRun, line_of
from hpctrain.parallel.asynchronous.config import PER_WORKER_UPDATES, is_asynchronous
from hpctrain.parallel.buckets import memory_needed
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
    found = [MemoryItem("buffers", batch), MemoryItem("buffers", model.buffer_bytes)]
    found.append(MemoryItem("buffers", model.local.reduction_bytes, on_host=True))
    if run.offload.any_update:
        found += _offloaded(run, model)
    else:
        found += _sharded(run, model) if model.sharded else _unsharded(run, model)
    found += _offloaded_activations(run, model)
    return found + (_stage_buffers(run, model) if run.parallel.pipe > 1 else [])


def _states(run: PlannedRun, nbytes: int) -> int:
    """Return the bytes of optimizer state for ``nbytes`` bytes of parameters."""
    return int(state_per_element(run.settings.optimizer) * nbytes)


# Along the data axis --------------------------------------------------------------------------------------------------


def _unsharded(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the allocations of a rank that keeps its whole part of the model."""
    found = [
        MemoryItem("parameters", model.parameter_bytes),
        MemoryItem("optimizer states", _states(run, sum(one.nbytes for one in model.trained))),
    ]
    if run.parallel.data in PER_WORKER_UPDATES:
        return _asynchronous(run, model)
    elif model.data.size > 1:
        category = "gradients" if gradients_in_buckets(run) else "buffers"
        found.append(MemoryItem(category, _buckets(run, model.trained), on_host=True))
    return found


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


def gradients_in_buckets(run: PlannedRun) -> bool:
    """Return whether gradients are views of the buckets of plain data parallelism, so that buckets are not copies."""
    plain = run.parallel.compression == "none" and run.parallel.data not in PER_WORKER_UPDATES
    return run.device == "cpu" and plain


def _buckets(run: PlannedRun, trained: list[RankParameter]) -> int:
    kinds: dict[torch.dtype, list[Any]] = {}
    for one in trained:
        narrow = run.parallel.compression == "bfloat16" and one.dtype is torch.float32
        kinds.setdefault(torch.bfloat16 if narrow else one.dtype, []).append(one)
    return sum(memory_needed(parameters, dtype) * dtype.itemsize for dtype, parameters in kinds.items())


def _sharded(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the allocations of a rank whose replica is sharded over several ranks."""
    groups, settings = model.groups, run.parallel
    trained = sum(one.shard for one in groups.trained)
    separate = model.unshards_on_demand or settings.mixed_precision != "none"
    found = [
        MemoryItem("optimizer states", _states(run, trained)),
        MemoryItem("gradients", trained),
        MemoryItem("parameters", groups.shard if separate else 0),
    ]
    if not model.unshards_on_demand:
        found.append(MemoryItem("parameters", groups.whole, shared_by=model.data.on_node if model.shared_copy else 1))
    on_device = run.device != "cpu"
    ring = groups.ring(whole=settings.data == "zero1", on_device=on_device)
    return [*found, MemoryItem("buffers", ring)]


def _offloaded(run: PlannedRun, model: RankModel) -> list[MemoryItem]:
    """Return the allocations of a rank with CPU offload.

    Master weights, gradients and optimizer states live in host memory, except for the fraction that
    stays on the device.
    """
    groups, offload = model.groups, run.offload
    trained = sum(one.shard for one in groups.trained)
    frozen, narrow = groups.shard - trained, sum(one.narrow_shard for one in groups.groups)
    on_device = int(max(offload.device_fraction, 0.0) * trained)
    moved = trained - on_device
    mixed = run.parallel.mixed_precision != "none"
    keeps_parameters = model.unshards_on_demand and not offload.parameters
    host_parameters = 0 if offload.disk else moved + (frozen if offload.parameters else 0)
    accumulates = run.settings.train.accumulate > 1 and run.parallel.reduces_early
    on_host = [
        MemoryItem("parameters", host_parameters, on_host=True),
        MemoryItem("gradients", moved * (2 if offload.delayed else 1), on_host=True),
        MemoryItem("buffers", narrow if mixed or offload.delayed and offload.parameters else 0, on_host=True),
        MemoryItem(
            "buffers", STAGING_BUFFERS * max(one.shard for one in groups.trained) if accumulates else 0, on_host=True
        ),
    ]
    found = [
        *on_host,
        _slack(run, sum(one.nbytes for one in on_host)),
        MemoryItem("optimizer states", 0 if offload.disk else _states(run, moved), on_host=True),
        MemoryItem("parameters", narrow if keeps_parameters else 0),
        MemoryItem("parameters", on_device if model.unshards_on_demand or mixed else 0),
        MemoryItem("optimizer states", _states(run, on_device)),
        MemoryItem("gradients", on_device),
        MemoryItem(
            "buffers", STAGING_BUFFERS * min(int(offload.piece_mib * 2**20), max(one.shard for one in groups.trained))
        ),
        MemoryItem("buffers", groups.ring(whole=False, on_device=run.device != "cpu")),
    ]
    if not model.unshards_on_demand:
        found.append(MemoryItem("parameters", groups.whole, shared_by=model.data.on_node if model.shared_copy else 1))
    return found


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
        directions = (
            (sender, receiver, peak_messages(schedule, chunk + 1, *ACTIVATIONS) + EXTRA_SLOTS, parcel.nbytes),
            (receiver, sender, peak_messages(schedule, chunk, *GRADIENTS) + EXTRA_SLOTS, parcel.gradients().nbytes),
        )
        same_node = run.node_of(line.ranks[sender]) == run.node_of(line.ranks[receiver]) and line.shares_memory
        for source, target, count, nbytes in directions:
            room = count * RingHandle(source, target, count, nbytes).slot_bytes
            if same_node and model.stage in (source, target):
                found.append(MemoryItem("buffers", room, on_host=True, shared_by=2))
            elif not same_node and model.stage == target:
                found.append(MemoryItem("buffers", count * nbytes, on_host=True))
    return found


def boundary_tensors(model: RankModel) -> dict[int, MessageFormat]:
    """Return the boundary tensors that each chunk except the last passes to the next."""
    cuts = model.cuts[:-1]
    return {number: model.local.layers[cut.stop - 1].outputs for number, cut in enumerate(cuts)}
