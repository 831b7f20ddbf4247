"""Persistent memory of a rank: the allocations that strategies make once and keep to the last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.forecast.rank import RankModel
from hpctrain.forecast.run import PlannedRun, line_of
from hpctrain.forecast.shard_layout import RankParameter
from hpctrain.parallel.asynchronous.config import APART, at_own_pace
from hpctrain.parallel.buckets import memory_needed
from hpctrain.parallel.offload.gradients import STAGING_BUFFERS
from hpctrain.parallel.offload.memory import CHUNK
from hpctrain.parallel.pipeline.channels import Parcel
from hpctrain.parallel.pipeline.route import ACTIVATIONS, AHEAD, GRADIENTS, most_held
from hpctrain.train.optimizer import kept_per_element


@dataclass(frozen=True)
class Holding:
    """Persistent bytes of one category; ``sharers`` ranks of a node share them."""

    part: str
    nbytes: int
    on_host: bool = False
    sharers: int = 1


def holdings_of(run: PlannedRun, model: RankModel) -> list[Holding]:
    """Return all persistent allocations of a rank."""
    train, facts = run.settings.train, run.facts
    batch = (facts.inputs.nbytes + facts.targets.nbytes) * run.samples * train.accumulate
    found = [Holding("buffers", batch), Holding("buffers", model.buffer_bytes)]
    found.append(Holding("buffers", model.local.rooms, on_host=True))
    if run.offload.any_update:
        found += _offloaded(run, model)
    else:
        found += _sharded(run, model) if model.sharded else _whole(run, model)
    found += _away(run, model)
    return found + (_links(run, model) if run.parallel.pipe > 1 else [])


def _states(run: PlannedRun, nbytes: int) -> int:
    """Return the bytes of optimizer state for ``nbytes`` bytes of parameters."""
    return int(kept_per_element(run.settings.optimizer) * nbytes)


# Along the data axis --------------------------------------------------------------------------------------------------


def _whole(run: PlannedRun, model: RankModel) -> list[Holding]:
    """Return the allocations of a rank that keeps its whole part of the model."""
    found = [
        Holding("parameters", model.parameter_bytes),
        Holding("optimizer states", _states(run, sum(one.nbytes for one in model.trained))),
    ]
    if run.parallel.data in APART:
        return _apart(run, model)
    elif model.data.size > 1:
        part = "gradients" if lives_in_bucket(run) else "buffers"
        found.append(Holding(part, _buckets(run, model.trained), on_host=True))
    return found


def _apart(run: PlannedRun, model: RankModel) -> list[Holding]:
    """Return the allocations of a worker that exchanges parameters instead of gradients (asynchronous strategies)."""
    trained, data = sum(one.nbytes for one in model.trained), run.parallel.data
    parameters = Holding("parameters", model.parameter_bytes)
    states = Holding("optimizer states", _states(run, trained))
    if data == "hogwild":  # shared copy of the node; on a GPU, or with several nodes, each worker also has its own copy
        shared = run.device == "cpu" and run.nodes == 1
        copy = Holding("parameters", trained, on_host=True, sharers=run.ranks_on_node)
        return [copy, Holding("parameters", model.parameter_bytes - trained) if shared else parameters, states]
    if data == "server":  # flat gradients, and the window to average them; a parameter shard, and its states
        owners = run.settings.asynchronous.ranks or run.ranks
        vectors = [Holding("gradients", trained, on_host=True), Holding("buffers", trained, on_host=True)]
        piece = [Holding("parameters", trained // owners, on_host=True)]
        states = Holding("optimizer states", _states(run, trained // owners), on_host=True)
        return [parameters, *vectors, *piece, states]
    if not at_own_pace(run.settings.asynchronous, run.parallel):  # the EASGD centre, and the window of the sum
        return [parameters, states, *[Holding("buffers", trained, on_host=True)] * 2]
    return [parameters, states, Holding("buffers", trained // run.ranks, on_host=True)]  # a shard of the centre


def lives_in_bucket(run: PlannedRun) -> bool:
    """Return whether gradients are views of the buckets of plain data parallelism, so that buckets are not copies."""
    plain = run.parallel.compression == "none" and run.parallel.data not in APART
    return run.device == "cpu" and plain


def _buckets(run: PlannedRun, trained: list[RankParameter]) -> int:
    kinds: dict[torch.dtype, list[Any]] = {}
    for one in trained:
        narrow = run.parallel.compression == "bfloat16" and one.dtype is torch.float32
        kinds.setdefault(torch.bfloat16 if narrow else one.dtype, []).append(one)
    return sum(memory_needed(held, dtype) * dtype.itemsize for dtype, held in kinds.items())


def _sharded(run: PlannedRun, model: RankModel) -> list[Holding]:
    """Return the allocations of a rank whose replica is sharded over several ranks."""
    groups, settings = model.groups, run.parallel
    trained = sum(one.share for one in groups.trained)
    apart = model.unshards_on_demand or settings.mixed_precision != "none"
    found = [
        Holding("optimizer states", _states(run, trained)),
        Holding("gradients", trained),
        Holding("parameters", groups.share if apart else 0),
    ]
    if not model.unshards_on_demand:
        found.append(Holding("parameters", groups.whole, sharers=model.data.on_node if model.mapped else 1))
    on_device = run.device != "cpu"
    ring = groups.ring(whole=settings.data == "zero1", on_device=on_device)
    return [*found, Holding("buffers", ring)]


def _offloaded(run: PlannedRun, model: RankModel) -> list[Holding]:
    """Return the allocations of a rank with CPU offload.

    Master weights, gradients and optimizer states live in host memory, except for the fraction that
    stays on the device.
    """
    groups, offload = model.groups, run.offload
    trained = sum(one.share for one in groups.trained)
    frozen, narrow = groups.share - trained, sum(one.narrow_shard for one in groups.groups)
    staying = int(max(offload.device_fraction, 0.0) * trained)
    leaving = trained - staying
    mixed = run.parallel.mixed_precision != "none"
    resides = model.unshards_on_demand and not offload.parameters
    kept = 0 if offload.disk else leaving + (frozen if offload.parameters else 0)
    adds = run.settings.train.accumulate > 1 and run.parallel.reduces_early
    on_host = [
        Holding("parameters", kept, on_host=True),
        Holding("gradients", leaving * (2 if offload.delayed else 1), on_host=True),
        Holding("buffers", narrow if mixed or offload.delayed and offload.parameters else 0, on_host=True),
        Holding("buffers", STAGING_BUFFERS * max(one.share for one in groups.trained) if adds else 0, on_host=True),
    ]
    found = [
        *on_host,
        _slack(run, sum(one.nbytes for one in on_host)),
        Holding("optimizer states", 0 if offload.disk else _states(run, leaving), on_host=True),
        Holding("parameters", narrow if resides else 0),
        Holding("parameters", staying if model.unshards_on_demand or mixed else 0),
        Holding("optimizer states", _states(run, staying)),
        Holding("gradients", staying),
        Holding(
            "buffers", STAGING_BUFFERS * min(int(offload.piece_mib * 2**20), max(one.share for one in groups.trained))
        ),
        Holding("buffers", groups.ring(whole=False, on_device=run.device != "cpu")),
    ]
    if not model.unshards_on_demand:
        found.append(Holding("parameters", groups.whole, sharers=model.data.on_node if model.mapped else 1))
    return found


def _away(run: PlannedRun, model: RankModel) -> list[Holding]:
    """Return the activations that are offloaded to the host."""
    live = run.schedule.live(model.stage) if run.schedule is not None else 1
    offloaded = live * sum(model.chunk(number).offloaded for number in model.chunks)
    return [Holding("activations", offloaded, on_host=True), _slack(run, offloaded)]


def _slack(run: PlannedRun, nbytes: int) -> Holding:
    """Return the unused rest of the host's pinned memory, which is allocated in chunks."""
    return Holding("buffers", 0 if run.device == "cpu" else -nbytes % CHUNK, on_host=True)


