"""Pick an algorithm: a pure function of what every rank knows, so that all ranks pick the same."""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.errors import CommunicationError


def choose(operation: str, algorithm: str, allowed: Iterable[str], default: str) -> str:
    """Return the algorithm that was named, or the default for ``auto``; refuse one that the operation does not have."""
    if algorithm == "auto":
        return default
    names = sorted(allowed)
    if algorithm not in names:
        raise CommunicationError(f"unknown algorithm {algorithm!r} of {operation}: known are auto, {', '.join(names)}")
    return algorithm


def uses_window(algorithm: str, *, in_window: bool) -> bool:
    """Tell whether an all_reduce goes through node memory.

    ``in_window`` says that the tensor lies in node memory of this communicator. Raises ``CommunicationError`` where the
    window is asked for and cannot serve.
    """
    if algorithm == "window" and not in_window:
        raise CommunicationError(
            "algorithm window needs a tensor of comm.empty(), on nodes that hold equally many ranks, two or more; "
            "use auto for any other"
        )
    return algorithm == "window" or algorithm == "auto" and in_window
