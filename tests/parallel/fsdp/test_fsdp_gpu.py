"""Sharded parameters on GPUs: units are gathered on demand, collectives overlap, results equal one process's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from support.replicas import hooked_modules
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.wrap import attach

pytestmark = pytest.mark.gpu
BATCH, WIDTH, STEPS = 12, 64, 10
DATA = ("zero1", "zero2", "fsdp")
Data = Literal["zero1", "zero2", "fsdp"]


def make(width: int = WIDTH, layers: int = 4) -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(layers)]
    return nn.Sequential(*blocks).cuda()


def train(model: nn.Module, inputs: torch.Tensor, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        loss = mse_loss(model(inputs), inputs.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.fixture(params=["staged", "chosen"])
def device_comm(comm: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a communicator that stages GPU tensors through the host, and one that selects its fastest path."""
    own = comm.split(0)
    if request.param == "chosen":
        own.use_device(torch.device("cuda", torch.cuda.current_device()))
    yield own
    own.free()


@pytest.mark.ranks
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("data", DATA)
def test_training_equals_that_of_one_process(device_comm: Any, data: Data, prefetch: int) -> None:
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    plain, model = train(make(), inputs), make()
    settings = ParallelSettings(data=data, units=("Sequential",), prefetch=prefetch)
    ShardedDataParallel(model, device_comm, settings, torch.device("cuda", torch.cuda.current_device()))
    losses = train(model, inputs.chunk(device_comm.size)[device_comm.rank])
    columns = zip(*device_comm.all_gather_object(losses))
    torch.testing.assert_close([sum(column) / device_comm.size for column in columns], plain, rtol=1e-5, atol=1e-7)
    assert all(parameter.is_cuda for parameter in model.parameters())


@pytest.mark.ranks
@pytest.mark.parametrize("data", DATA)
def test_runs_are_reproducible_bit_for_bit(device_comm: Any, data: Data) -> None:
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
    results = []
    for _ in range(2):
        model = make()
        settings = ParallelSettings(data=data, units=("Sequential",))
        ShardedDataParallel(model, device_comm, settings, torch.device("cuda", torch.cuda.current_device()))
        results.append(train(model, inputs.chunk(device_comm.size)[device_comm.rank]))
    assert results[0] == results[1]


@pytest.mark.ranks(2)
def test_a_model_trains_in_memory_that_is_too_small_for_ddp(device_comm: Any) -> None:
    width, layers = 2048, 24  # 200 million parameters: 3.2 GB of weights, gradients and moments
    whole = torch.cuda.get_device_properties(0).total_memory
    fits = (2.4 * 2**30) / whole

    def attempt(data: Literal["ddp", "fsdp"]) -> list[float]:
        torch.cuda.empty_cache()
        model = make(width, layers // 2)
        device = torch.device("cuda", torch.cuda.current_device())
        attach(model, device_comm, ParallelSettings(data=data, units=("Sequential",)), device)
        return train(model, torch.ones(1, width, device=device), 3)

    torch.cuda.set_per_process_memory_fraction(fits)
    try:
        losses = attempt("fsdp")
        assert losses[-1] < losses[0]
        with pytest.raises(torch.OutOfMemoryError):
            attempt("ddp")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_one_rank_on_one_gpu_gets_no_hooks(comm: Any) -> None:
    model = make()
    attach(model, comm, ParallelSettings(data="fsdp"), torch.device("cuda"))
    assert not hooked_modules(model)
    train(model, torch.randn(4, WIDTH, device="cuda"), 1)
