"""One order of operations for all carriers: crosswise waits hang without the queue and end with it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from fakes.streams import LazyStreams
from support.nccl import UNIQUE, FakeNccl

from hpctrain.comm.device.nccl_channel import NcclChannel
from hpctrain.comm.dispatch import PRUNE, OperationQueue


class Log(list[str]):
    """Handle that logs when it is waited for or tested."""

    def __init__(self, into: list[str], name: str, done: bool = False) -> None:
        self.into, self.name, self.ended = into, name, done

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.into.append(f"wait {self.name}")


@pytest.fixture
def said() -> list[str]:
    return []


def test_host_operations_end_before_nccl_starts(said: list[str]) -> None:
    queue = OperationQueue()
    for name in ("first", "second"):
        with queue("host"):
            queue.register(Log(said, name))
    assert not said  # host operations do not wait for each other
    with queue("nccl"):
        assert said == ["wait first", "wait second"]
    with queue("host"), queue("nccl"):
        pass
    assert said == ["wait first", "wait second"]  # each is waited for once


def test_staged_and_device_pointer_operations_count_as_host_operations(said: list[str]) -> None:
    queue = OperationQueue()
    with queue("host"):
        queue.register(Log(said, "reduction"))
    for carrier in ("staged", "mpi"):
        with queue(carrier):
            pass
    assert not said


def test_deferred_nccl_messages_start_before_the_host_waits() -> None:
    library = FakeNccl()
    channel = NcclChannel(library, LazyStreams(), 1, 0, UNIQUE)
    queue = OperationQueue()
    queue.register_channel(channel)
    gone: list[str] = []
    with queue("nccl"):
        channel.defer("send", torch.empty(0), lambda comm, stream: gone.append("send"))
    with queue("nccl"):
        assert not gone
    with queue("host"):
        assert gone == ["send"]
    queue.unregister_channel(channel)


def test_completed_operations_are_released(said: list[str]) -> None:
    queue = OperationQueue()
    for _ in range(3 * PRUNE):
        with queue("host"):
            queue.register(Log(said, "old", done=True))
    with queue("nccl"):
        assert len(said) <= PRUNE  # it waits only for those that the queue still holds


def test_an_error_in_a_wait_leaves_the_queue_usable(said: list[str]) -> None:
    class Failing(Log):
        def wait(self) -> None:
            raise TimeoutError("late")

    queue = OperationQueue()
    with queue("host"):
        queue.register(Failing(said, "bad"))
    with pytest.raises(TimeoutError):
        queue("nccl")
    thread = threading.Thread(target=queue, args=("host",))
    thread.start()
    thread.join(5)
    assert not thread.is_alive()  # the lock is free


def test_threads_take_turns() -> None:
    queue = OperationQueue()
    inside: list[int] = []

    def work() -> None:
        for _ in range(200):
            with queue("host"):
                number = len(inside)
                time.sleep(0)
                inside.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == list(range(800))


class Crossed:
    """Two ranks as threads: operation 1 needs both hosts to progress, operation 2 needs both to have started it."""

    def __init__(self) -> None:
        self.rounds = threading.Barrier(2, timeout=1)
        self.started = threading.Barrier(2, timeout=1)

    def host(self) -> Any:
        barrier = self.rounds

        class OnHost:
            ended = False

            def done(self) -> bool:
                return self.ended

            def wait(self) -> None:
                if not self.ended:
                    barrier.wait()
                    self.ended = True

        return OnHost()


@pytest.mark.parametrize("ordered", [True, False])
def test_crosswise_waits_end_only_with_the_queue(ordered: bool) -> None:
    """Rank 0 waits for the second operation first; rank 1 waits for the first before it starts the second."""
    crossed, failed = Crossed(), []

    def rank(number: int) -> None:
        queue = OperationQueue()
        try:
            with queue("host"):
                work = crossed.host()
                if ordered:
                    queue.register(work)
            if number == 1:
                work.wait()
            with queue("nccl"):
                crossed.started.wait()  # the effect of a wait for a kernel: both have launched it
            work.wait()
        except threading.BrokenBarrierError:
            failed.append(number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert bool(failed) == (not ordered)
