"""Nested states with tensors: the file restores the same bits and the same types."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.checkpoints import all_dtypes, flip, same

from hpctrain import checkpoint
from hpctrain.checkpoint.format.layout import STORAGE
from hpctrain.checkpoint.local_state import is_finite
from hpctrain.checkpoint.states import fill, from_numpy, pack_states, to_numpy, torch_dtype
from hpctrain.checkpoint.tools.convert import export
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import dtype_name


def stored(tmp_path: Path, states: dict[str, Any]) -> Any:
    """Return the states as a file returns them."""
    checkpoint.save(tmp_path / "c.h5", model=torch.nn.Linear(1, 1), train={"step": 1, "states": states})
    return checkpoint.load(tmp_path / "c.h5").train["states"]


def test_nested_states_round_trip(tmp_path: Path) -> None:
    states = {
        "plain": {"a": 1, "b": [1.5, None, True, "ü"], "c": {"d": []}, "huge": 1 << 80, "inf": float("-inf")},
        "shapes": [torch.tensor(2.5), torch.empty(0, 3), torch.arange(24).reshape(2, 3, 4).transpose(0, 2)],
        "dtypes": {name: torch.arange(6).to(torch_dtype(name)) for name in STORAGE},
        "deep": {"x": {"y": [{"z": (torch.ones(2), [torch.zeros(1)], (1, 2))}]}},
        "keys": {3: "int", 2.5: "float", None: "none", (1, "a"): "tuple", "3": "text"},
        "marked": {"$": "tensor", "at": 5},
        "counter": Counter({3: 2, 4: 1}),
        "arrays": [np.arange(4).astype(name) for name in ("uint16", "uint32", "uint64", "float64", "bool", ">i4")],
        "a/b": {"c/d": torch.ones(1), ".": torch.zeros(1)},
        "alike": {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
        "alone": torch.tensor([7]),
    }
    found = stored(tmp_path, states)
    states["arrays"][-1] = np.arange(4, dtype="i4")
    assert same(found, states)


def test_h5py_finds_the_tensors(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(3, 2))
    stored(tmp_path, {"ema": average.state_dict(), "plain": {"rate": 0.5}})
    with h5py.File(tmp_path / "c.h5") as file:
        assert file.attrs["format_version"] == b"1.3"
        found = file["states/ema/module.weight"]
        np.testing.assert_array_equal(found[()], average.module.weight.detach().numpy())
        assert found.attrs["torch_dtype"] == b"float32" and "crc32" in found.attrs
        values = json.loads(file["train"].attrs["states.json"])
        assert values["ema"]["module.weight"] == {"$": "tensor", "at": "/states/ema/module.weight"}
        assert values["plain"] == {"rate": 0.5}
        place = file["states/ema/module.bias"].id.get_offset()
    flip(tmp_path / "c.h5", place)
    with pytest.raises(CheckpointError, match="/states/ema/module.bias is damaged"):
        checkpoint.load(tmp_path / "c.h5")


def test_states_without_tensors_keep_the_file_format(tmp_path: Path) -> None:
    states = {"loader": {"position": 3, "order": [1, 2], "done": False}}
    assert stored(tmp_path, states) == states
    with h5py.File(tmp_path / "c.h5") as file:
        assert file.attrs["format_version"] == b"1.2" and "states" not in file
        assert file["train"].attrs["states.json"].decode() == json.dumps(states)


def test_torch_reads_exported_states(tmp_path: Path) -> None:
    states = {"ema": OrderedDict(w=torch.ones(2), n=np.arange(3)), "s": (1, {3: 4}), "c": Counter([1, 1])}
    stored(tmp_path, states)
    export(tmp_path / "c.h5", "torch", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=True)["train"]["states"]
    assert torch.equal(found["ema"]["w"], torch.ones(2)) and found["ema"]["n"].tolist() == [0, 1, 2]
    assert found["s"] == (1, {3: 4}) and found["c"] == Counter({1: 2})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"y": [1, 2, lambda: 0]}, r'states\["x"\]\["y"\]\[2\] is a function; allowed are tensors, NumPy arrays'),
        (open, r'states\["x"\] is a builtin_function_or_method; allowed are'),
        ({"f": Path()}, r'states\["x"\]\["f"\] is a pathlib\._?.*Path; allowed are'),
        ({3: {"t": torch.eye(2).to_sparse()}}, r'states\["x"\]\[3\]\["t"\] is a torch.sparse_coo tensor'),
        ((torch.ones(1, dtype=torch.complex64),), r'states\["x"\]\[0\] has the dtype complex64: a checkpoint holds'),
        ([torch.ones(1, device="meta")], r'states\["x"\]\[0\] is on the meta device'),
        ([np.array(["a"])], r'states\["x"\]\[0\] is a NumPy array of type <U1; allowed are float64'),
        ({b"k": 1}, r"states\[\"x\"\] has the key b'k', a bytes; allowed are text, numbers"),
        ({"c": torch.nn.Linear}, r'states\["x"\]\["c"\] is the class Linear; allowed'),
        ({1, 2}, r'states\["x"\] is a set; allowed'),
    ],
)
def test_objects_that_cannot_be_stored_are_named(state: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pack_states({"x": state})


# Conversion of tensors to arrays and back: bitwise equal, and without copies where the memory layout allows it --------


@pytest.mark.parametrize("name", STORAGE)
def test_bits_survive_both_conversions(name: str) -> None:
    array = all_dtypes()[name]
    tensor = from_numpy(array, name)
    assert dtype_name(tensor.dtype) == name and tensor.dtype == torch_dtype(name)
    assert to_numpy(tensor).dtype == STORAGE[name]
    assert to_numpy(tensor).tobytes() == array.tobytes()
    assert to_numpy(tensor.reshape(-1)[1]).shape == ()
    assert to_numpy(tensor[:0]).shape == (0, *tensor.shape[1:])


def test_bfloat16_bits_are_the_upper_half_of_float32() -> None:
    assert to_numpy(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_contiguous_host_memory_is_not_copied(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    assert to_numpy(tensor).ctypes.data == tensor.data_ptr()
    assert to_numpy(tensor.requires_grad_() if dtype.is_floating_point else tensor).ctypes.data == tensor.data_ptr()


def test_filling_keeps_memory_and_strides() -> None:
    array = all_dtypes()["float32"]
    for tensor in (torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 6)[:, ::2]):
        pointer, strides = tensor.data_ptr(), tensor.stride()
        fill(tensor, lambda out: out.__setitem__(..., array))
        assert to_numpy(tensor).tobytes() == array.tobytes()
        assert (tensor.data_ptr(), tensor.stride()) == (pointer, strides)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_is_finite_checks_every_element(dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(tensor), "a sum that overflows is no element"
    for bad in (float("nan"), float("inf"), float("-inf")):
        tensor[500] = bad
        assert not is_finite(tensor)
    tensor[0], tensor[500] = float("inf"), float("-inf")
    assert not is_finite(tensor)
    assert is_finite(torch.empty(0, dtype=dtype)) and is_finite(torch.ones(2, dtype=torch.int8))
