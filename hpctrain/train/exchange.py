"""Exchange between the ranks at the end of an iteration: averages of logged values, and agreement checks."""

from __future__ import annotations

import math
import numbers
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError

NUMBERS = 43  # elements of the message: some flags plus the logged values
_FLAGS = 12
LOGGED = NUMBERS - _FLAGS
PATIENCE = 10.0  # seconds that a rank which has left the loop within a step waits for the other ranks
EVERY_RANK = "every rank must make the call, after the same step; do not write it under `if job.rank == 0`"


@dataclass(frozen=True)
class StepRequests:
    """Requests of a rank: ``stop`` or ``save``; ``busy`` if a checkpoint is being written.

    ``report``: the ranks must exchange their times, because one of them is slow.
    """

    stop: bool = False
    save: bool = False
    busy: bool = False
    final: bool = False  # the program has called run.stop
    report: bool = False


@dataclass(frozen=True)
class StepState:
    """State that must be equal on all ranks at the end of an iteration, and the weight of this rank's averages.

    ``weight`` is this rank's share of the batch, 1 if all ranks have the same number of samples.
    ``checksum`` identifies the order of the samples. ``updated`` tells whether an optimizer has
    stepped, ``left`` whether the loop was left by ``break``, ``ended`` whether the loader is
    exhausted, and ``saves`` whether the program has called ``run.save``. ``call`` is the public
    call that the ranks make, if it is not the end of an iteration. ``speeds`` are those of this
    rank in this step (``stragglers``).
    """

    weight: float = 1.0
    checksum: int = 0
    updated: bool = True
    left: bool = False
    ended: bool = False
    saves: bool = False
    call: str = ""
    speeds: tuple[float, float] = (0.0, 0.0)


def of_these_ranks(comm: Communicator, state: StepState) -> StepState:
    """Return the state with weights whose mean is 1, when ranks with some of the samples have died. Collective."""
    mean = torch.tensor([state.weight], dtype=torch.float64)
    comm.all_reduce(mean, "average")
    return replace(state, weight=state.weight / float(mean) if mean else math.nan)


class StepLog:
    """Values that this rank logs in a step: ``averaged`` over the ranks, or the ``same`` on all ranks."""

    def __init__(self) -> None:
        self.averaged: dict[str, float] = {}
        self.same: dict[str, float | list[float]] = {}

    def note(self, averaged: Mapping[str, float | Tensor], same: Mapping[str, float | Sequence[float]]) -> None:
        """Add numbers, or for ``same`` also lists of numbers; a repeated name keeps its last value."""
        if "step" in averaged or "step" in same:
            raise UsageError("cannot log a value named step: the run counts steps itself; use another name")
        if len({*self.averaged, *averaged}) > LOGGED:
            raise UsageError(f"a step can log {LOGGED} averaged numbers, not {len({*self.averaged, *averaged})}")
        found = {name: _number(f"run.log({name}=...)", value) for name, value in averaged.items()}
        alike: dict[str, float | list[float]] = {}
        for name, one in same.items():
            where = f"run.log(same={{{name!r}: ...}})"
            if isinstance(one, Sequence) and not isinstance(one, (str, bytes)):
                alike[name] = [_entry(where, each) for each in one]
            else:
                alike[name] = _entry(where, one)
        self.averaged.update(found)
        self.same.update(alike)

    def clear(self, *, all_of_it: bool = True) -> None:
        """Clear the values for a new step, or only the averaged ones for a new iteration."""
        self.averaged.clear()
        if all_of_it:
            self.same.clear()


class StepExchange:
    """Average of numbers over the ranks, in one small reduction of fixed length.

    The length is fixed because MPI returns garbage without an error if ranks reduce different
    numbers of elements. If ``alike``, the ranks must log the same values, because an average
    depends on the number of ranks in its last bits. ``speeds`` are the means of the last exchange.
    """

    def __init__(self, comm: Communicator, *, alike: bool = False) -> None:
        self._comm, self._alike = comm, alike
        self._numbers = torch.zeros(NUMBERS, dtype=torch.float64)
        self.speeds = (0.0, 0.0)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def __call__(
        self, logged: Mapping[str, float], requests: StepRequests, step: int, state: StepState = StepState()
    ) -> tuple[dict[str, float], StepRequests]:
        """Return the averages by name, and the requests of any rank. Collective.

        Raises ``UsageError`` on all ranks if they logged different names, or if their loops,
        loaders or orders of samples differ.
        """
        names = sorted(logged)
        checksum = _checksum(names, state)
        flags = [requests.stop, requests.save, requests.busy, requests.final, requests.report]
        same = [state.left, state.ended, state.updated]
        weight = state.weight
        values = [logged[name] * weight if weight else 0.0 for name in names]
        self._numbers.zero_()
        self._numbers[: _FLAGS + len(names)] = torch.tensor(
            [*map(float, flags + same), checksum, checksum * checksum, *state.speeds, *values], dtype=torch.float64
        )
        self._comm.all_reduce(self._numbers, "average")
        *flags, left, ended, updated, mean, square, own, arrival = self._numbers[:_FLAGS].tolist()
        self.speeds, values = (own, arrival), self._numbers[_FLAGS:].tolist()
        # The checksums are equal if their variance is only rounding error.
        differ = abs(square - mean * mean) > 1e-9 * square
        if differ or not all(share in (0.0, 1.0) for share in (left, ended, updated)):
            self._refuse(names, state, step)
        if self._alike and names:
            values = [logged[name] for name in names]
            self._check_alike(names, values, step)
        return dict(zip(names, values)), StepRequests(*map(bool, flags))

    def _check_alike(self, names: Sequence[str], values: Sequence[float], step: int) -> None:
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.float64)
        self._comm.all_reduce(both, "max")
        highest, lowest = both.tolist()[: len(names)], both.tolist()[len(names) :]
        for name, high, low in zip(names, highest, lowest):
            if high != -low and not math.isnan(high):
                raise UsageError(
                    f"run.log({name}=...) in step {step} under parallel.reproducible = true: the ranks log different "
                    "values, whose average depends on their number; log the result of run.backward or run.evaluate",
                    everywhere=True,
                )

    def _refuse(self, names: list[str], state: StepState, step: int) -> None:
        call = state.call or f"the end of step {step}"
        everyone = self._comm.all_gather_object((names, replace(state, call=call), step))
        step = max(step for *_, step in everyone)  # a public call does not count steps
        raise UsageError(_difference([one[:2] for one in everyone], step), everywhere=True)


