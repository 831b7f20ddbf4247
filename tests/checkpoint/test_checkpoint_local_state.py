"""Optimizer state: a resumed optimizer continues bitwise as an uninterrupted one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_model, same, train

from hpctrain import checkpoint
from hpctrain.errors import CheckpointError, UsageError

Maker = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Maker] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw plain": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "adam, rate as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def normal(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict with sorted dictionaries: their order has no meaning."""
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    states = {key: dict(sorted(value.items())) for key, value in sorted(state["state"].items())}
    return {"groups": groups, "state": states}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("fresh", [True, False])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, maker: Maker, fresh: bool) -> None:
    model = make_model()
    optimizer = maker(model.parameters())
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    other = make_model()
    resumed = maker(other.parameters())
    if not fresh:
        train(other, resumed, 2, seed=9)
    checkpoint.load(tmp_path / "c.h5", model=other, optimizer=resumed)
    assert same(normal(resumed.state_dict()), normal(optimizer.state_dict()))
    train(model, optimizer, 3, seed=4)
    train(other, resumed, 3, seed=4)
    assert same(other.state_dict(), model.state_dict())
    assert same(normal(resumed.state_dict()), normal(optimizer.state_dict()))


def test_loading_agrees_with_torchs_load_state_dict(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, 3)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    ours, theirs = (torch.optim.AdamW(model.parameters(), fused=True) for _ in range(2))
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    checkpoint.load(tmp_path / "c.h5", model=model, optimizer=ours)
    assert same(normal(ours.state_dict()), normal(theirs.state_dict()))


def test_moments_keep_their_dtype_with_bfloat16_parameters(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.full((2, 3), 1 / 3)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    resumed = torch.optim.AdamW(model.parameters())
    checkpoint.load(tmp_path / "c.h5", model=model, optimizer=resumed)
    assert same(resumed.state[model.weight]["exp_avg"], torch.full((2, 3), 1 / 3))


def test_existing_state_is_filled_in_place(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, 1)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    pointers = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    train(model, optimizer, 1)
    checkpoint.load(tmp_path / "c.h5", model=model, optimizer=optimizer)
    assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == pointers


def test_plain_values_in_the_state_round_trip(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"count": 7, "rate": 0.1, "name": "x", "seen": True, "nothing": None, "list": [1, 2]}
    optimizer.state[model.weight] = dict(state)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    resumed = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.load(tmp_path / "c.h5", model=model, optimizer=resumed)
    assert same(dict(sorted(resumed.state[model.weight].items())), dict(sorted(state.items())))
    assert model.bias not in resumed.state


def test_hyperparameters_come_from_the_file_and_flags_from_the_program(tmp_path: Path) -> None:
    model = make_model()
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias], "weight_decay": 0.25}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), fused=True)
    optimizer.param_groups[0]["initial_lr"] = 0.75
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    plain = torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [model[0].bias]}], foreach=False)
    checkpoint.load(tmp_path / "c.h5", model=model, optimizer=plain)
    first, second = plain.param_groups
    assert (first["lr"], first["initial_lr"], second["weight_decay"]) == (0.5, 0.75, 0.25)
    assert first["betas"] == (0.8, 0.9) and isinstance(first["betas"], tuple)
    assert first["foreach"] is False and first["fused"] is None


def test_step_counters_have_the_dtype_that_the_running_optimizer_uses(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train(model, optimizer, 2)
    for state in optimizer.state.values():
        state["step"] = state["step"].double()
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    for flags, dtype in (({"fused": True}, torch.float32), ({"foreach": False}, torch.float64)):
        resumed = torch.optim.AdamW(model.parameters(), **flags)
        checkpoint.load(tmp_path / "c.h5", model=model, optimizer=resumed)
        assert {state["step"].dtype for state in resumed.state.values()} == {dtype}
        assert {state["step"].item() for state in resumed.state.values()} == {2.0}


def test_another_optimizer_or_grouping_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    train(model, optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    for other, message in (
        (torch.optim.SGD(model.parameters(), lr=0.1), "optimizer +kind +AdamW +SGD"),
        (torch.optim.AdamW([model[0].weight]), "optimizer: 0.bias +unexpected +group 0 +-"),
        (
            torch.optim.AdamW([{"params": [model[0].weight]}, {"params": list(model.parameters())[1:]}]),
            "optimizer: 0.bias +missing +- +group 1",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path / "c.h5", model=model, optimizer=other)
    assert same(model.state_dict(), before) and not other.state
    checkpoint.save(tmp_path / "m.h5", model=model)
    with pytest.raises(CheckpointError, match="optimizer +missing +- +AdamW"):
        checkpoint.load(tmp_path / "m.h5", model=model, optimizer=optimizer)


def test_state_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(UsageError, match=r"parameter 0 of group 0, shape \(3,\), is not a parameter of the model"):
        checkpoint.save(tmp_path / "c.h5", model=model, optimizer=stranger)
    odd = torch.optim.SGD(model.parameters(), lr=0.1)
    odd.state[model.weight] = {"history": {1, 2}}
    with pytest.raises(UsageError, match="history of the optimizer's state of weight"):
        checkpoint.save(tmp_path / "c.h5", model=model, optimizer=odd)
    assert not (tmp_path / "c.h5").exists()
