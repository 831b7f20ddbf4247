"""Data settings: their checks, and the datasets that they open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import ArrayDataset, DataSettings, TokenDataset, open_dataset, write_arrays
from hpctrain.data.dataset import JoinedDataset
from hpctrain.data.pack import pack
from hpctrain.errors import SettingsError
from hpctrain.settings import build, to_tree


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text("once upon a time " * 50)
    return str(pack([tmp_path / "book.txt"], tmp_path / "book.h5").path)


def test_tokens_and_arrays_are_opened(token_file: str, tmp_path: Path) -> None:
    tokens = open_dataset(DataSettings(files=(token_file,)), "train", 16)
    assert isinstance(tokens, TokenDataset) and tokens.context == 16
    pair = (np.zeros((4, 3), "f4"), np.zeros(4, "i8"))
    write_arrays(tmp_path / "x.h5", train=pair, validation=pair)
    arrays = open_dataset(DataSettings(files=(str(tmp_path / "x.h5"),), format="arrays"), "validation")
    assert isinstance(arrays, ArrayDataset) and len(arrays) == 4


def test_several_files_are_read_as_one(token_file: str) -> None:
    one = open_dataset(DataSettings(files=(token_file,)), "train", 16)
    two = open_dataset(DataSettings(files=(token_file, token_file)), "train", 16)
    assert isinstance(two, JoinedDataset) and len(two) == 2 * len(one)


def test_settings_round_trip_through_a_dict() -> None:
    tree = {"files": ["a.h5", "b.h5"], "format": "arrays", "prefetch": 1, "validation_samples": 7}
    tree |= {"inputs": "x", "targets": "y", "document_masks": False, "cache": "none"}
    settings = build(DataSettings, tree, "data.")
    wanted = DataSettings(("a.h5", "b.h5"), "arrays", inputs="x", targets="y", prefetch=1, validation_samples=7)
    assert settings == wanted and to_tree(settings) == tree


def test_wrong_settings_are_refused(token_file: str) -> None:
    with pytest.raises(SettingsError, match="data.format = 'csv': allowed are tokens, arrays, ragged"):
        DataSettings(format="csv")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="data.validation_samples = -1"):
        DataSettings(validation_samples=-1)
    with pytest.raises(SettingsError, match="data.prefetch = -1"):
        DataSettings(prefetch=-1)
    with pytest.raises(SettingsError, match="data.files = .*: a name is empty"):
        DataSettings(files=("a.h5", ""))
    with pytest.raises(SettingsError, match="data.files is empty: name at least one file"):
        open_dataset(DataSettings(), "train", 16)
    with pytest.raises(SettingsError, match="set model.context"):
        open_dataset(DataSettings(files=(token_file,)), "train")


def test_the_package_exports_the_names_that_it_lists() -> None:
    import hpctrain.data

    assert all(getattr(hpctrain.data, name).__name__ == name for name in hpctrain.data.__all__)
    assert {*hpctrain.data.__all__} <= {*dir(hpctrain.data)}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hpctrain.data.nonsense


def test_names_of_the_package_load_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; from hpctrain.data import *; import hpctrain.data.pack, hpctrain.data.describe;"
        "print([name for name in ('torch', 'mpi4py') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
