"""Waits of a rank: named, timed, and reported as the outermost one."""

from __future__ import annotations

import pytest

from hpctrain.comm.transport.waiting import Activity, timeout_seconds
from hpctrain.errors import SettingsError


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
