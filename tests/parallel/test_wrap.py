"""Attachment of the strategy that the settings name, and refusal of modules that need the whole batch."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.ddp import DataParallel
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm
from hpctrain.parallel.wrap import attach


def test_a_strategy_is_attached_in_place(comm: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    strategy = attach(model, comm, ParallelSettings())
    assert isinstance(strategy, DataParallel) and strategy.model is model and type(model[1]) is nn.BatchNorm1d


def test_batch_norms_are_synchronised_on_request(comm: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    attach(model, comm, ParallelSettings(sync_batchnorm=True))
    assert isinstance(model[1], SyncBatchNorm)


def test_a_model_that_would_have_to_be_replaced_is_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="^sync_batchnorm cannot replace a model that is itself a batch norm$"):
        attach(nn.BatchNorm1d(3), comm, ParallelSettings(sync_batchnorm=True))


@pytest.mark.ranks
@pytest.mark.parametrize("settings", ["ddp", "zero1", "zero2", "fsdp", "hogwild", "easgd"])
def test_a_dropped_model_is_freed(comm: Any, settings: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    strategy = attach(model, comm, ParallelSettings(data=settings))
    if not strategy.asynchronous:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        del optimizer
    seen = weakref.ref(model), weakref.ref(strategy)
    del model, strategy
    gc.collect()
    assert [one() for one in seen] == [None, None]


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
