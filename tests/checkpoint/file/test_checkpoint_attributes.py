"""Conversion between Python values and HDF5 attributes, in both directions without change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint.format.layout import from_array, pack, to_array, unpack
from hpctrain.errors import CheckpointError, UsageError


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
