"""Unevenly divided batches: training equals that of one process on whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.nodes import NodeOfRank, on_nodes, one_per_node
from support.replicas import TINY, WIDTH, assert_same, assert_same_on_all_ranks, make_mlp, vectors
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.parallel.strategy import Strategy
from hpctrain.parallel.wrap import attach

pytestmark = pytest.mark.limit(60)
CPU = torch.device("cpu")
UNITS = ("Linear",)
HOST = OffloadSettings(optimizer=True, device_fraction=0.0)
Case = tuple[ParallelSettings, OffloadSettings, NodeOfRank | None]
CASES: dict[str, Case] = {
    "ddp": (ParallelSettings(), OffloadSettings(), None),
    "ddp_tiny": (TINY, OffloadSettings(), None),
    "ddp_alone": (TINY, OffloadSettings(), one_per_node),
    "zero1": (ParallelSettings(data="zero1"), OffloadSettings(), None),
    "zero2": (ParallelSettings(data="zero2", bucket_mib=1e-6), OffloadSettings(), None),
    "fsdp": (ParallelSettings(data="fsdp", units=UNITS), OffloadSettings(), None),
    "fsdp_alone": (ParallelSettings(data="fsdp", units=UNITS), OffloadSettings(), one_per_node),
    "offload": (ParallelSettings(data="zero2", units=UNITS), HOST, None),
    "offload_all": (
        ParallelSettings(data="fsdp", units=UNITS),
        OffloadSettings(optimizer=True, parameters=True),
        one_per_node,
    ),
}
ALL = pytest.mark.parametrize("name", CASES)
SYNCED = pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp", "fsdp_alone", "offload"])


def make_plain() -> nn.Module:
    return make_mlp().double()


def make_normed() -> nn.Module:
    """Return a small convnet with batch norms of two kinds, one of them used twice."""
    torch.manual_seed(7)
    norm = nn.BatchNorm1d(6, momentum=None)
    layers = [nn.Unflatten(1, (2, 5)), nn.Conv1d(2, 6, 3, padding=1), norm, nn.ReLU(), nn.Conv1d(6, 6, 3), norm]
    layers += [nn.Unflatten(2, (3, 1)), nn.BatchNorm2d(6, affine=False), nn.Flatten(), nn.Linear(18, WIDTH)]
    return nn.Sequential(*layers).double()


MAKERS = {"mlp": make_plain, "batch_norm": make_normed}
MODELS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@contextmanager
def attached(
    comm: Any, name: str, make: Callable[[], nn.Module] = make_plain
) -> Iterator[tuple[nn.Module, Strategy, Any]]:
    """Yield a model in float64, its strategy, and their communicator."""
    settings, offload, node_of_rank = CASES[name]
    own = comm.split(0) if node_of_rank is None else on_nodes(comm, node_of_rank)
    model = make()
    yield model, attach(model, own, settings, CPU, offload=offload), own
    own.free()


def divided(size: int, step: int) -> list[int]:
    """Return the samples of each rank: 5 over 3 ranks, then 2 over 3 ranks, and so on, the ranks in turn."""
    counts = [[2, 1, 2, 3], [1, 0, 1, 0], [3, 1, 1, 2], [1, 1, 0, 1]][step % 4][:size]
    shift = step // 2 % size
    return counts[shift:] + counts[:shift]


def part(rank: int, counts: Sequence[int], tensors: Sequence[Tensor], stand_in: float) -> list[Tensor]:
    """Return a rank's samples, or one sample filled with ``stand_in`` if it has none."""
    begin, count = sum(counts[:rank]), counts[rank]
    if count:
        return [each[begin : begin + count] for each in tensors]
    return [torch.full_like(each[:1], stand_in) for each in tensors]


def whole(step: int, count: int) -> list[Tensor]:
    return [each.double() for each in vectors(step, count)]


