"""Sparse tables on a parameter server, compared with one process that makes the same updates with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.asynchronous_fixtures import orders_of, take_turns
from support.tables import BAGS, KINDS, ROWS, batch, make_lookups, passes, plain, values_of

from hpctrain.checkpoint import load, save
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.parameter_server import ParameterServer
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.strategy import consensus_view


def make(comm: Any, kind: str, **server: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = make_lookups(kind)
    strategy = ParameterServer(model, comm, AsynchronousSettings(**server))
    strategy.check_optimizer(optimizer)
    return strategy, optimizer


def play(strategy: Any, optimizer: torch.optim.Optimizer, orders: list[list[int]], first: int = 0) -> None:
    """Run a step in which all workers read and compute, and then update one after the other."""
    for step, order in enumerate(orders, first):
        passes(strategy.model, strategy.comm.rank, step)
        strategy.drain()
        take_turns(strategy, optimizer, order)


def same(own: Any, ours: torch.Tensor, theirs: torch.Tensor, *, exact: bool = True) -> None:
    """Assert equal bits if all memory is shared and the updates are ``exact``; otherwise equality up to rounding.

    Between nodes, differences are added, which rounds once more.
    """
    tolerance = 0.0 if exact and own.nodes == 1 else 1e-6
    torch.testing.assert_close(ours, theirs, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.ranks
@pytest.mark.parametrize("kind, lock", [("sgd", False), ("adagrad", True), ("sparse_adam", True), ("adagrad", False)])
def test_a_scripted_order_of_updates_by_rows_equals_that_of_one_process(own: Any, kind: str, lock: bool) -> None:
    strategy, optimizer = make(own, kind, lock=lock)
    orders = orders_of(5, own.size, 5)
    play(strategy, optimizer, orders)
    expected, theirs = plain(kind, orders)
    with strategy.consensus_view():
        same(own, values_of(strategy.model), values_of(expected))
        for (name, ours), other in zip(strategy.model.named_parameters(), expected.parameters()):
            assert optimizer.state[ours].keys() == theirs.state[other].keys(), name
            for key, value in theirs.state[other].items():
                assert type(optimizer.state[ours][key]) is type(value)
                same(own, torch.as_tensor(optimizer.state[ours][key]), torch.as_tensor(value))
    strategy.detach()
    same(own, values_of(strategy.model), values_of(expected))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["adagrad", "sparse_adam"])
def test_synchronous_mode_makes_one_update_with_the_mean_of_rows(own: Any, kind: str) -> None:
    strategy, optimizer = make(own, kind, mode="synchronous")
    model, alone = make_lookups(kind)
    for step in range(4):
        share = own.size
        if step == 1 and own.size > 1:
            share = own.size - 1  # the last has no sample
        if own.rank < share:
            with strategy.no_sync():
                strategy.model(*batch(own.rank, step)).backward()
            strategy.model(*batch(own.rank, step + 50)).backward()
        else:
            strategy.join_empty()
        assert float(strategy.clip_grad_norm(1e9)) > 0
        optimizer.step()
        for rank in range(share):
            model(*batch(rank, step)).backward()
            model(*batch(rank, step + 50)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad / own.size
        alone.step()
        alone.zero_grad()
    with strategy.consensus_view():
        same(own, values_of(strategy.model), values_of(model), exact=False)
        assert len(set(own.all_gather_object(values_of(strategy.model).numpy().tobytes()))) == 1
        if kind == "sparse_adam":
            assert [state["step"] for state in optimizer.state.values()] == [4, 4]
    strategy.detach()


def counted(read: Any, asked: list[int]) -> Any:
    """Return a wrapper that reads memory and records the number of elements."""

    def count(rank: int, out: torch.Tensor, *place: Any) -> None:
        asked.append(out.numel())
        read(rank, out, *place)

    return count


@pytest.mark.ranks
def test_untouched_rows_keep_their_bits_and_are_not_communicated(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of a table of 13 are looked up: a step reads only these, and only these are sent between nodes."""
    strategy, optimizer = make(own, "sparse_adam")
    asked: list[int] = []
    for name in ("get", "get_rows"):
        monkeypatch.setattr(strategy.store.exposed, name, counted(getattr(strategy.store.exposed, name), asked))
    words, bags, exposed = torch.tensor([[2, 11, 2]]), torch.tensor([[0, 0]]), strategy.store.exposed
    before = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    far = [owner for owner in range(own.size) if exposed.view(owner) is None]
    touched = [(2, ROWS), (11, ROWS), (0, BAGS)]
    owners = [next(o for o in range(own.size) if r < n * (o + 1) // own.size) for r, n in touched]
    rows = sum(owner in far for owner in owners)
    for rank in range(own.size):  # one after the other: a waiting rank serves others, which is also counted
        asked.clear()
        with exposed.recording() as recorder:
            if rank == own.rank:
                strategy.model(words, bags).backward()
                optimizer.step()
                assert sum(asked) == 3 * 4 + rows * 3 * 4, "elements: what is near is updated where it is"
                assert recorder.bytes["get_rows"] == rows * (1 + 3) * 16  # for the lookup, then with both moments
                assert recorder.bytes["add_rows"] == rows * 3 * 16
                assert not recorder.bytes["get"] and not recorder.bytes["add"]
        strategy.drain()
    with strategy.consensus_view():
        after = strategy.model.state_dict()
        for name, kept in (("word.weight", [2, 11]), ("bag.weight", [0])):
            others = [row for row in range(len(after[name])) if row not in kept]
            assert torch.equal(after[name][others], before[name][others])
            assert after[name][kept].ne(before[name][kept]).all()
            moments = optimizer.state[strategy.model.get_parameter(name)]["exp_avg_sq"]
            assert not moments[others].any() and moments[kept].all()
    strategy.detach()


@pytest.mark.ranks
def test_passes_read_the_current_values_of_a_row_once_per_step(own: Any) -> None:
    strategy, optimizer = make(own, "sgd", lock=True)
    words, bags = torch.tensor([[4, 4]]), torch.tensor([[1]])
    weight = strategy.model.word.weight
    strategy.model(words, bags).backward()
    optimizer.step()
    strategy.drain()
    stale = weight[4].tolist()
    loss = strategy.model(words, bags)
    strategy.drain()
    assert weight[4].tolist() != stale
    assert len({tuple(row) for row in own.all_gather_object(weight[4].tolist())}) == 1
    seen = weight[4].tolist()
    if own.rank == 0:
        loss.backward()
        optimizer.step()
    strategy.drain()
    strategy.model(words, bags)
    assert (weight[4].tolist() == seen) == (own.rank > 0), "within a step a row stays what it was"
    optimizer.zero_grad()
    strategy.drain()
    strategy.detach()


@pytest.mark.ranks
def test_with_the_lock_no_update_of_a_row_is_lost(own: Any) -> None:
    strategy, optimizer = make(own, "sgd", lock=True)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    before = strategy.model.word.weight[[1, 12]].detach().clone()
    for _ in range(40):
        rows = torch.tensor([[1, 12]])
        strategy.model.word.weight.grad = torch.sparse_coo_tensor(rows, torch.ones(2, 4), (ROWS, 4))
        optimizer.step()
    with strategy.consensus_view():
        moved = before - strategy.model.word.weight[[1, 12]]
        torch.testing.assert_close(moved, torch.full_like(moved, 40.0 * own.size))
    strategy.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_resumes_bit_for_bit_under_a_server_and_under_ddp(comm: Any, kind: str, tmp_path: Path) -> None:
    """The file holds parameters, moments and update counts of tables as plain torch would have written them."""
    straight, optimizer = make(comm, kind)
    play(straight, optimizer, [[0]] * 3)
    path = tmp_path / "served.h5"
    with straight.consensus_view():
        save(path, model=straight.model, optimizer=optimizer, train={"step": 3}, comm=comm, split=straight.split)
    play(straight, optimizer, [[0]] * 3, 3)
    expected = values_of(plain(kind, [[0]] * 6)[0])
    with straight.consensus_view():
        assert torch.equal(values_of(straight.model), expected)
    straight.detach()
    for server in (True, False):
        model, resumed = make_lookups(kind)
        strategy: Any = ParameterServer(model, comm) if server else DataParallel(model, comm)
        strategy.check_optimizer(resumed)
        load(path, model=model, optimizer=resumed, comm=comm, split=strategy.split)
        strategy.refresh()
        for step in range(3, 6):
            passes(model, 0, step)
            strategy.clip_grad_norm(float("inf"))  # sums up the gradients of the same row
            resumed.step()
            resumed.zero_grad()
        with consensus_view(strategy):
            assert torch.equal(values_of(model), expected), server
        strategy.detach()


def test_clipping_sums_up_rows_that_occur_twice(comm: Any) -> None:
    strategy, optimizer = make(comm, "sgd")
    dense, _ = make_lookups("sgd", sparse=False)
    for model in (strategy.model, dense):
        passes(model, 0, 2)
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.01)
    assert expected > 0.02
    torch.testing.assert_close(strategy.clip_grad_norm(0.01), expected)
    for ours, theirs in zip(strategy.model.parameters(), dense.parameters()):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)
    norms: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: norms.append(strategy.clip_grad_norm(float("inf"))))
    optimizer.step()  # during which the gradients are in no parameter
    torch.testing.assert_close(norms[0], torch.tensor(0.01), rtol=1e-3, atol=0)
    strategy.detach()
