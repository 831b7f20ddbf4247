"""Collective errors: all ranks succeed or raise the same error; with threads as ranks, and without ranks."""

from __future__ import annotations

import pytest
from support.checkpoints import ThreadRank, ThreadRanks

from hpctrain.comm.agreement import agreed
from hpctrain.errors import CheckpointError, HpctrainError, NonFiniteError, UsageError


def fail_on(failing: dict[int, Exception]) -> list[object]:
    def body(comm: ThreadRank) -> object:
        def action() -> int:
            if comm.rank in failing:
                raise failing[comm.rank]
            return comm.rank

        return agreed(comm, action)

    return ThreadRanks(3).run(body)


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
