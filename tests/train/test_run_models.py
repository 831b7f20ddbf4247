"""Models that no rank holds completely: built on the meta device, initialized per shard, equal to a plain build."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.train_runs import SPLIT, Legs, losses, shared_project

from hpctrain.errors import UsageError
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.meta_init import is_meta
from hpctrain.train.config import DataSettings, Settings, TrainSettings
from hpctrain.train.recipe import make_model

IMAGES = {"input_shape": (8, 8), "outputs": 5}
MODELS: dict[str, tuple[ModelSettings, dict[str, Any]]] = {
    "gpt": (ModelSettings(layers=2, width=16, heads=2), {"vocab_size": 256}),
    "tied": (ModelSettings(layers=2, width=16, heads=2, tied=True), {"vocab_size": 300}),
    "mlp": (ModelSettings(name="mlp", options={"hidden": [9, 7]}), IMAGES),
    "convnet": (ModelSettings(name="convnet"), IMAGES),
}
GPT = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=16", "model.dropout=0.1"]

FACTORY = ["model.factory=users_modules:make", "model.meta=true", "model.context=16"]

USERS = '''
import torch
from torch import nn

class Shift(nn.Module):
    """Add a drawn parameter to what a buffer, which is set with it, has scaled."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.empty(8))
        self.register_buffer("factor", torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.shift, 1, 2)
        nn.init.constant_(self.factor, 3)

    def forward(self, x):
        return x * self.factor + self.shift

class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight

def make(middle="Shift"):
    return nn.Sequential(nn.Embedding(256, 8), globals()[middle](), nn.LayerNorm(8), nn.Linear(8, 256))
'''


def settings_of(model: ModelSettings, data: Any) -> Settings:
    parallel = ParallelSettings(data=data, bucket_mib=1e-3)
    return Settings(data=DataSettings(files=("x",)), model=model, train=TrainSettings(seed=9), parallel=parallel)


def made(model: ModelSettings, data: Any, facts: dict[str, Any], ranks: int) -> torch.nn.Module:
    corpus: Any = SimpleNamespace(train=SimpleNamespace(facts=facts))
    return make_model(settings_of(model, data), corpus, ranks)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_built_on_the_meta_device_if_they_are_sharded(name: str) -> None:
    model, facts = MODELS[name]
    for data, ranks, without in (("ddp", 4, False), ("fsdp", 1, False), ("fsdp", 2, True), ("zero1", 4, True)):
        assert is_meta(made(model, data, facts, ranks)) is without
    factory = {"factory": "torch.nn:Linear", "options": {"in_features": 3, "out_features": 2}}
    for meta, data, ranks in ((True, "ddp", 1), (True, "zero2", 3), (False, "zero2", 3)):
        assert is_meta(made(ModelSettings(**factory, meta=meta), data, facts, ranks)) is meta


@pytest.mark.ranks(2)
@pytest.mark.parametrize("data", ["zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_equal_those_of_the_plain_build(job: Any, name: str, data: Any) -> None:
    model, facts = MODELS[name]
    plain = made(model, "ddp", facts, 1).state_dict()
    divided = made(model, data, facts, job.size)
    job.wrap(divided, settings_of(model, data).parallel)
    strategy = job.strategy(divided)
    with strategy.unshard():
        found = divided.state_dict()
        assert found.keys() == plain.keys() and all(torch.equal(found[each], plain[each]) for each in plain)
        assert all(not tensor.is_meta for tensor in found.values())
    strategy.detach()
    job.comm.barrier()


@pytest.fixture
def leg(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Legs:
    """Return a function that runs one leg, in a project with modules of a user."""
    shared_project(comm, shared_tmp_path)
    if comm.rank == 0:
        (shared_tmp_path / "users_modules.py").write_text(USERS)
        text = (shared_tmp_path / "tiny.toml").read_text().splitlines()
        kept = [line for line in text if not line.startswith(("factory", "options", "context"))]
        (shared_tmp_path / "tiny.toml").write_text("\n".join(kept))
    comm.barrier()
    monkeypatch.delitem(sys.modules, "users_modules", raising=False)
    return Legs(comm, shared_tmp_path, monkeypatch)


@pytest.mark.ranks(2, 3, 4)
def test_sharded_runs_start_with_the_loss_of_ddp(leg: Legs) -> None:
    seen: list[bool] = []
    leg.on_wrap = lambda model: seen.append(is_meta(model))
    every = {name: losses(leg(name, name, *GPT, "train.steps=3")) for name in ("ddp", *SPLIT)}
    assert seen == [False, True, True, True, True]
    for found in every.values():
        assert found[0] == every["ddp"][0] and found == pytest.approx(every["ddp"], rel=1e-5)


@pytest.mark.ranks(2)
def test_tensors_missing_in_a_checkpoint_are_initialized(leg: Legs) -> None:
    leg("ddp", "other", *GPT, "train.steps=2")
    start = ["train.start_from=other/checkpoints/step_00000002.h5", 'train.start_skip=["head.*", "blocks.1.*"]']
    words = [*GPT, *start, "train.steps=1", "train.seed=8"]
    one, two = (losses(leg(name, f"new_{name}", *words)) for name in ("ddp", "fsdp"))
    assert one == two


@pytest.mark.ranks(1, 2)
def test_a_factory_is_built_on_the_meta_device(leg: Legs) -> None:
    every = {name: losses(leg(name, name, *FACTORY, "train.steps=8")) for name in ("ddp", "zero2", "fsdp")}
    for found in every.values():
        assert found[-1] < found[0] < 7


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_modules_without_reset_parameters_are_named(leg: Legs, name: str) -> None:
    said = r"module 1 of class Silent is on the meta device and has no reset_parameters\(\)"
    with pytest.raises(UsageError, match=said) as found:
        leg(name, name, *FACTORY, "model.options.middle=Silent")
    assert found.value.everywhere and not (leg.project / name).exists()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_buffers_get_the_initial_values_of_their_modules(job: Any, data: Any) -> None:
    """This includes a batch norm without parameters: its variance starts at one."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, affine=False), torch.nn.BatchNorm1d(4)]
        model = torch.nn.Sequential(*layers)
    job.wrap(model, ParallelSettings(data=data))
    state = model.state_dict()
    assert {name: tensor.tolist() for name, tensor in state.items() if "running" in name} == {
        f"{layer}.running_{what}": [value] * 4 for layer in (1, 2) for what, value in (("mean", 0.0), ("var", 1.0))
    }
    job.strategy(model).detach()