def train(
    model: nn.Module,
    steps: int,
    *,
    accumulate: int = 1,
    strategy: Strategy | None = None,
    data: Any = None,
    ranks: int,
    local: bool = False,
    stand_in: float = 1.0,
) -> list[float]:
    """Train by a plain loop, on whole batches or a rank's part of them; return the global losses.

    ``accumulate`` is the backward passes of an update, each of a batch; with ``local`` all but the last of these are
    under ``no_sync``, and all are divided alike.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        for number in range(accumulate):
            counts = divided(ranks, step if local else step + number)
            batch = whole(step * accumulate + number, sum(counts))
            weight = 1.0
            if strategy is not None:
                weight = counts[data.rank] * data.size / sum(counts)
                strategy.set_sample_weight(weight)
                batch = part(data.rank, counts, batch, stand_in)
            syncs = strategy is None or not local or number == accumulate - 1
            with nullcontext() if syncs else strategy.no_sync():  # type: ignore[union-attr]
                loss = mse_loss(model(batch[0]), batch[1])
                (loss / accumulate).backward()
            losses.append(float(loss.detach()) * weight if weight else 0.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses if data is None else [sum(each) / data.size for each in zip(*data.all_gather_object(losses))]


def compare(
    comm: Any, name: str, make: Callable[[], nn.Module] = make_plain, *, local: bool = False, **options: Any
) -> None:
    """Train with a strategy, and by one process, and compare losses and weights."""
    single, steps = make(), 8
    wanted = train(single, steps, ranks=comm.size, local=local, accumulate=options.get("accumulate", 1))
    with attached(comm, name, make) as (model, strategy, own):
        found = train(model, steps, strategy=strategy, data=strategy.data, ranks=comm.size, local=local, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=0)
        with strategy.unshard():
            state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        assert_same(state, single.state_dict(), rtol=1e-6, atol=1e-9)
        assert_same_on_all_ranks(own, state)


@pytest.mark.few(4)
@pytest.mark.ranks
@ALL
@MODELS
def test_uneven_shares_train_like_one_process(comm: Any, name: str, make: Any) -> None:
    compare(comm, name, make)


@pytest.mark.ranks
@SYNCED
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@MODELS
def test_a_nonfinite_placeholder_sample_does_not_count(comm: Any, name: str, value: float, make: Any) -> None:
    compare(comm, name, make, stand_in=value)


@pytest.mark.few(4)
@pytest.mark.ranks
@ALL
@MODELS
def test_synchronised_passes_of_one_update_may_be_divided_differently(comm: Any, name: str, make: Any) -> None:
    compare(comm, name, make, accumulate=3)


@pytest.mark.ranks
@ALL
def test_local_passes_of_one_update_may_be_divided_equally(comm: Any, name: str) -> None:
    compare(comm, name, accumulate=3, local=True)


def backward(model: nn.Module, rows: int = 1) -> None:
    (model(torch.ones(rows, WIDTH, dtype=torch.float64)) ** 2).mean().backward()


@pytest.mark.ranks
@SYNCED
def test_local_passes_divided_differently_are_refused(comm: Any, name: str) -> None:
    with attached(comm, name) as (model, strategy, _):
        strategy.set_sample_weight(1.5)
        with strategy.no_sync():
            backward(model)
        strategy.set_sample_weight(0.5)
        with pytest.raises(UsageError, match=r"weight 0\.5 to .* at 1\.5; .*run\.backward\(batch, compute, accumulat"):
            backward(model)
        with strategy.no_sync(), pytest.raises(UsageError, match=r"run\.backward"):
            backward(model)
        strategy.gradients.drop()
        backward(model)


@pytest.mark.ranks
@SYNCED
def test_dropping_local_gradients_resets_the_weight(comm: Any, name: str) -> None:
    with attached(comm, name) as (model, strategy, _):
        for set_to_none in (True, False):
            strategy.set_sample_weight(1.5)
            with strategy.no_sync():
                backward(model)
            for _, gradient in strategy.gradients.local():
                gradient.zero_()
            if set_to_none:
                strategy.gradients.drop()
            strategy.set_sample_weight(0.5)
            backward(model)


@pytest.mark.ranks
@SYNCED
def test_a_weight_of_one_does_not_change_a_bit(comm: Any, name: str) -> None:
    results = []
    for sets in (False, True):
        with attached(comm, name) as (model, strategy, _):
            if sets:
                strategy.set_sample_weight(1.0)
            inputs, targets = (each.double().chunk(comm.size)[comm.rank] for each in vectors())
            mse_loss(model(inputs), targets).backward()
            results.append({key: gradient.clone() for key, gradient in strategy.reduced_gradients()})
    assert_same(*results, rtol=0, atol=0)
