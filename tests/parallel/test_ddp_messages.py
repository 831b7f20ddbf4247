"""Messages of data parallelism: number of accesses to other ranks' memory per step, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.replicas import TINY, Branches, Mixed, backward, make_mlp, part
from torch import Tensor, nn

from hpctrain.comm.transport.base import Recorder
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel

pytestmark = pytest.mark.ranks
SIZES = [170, 17, 391, 23, 230, 10]  # elements of the perceptron's parameters


@pytest.fixture(scope="module")
def comm(comm: Any) -> Iterator[Any]:
    """Return a communicator of the ranks of this node: these tests count the bytes in its memory."""
    node = comm.split(comm.node)
    yield node
    node.free()


def lines(numel: int, itemsize: int = 4) -> int:
    """Return the number of cache lines of so many elements."""
    return -(-numel * itemsize // 64)


def written(comm: Any, bucket: int) -> int:
    """Return the bytes that this rank writes for the others in a bucket of so many lines."""
    share = -(-bucket // comm.size)
    own = min(bucket, (comm.rank + 1) * share) - min(bucket, comm.rank * share)
    return 64 * own * (comm.size - 1)


def second_step(comm: Any, settings: ParallelSettings) -> tuple[Recorder, Recorder]:
    """Return the recorder of the first two steps of the perceptron."""
    model, recorders = make_mlp(), []
    DataParallel(model, comm, settings)
    for step in range(2):
        with comm.recording() as recorder:
            backward(model, part(comm, comm.rank, step))
        recorders.append(recorder)
    return recorders[0], recorders[1]


@pytest.mark.parametrize("compression, itemsize", [("none", 4), ("bfloat16", 2)])
def test_one_bucket_is_one_reduction(comm: Any, compression: Any, itemsize: int) -> None:
    bucket = sum(lines(size, itemsize) for size in SIZES) + lines(len(SIZES), itemsize)
    for recorder in second_step(comm, ParallelSettings(compression=compression)):
        assert recorder.calls == {"window": 1}
        assert recorder.bytes == {"window": written(comm, bucket)}


def test_one_bucket_per_parameter_is_one_reduction_each(comm: Any) -> None:
    for recorder in second_step(comm, TINY):
        assert recorder.calls == {"window": len(SIZES)}
        assert recorder.bytes == {"window": sum(written(comm, lines(size) + 1) for size in SIZES)}


def test_buckets_have_the_size_of_the_setting(comm: Any) -> None:
    # 1000 bytes: in the order of the backward pass 10 + 230, 23, 391, 17 + 170 elements.
    recorder = second_step(comm, ParallelSettings(bucket_mib=1000 / 2**20))[1]
    groups = [[10, 230], [23], [391], [17, 170]]
    wanted = [sum(map(lines, group)) + 1 for group in groups]
    assert recorder.calls == {"window": 4}
    assert recorder.bytes == {"window": sum(written(comm, bucket) for bucket in wanted)}


def test_unused_parameters_cost_no_extra_message(comm: Any) -> None:
    model = Branches()
    DataParallel(model, comm)
    for step in range(3):
        with comm.recording() as recorder:
            backward(model, part(comm, comm.rank, step), 1, *("abc" if comm.rank else "a"))
        assert recorder.calls == {"window": 1}


def test_buffers_are_sent_once_per_forward_pass_in_one_message_per_dtype(comm: Any) -> None:
    model = nn.Sequential(make_mlp(), nn.BatchNorm1d(10), nn.BatchNorm1d(10))
    strategy = DataParallel(model, comm)
    with comm.recording() as recorder:
        model(part(comm, comm.rank)[0])
    assert recorder.calls == {"broadcast": 2} and recorder.bytes == {"broadcast": 4 * 40 + 8 * 2}
    with comm.recording() as recorder, strategy.no_sync():
        model(part(comm, comm.rank)[0])
    assert not recorder.calls


# Reductions of the two later layers have begun, except for a weight whose gradient is transposed at the end.
@pytest.mark.parametrize("kind, first, begun, all_of_them", [(make_mlp, "1", 3, 6), (Mixed, "narrow", 4, 7)])
def test_reductions_overlap_the_backward_pass(
    comm: Any, kind: Callable[[], nn.Module], first: str, begun: int, all_of_them: int
) -> None:
    model, seen = kind(), []
    DataParallel(model, comm, TINY)

    def when_the_first_layer_is_all_that_is_left(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.append(comm._host.memory.node.memory._started))

    model.get_submodule(first).register_forward_hook(when_the_first_layer_is_all_that_is_left)
    for step in range(2):
        model.zero_grad()
        before = comm._host.memory.node.memory._started
        backward(model, part(comm, comm.rank, step))
    assert seen[1] - before >= begun and comm._host.memory.node.memory._started - before == all_of_them
