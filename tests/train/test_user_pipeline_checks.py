"""Mistakes in pipelines of users, which are errors on all ranks: layers unlike forward, inputs that cannot be split."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.errors import MismatchError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.objective import Objective

pytestmark = pytest.mark.ranks(2)
WIDTH, SAMPLES = 6, 8
MSE = Objective(F.mse_loss)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("hpctrain").propagate = True  # restored after each test
    caplog.set_level(logging.INFO, "hpctrain")
    return caplog


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, WIDTH, generator=chance), torch.randn(SAMPLES, WIDTH, generator=chance)


# Layers that are not the model ----------------------------------------------------------------------------------------


class Row(nn.Module):
    """Four layers, and further operations of forward."""

    def __init__(self, scale: float = 1.0, dropout: float = 0.0, *, forward: str = "") -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.norm, self.scale, self.drop, self.how = nn.BatchNorm1d(WIDTH), scale, nn.Dropout(dropout), forward
        self.calls = 0

    def layers(self) -> list[Any]:
        """Return the layers that forward calls, without the scale and the dropout."""
        return [*self.parts, self.norm]

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.how == "raises":
            raise NotImplementedError("use the layers")
        for part in self.parts:
            x = self.drop(part(x))
        x = self.norm(x) * self.scale
        return (x, x) if self.how == "pair" else x


def step(job: Any, model: nn.Module) -> Tensor:
    """Wrap a model and compute one batch."""
    wrapped = job.wrap(model, ParallelSettings(pipe=job.size, microbatches=4))
    return job.strategy(wrapped).forward_backward(*batch(), MSE)  # type: ignore[no-any-return]


def test_layers_that_are_not_the_model_are_an_error_on_all_ranks(job: Any) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model = Row(scale=1.02)
    torch.set_rng_state(state)
    whole = Row(scale=1.02).eval()
    x = batch()[0][:2]  # the first of four microbatches
    with torch.no_grad():
        other = whole(x)
        largest = float((other - other / 1.02).abs().max())
    with pytest.raises(UsageError) as error:
        step(job, model)
    text = str(error.value)
    assert text.startswith("layers() of Row does not compute what its forward() computes: on the first microbatch")
    assert f"differ by up to {largest:.3g} (" in text and error.value.everywhere
    with pytest.raises(UsageError, match=r"forward returned a tuple of float32\[2, 6\], float32\[2, 6\], layers\(\)"):
        step(job, Row(forward="pair"))


def test_the_comparison_has_no_side_effects_and_happens_once(job: Any, told: pytest.LogCaptureFixture) -> None:
    """Generators, statistics of batch norms and gradients equal those of a step without comparison."""
    found = []
    for checked in (True, False):
        torch.manual_seed(0)
        model = job.wrap(Row(), ParallelSettings(pipe=2, microbatches=2))
        strategy = job.strategy(model)
        if not checked:
            strategy.skip_checks()
        torch.manual_seed(3)
        for seed in range(2):
            strategy.forward_backward(*batch(seed), MSE)
        gradients = [gradient.as_subclass(Tensor) for _, gradient in strategy.reduced_gradients()]
        found.append([torch.rand(2), *gradients, *(each.clone() for each in model.buffers())])
        assert model.calls == 0, "the model itself is not called"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not told.records


def test_dropout_in_only_one_of_layers_and_forward_is_a_warning(job: Any, told: pytest.LogCaptureFixture) -> None:
    step(job, Row(dropout=0.5))
    assert [("agree in evaluation mode and not in training mode" in each.message) for each in told.records] == (
        [True] if job.rank == 0 else []
    )


def test_models_that_cannot_be_compared_are_reported(
    job: Any, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain.parallel.pipeline import compare

    step(job, Row(forward="raises"))
    with torch.device("meta"):
        model = Row(scale=1.5)
    step(job, model)
    monkeypatch.setattr(compare, "free_memory", lambda: 1000)
    step(job, Row(scale=1.5))
    step(job, nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))  # a Sequential is its layers
    said = [each.message.removeprefix("layers() is not compared with forward(): ") for each in told.records]
    wanted = ["forward() fails: NotImplementedError", "the model is on the meta device", "the models of this node have"]
    assert len(said) == (len(wanted) if job.rank == 0 else 0)
    assert all(one.startswith(text) for one, text in zip(said, wanted))


def test_models_are_compared_at_wrap_with_an_example_or_not_if_checks_are_off(job: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not compute what its forward"):
        job.wrap(Row(scale=1.5), {"pipe": 2}, example=batch()[0])
    for checks in (True, False):
        model = job.wrap(Row(scale=1.5), {"pipe": 2, "microbatches": 4})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(*batch()), SAMPLES)
        with job.run(model, optimizer, loader, checkpoints=str(shared_tmp_path / str(checks)), checks=checks) as run:
            for _, samples in run:
                if checks:
                    with pytest.raises(UsageError, match="does not compute what its forward"):
                        run.backward(samples, lambda batch: F.mse_loss(model(batch[0]), batch[1]))
                else:
                    run.backward(samples, lambda batch: F.mse_loss(model(batch[0]), batch[1]))
                optimizer.step()


# Dropout --------------------------------------------------------------------------------------------------------------


class Drop(nn.Module):
    """Dropout that records its masks, applied to ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(())), []

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones_like(x), 0.5, self.training)
        if x.shape[0] == SAMPLES // 2 and self.training:
            self.seen.append(kept)
        return x * kept * self.weight


