"""Let all ranks succeed together or raise the same error together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hpctrain.errors import CheckpointError, HpctrainError, NonFiniteError, UsageError

T = TypeVar("T")

_KINDS: dict[str, type[HpctrainError]] = {kind.__name__: kind for kind in (CheckpointError, NonFiniteError, UsageError)}


class Communicator(Protocol):
    """Say what of a communicator is needed here."""

    @property
    def rank(self) -> int:
        """Return the number of this rank."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def all_gather_object(self, value: Any, /) -> list[Any]:
        """Return the values of all ranks, in rank order."""


def agreed(comm: Communicator | None, action: Callable[[], T]) -> T:
    """Do something on this rank and return its result, if it succeeded on all ranks.

    Otherwise every rank raises the same error, which names the ranks and their reasons and has ``everywhere`` set.
    Every rank must come here, whatever happens in the action.
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
        raise _joint(reports) from error
    return outcome[0]


def _report(error: Exception) -> tuple[str, str]:
    kind = type(error).__name__
    return kind, str(error) if isinstance(error, HpctrainError) else f"{kind}: {error}"


def _joint(reports: list[tuple[str, str] | None]) -> HpctrainError:
    failed = {rank: report for rank, report in enumerate(reports) if report}
    kind, text = next(iter(failed.values()))
    if len(reports) > 1 and (len(failed) < len(reports) or len(set(failed.values())) > 1):
        text = "; ".join(f"rank {rank}: {report[1]}" for rank, report in failed.items())
    return _KINDS.get(kind, CheckpointError)(text, everywhere=True)
