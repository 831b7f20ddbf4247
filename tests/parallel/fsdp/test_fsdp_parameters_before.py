"""Parameters before the split are freed: otherwise every rank would keep a whole copy beside its shards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn

from hpctrain.parallel.config import SHARDED, ParallelSettings
from hpctrain.parallel.wrap import attach


@pytest.mark.ranks
@pytest.mark.parametrize("data", SHARDED)
def test_parameters_before_the_split_are_freed(comm: Any, data: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    strategy = attach(model, comm, ParallelSettings(data=data))
    gc.collect()
    kept = [number for number, parameter in enumerate(before) if parameter() is not None]
    strategy.detach()
    assert not kept
