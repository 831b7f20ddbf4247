"""Chains of operations in flight; recorders, which restore the one attached before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpctrain.comm.transport.base import Chain, Finished, Recordable, Work


class Slow:
    """Handle that is done at the second test."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log, self._looks = name, log, 0
        log.append(f"start {name}")

    def done(self) -> bool:
        self._looks += 1
        return self._looks > 1

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def links(log: list[str]) -> Iterator[Work]:
    yield Slow("one", log)
    yield Finished()
    yield Slow("two", log)
    log.append("end")


def test_chain_starts_each_link_after_the_previous_one_has_ended() -> None:
    log: list[str] = []
    chain = Chain(links(log))
    assert log == ["start one"]
    assert not chain.done() and log == ["start one"]
    assert not chain.done() and log == ["start one", "start two"]
    assert chain.done() and log == ["start one", "start two", "end"]
    chain.wait()
    assert chain.done() and log[-1] == "end"


def test_chain_waits_for_all_links() -> None:
    log: list[str] = []
    chain = Chain(links(log))
    chain.wait()
    assert log == ["start one", "wait one", "start two", "wait two", "end"] and chain.done()


def test_an_empty_chain_is_done() -> None:
    chain = Chain(iter(()))
    chain.wait()
    assert chain.done()


def test_an_inner_recording_replaces_the_outer_one_meanwhile() -> None:
    thing = Recordable()
    with thing.recording() as outer:
        assert thing.recorder is outer
        outer.count("send", 3)
        with thing.recording() as inner:
            assert thing.recorder is inner
            inner.count("send", 4)
        assert thing.recorder is outer
        outer.count("send", 5)
        outer.count("recv", 0)
    assert thing.recorder is None
    assert outer.calls == {"send": 2, "recv": 1} and outer.bytes == {"send": 8, "recv": 0}
    assert inner.calls == {"send": 1} and inner.bytes == {"send": 4}


def test_a_recording_ends_with_an_error() -> None:
    thing = Recordable()
    with pytest.raises(KeyError):
        with thing.recording():
            raise KeyError
    assert thing.recorder is None
