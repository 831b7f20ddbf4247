"""Division of the update between device and host, from measurements of the first steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.comm.device.streams import Streams
from hpctrain.parallel.offload.autotune import ShareFinder, last_groups, limit_to_memory, move_states


@pytest.mark.parametrize(
    "share, count",
    [(0, 0), (0.1, 0), (0.16, 1), (0.5, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4), (1, 4)],
)
def test_share_is_rounded_to_whole_groups_from_the_last(share: float, count: int) -> None:
    assert last_groups([10, 20, 40, 30], share) == [0, 1, 2, 3][4 - count :]


def test_without_groups_none_stays_on_the_device() -> None:
    assert last_groups([], 1.0) == []


# Choice of the share from measurements of the first steps -------------------------------------------------------------


NBYTES = [100, 100, 100, 100]


def found(update: float, free_bytes: int) -> list[list[int]]:
    """Return the groups to move after each step, if backward passes take 1 s and the update ``update`` seconds.

    The first two steps take longer, which must not matter.
    """
    clock = [0.0]
    finder = ShareFinder(Streams(), lambda: clock[0], lambda device: free_bytes)
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


def test_updates_too_slow_for_the_host_move_after_the_third_step() -> None:
    assert found(update=2.0, free_bytes=10**6) == [[], [], [2, 3]]
    assert found(update=4.0, free_bytes=10**6) == [[], [], [1, 2, 3]]
    assert found(update=0.9, free_bytes=10**6) == [[], [], []]


def test_groups_move_only_while_there_is_memory() -> None:
    assert found(update=2.0, free_bytes=7 * 100) == [[], [], [3]]
    assert limit_to_memory([1, 2, 3], [10, 30, 20, 10], 4 * 30) == [2, 3]
    assert limit_to_memory([3], NBYTES, 0) == []


def test_without_measurements_no_group_moves() -> None:
    finder = ShareFinder(Streams())
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
