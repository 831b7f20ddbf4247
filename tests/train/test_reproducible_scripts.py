"""Reproducible runs of the user's own scripts: what they compute, and what they are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tree_sums import tree_sum
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpctrain.errors import MismatchError, SettingsError, UsageError
from hpctrain.parallel.config import ParallelSettings

pytestmark = pytest.mark.ranks(1, 2, 3)
SAMPLES, BATCH, MICROBATCH = 24, 12, 2


def make_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 1, generator=generator))


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=BATCH)


@contextmanager
def opened(
    job: Any, tmp_path: Path, model: nn.Module | None = None, given: Any = None, data: str = "ddp", **options: Any
) -> Iterator[Any]:
    """Yield a reproducible run, with its model as an attribute, in a folder that all ranks share."""
    model = make_model() if model is None else model
    job.wrap(model, ParallelSettings(data=data, reproducible=True))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = job.comm.broadcast_object(str(tmp_path / "run"))
    options = {"steps": 2, "microbatch": MICROBATCH, **options}
    with job.run(model, optimizer, loader() if given is None else given, checkpoints=folder, **options) as run:
        run.wrapped = model
        yield run


def train(run: Any, compute: Callable[[nn.Module, Any], Any], **options: Any) -> list[Tensor]:
    """Train to the end; return the losses."""
    losses = []
    for _, batch in run:
        losses.append(run.backward(batch, lambda part: compute(run.wrapped, part), **options))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


def mean(model: nn.Module, part: Any) -> Tensor:
    return F.mse_loss(model(part[0]), part[1])


def sum_and_count(model: nn.Module, part: Any) -> tuple[Tensor, float]:
    """Return a sum over the positive targets, and their number."""
    positive = (part[1] > 0).float()
    return ((model(part[0]) - part[1]).square() * positive).sum(), float(positive.sum())


@pytest.mark.parametrize("data", ("ddp", "fsdp"))
def test_sums_are_divided_by_the_counts_of_all_microbatches(job: Any, tmp_path: Path, data: str) -> None:
    plain = make_model()
    samples = dataset()[:BATCH]
    gradients, counts = [], 0.0
    for begin in range(0, BATCH, MICROBATCH):
        plain.zero_grad()
        loss, count = sum_and_count(plain, [one[begin : begin + MICROBATCH].clone() for one in samples])
        loss.backward()
        gradients.append([parameter.grad for parameter in plain.parameters()])
        counts += count
    with torch.no_grad():
        for parameter, leaves in zip(plain.parameters(), zip(*gradients)):
            parameter -= 0.1 * (tree_sum(list(leaves)) * torch.tensor(1.0 / counts, dtype=torch.float64))
    with opened(job, tmp_path, data=data, steps=1) as run:
        train(run, sum_and_count)
    for name, tensor in job.state_dict(run.wrapped).items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_two_backward_passes_of_one_update_add_up(job: Any, tmp_path: Path) -> None:
    with opened(job, tmp_path, steps=1) as run:
        for _, batch in run:
            run.backward(batch, lambda part: mean(run.wrapped, part))
            once = [parameter.grad.clone() for parameter in run.wrapped.parameters()]
            run.backward(batch, lambda part: mean(run.wrapped, part))
            for parameter, gradient in zip(run.wrapped.parameters(), once):
                assert torch.equal(parameter.grad, 2 * gradient)
            run.optimizer.step()


@pytest.mark.parametrize("data", ("ddp", "zero1", "fsdp"))
def test_a_plain_backward_pass_is_refused(job: Any, tmp_path: Path, data: str) -> None:
    with pytest.raises(UsageError, match=r"loss\.backward\(\) under parallel\.reproducible .* run\.backward"):
        with opened(job, tmp_path, data=data) as run:
            for _, batch in run:
                mean(run.wrapped, batch).backward()


@pytest.mark.parametrize(
    "given, options",
    (
        (lambda: [dataset()[:BATCH]], {}),
        (loader, {"split": False}),
        (lambda: DataLoader(dataset(), BATCH, sampler=DistributedSampler(dataset(), 1, 0)), {}),
    ),
)
def test_a_loader_that_every_rank_reads_is_refused(
    job: Any, tmp_path: Path, given: Callable[[], Any], options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="that every rank reads by itself"):
        with opened(job, tmp_path, given=given(), **options):
            pass


def padded(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return inputs without their last zeros, padded to the longest sample."""
    inputs = [sample[0] * (torch.arange(5) < 2 + number % 3) for number, sample in enumerate(samples)]
    longest = max(int((one != 0).sum()) for one in inputs)
    return [torch.stack([one[:longest] for one in inputs]), torch.stack([sample[1] for sample in samples])]


