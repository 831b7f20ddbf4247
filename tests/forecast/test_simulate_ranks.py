"""Calls of strategies between real ranks, compared with those of a simulated rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.nodes import on_nodes, one_per_node

from hpctrain.data.loader import Batch
from hpctrain.forecast.rank import rank_models
from hpctrain.forecast.run import PlannedRun, facts_of
from hpctrain.models.build import build
from hpctrain.parallel.wrap import attach
from hpctrain.settings import build as build_settings
from hpctrain.train import optimizer as optimizers
from hpctrain.train.config import Settings
from hpctrain.train.recipe import Stepper

MODEL = {"name": "gpt-tiny", "width": 64, "heads": 4, "layers": 4, "context": 32, "vocab_size": 128}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"data": "zero1", "bucket_mib": 0.25},
    "zero2 in bfloat16": {"data": "zero2", "bucket_mib": 0.25, "mixed_precision": "bfloat16"},
    "fsdp": {"data": "fsdp", "bucket_mib": 0.25},
}


def calls_of_ranks(run: PlannedRun, comm: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return operation and bytes of each call of a step, after one in which the order is fixed."""
    found: list[tuple[str, int]] = []
    for operation, whole in (("all_reduce", 0), ("reduce_scatter", 1), ("all_gather", 0), ("broadcast", 0)):

        def noted(
            *args: Any, call: Any = getattr(comm, operation), name: str = operation, whole: int = whole, **more: Any
        ) -> Any:
            found.append((name, args[whole].nbytes))
            return call(*args, **more)

        monkeypatch.setattr(comm, operation, noted)
    settings = run.settings
    torch.manual_seed(0)
    model = build(settings.model)
    strategy = attach(model, comm, settings.parallel)
    optimizer = optimizers.make(model, settings.optimizer)
    stepper = Stepper(strategy, settings.train, torch.device("cpu"))
    samples = run.samples * settings.train.accumulate
    tokens = torch.randint(MODEL["vocab_size"], (samples, MODEL["context"]))
    for _ in range(2):
        found.clear()
        stepper(Batch(tokens, tokens, 1.0, samples))
        strategy.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.few(4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_simulated_calls_are_those_of_ranks(
    own: Any, name: str, apart: bool, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = on_nodes(own, one_per_node) if apart else own
    try:
        train = {"batch": 16, "accumulate": accumulate}
        settings = build_settings(Settings, {"model": MODEL, "train": train, "parallel": CASES[name]})
        run = PlannedRun(settings, facts_of(settings), comm.size, 1 if apart else comm.size)
        (part,) = rank_models(run)
        simulated = Counter((call.operation, call.nbytes) for call in part.record().calls)
        found = Counter(calls_of_ranks(run, comm, monkeypatch))
    finally:
        if apart:
            comm.free()
    if name != "ddp":
        assert simulated == found
        return
    # A bucket's members follow the order in which autograd computes gradients, and with them its padding.
    bytes_of = [sum(nbytes * count for (_, nbytes), count in one.items()) for one in (simulated, found)]
    assert bytes_of[0] == pytest.approx(bytes_of[1], rel=0.01) and len(simulated) == len(found)
