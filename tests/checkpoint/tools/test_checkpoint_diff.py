"""Differences between checkpoints: found, measured, and listed by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools.diff import Diff, TensorDifference, ValueDifference, diff
from hpctrain.errors import CheckpointError

Tensors = dict[str, tuple[np.ndarray, str | None]]


def two_files(folder: Path, first: dict[str, Any], second: dict[str, Any], **groups: Any) -> Diff:
    """Compare two files that hold the given arrays, or pairs of array and torch dtype, under ``/model``."""
    for name, tensors in (("a.h5", first), ("b.h5", second)):
        (folder / name).unlink(missing_ok=True)
        pairs = {key: value if isinstance(value, tuple) else (value, None) for key, value in tensors.items()}
        sources = [Source.of(f"/model/{key}", array, dtype) for key, (array, dtype) in pairs.items()]
        write_file(folder / name, sources, groups.get(name[0], {}))
    return diff(folder / "a.h5", folder / "b.h5")


def test_equal_contents_compare_equal_whatever_wrote_them(tmp_path: Path) -> None:
    values = np.array([1.0, np.nan, -0.0])
    provenance = [{"/provenance": {"host": host, "torch": "2.13"}, "/": {"step": 4}} for host in ("n1", "n2")]
    found = two_files(tmp_path, {"w": values}, {"w": values}, a=provenance[0], b=provenance[1])
    assert found.same and found.equal == 1 and found.tensors == []
    assert ValueDifference("/provenance", "host", "'n1'", "'n2'") in found.provenance


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2"])
def test_values_are_measured_as_numpy_measures_them(tmp_path: Path, dtype: str) -> None:
    draw, count = np.random.default_rng(4), layout.PIECE // np.dtype(dtype).itemsize + 301  # two pieces
    a = draw.standard_normal(count, dtype="f4").astype(dtype)
    b = a.copy()
    b[::7] += draw.standard_normal(len(b[::7]), dtype="f4").astype(dtype)
    (found,) = two_files(tmp_path, {"w": a}, {"w": b}).tensors
    x, y = a.astype("f8"), b.astype("f8")
    assert (found.path, found.problem, found.elements, found.count) == (
        "/model/w",
        "values",
        count,
        int((a != b).sum()),
    )
    assert found.maximum == np.abs(x - y).max() and found.nonfinite == 0
    assert found.relative == (np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))).max()


def test_differences_in_bits_count_also_between_equal_values(tmp_path: Path) -> None:
    """Zero and minus zero, or two NaNs, differ in their bits: runs that must be bitwise equal then are not."""
    nans = np.array([0x7FC00000, 0x7FC00001], dtype="<u4").view("<f4")
    (zeros,) = two_files(tmp_path, {"w": np.array([0.0, 1.0])}, {"w": np.array([-0.0, 1.0])}).tensors
    assert (zeros.count, zeros.maximum, zeros.relative) == (1, 0.0, 0.0)
    (other,) = two_files(tmp_path, {"w": nans}, {"w": nans[::-1]}).tensors
    assert (other.count, other.maximum, other.relative, other.nonfinite) == (2, None, None, 2)
    (inf,) = two_files(tmp_path, {"w": np.array([np.inf, 1.0])}, {"w": np.array([0.0, 4.0])}).tensors
    assert (inf.count, inf.maximum, inf.relative, inf.nonfinite) == (2, 3.0, 0.75, 1)


def test_large_integers_are_subtracted_exactly(tmp_path: Path) -> None:
    low, high = np.array([-(2**63), 2**62]), np.array([2**63 - 1, 2**62 + 1])
    (found,) = two_files(tmp_path, {"w": low}, {"w": high}).tensors
    assert found.maximum == 2.0**64 and found.count == 2
    (found,) = two_files(tmp_path, {"w": low[1:]}, {"w": high[1:]}).tensors
    assert found.maximum == 1.0  # in float64 both are the same number


def test_bfloat16_is_measured_by_its_float_values(tmp_path: Path) -> None:
    numbers = torch.tensor([1.5, -2.0]), torch.tensor([1.5, 6.0])
    arrays = [each.to(torch.bfloat16).view(torch.int16).numpy().view("<u2") for each in numbers]
    (found,) = two_files(tmp_path, {"w": (arrays[0], "bfloat16")}, {"w": (arrays[1], "bfloat16")}).tensors
    assert (found.count, found.maximum, found.relative) == (1, 8.0, 8 / 6)


def test_differences_of_names_shapes_and_dtypes_are_listed(tmp_path: Path) -> None:
    first = {"gone": np.zeros(2), "shape": np.zeros((2, 3), "<f4"), "dtype": np.zeros(2, "<f4"), "empty": np.zeros(0)}
    second = {"shape": np.zeros((3, 2), "<f4"), "dtype": np.zeros(2), "empty": np.zeros(0), "new": np.array(1.0)}
    found = two_files(tmp_path, first, second)
    assert found.equal == 1 and not found.same
    assert found.tensors == [
        TensorDifference("/model/gone", "missing", "float64 2", None),
        TensorDifference("/model/shape", "shape", "float32 2x3", "float32 3x2"),
        TensorDifference("/model/dtype", "dtype", "float32 2", "float64 2"),
        TensorDifference("/model/new", "missing", None, "float64 scalar"),
    ]


def test_settings_values_and_versions_are_listed_separately(tmp_path: Path) -> None:
    one = {
        "/": {"step": 1, "world_size": 2},
        "/train": {"epoch": 1, "gone": 1},
        "/optimizer": {"param_groups.json": '[{"lr": 0.1, "params": ["w"]}]'},
        "/config": {"toml": '[train]\nsteps = 3\nname = "a"\n'},
        "/provenance": {"torch": "2.12", "user": "ann"},
    }
    two = {
        "/": {"step": 1, "world_size": 4},
        "/train": {"epoch": 1.0},
        "/optimizer": {"param_groups.json": '[{"lr": 0.2, "params": ["w"]}]'},
        "/config": {"toml": '[train]\nsteps = 4\nname = "a"\n'},
        "/provenance": {"torch": "2.13", "user": "bob"},
    }
    found = two_files(tmp_path, {}, {}, a=one, b=two)
    assert found.settings == [ValueDifference("config", "train.steps", "3", "4")]
    assert found.values == [
        ValueDifference("/", "world_size", "2", "4"),
        ValueDifference("/train", "epoch", "1", "1.0"),
        ValueDifference("/train", "gone", "1", None),
        ValueDifference("/optimizer", "param_groups.0.lr", "0.1", "0.2"),
    ]
    assert found.versions == [ValueDifference("/provenance", "torch", "'2.12'", "'2.13'")]
    assert [each.name for each in found.provenance if each.name != "created"] == ["user"]
    assert not found.same


@pytest.mark.parametrize("part", ["settings", "values", "versions", "tensors"])
def test_a_difference_in_any_one_part_makes_files_differ(part: str) -> None:
    found = Diff("a", "b", provenance=[ValueDifference("/", "x", "1", "2")])
    assert found.same
    getattr(found, part).append(None)
    assert not found.same


def test_invalid_toml_is_compared_as_text(tmp_path: Path) -> None:
    groups = [{"/config": {"toml": text}} for text in ("= [", "= ]")]
    assert two_files(tmp_path, {}, {}, a=groups[0], b=groups[1]).settings[0].name == "toml"


def test_damage_is_an_error_not_a_difference(tmp_path: Path) -> None:
    values = np.arange(8.0)
    two_files(tmp_path, {"w": values}, {"w": values})
    data = (tmp_path / "b.h5").read_bytes()
    (tmp_path / "b.h5").write_bytes(data.replace(values.tobytes(), values[::-1].tobytes()))
    with pytest.raises(CheckpointError, match="/model/w is damaged"):
        diff(tmp_path / "a.h5", tmp_path / "b.h5")


def test_progress_counts_the_bytes_of_both_files(tmp_path: Path) -> None:
    two_files(tmp_path, {"w": np.arange(8.0)}, {"w": np.arange(8.0)})
    told: list[int] = []
    diff(tmp_path / "a.h5", tmp_path / "b.h5", told.append)
    assert sum(told) == 128
