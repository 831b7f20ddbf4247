"""Training on a fake device that runs as late as it may, compared with plain torch."""

from __future__ import annotations

from typing import Any

import torch
from fakes.async_comm import LateRank, memory_of
from fakes.streams import LazyStreams
from torch import Tensor, nn

from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.fsdp.param_group import GroupReduction, ParamGroup
from hpctrain.parallel.fsdp.setup import Parts
from hpctrain.parallel.fsdp.strategy import ShardedDataParallel
from hpctrain.parallel.fsdp.unshard import UnshardOnDemand

LAYERS, WIDTH = 5, 8
Log = list[Any]


class Net(nn.Module):
    """Linear layers in a row, and a parameter that belongs to the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x * self.scale


class Bench:
    """A model that trains on the fake device, and the same model in plain torch."""

    def __init__(self, model: nn.Module | None = None, **settings: Any) -> None:
        self.streams, self.log = LazyStreams(torch.device("cuda")), Log()
        self.open_reductions: list[int] = []  # number of groups with unsharded gradients, whenever one begins
        self.comm: Any = LateRank(self.streams, self.log)
        self.model, self.plain = model or Net(), Net()
        self.strategy = ShardedDataParallel(self.model, self.comm, ParallelSettings(**settings), parts=self._parts())
        self.residency: Any = self.strategy.components.residency
        self.comm.lasting.update(memory_of(group.shard_data) for group in self.strategy.components.groups)
        if model is None:
            for number, layer in enumerate(self.model.layers):  # type: ignore[union-attr, arg-type]
                layer.register_forward_pre_hook(lambda _, args, number=number: self.compute("compute", number))
                layer.register_forward_hook(lambda _, args, result, number=number: self._watch(result, number))

    def _watch(self, result: Tensor, number: int) -> None:
        if result.requires_grad:
            result.register_hook(lambda gradient: self.compute("back", number))

    def _parts(self) -> Parts:
        """Overwrite memory on the computing stream as soon as it is given back."""
        streams, counts, opened = self.streams, self.open_reductions, set[int]()

        class Group(ParamGroup):
            def free(self) -> None:
                streams.finish()
                super().free()

        class Reduction(GroupReduction):
            def open(self, memory: Tensor) -> None:
                super().open(memory)
                opened.add(self.number)
                counts.append(len(opened))

            def close(self) -> None:
                flat = self.flat
                assert flat is not None
                streams.enqueue(streams.current(), lambda: flat.fill_(torch.nan))
                streams.finish()
                opened.remove(self.number)
                super().close()

        return Parts(lambda device: streams, Group, Reduction)  # type: ignore[arg-type, return-value]

    def compute(self, kind: str = "", number: int = -1) -> None:
        """Let the device run only the work that must precede a computation."""
        self.streams.finish()
        if kind:
            self.log.append((kind, number, self.unsharded_layers()))

    def unsharded_layers(self) -> set[int]:
        """Return the layers whose whole parameters have memory; -1 is the model's own unit."""
        if not isinstance(self.residency, UnshardOnDemand):
            return set()
        return {
            unit.number - 1
            for unit in self.residency.units
            if any(group.flat.untyped_storage().nbytes() for group in unit.groups)
        }

    def names(self) -> dict[int, int]:
        """Return the layer of each buffer that holds whole parameters for a while."""
        return {memory_of(group.flat): unit.number - 1 for unit in self.residency.units for group in unit.groups}

    def gradients(self, batch: Tensor) -> None:
        for model in (self.model, self.plain):
            model(batch).square().mean().backward()

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            self.compute()
            optimizer.step()
            optimizer.zero_grad()

    def check_gradients(self) -> None:
        """Compare gradients with those of plain torch; a single rank holds all elements."""
        self.compute()
        for ours, theirs in zip(self.model.parameters(), self.plain.parameters()):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                assert torch.equal(ours.grad.flatten(), theirs.grad.flatten())

    def check_weights(self) -> None:
        with self.strategy.unshard():
            self.compute()
            for name, tensor in self.plain.state_dict().items():
                assert torch.equal(self.model.state_dict()[name], tensor), name


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
