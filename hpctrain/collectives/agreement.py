"""Let all ranks succeed together or raise the same error together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hpctrain import errors

T = TypeVar("T")


class Gathers(Protocol):
    """Say what of a communicator is needed here."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""


def agreed(comm: Gathers | None, action: Callable[[], T], *, alike: bool = True) -> T:
    """Do something on this rank and return its result, if it succeeded on all ranks.

    Otherwise every rank raises the same error, which names the ranks and their reasons and has ``everywhere`` set: it
    is of the kind that the first failing rank raised. What all ranks do ``alike`` or rank 0 does for all needs no rank
    in the message when it fails there. Every rank must come here, whatever happens in the action.
    """
    if comm is None:
        return action()
    outcome: list[T] = []
    error: Exception | None = None
    try:
        outcome.append(action())
    except Exception as caught:
        error = caught
    reports = comm.all_gather_object(None if error is None else _report(error))
    if any(reports):
        # An error of ours says all in its text; of any other the traceback is wanted too.
        raise _joint(reports, alike) from (None if isinstance(error, errors.HpctrainError) else error)
    return outcome[0]


def on_first_rank(comm: Any, action: Callable[[], T]) -> T:
    """Do something on rank 0 only and return its result on all ranks; an error there is raised on all of them."""
    result = agreed(comm, lambda: action() if comm.rank == 0 else None)
    shared: T = comm.broadcast_object(result)
    return shared


def _report(error: Exception) -> tuple[str, str]:
    kind = type(error).__name__
    return kind, str(error) if isinstance(error, errors.HpctrainError) else f"{kind}: {error}"


def _joint(reports: list[tuple[str, str] | None], alike: bool) -> errors.HpctrainError:
    failed = {rank: report for rank, report in enumerate(reports) if report}
    kind, text = next(iter(failed.values()))
    if len(reports) > 1 and len(set(failed.values())) > 1:
        text = "; ".join(f"rank {rank}: {report[1]}" for rank, report in failed.items())
    elif len(reports) > 1 and (not alike or len(failed) < len(reports) and list(failed) != [0]):
        text = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}: {text}"
    found: type[errors.HpctrainError] = getattr(errors, kind, errors.HpctrainError)
    return found(text, everywhere=True)
