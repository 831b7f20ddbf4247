"""Training of the same model by several candidates, step by step in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from harness.stats import Seconds
from harness.turns import announce, interleave
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.comm.communicator import Communicator

FUSED, FOREACH = "AdamW fused", "AdamW foreach"


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of ``[batch, context, vocabulary]``."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Training:
    """Training of a model by AdamW, and the losses of its steps.

    ``fused`` training has torch's fused kernel. Otherwise the first step shows whether that kernel
    supports the tensors of the model; if not, torch's foreach implementation replaces it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
        *,
        fused: bool = True,
    ) -> None:
        self.model, self.losses = model, list[float]()
        self._loss, self._fused = loss, fused
        self._choose(FUSED)

    def _choose(self, name: str) -> None:
        self.optimizer_name, fused = name, name == FUSED
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, foreach=not fused)

    def step(self, inputs: Tensor, targets: Tensor, sample: Callable[[str], object] = lambda _: None) -> None:
        """Run one step, from forward to optimizer step; ``sample`` is called at the end of each phase."""
        loss = self._loss(self.model(inputs), targets)
        sample("end of forward")
        loss.backward()  # type: ignore[no-untyped-call]
        sample("end of backward")
        self._update()
        sample("end of step")
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def _update(self) -> None:
        try:
            self.optimizer.step()
        except (RuntimeError, NotImplementedError):
            if self._fused or self.optimizer_name == FOREACH or self.losses:
                raise
            self._choose(FOREACH)
            self.optimizer.step()


def time_all(
    comm: Communicator,
    candidates: Mapping[str, Training],
    turns: Mapping[str, Callable[[int], float]],
    rounds: int,
    warmup: int,
) -> tuple[list[Seconds], list[Seconds]]:
    """Time interleaved steps; return the seconds and the losses of all ranks, by candidate. Collective."""
    announce(f"timing {len(candidates)} candidates", comm)
    seconds = interleave(turns, rounds, warmup=warmup, comm=comm, what="rounds")
    gathered = comm.all_gather_object((seconds, {name: one.losses for name, one in candidates.items()}))
    return [times for times, _ in gathered], [losses for _, losses in gathered]
