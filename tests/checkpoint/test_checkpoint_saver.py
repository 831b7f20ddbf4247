"""Save and load of a whole run: all of its state is restored, or the load fails without effect."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.checkpoints import flip, make_model, on_threads, same, train

from hpctrain import checkpoint
from hpctrain.checkpoint.format.layout import STORAGE
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.states import torch_dtype
from hpctrain.errors import CheckpointError, NonFiniteError, UsageError

TRAIN = {
    "step": 12,
    "epoch": 1,
    "rate": 0.5,
    "name": "run",
    "sampler": {"seed": 3, "position": [1, 2]},
    "done": False,
    "curves": {
        "step": [1, 2, 3],
        "loss": [3.0, 2.5, float("nan")],
        "validation_step": [2],
        "validation_loss": [2.75],
        "none": [],
    },
}
CONFIG = '[train]\nsteps = 12\nname = "ü"\n'


def test_all_state_is_restored(tmp_path: Path) -> None:
    path, model = tmp_path / "c.h5", make_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    rng = checkpoint.capture_rng()
    checkpoint.save(path, model=model, train=TRAIN, rng=rng, config=CONFIG, provenance={"git": "abc", "job": 7})
    other = make_model()
    loaded = checkpoint.load(path, model=other)
    assert same(other.state_dict(), model.state_dict())
    assert (loaded.step, loaded.world_size, loaded.config, loaded.path) == (12, 1, CONFIG, path)
    assert {key: value for key, value in loaded.train.items() if key != "curves"} == {
        key: value for key, value in TRAIN.items() if key != "curves"
    }
    for name, curve in TRAIN["curves"].items():
        np.testing.assert_array_equal(loaded.train["curves"][name], curve)
    assert loaded.provenance["git"] == "abc" and loaded.provenance["job"] == 7
    assert loaded.provenance["torch"] == torch.__version__ and loaded.provenance["world_size"] == 1
    expected = torch.rand(5)
    checkpoint.restore_rng(loaded.rng)
    assert torch.equal(torch.rand(5), expected)


def test_a_model_of_every_dtype_is_restored_in_place(tmp_path: Path) -> None:
    model = torch.nn.Module()
    for dtype in map(torch_dtype, STORAGE):
        name = f"t_{dtype}".replace("torch.", "")
        model.register_buffer(name, torch.arange(6).reshape(2, 3).to(dtype).t())
        model.register_buffer(name + "_scalar", torch.tensor(1).to(dtype))
        model.register_buffer(name + "_empty", torch.empty(0, 3, dtype=dtype))
    checkpoint.save(tmp_path / "c.h5", model=model)
    expected, pointers = copy.deepcopy(model.state_dict()), [each.data_ptr() for each in model.buffers()]
    for buffer in model.buffers():
        buffer.zero_()
    checkpoint.load(tmp_path / "c.h5", model=model)
    assert same(model.state_dict(), expected)
    assert [each.data_ptr() for each in model.buffers()] == pointers


def test_shared_parameters_stay_shared(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    checkpoint.save(tmp_path / "c.h5", model=model, optimizer=optimizer)
    with Reader(tmp_path / "c.h5") as reader:
        assert list(reader.below("/model")) == list(model.state_dict())
        assert reader.below("/optimizer/2.weight") and not reader.below("/optimizer/3.weight")
    other = make_model()
    checkpoint.load(tmp_path / "c.h5", model=other)
    assert other[3].weight is other[2].weight and same(other.state_dict(), model.state_dict())


def test_all_differences_are_shown_before_any_memory_is_touched(tmp_path: Path) -> None:
    model = make_model()
    checkpoint.save(tmp_path / "c.h5", model=model)
    other = make_model()
    other[0] = torch.nn.Linear(4, 6)
    other[1] = torch.nn.BatchNorm1d(5, dtype=torch.bfloat16, track_running_stats=False)
    other.add_module("head", torch.nn.Linear(1, 1, bias=False))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "c.h5", model=other)
    text = str(caught.value)
    assert f"{tmp_path / 'c.h5'} does not fit this program, 8 differences:" in text
    for line in (
        "0.weight shape float32 5x4 float32 6x4",
        "0.bias shape float32 5 float32 6",
        "1.weight dtype float32 5 bfloat16 5",
        "1.bias dtype float32 5 bfloat16 5",
        "head.weight missing - float32 1x1",
        "1.running_mean unexpected float32 5 -",
        "1.running_var unexpected float32 5 -",
        "1.num_batches_tracked unexpected int64 scalar -",
    ):
        assert re.search(line.replace(" ", " +"), text), line
    heading, *lines = text.splitlines()[1:]
    assert heading.split() == "name problem in the file in the program".split() and len(lines) == 8
    words = ("missing", "shape", "dtype", "unexpected")
    assert {line.index(word) for line in lines for word in words if word in line} == {heading.index("problem")}
    assert same(other.state_dict(), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_nonfinite_parameter_is_written(tmp_path: Path, bad: float) -> None:
    model = make_model()
    checkpoint.save(tmp_path / "c.h5", model=model)
    before = (tmp_path / "c.h5").read_bytes()
    with torch.no_grad():
        model[2].bias[3] = bad
    with pytest.raises(NonFiniteError, match="parameter 2.bias is not finite"):
        checkpoint.save(tmp_path / "c.h5", model=model)
    assert (tmp_path / "c.h5").read_bytes() == before and os.listdir(tmp_path) == ["c.h5"]


def test_a_buffer_may_be_infinite_but_not_nan(tmp_path: Path) -> None:
    model = make_model()
    model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    checkpoint.save(tmp_path / "c.h5", model=model)
    model.mask[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="buffer mask holds NaN"):
        checkpoint.save(tmp_path / "c.h5", model=model)


def test_viewers_find_the_loss_curve(tmp_path: Path) -> None:
    """By the rules of NeXus ``default`` leads from the root to an NXdata whose signal and axes have equal lengths."""
    checkpoint.save(tmp_path / "c.h5", model=make_model(), train=TRAIN)
    with h5py.File(tmp_path / "c.h5", "r") as file:
        group = file[file.attrs["default"].decode()]
        assert file.attrs["NX_class"] == b"NXroot" and group.attrs["NX_class"] == b"NXdata"
        signal, axis = group[group.attrs["signal"].decode()], group[group.attrs["axes"][0].decode()]
        assert signal.shape == axis.shape == (3,) and signal.name == "/train/loss" and axis.name == "/train/step"
        assert group["validation_loss"].attrs["long_name"] == b"validation loss"
        assert file.attrs["step"] == group.attrs["step"] == 12


@pytest.mark.parametrize(
    ("train_values", "message"),
    [
        ({"step": -1}, "step in train is -1"),
        ({"step": 1.5}, "step in train is 1.5"),
        ({"signal": 1}, "the name signal in train is taken"),
        ({"thing": object()}, "thing of train is of type object"),
        ({"curves": {"loss": [[1]]}}, r"the curve loss has the shape \(1, 1\)"),
        ({"curves": {"loss": ["a"]}}, "the curve loss has the shape"),
    ],
)
def test_values_that_train_cannot_hold_are_named(tmp_path: Path, train_values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checkpoint.save(tmp_path / "c.h5", model=make_model(), train=train_values)
    assert os.listdir(tmp_path) == []


def test_a_name_that_contains_a_path_is_refused(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"a/b": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="'a/b' in /model cannot be stored"):
        checkpoint.save(tmp_path / "c.h5", model=model)


def test_state_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError("nothing of it was saved")

    with pytest.raises(UsageError, match="_extra_state of the model's state is of type dict"):
        checkpoint.save(tmp_path / "c.h5", model=Extra(2, 2))


def test_an_optimizer_alone_cannot_be_loaded(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="needs its model"):
        checkpoint.load(tmp_path / "c.h5", optimizer=optimizer)


def test_damage_found_during_a_load_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    checkpoint.save(path, model=make_model())
    with h5py.File(path, "r") as file:
        start = file["/model/2.bias"].id.get_offset()
    flip(path, start)
    with pytest.raises(CheckpointError, match=f"{path}: /model/2.bias is damaged"):
        checkpoint.load(path, model=make_model())


def test_ranks_save_and_load_collectively(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"

    def body(comm: object) -> object:
        model = make_model()
        rng = {"torch": torch.full((4,), comm.rank, dtype=torch.uint8), "number": comm.rank}
        checkpoint.save(path, model=model, train={"step": 5}, rng=rng, comm=comm)
        return checkpoint.load(path, model=model, comm=comm)

    for rank, loaded in enumerate(on_threads(3, body)):
        assert not isinstance(loaded, Exception), loaded
        assert loaded.rng["number"] == rank and loaded.rng["torch"].tolist() == [rank] * 4
        assert loaded.world_size == 3 and loaded.step == 5
    with Reader(path) as reader:
        assert {group for group in reader.groups if group.startswith("/rng/")} == {"/rng/0", "/rng/1", "/rng/2"}
    assert checkpoint.load(path).rng["number"] == 0


def test_a_failure_on_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"

    def nan_on_one(comm: object) -> object:
        model = make_model()
        if comm.rank == 1:
            with torch.no_grad():
                model[0].bias[0] = float("nan")
        return checkpoint.save(path, model=model, comm=comm)

    def unwritable(comm: object) -> object:
        (tmp_path / "file").write_text("")
        return checkpoint.save(tmp_path / "file" / "c.h5", model=make_model(), comm=comm)

    def other_model(comm: object) -> object:
        return checkpoint.load(path, model=make_model() if comm.rank != 2 else torch.nn.Linear(1, 1), comm=comm)

    for body, kind, text in (
        (nan_on_one, NonFiniteError, "rank 1: the parameter 0.bias is not finite"),
        (unwritable, CheckpointError, "cannot write"),
        (other_model, CheckpointError, "No such file or directory"),
    ):
        results = on_threads(3, body)
        assert {type(result) for result in results} == {kind}, results
        assert len({str(result) for result in results}) == 1 and text in str(results[0])
        assert all(result.everywhere for result in results)
    checkpoint.save(path, model=make_model())
    results = on_threads(3, other_model)
    assert {type(result) for result in results} == {CheckpointError}
    assert "rank 2: " in str(results[0]) and "does not fit" in str(results[0]) and "rank 1" not in str(results[0])


def test_a_rank_without_a_stored_rng_state_gets_None(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c.h5", model=make_model(), rng={"number": 1})
    results = on_threads(2, lambda comm: checkpoint.load(tmp_path / "c.h5", comm=comm).rng)
    assert results == [{"number": 1}, None]


def test_the_package_itself_needs_no_torch() -> None:
    code = "import sys, hpctrain.checkpoint as c; assert c.newest_valid('/none') is None; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        checkpoint.nothing
    assert all(hasattr(checkpoint, name) for name in checkpoint.__all__)