def mixed(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return inputs with noise that is drawn once per batch."""
    inputs = torch.stack([sample[0] for sample in samples])
    return [inputs + torch.randn_like(inputs), torch.stack([sample[1] for sample in samples])]


@pytest.mark.parametrize("collate", (padded, mixed))
def test_a_collate_function_that_depends_on_the_share_is_refused(job: Any, tmp_path: Path, collate: Any) -> None:
    with pytest.raises(UsageError, match="collate_fn of the DataLoader under parallel.reproducible"):
        with opened(job, tmp_path, given=DataLoader(dataset(), BATCH, collate_fn=collate)) as run:
            train(run, lambda model, part: part[0].sum() * next(model.parameters()).sum())


def test_a_collate_function_of_single_samples_is_allowed(job: Any, tmp_path: Path) -> None:
    collate = lambda samples: {
        "x": torch.stack([one[0] for one in samples]),
        "names": ["a"] * len(samples),
    }  # noqa: E731
    with opened(job, tmp_path, given=DataLoader(dataset(), BATCH, collate_fn=collate)) as run:
        assert len(train(run, lambda model, part: model(part["x"]).square().mean())) == 2


def test_parts_of_the_program_are_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="accumulate=2"):
        with opened(job, tmp_path) as run:
            train(run, mean, accumulate=2)


def test_part_of_a_batch_is_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was given 1 samples"):
        with opened(job, tmp_path) as run:
            for _, batch in run:
                run.backward([one[:1] for one in batch], lambda part: mean(run.wrapped, part))


def test_a_hook_on_a_parameter_is_refused(job: Any) -> None:
    model = make_model()
    job.wrap(model, ParallelSettings(reproducible=True))
    with pytest.raises(UsageError, match="called for each microbatch"):
        next(model.parameters()).register_hook(lambda gradient: gradient)


def test_values_that_differ_between_ranks_are_refused(job: Any, tmp_path: Path) -> None:
    def run_it() -> None:
        with opened(job, tmp_path) as run:
            for _, batch in run:
                run.log(loss=run.backward(batch, lambda part: mean(run.wrapped, part)), first=float(batch[0][0, 0]))
                run.optimizer.step()

    if job.size == 1:
        run_it()
        return
    with pytest.raises(UsageError, match=r"run\.log\(first=\.\.\.\) in step 1 under parallel\.reproducible"):
        run_it()


def test_a_buffer_that_a_forward_pass_changes_is_refused(job: Any, tmp_path: Path) -> None:
    model = make_model()
    model[0] = nn.utils.parametrizations.spectral_norm(model[0])
    with pytest.raises(UsageError, match="buffer"):
        with opened(job, tmp_path, model) as run:
            train(run, mean)


@pytest.mark.parametrize("draw", (lambda: torch.rand(1), lambda: np.random.rand(), lambda: np.random.randn()))
def test_random_numbers_in_the_loop_are_refused(job: Any, tmp_path: Path, draw: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"random numbers of torch or NumPy in the loop .* inside compute\(part\)"):
        with opened(job, tmp_path) as run:
            for _, batch in run:
                draw()
                run.backward(batch, lambda part: mean(run.wrapped, part))


def test_random_numbers_of_python_and_of_compute_are_allowed(job: Any, tmp_path: Path) -> None:
    """Those of compute depend on the microbatch, and differ between two calls for one batch."""
    with opened(job, tmp_path, steps=1) as run:
        for _, batch in run:
            random.random()
            noisy = lambda part: mean(run.wrapped, [part[0] + torch.randn_like(part[0]), part[1]])  # noqa: E731
            first, second = run.backward(batch, noisy), run.backward(batch, noisy)
            assert float(first) != float(second)
            run.optimizer.step()


@pytest.mark.parametrize("data", ("zero1", "fsdp"))
def test_norms_by_torch_are_refused_for_shards(job: Any, tmp_path: Path, data: str) -> None:
    with opened(job, tmp_path, data=data, steps=1) as run:
        for _, batch in run:
            run.backward(batch, lambda part: mean(run.wrapped, part))
            if job.size > 1:
                with pytest.raises(
                    UsageError, match=r"norm of shards by torch under parallel\.reproducible .* run\.clip"
                ):
                    torch.nn.utils.clip_grad_norm_(run.wrapped.parameters(), 1.0)
            assert float(run.clip(1.0)) > 0
            run.optimizer.step()


def test_a_loss_without_a_gradient_is_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compute returned a loss without a gradient"):
        with opened(job, tmp_path) as run:
            train(run, lambda model, part: mean(model, part).detach())


def test_microbatches_belong_to_reproducible_runs(job: Any, tmp_path: Path) -> None:
    model = job.wrap(make_model())
    folder = job.comm.broadcast_object(str(tmp_path / "run"))
    with pytest.raises(UsageError, match="microbatch = 2: is for parallel.reproducible"):
        job.run(model, torch.optim.SGD(model.parameters()), loader(), checkpoints=folder, microbatch=2)


def test_a_resume_with_other_microbatches_is_refused(job: Any, tmp_path: Path) -> None:
    with opened(job, tmp_path, steps=1) as run:
        train(run, mean)
    with pytest.raises(MismatchError, match="started with 2 samples per microbatch and resumes with 3.*microbatch = 2"):
        with opened(job, tmp_path, microbatch=3):
            pass


def test_a_resume_with_other_threads_is_refused(job: Any, tmp_path: Path) -> None:
    with opened(job, tmp_path, steps=1) as run:
        train(run, mean)
    torch.set_num_threads(2)
    with pytest.raises(MismatchError, match="1 threads per rank and resumes with 2.*OMP_NUM_THREADS=1"):
        with opened(job, tmp_path):
            pass


@pytest.mark.parametrize(
    "more",
    (
        {"data": "easgd"},
        {"data": "server"},
        {"data": "hogwild"},
        {"pipe": 2},
        {"tensor": 2},
        {"compression": "bfloat16"},
        {"sync_batchnorm": True},
        {"data": "fsdp", "shard_within": "node"},
    ),
)
def test_settings_that_depend_on_the_ranks_are_refused(more: dict[str, Any]) -> None:
    name = list(more)[-1]
    with pytest.raises(SettingsError, match=f"parallel.reproducible = true with parallel.{name} = "):
        ParallelSettings(**{**more, "reproducible": True})
