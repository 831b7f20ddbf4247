"""Measured balance of device and host: the share follows from the times of the first steps and the free memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.comm.device.streams import HostStreams
from hpctrain.parallel.offload import autotune
from hpctrain.parallel.offload.autotune import ShareFinder, limit_to_memory, move_states

NBYTES = [100, 100, 100, 100]


def found(monkeypatch: pytest.MonkeyPatch, update: float, free_bytes: int) -> list[list[int]]:
    """Return the groups to move after each step, if backward passes take 1 s and the update ``update`` seconds.

    The first two steps take longer, which must not matter.
    """
    clock = [0.0]
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    finder = ShareFinder(torch.device("cpu"), HostStreams())
    monkeypatch.setattr(finder, "free_bytes", lambda: free_bytes)
    one_pass: Any = SimpleNamespace(elements=0, seconds=0.0)
    moves = []
    for step in range(5):
        for _ in range(2):
            finder.begin()
            clock[0] += 0.5 if step > 1 else 50.0
            finder.end()
        one_pass.elements += 1000 if step else 0
        one_pass.seconds += update if step > 1 else 70.0
        if not finder.decided:
            moves.append(finder.groups_to_move(one_pass, NBYTES))
    return moves


def test_updates_too_slow_for_the_host_move_after_the_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, update=2.0, free_bytes=10**6) == [[], [], [2, 3]]
    assert found(monkeypatch, update=4.0, free_bytes=10**6) == [[], [], [1, 2, 3]]
    assert found(monkeypatch, update=0.9, free_bytes=10**6) == [[], [], []]


def test_groups_move_only_while_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, update=2.0, free_bytes=7 * 100) == [[], [], [3]]
    assert limit_to_memory([1, 2, 3], [10, 30, 20, 10], 4 * 30) == [2, 3]
    assert limit_to_memory([3], NBYTES, 0) == []


def test_without_measurements_no_group_moves() -> None:
    finder = ShareFinder(torch.device("cpu"), HostStreams())
    one_pass: Any = SimpleNamespace(elements=0, seconds=0.0)
    assert [finder.groups_to_move(one_pass, NBYTES) for _ in range(3)] == [[], [], []] and finder.decided


@pytest.mark.parametrize("fused", [True, False])
def test_states_move_with_their_parameter_in_the_optimizers_own_layout(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    parameter.grad = torch.ones(4)
    optimizer.step()
    state = optimizer.state[parameter]
    before = dict(state)
    move_states(optimizer, parameter, torch.device("meta"))
    assert state["exp_avg"].is_meta and state["exp_avg_sq"].is_meta
    assert state["step"].is_meta is fused and (fused or state["step"] is before["step"])
