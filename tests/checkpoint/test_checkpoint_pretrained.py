"""Weights of safetensors folders: every rank reads its part, under every strategy; what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.machine import quiet_watchdog
from torch import Tensor, nn

from hpctrain.checkpoint.pretrained import WeightsFolder, load_weights
from hpctrain.cluster.launcher import detect
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.job import Job

library = pytest.importorskip("safetensors.torch")

WORDS, WIDTH = 24, 16


class Block(nn.Module):
    """Two matrices of a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(inputs)))  # type: ignore[no-any-return]


class Final(nn.Module):
    """Scalar parameter, and a buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale + self.offset


class Language(nn.Module):
    """Model with a tied head, a buffer, blocks and a scalar parameter."""

    base_model_prefix = "body"
    tensor_plan = {"body.blocks.*.up": "column", "body.blocks.*.down": "row"}
    _keys_to_ignore_on_load_unexpected = [r"masked_bias$"]

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, WIDTH),
                "blocks": nn.ModuleList([Block() for _ in range(3)]),
                "final": Final(),
            }
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
            self.all_tied_weights_keys = {"head.weight": "body.words.weight"}

    @property
    def words(self) -> nn.Embedding:
        found = self.body["words"]
        assert isinstance(found, nn.Embedding)
        return found

    def layers(self) -> list[nn.Module]:
        return [self.body["words"], *self.body["blocks"], self.body["final"], self.head]  # type: ignore[misc]

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.Sequential(*self.layers())(tokens)  # type: ignore[no-any-return]


def made(seed: int, *, tied: bool = True) -> Language:
    torch.manual_seed(seed)
    return Language(tied=tied)


def written(folder: Path, tensors: Mapping[str, Tensor], files: int = 1) -> Path:
    """Write a folder as transformers does: one file, or several and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    if files == 1:
        library.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    of_tensor = {tensor: names[number % files] for number, tensor in enumerate(tensors)}
    for name in names:
        library.save_file({each: tensors[each] for each in tensors if of_tensor[each] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_tensor}))
    return folder


def saved(folder: Path, model: nn.Module, files: int = 1, without: str = "head.weight") -> Path:
    """Write a model's state without one name of its tied weights."""
    return written(folder, {name: each for name, each in model.state_dict().items() if name != without}, files)


@pytest.fixture
def folder(comm: Any, shared_tmp_path: Path) -> Path:
    """Return a folder of three files."""
    if comm.rank == 0:
        saved(shared_tmp_path / "weights", made(1), files=3)
    comm.barrier()
    return shared_tmp_path / "weights"


def job_of(comm: Any) -> Job:
    return Job(comm, torch.device("cpu"), detect(), quiet_watchdog())


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp"])
def test_every_rank_reads_its_part(comm: Any, folder: Path, data: str) -> None:
    expected = values_of(made(1))
    parameters = sum(4 * each.numel() for each in made(1).parameters())
    buffers = sum(each.nbytes for each in made(1).buffers())
    job = job_of(comm)
    model = job.wrap(made(2), data)
    found = job.load_pretrained(model, folder)
    assert_equal(job.state_dict(model), expected)
    assert found.tensors == len(expected) - 1
    if data == "ddp" or comm.size == 1:
        assert found.bytes_read == parameters + buffers
    else:  # slices are equal up to padding to cache lines
        assert abs(found.bytes_read - buffers - parameters / comm.size) <= 64 * len(expected)
        assert sum(comm.all_gather_object(found.bytes_read - buffers)) == parameters
    tokens = torch.arange(8).view(2, 4)
    assert torch.equal(model(tokens).detach(), made(1)(tokens).detach())
    job.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tensor", "pipe"])
def test_split_models_read_their_part(comm: Any, folder: Path, axis: str) -> None:
    job, model = job_of(comm), made(2)
    job.wrap(
        model,
        ParallelSettings(tensor=2) if axis == "tensor" else ParallelSettings(pipe=2),
        example=torch.zeros(2, 4, dtype=torch.int64),
    )
    found = job.load_pretrained(model, folder)
    expected = values_of(made(1))
    for name, tensor in job.state_dict(model).items():
        whole = expected[name]
        if tensor.shape != whole.shape:
            dim = next(dim for dim, size in enumerate(tensor.shape) if size != whole.shape[dim])
            whole = whole.chunk(2, dim)[comm.rank]
        assert torch.equal(tensor, whole), name
    assert found.bytes_read < 0.75 * sum(tensor.nbytes for tensor in expected.values())
    job.close()


