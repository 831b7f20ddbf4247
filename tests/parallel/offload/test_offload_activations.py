"""Offloaded inputs of recomputed units: kept on the host, restored unchanged, and not kept on the device."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes.copy_device import LateDevice
from support.offloading import HOST, Loop, Model, attached
from torch import Tensor, nn

from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.offload.transfer import Activations, Buffers, Transfer
from hpctrain.parallel.recompute import recompute, set_save_context

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
ACTIVATIONS = OffloadSettings(activations=True)


def allocate(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)


def offloading(model: Model, device: LateDevice) -> list[int]:
    """Make the blocks of a model offload their inputs from a fake device with late copies; return buffer sizes."""
    allocated: list[int] = []

    def counted(numel: int, dtype: torch.dtype) -> Tensor:
        allocated.append(numel)
        return allocate(numel, dtype)

    recompute(list(model.blocks))
    activations = Activations(Transfer(device), Buffers(counted), CPU)
    for block in model.blocks:
        set_save_context(block, activations.save_context)
    return allocated


@pytest.mark.parametrize("offload", [ACTIVATIONS, replace(HOST, activations=True)], ids=["alone", "with updates"])
def test_training_gives_the_same_bits(comm: Any, offload: OffloadSettings) -> None:
    loop = Loop(clip=0.05, accumulate=2)
    loop.run(attached(comm, offload, recompute=True)).check_same(loop.run(attached(comm)))


@pytest.mark.ranks
def test_units_gathered_on_demand_give_the_same_bits(own: Any) -> None:
    loop = Loop(clip=0.05)
    offload = replace(HOST, parameters=True, activations=True)
    loop.run(attached(own, offload, data="fsdp", recompute=True)).check_same(loop.run(attached(own, data="fsdp")))


def test_no_copy_is_read_before_it_is_complete() -> None:
    plain, model, device = Model(), Model(), LateDevice()
    allocated = offloading(model, device)
    for step in range(3):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        for each in (plain, model):
            each.zero_grad()
            each(inputs).square().sum().backward()
        for one, other in zip(plain.parameters(), model.parameters()):
            assert one.grad is None and other.grad is None or torch.equal(one.grad, other.grad)
        gc.collect()
    assert len(allocated) == 3  # one per block, whatever the number of steps


def test_backward_prefetches_the_previous_unit() -> None:
    model, device = Model(), LateDevice()
    offloading(model, device)
    loss = model(torch.randn(8, 20)).sum()
    device.log.clear()
    order: list[str] = []
    for number, block in enumerate(model.blocks):
        block.fc.register_forward_hook(lambda *_, number=number: order.append(f"block {number}"))
    device.tell = order.append
    loss.backward()
    ups = [entry for entry in order if entry.startswith(("up", "block"))]
    assert ups == ["up", "up", "block 2", "up", "block 1", "block 0"]  # its own, and the next one's before it computes


def test_the_device_keeps_no_inputs_of_units() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(20, 20)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(weakref.ref(x))
            return torch.tanh(self.layer(x))

    def alive(offloaded: bool) -> int:
        seen.clear()
        model = nn.Sequential(*(Watching() for _ in range(4)))
        recompute(list(model))
        activations = Activations(Transfer(LateDevice()), Buffers(allocate), CPU)
        for unit in model if offloaded else ():
            set_save_context(unit, activations.save_context)
        loss = model(torch.ones(2, 20)).sum()
        gc.collect()
        found = sum(reference() is not None for reference in seen)
        loss.backward()
        return found

    assert alive(offloaded=True) == 0 < alive(offloaded=False)
