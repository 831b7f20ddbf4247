"""Predict the peak of memory, and measure it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.peaks import peak_of

from hpctrain.estimate.facts import Facts, facts_of
from hpctrain.estimate.memory import Memory, memory_of
from hpctrain.estimate.run import PlannedRun
from hpctrain.models.build import build
from hpctrain.parallel.attach import attach
from hpctrain.settings import build as build_settings
from hpctrain.train import optimizer as optimizers
from hpctrain.train.settings import Settings
from hpctrain.train.step import Stepper
from hpctrain.data.batch import Batch

MODEL = {"name": "gpt-tiny", "width": 256, "heads": 4, "layers": 4, "context": 64, "vocab_size": 512}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp accumulating": {"accumulate": 2},
    "zero1": {"data": "zero1"},
    "zero2": {"data": "zero2", "bucket_mib": 1.0},
    "zero2 accumulating": {"data": "zero2", "accumulate": 2},
    "zero2 in bfloat16": {"data": "zero2", "mixed_precision": "bfloat16"},
    "fsdp": {"data": "fsdp", "bucket_mib": 1.0},
    "recompute": {"recompute": True},
    "pipe": {"pipe": 2, "microbatches": 4},
    "pipe, gpipe": {"pipe": 2, "microbatches": 4, "schedule": "gpipe"},
    "pipe, zb-h1": {"pipe": 2, "microbatches": 4, "schedule": "zb-h1"},
    "pipe, interleaved": {"pipe": 2, "microbatches": 4, "schedule": "interleaved"},
    "pipe, pipedream": {"pipe": 2, "microbatches": 4, "schedule": "pipedream"},
    "pipe, recompute": {"pipe": 2, "microbatches": 4, "recompute": True},
    "offload": {"data": "zero2", "offload": {"optimizer": True, "piece_mib": 1.0}},
    "offload, bfloat16": {"mixed_precision": "bfloat16", "data": "zero2", "offload": {"optimizer": True, "piece_mib": 1.0}},
    "offload, activations": {"recompute": True, "offload": {"optimizer": True, "activations": True, "piece_mib": 1.0}},
    "tensor": {"tensor": 2},
    "tensor, sequence": {"tensor": 2, "sequence": True},
}


def settings_of(case: dict[str, Any]) -> Settings:
    parallel = {name: value for name, value in case.items() if name not in ("accumulate", "offload")}
    untied = {"tied": False} if case.get("schedule") == "pipedream" else {}
    train = {"batch": 16, "accumulate": case.get("accumulate", 1)}
    return build_settings(Settings, {"model": {**MODEL, **untied}, "train": train, "parallel": parallel, "offload": case.get("offload", {})})


def predicted(settings: Settings, ranks: int) -> tuple[PlannedRun, Memory]:
    run = PlannedRun(settings, facts_of(settings), ranks, ranks)
    return run, memory_of(run)


def measured(settings: Settings, comm: Any, run: PlannedRun) -> int:
    def make() -> Callable[[], None]:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = build(settings.model)
        strategy = attach(model, comm, settings.parallel, offload=settings.offload)
        optimizer = optimizers.make(model, settings.optimizer)
        strategy.check_optimizer(optimizer)
        stepper = Stepper(strategy, settings.train, torch.device("cpu"))
        samples = run.samples * settings.train.accumulate
        tokens = torch.randint(512, (samples, 64))

        def step() -> None:
            stepper(Batch(tokens, tokens, 1.0, samples))
            strategy.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return peak_of(make)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_predicts_what_is_measured(comm: Any, own: Any, name: str) -> None:
    settings = settings_of(CASES[name])
    run, memory = predicted(settings, comm.size)
    found = measured(settings, own, run)
    need = memory.stages[run.shape.coordinate("pipe", comm.rank)].host_total
    print(f"{name}: rank {comm.rank} measured {found/1e6:.2f} MB predicted {need/1e6:.2f} ratio {need/found:.3f}")
    assert need == pytest.approx(found, rel=0.1)
