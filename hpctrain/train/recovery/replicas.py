"""Steps that are repeated without copies of weights and optimizer states, as all ranks hold them under ``ddp``.

When a rank has died, each other rank has completed the body of the loop: it has made the update of
this step, or it has not. A rank that has not still holds the state before the step: the others get
it from this rank, and all repeat the step. If all have made the update, the step is complete, but
for the exchange at its end. This requires that a step has one update, that nothing else changes
the weights before it, and that no collective follows it. Steps of other programs need copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import CommunicationError
from hpctrain.log import logger
from hpctrain.train.replicas import Sums, bit_sums
from hpctrain.train.state import TrainState
from hpctrain.train.state_copy import StateCopy

# A rank's weights and optimizer states are those before the update of the step, or after it, or anything else.
Standing = Literal["before", "after", "unclear"]


class Replicas:
    """Weights and optimizer states of this rank, which are equal on all ranks between two steps.

    ``copy`` is of the rest of the state, and of the weights as well if a step has turned out to need that.
    """

    def __init__(self, state: TrainState, copy: StateCopy) -> None:
        self._state, self._copy = state, copy
        optimizers = list(state.optimizers.values())
        self._why = ""  # why copies of the weights are needed
        if len(optimizers) != 1 or isinstance(optimizers[0], torch.optim.LBFGS):
            self._why = "a step has several updates"
        copy.weights = bool(self._why)
        self._sums: Sums = {}  # of the weights before this step
        self._updates = 0  # in this step
        self._calls = 0  # collectives of the strategies up to the end of the update
        self._unclear = False  # whether this rank has neither the state before this step nor that after it
        self._first = True  # whether no step has ended yet
        self._after: Sums = {}  # sums after the update of the first step

    def begin_step(self) -> None:
        """Note the state before a step, before the copy is taken."""
        self._updates, self._unclear = 0, False
        if self._copy.weights:
            return
        sums = bit_sums(self._parameters())
        updated = {id(parameter) for parameter in self._updated()}
        for name, parameter in self._parameters().items():
            if self._sums.get(name, sums[name]) != sums[name] and id(parameter) not in updated:
                self._copy.moving.add(id(parameter))  # such as an average of weights
        self._sums = sums

    def begin_update(self, *, has_closure: bool) -> None:
        """Note that an optimizer is about to step."""
        self._updates += 1
        if self._updates > 1 or has_closure:
            self._needs_copies("a step has several updates")
        elif self._first and not self._copy.weights and self._changed(self._sums):
            self._needs_copies("the program changes weights before the update")

    def end_update(self, calls: int) -> None:
        """Note that an optimizer has stepped; ``calls`` counts the collectives of the strategies so far."""
        self._calls = calls
        if self._first and not self._copy.weights:
            self._after = bit_sums(self._parameters())

    def end_body(self, calls: int, *, failed: bool) -> None:
        """Note that the body of the loop has ended; ``failed`` if a collective of a strategy has failed in it."""
        if not self._updates:
            return
        self._unclear |= failed and not self._copy.weights
        if calls != self._calls:
            self._needs_copies(
                "the program computes gradients or evaluates after the update, within the loop", unclear=False
            )
        elif self._first and not self._copy.weights and self._changed(self._after):
            self._needs_copies("the program changes weights after the update", unclear=False)

    def end_step(self) -> None:
        """Let the next step be copied if this one has turned out to need that."""
        if self._why and not self._copy.weights:
            self._copy.weights = True
            if self._state.comm.rank == 0:
                logger.info("weights and optimizer states are copied before each step, because %s", self._why)
        self._first, self._after = False, {}

    @property
    def standing(self) -> Standing:
        """State that this rank holds when a rank has died in this step."""
        if self._copy.weights:
            return "before"
        if self._unclear:
            return "unclear"
        if self._updates:
            return "after"
        return "unclear" if self._changed(self._sums, copied=False) else "before"

    def go_back(self, everyone: Sequence[Standing], comm: Communicator) -> bool:
        """Restore the state before the step, unless all ranks have made its update; return whether to repeat it.

        Collective. Raises ``CommunicationError`` on all ranks if no rank has that state.
        """
        if all(standing == "after" for standing in everyone):
            return False
        root = next((rank for rank, standing in enumerate(everyone) if standing == "before"), None)
        if root is None:
            raise CommunicationError(
                f"no rank that is left holds the state before step {self._state.step + 1}, so it cannot be repeated "
                f"({self._why or 'the program changes weights other than by its optimizer'})"
            )
        if any(standing != "before" for standing in everyone):
            if comm.rank == root and self._copy.weights:
                self._copy.restore(together=False)
            self._copy_from(root, comm)
        self._updates = 0
        return True

    # Parts ------------------------------------------------------------------------------------------------------------

    def _needs_copies(self, why: str, *, unclear: bool = True) -> None:
        self._why = self._why or why
        self._unclear |= unclear and not self._copy.weights

    def _updated(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the optimizers."""
        for optimizer in self._state.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _parameters(self) -> dict[str, Tensor]:
        """Return the parameters of models and optimizers, by a number."""
        found = {id(each): each for model in self._state.models.values() for each in model.parameters()}
        found |= {id(each): each for each in self._updated()}
        return {str(number): each for number, each in enumerate(found.values())}

    def _changed(self, before: Sums, *, copied: bool = True) -> bool:
        """Return whether parameters of the optimizers have changed, or others that are not ``copied`` either."""
        updated = {id(parameter) for parameter in self._updated()}
        held = self._copy.moving
        watched = {
            name: each
            for name, each in self._parameters().items()
            if id(each) in updated or not copied and id(each) not in held
        }
        return any(before.get(name) != value for name, value in bit_sums(watched).items())

    @torch.no_grad()
    def _copy_from(self, root: int, comm: Communicator) -> None:
        """Get weights and optimizer states from the root. Collective."""
        self._unclear = self._unclear or comm.rank != root  # until all of it has arrived
        parameters, sums = self._parameters(), bit_sums(self._parameters())
        wanted = comm.broadcast_object(sums, root)
        own = {name for name in sums if wanted.get(name) != sums[name]}
        differ = set().union(*comm.all_gather_object(own))
        for name in (each for each in parameters if each in differ):
            _broadcast(parameters[name], root, comm)
        for optimizer in self._state.optimizers.values():
            _copy_states(optimizer, root, comm)
        self._unclear, self._sums = False, bit_sums(parameters)


