"""Stream of collectives that overlap with computation: after the producers of their input, before readers of results.

The fake device does no work until a wait, so that a missing order shows as a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fakes.streams import LazyStreams
from torch import Tensor

from hpctrain.comm.device.streams import CommStream, Streams
from hpctrain.comm.transport.base import Work


@pytest.fixture
def streams() -> LazyStreams:
    return LazyStreams(torch.device("cuda"))


@pytest.fixture
def stream(streams: LazyStreams) -> CommStream:
    return CommStream(streams)


class Counting:
    """Work under way that ends after a number of calls of ``done``, or after a wait."""

    def __init__(self, asks: int) -> None:
        self.asks, self.waits = asks, 0

    def done(self) -> bool:
        self.asks -= 1
        return self.asks < 0

    def wait(self) -> None:
        self.waits += 1


def copying(streams: LazyStreams, target: Tensor, source: Tensor) -> Callable[[], Work | None]:
    """Return a collective that enqueues a copy on the stream that is current when it is called."""

    def collective() -> None:
        streams.enqueue(streams.current(), lambda: target.copy_(source))

    return collective


def compute(streams: LazyStreams, action: Callable[[], object]) -> None:
    streams.enqueue(streams.caller, action)


def test_collectives_overlap_on_a_device_and_not_on_the_host(stream: CommStream) -> None:
    assert stream.asynchronous
    assert not CommStream(LazyStreams(torch.device("cpu"))).asynchronous and not CommStream(Streams()).asynchronous


def test_a_collective_runs_after_its_producers_and_before_its_readers(streams: LazyStreams, stream: CommStream) -> None:
    first, second, third = (torch.zeros(3) for _ in range(3))
    compute(streams, lambda: first.fill_(1))
    handle = stream.run(copying(streams, second, first))
    handle.wait()
    compute(streams, lambda: third.copy_(second))
    assert bool((third == 0).all()), "the host has waited"
    streams.finish()
    assert bool((third == 1).all())


def test_the_result_is_not_visible_without_a_wait(streams: LazyStreams, stream: CommStream) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    handle = stream.run(copying(streams, target, source))
    streams.finish()
    assert bool((target == 0).all()), "the computing stream waits although no wait was requested"
    handle.wait()
    streams.finish()
    assert bool((target == 1).all())


def test_later_computation_does_not_delay_a_collective(streams: LazyStreams, stream: CommStream) -> None:
    source, target = torch.ones(3), torch.zeros(3)
    handle = stream.run(copying(streams, target, source))
    compute(streams, lambda: source.fill_(2))  # as if the memory were reused without a wait
    handle.wait()
    streams.finish()
    assert bool((target == 2).all()), "the collective did not wait, so it read a later value"
    source.fill_(1)
    handle = stream.run(copying(streams, target, source))
    handle.wait()
    compute(streams, lambda: source.fill_(2))
    streams.finish()
    assert bool((target == 1).all())


def test_collectives_keep_their_order(streams: LazyStreams, stream: CommStream) -> None:
    done: list[int] = []
    handles = []
    for number in range(5):
        handles.append(
            stream.run(lambda number=number: streams.enqueue(streams.current(), lambda: done.append(number)))
        )
    handles[3].wait()
    streams.finish()
    assert done == [0, 1, 2, 3]
    handles[1].wait()
    streams.finish()
    assert done == [0, 1, 2, 3]


def test_all_collectives_run_on_one_stream_other_than_the_callers(streams: LazyStreams, stream: CommStream) -> None:
    seen = []
    for _ in range(3):
        stream.run(lambda: seen.append(streams.current()))
    assert len({each.name for each in seen}) == 1 and seen[0] is not streams.caller
    assert streams.current() is streams.caller


def test_the_callers_stream_is_restored_if_a_collective_raises(streams: LazyStreams, stream: CommStream) -> None:
    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        stream.run(broken)
    assert streams.current().name == "caller"


@pytest.mark.parametrize("streams", [LazyStreams(), Streams()], ids=["late", "host"])
def test_completed_work_is_not_polled_or_waited_for_again(streams: LazyStreams) -> None:
    work = Counting(2)
    handle = CommStream(streams).run(lambda: work)
    assert [handle.done() for _ in range(3)] == [False, False, True]
    handle.wait()
    handle.wait()
    assert work.waits == 1 and handle.done()


def test_on_the_host_a_collective_runs_immediately() -> None:
    done: list[int] = []
    handle = CommStream(Streams()).run(lambda: done.append(1))
    assert done == [1] and handle.done()
    handle.wait()
    assert done == [1]
