"""Exchange at the end of a step: averages by name in one small message, and requests to stop or save."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.train.exchange import LOGGED, NUMBERS, StepExchange, StepLog, StepRequests


def test_equal_values_may_be_lists(comm: Any) -> None:
    log, counts = StepLog(), [3, 1]
    log.note({"loss": torch.tensor(2.0)}, {"rate": 0.1, "counts": counts})
    counts.append(7)  # the logged value stays
    assert (log.averaged, log.same) == ({"loss": 2.0}, {"rate": 0.1, "counts": [3, 1]})
    log.clear()
    assert (log.averaged, log.same) == ({}, {})


@pytest.mark.ranks(1, 2, 3, 4)
def test_values_are_averaged_by_name(comm: Any) -> None:
    exchange = StepExchange(comm)
    for step in range(1, 4):
        logged = {"b": float(comm.rank), "a": 10.0 * step, "never seen": math.nan}
        averages, requests = exchange(logged, StepRequests(), step)
        assert averages["a"] == 10.0 * step and averages["b"] == pytest.approx((comm.size - 1) / 2, rel=1e-15)
        assert math.isnan(averages["never seen"]) and requests == StepRequests()
    assert exchange({}, StepRequests(), 4) == ({}, StepRequests())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("wish", ["stop", "save", "busy"])
def test_requests_of_one_rank_reach_all_ranks(comm: Any, wish: str) -> None:
    exchange = StepExchange(comm)
    for rank in range(comm.size):
        assert exchange({"x": 1.0}, StepRequests(**{wish: comm.rank == rank}), 1)[1] == StepRequests(**{wish: True})
    assert exchange({"x": 1.0}, StepRequests(), 2)[1] == StepRequests()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("names", [("loss",), (), ("loss", "extra"), ("los",)])
def test_different_names_on_one_rank_are_an_error(comm: Any, names: tuple[str, ...]) -> None:
    exchange = StepExchange(comm)
    own = names if comm.rank == comm.size - 1 else ("loss", "rate")
    with pytest.raises(UsageError, match=f"in step 5: rank 0 logs loss, rate, rank {comm.size - 1} logs") as found:
        exchange(dict.fromkeys(own, 1.0), StepRequests(), 5)
    assert found.value.everywhere


@pytest.mark.ranks(2)
def test_an_exchange_is_one_message_of_fixed_size(comm: Any) -> None:
    exchange = StepExchange(comm)
    for count in (0, LOGGED):
        with comm.recording() as recorder:
            exchange({f"v{number}": 1.0 for number in range(count)}, StepRequests(), 1)
        assert sum(recorder.calls.values()) == 1 and sum(recorder.bytes.values()) <= NUMBERS * 8


def test_a_log_holds_the_last_value_and_no_graph() -> None:
    log = StepLog()
    log.note({"loss": 1.0}, {"rate": 0.1})
    log.note({"loss": torch.tensor(2.5, requires_grad=True), "other": 3}, {})
    assert (log.averaged, log.same) == ({"loss": 2.5, "other": 3.0}, {"rate": 0.1})
    log.note({f"v{number}": 0.0 for number in range(LOGGED - 2)}, {})
    log.note({"loss": 2.0}, {})
    with pytest.raises(UsageError, match=f"can log {LOGGED} averaged numbers, not {LOGGED + 1}"):
        log.note({"one more": 0.0}, {})
    log.clear()
    assert not log.averaged and not log.same


@pytest.mark.parametrize("averaged, same", [({"step": 1.0}, {}), ({}, {"step": 1.0})])
def test_a_value_called_step_cannot_be_logged(averaged: dict[str, float], same: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="cannot log a value named step"):
        StepLog().note(averaged, same)


@pytest.mark.parametrize(
    "value, kind",
    [
        (torch.zeros(3), "a tensor of shape (3,)"),
        (torch.zeros(2, 0), "a tensor of shape (2, 0)"),
        (torch.tensor(1j), "a complex tensor"),
        (np.zeros((2, 2)), "an array of shape (2, 2)"),
        ("0.5", "'0.5'"),
        (None, "None"),
        (1 + 2j, "(1+2j)"),
        ([1.0, 2.0], "[1.0, 2.0]"),
    ],
)
def test_a_value_that_is_not_a_number_is_named(value: Any, kind: str) -> None:
    log = StepLog()
    with pytest.raises(UsageError) as found:
        log.note({"accuracy": 1.0, "loss": value}, {})
    assert str(found.value).startswith(f"run.log(loss=...): {kind}; allowed are numbers and tensors of one element")
    assert ("take its mean()" in str(found.value)) == (kind.startswith(("a tensor", "an array")))
    assert not log.averaged
    if not isinstance(value, list):
        with pytest.raises(UsageError, match=r"^run\.log\(same=\{'rate': \.\.\.\}\): "):
            log.note({}, {"rate": value})


def test_numbers_of_any_type_are_accepted() -> None:
    log = StepLog()
    log.note({"a": np.float32(0.5), "b": torch.ones(1, 1), "c": np.array([2]), "d": True, "e": np.int64(3)}, {"f": 4})
    assert log.averaged == {"a": 0.5, "b": 1.0, "c": 2.0, "d": 1.0, "e": 3.0} and log.same == {"f": 4}
    assert all(type(value) is float for value in log.averaged.values())
    log.note({}, {"g": np.float64(0.5), "h": [1, np.int64(2)], "i": torch.tensor(2.0)})
    assert log.same == {"f": 4, "g": 0.5, "h": [1, 2.0], "i": 2.0}
