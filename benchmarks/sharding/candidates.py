"""Candidates: one model each, with its strategy and the fastest optimizer that it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from sharding import peers
from sharding.names import ALONE, CANDIDATES, DDP, FSDP, PASSING, TORCH_DDP, TORCH_FSDP, ZERO1, ZERO2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.wrap import attach

LEARNING_RATE = 1e-4
FUSED, FOREACH = "AdamW fused", "AdamW foreach"
_SETTINGS = {
    DDP: ParallelSettings(data="ddp"),
    ZERO1: ParallelSettings(data="zero1"),
    ZERO2: ParallelSettings(data="zero2"),
    FSDP: ParallelSettings(data="fsdp"),
    PASSING: ParallelSettings(data="fsdp"),
}
_PEERS: dict[str, Callable[[nn.Module], nn.Module]] = {TORCH_DDP: peers.ddp, TORCH_FSDP: peers.fsdp}


class Candidate:
    """Training setup of the same model; all ranks construct each candidate and call its ``step`` together."""

    def __init__(self, name: str, model: nn.Module, comm: Communicator) -> None:
        self.name = name
        self.strategy: Strategy | None = None
        self._own: Communicator | None = None  # a communicator that only this candidate uses
        if name in _SETTINGS:
            ranks = self._own = apart(comm) if name == PASSING else None
            self.strategy = attach(model, ranks or comm, _SETTINGS[name])
        self.model = _PEERS.get(name, _nothing)(model)
        self.losses: list[float] = []
        self._choose(fused=True)

    def _choose(self, *, fused: bool) -> None:
        self.optimizer_name = FUSED if fused else FOREACH
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused)

    def step(self, inputs: Tensor, targets: Tensor, look: Callable[[str], None] = lambda _: None) -> None:
        """Run one step, from forward to optimizer step; ``look`` is called at the end of each phase."""
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        look("end of forward")
        loss.backward()  # type: ignore[no-untyped-call]
        look("end of backward")
        self._update()
        look("end of step")
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def _update(self) -> None:
        try:
            self.optimizer.step()
        except (RuntimeError, NotImplementedError):
            if self.strategy is not None or self.optimizer_name == FOREACH or self.losses:
                raise
            self._choose(fused=False)  # the first step of a candidate whose tensors the fused kernel does not support
            self.optimizer.step()

    def close(self) -> None:
        """Remove hooks and free the candidate's own communicator. Collective."""
        if self.strategy is not None:
            self.strategy.detach()
        if self._own is not None:
            self._own.free()


def make(names: Iterable[str], model: Callable[[], nn.Module], comm: Communicator) -> dict[str, Candidate]:
    """Return candidates by name, in the order of the tables."""
    wanted = set(names)
    return {name: Candidate(name, model(), comm) for name in CANDIDATES.values() if name in wanted}


def by_torch(names: Iterable[str]) -> bool:
    """Return whether any of these needs torch.distributed."""
    return any(name in _PEERS for name in names)


def apart(comm: Communicator) -> Communicator:
    """Return another communicator of the same ranks, each of which treats itself as alone on its node."""
    from hpctrain.comm.transport.mpi import MpiTransport

    class Apart(MpiTransport):
        def split_node(self) -> MpiTransport:
            node = self.split(self.rank, 0)
            assert isinstance(node, MpiTransport)
            return node

    world: Any = comm.transport
    return Communicator(Apart(world.comm))


def _nothing(model: nn.Module) -> nn.Module:
    return model


def synchronised(name: str) -> bool:
    """Return whether a candidate's ranks train one model together, so that its losses can be compared."""
    return name != ALONE
