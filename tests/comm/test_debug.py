"""HPCTRAIN_CHECK=order: ranks that call different collectives fail at once, and both source lines are named."""

from __future__ import annotations

import time
from inspect import currentframe
from typing import Any

import pytest
import torch
from support.pace import scaled

from hpctrain.comm.debug import (
    PACKAGE,
    RECORD,
    CollectiveRecord,
    MismatchDetector,
    call_site,
    check_enabled,
    mismatch_detector,
    pack_record,
    unpack_record,
)
from hpctrain.errors import DeadlineError, MismatchError, SettingsError


@pytest.fixture
def check(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HPCTRAIN_CHECK", "order")
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "20")
    check = mismatch_detector(comm.transport)
    assert isinstance(check, MismatchDetector)
    return check


def line() -> int:
    caller = currentframe()
    assert caller is not None and caller.f_back is not None
    return caller.f_back.f_lineno


@pytest.mark.ranks
def test_equal_calls_pass(check: Any) -> None:
    for numel in (0, 1, 5):
        check("all_reduce", torch.empty(numel), detail="sum")
        check("barrier")
    check.free()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "operation, shape, dtype, detail, differs",
    [
        ("broadcast", (4, 3), torch.float32, "sum", "operation"),
        ("all_reduce", (3, 4), torch.float32, "sum", "shape"),
        ("all_reduce", (4, 3), torch.float64, "sum", "dtype"),
        ("all_reduce", (4, 3), torch.float32, "max", "root, reduction or place"),
    ],
)
def test_the_first_difference_is_named_on_all_ranks(
    comm: Any, check: Any, operation: str, shape: tuple[int, ...], dtype: torch.dtype, detail: str, differs: str
) -> None:
    check("barrier")
    odd = comm.size - 1
    started = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        if comm.rank == odd:
            here = line() + 1
            check(operation, torch.empty(shape, dtype=dtype), detail=detail)
        else:
            here = line() + 1
            check("all_reduce", torch.empty(4, 3), detail="sum")
    assert time.monotonic() - started < scaled(5)
    text = str(caught.value)
    assert text.startswith(f"collective 2: the ranks differ in {differs}: rank")
    name = str(dtype).removeprefix("torch.")
    assert f"rank {odd}: {operation}({detail}) of {name} {list(shape)} at comm/test_debug.py:" in text
    assert "all_reduce(sum) of float32 [4, 3] at comm/test_debug.py:" in text
    assert f"test_debug.py:{here}" in text
    assert caught.value.everywhere and comm.all_gather_object(text) == [text] * comm.size
    check.free()


@pytest.mark.ranks
@pytest.mark.parametrize("eager", [0, 1])
def test_a_rank_with_an_extra_call_names_the_missing_ranks(
    comm: Any, check: Any, eager: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.5")
    check("broadcast", torch.empty(7))
    if comm.rank == eager:
        started = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            check("all_reduce", torch.empty(2), detail="sum")
        assert 0.4 < time.monotonic() - started < scaled(3)
        others = [rank for rank in range(comm.size) if rank != eager]
        who = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
        text = str(caught.value)
        assert text.startswith(f"collective 2: {who} not arrived within 0.5 s (HPCTRAIN_TIMEOUT); ")
        assert f"rank {eager}: waiting in all_reduce(sum) of float32 [2] at comm/test_debug.py:" in text
        assert ": last in broadcast of float32 [7] at comm/test_debug.py:" in text
    comm.barrier()


@pytest.mark.ranks(3, 4)
def test_a_hanging_rank_is_distinguished_from_waiting_ranks(
    comm: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.5")
    if comm.rank != 1:
        with pytest.raises(DeadlineError) as caught:
            check("barrier")
        waiting = ", ".join(str(rank) for rank in range(comm.size) if rank != 1)
        late = "rank 1 has not arrived within 0.5 s (HPCTRAIN_TIMEOUT)"
        assert f"{late}; ranks {waiting}: waiting in barrier at" in str(caught.value)
    comm.barrier()


@pytest.mark.ranks
def test_different_source_lines_are_logged_once_and_are_no_error(comm: Any, check: Any, messages: list[str]) -> None:
    for _ in range(2):
        if comm.rank == 0:
            check("broadcast", torch.empty(1))
        else:
            check("broadcast", torch.empty(1))
    assert len(messages) == (comm.rank == 0)
    if messages:
        assert messages[0].startswith(
            "collective 1, broadcast of float32 [1], is called from different lines: rank 0: "
        )
    check.free()


@pytest.mark.ranks
def test_the_variable_must_be_equal_on_all_ranks(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_CHECK", "order" if comm.rank == 1 else "")
    with pytest.raises(MismatchError, match="HPCTRAIN_CHECK is '' on rank 0 and 'order' on rank 1"):
        mismatch_detector(comm.transport)


@pytest.mark.ranks
def test_without_the_variable_there_is_no_check(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCTRAIN_CHECK", raising=False)
    assert mismatch_detector(comm.transport) is None


def test_one_rank_needs_no_check(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_CHECK", "order")
    assert check_enabled() and mismatch_detector(comm.transport) is None


def test_an_unknown_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTRAIN_CHECK", "everything")
    with pytest.raises(SettingsError, match="HPCTRAIN_CHECK='everything': allowed is order"):
        check_enabled()


def test_the_line_of_a_hook_is_followed_by_the_users_line() -> None:
    code = compile("def hook(action):\n    return action()\n", f"{PACKAGE}parallel/ddp.py", "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    here = line() + 1
    assert space["hook"](call_site) == f"parallel/ddp.py:2 from comm/test_debug.py:{here}"
    assert call_site() == f"comm/test_debug.py:{line()}"


def test_a_record_holds_the_longest_texts() -> None:
    call = CollectiveRecord(10**9, "reduce_scatter", "average", "f" * 180, "1" * 180, "\U0001f600" * 180)
    packed = pack_record(call)
    assert packed.numel() == RECORD and unpack_record(packed) == call


@pytest.mark.ranks
def test_too_long_texts_are_truncated(check: Any) -> None:
    many = torch.empty([1] * 500)
    check("all_reduce", many, many)
    check.free()
