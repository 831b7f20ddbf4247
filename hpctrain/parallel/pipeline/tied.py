"""Gradient reduction for parameters tied across stages, such as an embedding that is also the output layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.pipeline.prune import TiedParameter


class TiedGradients:
    """Tied parameters of this stage. Collective over all stages.

    Every stage that holds a tied parameter updates it alike, with the sum of the gradients. The
    copies therefore stay equal bit for bit.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, shared: Sequence[TiedParameter], held: Collection[int]
    ) -> None:
        self._model = model
        self._groups: list[tuple[str, Communicator]] = []
        self._elsewhere: set[str] = set()  # names that an earlier stage counts
        for each in shared:
            owners = sorted({chunk % comm.size for chunk in each.chunks})
            if len(owners) == 1:
                continue
            part = comm.split(0 if comm.rank in owners else 1)
            if comm.rank not in owners:
                part.free()
                continue
            self._groups.append((each.names[0], part))
            if comm.rank != each.chunks[0] % comm.size:
                self._elsewhere |= set(each.names)

    def reduce(self) -> None:
        """Sum the gradients of tied parameters over their stages; the gradients must be complete. Collective."""
        for name, part in self._groups:
            parameter = self._model.get_parameter(name)
            if any(part.all_gather_object(parameter.grad is not None)):
                if parameter.grad is None:
                    parameter.grad = parameter.new_zeros(parameter.shape)
                part.all_reduce(parameter.grad)

    def counts(self, name: str) -> bool:
        """Return whether this stage is the one that counts a parameter, where each parameter counts once."""
        return name not in self._elsewhere
