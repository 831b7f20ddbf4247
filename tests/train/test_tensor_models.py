"""Models of users on tensor ranks, compared with the weights of a plain loop in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.split_models import difference, learnt, model_of, samples
from torch import Tensor

from hpctrain.parallel.objective import Objective

STEPS, CLOSE = 5, 1e-10
CASES = (
    "mqa",
    "mqa, whole k v",
    "gqa",
    "layer norm",
    "layer norm, declared",
    "rms norm",
    "mqa rms norm",
    "gated",
)
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"tensor": 2}],
    4: [
        {"tensor": 4},
        {"tensor": 2, "data": "fsdp"},
        {"tensor": 2, "pipe": 2, "microbatches": 2},
        {"tensor": 2, "pipe": 2, "microbatches": 2, "schedule": "zb-h1"},
    ],
}


@cache
def _expected(case: str) -> dict[str, Tensor]:
    return learnt(case, STEPS, torch.float64)


def _learn(job: Any, case: str, mesh: dict[str, Any], more: dict[str, str] | None = None, **settings: Any) -> float:
    """Train on a mesh; return the largest difference of the weights from those of a plain loop."""
    model, plan = model_of(case)
    model.double()
    lines = tuple(f"{pattern}={kind}" for pattern, kind in {**plan, **(more or {})}.items())
    model = job.wrap(model, {**mesh, "tensor_plan": lines, **settings})
    strategy = job.strategy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = (part.chunk(strategy.data.size)[strategy.data.rank] for part in samples(step, torch.float64))
        if strategy.pipe is not None:
            strategy.forward_backward(x, y, Objective(F.mse_loss))
        else:
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return difference(strategy, model, _expected(case))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "mesh", [pytest.param(each, marks=pytest.mark.ranks(size)) for size, some in MESHES.items() for each in some]
)
@pytest.mark.parametrize("case", CASES)
def test_weights_equal_those_of_a_plain_loop(job: Any, case: str, mesh: dict[str, Any]) -> None:
    if mesh.get("pipe") and case not in ("mqa", "layer norm", "gated"):
        pytest.skip("one of each kind is enough")
    assert _learn(job, case, mesh) < CLOSE


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["mqa", "rms norm", "layer norm, declared"])
def test_sequences_may_be_split(job: Any, case: str) -> None:
    assert _learn(job, case, {"tensor": 2, "sequence": True}, {"0": "scatter", "3": "gather"}) < CLOSE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["gqa", "layer norm", "rms norm"])
def test_recomputed_activations_change_nothing(job: Any, case: str) -> None:
    assert _learn(job, case, {"tensor": 2}, recompute=True) < CLOSE
