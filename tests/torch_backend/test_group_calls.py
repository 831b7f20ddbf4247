"""Handles, futures, coalesced calls, messages, profiler events and threads of process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _coalescing_manager

pytestmark = [pytest.mark.ranks(2, 3, 4)]
CPU = torch.device("cpu")


def numbered(rank: int, length: int = 5) -> Tensor:
    return torch.arange(length, dtype=torch.float32) + 10 * rank


def total(size: int, length: int = 5) -> Tensor:
    return torch.stack([numbered(rank, length) for rank in range(size)]).sum(0)


def test_many_operations_in_progress(world: Any) -> None:
    tensors = [numbered(world.rank(), 3 + 1000 * number) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = numbered(world.rank())
    dist.all_reduce(last)  # a synchronous operation follows those in progress
    assert torch.equal(last, total(world.size()))
    for tensor, work in zip(reversed(tensors), reversed(works)):
        assert work.wait() and work.wait(timedelta(seconds=5)) and work.is_completed() and work.is_success()
        assert torch.equal(tensor, total(world.size(), len(tensor)))
        assert work.result()[0] is tensor and work.exception() is None


def test_futures_and_their_callbacks(world: Any) -> None:
    size, tensor = world.size(), numbered(world.rank())
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), total(size) * 2)
    assert work.get_future() is future and torch.equal(future.value()[0], total(size))
    completed = world.allreduce([numbered(world.rank())])
    completed.wait()
    assert torch.equal(completed.get_future().wait()[0], total(size))


def test_a_callback_may_wait_for_collectives(world: Any) -> None:
    def reduce_again(future: Any) -> Tensor:
        tensor: Tensor = future.value()[0]
        dist.all_reduce(tensor)
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    # As hooks of DDP do: the callback is registered before the next operation starts, so that all ranks have one order.
    chained = [
        dist.all_reduce(numbered(world.rank()), async_op=True).get_future().then(reduce_again) for _ in range(10)
    ]
    for future in chained:
        assert torch.equal(future.wait(), total(world.size()) * world.size() ** 2)


def test_a_later_operation_follows_those_of_callbacks(world: Any) -> None:
    rank, size = world.rank(), world.size()
    for step in range(50):
        seen: list[Tensor] = []

        def reduce_largest(future: Any, seen: list[Tensor] = seen) -> None:
            largest = torch.tensor([float(rank)])
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            seen.append(largest)

        done = dist.all_reduce(numbered(rank), async_op=True).get_future().then(reduce_largest)
        tensor = torch.tensor([1.0])
        dist.all_reduce(tensor)
        done.wait()
        assert (tensor.item(), seen[0].item()) == (size, size - 1), step


def test_an_error_of_a_callback_is_that_of_its_future(world: Any) -> None:
    def fail(future: Any) -> None:
        raise KeyError("in the callback")

    with pytest.raises(RuntimeError, match="in the callback"):
        dist.all_reduce(numbered(world.rank()), async_op=True).get_future().then(fail).wait()
    dist.barrier()


def coalesced(operation: Callable[[int], None], async_ops: bool, device: torch.device | None = None) -> None:
    with _coalescing_manager(device=device, async_ops=async_ops) as manager:
        for number in range(3):
            operation(number)
    if async_ops:
        manager.wait()


@pytest.mark.parametrize("async_ops", [False, True])
def test_coalesced_collectives(world: Any, async_ops: bool) -> None:
    rank, size = world.rank(), world.size()
    tensors = [numbered(rank, 4 + number) for number in range(3)]
    coalesced(lambda number: dist.all_reduce(tensors[number]), async_ops)
    assert all(torch.equal(tensor, total(size, len(tensor))) for tensor in tensors)
    wholes = [torch.empty(size * (2 + number)) for number in range(3)]
    coalesced(lambda number: dist.all_gather_into_tensor(wholes[number], numbered(rank, 2 + number)), async_ops)
    for number, whole in enumerate(wholes):
        assert torch.equal(whole, torch.cat([numbered(other, 2 + number) for other in range(size)]))
    shares = [torch.empty(2 + number) for number in range(3)]
    coalesced(lambda number: dist.reduce_scatter_tensor(shares[number], numbered(rank, size * (2 + number))), async_ops)
    for number, share in enumerate(shares):
        assert torch.equal(share, total(size, size * (2 + number)).chunk(size)[rank])
    outputs = [[torch.empty(3) for _ in range(size)] for _ in range(3)]
    with _coalescing_manager(device=CPU, async_ops=async_ops) as manager:
        for number in range(3):
            world.allgather([outputs[number]], [numbered(rank, 3) + number])
    if async_ops:
        manager.wait()
    for number in range(3):
        assert all(torch.equal(outputs[number][other], numbered(other, 3) + number) for other in range(size))


def test_coalesced_methods_by_both_generations_of_names(world: Any) -> None:
    rank, size = world.rank(), world.size()
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        wholes = [torch.empty(2 * size), torch.empty(3 * size)]
        getattr(world, name)(wholes, [numbered(rank, 2), numbered(rank, 3)]).wait()
        assert torch.equal(wholes[1], torch.cat([numbered(other, 3) for other in range(size)]))
    for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        shares = [torch.empty(2), torch.empty(3)]
        getattr(world, name)(shares, [numbered(rank, 2 * size), numbered(rank, 3 * size)]).wait()
        assert torch.equal(shares[1], total(size, 3 * size).chunk(size)[rank])
    for name in ("all_gather_single", "_allgather_base"):
        whole = torch.empty(2 * size)
        getattr(world, name)(whole, numbered(rank, 2)).wait()
        assert torch.equal(whole, torch.cat([numbered(other, 2) for other in range(size)]))
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        share = torch.empty(2)
        getattr(world, name)(share, numbered(rank, 2 * size)).wait()
        assert torch.equal(share, total(size, 2 * size).chunk(size)[rank])
    for name in ("all_to_all_single", "alltoall_base"):
        output = torch.empty(size)
        getattr(world, name)(output, numbered(rank, size), [], []).wait()
        assert torch.equal(output, torch.stack([numbered(other, size)[rank] for other in range(size)]))
    rows = [[torch.empty(2), torch.empty(3)] for _ in range(size)]
    world.allgather_coalesced(rows, [numbered(rank, 2), numbered(rank, 3)]).wait()
    assert all(torch.equal(row[1], numbered(other, 3)) for other, row in enumerate(rows))


def test_messages_in_a_batch(world: Any) -> None:
    rank, size = world.rank(), world.size()
    for length in (1, 2**18):  # also longer than MPI sends without the receiver
        received = torch.empty(length, 2).t()  # not contiguous
        sent = numbered(rank, 2 * length).view(length, 2).t()
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(received, numbered((rank - 1) % size, 2 * length).view(length, 2).t())


def test_messages_from_any_rank(world: Any) -> None:
    rank, size = world.rank(), world.size()
    if rank == 0:
        found = {}
        first = torch.empty(3)
        work = dist.irecv(first, tag=7)  # nothing has been sent yet
        dist.barrier()
        work.wait()
        found[work.source_rank()] = first[0].item()
        for _ in range(size - 2):
            tensor = torch.empty(3)
            source = dist.recv(tensor, tag=7)
            found[source] = tensor[0].item()
        assert found == {other: 10.0 * other for other in range(1, size)}
    else:
        dist.barrier()
        dist.send(numbered(rank, 3), 0, tag=7)


def test_messages_advance_while_their_rank_waits_in_node_memory(world: Any) -> None:
    tensor, message = torch.ones(2**20), torch.full((2**21,), 3.0)
    dist.all_reduce(tensor)
    if world.rank() == 0:
        work = dist.isend(message, 1)
    elif world.rank() == 1:
        message.zero_()
        dist.recv(message, 0)  # the others are in the reduction by now
        assert message.min() == 3
    dist.all_reduce(tensor)
    if world.rank() == 0:
        work.wait()
    assert tensor.min() == world.size() ** 2


def test_a_message_outlives_its_handle(world: Any) -> None:
    if world.rank() == 0:
        for number in range(40):
            dist.isend(torch.full((2**16,), float(number)), 1)  # tensor and handle are dropped
        dist.barrier()
    else:
        tensor = torch.empty(2**16)
        for number in range(40 if world.rank() == 1 else 0):
            dist.recv(tensor, 0)
            assert tensor.min() == tensor.max() == number
        dist.barrier()


def test_the_profiler_shows_operations(world: Any) -> None:
    tensor = numbered(world.rank())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(tensor)
        work = dist.broadcast(tensor, 0, async_op=True)
        work.wait()
        dist.barrier()
        if world.rank() == 0:
            dist.send(tensor, 1)
        elif world.rank() == 1:
            dist.recv(tensor, 0)
    events = {event.name: event for event in profile.events() if event.name.startswith("hpctrain:")}
    message = {0: {"hpctrain:send"}, 1: {"hpctrain:recv"}}.get(world.rank(), set())
    assert set(events) == {"hpctrain:all_reduce", "hpctrain:broadcast", "hpctrain:barrier", *message}
    assert events["hpctrain:all_reduce"].is_async and events["hpctrain:all_reduce"].input_shapes == [[5]]
    assert events["hpctrain:all_reduce"].count == 1


def test_the_profiler_marks_more_messages_in_progress_than_torch_has_threads(world: Any) -> None:
    count = torch.get_num_interop_threads() + 2
    tensors = [numbered(number) for number in range(count)]
    with torch.autograd.profiler.profile() as profile:
        if world.rank() == 0:
            for work in [dist.isend(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)]:
                work.wait()
        elif world.rank() == 1:
            for tag, tensor in enumerate(tensors):
                dist.recv(tensor, 0, tag=tag)
        dist.barrier()
    sent = [event for event in profile.function_events if event.name == "hpctrain:send"]
    assert len(sent) == (count if world.rank() == 0 else 0)
    assert all(event.is_async for event in sent)


def test_groups_in_several_threads(world: Any) -> None:
    """Each thread has a group; ranks run them in different orders."""
    groups = [dist.new_group() for _ in range(3)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(100):
                length = 1 + 997 * (step % 7) * (number + 1)
                tensor = numbered(world.rank(), length) + number
                if step % 2:
                    dist.all_reduce(tensor, group=groups[number])
                else:
                    dist.all_reduce(tensor, group=groups[number], async_op=True).wait()
                expected = total(world.size(), length) + number * world.size()
                assert torch.allclose(tensor, expected), (number, step)
        except BaseException as error:
            errors.append(error)

    order = list(range(3))[:: 1 if world.rank() % 2 else -1]
    threads = [threading.Thread(target=work, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for group in groups:
        dist.destroy_process_group(group)


def test_asynchronous_operations_beside_synchronous_ones_of_another_group(world: Any) -> None:
    other = dist.new_group()
    works = []
    for step in range(50):
        pending = numbered(world.rank(), 20_000)
        works.append((pending, dist.all_reduce(pending, async_op=True)))
        tensor = numbered(world.rank(), 1 + 500 * (step % 5))
        dist.all_reduce(tensor, group=other)
        assert torch.equal(tensor, total(world.size(), len(tensor)))
    for pending, work in works:
        work.wait()
        assert torch.equal(pending, total(world.size(), 20_000))
    dist.destroy_process_group(other)


def test_two_threads_share_one_group(world: Any) -> None:
    tensors = [torch.ones(1000) for _ in range(2)]  # equal: the order of the threads does not matter
    threads = [threading.Thread(target=dist.all_reduce, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tensor.min() == tensor.max() == world.size() for tensor in tensors)
