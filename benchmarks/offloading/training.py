"""Training of a GPT in bfloat16 with float32 master weights, with and without offload."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective, cross_entropy
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.wrap import attach

CLIP = 1.0
HERE, OFFLOAD = "on the device", "offload"
OPTIMIZER = OffloadSettings(optimizer=True)
EVERYTHING = OffloadSettings(optimizer=True, parameters=True, activations=True)


@dataclass(frozen=True)
class Shape:
    """Shape of the model and its batches."""

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50304
    batch: int = 8

    @property
    def config(self) -> GPTConfig:
        """Return the model's configuration."""
        return GPTConfig(self.layers, self.heads, self.width, self.context, self.vocabulary)

    @property
    def flop(self) -> float:
        """Return the operations of a step: 6 per parameter and token, plus attention (Narayanan et al., 2021)."""
        tokens = self.batch * self.context
        return 6.0 * tokens * self.config.parameters + 12.0 * tokens * self.layers * self.width * self.context

    def batch_of(self, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, and their successors."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocabulary, (self.batch, self.context + 1), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


BOTH = Shape(layers=24, width=2048, heads=16)  # 1.3 billion parameters: fits a large GPU with and without offload
TINY = Shape(layers=2, width=64, heads=2, context=32, vocabulary=128, batch=2)


class Training:
    """Model, its strategy and its optimizer on a device."""

    def __init__(self, shape: Shape, offload: OffloadSettings | None, device: torch.device) -> None:
        self.shape, self.device = shape, device
        with torch.device("meta"):
            model = GPT(shape.config)
        settings = ParallelSettings(data="zero1", units=("Block",), mixed_precision="bfloat16", recompute=True)
        if offload is not None and offload.parameters:
            settings = replace(settings, data="fsdp")
        self.strategy = attach(model, Communicator.world(), settings, device, offload=offload or OffloadSettings())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.losses: list[float] = []

    def step(self) -> None:
        """Run one step, and wait until the device and the host have finished."""
        inputs, targets = self.shape.batch_of(len(self.losses), self.device)
        loss = self.strategy.forward_backward(inputs, targets, Objective(cross_entropy))
        self.strategy.clip_grad_norm(CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, steps: int, warmup: int) -> list[float]:
        """Return the seconds of steps."""
        seconds = []
        for number in range(warmup + steps):
            began = time.perf_counter()
            self.step()
            if number >= warmup:
                seconds.append(time.perf_counter() - began)
        return seconds

    def close(self) -> None:
        """Release the memory."""
        self.strategy.detach()
        self.optimizer.state.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
