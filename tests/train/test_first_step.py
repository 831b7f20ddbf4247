"""Checks of the first step, which find mistakes that would train a wrong model without any error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.data.loader import Batch
from hpctrain.errors import MismatchError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach
from hpctrain.train.first_step import LOSSES, FirstStepChecks
from hpctrain.train.replicas import ReplicaChecks

CPU = torch.device("cpu")
WIDTH = 4


class Net(nn.Module):
    """Two layers whose input is a tensor, or a structure that holds one as ``inputs``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, batch: Any, **more: Any) -> Tensor:
        while not isinstance(batch, Tensor):
            batch = batch.inputs if hasattr(batch, "inputs") else batch["inputs"] if "inputs" in batch else batch[0]
        return self.last(torch.tanh(self.first(batch)))  # type: ignore[no-any-return]


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Yield the package's messages so far."""
    logger, handler, found = logging.getLogger("hpctrain"), logging.Handler(), list[str]()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.propagate = propagates


@dataclass
class Step:
    """Wrapped model, its optimizer, and the checks of its first step."""

    comm: Any
    model: nn.Module
    strategy: Any
    optimizer: torch.optim.Optimizer
    checks: FirstStepChecks
    replicas: ReplicaChecks

    def run(self, inputs: Any, loss: Callable[[Tensor], Tensor] | None = None) -> None:
        """Run the first step with all checks."""
        self.checks.check_optimizers()
        self.checks.attach()
        try:
            outputs = self.model(inputs)
            (loss(outputs) if loss else outputs.square().mean()).backward()
            self.checks.before_update()
            self.optimizer.step()
            self.replicas.compare("after the first update")
            self.replicas.warn_of_buffers()
        finally:
            self.checks.close()


def make(
    comm: Any,
    splits: bool | None = None,
    model: nn.Module | None = None,
    trained: Callable[[Any], list[Tensor]] = lambda model: list(model.parameters()),
    **parallel: Any,
) -> Step:
    model = Net() if model is None else model
    strategy = attach(model, comm, ParallelSettings(**parallel), CPU)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    models, strategies, optimizers = {"model": model}, {"model": strategy}, {"optimizer": optimizer}
    checks = FirstStepChecks(comm, models, strategies, optimizers, splits, loader="DataLoader")
    return Step(comm, model, strategy, optimizer, checks, ReplicaChecks(comm, models, strategies))


def samples(number: int, count: int = 3) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(number))


# Parameters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["ddp", "zero1"])
def test_parameters_made_after_wrap_are_refused(comm: Any, data: str) -> None:
    step = make(comm, data=data)
    step.checks.check_optimizers()
    step.model.last = nn.Linear(8, WIDTH)
    with pytest.raises(UsageError, match=r"^parameters that are not .*: last\.weight, last\.bias; .*before job\.wrap$"):
        step.checks.check_optimizers()


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp", "easgd"])
def test_parameters_of_every_strategy_are_known(comm: Any, data: str, lines: list[str]) -> None:
    step = make(comm, data=data)
    step.checks.check_optimizers()
    assert not lines
    step.model.more = nn.Parameter(torch.ones(3))
    with pytest.raises(UsageError, match="wrapped model: more; "):
        step.checks.check_optimizers()
    step.strategy.detach()


def test_parameters_unfrozen_after_wrap_are_adopted_by_ddp(comm: Any) -> None:
    model = Net()
    model.first.requires_grad_(False)
    step = make(comm, model=model)
    model.first.bias.requires_grad_(True)
    step.checks.check_optimizers()


def test_shards_unfrozen_after_wrap_are_refused(comm: Any) -> None:
    model = Net()
    model.first.requires_grad_(False)
    step = make(comm, model=model, data="zero1", mixed_precision="bfloat16")  # which shards even on one rank
    step.checks.check_optimizers()
    model.first.bias.requires_grad_(True)
    with pytest.raises(UsageError, match=r"wrapped model: first\.bias; "):
        step.checks.check_optimizers()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp", "easgd"])
def test_parameters_in_no_optimizer_are_warned_about(comm: Any, data: str, lines: list[str]) -> None:
    step = make(comm, data=data, trained=lambda model: [model.first.weight])
    step.run(samples(comm.rank))
    expected = "parameters of model 'model' in no optimizer: first.bias, last.weight, last.bias; "
    assert [line for line in lines if line.startswith(expected)] == lines[: comm.rank == 0]
    step.strategy.detach()


def test_parameters_in_no_optimizer_are_not_named_again_after_a_resume(comm: Any, lines: list[str]) -> None:
    step = make(comm, trained=lambda model: [model.first.weight])
    step.checks.resumed = True
    step.run(samples(0))
    assert not lines


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp"])
def test_parameters_without_a_gradient_need_no_optimizer(comm: Any, data: str, lines: list[str]) -> None:
    step = make(comm, data=data)
    average = Net()
    strategies = {"model": step.strategy, "average": attach(average, comm, ParallelSettings(data=data), CPU)}
    models = {"model": step.model, "average": average}
    step.checks = FirstStepChecks(comm, models, strategies, {"model": step.optimizer})
    step.run(samples(comm.rank))
    with torch.no_grad():
        for mean, value in zip(average.parameters(), step.model.parameters()):
            mean.lerp_(value, 0.1)
    assert not lines
    step.strategy.detach()
    strategies["average"].detach()


