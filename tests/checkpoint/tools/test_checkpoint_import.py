"""Import of models saved by other programs: bitwise equal, and without running code from their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import make_model, same

from hpctrain import checkpoint
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.tools.convert import export, ingest
from hpctrain.errors import CheckpointError, UsageError


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
