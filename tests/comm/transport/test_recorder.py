"""Recorders: they count while attached, and restore the recorder attached before."""

from __future__ import annotations

import pytest

from hpctrain.comm.transport.base import Recordable


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
