"""Writes of a program into parameters that belong to servers or a centre: they take effect, or are an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain import AsynchronousSettings
from hpctrain.errors import UsageError

pytestmark = pytest.mark.ranks(2)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "server": ("server", {"mode": "synchronous"}),
    "server at its own pace": ("server", {}),
    "easgd": ("easgd", {}),
    "easgd at its own pace": ("easgd", {"mode": "asynchronous"}),
    "local sgd": ("easgd", {"average": True, "rho": 0.0}),
    "hogwild": ("hogwild", {}),
}


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def _wrap(job: Any, form: str) -> nn.Module:
    data, options = FORMS[form]
    wrapped: nn.Module = job.wrap(_model(), data, asynchronous=AsynchronousSettings(**options))
    return wrapped


def _batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(4)]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    F.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
def test_weights_loaded_inside_of_unshard_are_used_by_the_run(job: Any, shared_tmp_path: Path, form: str) -> None:
    model = _wrap(job, form)
    best = {name: torch.full_like(value, 0.25) for name, value in _model().state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with job.run(model, optimizer, _batches(), checkpoints=str(shared_tmp_path), split=False) as run:
        for _, batch in run:
            _step(model, optimizer, batch)
        with job.unshard(model, write=True):
            model.load_state_dict(best)
    for name, value in model.state_dict().items():
        if name != "1.num_batches_tracked":
            torch.testing.assert_close(value, best[name], rtol=0, atol=0, msg=name)
    for name, value in job.state_dict(model).items():
        assert name == "1.num_batches_tracked" or torch.equal(value, best[name]), name


@pytest.mark.parametrize("form", [form for form in FORMS if form != "hogwild"])
def test_weights_loaded_outside_of_unshard_are_refused(job: Any, shared_tmp_path: Path, form: str) -> None:
    model = _wrap(job, form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = job.run(model, optimizer, _batches(), checkpoints=str(shared_tmp_path), split=False)
    with pytest.raises(UsageError, match="what it loads would be lost; allowed is, on all ranks, with job.unshard"):
        model.load_state_dict(_model().state_dict())
    run.__exit__(Exception, Exception(), None)


def test_in_place_changes_of_server_parameters_are_an_error(job: Any, shared_tmp_path: Path) -> None:
    model, batches = _wrap(job, "server"), _batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = job.run(model, optimizer, batches, checkpoints=str(shared_tmp_path), split=False)
    _step(model, optimizer, batches[0])
    with torch.no_grad():
        model[3].weight.clamp_(-0.05, 0.05)  # type: ignore[union-attr, index]
    with pytest.raises(UsageError, match="parameters 3.weight were changed in place .*job.unshard"):
        model(batches[1][0])
    run.__exit__(Exception, Exception(), None)