def masks(job: Any, steps: int = 2, **settings: Any) -> tuple[Any, list[Tensor]]:
    """Return the masks that this rank's stage has drawn after a seed that is equal on all ranks."""
    linear = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*linear, Drop(), Drop(), Drop(), Drop())
    wrapped = job.wrap(model, ParallelSettings(microbatches=2, partition="4,2", **settings))
    strategy = job.strategy(wrapped)
    torch.manual_seed(1)
    for _ in range(steps):
        strategy.forward_backward(*batch(), MSE)
    return strategy, [kept for part in model[2:] for kept in part.seen]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_stages_and_data_ranks_draw_different_masks_and_generators_stay_equal(job: Any, schedule: Any) -> None:
    strategy, mine = masks(job, pipe=2, schedule=schedule)
    assert len(mine) == 2 * 2 * 2, "layers, microbatches and steps"
    everyone = [kept for rank in job.comm.all_gather_object(mine) for kept in rank]
    distinct = {tuple(kept.flatten().tolist()) for kept in everyone}
    assert len(distinct) == len(everyone), "each layer, microbatch, step, stage and data rank has masks of its own"
    numbers = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(numbers, torch.rand(3)), "the program's own generator has not moved"
    again = masks(job, pipe=2, schedule=schedule)[1]
    assert all(torch.equal(one, other) for one, other in zip(mine, again, strict=True))


def test_recomputation_draws_the_same_masks(job: Any) -> None:
    plain = masks(job, pipe=2)[1]
    twice = masks(job, pipe=2, recompute=True, units=("Drop",))[1]
    assert len(twice) == 2 * len(plain), "each is computed again"
    wanted = {tuple(kept.flatten().tolist()) for kept in plain}
    assert {tuple(kept.flatten().tolist()) for kept in twice} == wanted


@pytest.mark.ranks(4)
def test_tensor_ranks_of_a_stage_draw_equal_masks(job: Any) -> None:
    strategy, mine = masks(job, pipe=2, tensor=2, tensor_plan=("0=column", "1=row"))
    line = strategy.mesh.tensor.all_gather_object(mine)
    assert all(torch.equal(one, other) for one, other in zip(*line, strict=True))


