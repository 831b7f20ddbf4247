"""Export to a folder of Transformers: weights as the format's own library reads them, config, tokenizer, atomic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import call

from hpctrain import checkpoint
from hpctrain.checkpoint.format.layout import STORAGE
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools import hugging_face
from hpctrain.checkpoint.tools.hugging_face import converted, export_folder, origin
from hpctrain.errors import CheckpointError, UsageError

library = pytest.importorskip("safetensors")
torch_side = pytest.importorskip("safetensors.torch")

INDEX = "model.safetensors.index.json"


class Tied(torch.nn.Module):
    """Embedding, a head that shares its weight, a half-precision matrix and a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.body = torch.nn.Linear(4, 4)
        self.low = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.arange(3))
        self.lm_head = torch.nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.embed.weight


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder with a config and a tokenizer."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny", "tie_word_embeddings": true, "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "other.bin").write_text("not copied")
    return folder


@pytest.fixture
def file(tmp_path: Path, source: Path) -> Path:
    """Return a checkpoint of a run that started from the folder."""
    path = tmp_path / "step_00000003.h5"
    torch.manual_seed(3)
    checkpoint.save(path, model=Tied(), train={"step": 3}, provenance=origin(str(source)))
    return path


def expected() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: each for name, each in Tied().state_dict().items() if name != "lm_head.weight"}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_the_folder_has_weights_config_and_tokenizer(file: Path, tmp_path: Path, capsys: Any) -> None:
    assert call("checkpoint", "export", file, "--to", "hf", "-o", tmp_path / "out") == 0
    assert "out  " in (printed := capsys.readouterr().out) and "5 tensors" in printed
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    found = torch_side.load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == expected().keys() and all(
        torch.equal(found[name], each) for name, each in expected().items()
    )
    with library.safe_open(tmp_path / "out/model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    # from_pretrained takes the dtype from the config: that of the weights, not of the folder at the start.
    assert config_of(tmp_path / "out") == {"model_type": "tiny", "tie_word_embeddings": True, "dtype": "float32"}


def test_large_models_are_divided_into_files(file: Path, tmp_path: Path) -> None:
    export_folder(file, tmp_path / "out", shard_bytes=100, dtype="float16")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    found: dict[str, torch.Tensor] = {}
    for name in files:
        part = torch_side.load_file(tmp_path / "out" / name)
        assert {each for each, of in index["weight_map"].items() if of == name} == part.keys()
        assert sum(each.nbytes for each in part.values()) <= 100
        found |= part
    for name, each in expected().items():
        assert torch.equal(found[name], each.half() if each.is_floating_point() else each)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    assert config_of(tmp_path / "out")["dtype"] == "float16"


def test_an_untied_head_stays(file: Path, source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text('{"tie_word_embeddings": false}')
    assert export_folder(file, tmp_path / "out", config=source) == 6
    assert config_of(tmp_path / "out") == {"tie_word_embeddings": False, "torch_dtype": "float32"}


@pytest.mark.parametrize("dtype", hugging_face.DTYPES)
@pytest.mark.parametrize("before", ["float64", "float32", "bfloat16", "float16"])
def test_floats_are_rounded_as_by_torch(before: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(4000, dtype=torch.float64, generator=generator) * torch.logspace(-45, 39, 4000).double()
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 65519.0, 65520.0, 1e-8]
    )
    given = torch.cat([numbers, special.double()]).to(getattr(torch, before))
    wanted = given.to(getattr(torch, dtype))
    stored = given.view(torch.int16).numpy().view("<u2") if before == "bfloat16" else given.numpy()
    found = converted(stored, before, dtype)
    assert found.dtype == STORAGE[dtype]
    raw = torch.from_numpy(found.view("<i2")).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(found)
    assert torch.equal(raw.isnan(), wanted.isnan()) and torch.equal(raw.nan_to_num(), wanted.nan_to_num())


def test_nothing_is_left_after_an_error(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    torch.manual_seed(3)
    weight = Tied().body.weight.detach().numpy().tobytes()
    content[bytes(content).index(weight)] ^= 1
    file.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="body.weight is damaged"):
        export_folder(file, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(CheckpointError, match="cannot write .*none/out: No such file"):
        export_folder(file, tmp_path / "none" / "out")


def test_an_earlier_export_is_replaced_only_by_force(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_folder(file, out, shard_bytes=1)
    with pytest.raises(UsageError, match="out exists"):
        export_folder(file, out)
    export_folder(file, out, force=True)
    assert {each.name for each in out.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="no folder that an export wrote"):
        export_folder(file, out, force=True)
    assert (out / "notes.txt").exists() and len([*tmp_path.iterdir()]) == 3


def test_what_cannot_be_exported_is_refused(file: Path, source: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.h5"
    write_file(plain, [Source.of("/model/w", np.arange(6.0))], {"/": {"step": 3, "world_size": 1}})
    with pytest.raises(UsageError, match="does not record a config.json: give --config"):
        export_folder(plain, tmp_path / "out")
    with pytest.raises(UsageError, match="cannot read .*nowhere/config.json: No such file"):
        export_folder(plain, tmp_path / "out", config=tmp_path / "nowhere")
    other = '{"model_type": "llama", "tie_word_embeddings": true}'
    (source / "config.json").write_text(other)
    with pytest.raises(UsageError, match="is for another model than that of the run: model_type = 'llama', not 'tiny'"):
        export_folder(file, tmp_path / "out", config=source)
    assert not (tmp_path / "out").exists()
    (source / "config.json").write_text("[1]")
    with pytest.raises(UsageError, match="expected an object"):
        export_folder(plain, tmp_path / "out", config=source)
    two = tmp_path / "two.h5"
    checkpoint.save(two, model={"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)}, train={"step": 1})
    with pytest.raises(UsageError, match="holds 2 models"):
        export_folder(two, tmp_path / "out")
    trained = tmp_path / "trained.h5"
    write_file(
        trained, [Source.of("/model/w", np.arange(6.0))], {"/": {"step": 1, "world_size": 1}, "/model": {"frozen": "0"}}
    )
    with pytest.raises(UsageError, match="only trained parameters"):
        export_folder(trained, tmp_path / "out")
    with pytest.raises(UsageError, match="shard_bytes = 0"):
        export_folder(file, tmp_path / "out", shard_bytes=0)
    with pytest.raises(UsageError, match="dtype = 'int8': allowed are"):
        export_folder(file, tmp_path / "out", dtype="int8")
    with pytest.raises(UsageError, match="--dtype with --to npz: only for --to hf"):
        call("checkpoint", "export", file, "--to", "npz", "--dtype", "float16")
    assert not (tmp_path / "out").exists()
