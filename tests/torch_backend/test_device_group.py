"""Groups of two back ends, such as cpu:hpctrain,cuda:nccl: torch's gloo, on tensors that claim to be on a GPU.

torch itself makes the second back end, as it makes NCCL. Its tensors are in host memory, so that gloo can exchange
them. Tests that make the default group again use torch's back end "fake" instead: gloo's connections fail now and then
if groups are destroyed and made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the back end "fake"  # noqa: F401
from support.process_groups import TIMEOUT
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hpctrain.torch_backend.device_group import TwoBackends
from hpctrain.torch_backend.register import register
from hpctrain.torch_backend.store import MpiStore
from hpctrain.torch_backend.work import GroupWork

pytestmark = [pytest.mark.ranks(2), pytest.mark.limit(120)]
NAMES = "cpu:hpctrain,cuda:second"
FAKE = "cuda:fake,cpu:hpctrain"
DEVICE = torch.device("cuda:0")


class OnDevice(Tensor):
    """Tensor of the host that says it is on a GPU."""

    is_cuda = True
    device = DEVICE


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def on_host(tensor: Tensor) -> Tensor:
    return tensor


class Second:
    """Back end of torch under a name of its own; it remembers its stores."""

    stores: list[Any] = []

    @classmethod
    def create(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
        cls.stores.append(store)
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def fail(*_: Any) -> Any:
    raise RuntimeError("no such device")


@pytest.fixture(scope="module", autouse=True)
def second() -> Iterator[None]:
    """Register back ends for the tests of this file."""
    register()
    backend: Any = dist.Backend
    plugins = getattr(backend, "_plugins")
    for name, create in (("second", Second.create), ("failing", fail)):
        backend.register_backend(name, create, devices=["cuda"])
    yield
    for name in ("second", "failing"):
        backend.backend_list.remove(name)
        del plugins[name.upper()], backend.backend_type_map[name], backend.backend_capability[name]


@pytest.fixture(scope="module")
def group(second: None) -> Iterator[Any]:
    """Return the default group, for all tests but the last ones."""
    dist.init_process_group(NAMES, timeout=TIMEOUT)
    yield with_fake_memory(dist.group.WORLD)
    if dist.is_initialized():
        dist.destroy_process_group()


def types(group: Any) -> list[str]:
    return [each.type for each in getattr(group, "_device_types")]


def torchs_groups() -> Any:
    """Return torch's tables of groups."""
    return getattr(c10d, "_world")


def with_fake_memory(group: Any) -> Any:
    """Let the second back end take the tensors of host memory that claim to be on a GPU."""
    backend = getattr(group.other, "_get_backend")(DEVICE)
    register_backend = getattr(group.other, "_register_backend")
    register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group


def test_tensors_of_each_device_go_to_their_back_end(group: Any) -> None:
    rank = dist.get_rank()
    assert dist.get_backend() == NAMES and types(group) == ["cpu", "cuda"]
    assert isinstance(getattr(group, "_get_backend")(DEVICE), dist.ProcessGroupGloo)
    host, device = torch.full((5,), rank + 1.0), torch.full((5,), rank + 3.0)
    ours: Any = dist.all_reduce(host, async_op=True)
    ours.wait()
    assert host.tolist() == [3.0] * 5 and isinstance(ours, GroupWork)
    second: Any = dist.all_reduce(on_device(device), async_op=True)
    second.wait()
    assert device.tolist() == [7.0] * 5 and not isinstance(second, GroupWork)
    whole = torch.zeros(4)
    dist.all_gather_into_tensor(on_device(whole), on_device(torch.full((2,), float(rank))))
    parts = [on_device(torch.zeros(2)) for _ in range(2)]
    dist.all_gather(parts, on_device(torch.full((2,), float(rank))))
    shares = torch.zeros(2)
    dist.reduce_scatter_tensor(on_device(shares), on_device(torch.arange(4.0)))
    assert whole.tolist() == [0, 0, 1, 1] and torch.stack(parts).tolist() == [[0, 0], [1, 1]]
    assert shares.tolist() == [4 * rank, 4 * rank + 2]
    store = Second.stores[0]  # of its rendezvous
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, MpiStore)


def test_messages_and_batches_of_them(group: Any) -> None:
    rank = dist.get_rank()
    for place in (on_device, on_host):
        target, source = torch.zeros(3), torch.full((3,), float(rank))
        batch = [dist.P2POp(dist.isend, place(source), 1 - rank), dist.P2POp(dist.irecv, place(target), 1 - rank)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert target.tolist() == [1.0 - rank] * 3


class Recorder:
    """Group of torch, as ours calls it, that notes the calls; it knows the former names of operations only."""

    bound_device_id: Any = None
    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single", "recvAnysource"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            return self if name == "_get_backend" else name

        return call

    def barrier(self, opts: Any) -> None:
        self.calls.append(f"barrier {opts.device}")


@pytest.fixture
def recorder(group: Any) -> Iterator[Recorder]:
    """Return a recorder in the place of the second group."""
    other, recorder = group.other, Recorder()
    group.forward_to(recorder, ["cuda"])
    yield recorder
    group.forward_to(other, ["cuda"])


def test_a_batch_on_devices_is_sent_as_one(group: Any, recorder: Recorder) -> None:
    there, peer = on_device(torch.zeros(3)), 1 - dist.get_rank()
    works: list[Any] = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, there, peer), dist.P2POp(dist.irecv, there, peer)]
    )
    assert recorder.calls == ["_get_backend", "_start_coalescing", "send", "recv", "_end_coalescing"]
    assert works == ["_end_coalescing"]


