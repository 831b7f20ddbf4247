"""Several models and optimizers in one checkpoint: file structure, restored state, refused arguments."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.checkpoints import same
from torch import nn

from hpctrain import checkpoint
from hpctrain.checkpoint.tools.convert import export
from hpctrain.checkpoint.tools.inspect import show
from hpctrain.errors import CheckpointError, UsageError


def make(seed: int) -> tuple[dict[str, Any], dict[str, torch.optim.Optimizer]]:
    """Return a generator and a discriminator with batch norm, each with an optimizer of a different class."""
    torch.manual_seed(seed)
    models: dict[str, Any] = {
        "generator": nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        "discriminator": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
    }
    optimizers: dict[str, torch.optim.Optimizer] = {
        "generator": torch.optim.AdamW(models["generator"].parameters(), lr=0.01),
        "discriminator": torch.optim.SGD(models["discriminator"].parameters(), lr=0.1, momentum=0.5),
    }
    return models, optimizers


def step(models: Any, optimizers: Any, number: int) -> None:
    """Train discriminator, then generator, as a GAN does."""
    draw = torch.Generator().manual_seed(number)
    noise, real = torch.randn(8, 2, generator=draw), torch.randn(8, 3, generator=draw)
    fake = models["generator"](noise)
    loss = (models["discriminator"](real) - 1).square().mean() + models["discriminator"](fake.detach()).square().mean()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for name, optimizer in optimizers.items():
        if name != "generator":
            optimizer.step()
            optimizer.zero_grad()
    (models["discriminator"](models["generator"](noise)) - 1).square().mean().backward()
    for name, optimizer in optimizers.items():
        if name != "discriminator":
            optimizer.step()


def state_of(models: Any, optimizers: Any) -> Any:
    """Return copies of all states; those of parameters are sorted by index, not by the order of their updates."""
    found = [{key: one.state_dict() for key, one in of.items()} for of in (models, optimizers)]
    for state in found[1].values():
        state["state"] = dict(sorted(state["state"].items()))
    return copy.deepcopy(found)


def test_h5py_finds_each_model_under_its_key(tmp_path: Path) -> None:
    models, optimizers = make(1)
    step(models, optimizers, 0)
    checkpoint.save(tmp_path / "c.h5", model=models, optimizer=optimizers)
    with h5py.File(tmp_path / "c.h5") as file:
        assert file.attrs["format_version"] == b"1.3"
        for group in ("model", "optimizer"):
            assert file[group].attrs["keys"].tolist() == [b"generator", b"discriminator"]
        for key, model in models.items():
            assert set(file["model"][key]) == set(model.state_dict())
            for name, value in model.state_dict().items():
                np.testing.assert_array_equal(file["model"][key][name][()], value.numpy())
        moments = file["optimizer/generator/generator/0.weight/exp_avg"][()]
        expected = optimizers["generator"].state[models["generator"][0].weight]["exp_avg"]
        np.testing.assert_array_equal(moments, expected.numpy())
        groups = json.loads(file["optimizer/discriminator"].attrs["param_groups.json"])
        names = [f"discriminator/{name}" for name, _ in models["discriminator"].named_parameters()]
        assert groups[0]["params"] == names and file["optimizer/discriminator"].attrs["kind"] == b"SGD"


def test_a_single_model_keeps_the_file_format(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoint.save(
        tmp_path / "d.h5", model={"": model}, optimizer={"": torch.optim.SGD(model.parameters(), lr=0.1)}
    )
    with h5py.File(tmp_path / "c.h5") as one, h5py.File(tmp_path / "d.h5") as two:
        assert one.attrs["format_version"] == b"1.2" and set(one["model"]) == {"weight", "bias"}
        assert not one["model"].attrs and set(one["optimizer"].attrs) == {"kind", "param_groups.json"}
        # The attribute ``created`` may differ; the manifest holds it as a CRC-32.
        kept = [
            [line for line in file["manifest"][()].decode().splitlines() if "\tcreated\t" not in line]
            for file in (one, two)
        ]
        assert kept[0] == kept[1]


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    models, optimizers = make(1)
    for number in range(3):
        step(models, optimizers, number)
    checkpoint.save(tmp_path / "c.h5", model=models, optimizer=optimizers)
    for number in range(3, 6):
        step(models, optimizers, number)
    others, other_optimizers = make(2)
    checkpoint.load(tmp_path / "c.h5", model=others, optimizer=other_optimizers)
    for number in range(3, 6):
        step(others, other_optimizers, number)
    assert same(state_of(others, other_optimizers), state_of(models, optimizers))


def test_one_optimizer_over_two_models_and_two_over_one_parameter_round_trip(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[dict[str, Any], dict[str, torch.optim.Optimizer]]:
        models, _ = make(seed)
        everything = [parameter for model in models.values() for parameter in model.parameters()]
        first = next(models["generator"].parameters())
        return models, {"all": torch.optim.Adam(everything), "more": torch.optim.SGD([first], lr=0.1, momentum=0.9)}

    models, optimizers = build(1)
    step(models, optimizers, 0)
    checkpoint.save(tmp_path / "c.h5", model=models, optimizer=optimizers)
    with h5py.File(tmp_path / "c.h5") as file:
        assert set(file["optimizer/all"]) == {"generator", "discriminator"}
        assert list(file["optimizer/more/generator"]) == ["0.weight"]
        assert set(file["optimizer/all/generator/0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    others, other_optimizers = build(2)
    checkpoint.load(tmp_path / "c.h5", model=others, optimizer=other_optimizers)
    assert same(state_of(others, other_optimizers), state_of(models, optimizers))


def test_one_optimizer_without_a_key_over_two_models_round_trips(tmp_path: Path) -> None:
    models, _ = make(1)
    optimizer = torch.optim.Adam([parameter for model in models.values() for parameter in model.parameters()])
    step(models, {"": optimizer}, 0)
    checkpoint.save(tmp_path / "c.h5", model=models, optimizer=optimizer)
    with h5py.File(tmp_path / "c.h5") as file:
        assert "keys" not in file["optimizer"].attrs and file["optimizer"].attrs["kind"] == b"Adam"
        assert "exp_avg" in file["optimizer/discriminator/1.bias"]
    others, _ = make(2)
    other = torch.optim.Adam([parameter for model in others.values() for parameter in model.parameters()])
    checkpoint.load(tmp_path / "c.h5", model=others, optimizer=other)
    assert same(state_of(others, {"": other}), state_of(models, {"": optimizer}))


def test_differences_of_all_models_are_reported_together(tmp_path: Path) -> None:
    models, optimizers = make(1)
    step(models, optimizers, 0)
    checkpoint.save(tmp_path / "c.h5", model=models, optimizer=optimizers)
    others, _ = make(2)
    others["critic"] = others.pop("discriminator")
    others["generator"][2] = nn.Linear(4, 5)
    programs = {"generator": torch.optim.SGD(others["generator"].parameters(), lr=0.1)}
    before = state_of(others, programs)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "c.h5", model=others, optimizer=programs)
    for line in (
        "generator/2.weight shape float32 3x4 float32 5x4",
        "critic/0.weight missing - float32 4x3",
        "discriminator/1.bias unexpected float32 1 -",
        "optimizer generator kind AdamW SGD",
        "optimizer discriminator unexpected SGD -",
    ):
        assert re.search(line.replace(" ", " +"), str(caught.value)), line
    assert same(state_of(others, programs), before)


def test_skip_patterns_include_the_models_key(tmp_path: Path) -> None:
    models, optimizers = make(1)
    checkpoint.save(tmp_path / "c.h5", model=models)
    others, _ = make(2)
    kept = others["discriminator"][0].weight.detach().clone()
    checkpoint.load(tmp_path / "c.h5", model=others, skip=["discriminator/*"])
    assert torch.equal(others["discriminator"][0].weight, kept)
    assert same(others["generator"].state_dict(), models["generator"].state_dict())


@pytest.mark.parametrize("key", ["", "a/b", ".", "a\n", 3])
def test_invalid_keys_of_models_are_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(UsageError, match="the (key|name) "):
        checkpoint.save(tmp_path / "c.h5", model={"one": nn.Linear(1, 1), key: nn.Linear(1, 1)})
    with pytest.raises(UsageError, match="no model: the mapping is empty"):
        checkpoint.save(tmp_path / "c.h5", model={})
    with pytest.raises(UsageError, match="split names no model: b"):
        checkpoint.save(tmp_path / "c.h5", model={"a": nn.Linear(1, 1)}, split={"b": None})
    assert not list(tmp_path.iterdir())


def test_export_and_show_name_tensors_with_their_keys(tmp_path: Path) -> None:
    models, optimizers = make(1)
    step(models, optimizers, 0)
    checkpoint.save(tmp_path / "c.h5", model=models, optimizer=optimizers)
    export(tmp_path / "c.h5", "torch", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    fresh, fresh_optimizers = make(2)
    for key in models:
        fresh[key].load_state_dict(found["model"][key])
        fresh_optimizers[key].load_state_dict(found["optimizer"][key])
    group = fresh_optimizers["generator"].param_groups[0]
    group["betas"] = tuple(group["betas"])  # JSON has only lists
    assert same(state_of(fresh, fresh_optimizers), state_of(models, optimizers))
    paths = [each.path for each in show(tmp_path / "c.h5", "0.weight").tensors]
    assert "/model/generator/0.weight" in paths and "/model/discriminator/0.weight" in paths
    assert "/optimizer/generator/generator/0.weight/exp_avg" in paths
    paths = [each.path for each in show(tmp_path / "c.h5", "generator/2.bias").tensors]
    assert paths[0] == "/model/generator/2.bias" and "/optimizer/generator/generator/2.bias/exp_avg_sq" in paths
