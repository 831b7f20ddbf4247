"""Names, paths and element types of checkpoint files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.draft import pack, to_array
from hpctrain.checkpoint.format.structure import from_array, unpack
from hpctrain.checkpoint.retention import step_file, step_of
from hpctrain.errors import CheckpointError, UsageError


def test_dots_in_names_are_kept() -> None:
    assert layout.child(layout.MODEL, "h.0.attn.weight") == "/model/h.0.attn.weight"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\nb", "a\0b", "\x1b[31m", "\ud800", "x" * 1025])
def test_names_that_are_not_a_single_path_component_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be stored"):
        layout.child(layout.MODEL, name)


def test_storage_has_the_width_of_the_torch_dtype() -> None:
    for name, storage in layout.STORAGE.items():
        assert storage.itemsize == getattr(torch, name).itemsize
        assert storage.str[0] in "<|"


def test_unknown_dtype_error_lists_the_known_dtypes() -> None:
    with pytest.raises(CheckpointError, match="complex64: a checkpoint holds float64, float32"):
        layout.storage_of("complex64", "w")


def test_step_file_names_contain_the_step() -> None:
    assert step_file(1200) == "step_00001200.h5"
    assert step_of("step_00001200.h5") == 1200
    assert step_of(step_file(123456789)) == 123456789
    for name in (".step_00001200.h5.tmp-host-1", "step_1.h5.bak", "step_.h5", "xstep_1.h5"):
        assert step_of(name) is None


# Conversion between Python values and HDF5 attributes, in both directions without change ------------------------------


@pytest.mark.parametrize(
    "value", [0, -(1 << 63), 1.5, -0.0, math.inf, "", "ünïcode", np.uint32(1 << 31), ("a", "längere"), True and 7]
)
def test_plain_values_round_trip(value: Any) -> None:
    back = from_array(to_array(value))
    assert back == value and type(back) is type(value)


JSON = [True, False, None, [1, 2.5, "x"], {"a": {"b": [None]}}, 1 << 80, "nul\0inside", [], {}]


@pytest.mark.parametrize("value", [*JSON, 3, 0.1, "text", np.float32(0.5)])
def test_packed_values_round_trip(value: Any) -> None:
    packed = {name: to_array(each) for name, each in pack({"key": value}, "train").items()}
    back = unpack(packed, "file")["key"]
    assert back == value
    assert type(back) is type(value.item() if isinstance(value, np.generic) else value)


def test_values_that_json_cannot_hold_are_named() -> None:
    with pytest.raises(UsageError, match="optimizer of train is of type set"):
        pack({"optimizer": {1, 2}}, "train")
    with pytest.raises(UsageError, match=r"must not end in \.json"):
        pack({"a.json": 1}, "train")
    with pytest.raises(CheckpointError, match="cannot be stored"):
        pack({"a/b": 1}, "train")


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_invalid_json_in_a_file_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="not valid JSON"):
        unpack({"a.json": to_array(text)}, "file")