def test_barriers_use_the_device_that_is_given(group: Any, recorder: Recorder) -> None:
    dist.barrier()  # by ours: the group has a back end for the host
    dist.monitored_barrier()
    assert recorder.calls == []
    options = dist.BarrierOptions()
    options.device = torch.device("cuda:1")  # by dist.barrier(device_ids=[1]) on a machine with GPUs
    group.barrier(options)
    recorder.bound_device_id = DEVICE  # by init_process_group(device_id=...)
    dist.barrier()
    assert recorder.calls == ["barrier cuda:1", "barrier cuda:0"]


def test_new_groups_meshes_and_objects(group: Any) -> None:
    rank = dist.get_rank()
    part = dist.new_group([0, 1])
    alone = [dist.new_group([each]) for each in range(2)]  # of which this rank is a member of one
    assert isinstance(part, TwoBackends) and isinstance(alone[rank], TwoBackends)
    assert len(torchs_groups().pg_map) == 3 and len(torchs_groups().tags_to_pg[""]) == 3  # torch's groups are hidden
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=part)  # by ours: the other one cannot before the next line
    assert objects == [{"rank": 0}, {"rank": 1}]
    device = torch.ones(2)
    dist.all_reduce(on_device(device), group=with_fake_memory(part))
    dist.all_reduce(on_device(device), group=with_fake_memory(alone[rank]))
    assert device.tolist() == [2.0, 2.0] and dist.get_backend(part) == NAMES
    dist.destroy_process_group(part)
    assert len(torchs_groups().pg_map) == 2
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("data",))
    assert mesh.get_group() is group
    square = init_device_mesh("cuda", (1, 2), mesh_dim_names=("replicas", "shards"))
    shards = square["shards"].get_group()
    total = torch.ones(2)
    functional = getattr(torch.ops, "_c10d_functional")
    functional.all_reduce_(on_device(total), "sum", with_fake_memory(shards).group_name)
    dist.barrier(shards)
    functional.wait_tensor(total)
    assert total.tolist() == [2.0, 2.0]


def test_losses_of_ddp_equal_those_of_gloo(group: Any) -> None:
    def losses(group: Any) -> list[str]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator, found = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(3):
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item().hex())
        return found

    assert losses(group) == losses(dist.new_group(backend="gloo", timeout=TIMEOUT))


def test_names_of_other_versions_of_torch(group: Any, recorder: Recorder) -> None:
    there = on_device(torch.ones(4))
    for name in ("all_gather_single", "_allgather_base", "all_to_all_single", "reduce_scatter_single"):
        getattr(group, name)(there, there)
    group.recvAnysource([there], 0)
    group.scatter([there], [])
    group.gather([], [there])
    expected = ["_allgather_base", "_allgather_base", "alltoall_base", "_reduce_scatter_base"]
    assert recorder.calls == [*expected, "recv_anysource", "scatter", "gather"]
    recorder.calls.clear()
    group.set_timeout(TIMEOUT)
    assert recorder.calls == ["set_timeout"]


# Default groups that are made again -----------------------------------------------------------------------------------


@pytest.fixture
def destroyed(group: Any) -> Iterator[None]:
    """Destroy the default group of the other tests, and that of the test."""
    if dist.is_initialized():
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_abort_and_destruction_end_both_groups(destroyed: None) -> None:
    dist.init_process_group(FAKE, timeout=TIMEOUT)
    group: Any = dist.group.WORLD
    assert dist.get_backend() == "cpu:hpctrain,cuda:fake"
    recorder = Recorder()
    group.forward_to(recorder, ["cuda"])
    group.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    assert recorder.calls == ["abort", "shutdown"] and not torchs_groups().pg_map


def test_a_second_back_end_that_fails_leaves_no_group(destroyed: None) -> None:
    with pytest.raises(RuntimeError, match="no such device"):
        dist.init_process_group("cpu:hpctrain,cuda:failing", timeout=TIMEOUT)
    assert not dist.is_initialized() and not torchs_groups().pg_map
    for _ in range(2):
        dist.init_process_group(FAKE, timeout=TIMEOUT)
        host = torch.ones(1)
        dist.all_reduce(host)
        assert host.item() == 2.0
        dist.destroy_process_group()
    assert not torchs_groups().pg_map
