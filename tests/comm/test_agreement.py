"""Collective errors: all ranks succeed or raise the same error; with threads as ranks, real ranks, and none."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints import on_threads

from hpctrain.comm.agreement import agreed, on_first_rank
from hpctrain.errors import CheckpointError, DataError, HpctrainError, NonFiniteError, UsageError


def fail_on(failing: dict[int, Exception]) -> list[object]:
    def body(comm: Any) -> object:
        def action() -> int:
            if comm.rank in failing:
                raise failing[comm.rank]
            return comm.rank

        return agreed(comm, action)

    return on_threads(3, body)


def test_results_stay_with_their_ranks() -> None:
    assert fail_on({}) == [0, 1, 2]
    assert agreed(None, lambda: 5) == 5


@pytest.mark.parametrize("error", [CheckpointError("disk full"), NonFiniteError("w is NaN"), UsageError("bad step")])
def test_one_failing_rank_fails_all_with_the_same_error(error: HpctrainError) -> None:
    results = fail_on({1: error})
    assert [type(result) for result in results] == [type(error)] * 3
    assert {str(result) for result in results} == {f"rank 1: {error}"}
    assert all(isinstance(result, HpctrainError) and result.everywhere for result in results)


def test_the_same_reason_on_all_ranks_is_reported_once() -> None:
    results = fail_on({rank: CheckpointError("no such file") for rank in range(3)})
    assert {str(result) for result in results} == {"no such file"}


def test_different_reasons_are_all_reported() -> None:
    results = fail_on({0: CheckpointError("disk full"), 2: CheckpointError("read-only")})
    assert {str(result) for result in results} == {"rank 0: disk full; rank 2: read-only"}


def test_an_unforeseen_error_does_not_block_the_other_ranks() -> None:
    results = fail_on({2: ZeroDivisionError("oops")})
    assert {str(result) for result in results} == {"rank 2: ZeroDivisionError: oops"}
    assert type(results[2]) is HpctrainError and isinstance(results[2].__cause__, ZeroDivisionError)


def test_without_ranks_errors_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError):
        agreed(None, lambda: 1 // 0)


@pytest.mark.ranks
def test_only_the_first_rank_acts_and_its_error_has_no_rank_prefix(comm: Any) -> None:
    calls = []

    def fail() -> None:
        raise DataError("no such file")

    assert on_first_rank(comm, lambda: calls.append(1) or "done") == "done"
    assert len(calls) == (comm.rank == 0)
    with pytest.raises(DataError, match="^no such file$"):
        on_first_rank(comm, fail)


@pytest.mark.ranks
def test_ranks_can_continue_after_an_error(comm: Any) -> None:
    last = comm.size - 1
    with pytest.raises(HpctrainError, match=f"^rank {last}: ZeroDivisionError: ") as caught:
        agreed(comm, lambda: 1 // (last - comm.rank))
    assert caught.value.everywhere
    assert agreed(comm, lambda: comm.all_gather_object(comm.rank)) == list(range(comm.size))
