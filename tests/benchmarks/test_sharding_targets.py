"""Targets of sharding, checked with made-up figures."""

from __future__ import annotations

from typing import Any

import pytest
from saving.targets import Target
from sharding.formulas import largest_unit, moments_of_rank, parameters_of_rank
from sharding.names import ALONE, DDP, FSDP, PARAMETERS, PASSING, TORCH_DDP, TORCH_FSDP, ZERO1, ZERO2
from sharding.targets import targets
from sharding.task import FULL, SMALL, Task

FACTS = {"ranks": 4, "batch": 1, "parameters": 1000, "largest_unit": 100, "padding": 5.0}


def memory(name: str, **changes: Any) -> dict[str, Any]:
    most = {PARAMETERS: {"node": 1000.0, "rank": 350.0}}
    return {name: {"facts": FACTS, "most": most, "moments": [500] * 4, **changes}}


def only(times: dict[str, float], figures: dict[str, Any], start: str) -> Target:
    made = targets({name: {"median": seconds} for name, seconds in times.items()}, figures)
    (one,) = [one for one in made if one.what.startswith(start)]
    return one


def test_a_step_is_compared_with_our_ddp_and_with_torch() -> None:
    times = {DDP: 1.0, FSDP: 1.05, TORCH_FSDP: 1.05 * 1.8}
    assert only(times, {}, f"step: {FSDP}").met and only(times, {}, f"step: {TORCH_FSDP}").met
    times[FSDP] = 1.06
    assert not only(times, {}, f"step: {FSDP}").met and not only(times, {}, f"step: {TORCH_FSDP}").met
    assert only(times, {}, f"step: {FSDP}").value == pytest.approx(1.06)


@pytest.mark.parametrize("name, where, fits", [(FSDP, "node", 1050.0), (PASSING, "rank", 367.5)])
def test_parameters_are_compared_with_their_formula(name: str, where: str, fits: float) -> None:
    for value, met in ((fits, True), (fits + 1, False)):
        most = {PARAMETERS: {"node": 0.0, "rank": 0.0, where: value}}
        assert only({}, memory(name, most=most), "memory: parameters").met is met


def test_moments_are_one_copy_and_exceed_a_ranks_share_only_by_padding() -> None:
    ranks = [510, 510, 510, 470]
    assert only({}, memory(ZERO1, moments=ranks), "memory: moments of a rank").met
    assert only({}, memory(ZERO1, moments=ranks), "memory: moments of all").met
    assert not only({}, memory(ZERO1, moments=[511, 510, 510, 469]), "memory: moments of a rank").met
    assert not only({}, memory(ZERO1, moments=[510] * 4), "memory: moments of all").met


def test_without_figures_there_are_no_targets() -> None:
    assert not list(targets({}, {})) and not list(targets({FSDP: {"median": 1.0}}, memory(DDP)))


@pytest.mark.parametrize(
    "names, parameters, moments",
    [((ALONE, DDP, TORCH_DDP), 1000, 2000), ((ZERO1, ZERO2, FSDP), 250, 500), ((PASSING, TORCH_FSDP), 350, 500)],
)
def test_formulas_give_the_bytes_per_rank(names: tuple[str, ...], parameters: int, moments: int) -> None:
    for name in names:
        assert (parameters_of_rank(name, FACTS), moments_of_rank(name, FACTS)) == (parameters, moments)


@pytest.mark.parametrize("shape, width", [(FULL, 512), (SMALL, 64)])
def test_the_largest_unit_is_a_block(shape: Any, width: int) -> None:
    assert largest_unit(Task(shape)) == 4 * (12 * width**2 + 13 * width)  # as in the paper on GPT-2


def test_the_model_has_the_requested_size() -> None:
    assert Task().parameter_bytes / 4 == pytest.approx(25.5e6, rel=0.01)
