"""Offload from a GPU: the results of a run without it, up to rounding, in less device memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.wrap import attach

pytestmark = pytest.mark.gpu
WIDTH, LAYERS, BATCH, STEPS = 512, 8, 64, 12
OFF, HOST = OffloadSettings(), OffloadSettings(optimizer=True, device_fraction=0.0, piece_mib=1.0)
PARAMETERS = replace(HOST, parameters=True)
MIB = 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def run(
    comm: Any, offload: OffloadSettings, *, clip: float = 0.1, early: bool = False, rows: int = BATCH, **how: Any
) -> tuple[list[float], int]:
    """Return the losses of a training, and its peak memory on the device in MiB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS)))
    strategy = attach(
        model, comm, ParallelSettings(units=("Block",), **how), torch.device("cuda"), offload=offload
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if early:
        strategy.update_early(optimizer)
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2)).cuda()
    losses = []
    for _ in range(STEPS):
        strategy.announce_update()
        loss = mse_loss(model(inputs).float(), inputs.flip(1))
        loss.backward()
        if clip:
            strategy.clip_grad_norm(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    strategy.drain()
    strategy.detach()
    return [float(loss) for loss in losses], (torch.cuda.max_memory_allocated() - before) // MIB


@pytest.mark.parametrize("precision", ["none", "bfloat16"])
@pytest.mark.parametrize("offload", [HOST, PARAMETERS], ids=["optimizer", "parameters"])
def test_offload_trains_equally_in_less_memory(comm: Any, offload: OffloadSettings, precision: str) -> None:
    how: dict[str, Any] = {"data": "fsdp", "mixed_precision": precision}
    plain, most = run(comm, OFF, **how)
    losses, less = run(comm, offload, **how)
    close = 1e-5 if precision == "none" else 2e-2
    torch.testing.assert_close(losses, plain, rtol=close, atol=0)
    assert losses[-1] < 0.9 * losses[0] and less < 0.6 * most


def test_offloaded_parameters_need_less_device_memory(comm: Any) -> None:
    assert run(comm, PARAMETERS, data="fsdp")[1] < 0.8 * run(comm, HOST, data="zero2")[1]


@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2"])
def test_forms_that_keep_parameters_train_equally(comm: Any, data: str) -> None:
    plain, _ = run(comm, OFF, data=data)
    torch.testing.assert_close(run(comm, HOST, data=data)[0], plain, rtol=1e-5, atol=0)


def test_early_updates_train_equally(comm: Any) -> None:
    plain, _ = run(comm, HOST, data="fsdp", clip=0)
    assert run(comm, HOST, data="fsdp", clip=0, early=True)[0] == plain


@pytest.mark.parametrize("fraction", [0.5, 1.0, -1.0])
def test_a_share_that_stays_on_the_device_trains_equally(comm: Any, fraction: float) -> None:
    plain, _ = run(comm, OFF, data="fsdp")
    losses, _ = run(comm, replace(HOST, device_fraction=fraction), data="fsdp")
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)


def test_delayed_updates_equal_those_of_the_host(comm: Any) -> None:
    losses, _ = run(comm, replace(HOST, delayed=True), data="zero2")
    again, _ = run(comm, replace(PARAMETERS, delayed=True), data="fsdp")
    assert losses[0] == losses[1] != losses[2]  # the first update shows two passes later
    torch.testing.assert_close(again, losses, rtol=1e-5, atol=0)


def test_activations_are_freed_on_the_device(comm: Any) -> None:
    how: dict[str, Any] = {"data": "zero2", "recompute": True, "rows": 8192}
    plain, most = run(comm, HOST, **how)
    losses, less = run(comm, replace(HOST, activations=True), **how)
    given = 8192 * WIDTH * 4 // MIB  # MiB of each unit's input
    assert losses == plain and most - less > (LAYERS - 4) * given


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["zero1", "fsdp"])
def test_ranks_train_equally(comm: Any, data: str) -> None:
    own = comm.split(0)
    own.use_device(torch.device("cuda", torch.cuda.current_device()))
    plain, _ = run(own, OFF, data=data)
    torch.testing.assert_close(run(own, HOST, data=data)[0], plain, rtol=1e-5, atol=0)
    own.free()
