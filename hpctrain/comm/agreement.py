"""Agreement on errors: an action succeeds on all ranks, or all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hpctrain import errors

T = TypeVar("T")


class ObjectGatherer(Protocol):
    """Part of a communicator's interface that this module needs."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. Collective."""


def agreed(comm: ObjectGatherer | None, action: Callable[[], T], *, alike: bool = True) -> T:
    """Run an action on this rank and return its result if it succeeded on all ranks. Collective.

    If the action fails on any rank, every rank raises the same error, with the type that the first
    failing rank raised. The error lists the failing ranks and their reasons, and its attribute
    ``everywhere`` is set. If all ranks perform the action ``alike``, or rank 0 performs it for all,
    the message names no rank if all ranks failed with the same reason or only rank 0 failed. Every
    rank must make this call, whatever happens in its action.
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
        # The text of a project error is sufficient. For any other exception, chain the traceback.
        raise _combined_error(reports, alike) from (None if isinstance(error, errors.HpctrainError) else error)
    return outcome[0]


def on_first_rank(comm: Any, action: Callable[[], T]) -> T:
    """Run an action on rank 0 only and return its result on all ranks; all ranks raise its error. Collective."""
    result = agreed(comm, lambda: action() if comm.rank == 0 else None)
    shared: T = comm.broadcast_object(result)
    return shared


def _report(error: Exception) -> tuple[str, str]:
    kind = type(error).__name__
    return kind, str(error) if isinstance(error, errors.HpctrainError) else f"{kind}: {error}"


def _combined_error(reports: list[tuple[str, str] | None], alike: bool) -> errors.HpctrainError:
    failed = {rank: report for rank, report in enumerate(reports) if report}
    kind, text = next(iter(failed.values()))
    if len(reports) > 1 and len(set(failed.values())) > 1:
        text = "; ".join(f"rank {rank}: {report[1]}" for rank, report in failed.items())
    elif len(reports) > 1 and (not alike or len(failed) < len(reports) and list(failed) != [0]):
        text = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}: {text}"
    error_type: type[errors.HpctrainError] = getattr(errors, kind, errors.HpctrainError)
    return error_type(text, everywhere=True)
