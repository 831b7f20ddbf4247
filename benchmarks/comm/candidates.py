"""Candidate of a communication benchmark: a name, a call, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from comm.operations import Operation
from comm.place import Place
from torch import Tensor

from hpctrain.errors import CommunicationError

Call = Callable[[], object]

LOST = 99  # value that no rank has written


@dataclass
class Candidate:
    """Implementation of an operation; ``tensors`` are its inputs and outputs, ``result`` is a part of them."""

    name: str
    call: Call
    tensors: Sequence[Tensor]
    result: Tensor
    every: int = 1  # rounds per turn: slow candidates take fewer turns
    needed: bool = False  # an error in it ends the benchmark
    own: slice = field(default_factory=lambda: slice(None))  # part of the first tensor that only this rank writes

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self.tensors[0].numel() * self.tensors[0].element_size()


def check(place: Place, operation: Operation, candidate: Candidate) -> str:
    """Run a candidate once on known values; return why it cannot take part, empty if it can.

    Raises ``CommunicationError`` on all ranks if a result is wrong, or if a needed candidate fails.
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
