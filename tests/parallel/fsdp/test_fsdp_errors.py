"""Errors of sharding: one clear message, the same on all ranks, and an unchanged model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.nodes import in_pairs, on_nodes
from support.replicas import backward, make_gpt, make_mlp, part
from support.shards import VARIANTS, communicator, shard, whole_weights
from torch import nn

from hpctrain.cluster.launcher import detect
from hpctrain.errors import HpctrainError, MismatchError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.job import Job

pytestmark = [pytest.mark.ranks, pytest.mark.limit(30)]
DATA = ("zero1", "zero2", "fsdp")


@pytest.fixture
def job(comm: Any) -> Iterator[Job]:
    """Return a job of these ranks with split models."""
    own, guard = comm.split(0), SimpleNamespace(step=None, detector=None, close=lambda: None)
    made = Job(own, torch.device("cpu"), detect(), guard, ParallelSettings(data="fsdp"))  # type: ignore[arg-type]
    yield made
    made.close()
    own.free()


def refused(comm: Any, call: Callable[[], object], kind: type[HpctrainError] = UsageError) -> str:
    """Return the message of the error that all ranks raise together."""
    with pytest.raises(HpctrainError) as error:
        call()
    assert error.value.everywhere, "rank 0 may not speak for all"
    told = comm.all_gather_object((type(error.value), str(error.value)))
    assert set(told) == {(kind, str(error.value))}
    return str(error.value)


@pytest.mark.parametrize("data", DATA)
def test_a_pattern_without_a_match_is_refused(job: Job, data: str) -> None:
    model = make_gpt()
    before = list(model.parameters())
    message = refused(job.comm, lambda: job.wrap(model, ParallelSettings(data=data, units=("Block", "Layer"))))
    assert message.startswith("unit pattern 'Layer' matches no module: the model has the classes Attention, Block,")
    assert all(one is two for one, two in zip(before, model.parameters()))


def test_shapes_that_differ_between_ranks_are_refused(job: Job) -> None:
    last = job.size - 1
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5 if job.rank == last else 4))
    message = refused(job.comm, lambda: job.wrap(model), MismatchError)
    assert message == (
        "the ranks hold different models: rank 0 has parameter 1.weight of shape (4, 3) and dtype float32, "
        f"rank {last} has parameter 1.weight of shape (5, 3) and dtype float32 at position 2; "
        "build the same model on every rank, from the same settings"
    )


def test_a_model_frozen_on_one_rank_is_refused(job: Job) -> None:
    model = make_mlp()
    if job.rank == 1:
        next(model.parameters()).requires_grad_(False)
    assert "and dtype float32, frozen at position 0" in refused(job.comm, lambda: job.wrap(model), MismatchError)


@pytest.mark.parametrize("data", DATA)
def test_a_model_without_trainable_parameters_is_refused(job: Job, data: str) -> None:
    model = make_mlp().requires_grad_(False)
    message = refused(job.comm, lambda: job.wrap(model, ParallelSettings(data=data)))
    assert message == "the model has no parameter that requires a gradient"


@pytest.mark.ranks(3)
def test_replicas_on_unequal_nodes_are_refused(comm: Any) -> None:
    own = on_nodes(comm, in_pairs)
    message = refused(own, lambda: shard(make_mlp(), own, VARIANTS["hybrid"]))
    assert message == (
        "parallel.shard_within = 'node' needs the same number of ranks on every node: start as many on each, or shard "
        "within the world"
    )
    own.free()


def test_a_meta_module_without_initialisation_is_refused(job: Job) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    message = refused(job.comm, lambda: job.wrap(model))
    assert message.startswith("module 1 of class Scale is on the meta device and has no reset_parameters()")


# Optimizers -----------------------------------------------------------------------------------------------------------


BEFORE = (
    "the optimizer holds parameter layers.0.weight as it was before job.wrap(model) split it: make the optimizer after "
    "job.wrap(model)"
)


@pytest.mark.parametrize("data", DATA)
def test_an_optimizer_made_before_the_split_is_refused(job: Job, data: str, shared_tmp_path: Path) -> None:
    model = make_mlp()
    first = next(name for name, _ in model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.wrap(model, ParallelSettings(data=data))
    expected = BEFORE.replace("layers.0.weight", first)
    before = whole_weights(model, job.strategies[id(model)])  # type: ignore[arg-type]
    backward(model, part(job.comm, job.rank))
    assert refused(job.comm, optimizer.step) == expected
    assert refused(job.comm, lambda: job.run(model, optimizer, [], checkpoints=str(shared_tmp_path))) == expected
    after = whole_weights(model, job.strategies[id(model)])  # type: ignore[arg-type]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_optimizer_of_another_model_is_refused(job: Job, shared_tmp_path: Path) -> None:
    model, other = make_mlp(), make_mlp()
    job.wrap(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    message = refused(job.comm, lambda: job.run(model, optimizer, [], checkpoints=str(shared_tmp_path)))
    assert message == (
        "the optimizer holds no parameter of the model: make it from model.parameters() after job.wrap(model)"
    )


@pytest.mark.parametrize("name", ["zero1", "fsdp", "fsdp_alone"])
def test_an_optimizer_that_needs_all_parameters_is_refused_without_changes(comm: Any, name: str) -> None:
    with communicator(comm, VARIANTS[name]) as own:
        model = make_mlp()
        strategy = shard(model, own, VARIANTS[name])
        optimizer = torch.optim.LBFGS(model.parameters())
        before = whole_weights(model, strategy)
        backward(model, part(own, own.rank))
        message = refused(own, lambda: optimizer.step(lambda: 0.0))
        assert message.startswith("optimizer LBFGS cannot be used where parameters are split over ranks")
        assert refused(own, lambda: strategy.check_optimizer(optimizer)) == message
        after = whole_weights(model, strategy)
        assert not optimizer.state and all(torch.equal(before[name], after[name]) for name in before)
        # Another optimizer can continue from here.
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert any(not torch.equal(before[name], each) for name, each in whole_weights(model, strategy).items())


def test_optimizers_that_the_user_declares_elementwise_are_accepted(comm: Any) -> None:
    class Sign(torch.optim.Optimizer):
        """Optimizer that steps by the sign of the gradient."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in (each for group in self.param_groups for each in group["params"]):
                parameter.sub_(parameter.grad.sign(), alpha=0.01)

    with communicator(comm, VARIANTS["fsdp"]) as own:
        for trusted in ((), ("Sign",)):
            model = make_mlp()
            shard(model, own, VARIANTS["fsdp"], elementwise=trusted)
            backward(model, part(own, own.rank))
            if trusted:
                Sign(model.parameters()).step()
            else:
                assert "add 'Sign' to parallel.elementwise if" in refused(own, Sign(model.parameters()).step)
