"""Recorder of spans: recorded data, cost, and omissions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from hpctrain import trace
from hpctrain.comm.transport.waiting import Activity


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    yield
    trace.take()


def test_nothing_is_recorded_before_start_and_after_take() -> None:
    with trace.span("forward"):
        trace.add("optimizer", 0.0, 1.0)
    assert not trace.recording and trace.take() == trace.Recording()
    trace.start()
    assert trace.recording
    with trace.span("forward"):
        pass
    assert [span.name for span in trace.take().spans] == ["forward"]
    with trace.span("forward"):
        pass
    assert not trace.recording and trace.take().spans == []


def test_a_span_has_name_facts_thread_and_times() -> None:
    trace.start()
    before = time.monotonic()
    with trace.span("forward", microbatch=3, chunk=1):
        inside = time.monotonic()
    after = time.monotonic()
    (span,) = trace.take().spans
    assert (span.name, span.facts, span.thread) == ("forward", {"microbatch": 3, "chunk": 1}, threading.get_ident())
    assert before <= span.start <= inside <= span.end <= after


def test_nested_spans_are_ordered_by_their_ends() -> None:
    trace.start()
    with trace.span("backward"):
        with trace.span("reduce"):
            pass
    inner, outer = trace.take().spans
    assert (inner.name, outer.name) == ("reduce", "backward")
    assert outer.start <= inner.start <= inner.end <= outer.end


def test_a_span_that_raises_is_recorded_and_the_error_propagates() -> None:
    trace.start()
    with pytest.raises(KeyError), trace.span("forward"):
        raise KeyError
    assert [span.name for span in trace.take().spans] == ["forward"]


def test_a_span_that_outlasts_the_recording_is_omitted() -> None:
    trace.start()
    with trace.span("forward"):
        trace.take()
    trace.start()
    assert trace.take().spans == []


def test_threads_are_distinguished() -> None:
    trace.start()
    thread = threading.Thread(target=lambda: trace.add("send", 1.0, 2.0))
    thread.start()
    thread.join()
    trace.add("receive", 1.0, 2.0)
    one, two = trace.take().spans
    assert one.thread != two.thread == threading.get_ident()


def test_spans_beyond_the_limit_are_counted() -> None:
    trace.start(limit=2)
    for _ in range(5):
        trace.add("send", 0.0, 1.0)
    found = trace.take()
    assert (len(found.spans), found.dropped) == (2, 3)
    trace.start()
    assert trace.take().dropped == 0


@pytest.mark.parametrize(
    "operation, word",
    [
        ("all_reduce", "reduce"),
        ("reduce_scatter", "reduce"),
        ("nccl_all_reduce", "reduce"),
        ("send", "send"),
        ("isend", "send"),
        ("recv", "receive"),
        ("barrier", "wait"),
        ("all_gather", "wait"),
        ("device", "device"),
    ],
)
def test_waits_have_a_name_and_their_operation(operation: str, word: str) -> None:
    waiting = Activity()
    trace.start()
    with waiting(operation):
        with waiting("inside another"):
            pass
    waiting.around(operation, lambda: None)()
    first, second = trace.take().spans
    assert first.name == second.name == word
    assert first.facts == second.facts == {"operation": operation}
    assert first.start <= first.end <= second.start <= second.end
    assert waiting.total == pytest.approx(first.end - first.start + second.end - second.start)


def _cost(spans: int) -> float:
    """Return the seconds per span, the lowest of several tries."""

    def once() -> float:
        began = time.perf_counter()
        for _ in range(spans):
            with trace.span("forward", microbatch=3, chunk=1):
                pass
        return (time.perf_counter() - began) / spans

    return min(once() for _ in range(7))


def test_a_span_costs_little_while_no_recording_runs() -> None:
    """The limit is a hundredth of a pass of the smallest model, which takes some hundred microseconds."""
    assert _cost(2000) < 5e-6
