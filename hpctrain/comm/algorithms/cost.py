"""Cost formulas of the algorithms: consecutive messages, bytes, and bytes reduced.

Assumptions: a rank sends one message at a time and receives one at a time, both concurrently. A
message of n bytes takes alpha + n beta seconds, and reducing n bytes takes gamma n. S is the number
of bytes of the whole tensor in the dtype that is sent: partial sums of 16-bit floats are sent in
float32. Each formula is derived in the module of its algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, isqrt

from hpctrain.errors import CommunicationError

# Default of alpha / beta without a measurement: the bytes that a link transfers during the latency
# of a message. It corresponds to a few microseconds at some GB/s.
LATENCY_BYTES = 32768
RING_SEGMENT = 2**18  # long enough to amortise a message's latency, short enough to fit a core's cache


@dataclass(frozen=True)
class Cost:
    """Cost of the longest chain of messages, and traffic of the busiest rank."""

    steps: int  # consecutive messages on the longest chain
    path: float  # bytes of these messages
    messages: int  # sent by the rank that sends most messages
    sent: float  # bytes sent by the rank that sends most bytes
    reduced: float = 0.0  # bytes reduced on the longest chain

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Return the time for alpha seconds per message, beta per byte sent, gamma per byte reduced."""
        return self.steps * alpha + self.path * beta + self.reduced * gamma

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of two consecutive operations with the same busiest rank."""
        return Cost(
            self.steps + other.steps,
            self.path + other.path,
            self.messages + other.messages,
            self.sent + other.sent,
            self.reduced + other.reduced,
        )


Formula = Callable[[int, int, int | None], Cost]  # arguments: ranks, bytes, bytes per segment


def cost(algorithm: str, operation: str, p: int, nbytes: int, segment: int | None = None) -> Cost:
    """Return the cost of an operation on a whole tensor of ``nbytes`` over p ranks.

    ``segment`` is the number of bytes per segment, for algorithms that send segments; by default it
    is the one that the algorithm selects. Slices count as equally long. Raises
    ``CommunicationError`` if the algorithm does not support the operation.
    """
    formula = FORMULAS.get((algorithm, operation))
    if formula is None:
        known = ", ".join(sorted(name for name, known_operation in FORMULAS if known_operation == operation))
        raise CommunicationError(f"no cost of {operation} by {algorithm!r}: {operation} is known by {known or 'none'}")
    return formula(p, nbytes, segment) if p > 1 else Cost(0, 0, 0, 0)


def best_segment(nbytes: int, depth: int) -> int:
    """Return the bytes per segment at which a pipeline with ``depth`` further hops is fastest.

    This is sqrt(S alpha / (depth beta)), the minimum of (depth + S/m) (alpha + m beta).
    """
    return max(1, min(nbytes, isqrt(nbytes * LATENCY_BYTES // depth))) if depth > 0 else max(1, nbytes)


def tree_height(p: int) -> int:
    """Return the height of a binary tree of p - 1 ranks below a root: the number of links from its top to a leaf."""
    return max(0, (p - 1).bit_length() - 1)


def prefers_doubling(p: int, nbytes: int) -> bool:
    """Return whether recursive doubling reduces faster than halving: fewer messages against fewer bytes."""
    doubling, halving = _doubling(p, nbytes, None), _halving(p, nbytes, None)
    return doubling.seconds(LATENCY_BYTES, 1) <= halving.seconds(LATENCY_BYTES, 1)


def _depth(p: int) -> int:
    """Return ceil(log2 p)."""
    return (p - 1).bit_length()


def _pieces(nbytes: float, segment: int) -> int:
    return max(1, ceil(nbytes / segment))


def _exchange(messages: Callable[[int], int], *, reduces: bool = False) -> Formula:
    """Return the formula of an operation in which every rank sends, and perhaps reduces, the shares of all others."""

    def formula(p: int, nbytes: int, segment: int | None) -> Cost:
        share = nbytes * (p - 1) / p
        return Cost(messages(p), share, messages(p), share, share if reduces else 0.0)

    return formula


_one_each, _one_each_reduced = _exchange(lambda p: p - 1), _exchange(lambda p: p - 1, reduces=True)
_by_depth, _by_depth_reduced = _exchange(_depth), _exchange(_depth, reduces=True)


def _then(first: Formula, second: Formula) -> Formula:
    return lambda p, nbytes, segment: first(p, nbytes, segment) + second(p, nbytes, segment)


def _tree_broadcast(p: int, nbytes: int, segment: int | None) -> Cost:
    steps = _depth(p)
    return Cost(steps, steps * nbytes, steps, steps * nbytes)


def _tree_reduce(p: int, nbytes: int, segment: int | None) -> Cost:
    steps = _depth(p)
    return Cost(steps, steps * nbytes, 1, nbytes, steps * nbytes)


def _tree_all_reduce(p: int, nbytes: int, segment: int | None) -> Cost:
    # Rank 0 sends nothing in the reduction. The second busiest rank has one child fewer and sends
    # one message more.
    steps = _depth(p)
    return Cost(2 * steps, 2 * steps * nbytes, steps, steps * nbytes, steps * nbytes)


def _tree_gather(p: int, nbytes: int, segment: int | None) -> Cost:
    top = 1 << (_depth(p) - 1)
    return Cost(_depth(p), nbytes * (p - 1) / p, 1, max(top // 2, p - top) * nbytes / p)


def _ring_broadcast(p: int, nbytes: int, segment: int | None) -> Cost:
    pieces = _pieces(nbytes, segment or best_segment(nbytes, p - 2))
    return Cost(p - 2 + pieces, nbytes + (p - 2) * nbytes / pieces, pieces, nbytes)


def _ring_reduce_scatter(p: int, nbytes: int, segment: int | None) -> Cost:
    messages = (p - 1) * _pieces(nbytes / p, segment or RING_SEGMENT)
    return replace(_one_each_reduced(p, nbytes, segment), steps=messages, messages=messages)


_halving = _then(_by_depth_reduced, _by_depth)


def _doubling(p: int, nbytes: int, segment: int | None) -> Cost:
    steps = p.bit_length() - 1
    folded = p != 1 << steps
    sent, steps = steps + folded, steps + 2 * folded
    return Cost(steps, steps * nbytes, sent, sent * nbytes, _depth(p) * nbytes)


def _recursive_all_reduce(p: int, nbytes: int, segment: int | None) -> Cost:
    return (_doubling if prefers_doubling(p, nbytes) else _halving)(p, nbytes, None)


def _double_tree_broadcast(p: int, nbytes: int, segment: int | None) -> Cost:
    height = tree_height(p)
    pieces = 2 * _pieces(nbytes / 2, segment or best_segment(nbytes, 2 * height))
    return Cost(pieces + 2 * height, nbytes + 2 * height * nbytes / pieces, pieces, nbytes)


def _double_tree_reduce(p: int, nbytes: int, segment: int | None) -> Cost:
    down = _double_tree_broadcast(p, nbytes, segment)
    return replace(down, reduced=down.path)


FORMULAS: dict[tuple[str, str], Formula] = {
    ("tree", "broadcast"): _tree_broadcast,
    ("tree", "reduce"): _tree_reduce,
    ("tree", "all_reduce"): _tree_all_reduce,
    ("tree", "gather"): _tree_gather,
    ("tree", "scatter"): _by_depth,
    ("ring", "broadcast"): _ring_broadcast,
    ("ring", "reduce_scatter"): _ring_reduce_scatter,
    ("ring", "all_gather"): _one_each,
    ("ring", "all_reduce"): _then(_ring_reduce_scatter, _one_each),
    ("recursive", "reduce_scatter"): _by_depth_reduced,
    ("recursive", "all_gather"): _by_depth,
    ("recursive", "all_reduce"): _recursive_all_reduce,
    ("doubling", "all_reduce"): _doubling,
    ("halving", "all_reduce"): _halving,
    ("double_tree", "broadcast"): _double_tree_broadcast,
    ("double_tree", "reduce"): _double_tree_reduce,
    ("double_tree", "all_reduce"): _then(_double_tree_reduce, _double_tree_broadcast),
    ("pairwise", "all_to_all"): _one_each,
    ("direct", "reduce_scatter"): _one_each_reduced,
    ("direct", "all_reduce"): _then(_one_each_reduced, _one_each),
}
