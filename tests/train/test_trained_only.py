"""Checkpoints of trained parameters only: a run with LoRA resumes bit for bit, and other frozen weights are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from support.training_fixtures import Training, checkpoints_of, contents, make_batches, seed_everything
from torch import Tensor, nn

from hpctrain.checkpoint.tools.inspect import show
from hpctrain.cli.main import main
from hpctrain.errors import CheckpointError, UsageError

WIDTH, RANK, STEPS = 32, 2, 6
STRATEGIES: list[dict[str, Any]] = [{"data": "ddp"}, {"data": "zero1"}, {"data": "zero2"}, {"data": "fsdp"}]
BASE_BYTES = 4 * 3 * WIDTH * WIDTH  # of the frozen matrices


class LoRALinear(nn.Module):
    """Frozen linear layer with a trained product of two small matrices beside it (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + inputs @ self.lora_a.T @ self.lora_b.T  # type: ignore[no-any-return]


def make_adapted(seed: int) -> nn.Sequential:
    """Return a net of frozen layers with adapters, a buffer and a trained head; two names of one frozen matrix."""
    torch.manual_seed(seed)
    layers = [LoRALinear(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(3)]
    tied = LoRALinear(nn.Linear(WIDTH, WIDTH, bias=False))
    tied.base.weight = layers[0].base.weight
    return nn.Sequential(
        nn.Linear(4, WIDTH),
        layers[0],
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        layers[1],
        layers[2],
        tied,
        nn.Linear(WIDTH, 1),
    )


class Adapted(Training):
    """Training of the adapters."""

    def __init__(self, job: Any, folder: Path, strategy: dict[str, Any], *, base: int = 11, **options: Any) -> None:
        self.model = job.wrap(make_adapted(base), strategy)
        seed_everything(100)
        self.optimizer = torch.optim.Adam([each for each in self.model.parameters() if each.requires_grad], lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.job, self.losses = job, list[float]()
        options = {"split": False, "only": "trained", "steps": STEPS, "every": 2, "keep": 9, **options}
        self.run = job.run(self.model, self.optimizer, make_batches(STEPS), checkpoints=str(folder), **options)


def stored(folder: Path, step: int) -> dict[str, Any]:
    """Return all tensors and values of a checkpoint."""
    return contents(folder / f"checkpoints/step_{step:08d}.h5")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: str(each["data"]))
def test_a_resumed_run_continues_with_the_bits_of_an_undisturbed_one(
    job: Any, shared_tmp_path: Path, strategy: dict[str, Any]
) -> None:
    whole = Adapted(job, shared_tmp_path / "whole", strategy, only="all").go()
    straight = Adapted(job, shared_tmp_path / "straight", strategy).go()
    first = Adapted(job, shared_tmp_path / "resumed", strategy, steps=4).go()
    second = Adapted(job, shared_tmp_path / "resumed", strategy).go()
    job.comm.barrier()
    assert first.losses + second.losses == straight.losses == whole.losses and len(second.losses) == 2

    held, all_of_it = stored(shared_tmp_path / "resumed", STEPS), stored(shared_tmp_path / "whole", STEPS)
    kinds = ("model/", "optimizer/", "rng/")
    names = {name for name in all_of_it if name.startswith(kinds) and ".base." not in name}
    assert {name for name in held if name.startswith(kinds)} == names and any("running_mean" in name for name in names)
    assert all(held[name] == all_of_it[name] for name in names)
    file = f"checkpoints/step_{STEPS:08d}.h5"
    small, large = ((shared_tmp_path / name / file).stat().st_size for name in ("resumed", "whole"))
    assert large - small > BASE_BYTES


@pytest.mark.ranks(2)
def test_a_run_resumes_under_another_strategy(job: Any, shared_tmp_path: Path) -> None:
    straight = Adapted(job, shared_tmp_path / "straight", {"data": "ddp"}).go()
    losses = []
    for number, strategy in enumerate(({"data": "fsdp"}, {"data": "ddp"}, {"data": "zero1"}), 1):
        losses += Adapted(job, shared_tmp_path / "passed", strategy, steps=2 * number).go().losses
    assert losses == pytest.approx(straight.losses, rel=1e-6)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_other_frozen_weights_are_refused(job: Any, shared_tmp_path: Path, data: str) -> None:
    Adapted(job, shared_tmp_path, {"data": data}, steps=2).go()
    with pytest.raises(CheckpointError, match="the frozen ones of this program are others") as caught:
        Adapted(job, shared_tmp_path, {"data": data}, base=12).go()
    assert caught.value.everywhere or job.size == 1
    other = Adapted(job, shared_tmp_path, {"data": data})
    if data == "ddp":
        with torch.no_grad():  # the smallest change of one element
            weight = other.model[1].base.weight
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
        with pytest.raises(CheckpointError, match="others"):
            other.go()


@pytest.mark.ranks(1, 2)
def test_frozen_parameters_that_change_are_refused_at_the_first_save(job: Any, shared_tmp_path: Path) -> None:
    one = Adapted(job, shared_tmp_path, {"data": "ddp"})

    def average(step: int, batch: Tensor) -> None:
        with torch.no_grad():
            one.model[1].base.weight.mul_(0.99)

    with pytest.raises(UsageError, match="have changed since the start of the run"):
        one.go(average)
    job.comm.barrier()
    assert not checkpoints_of(shared_tmp_path)


def test_layers_unfrozen_in_between_are_refused(job: Any, tmp_path: Path) -> None:
    one = Adapted(job, tmp_path, {"data": "ddp"})
    with pytest.raises(UsageError, match="or others require none"):
        one.go(lambda step, batch: one.model[1].base.requires_grad_(True) and None)


def test_a_complete_checkpoint_is_loaded_as_a_whole(job: Any, tmp_path: Path) -> None:
    """The option may change between two starts; a file says what it holds."""
    Adapted(job, tmp_path, {"data": "ddp"}, steps=2, only="all").go()
    later = Adapted(job, tmp_path, {"data": "ddp"}, base=12, steps=4).go()
    assert torch.equal(later.model.state_dict()["1.base.weight"], make_adapted(11).state_dict()["1.base.weight"])
    with h5py.File(tmp_path / "checkpoints/step_00000004.h5") as file:
        assert "1.base.weight" not in file["model"] and "frozen" in file["model"].attrs
    with pytest.raises(CheckpointError, match="others"):
        Adapted(job, tmp_path, {"data": "ddp"}, base=12).go()


def test_a_new_run_starts_from_the_trained_parameters(job: Any, tmp_path: Path) -> None:
    before = Adapted(job, tmp_path / "before", {"data": "ddp"}).go()
    last = tmp_path / f"before/checkpoints/step_{STEPS:08d}.h5"
    new = Adapted(job, tmp_path / "new", {"data": "ddp"}, start_from=str(last))
    with new.run:
        assert torch.equal(new.model[1].lora_a, before.model[1].lora_a)
    with pytest.raises(CheckpointError, match="others"):
        Adapted(job, tmp_path / "other", {"data": "ddp"}, base=12, start_from=str(last)).go()


def test_show_tells_that_frozen_parameters_are_missing(job: Any, tmp_path: Path, capsys: Any) -> None:
    Adapted(job, tmp_path, {"data": "ddp"}, steps=2).go()
    file = tmp_path / "checkpoints/step_00000002.h5"
    found = show(file).frozen
    assert found is not None and len(found) == 16 and main(["checkpoint", "show", str(file)]) == 0
    assert f"only trained parameters; fingerprint of the frozen {found}" in capsys.readouterr().out
    Adapted(job, tmp_path / "all", {"data": "ddp"}, steps=2, only="all").go()
    assert show(tmp_path / "all/checkpoints/step_00000002.h5").frozen is None


@pytest.mark.ranks(2)
def test_a_background_save_holds_the_trained_parameters(job: Any, shared_tmp_path: Path) -> None:
    straight = Adapted(job, shared_tmp_path / "straight", {"data": "fsdp"}).go()
    first = Adapted(job, shared_tmp_path / "behind", {"data": "fsdp"}, steps=4, background=True).go()
    second = Adapted(job, shared_tmp_path / "behind", {"data": "fsdp"}, background=True).go()
    assert first.losses + second.losses == straight.losses


def test_asynchronous_workers_are_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="workers that make their own updates"):
        Adapted(job, tmp_path, {"data": "easgd"}).go()
    with pytest.raises(UsageError, match="only = 'some': allowed are all, trained"):
        Adapted(job, tmp_path, {"data": "ddp"}, only="some")
