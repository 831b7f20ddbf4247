"""Synchronous EASGD and local SGD, step by step compared with the equations in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.asynchronous_fixtures import RATE, batch, flat, gradient, make_model
from torch import nn

from hpctrain.errors import SettingsError, UsageError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings, check
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.wrap import attach

EASGD = ParallelSettings(data="easgd")


def train(comm: Any, server: AsynchronousSettings, steps: int, **options: Any) -> tuple[Any, list[np.ndarray]]:
    """Return the strategy, and this worker's parameters after every step."""
    model = make_model()
    strategy = attach(model, comm, EASGD, asynchronous=server)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **options)
    strategy.check_optimizer(optimizer)
    seen = []
    for step in range(steps):
        inputs, targets = batch(comm.rank, step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat(model))
    return strategy, seen


def simulate(workers: int, steps: int, *, alpha: float, period: int = 1, momentum: float = 0.0) -> tuple[Any, Any]:
    """Return workers and centre after every step, by the equations of the paper."""
    centre = flat(make_model()).astype(np.float64)
    values = [centre.copy() for _ in range(workers)]
    speed = [np.zeros_like(centre) for _ in range(workers)]
    seen = []
    for step in range(steps):
        pull = alpha if step % period == 0 else 0.0
        moved = []
        for rank, own in enumerate(values):
            speed[rank] = momentum * speed[rank] + gradient(own, rank, step)
            moved.append(own - RATE * speed[rank] - pull * (own - centre))
        centre = centre + pull * sum(own - centre for own in values)
        values = moved
        seen.append([each.copy() for each in values])
    return seen, centre


@pytest.mark.ranks
@pytest.mark.parametrize("rho, period, momentum", [(0.0, 1, 0.0), (1.5, 1, 0.9), (2.0, 3, 0.0)])
def test_workers_and_centre_follow_the_equations(own: Any, rho: float, period: int, momentum: float) -> None:
    alpha = RATE * rho if rho else 0.9 / own.size
    strategy, seen = train(own, AsynchronousSettings(rho=rho, period=period), 7, momentum=momentum)
    expected, centre = simulate(own.size, 7, alpha=alpha, period=period, momentum=momentum)
    for step, mine in enumerate(seen):
        np.testing.assert_allclose(mine, expected[step][own.rank], rtol=1e-4, atol=1e-5)
    with strategy.consensus_view():
        np.testing.assert_allclose(flat(strategy.model), centre, rtol=1e-4, atol=1e-5)
        everyone = own.all_gather_object(flat(strategy.model).tobytes())
        assert len(set(everyone)) == 1
    np.testing.assert_array_equal(flat(strategy.model), seen[-1])
    distance = np.mean([np.linalg.norm(each - centre) for each in expected[-1]])
    assert strategy.metrics()["centre_distance"] == pytest.approx(distance, rel=1e-3)
    strategy.detach()
    np.testing.assert_allclose(flat(strategy.model), centre, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
def test_local_sgd_averages_every_period_of_steps(own: Any) -> None:
    strategy, seen = train(own, AsynchronousSettings(average=True, period=2), 5)
    values = [flat(make_model()).astype(np.float64) for _ in range(own.size)]
    for step in range(5):
        values = [each - RATE * gradient(each, rank, step) for rank, each in enumerate(values)]
        if step % 2:
            values = [sum(values) / own.size] * own.size
        np.testing.assert_allclose(seen[step], values[own.rank], rtol=1e-4, atol=1e-5)
    with strategy.consensus_view():
        np.testing.assert_allclose(flat(strategy.model), sum(values) / own.size, rtol=1e-4, atol=1e-5)
    strategy.detach()


@pytest.mark.ranks
def test_a_step_is_one_all_reduce_of_all_parameters(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other communication: no gradient is reduced, whatever the layers are."""
    model, inputs = make_model(), batch(own.rank, 9)[0]
    strategy = attach(model, own, EASGD)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy.check_optimizer(optimizer)
    reduce, sums = own.all_reduce, []

    def counted(tensor: torch.Tensor, *words: Any, **options: Any) -> Any:
        sums.append(tensor.numel())
        return reduce(tensor, *words, **options)

    monkeypatch.setattr(own, "all_reduce", counted)
    model(inputs).sum().backward()
    optimizer.step()
    assert sums == [40]
    strategy.detach()


@pytest.mark.ranks
def test_a_nonfinite_gradient_is_known_to_all_ranks(own: Any) -> None:
    strategy, _ = train(own, AsynchronousSettings(), 1)
    for parameter in strategy.model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf") if own.rank == own.size - 1 else 1.0)
    assert bool(torch.isnan(strategy.clip_grad_norm(1.0)))
    for parameter in strategy.model.parameters():
        parameter.grad = torch.full_like(parameter, own.rank + 1.0)
    norm = float(strategy.clip_grad_norm(1.0))
    assert norm == pytest.approx((own.rank + 1) * 40**0.5)
    assert float(torch.nn.utils.get_total_norm([one.grad for one in strategy.model.parameters()])) == pytest.approx(1)
    strategy.detach()


@pytest.mark.parametrize(
    "parallel, server, offload, expected",
    [
        ({"data": "easgd", "pipe": 2}, {}, {}, "parallel.pipe = 2"),
        ({"data": "easgd", "tensor": 2}, {}, {}, "hold whole models"),
        ({"data": "easgd"}, {}, {"optimizer": True}, "setting offload.optimizer: not possible"),
        ({"data": "easgd", "compression": "bfloat16"}, {}, {}, "compression"),
        ({}, {"period": 2}, {}, r'is for parallel.data = easgd, not "ddp"'),
    ],
)
def test_incompatible_settings_are_refused(parallel: Any, server: Any, offload: Any, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        check(AsynchronousSettings(**server), ParallelSettings(**parallel), OffloadSettings(**offload))


@pytest.mark.parametrize("bad", [{"period": 0}, {"rho": -1.0}, {"rho": float("nan")}, {"rho": 1.0, "average": True}])
def test_invalid_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="asynchronous\\."):
        AsynchronousSettings(**bad)


def test_parameters_of_different_dtypes_are_refused() -> None:
    from hpctrain.parallel.asynchronous.worker import FlatParameters

    with pytest.raises(UsageError, match=r"the parameter 1.weight is of torch.bfloat16, 0.weight of torch.float32"):
        FlatParameters(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).to(torch.bfloat16)))
    with pytest.raises(UsageError, match="no parameter"):
        FlatParameters(nn.ReLU())
