"""Training with sharded parameters equals that of one process on the whole batch, and that of torch's strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import KINDS, assert_same, assert_same_on_all_ranks, share
from support.shards import FEW, VARIANTS, Variant, communicator, fits, shard, train, whole_weights
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hpctrain.parallel.clip import clip_whole_gradients
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.wrap import attach

pytestmark = [pytest.mark.ranks, pytest.mark.limit(60)]
STEPS = 50
UNITS = {"mlp": ("Linear",), "gpt": ("Block",)}


def mean(comm: Any, losses: list[float]) -> list[float]:
    return [sum(column) / comm.size for column in zip(*comm.all_gather_object(losses))]


def shares(kind: str, comm: Any) -> Any:
    batch = KINDS[kind][1]
    return lambda step: tuple(share(tensor, comm) for tensor in batch(step))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_mib", [4.0, 1e-6], ids=["few_groups", "one_group_per_parameter"])
def test_training_equals_that_of_one_process(comm_and_variant: Any, kind: str, bucket_mib: float) -> None:
    check_learning(*comm_and_variant, kind, 4, bucket_mib=bucket_mib)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["zero1", "fsdp", "fsdp_alone"])
def test_training_equals_that_of_one_process_over_many_steps(comm: Any, name: str) -> None:
    steps = STEPS if comm.size == 2 else 10  # errors on more ranks show early
    with communicator(comm, VARIANTS[name]) as own:
        check_learning(own, VARIANTS[name], "mlp", steps)
        check_learning(own, VARIANTS[name], "gpt", steps if name == "fsdp" else 10)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_in_pairs", "hybrid"])
def test_replicas_avoid_node_memory_if_one_node_lacks_space(
    comm: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replicas do without node memory: replicas with it would make different calls."""
    if not fits(name, comm.size):
        pytest.skip("it takes more ranks")
    if comm.rank == comm.size - 1:
        monkeypatch.setattr("hpctrain.comm.transport.reserve.free_bytes", lambda: 0)
    with communicator(comm, VARIANTS[name]) as own:
        check_learning(own, VARIANTS[name], "mlp", 4)


def check_learning(comm: Any, variant: Variant, kind: str, steps: int, **more: Any) -> None:
    make, batch, compare = KINDS[kind]
    alone, model = make(), make()
    with torch.no_grad():
        next(model.parameters()).add_(comm.rank)  # only rank 0's values count
    names = list(model.state_dict())
    strategy = shard(model, comm, variant, units=UNITS[kind], **more)
    assert list(model.state_dict()) == names
    ours = train(model, shares(kind, comm), compare, steps, clip=lambda: strategy.clip_grad_norm(0.5))
    plain = train(alone, batch, compare, steps, clip=lambda: clip_whole_gradients(alone, 0.5))
    torch.testing.assert_close(mean(comm, ours), plain, rtol=1e-5, atol=0)
    found = whole_weights(model, strategy)
    assert_same(found, alone.state_dict(), rtol=1e-4, atol=1e-5)
    assert_same_on_all_ranks(comm, found)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("kind", KINDS)
def test_without_clipping_the_bits_equal_those_of_ddp(comm: Any, kind: str) -> None:
    make, _, compare = KINDS[kind]
    results = []
    for name in ("ddp", "zero1", "zero2", "fsdp"):
        with communicator(comm, VARIANTS["fsdp"]) as own:
            model = make()
            attach(model, own, ParallelSettings(data=name))
            results.append(train(model, shares(kind, comm), compare, 5))
    assert all(result == results[0] for result in results)


def fully_sharded(model: nn.Module, kind: str, **options: Any) -> None:
    """Split a model at the same units with torch's fully_shard."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in list(model.modules())[1:]:
        if type(module).__name__ in UNITS[kind]:
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_that_of_torch_fully_shard(comm: Any, kind: str, process_group: None) -> None:
    make, _, compare = KINDS[kind]
    theirs = make()
    fully_sharded(theirs, kind)
    losses = train(theirs, shares(kind, comm), compare, 10)
    for name in filter(lambda name: fits(name, comm.size), FEW):
        with communicator(comm, VARIANTS[name]) as own:
            ours = make()
            shard(ours, own, VARIANTS[name], units=UNITS[kind])
            found = train(ours, shares(kind, comm), compare, 10)
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_equals_that_of_torch(comm_and_some_variant: Any, kind: str, process_group: None) -> None:
    comm, variant = comm_and_some_variant
    make, _, compare = KINDS[kind]
    theirs, ours = make(), make()
    fully_sharded(theirs, kind, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    strategy = shard(ours, comm, variant, units=UNITS[kind], mixed_precision="bfloat16")
    assert all(parameter.dtype is torch.float32 for parameter in ours.parameters())
    with strategy.unshard():
        assert all(parameter.dtype is torch.bfloat16 for parameter in ours.parameters())

    def widened(outputs: Tensor, targets: Tensor) -> Tensor:
        assert outputs.dtype is torch.bfloat16
        return compare(outputs.float(), targets)

    losses = train(ours, shares(kind, comm), widened, 5)
    # The first loss has the same rounded weights; later ones differ by the rounding of sums of 16-bit gradients.
    peers = train(theirs, shares(kind, comm), widened, 5)
    assert losses[0] == peers[0]
    torch.testing.assert_close(losses, peers, rtol=2e-2, atol=0)
    assert all(parameter.grad is None or parameter.grad.dtype is torch.float32 for parameter in ours.parameters())


def test_compressed_gradients_equal_rounded_gradients(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    make, _, compare = KINDS["mlp"]
    with communicator(comm, VARIANTS["fsdp"]) as own:
        peer, ours = make(), make()
        DataParallel(peer, own, ParallelSettings(compression="bfloat16"))
        shard(ours, comm, variant, units=("Linear",), compression="bfloat16")
        theirs = train(peer, shares("mlp", comm), compare, 5)
        # On one node both add the same rounded gradients in float32, in rank order, and round once.
        tolerance = 0 if variant.node_of_rank is None else 1e-3
        torch.testing.assert_close(train(ours, shares("mlp", comm), compare, 5), theirs, rtol=tolerance, atol=0)
