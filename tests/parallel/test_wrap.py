"""Attachment of the strategy that the settings name."""

from __future__ import annotations

import gc
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