def test_without_a_pipeline_masks_come_from_the_generator_of_the_program(job: Any) -> None:
    model = job.wrap(nn.Sequential(Drop()), "ddp")
    torch.manual_seed(1)
    half = [each[: SAMPLES // 2] for each in batch()]
    job.strategy(model).forward_backward(*half, MSE)
    torch.manual_seed(1)
    assert torch.equal(model[0].seen[0], F.dropout(torch.ones_like(half[0])))


# Inputs ---------------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Layer that takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x) * (1.0 if mask is None else mask)  # type: ignore[no-any-return]


class Chain(nn.Module):
    """Model whose layers take a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Masked(), Masked()])

    def layers(self) -> nn.ModuleList:
        return self.parts

    def forward(self, x: Tensor, mask: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = part(x, mask)
        return x


class Holder:
    """Object that contains a tensor."""

    def __init__(self) -> None:
        self.mask = torch.ones(SAMPLES, 1)


class Scaled(nn.Module):
    """Layer that gets a number from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        result: Tensor = self.linear(x) * scale
        return result


class Defaults(nn.Module):
    """Model with a default that its layer does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Scaled()

    def layers(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        result: Tensor = self.second(self.first(x), scale)
        return result


@pytest.mark.parametrize("given", [{}, {"scale": 0.5}])
def test_a_default_of_the_model_reaches_the_layer_that_names_it(job: Any, given: dict[str, float]) -> None:
    torch.manual_seed(0)
    plain, x = Defaults(), torch.randn(SAMPLES, WIDTH)
    model = job.wrap(Defaults(), {"pipe": 2})
    for name, one in job.strategy(model).model.named_parameters():
        one.data.copy_(plain.get_parameter(name))
    with torch.no_grad():
        torch.testing.assert_close(model(x, **given), plain(x, **given))


X = torch.ones(SAMPLES, WIDTH)
REFUSED = {
    "inputs of the model have different numbers of samples: inputs[0] has 8, mask has 6; ": lambda model, _: model(
        X, mask=torch.ones(6, 6)
    ),
    "inputs of Chain: got an unexpected keyword argument 'musk'; its forward takes (x: ": lambda model, part: model(
        part[0], musk=part[0]
    ),
    "arguments of Chain (x, other, mask) do not fit its first layer, parts.0, which ": lambda model, part: model(
        part[0], other=part[0]
    ),
    "mask is a Holder with a tensor in its attribute mask; allowed are tensors, and tuples, ": lambda model, _: model(
        X, mask=Holder()
    ),
    "compute was given 8 samples and called the model with 48; under a pipeline the first ": lambda model, _: model(
        X.view(-1, 1)
    ),
    "compute never called the model; under a pipeline it must call it once": lambda model, _: X.sum(),
}


@pytest.mark.parametrize("text", REFUSED)
def test_inputs_that_do_not_fit_are_refused_by_all_ranks(job: Any, shared_tmp_path: Path, text: str) -> None:
    model = job.wrap(Chain(), {"pipe": 2})
    run = job.run(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch()], checkpoints=str(shared_tmp_path))
    with pytest.raises(UsageError) as error:
        run.backward(batch(), lambda part: REFUSED[text](model, part))
    assert str(error.value).startswith(text) and error.value.everywhere


def test_a_matrix_with_as_many_rows_as_samples_is_not_split(job: Any, shared_tmp_path: Path) -> None:
    """A mask of all pairs of positions has no sample dimension, which its shape alone does not show."""
    model = job.wrap(Chain(), {"pipe": 2})
    run = job.run(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch()], checkpoints=str(shared_tmp_path))
    pairs = torch.ones(SAMPLES, WIDTH)
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match=r"^compute called the model with mask of shape \[8, 6\] for a micro") as error:
        run.backward(batch(), lambda part: F.mse_loss(model(part[0] + torch.rand(()), mask=pairs), part[1]))
    assert error.value.everywhere
    torch.rand(())
    torch.set_rng_state(state)


def test_random_inputs_and_means_of_the_batch_are_refused(job: Any, shared_tmp_path: Path) -> None:
    """The last stage calls compute again for each microbatch, which would compare with different inputs."""
    model = job.wrap(Chain(), {"pipe": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = job.run(model, optimizer, [batch()], checkpoints=str(shared_tmp_path))
    for change in (lambda x: x + torch.randn(len(x), 1), lambda x: x - x.mean(0)):

        def compute(part: Any) -> Tensor:
            x = change(part[0])  # noqa: B023
            return F.mse_loss(model(x), x)

        with pytest.raises(UsageError, match=r"^compute called the model with other values of inputs\[0\] for 4 sam"):
            run.backward(batch(), compute)
        run = job.run(model, optimizer, [batch()], checkpoints=str(shared_tmp_path))
    loss = run.backward(batch(), lambda part: F.mse_loss(model(part[0] * 2), part[1]))
    assert loss.isfinite()


def test_stages_with_different_samples_are_an_error(job: Any) -> None:
    strategy = job.strategy(job.wrap(Chain(), {"pipe": 2}))
    with pytest.raises(MismatchError, match="^inputs of the pipeline in its first pass: stages 0 and 1 got different"):
        strategy.forward_backward(*batch(job.rank), MSE)


def test_numbers_of_samples_must_agree(job: Any) -> None:
    strategy = job.strategy(job.wrap(Chain(), {"pipe": 2}))
    x, y = batch()
    with pytest.raises(UsageError, match="^inputs of 8 samples and targets of 4; allowed are equal numbers of samples"):
        strategy.forward_backward(x, y[:4], MSE)
    with pytest.raises(UsageError, match="^inputs of the model: no tensor with a first dim; allowed are"):
        strategy.forward_backward((torch.ones(()), "text"), y, MSE)


# Examples for partition = "time" --------------------------------------------------------------------------------------


def test_partition_by_time_accepts_examples_of_any_form(job: Any) -> None:
    x, y = batch()
    mask = torch.ones(SAMPLES, 1)
    settings = {"pipe": 2, "partition": "time"}
    loader = DataLoader(TensorDataset(x, mask), 4, shuffle=True)
    rows = [{"x": x[number], "mask": mask[number], "labels": y[number]} for number in range(SAMPLES)]
    for example in (x, (x, mask), {"x": x, "mask": mask}, loader, DataLoader(rows, 4)):
        torch.manual_seed(0)
        model = job.wrap(Chain(), settings, example=example)
        torch.manual_seed(0)
        whole = Chain()
        loss = job.strategy(model).forward_backward((x, mask), y, MSE)
        assert float(loss) == pytest.approx(float(F.mse_loss(whole(x, mask), y).detach()), abs=1e-6)


def test_partition_by_time_without_an_example_is_an_error(job: Any) -> None:
    settings = {"pipe": 2, "partition": "time"}
    with pytest.raises(UsageError, match=r"there is none; write job.wrap\(model, example=inputs\) with what the model"):
        job.wrap(Chain(), settings)
    with pytest.raises(UsageError, match="is a int; allowed are what the model is called with"):
        job.wrap(Chain(), settings, example=3)
    with pytest.raises(UsageError, match="^inputs of Chain: missing a required argument: 'x'; its forward takes"):
        job.wrap(Chain(), settings, example={"ids": X})
    with pytest.raises(UsageError, match="^setting parallel.partition = ..fair..: there is no layer fair") as error:
        job.wrap(Chain(), {"pipe": 2, "partition": "fair"}, example=X)
    assert error.value.everywhere
