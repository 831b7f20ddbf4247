"""Collective errors: all ranks succeed together, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.comm.agreement import agreed, on_first_rank
from hpctrain.errors import CheckpointError, DataError, HpctrainError

pytestmark = pytest.mark.ranks


def failing(error: Exception) -> Callable[[], Any]:
    def action() -> Any:
        raise error

    return action


def test_every_rank_gets_its_own_result(comm: Any) -> None:
    assert agreed(comm, lambda: 10 * comm.rank) == 10 * comm.rank
    assert agreed(comm, lambda: None) is None


def test_an_error_of_one_rank_is_raised_on_all_ranks(comm: Any) -> None:
    last = comm.size - 1
    action = failing(CheckpointError("disk full")) if comm.rank == last else lambda: 1
    with pytest.raises(CheckpointError) as caught:
        agreed(comm, action)
    assert str(caught.value) == f"rank {last}: disk full" and caught.value.everywhere


def test_an_error_of_rank_0_has_no_rank_prefix(comm: Any) -> None:
    with pytest.raises(DataError, match="^no such file$"):
        on_first_rank(comm, failing(DataError("no such file")))


def test_the_same_error_on_all_ranks_is_reported_once(comm: Any) -> None:
    with pytest.raises(DataError, match="^no such file$"):
        agreed(comm, failing(DataError("no such file")))


def test_different_errors_are_all_reported_with_the_class_of_the_first(comm: Any) -> None:
    action = failing(DataError("one") if comm.rank == 0 else KeyError("two"))
    with pytest.raises(DataError) as caught:
        agreed(comm, action)
    reasons = ["rank 0: one", *(f"rank {rank}: KeyError: 'two'" for rank in range(1, comm.size))]
    assert str(caught.value) == "; ".join(reasons)


def test_a_foreign_exception_becomes_an_HpctrainError(comm: Any) -> None:
    with pytest.raises(HpctrainError, match="^rank 1: OSError: broken$") as caught:
        agreed(comm, failing(OSError("broken")) if comm.rank == 1 else int)
    assert isinstance(caught.value.__cause__, OSError) == (comm.rank == 1)


def test_only_the_first_rank_acts(comm: Any) -> None:
    calls = []
    assert on_first_rank(comm, lambda: calls.append(1) or "done") == "done"
    assert len(calls) == (comm.rank == 0)


def test_ranks_can_continue_after_an_error(comm: Any) -> None:
    with pytest.raises(HpctrainError):
        agreed(comm, failing(ValueError("x")) if comm.rank else int)
    assert agreed(comm, lambda: comm.all_gather_object(comm.rank)) == list(range(comm.size))
