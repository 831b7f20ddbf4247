"""Links between the chunks of a pipeline for microbatches of one shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.parallel.pipeline.channels import Link, Links, MessageLink, Parcel, SlotLink, StagedLink
from hpctrain.parallel.pipeline.schedules import ActionKind, Schedule

AHEAD = 1  # messages that may be ready beyond those that are needed at once
# Kinds of pass at which a chunk begins and stops to need a received message: for activations, and for
# gradients.
ACTIVATIONS = ({ActionKind.FORWARD}, {ActionKind.BACKWARD, ActionKind.WEIGHT})
GRADIENTS = ({ActionKind.BACKWARD, ActionKind.INPUT}, {ActionKind.BACKWARD, ActionKind.WEIGHT})


class Route:
    """This rank's ends of all links, per chunk. Collective over all ranks of the pipeline.

    ``parcels[c]`` is the format of the messages from chunk c to chunk c + 1.
    """

    def __init__(
        self, comm: Communicator, schedule: Schedule, parcels: Sequence[Parcel], device: torch.device
    ) -> None:
        self.parcels = tuple(parcels)
        self.links = Links(oversubscribed=comm.oversubscribed)
        self.activations_in: dict[int, Link] = {}
        self.activations_out: dict[int, Link] = {}
        self.gradients_in: dict[int, Link] = {}
        self.gradients_out: dict[int, Link] = {}
        wanted, ends = [], []
        for chunk, parcel in enumerate(parcels):
            here, there = schedule.rank_of(chunk), schedule.rank_of(chunk + 1)
            wanted.append(RingHandle(here, there, most_held(schedule, chunk + 1, *ACTIVATIONS) + AHEAD, parcel.nbytes))
            ends.append((self.activations_out, chunk, self.activations_in, chunk + 1, parcel))
            if goes_back(schedule):
                back = parcel.gradients()
                wanted.append(RingHandle(there, here, most_held(schedule, chunk, *GRADIENTS) + AHEAD, back.nbytes))
                ends.append((self.gradients_out, chunk + 1, self.gradients_in, chunk, back))
        rings = comm.slots(wanted)
        for tag, (handover, ring, (out, source, into, target, parcel)) in enumerate(zip(wanted, rings, ends)):
            for rank, peer, side, chunk in (
                (handover.source, handover.target, out, source),
                (handover.target, handover.source, into, target),
            ):
                if rank != comm.rank:
                    continue
                link: Link = (
                    SlotLink(ring, parcel)
                    if ring is not None
                    else MessageLink(comm, peer, tag, parcel, handover.count)
                )
                side[chunk] = self.links.add(link if device.type == "cpu" else StagedLink(link, device))

    def begin(self, microbatches: int) -> None:
        """Prepare for one step, in which every link carries each microbatch once."""
        for link in (*self.activations_in.values(), *self.gradients_in.values()):
            link.begin(microbatches)


def goes_back(schedule: Schedule) -> bool:
    """Return whether a schedule has backward passes."""
    return any(action.kind is not ActionKind.FORWARD for action in schedule.actions[0])


def most_held(schedule: Schedule, chunk: int, begins: set[ActionKind], ends: set[ActionKind]) -> int:
    """Return the largest number of microbatches whose received message a chunk needs at once."""
    if not goes_back(schedule):
        return 1
    most = now = 0
    for action in schedule.actions[schedule.rank_of(chunk)]:
        if action.chunk == chunk:
            now += action.kind in begins
            most = max(most, now)
            now -= action.kind in ends
    return most