# Along the pipe axis --------------------------------------------------------------------------------------------------


def _links(run: PlannedRun, model: RankModel) -> list[Holding]:
    """Return the buffers between a stage and its neighbours; ranks that share a buffer count half each."""
    schedule = run.schedule
    assert schedule is not None
    rank = model.stage * run.shape.stride("pipe")
    line = line_of(run, "pipe", rank)
    found = []
    ends = cut_ends(model)
    for chunk, parcel in ends.items():
        here, there = schedule.rank_of(chunk), schedule.rank_of(chunk + 1)
        ways = (
            (here, there, most_held(schedule, chunk + 1, *ACTIVATIONS) + AHEAD, parcel.nbytes),
            (there, here, most_held(schedule, chunk, *GRADIENTS) + AHEAD, parcel.gradients().nbytes),
        )
        near = run.node_of(line.ranks[here]) == run.node_of(line.ranks[there]) and line.shares_memory
        for source, target, count, nbytes in ways:
            room = count * RingHandle(source, target, count, nbytes).room
            if near and model.stage in (source, target):
                found.append(Holding("buffers", room, on_host=True, sharers=2))
            elif not near and model.stage == target:
                found.append(Holding("buffers", count * nbytes, on_host=True))
    return found


def cut_ends(model: RankModel) -> dict[int, Parcel]:
    """Return the boundary tensors that each chunk except the last passes to the next."""
    cuts = model.cuts[:-1]
    return {number: model.local.layers[cut.stop - 1].outputs for number, cut in enumerate(cuts)}
