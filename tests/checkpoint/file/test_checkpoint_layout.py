"""Names, paths and element types of checkpoint files."""

from __future__ import annotations

import pytest
import torch

from hpctrain.checkpoint.format import layout
from hpctrain.errors import CheckpointError


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
    assert layout.step_file(1200) == "step_00001200.h5"
    assert layout.step_of("step_00001200.h5") == 1200
    assert layout.step_of(layout.step_file(123456789)) == 123456789
    for name in (".step_00001200.h5.tmp-host-1", "step_1.h5.bak", "step_.h5", "xstep_1.h5"):
        assert layout.step_of(name) is None