# Inputs ---------------------------------------------------------------------------------------------------------------


def nests(tensor: Tensor) -> list[Any]:
    """Return forms of batches: a tensor, and structures that hold it, with cycles."""
    ring: list[Any] = [tensor]
    ring.append(ring)
    return [tensor, (tensor, 1), {"inputs": {"inputs": tensor}}, Batch(tensor, tensor, 1.0, len(tensor)), ring]


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_equal_inputs_are_warned_about(comm: Any, number: int, data: str, lines: list[str]) -> None:
    step = make(comm, data=data)
    step.run(nests(samples(comm.rank))[number])
    assert not lines
    make(comm, data=data).run(nests(samples(0))[number])
    ranks = ", ".join(map(str, range(comm.size)))
    said = f"inputs of model 'model' in the first step: data ranks {ranks} got the same ones from DataLoader, so they"
    assert [line.startswith(said) for line in lines] == ([] if comm.rank else [True]), lines
    if comm.rank == 0:
        assert "pass the DataLoader itself to job.run" in lines[0] and "split=False if intended" in lines[0]


@pytest.mark.ranks
def test_equal_inputs_are_accepted_if_declared(comm: Any, lines: list[str]) -> None:
    make(comm, False).run(samples(0))
    assert not lines
    make(comm, True).run(samples(0))
    assert comm.rank or "the dataset itself gives equal samples" in lines[0]


def test_one_rank_compares_no_inputs(comm: Any, lines: list[str]) -> None:
    make(comm).run(samples(0), lambda outputs: F.mse_loss(outputs, samples(1), reduction="sum"))
    assert not lines


@pytest.mark.ranks
def test_placeholder_batches_may_be_equal(comm: Any, lines: list[str]) -> None:
    step = make(comm, True)
    step.strategy.set_sample_weight(0.0 if comm.rank else float(comm.size))
    step.run(samples(0))
    assert not lines


@pytest.mark.ranks
def test_only_the_first_training_pass_is_compared(comm: Any, lines: list[str]) -> None:
    step = make(comm)
    step.checks.attach()
    step.model.eval()
    step.model(samples(0))
    with torch.no_grad():
        step.model.train()(samples(0))
    step.checks.close()
    step.run(samples(comm.rank))
    assert not lines


@pytest.mark.ranks(4)
@pytest.mark.parametrize("order", [("pipe", "data", "tensor"), ("pipe", "tensor", "data")])
def test_tensor_ranks_need_the_same_inputs(comm: Any, order: Any, lines: list[str]) -> None:
    options = {"tensor": 2, "tensor_plan": ("first=column", "last=row"), "order": order}
    step = make(comm, **options)
    step.run(samples(step.strategy.data.rank))
    assert not lines
    with pytest.raises(MismatchError, match="tensor ranks 0 and 1 got different ones; ranks that hold parts"):
        make(comm, **options).run(samples(comm.rank))


# Losses ---------------------------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "cross_entropy": lambda x, how: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64), reduction=how),
    "nll_loss": lambda x, how: nn.NLLLoss(reduction=how)(x.log_softmax(1), torch.zeros(3, dtype=torch.int64)),
    "mse_loss": lambda x, how: nn.MSELoss(reduction=how)(x, torch.zeros_like(x)),
    "l1_loss": lambda x, how: F.l1_loss(x, torch.ones_like(x), reduction=how),
    "smooth_l1_loss": lambda x, how: F.smooth_l1_loss(x, torch.ones_like(x), reduction=how),
    "huber_loss": lambda x, how: F.huber_loss(x, torch.ones_like(x), reduction=how),
    "binary_cross_entropy": lambda x, how: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x), reduction=how),
    "binary_cross_entropy_with_logits": lambda x, how: nn.BCEWithLogitsLoss(reduction=how)(x, torch.ones_like(x)),
    "kl_div": lambda x, how: F.kl_div(x, torch.ones_like(x), reduction=how.replace("mean", "batchmean")),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CALLS)
def test_sum_reductions_are_warned_about(comm: Any, name: str, lines: list[str]) -> None:
    make(comm).run(samples(comm.rank), lambda outputs: CALLS[name](outputs, "mean"))
    assert not lines
    make(comm).run(samples(comm.rank), lambda outputs: CALLS[name](outputs, "sum"))
    said = f'loss with reduction="sum": {name}; the sums of the data ranks are averaged'
    assert [line.startswith(said) for line in lines] == ([] if comm.rank else [True]), lines
    assert comm.rank or "loss = run.backward(batch, compute) with compute(batch) returning (sum of" in lines[0]