def _broadcast(tensor: Tensor, root: int, comm: Communicator) -> None:
    data = tensor.detach().contiguous()
    comm.broadcast(data, root)
    if comm.rank != root:
        tensor.copy_(data)


def _copy_states(optimizer: torch.optim.Optimizer, root: int, comm: Communicator) -> None:
    """Get the states of an optimizer from the root, into the present tensors where they fit. Collective."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = [_described(optimizer.state.get(each)) for each in parameters]
    for parameter, entries in zip(parameters, comm.broadcast_object(own, root), strict=True):
        if entries is None:
            optimizer.state.pop(parameter, None)
            continue
        present = optimizer.state[parameter]
        for name in [each for each in present if each not in entries]:
            del present[name]
        for name, value in entries.items():
            if not isinstance(value, _Described):
                present[name] = value
                continue
            held = present.get(name)
            if not isinstance(held, Tensor) or _Described.of(held) != value:
                present[name] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            _broadcast(present[name], root, comm)


@dataclass(frozen=True)
class _Described:
    """Tensor of an optimizer state, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: Tensor) -> _Described:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _described(entries: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the state of a parameter with a description in place of each tensor."""
    if entries is None:
        return None
    return {name: _Described.of(each) if isinstance(each, Tensor) else each for name, each in entries.items()}
