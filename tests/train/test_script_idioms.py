"""Usual code of training scripts gives the numbers of one process on several ranks, or one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.script_idioms import BEFORE, HABITS, Batches, make_model
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.errors import UsageError

SPLIT = ("zero1", "zero2", "fsdp")
STEPS, SAMPLES = 6, 12

# Refused habits: under which strategies, and a part of the error.
_SUMS = (
    "norm by hand",
    "norm by sum of squares",
    "norm of one vector",
    "weight norms in a log",
    "largest gradient",
    "finite by hand",
    "squares as penalty",
    "sizes as penalty",
    "hook that centres",
)
REFUSED: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(SPLIT, "get_total_norm") for name in _SUMS},
    "histogram by numpy": dict.fromkeys(SPLIT, "state_dict"),
    **{name: dict.fromkeys(SPLIT, "unshard") for name in ("normal weights", "xavier weights", "reset of parameters")},
    **{name: dict.fromkeys(SPLIT, "forward use") for name in ("layer called alone", "weight read outside")},
    "hook with accumulation": dict.fromkeys(("ddp", *SPLIT), "behind the backward pass"),
    "autograd grad": {"ddp": "average_gradients", **dict.fromkeys(SPLIT, r"loss\.backward")},
    "unfrozen later": dict.fromkeys(SPLIT, "unfreeze it before"),
    "head after wrapping": dict.fromkeys(("ddp", *SPLIT), r"before job\.wrap"),
    "parametrized after wrapping": {"ddp": r"before job\.wrap", **dict.fromkeys(SPLIT, "unshard|job.wrap")},
}


def _batches() -> Batches:
    torch.manual_seed(4)
    return [(torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 3)) for _ in range(STEPS)]


def _backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def _alone(name: str) -> tuple[dict[str, Tensor], Any]:
    model = make_model()
    BEFORE.get(name, lambda _: None)(model)
    returned = HABITS[name](model, _batches(), _backward)
    return {key: value.clone() for key, value in model.state_dict().items()}, returned


def _share(job: Any, batches: Batches) -> Batches:
    part = slice(job.rank * SAMPLES // job.size, (job.rank + 1) * SAMPLES // job.size)
    return [(x[part], y[part]) for x, y in batches]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", *(pytest.param(one, marks=pytest.mark.slow) for one in ("zero1", "zero2"))]
)
@pytest.mark.parametrize("name", HABITS)
def test_habits_give_the_numbers_of_one_process_or_an_error(job: Any, name: str, strategy: str) -> None:
    expected, returned = _alone(name)
    model = make_model()
    BEFORE.get(name, lambda _: None)(model)
    job.wrap(model, strategy)

    def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of all ranks, as programs that log it do."""
        loss = _backward(model, x, y)
        job.comm.all_reduce(loss, "average")
        return loss

    message = REFUSED.get(name, {}).get(strategy)
    if message is not None:
        with pytest.raises(UsageError, match=message):
            HABITS[name](model, _share(job, _batches()), backward)
        return
    found = HABITS[name](model, _share(job, _batches()), backward)
    weights = job.state_dict(model)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=2e-6, msg=lambda text: f"{key}: {text}")
    if returned is not None and not isinstance(returned[0], Tensor):
        assert found == pytest.approx(returned, abs=1e-5)
    elif returned is not None:
        for one, other in zip(found, returned, strict=True):
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-5, atol=1e-5)