def padded(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs, torch.tensor([1, -100, 2]))


def by_class(outputs: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))(outputs, torch.tensor([1, 0, 2]))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("loss", "why"),
    [(padded, "ignores targets (ignore_index = -100)"), (by_class, "has class weights")],
    ids=["ignored", "by class"],
)
def test_means_over_different_numbers_of_targets_are_warned_about(
    comm: Any, loss: Any, why: str, lines: list[str]
) -> None:
    def on_last_rank(outputs: Tensor) -> Tensor:
        return loss(outputs) if comm.rank == comm.size - 1 else F.cross_entropy(outputs, torch.tensor([1, 0, 2]))

    make(comm).run(samples(comm.rank), on_last_rank)
    said = f"loss whose mean is not over the samples: cross_entropy {why}; "
    assert [line.startswith(said) for line in lines] == ([] if comm.rank else [True]), lines


@pytest.mark.ranks
def test_weighted_losses_are_not_checked(comm: Any, lines: list[str]) -> None:
    step = make(comm)

    def loss(outputs: Tensor) -> Tensor:
        with step.checks.weighted():
            return padded(outputs) + F.mse_loss(outputs, outputs.detach() + 1, reduction="sum")

    step.run(samples(comm.rank), loss)
    with torch.no_grad():
        F.mse_loss(samples(0), samples(1), reduction="sum")
    assert not lines


# After the update -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_copies_that_differ_are_refused_on_all_ranks(comm: Any) -> None:
    step = make(comm)
    step.run(samples(comm.rank))
    with torch.no_grad():
        step.model.last.bias[1] += 1e-6 * (comm.rank == comm.size - 1)
    said = rf"^parameter last\.bias of model 'model' after the first update: rank {comm.size - 1} .* than rank 0; "
    with pytest.raises(MismatchError, match=said) as raised:
        step.replicas.compare("after the first update")
    assert raised.value.everywhere


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["zero1", "zero2", "fsdp"])
def test_shards_are_not_compared_between_ranks(comm: Any, data: str, lines: list[str]) -> None:
    make(comm, data=data).run(samples(comm.rank))
    assert not lines


@pytest.mark.ranks(4)
def test_copies_are_compared_along_the_data_axis_of_a_mesh(comm: Any) -> None:
    step = make(comm, tensor=2, tensor_plan=("first=column", "last=row"))
    step.run(samples(step.strategy.data.rank))
    with torch.no_grad():
        step.model.first.weight[0, 0] += 1.0 * (comm.rank == 2)
    with pytest.raises(MismatchError, match=r"parameter first\.weight .*: rank 2 holds other values than rank 0; "):
        step.replicas.compare("after the first update")


@pytest.mark.ranks
def test_asynchronous_ranks_do_not_wait_for_each_other(comm: Any, lines: list[str]) -> None:
    step = make(comm, data="hogwild")
    with comm.recording() as recorder:
        step.checks.before_update()
        step.replicas.compare("after the first update")
    assert not recorder.calls and not lines
    step.strategy.detach()


# No trace -------------------------------------------------------------------------------------------------------------


def traces(model: nn.Module) -> Any:
    hooks = {name: len(value) for name, value in vars(model).items() if name.endswith(("_hooks", "_kwargs"))}
    return hooks, [getattr(F, name) for name in LOSSES]


def test_the_checks_leave_no_hooks(comm: Any) -> None:
    step = make(comm)
    before = traces(step.model)
    step.checks.attach()
    assert traces(step.model) != before
    step.checks.close()
    step.checks.close()
    assert traces(step.model) == before
    step.run(samples(0))
    assert traces(step.model) == before
    with pytest.raises(ZeroDivisionError):
        step.run(samples(0), lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert traces(step.model) == before


def test_wrong_calls_of_losses_fail_with_torchs_error(comm: Any) -> None:
    step = make(comm)
    with pytest.raises(TypeError, match="mse_loss"):
        step.run(samples(0), lambda outputs: F.mse_loss(outputs, nonsense=1))  # type: ignore[call-arg]


def test_compiled_models_are_not_changed(comm: Any) -> None:
    for compiled in (torch.compile(Net(), backend="eager"), nn.Sequential(torch.compile(Net(), backend="eager"))):
        step = make(comm, model=compiled)
        before = traces(step.model)
        step.checks.attach()
        assert traces(step.model) == before
        step.checks.close()


class Mean(nn.Module):
    """Layer that keeps a mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_buffers_that_differ_between_ranks_are_named(comm: Any, data: str, lines: list[str]) -> None:
    step = make(comm, model=nn.Sequential(Mean(), nn.Linear(WIDTH, 2), nn.BatchNorm1d(2)), data=data)
    step.run(samples(comm.rank))
    begin = "buffers 0.mean of model 'model' after the first step: each data"
    said = [line for line in lines if line.startswith(begin)]
    assert len(said) == (comm.rank == 0 and comm.size > 1)
