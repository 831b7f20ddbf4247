"""Waits of a rank: named, timed, and reported as the outermost one."""

from __future__ import annotations

import threading
import time

import pytest

from hpctrain.comm.transport.waiting import Activity, limits, timeout_seconds, until
from hpctrain.errors import DeadlineError, SettingsError


class FakeClock:
    """Clock that tests advance by hand."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_wait_is_named_and_timed(clock: FakeClock) -> None:
    waiting = Activity(clock)
    assert (waiting.operation, waiting.seconds, waiting.count) == ("", 0.0, 0)
    with waiting("barrier"):
        clock.now += 2
        assert (waiting.operation, waiting.seconds, waiting.count) == ("barrier", 2.0, 1)
    clock.now += 5
    assert (waiting.operation, waiting.seconds, waiting.total) == ("", 0.0, 2.0)
    with waiting("send"):
        clock.now += 1
    assert (waiting.total, waiting.count) == (3.0, 2)


def test_a_nested_wait_is_part_of_the_outer_one(clock: FakeClock) -> None:
    waiting = Activity(clock)
    with waiting("all_reduce"):
        clock.now += 1
        with waiting("send"):
            clock.now += 1
            assert (waiting.operation, waiting.count) == ("all_reduce", 1)
        assert waiting.seconds == 2.0
    assert waiting.total == 2.0


def test_an_error_ends_the_wait(clock: FakeClock) -> None:
    waiting = Activity(clock)
    with pytest.raises(KeyError), waiting("barrier"):
        raise KeyError
    assert waiting.operation == ""
    with waiting("send"):
        assert waiting.operation == "send"


def test_a_call_is_recorded_as_a_wait(clock: FakeClock) -> None:
    waiting, seen = Activity(clock), []

    def call() -> None:
        clock.now += 2
        seen.append((waiting.operation, waiting.seconds, waiting.count))

    recorded = waiting.around("all_reduce", call)
    recorded()
    with waiting("broadcast"):
        recorded()
    assert seen == [("all_reduce", 2.0, 1), ("broadcast", 2.0, 2)]
    assert (waiting.operation, waiting.seconds, waiting.total) == ("", 0.0, 4.0)
    with pytest.raises(ZeroDivisionError):
        waiting.around("send", lambda: 1 / 0)()
    with waiting("recv"):
        assert waiting.operation == "recv"


@pytest.mark.parametrize("text, seconds", [(None, 600.0), ("3", 3.0), ("0.5", 0.5), ("1e3", 1000.0)])
def test_the_timeout_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float
) -> None:
    monkeypatch.delenv("HPCTRAIN_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("HPCTRAIN_TIMEOUT", text)
    assert timeout_seconds() == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan"])
def test_an_invalid_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", text)
    with pytest.raises(SettingsError, match=f"HPCTRAIN_TIMEOUT='{text}' is not a number of seconds above 0"):
        timeout_seconds()


def test_waits_of_several_threads_leave_no_operation_behind() -> None:
    waiting = Activity()
    recorded = waiting.around("recorded", lambda: None)
    stop = threading.Event()

    def work(name: str) -> None:
        while not stop.is_set():
            with waiting(name):
                with waiting("nested"):
                    recorded()
            recorded()

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    while waiting.count < 20_000:
        time.sleep(0)
    stop.set()
    for thread in threads:
        thread.join()
    assert waiting.operation == ""
    before = waiting.count
    with waiting("send"):
        assert waiting.operation == "send"
    assert (waiting.operation, waiting.count) == ("", before + 1)


def test_the_wait_of_the_first_thread_is_recorded(clock: FakeClock) -> None:
    waiting = Activity(clock)
    waiting.begin("first")

    def second() -> None:
        with waiting("second"):
            assert waiting.operation == "first"
        assert waiting.operation == "first"

    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    assert (waiting.operation, waiting.count) == ("first", 1)
    waiting.end()
    assert waiting.operation == ""


def test_a_limit_ends_waits_of_its_thread() -> None:
    assert not limits.exist
    with limits.within(0.02, "an operation"):
        assert limits.exist and limits.left <= 0.02
        with pytest.raises(DeadlineError, match="^late: rank 1$"):
            until(lambda: False, "barrier", lambda: "late: rank 1")
        with pytest.raises(DeadlineError, match=r"an operation has not .* timeout of 0\.02 s: rank 2 is late"):
            limits.check("rank 2 is late")
        with limits.within(60, "another one"):
            limits.check()
            assert limits.left > 50
        with pytest.raises(DeadlineError):
            limits.check()
        others: list[bool] = []
        thread = threading.Thread(target=lambda: others.append(limits.exist))
        thread.start()
        thread.join()
        assert others == [False]
    assert not limits.exist
    limits.check()


def test_a_cancelled_operation_ends_at_once() -> None:
    reasons: list[str] = []
    with limits.within(60, "an operation", lambda: "".join(reasons)):
        limits.check()
        reasons.append("it was aborted")
        with pytest.raises(DeadlineError, match="^an operation: it was aborted$"):
            until(lambda: False, "barrier", lambda: "late")
