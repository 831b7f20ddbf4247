"""Channels between the chunks of a pipeline for microbatches of one shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.parallel.pipeline.channels import (
    Channel,
    ChannelSet,
    MessageChannel,
    MessageFormat,
    SharedMemoryChannel,
    StagedChannel,
)
from hpctrain.parallel.pipeline.schedules import ActionKind, Schedule

EXTRA_SLOTS = 1  # messages that may be ready beyond those that are needed at once
# Kinds of pass at which a chunk begins and stops to need a received message: for activations, and for
# gradients.
ACTIVATIONS = ({ActionKind.FORWARD}, {ActionKind.BACKWARD, ActionKind.WEIGHT})
GRADIENTS = ({ActionKind.BACKWARD, ActionKind.INPUT}, {ActionKind.BACKWARD, ActionKind.WEIGHT})


class ChunkChannels:
    """This rank's ends of all channels, per chunk. Collective over all ranks of the pipeline.

    ``message_formats[c]`` is the format of the messages from chunk c to chunk c + 1.
    """

    def __init__(
        self, comm: Communicator, schedule: Schedule, message_formats: Sequence[MessageFormat], device: torch.device
    ) -> None:
        self.message_formats = tuple(message_formats)
        self.channel_set = ChannelSet(oversubscribed=comm.oversubscribed)
        self.activations_in: dict[int, Channel] = {}
        self.activations_out: dict[int, Channel] = {}
        self.gradients_in: dict[int, Channel] = {}
        self.gradients_out: dict[int, Channel] = {}
        handles, ends = [], []
        for chunk, message_format in enumerate(message_formats):
            owner, neighbour = schedule.rank_of(chunk), schedule.rank_of(chunk + 1)
            handles.append(
                RingHandle(
                    owner,
                    neighbour,
                    peak_messages(schedule, chunk + 1, *ACTIVATIONS) + EXTRA_SLOTS,
                    message_format.nbytes,
                )
            )
            ends.append((self.activations_out, chunk, self.activations_in, chunk + 1, message_format))
            if has_backward(schedule):
                back = message_format.gradients()
                handles.append(
                    RingHandle(neighbour, owner, peak_messages(schedule, chunk, *GRADIENTS) + EXTRA_SLOTS, back.nbytes)
                )
                ends.append((self.gradients_out, chunk + 1, self.gradients_in, chunk, back))
        rings = comm.slots(handles)
        for tag, (handle, ring, (out, source, into, target, message_format)) in enumerate(zip(handles, rings, ends)):
            for rank, peer, side, chunk in (
                (handle.source, handle.target, out, source),
                (handle.target, handle.source, into, target),
            ):
                if rank != comm.rank:
                    continue
                channel: Channel = (
                    SharedMemoryChannel(ring, message_format)
                    if ring is not None
                    else MessageChannel(comm, peer, tag, message_format, handle.count)
                )
                side[chunk] = self.channel_set.add(channel if device.type == "cpu" else StagedChannel(channel, device))

    def begin(self, microbatches: int) -> None:
        """Prepare for one step, in which every channel carries each microbatch once."""
        for channel in (*self.activations_in.values(), *self.gradients_in.values()):
            channel.begin(microbatches)


def has_backward(schedule: Schedule) -> bool:
    """Return whether a schedule has backward passes."""
    return any(action.kind is not ActionKind.FORWARD for action in schedule.actions[0])


def peak_messages(schedule: Schedule, chunk: int, first_kinds: set[ActionKind], last_kinds: set[ActionKind]) -> int:
    """Return the largest number of microbatches whose received message a chunk needs at once."""
    if not has_backward(schedule):
        return 1
    peak = current = 0
    for action in schedule.actions[schedule.rank_of(chunk)]:
        if action.chunk == chunk:
            current += action.kind in first_kinds
            peak = max(peak, current)
            current -= action.kind in last_kinds
    return peak
