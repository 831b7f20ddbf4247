"""Models on the meta device: they train like models with memory, and are never whole on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import assert_same, share, token_loss, tokens
from support.shards import VARIANTS, communicator, shard, train, whole_weights
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.setup import IN_FLIGHT
from hpctrain.parallel.wrap import attach

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]


def make(device: str, tied: bool = True, **shape: int) -> Any:
    torch.manual_seed(7)
    sizes = {"vocab_size": 31, "context": 8, "layers": 2, "heads": 2, "width": 16, **shape}
    with torch.device(device):
        return GPT(GPTConfig(**sizes, dropout=0.0, tied=tied))  # type: ignore[arg-type]


def learned(comm: Any, variant: Any, device: str, tied: bool, **more: Any) -> tuple[list[float], dict[str, Any]]:
    model = make(device, tied)
    strategy = shard(model, comm, variant, units=("Block",), **more)
    losses = train(model, lambda step: tuple(share(each, comm) for each in tokens(step)), token_loss, 3)
    return losses, whole_weights(model, strategy)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_bits_equal_those_of_a_model_built_with_memory(comm_and_variant: Any, tied: bool) -> None:
    comm, variant = comm_and_variant
    (losses, found), (expected, weights) = (learned(comm, variant, device, tied) for device in ("meta", "cpu"))
    assert losses == expected
    assert_same(found, weights, rtol=0, atol=0)


def test_the_bits_are_equal_in_mixed_precision(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    (losses, _), (expected, _) = (
        learned(comm, variant, device, True, mixed_precision="bfloat16") for device in ("meta", "cpu")
    )
    assert losses == expected


@pytest.mark.parametrize("data", ["ddp", "zero1", "fsdp"])
def test_an_attached_model_draws_the_same_values(comm: Any, data: Any) -> None:
    with communicator(comm, VARIANTS["fsdp"]) as own:
        results = []
        for device in ("meta", "cpu"):
            model = make(device)
            attach(model, own, ParallelSettings(data=data))
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            results.append(model(tokens()[0]).detach())
        assert torch.equal(*results)


def test_buffers_are_initialised_on_all_ranks(comm_and_some_variant: Any) -> None:
    comm, variant = comm_and_some_variant
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    torch.manual_seed(comm.rank)
    shard(model, comm, variant)
    assert model[1].running_var.tolist() == [1] * 8 and model[1].running_mean.tolist() == [0] * 8
    model(torch.randn(4, 8)).sum().backward()
    assert int(model[1].num_batches_tracked) == 1


# Memory ---------------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Tracker of the memory of all tensors that torch creates on the host, and of its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in storages((args, kwargs))}  # such as node memory, which is not torch's
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in given:
                self.known.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self.present())
        return result

    def present(self) -> int:
        """Return the bytes that are held now."""
        total = 0
        for key, weak in list(self.known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.known[key]
            else:
                total += storage.nbytes()
        return total


def storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the host memory of the tensors in a nest of values."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [leaf.untyped_storage() for leaf in leaves if leaf.device.type == "cpu"]


def test_the_tracker_sees_allocations_and_frees() -> None:
    with Watch() as watch:
        one = torch.empty(1000)
        assert watch.present() == 4000
        two = one + one
        assert watch.present() == 8000
        del two
        one.untyped_storage().resize_(0)
        assert watch.present() == 0 and one[:0].sum() == 0
    assert watch.peak == 8000


@pytest.mark.parametrize("name", ["fsdp", "fsdp_alone"])
def test_no_rank_ever_holds_the_whole_model_in_memory(comm: Any, name: str) -> None:
    shape = {"layers": 12, "width": 64, "heads": 4}
    model, limit = make("meta", **shape), 0.02
    with communicator(comm, VARIANTS[name]) as own:
        total = sum(parameter.nbytes for parameter in model.parameters())
        with Watch() as watch:
            strategy = shard(model, own, VARIANTS[name], units=("Block",), bucket_mib=limit)
        groups = strategy.components.groups
        modules = make("cpu", **shape).modules()
        module = max(sum(each.nbytes for each in module.parameters(recurse=False)) for module in modules)
        # torch does not allocate node memory, so neither the shards nor the buffers of gradients are counted.
        share = sum(group.shard_data.nbytes for group in groups) if name == "fsdp_alone" else 0
        group = max(group.layout.numel * 4 for group in groups)
        buffers = max(IN_FLIGHT * int(limit * 2**20), group) if name == "fsdp_alone" else 0
        small = 2**12  # digests, counts, fences
        assert watch.peak <= share + max(2 * group + module, buffers) + small
        assert share + 2 * group + module < 0.9 * total, "the model is too small to show anything"
        assert own.size < 3 or own.rank == 0 or watch.peak < 0.7 * total
