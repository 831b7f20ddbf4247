"""Detection of NaN and infinity in gradients before they reach the weights, and search for their origin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import NonFiniteError, SettingsError
from hpctrain.log import logger
from hpctrain.parallel.strategy import Strategy, numbers, trainable
from hpctrain.parallel.sync_batchnorm import own_statistics
from hpctrain.plain_tensors import as_parts
from hpctrain.transport.single import SingleTransport

Policy = Literal["abort", "skip", "rollback"]
SKIPS = 10  # consecutive skipped updates after which the run fails
ROLLBACKS = 3


def check_policy(strategy: Strategy, policy: Policy) -> None:
    """Raise ``SettingsError`` for a policy that needs all ranks together if the ranks are asynchronous."""
    if strategy.loose and policy == "rollback":
        raise SettingsError(
            'setting train.on_nonfinite = "rollback": asynchronous workers cannot roll back together; allowed are '
            "abort, skip",
            everywhere=True,
        )


class Health:
    """Monitor of the gradients before every update; after a reduction, all ranks make the same decision.

    ``norm`` is the global norm of the current step's gradients, once it has been computed.
    ``replay`` recomputes the current step's gradients; with it, the rank with the first bad value
    can be named.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, comm: Communicator, policy: Policy) -> None:
        self.model = model
        self.strategy = strategy
        # Asynchronous ranks decide alone.
        self.comm = Communicator(SingleTransport()) if strategy.loose else comm
        self.policy = policy
        self.norm: Tensor | None = None
        self.skipped = 0  # consecutive
        self.rollbacks = 0
        self.wants_rollback = False
        self.replay: Callable[[], object] | None = None
        self._buffers: list[Tensor] = []

    @property
    def _together(self) -> bool:
        """Return whether all ranks make the same decision."""
        return not self.strategy.loose

    def begin_step(self) -> None:
        """Clear the last norm; save buffers that a forward pass with NaN would corrupt beyond its own step."""
        self.norm = None
        if self.policy == "skip":
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]

    @as_parts
    def before_update(self, step: int) -> None:
        """Allow the update, or turn it into a no-op, or raise ``NonFiniteError`` on all ranks."""
        norm = self.norm if self.norm is not None else self.strategy.clip_grad_norm(float("inf"))
        self.norm = norm
        if bool(torch.isfinite(norm)):
            self.skipped = 0
            return
        where = self.find()
        self.strategy.drop_gradients()  # an optimizer does not change parameters without a gradient
        self._decide(f"gradient norm is {float(norm)} in step {step}: {where}")

    @as_parts
    def find(self) -> str:
        """Return a message with the rank and the name of the first value that is not finite. Collective.

        The reduction has mixed the gradients of the ranks, so each rank recomputes the step alone.
        """
        if self.replay is None:
            reduced = ((name, each.grad) for name, each in trainable(self.model) if each.grad is not None)
            everywhere = self.comm.all_gather_object(next(self._broken("averaged gradient", reduced), None))
            return next(filter(None, everywhere), "the sum over its elements overflows")
        self._compute_again(self.replay)
        found = next(self._broken("gradient", self.strategy.local_gradients()), None)
        for rank, text in enumerate(self.comm.all_gather_object(found)):
            if text:
                return f"on rank {rank} {text}"
        return "finite on each rank, but the sum over the ranks overflows"

    def _compute_again(self, replay: Callable[[], object]) -> None:
        self.strategy.drop_gradients()
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = [torch.device("cuda", torch.cuda.current_device())] if on_device else []
        # Later results must not depend on whether this check ran.
        with self.strategy.no_sync(), own_statistics(self.model), torch.random.fork_rng(devices):
            replay()

    def _broken(self, kind: str, gradients: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                yield f"the parameter {name} is not finite"
        for name, gradient in gradients:
            if not bool(torch.isfinite(numbers(gradient)).all()):
                yield f"the {kind} of {name} is not finite"

    def _decide(self, what: str) -> None:
        if self.policy == "abort":
            raise NonFiniteError(f"{what}; see train.on_nonfinite for alternatives", everywhere=self._together)
        if self.policy == "skip":
            for buffer, before in zip(self.model.buffers(), self._buffers):
                buffer.copy_(before)
            self.skipped += 1
            if self.skipped > SKIPS:
                raise NonFiniteError(f"{what}; {SKIPS} updates in a row were skipped", everywhere=self._together)
            if self.comm.rank == 0:
                logger.warning("%s; skipping this update", what)
            return
        self.rollbacks += 1
        if self.rollbacks > ROLLBACKS:
            raise NonFiniteError(f"{what}; rolled back {ROLLBACKS} times already", everywhere=True)
        self.wants_rollback = True
        if self.comm.rank == 0:
            logger.warning("%s; rolling back to the last checkpoint and skipping these samples", what)
