"""Cost formulas: compared with what the algorithms send, and with numbers computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.threads import ThreadTransport, ThreadWorld

from hpctrain.comm.algorithms import direct, double_tree, recursive, ring, tree
from hpctrain.comm.algorithms.cost import FORMULAS, LATENCY_BYTES, Cost, best_segment, cost, prefers_doubling
from hpctrain.comm.reduction import Reducer
from hpctrain.errors import CommunicationError

ELEMENTS = 2520  # equal slices for every number of ranks to 10, and equal halves
NBYTES = 4 * ELEMENTS
ALGORITHMS: dict[str, Any] = {
    "tree": tree,
    "ring": ring,
    "recursive": recursive,
    "double_tree": double_tree,
    "pairwise": direct,
}
Body = Callable[[ThreadTransport], None]


def call(algorithm: str, operation: str, segment: int | None) -> Body:
    """Return a function that runs an algorithm on a tensor of ``NBYTES`` bytes."""
    options = {"segment": segment} if segment else {}
    if algorithm in ("doubling", "halving"):
        run: Any = getattr(recursive, {"doubling": "double", "halving": "halve"}[algorithm] + "_all_reduce")
    else:
        run = getattr(ALGORITHMS[algorithm], operation)

    def body(transport: ThreadTransport) -> None:
        whole, share = torch.ones(ELEMENTS), torch.ones(ELEMENTS // transport.size)
        arguments: dict[str, tuple[Any, ...]] = {
            "broadcast": (whole,),
            "reduce": (Reducer(), whole, "sum"),
            "all_reduce": (Reducer(), whole, "sum"),
            "reduce_scatter": (Reducer(), share, whole, "sum"),
            "all_gather": (whole, share),
            "gather": (whole, share),
            "scatter": (share, whole),
            "all_to_all": (whole.clone(), whole),
        }
        run(transport, *arguments[operation], **options)

    return body


def measured(body: Body, size: int) -> Cost:
    """Return what an algorithm took on a clock of messages, on a clock of bytes, and the counts of its ranks."""
    by_messages, by_bytes = ThreadWorld(size, alpha=1, beta=0), ThreadWorld(size, alpha=0, beta=1)
    by_messages.run(body)
    by_bytes.run(body)
    return Cost(
        by_messages.elapsed,
        by_bytes.elapsed,
        max(recorder.calls["send"] for recorder in by_messages.recorders),
        max(recorder.bytes["send"] for recorder in by_messages.recorders),
    )


PIPELINED = [("ring", "broadcast"), ("ring", "reduce_scatter"), ("ring", "all_reduce")]
PLAIN = [key for key in FORMULAS if key[0] not in ("direct", "double_tree")]
EXACT = [*((*key, None) for key in PLAIN), *((*key, segment) for key in PIPELINED for segment in (140, 1260))]


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("algorithm, operation, segment", EXACT)
def test_formulas_equal_what_is_sent(algorithm: str, operation: str, segment: int | None, size: int) -> None:
    found = measured(call(algorithm, operation, segment), size)
    formula = cost(algorithm, operation, size, NBYTES, segment)
    assert (found.steps, found.messages) == (formula.steps, formula.messages)
    assert (found.path, found.sent) == pytest.approx((formula.path, formula.sent))


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("operation", ["broadcast", "reduce", "all_reduce"])
@pytest.mark.parametrize("segment", [None, 252, 1260])
def test_double_tree_needs_no_more_than_its_formula(operation: str, segment: int | None, size: int) -> None:
    found = measured(call("double_tree", operation, segment), size)
    formula = cost("double_tree", operation, size, NBYTES, segment)
    passes = 2 if operation == "all_reduce" else 1
    pieces, height = formula.steps // passes - 2 * (size - 1).bit_length() + 2, (size - 1).bit_length() - 1
    assert passes * (pieces + height) <= found.steps <= formula.steps == passes * (pieces + 2 * height)
    assert passes * NBYTES <= found.path <= formula.path
    # The first rank sends only in one half of an all_reduce; the second rank has no child if p is 2 or 3.
    few = passes == 2 and size < 4
    assert (found.messages <= formula.messages) if few else (found.messages == formula.messages)
    assert (found.sent <= formula.sent) if few else (found.sent == formula.sent)


def test_double_tree_sends_at_most_one_tensor_per_rank() -> None:
    for size in range(2, 10):
        for operation in ("broadcast", "reduce"):
            world = ThreadWorld(size)
            world.run(call("double_tree", operation, 252))
            assert all(recorder.bytes["send"] <= NBYTES for recorder in world.recorders)
            everything = sum(recorder.bytes["recv"] for recorder in world.recorders)
            assert everything == sum(recorder.bytes["send"] for recorder in world.recorders) == (size - 1) * NBYTES


@pytest.mark.parametrize("size", range(2, 10))
def test_the_direct_algorithm_costs_as_much_as_pairwise_exchange(size: int) -> None:
    assert cost("direct", "all_reduce", size, NBYTES) == Cost(
        2 * (size - 1),
        pytest.approx(2 * NBYTES * (size - 1) / size),
        2 * (size - 1),
        pytest.approx(2 * NBYTES * (size - 1) / size),
        pytest.approx(NBYTES * (size - 1) / size),
    )


@pytest.mark.parametrize(
    "algorithm, operation, p, steps, sent",
    [
        ("tree", "broadcast", 8, 3, 2400),
        ("tree", "all_reduce", 5, 6, 2400),
        ("ring", "all_reduce", 4, 6, 1200),
        ("recursive", "all_gather", 9, 4, 8 * 800 / 9),
        ("halving", "all_reduce", 6, 6, 2 * 5 * 800 / 6),
        ("doubling", "all_reduce", 8, 3, 2400),
        ("doubling", "all_reduce", 6, 4, 2400),
        ("pairwise", "all_to_all", 5, 4, 640),
        ("double_tree", "broadcast", 8, 2 + 4, 800),
    ],
)
def test_formulas_give_textbook_numbers(algorithm: str, operation: str, p: int, steps: int, sent: float) -> None:
    found = cost(algorithm, operation, p, 800, 400 if algorithm == "double_tree" else None)
    assert (found.steps, found.sent) == (steps, pytest.approx(sent))


def test_seconds_follow_from_alpha_beta_and_gamma() -> None:
    assert Cost(3, 1000, 1, 0, 500).seconds(alpha=2.0, beta=0.01, gamma=0.1) == pytest.approx(6 + 10 + 50)
    assert Cost(1, 2, 3, 4, 5) + Cost(10, 20, 30, 40, 50) == Cost(11, 22, 33, 44, 55)


@pytest.mark.parametrize("p", [3, 6, 9])
@pytest.mark.parametrize("nbytes", [2**20, 2**26])
def test_best_segment_is_the_fastest(p: int, nbytes: int) -> None:
    def seconds(segment: int) -> float:
        return cost("ring", "broadcast", p, nbytes, segment).seconds(LATENCY_BYTES, 1)

    best = seconds(best_segment(nbytes, p - 2))
    assert best <= 1.02 * min(seconds(2**power) for power in range(10, 27))
    # (sqrt((p-2) alpha) + sqrt(S beta))^2
    assert best == pytest.approx((((p - 2) * LATENCY_BYTES) ** 0.5 + nbytes**0.5) ** 2, rel=0.02)


def test_segment_of_an_empty_tensor_and_without_a_pipeline() -> None:
    assert best_segment(0, 5) == 1 and best_segment(1000, 0) == 1000 and best_segment(10, 3) == 10


def test_recursive_halving_is_used_by_three_or_more_ranks_for_long_tensors() -> None:
    assert prefers_doubling(2, 2**30)
    for p in (3, 4, 6, 8, 9):
        assert prefers_doubling(p, 1000) and not prefers_doubling(p, 2**24)


def test_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(CommunicationError, match="^no cost of all_gather by 'tree': .* by recursive, ring$"):
        cost("tree", "all_gather", 4, 100)
    with pytest.raises(CommunicationError, match="scan is known by none$"):
        cost("tree", "scan", 4, 100)
