"""Refusal of modules that cannot be trained on shares of a batch, before the first step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=["max_norm", "frequency"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_need_the_whole_batch_are_refused(comm: Any, strategy: str, option: Any, kind: Any) -> None:
    model = nn.Sequential(kind(4, 4, **option), nn.Linear(4, 1))
    with pytest.raises(UsageError, match=f"^0 has {next(iter(option))}, .*; remove .*, or train in one process"):
        attach(model, comm, ParallelSettings(data=strategy))
    assert "Sharded" not in type(model).__name__ and all(parameter.numel() for parameter in model.parameters())


@pytest.mark.ranks(1, 2)
def test_parameters_without_a_shape_are_refused(comm: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match="0.weight has no shape yet: call the model once"):
        attach(model, comm, ParallelSettings())
    model(torch.ones(2, 5))
    attach(model, comm, ParallelSettings()).detach()


def test_one_process_accepts_modules_that_need_the_whole_batch(comm: Any) -> None:
    attach(nn.Embedding(4, 4, max_norm=1.0, scale_grad_by_freq=True), comm, ParallelSettings()).detach()


@pytest.mark.ranks
def test_batch_norms_without_running_statistics_give_a_warning(comm: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("hpctrain")
    before, logger.propagate = logger.propagate, True
    try:
        attach(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)), comm, ParallelSettings()).detach()
    finally:
        logger.propagate = before
    assert ("0 has no running statistics" in caplog.text) == (comm.rank == 0)
