"""Exported and imported files: equal to the checkpoint bit for bit, and no code from them is run."""

from __future__ import annotations

import os
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
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools import safetensors
from hpctrain.checkpoint.tools.convert import export, ingest
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


# Import of models that other programs saved ---------------------------------------------------------------------------


def loaded(path: Path) -> dict[str, torch.Tensor]:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    checkpoint.load(path, model=model)
    return dict(model.state_dict())


def changed_model() -> torch.nn.Module:
    model = make_model()
    with torch.no_grad():
        model[0].weight.add_(0.25)
    return model


@pytest.mark.parametrize("inside", ["", "model", "state_dict", "model_state_dict", "module"])
@pytest.mark.parametrize("old", [True, False])
def test_files_of_torch_save_are_imported(tmp_path: Path, inside: str, old: bool) -> None:
    state = changed_model().state_dict()
    content: Any = {inside: state, "epoch": 3, "lr": [0.1]} if inside else state
    torch.save(content, tmp_path / "m.pt", _use_new_zipfile_serialization=not old)
    names = ingest(tmp_path / "m.pt", tmp_path / "m.h5", step=12)
    assert names == list(state) and same(loaded(tmp_path / "m.h5"), dict(state))
    found = checkpoint.load(tmp_path / "m.h5")
    assert found.step == 12 and found.provenance["imported_from"] == "m.pt"


def test_files_of_safetensors_are_imported(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    state = {f"module.{name}": value.clone().contiguous() for name, value in changed_model().state_dict().items()}
    state["module.half"] = torch.randn(3).to(torch.bfloat16)
    library.save_file(state, tmp_path / "m.safetensors")
    ingest(tmp_path / "m.safetensors", tmp_path / "m.h5", strip="module.")
    with Reader(tmp_path / "m.h5") as reader:
        found = {name: reader.read(record.path).tobytes() for name, record in reader.below("/model").items()}
    assert set(found) == {name.removeprefix("module.") for name in state}
    for name, value in state.items():
        assert found[name.removeprefix("module.")] == value.view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("model_only", [True, False])
def test_an_exported_model_imports_unchanged(tmp_path: Path, model_only: bool) -> None:
    model = changed_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer, train={"curves": {"loss": [1.0]}})
    for kind, suffix in (("safetensors", ".safetensors"), ("torch", ".pt")):
        export(tmp_path / "a.h5", kind, tmp_path / f"x{suffix}", model_only=model_only)
        ingest(tmp_path / f"x{suffix}", tmp_path / f"{kind}.h5")
        assert same(loaded(tmp_path / f"{kind}.h5"), dict(model.state_dict()))


class Evil:
    """Object that runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("old", [True, False])
def test_a_file_with_executable_content_is_refused_and_not_run(tmp_path: Path, old: bool) -> None:
    content = {"model": make_model().state_dict(), "more": Evil(tmp_path / "witness")}
    torch.save(content, tmp_path / "evil.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match="evil.pt holds more than tensors, or is damaged, and was not run"):
        ingest(tmp_path / "evil.pt", tmp_path / "m.h5")
    assert not (tmp_path / "witness").exists() and not (tmp_path / "m.h5").exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)  # control: the file does run its command if it is unpickled
    assert (tmp_path / "witness").exists()


def test_contents_that_cannot_be_imported_are_named(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "weights": {"w": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"expected a dict of tensors.*found \['epoch', 'weights'\]"):
        ingest(tmp_path / "a.pt", tmp_path / "m.h5")
    torch.save({"../x/y": torch.ones(1)}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="the name '../x/y' .* cannot be stored"):
        ingest(tmp_path / "b.pt", tmp_path / "m.h5")
    torch.save({"w": torch.ones(1, dtype=torch.complex64)}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="w has the dtype complex64"):
        ingest(tmp_path / "c.pt", tmp_path / "m.h5")
    torch.save({"p.w": torch.ones(1), "w": torch.ones(1)}, tmp_path / "d.pt")
    with pytest.raises(UsageError, match="without 'p.', two tensors of .* have the same name"):
        ingest(tmp_path / "d.pt", tmp_path / "m.h5", strip="p.")
    assert not (tmp_path / "m.h5").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content in (("a.pt", b"text"), ("b.pt", b"PK\x03\x04"), ("c.pt", b""), ("d.safetensors", b"text")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            ingest(tmp_path / name, tmp_path / "m.h5")
    with pytest.raises(CheckpointError, match="cannot read .*none.pt"):
        ingest(tmp_path / "none.pt", tmp_path / "m.h5")
    with pytest.raises(UsageError, match="must end in .safetensors, .pt, .pth, .bin"):
        ingest(tmp_path / "x.onnx", tmp_path / "m.h5")


def test_an_existing_output_is_replaced_only_by_force(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    (tmp_path / "m.h5").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists"):
        ingest(tmp_path / "a.pt", tmp_path / "m.h5")
    assert ingest(tmp_path / "a.pt", tmp_path / "m.h5", force=True) == ["w"]
    with Reader(tmp_path / "m.h5") as reader:
        assert reader.read("/model/w").tolist() == np.ones(1).tolist()
    with pytest.raises(UsageError, match="step is -1"):
        ingest(tmp_path / "a.pt", tmp_path / "n.h5", step=-1)
