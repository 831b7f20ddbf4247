"""State of a GAN (two models, two optimizers, one schedule): saved and resumed bit for bit under each strategy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.checkpoints import same
from torch import nn

from hpctrain.checkpoint.saver import Saver
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.state import TrainState

SAMPLES = 8  # per step, over all ranks


class Gan:
    """Wrapped generator and discriminator of a program, with their optimizers."""

    def __init__(self, job: Any, folder: Path, data: str, seed: int = 1, joint: bool = False) -> None:
        torch.manual_seed(seed)
        self.job = job
        self.models: dict[str, Any] = {
            "generator": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)),
            "discriminator": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
        }
        for model in self.models.values():
            job.wrap(model, ParallelSettings(data=data))  # type: ignore[arg-type]
        self.optimizers = self._optimizers(joint)
        self.schedule = torch.optim.lr_scheduler.StepLR(next(iter(self.optimizers.values())), 2, 0.5)
        self.state = TrainState(
            self.models,
            self.optimizers,
            {"schedule": self.schedule},
            job.comm,
            folder,
            strategies={key: job.strategy(model) for key, model in self.models.items()},
        )

    def _optimizers(self, joint: bool) -> dict[str, torch.optim.Optimizer]:
        lists = {key: list(model.parameters()) for key, model in self.models.items()}
        if joint:
            return {"": torch.optim.Adam([*lists["generator"], *lists["discriminator"]], lr=0.02)}
        return {
            "generator": torch.optim.AdamW(lists["generator"], lr=0.02),
            "discriminator": torch.optim.SGD(lists["discriminator"], lr=0.05, momentum=0.9),
        }

    def step(self, number: int) -> None:
        """Train both on one loss; each rank uses its part of the batch."""
        draw = torch.Generator().manual_seed(number)
        noise, real = torch.randn(SAMPLES, 2, generator=draw), torch.randn(SAMPLES, 3, generator=draw)
        mine = slice(self.job.rank, None, self.job.size)
        judged = self.models["discriminator"](self.models["generator"](noise[mine]))
        ((judged - 1).square().mean() + (self.models["discriminator"](real[mine]) + 1).square().mean()).backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step()
        self.state.step = number

    def save(self) -> Path:
        """Write a checkpoint of the current step."""
        path = self.state.path(self.state.step)
        if self.job.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.job.comm.barrier()
        with Saver(self.job.comm) as saver:
            saver.start(self.state.save_request(path))
        return path

    def bits(self) -> Any:
        """Return copies of all tensors of this rank."""
        things = [*self.models.values(), *self.optimizers.values(), self.schedule]
        return copy.deepcopy([one.state_dict() for one in things])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("data", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("joint", [False, True])
def test_a_gan_resumes_bit_for_bit(job: Any, shared_tmp_path: Path, data: str, joint: bool) -> None:
    straight = Gan(job, shared_tmp_path / "a", data, joint=joint)
    for number in range(1, 4):
        straight.step(number)
    path = straight.save()
    for number in range(4, 7):
        straight.step(number)

    resumed = Gan(job, shared_tmp_path / "a", data, seed=2, joint=joint)
    resumed.state.restore(path)
    assert resumed.state.step == 3
    for number in range(4, 7):
        resumed.step(number)
    assert same(resumed.bits(), straight.bits())


@pytest.mark.ranks(1, 2)
def test_one_strategy_reads_the_checkpoint_of_another(job: Any, shared_tmp_path: Path) -> None:
    one = Gan(job, shared_tmp_path / "a", "fsdp")
    one.step(1)
    path = one.save()
    whole = Gan(job, shared_tmp_path / "b", "ddp", seed=2)
    whole.state.restore(path)
    with h5py.File(path) as file:
        for key, model in whole.models.items():
            for name, value in model.state_dict().items():
                np.testing.assert_array_equal(file["model"][key][name][()], value.numpy())
        weight = whole.models["generator"][2].weight
        moment = whole.optimizers["generator"].state[weight]["exp_avg_sq"]
        np.testing.assert_array_equal(file["optimizer/generator/generator/2.weight/exp_avg_sq"][()], moment.numpy())
        assert moment.any()


@pytest.mark.ranks(1, 2)
def test_a_mismatch_is_refused_before_any_change(job: Any, shared_tmp_path: Path) -> None:
    path = Gan(job, shared_tmp_path / "a", "ddp").save()
    other = Gan(job, shared_tmp_path / "b", "ddp", joint=True)
    before = other.bits()
    with pytest.raises(CheckpointError, match="optimizer +missing(.|\n)*optimizer discriminator +unexpected"):
        other.state.restore(path)
    assert same(other.bits(), before)


def test_asynchronous_workers_need_one_optimizer_per_model(job: Any, tmp_path: Path) -> None:
    gan = Gan(job, tmp_path, "easgd", joint=True)
    with pytest.raises(UsageError, match="'generator' has 1 optimizers.*must have exactly one, which holds parameters"):
        gan.save()


@pytest.mark.ranks(2)
def test_an_average_of_shards_is_refused_and_works_as_a_model(job: Any, shared_tmp_path: Path) -> None:
    gan = Gan(job, shared_tmp_path, "fsdp")
    model = gan.models["generator"]
    with pytest.raises(UsageError, match=r"make the copy, such as average = AveragedModel\(model\), before job.wrap"):
        torch.optim.swa_utils.AveragedModel(model)

    torch.manual_seed(1)
    average = job.wrap(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), ParallelSettings(data="fsdp"))
    models = {**gan.models, "average": average}
    strategies = {key: job.strategy(one) for key, one in models.items()}
    state = TrainState(models, gan.optimizers, {}, job.comm, shared_tmp_path, strategies=strategies)
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters()):
            mean.lerp_(value + 1, 0.5)
    with Saver(job.comm) as saver:
        saver.start(state.save_request(state.path(0)))
    with h5py.File(state.path(0)) as file:
        for name in ("0.weight", "2.bias"):
            raw, mean = file["model/generator"][name][()], file["model/average"][name][()]
            np.testing.assert_allclose(mean, raw + 0.5, rtol=0, atol=1e-6)
