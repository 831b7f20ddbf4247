"""Channels: messages arrive in order, buffers are released, and a sender without a free buffer continues."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.comm.shm.spsc_ring import RingHandle
from hpctrain.errors import DeadlineError, UsageError
from hpctrain.parallel.pipeline.channels import (
    Channel,
    ChannelSet,
    MessageChannel,
    MessageFormat,
    SharedMemoryChannel,
    StagedChannel,
)

pytestmark = pytest.mark.ranks
PARCEL = MessageFormat((((3, 2), torch.float32), ((5,), torch.int64), ((), torch.float64)))
COUNT, DEPTH = 12, 2


def message(number: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((2, 3), float(number)).t(),
        torch.arange(5) + number,
        torch.tensor(number / 3, dtype=torch.float64),
    )


@pytest.fixture(params=["slots", "messages", "staged slots", "staged messages"])
def link(own: Any, request: pytest.FixtureRequest) -> Channel:
    """Return a link from rank 0 to rank 1."""
    (ring,) = own.slots([RingHandle(0, 1, DEPTH, PARCEL.nbytes)])
    link: Channel = (
        SharedMemoryChannel(ring, PARCEL)
        if "slots" in request.param and ring is not None
        else MessageChannel(own, 1 - min(own.rank, 1), 0, PARCEL, DEPTH)
    )
    return StagedChannel(link, torch.device("cpu")) if "staged" in request.param else link


def test_messages_arrive_in_order_and_are_kept_until_released(own: Any, link: Channel) -> None:
    channel_set = ChannelSet()
    channel_set.add(link)
    if own.rank == 0:
        for number in range(COUNT):
            link.send(message(number))  # although there are only two buffers
        channel_set.finish()
        assert link.sent()
    elif own.rank == 1:
        link.begin(COUNT)
        held: list[tuple[int, tuple[torch.Tensor, ...]]] = []
        for number in range(COUNT):
            held.append((number, channel_set.receive(link, "a message")))
            for first, tensors in held:
                assert all(torch.equal(one, other) for one, other in zip(tensors, message(first), strict=True))
            if len(held) == DEPTH:
                held.pop(0)
                link.release()


def test_a_shape_that_differs_from_the_agreed_one_is_refused(own: Any, link: Channel) -> None:
    if own.rank == 0:
        with pytest.raises(UsageError, match=r"float32\[3, 3\] after float32\[3, 2\], int64\[5\], float64\[\]"):
            link.send([torch.zeros(3, 3)])


def test_a_missing_message_raises_at_the_deadline(own: Any, link: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.2")
    if own.rank == 1:
        channel_set = ChannelSet()
        channel_set.add(link)
        link.begin(1)
        with pytest.raises(DeadlineError, match="activations of microbatch 3: not within 0.2 s"):
            channel_set.receive(link, "activations of microbatch 3")
    own.barrier()
    if own.rank == 0:
        link.send(message(0))  # for the receive that may be posted
        ChannelSet().add(link)
