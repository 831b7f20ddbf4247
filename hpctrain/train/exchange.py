"""Let the ranks exchange, at the end of a step, what each has logged and whether any knows a reason to stop or save."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError

NUMBERS = 32  # what travels: a few flags, and what was logged
_FLAGS = 5
LOGGED = NUMBERS - _FLAGS


@dataclass(frozen=True)
class Wishes:
    """Say whether there is reason to ``stop``, or to ``save``; and whether a rank is ``busy`` with a checkpoint."""

    stop: bool = False
    save: bool = False
    busy: bool = False


class StepLog:
    """Hold what this rank logs in a step: ``averaged`` over the ranks, or the ``same`` on all of them."""

    def __init__(self) -> None:
        self.averaged: dict[str, float] = {}
        self.same: dict[str, float | list[float]] = {}

    def note(self, averaged: Mapping[str, float | Tensor], same: Mapping[str, float | Sequence[float]]) -> None:
        """Add numbers, or lists of them that are the ``same``; a name noted again has its last value."""
        if "step" in averaged or "step" in same:
            raise UsageError("cannot log a number called step: that is what the run counts")
        if len({*self.averaged, *averaged}) > LOGGED:
            raise UsageError(f"a step can log {LOGGED} averaged numbers, not {len({*self.averaged, *averaged})}")
        for name, value in averaged.items():
            self.averaged[name] = float(value.detach() if isinstance(value, Tensor) else value)
        self.same.update({name: list(one) if isinstance(one, Sequence) else one for name, one in same.items()})

    def clear(self) -> None:
        """Begin a new step."""
        self.averaged.clear()
        self.same.clear()


class StepExchange:
    """Average numbers over the ranks, all of them in one small reduction of a fixed length.

    The length is fixed because MPI gives garbage, and no error, where ranks reduce different numbers of elements.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._numbers = comm.empty(NUMBERS, torch.float64)

    def start(self, step: int) -> None:
        """Come before the first step."""

    def close(self) -> None:
        """Have nothing to give back."""

    def __call__(
        self, logged: Mapping[str, float], wishes: Wishes, step: int
    ) -> tuple[dict[str, float], Wishes]:
        """Return the averages by name, and what is so on any rank; a call by all ranks.

        Raises ``UsageError`` on all of them where they logged different names.
        """
        names = sorted(logged)
        mark = _mark(names)
        flags = [float(wishes.stop), float(wishes.save), float(wishes.busy), mark, mark * mark]
        self._numbers.zero_()
        self._numbers[: _FLAGS + len(names)] = torch.tensor(
            flags + [logged[name] for name in names], dtype=torch.float64
        )
        self._comm.all_reduce(self._numbers, "average")
        stop, save, busy, mean, square, *values = self._numbers.tolist()
        # The marks are equal where their variance is nothing but rounding.
        if abs(square - mean * mean) > 1e-9 * square:
            self._refuse(names, step)
        return dict(zip(names, values)), Wishes(bool(stop), bool(save), bool(busy))

    def _refuse(self, names: list[str], step: int) -> None:
        everyone = self._comm.all_gather_object(names)
        rank = next(rank for rank, other in enumerate(everyone) if other != everyone[0])
        raise UsageError(
            f"the ranks log different names in step {step}: rank 0 {_tell(everyone[0])}, "
            f"rank {rank} {_tell(everyone[rank])}; every rank must log the same",
            everywhere=True,
        )


def _mark(names: Sequence[str]) -> float:
    return float(zlib.crc32(",".join(names).encode()))


def _tell(names: Sequence[str]) -> str:
    return f"logs {', '.join(names)}" if names else "logs nothing"
