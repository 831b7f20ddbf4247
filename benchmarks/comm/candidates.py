"""Say what takes part in a benchmark: a name, one call, and where its result must lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from comm.operations import Operation
from comm.place import Place
from torch import Tensor

from hpctrain.errors import CommunicationError

Call = Callable[[], object]

LOST = 99  # what nobody has written


@dataclass
class Candidate:
    """Hold one way to do an operation; ``tensors`` are what it reads and writes, ``result`` lies within them."""

    name: str
    call: Call
    tensors: Sequence[Tensor]
    result: Tensor
    every: int = 1  # rounds: slow ones take fewer turns
    needed: bool = False  # that it cannot serve is an error
    own: slice = field(default_factory=lambda: slice(None))  # of the first tensor: what only this rank writes

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self.tensors[0].numel() * self.tensors[0].element_size()


def check(place: Place, operation: Operation, candidate: Candidate) -> str:
    """Let a candidate run once on known values; return why it cannot serve, empty where it can.

    Raises ``CommunicationError`` on all ranks where a result is wrong, or where a needed one cannot serve.
    """
    numel = candidate.tensors[0].numel()
    own = [candidate.tensors[0][candidate.own], *candidate.tensors[1:]]
    for tensor in own:
        tensor.fill_(LOST)
    own[0].copy_(operation.start(place.rank, place.size, numel)[candidate.own])
    _synchronize(place)
    place.world.Barrier()
    try:
        candidate.call()
        _synchronize(place)
        problem = None
    except (RuntimeError, NotImplementedError, ValueError) as error:
        problem = str(error).splitlines()[0]
    expected = operation.end(place.rank, place.size, numel).to(place.device, candidate.result.dtype)
    reports = place.comm.all_gather_object((problem, torch.equal(candidate.result, expected)))
    for tensor in own:
        tensor.zero_()
    problems = [f"{why} (rank {rank})" for rank, (why, _) in enumerate(reports) if why]
    wrong = [str(rank) for rank, (_, right) in enumerate(reports) if not right]
    if problems and candidate.needed:
        raise CommunicationError(f"{candidate.name} cannot do {operation.name}: {problems[0]}", everywhere=True)
    if wrong and not problems:
        raise CommunicationError(
            f"wrong result: {operation.name} of {numel} elements of {candidate.result.dtype} by {candidate.name} "
            f"differs from the reference on rank {', '.join(wrong)}",
            everywhere=True,
        )
    return problems[0] if problems else ""


def _synchronize(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
