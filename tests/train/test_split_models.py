"""Norms, clipping and guards of models split over pipeline stages and tensor ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, get_total_norm

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective

pytestmark = pytest.mark.ranks(2, 4)
SAMPLES = 8
FORMS = {
    "pipe": ParallelSettings(pipe=2, microbatches=4),
    "pipe x fsdp": ParallelSettings(pipe=2, microbatches=4, data="fsdp"),
    "tensor": ParallelSettings(tensor=2, tensor_plan=("0=column", "2=row")),
    "tensor x fsdp": ParallelSettings(tensor=2, tensor_plan=("0=column", "2=row"), data="fsdp"),
    "pipe x tensor": ParallelSettings(pipe=2, tensor=2, microbatches=4, tensor_plan=("0=column", "2=row")),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _backward(strategy: Any, x: Tensor, y: Tensor) -> None:
    """Compute the averaged gradients of a batch of all data ranks."""
    share = SAMPLES // strategy.data.size
    part = slice(strategy.data.rank * share, (strategy.data.rank + 1) * share)
    if strategy.pipe is not None:
        strategy.forward_backward(x[part], y[part], Objective(F.mse_loss))
    else:
        F.mse_loss(strategy.model(x[part]), y[part]).backward()


def _wrapped(job: Any, form: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    settings = FORMS[form]
    if job.size % (settings.pipe * settings.tensor):
        pytest.skip("needs more ranks")
    model: nn.Module = job.wrap(_model().to(dtype), settings)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_norms_equal_those_of_one_process(job: Any, form: str) -> None:
    plain, model = _model(), _wrapped(job, form)
    strategy = job.strategy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (plain, model)]
    for _ in range(4):
        x, y = torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 4)
        F.mse_loss(plain(x), y).backward()
        _backward(strategy, x, y)
        for order in (2.0, 1.0, 3.0, float("inf")):
            wanted = get_total_norm([each.grad for each in plain.parameters() if each.grad is not None], order)
            found = get_total_norm([each.grad for each in model.parameters() if each.grad is not None], order)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), clip_grad_norm_(plain.parameters(), 0.1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = get_total_norm(plain.parameters())
    torch.testing.assert_close(get_total_norm(model.parameters()), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_clipping_in_double_precision_equals_one_process(job: Any, form: str) -> None:
    plain, model = _model().double(), _wrapped(job, form, torch.float64)
    strategy = job.strategy(model)
    x, y = torch.randn(SAMPLES, 6, dtype=torch.float64), torch.randn(SAMPLES, 4, dtype=torch.float64)
    F.mse_loss(plain(x), y).backward()
    _backward(strategy, x, y)
    wanted = clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(strategy.clip_grad_norm(0.1), wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(strategy.clip_grad_norm(0.1), wanted.new_tensor(0.1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_parts_refuse_operations_on_the_whole_parameter(job: Any, tmp_path: Path, form: str) -> None:
    model = _wrapped(job, form)
    _backward(job.strategy(model), torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 4))
    parts = [each for each in model.parameters() if type(each) is not nn.Parameter]
    assert parts
    for part in parts:
        with pytest.raises(UsageError, match="this rank's elements only"):
            part.grad.norm()  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="before job.wrap"):
            nn.init.normal_(part)
        with pytest.raises(UsageError, match="job.state_dict"):
            torch.save(part.detach(), tmp_path / "part.pt")
        part.as_subclass(torch.Tensor).norm()


@pytest.mark.parametrize("form", ["pipe", "tensor"])
def test_hooks_on_parameters_are_errors(job: Any, form: str) -> None:
    settings, hooked = FORMS[form], _model()
    hooked[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UsageError, match="hook on parameter 0.weight: .*behind the backward pass"):
        job.wrap(hooked, settings)
    if job.size == 2:
        model = _wrapped(job, form)
        with pytest.raises(UsageError, match="behind the backward pass"):
            next(model.parameters()).register_hook(lambda gradient: gradient)


@pytest.mark.parametrize("form", FORMS)
def test_closing_the_job_restores_plain_parameters(job: Any, form: str) -> None:
    model = _wrapped(job, form)
    job.close()
    assert all(type(each) is nn.Parameter for each in model.parameters())
    assert torch.nn.utils.get_total_norm(torch.ones(4)) == 2.0
