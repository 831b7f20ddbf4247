from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from piping.task import SMALL
from piping.timing import take_turns
from torch import nn

from hpctrain import trace


class OneRank:
    """Communicator of one rank with the methods that clocks and turns use; records its barriers."""

    rank, size, node = 0, 1, 0

    def __init__(self) -> None:
        self.said: list[str] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        self.said.append("barrier")
        assert not trace.recording, "waiting for the others is no part of a step"


class Candidate:
    """Candidate that records the state at the begin of a step."""

    microbatches = 2

    def __init__(self, name: str, comm: OneRank) -> None:
        self.name, self.comm = name, comm
        self.model = nn.Linear(1, 1)
        self.batches: list[torch.Tensor] = []

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert self.model.weight.grad is None and not gc.isenabled()
        self.comm.said.append(self.name)
        self.batches.append(inputs)
        with trace.span("backward", chunk=1, microbatch=0):
            self.model.weight.grad = torch.ones(1, 1)
            with trace.span("send"):
                pass
        if self.name == "fails":
            raise ValueError


def test_candidates_take_turns_and_steps_have_their_spans() -> None:
    comm: Any = OneRank()
    candidates: Any = {name: Candidate(name, comm) for name in "abc"}
    steps = take_turns(comm, candidates, SMALL, 1, 3)
    assert comm.said[::2] == ["barrier"] * 12
    orders = ["".join(comm.said[1::2][start : start + 3]) for start in range(0, 12, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders) and len(set(orders)) > 1
    assert all(x.equal(y) for x, y in zip(candidates["a"].batches, candidates["c"].batches))
    for name in "abc":
        assert len(steps[name]) == 3
        for step in steps[name]:
            backward, send = step.spans
            assert (backward.name, backward.chunk, backward.microbatch, send.name) == ("backward", 1, 0, "send")
            assert step.start <= backward.start <= send.start <= send.end <= backward.end <= step.end
            assert step.seconds == step.end - step.start


def test_a_failing_step_restores_all_switches() -> None:
    comm: Any = OneRank()
    candidates: Any = {"fails": Candidate("fails", comm)}
    with pytest.raises(ValueError):
        take_turns(comm, candidates, SMALL, 0, 1)
    assert gc.isenabled() and not trace.recording
