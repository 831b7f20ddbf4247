"""Pick an algorithm: a pure function of what every rank knows, so that all ranks pick the same."""

from __future__ import annotations

from hpctrain.errors import CommunicationError

ALGORITHMS = ("auto", "window", "mpi", "direct")


def select(algorithm: str, *, in_window: bool, carrier_reduces: bool) -> str:
    """Return the algorithm of an all_reduce.

    ``in_window`` says that the tensor lies in node memory of this communicator; ``carrier_reduces`` that the transport
    itself can reduce its dtype by the operation. Raises ``CommunicationError`` for an unknown name or one that cannot
    serve.
    """
    if algorithm not in ALGORITHMS:
        raise CommunicationError(f"unknown algorithm {algorithm!r}: known are {', '.join(ALGORITHMS)}")
    if algorithm == "window" and not in_window:
        raise CommunicationError(
            "algorithm window needs a tensor of comm.empty(), on nodes that hold equally many ranks, two or more; "
            "use auto for any other"
        )
    if algorithm != "auto":
        return algorithm
    if in_window:
        return "window"
    return "mpi" if carrier_reduces else "direct"