@pytest.mark.ranks(1, 2)
def test_an_unwrapped_model_is_filled_on_every_rank(comm: Any, folder: Path) -> None:
    model = made(2)
    job_of(comm).load_pretrained(model, str(folder))
    assert_equal(values_of(model), values_of(made(1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_converted_to_the_dtype_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {name: each.to(dtype) if each.is_floating_point() else each for name, each in made(1).state_dict().items()}
    model = made(2)
    load_weights(written(tmp_path, stored), model)
    assert_equal(values_of(model), {name: tensor.to(model.state_dict()[name].dtype) for name, tensor in stored.items()})


def test_names_may_lack_the_prefix_or_have_it(tmp_path: Path) -> None:
    expected = made(1)
    bare = {name.removeprefix("body."): tensor for name, tensor in expected.state_dict().items()}
    bare["blocks.0.masked_bias"] = torch.ones(1)
    model = made(2)
    load_weights(written(tmp_path / "bare", bare), model)
    assert_equal(values_of(model), values_of(expected))
    block = Block()
    block.base_model_prefix = "inner"  # type: ignore[assignment]
    with_prefix = {f"inner.{name}": tensor for name, tensor in Block().state_dict().items()}
    load_weights(written(tmp_path / "with", with_prefix), block)
    assert torch.equal(block.up.weight, with_prefix["inner.up.weight"])


def test_tied_weights_may_be_stored_under_any_of_their_names_or_all(tmp_path: Path) -> None:
    for number, without in enumerate(("head.weight", "body.words.weight", "")):
        model = made(2)
        load_weights(saved(tmp_path / str(number), made(1), without=without), model)
        assert_equal(values_of(model), values_of(made(1)))
        assert model.head.weight is model.words.weight
    with pytest.raises(CheckpointError, match="body.words.weight and head.weight differ, and the model ties them"):
        load_weights(written(tmp_path / "untied", made(1, tied=False).state_dict()), made(2))


@pytest.mark.ranks(1, 2)
def test_all_differences_are_named_and_nothing_changes(comm: Any, shared_tmp_path: Path) -> None:
    state = dict(made(1).state_dict())
    state["body.blocks.0.up.weight"] = torch.zeros(3, WIDTH)
    state["body.blocks.1.up.bias"] = torch.zeros(2 * WIDTH, dtype=torch.int32)
    state["extra.weight"] = torch.zeros(2)
    del state["body.final.scale"], state["body.final.offset"]
    if comm.rank == 0:
        written(shared_tmp_path / "other", state)
    comm.barrier()
    job, rows = job_of(comm), []
    model = job.wrap(made(2), "fsdp")
    before = job.state_dict(model)
    with pytest.raises(CheckpointError) as caught:
        job.load_pretrained(model, shared_tmp_path / "other")
    rows = [line.split() for line in str(caught.value).splitlines()[2:-1]]
    assert sorted(row[:2] for row in rows) == [
        ["body.blocks.0.up.weight", "shape"],
        ["body.blocks.1.up.bias", "dtype"],
        ["body.final.offset", "missing"],
        ["body.final.scale", "missing"],
        ["extra.weight", "unexpected"],
    ]
    assert "5 differences" in str(caught.value) and caught.value.everywhere
    assert_equal(job.state_dict(model), before)
    skip = ["*.final.*", "extra.*", "*.up.*"]
    job.load_pretrained(model, shared_tmp_path / "other", skip=skip)
    after = job.state_dict(model)
    assert torch.equal(after["body.final.scale"], before["body.final.scale"]) and torch.equal(
        after["head.weight"], state["head.weight"]
    )
    with pytest.raises(UsageError, match="called 'none.*'"):
        job.load_pretrained(model, shared_tmp_path / "other", skip=["none.*"])
    job.close()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "it is not JSON"),
        ('{"other": 1}', "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "allowed are files of the same folder"),
        ('{"weight_map": {"a": 3}}', "allowed are files of the same folder"),
        ('{"weight_map": {"a": "missing.safetensors"}}', "cannot read .*missing.safetensors: No such file"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"no weights in {tmp_path}"):
        WeightsFolder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        WeightsFolder(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, made(1), files=2)
    first, second = sorted(folder.glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match="cut off or altered"):
        load_weights(folder, made(2))
    library.save_file({**library.load(content), **library.load(second.read_bytes())}, first)
    with pytest.raises(CheckpointError, match="holds .* twice"):
        load_weights(folder, made(2))
    first.write_bytes(content)
    with WeightsFolder(folder) as weights:
        first.write_bytes(content[:-4])
        name = max(library.load(content), key=lambda each: weights.records[each].offset)
        shape = weights.records[name].shape
        out = torch.empty(shape).numpy()
        with pytest.raises(CheckpointError, match="was truncated meanwhile"):
            weights.read_box(name, (0,) * len(shape), shape, out)


def test_a_tensor_that_the_index_names_must_exist(tmp_path: Path) -> None:
    folder = saved(tmp_path, made(1), files=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["more"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="names more, which its file lacks"):
        WeightsFolder(folder)
