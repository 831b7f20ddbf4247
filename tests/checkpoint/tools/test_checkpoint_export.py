"""Exported files: readable by other libraries' own functions, and bitwise equal to the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import all_dtypes, make_model, same, train

from hpctrain import checkpoint
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import STORAGE
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools import safetensors
from hpctrain.checkpoint.tools.convert import export
from hpctrain.errors import CheckpointError, UsageError

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "two_groups": lambda parameters: torch.optim.Adam(
        [{"params": list(parameters)[1:], "lr": 0.02}, {"params": [], "lr": 0.1}], lr=0.01
    ),
}


def trained(folder: Path, make: Optimizer = OPTIMIZERS["adamw"]) -> tuple[Path, torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    progress = {"step": 3, "epoch": 1, "curves": {"step": [1, 2, 3], "loss": [3.0, 2.0, 1.0]}}
    path = folder / "step_00000003.h5"
    checkpoint.save(path, model=model, optimizer=optimizer, train=progress, config="a = 1\n")
    return path, model, optimizer


def every_type(folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    arrays = all_dtypes()
    sources = [Source.of(f"/model/{name}", array, name) for name, array in arrays.items()]
    write_file(folder / "t.h5", [*sources, Source.of("/model/none", np.empty((0, 2), "<f4"))], {})
    return folder / "t.h5", arrays


def test_torch_reads_the_model(tmp_path: Path) -> None:
    path, model, _ = trained(tmp_path)
    assert export(path, "torch", tmp_path / "m.pt", model_only=True) == len(model.state_dict())
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert same(loaded, dict(model.state_dict()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torch_continues_training_from_the_full_export(tmp_path: Path, kind: str) -> None:
    """Another program loads both state dicts and computes the same steps that the first program would have computed."""
    path, model, optimizer = trained(tmp_path, OPTIMIZERS[kind])
    export(path, "torch", tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything["config"] == "a = 1\n" and everything["train"]["epoch"] == 1
    assert everything["train"]["curves"]["loss"].tolist() == [3.0, 2.0, 1.0]
    other = make_model()
    other.load_state_dict(everything["model"])
    continued = OPTIMIZERS[kind](other.parameters())
    continued.load_state_dict(everything["optimizer"])
    for each, its in ((model, optimizer), (other, continued)):
        train(each, its, 3, seed=9)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_safetensors_exports_hold_every_dtype(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    path, arrays = every_type(tmp_path)
    assert export(path, "safetensors", tmp_path / "t.safetensors", model_only=True) == len(arrays) + 1
    loaded = library.load_file(tmp_path / "t.safetensors")
    for name, array in arrays.items():
        assert str(loaded[name].dtype) == f"torch.{name}"
        assert loaded[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
    assert loaded["none"].shape == (0, 2)
    for tensor in safetensors.read_header(tmp_path / "t.safetensors")[0]:
        assert tensor.offset % STORAGE[tensor.dtype].itemsize == 0, "a tensor whose offset is not aligned for mapping"


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_a_tensor_longer_than_one_piece_is_exported_whole(tmp_path: Path, kind: str) -> None:
    array = np.arange(layout.PIECE // 4 + 1001, dtype="<i4")
    write_file(tmp_path / "a.h5", [Source.of("/model/w", array)], {})
    export(tmp_path / "a.h5", kind, tmp_path / "w", model_only=True)
    found = (
        np.load(tmp_path / "w") if kind == "npz" else pytest.importorskip("safetensors.numpy").load_file(tmp_path / "w")
    )
    assert np.array_equal(found["w"], array)


def test_npz_exports_hold_every_dtype(tmp_path: Path) -> None:
    path, arrays = every_type(tmp_path)
    export(path, "npz", tmp_path / "t.npz", model_only=True)
    with np.load(tmp_path / "t.npz", allow_pickle=False) as loaded:
        assert set(loaded) == {*arrays, "none"} and loaded["none"].shape == (0, 2)
        for name, array in arrays.items():
            if name == "bfloat16":
                numbers = torch.from_numpy(array.view("<i2").copy()).view(torch.bfloat16).float().numpy()
                assert loaded[name].dtype == "<f4" and loaded[name].tobytes() == numbers.tobytes()
            else:
                assert loaded[name].dtype == ("?" if name == "bool" else array.dtype)
                assert loaded[name].tobytes() == array.tobytes() and loaded[name].shape == array.shape


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_exported_tensors_are_named_by_their_path(tmp_path: Path, kind: str) -> None:
    path, model, optimizer = trained(tmp_path)
    export(path, kind, tmp_path / "out")
    if kind == "npz":
        with np.load(tmp_path / "out") as loaded:
            found = {name: loaded[name] for name in loaded}
    else:
        found = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "out")
    assert found["model/0.weight"].tolist() == model.state_dict()["0.weight"].tolist()
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert found["optimizer/0.weight/exp_avg"].tolist() == moment.tolist()
    assert found["train/loss"].tolist() == [3.0, 2.0, 1.0]


def test_an_existing_file_is_replaced_only_by_force_and_no_temporary_file_remains(tmp_path: Path) -> None:
    path, _, _ = trained(tmp_path)
    target = tmp_path / "out" / "x.npz"
    target.parent.mkdir()
    target.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists: choose another name, or --force"):
        export(path, "npz", target)
    data = path.read_bytes()
    at = data.index(np.array([3.0, 2.0, 1.0]).tobytes())
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(CheckpointError, match="/train/loss is damaged"):
        export(path, "npz", target, force=True)
    assert target.read_bytes() == b"mine" and list(target.parent.iterdir()) == [target]
    path.write_bytes(data)
    export(path, "npz", target, force=True)
    assert target.read_bytes() != b"mine" and list(target.parent.iterdir()) == [target]


def test_user_errors_are_named(tmp_path: Path) -> None:
    path, _, _ = trained(tmp_path)
    with pytest.raises(UsageError, match="cannot export to 'onnx': allowed are safetensors, npz, torch"):
        export(path, "onnx", tmp_path / "x")
    with pytest.raises(CheckpointError, match="cannot write .*No such file"):
        export(path, "npz", tmp_path / "none" / "x.npz")
    write_file(tmp_path / "e.h5", [Source.of("/train/loss", np.ones(1))], {})
    with pytest.raises(UsageError, match="holds no tensors of a model"):
        export(tmp_path / "e.h5", "npz", tmp_path / "x", model_only=True)