_DIFFERENCES = {  # messages by the flag that differs; {yes} is a rank that has it set
    "saves": f"rank {{yes}} called run.save in step {{step}}, rank {{no}} did not; {EVERY_RANK}",
    "left": "rank {yes} left the loop by break in step {step}, rank {no} did not; leave it on all ranks, or call "
    'run.stop("reason"), which the ranks agree on',
    "ended": "rank {yes}'s loader ended after the batch of step {step}, rank {no}'s has more; give every rank as many "
    "batches, or pass a DataLoader that job.run splits",
    "updated": "an optimizer stepped on rank {yes} in step {step}, none on rank {no}; step on all ranks or on none",
}


def _difference(everyone: Sequence[tuple[list[str], StepState]], step: int) -> str:
    """Return the message about the difference between the ranks at the end of an iteration."""
    states = [state for _, state in everyone]
    if rank := _first_different(one.call for one in states):
        return different_calls(states[0].call, rank, states[rank].call)
    for name, message in _DIFFERENCES.items():
        if rank := _first_different(getattr(one, name) for one in states):
            yes, no = (rank, 0) if getattr(states[rank], name) else (0, rank)
            return message.format(yes=yes, no=no, step=step)
    if rank := _first_different(one.checksum for one in states):
        return (
            f"the ranks draw the samples of step {step} in different orders (rank 0 and rank {rank}); seed the "
            "sampler's own generator alike on all ranks, or let it draw from torch's, NumPy's or Python's global one"
        )
    rank = _first_different(str(names) for names, _ in everyone)
    return (
        f"the ranks log different names in step {step}: rank 0 {_logged_names(everyone[0][0])}, "
        f"rank {rank} {_logged_names(everyone[rank][0])}; every rank must log the same"
    )


def different_calls(first: str, rank: int, other: str) -> str:
    """Return the message that a rank makes another collective call than rank 0."""
    return f"ranks at different collective calls: rank 0 at {first}, rank {rank} at {other}; {EVERY_RANK}"


def _first_different(values: Iterable[object]) -> int:
    """Return the first rank whose value differs from that of rank 0; 0 if all are equal."""
    first, *others = values
    return next((rank for rank, value in enumerate(others, 1) if value != first), 0)


def _checksum(names: Sequence[str], state: StepState) -> float:
    parts = [*names, *(["", state.call, str(state.saves)] if state.call or state.saves else [])]
    return float(zlib.crc32(",".join(parts).encode(), state.checksum))


def _number(what: str, value: Any) -> float:
    """Return a logged value as a float. Raises ``UsageError``, which names it, unless it is one number."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.numel() == 1 and not value.is_complex():
            return float(value)
        kind = "a complex tensor" if value.is_complex() else f"a tensor of shape {tuple(value.shape)}"
        hint = "" if value.is_complex() else "; take its mean()"
    else:
        is_array = isinstance(value, np.ndarray)
        if isinstance(value, numbers.Real) or is_array and value.size == 1 and value.dtype.kind in "biuf":
            return float(value.item() if is_array else value)
        kind = f"an array of shape {value.shape}" if is_array else repr(value)[:60]
        hint = "; take its mean()" if is_array else ""
    raise UsageError(f"{what}: {kind}; allowed are numbers and tensors of one element{hint}")


def _entry(what: str, value: Any) -> Any:
    """Return a value that is the same on all ranks; integers are not converted."""
    return value if isinstance(value, (bool, int, float)) else _number(what, value)


def _logged_names(names: Sequence[str]) -> str:
    return f"logs {', '.join(names)}" if names else "logs nothing"


def await_others(comm: Communicator, step: int, seconds: float = PATIENCE) -> None:
    """Return when all ranks have left the loop within a step; raise ``UsageError`` if some have not.

    Point-to-point messages are used instead of a collective: a rank that is still in its loop waits
    for this rank in another operation.
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    word = torch.zeros(1)
    works = [comm.isend(word, rank) for rank in others]
    works += [comm.irecv(torch.zeros(1), rank) for rank in others]
    deadline = time.monotonic() + seconds
    while not all(work.done() for work in works):
        if time.monotonic() > deadline:
            raise UsageError(
                f"rank {comm.rank} left the loop by break in step {step}, before its update, and other ranks did not; "
                'leave it on all ranks, or call run.stop("reason"), which the ranks agree on'
            )
        time.sleep(0.001)
