"""NCCL of CuPy: errors if it is missing or old, messages of a channel, failures and delays."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import pytest
import torch
from fakes.streams import LazyStreams
from support.nccl import UNIQUE, FakeNccl

from hpctrain.comm.device.nccl_channel import NcclChannel, load, op_code, reason_unavailable
from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import CommunicationError, DeadlineError


@pytest.fixture
def library() -> FakeNccl:
    return FakeNccl()


@pytest.fixture
def channel(library: FakeNccl) -> NcclChannel:
    return NcclChannel(library, LazyStreams(), 1, 0, UNIQUE)


def nothing(comm: Any, stream: int) -> None:
    pass


def test_a_failed_call_aborts_nccl_and_names_the_rank(channel: NcclChannel, library: FakeNccl) -> None:
    library.failure = RuntimeError("NCCL_ERROR_SYSTEM_ERROR")
    with pytest.raises(CommunicationError, match="NCCL failed on rank 0 of 1, cpu: NCCL_ERROR_SYSTEM_ERROR"):
        channel.start("send", [], lambda comm, stream: comm.send(0, 0, 1, 0, stream))
    assert library.comms[0].state == "aborted"


def test_an_asynchronous_failure_is_found_by_polling(channel: NcclChannel, library: FakeNccl) -> None:
    work = channel.start("all_reduce", [], nothing)
    assert not work.done()
    library.failure = RuntimeError("the other side has gone")
    with pytest.raises(CommunicationError, match="the other side has gone"):
        work.done()
    assert library.comms[0].state == "aborted"


def test_an_operation_that_does_not_end_is_aborted_at_the_deadline(
    channel: NcclChannel, library: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = channel.start("all_gather", [], nothing)
    time.sleep(0.02)
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "600")
    channel.start("broadcast", [], nothing)
    assert channel.hanging_operation(600) == "" and library.comms[0].state == "alive"
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.01")
    hanging = r"nccl all_gather has not ended within 0.01 s \(HPCTRAIN_TIMEOUT\) on rank 0 of 1, cpu"
    with pytest.raises(DeadlineError, match=hanging):
        first.done()
    assert library.comms[0].state == "aborted"


def test_the_deadline_holds_for_a_program_that_only_starts_operations(
    channel: NcclChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.01")
    channel.start("all_gather", [], nothing)
    time.sleep(0.02)
    with pytest.raises(DeadlineError, match="all_gather"):
        channel.start("broadcast", [], nothing)


def test_completed_operations_are_not_overdue(channel: NcclChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = channel.streams
    assert isinstance(streams, LazyStreams)
    channel.start("all_gather", [], nothing).wait()
    streams.finish()
    time.sleep(0.02)
    later = channel.start("broadcast", [], nothing)
    assert channel.hanging_operation(0.01) == ""
    time.sleep(0.02)
    assert "broadcast" in channel.hanging_operation(0.01)
    later.wait()
    streams.finish()
    assert later.done() and channel.hanging_operation(0.01) == ""


def test_a_watchdog_sees_calls_in_which_nccl_blocks_the_host(channel: NcclChannel) -> None:
    seen: list[str] = []
    channel.start("all_reduce", [], lambda comm, stream: seen.append(waiting.operation))
    assert seen == ["nccl_all_reduce"] and not waiting.operation


def test_messages_are_sent_in_one_group_and_in_order(channel: NcclChannel, library: FakeNccl) -> None:
    said: list[tuple[str, int]] = []
    works = [
        channel.defer(name, torch.empty(0), lambda comm, stream, name=name: said.append((name, library.depth)))
        for name in ("send", "recv", "send again")
    ]
    assert not said
    works[1].wait()
    assert said == [("send", 1), ("recv", 1), ("send again", 1)] and library.depth == 0
    assert works[0].event is works[2].event is not None


def test_close_waits_for_operations_in_flight(channel: NcclChannel, library: FakeNccl) -> None:
    done: list[int] = []
    streams = channel.streams
    assert isinstance(streams, LazyStreams)
    channel.start("all_reduce", [], lambda comm, stream: streams.enqueue(stream, lambda: done.append(1)))
    assert not done
    channel.close()
    assert done and library.comms[0].state == "destroyed"


# Library --------------------------------------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, nccl: Any) -> None:
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = nccl  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def test_a_missing_cupy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CommunicationError, match=r"NCCL needs CuPy \(pip install hpctrain\[cuda\]\): "):
        load()


def test_a_cupy_without_nccl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, types.SimpleNamespace(available=False))
    with pytest.raises(CommunicationError, match="CuPy has no NCCL: install nvidia-nccl-cu12"):
        load()


def test_an_nccl_too_old_to_send_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNccl(version=2604))
    with pytest.raises(CommunicationError, match="NCCL 2604 cannot send from rank to rank: 2.7 or newer is needed"):
        load()


def test_a_missing_gpu_is_reported_before_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FakeNccl()
    install(monkeypatch, found)
    assert load() is found
    assert reason_unavailable(has_gpu=False) == "no GPU is visible"
    assert reason_unavailable(has_gpu=True) == ""
    install(monkeypatch, types.SimpleNamespace(available=False))
    assert "CuPy has no NCCL" in reason_unavailable(has_gpu=True)


@pytest.mark.parametrize(
    "dtype, op, known",
    [
        (torch.float32, "sum", True),
        (torch.float32, "max", False),  # NCCL drops NaN
        (torch.bfloat16, "sum", False),  # NCCL rounds after every rank
        (torch.bfloat16, "max", False),
        (torch.int16, "sum", False),
        (torch.int64, "max", True),
        (torch.int64, "average", False),
        (torch.bool, "average", False),
        (torch.int32, "bxor", False),
    ],
)
def test_nccl_reduces_only_what_it_computes_as_torch_does(dtype: torch.dtype, op: str, known: bool) -> None:
    assert (op_code(dtype, op, 22105) is not None) == known
