"""Curves read from checkpoints: stored values, thinning of long curves, sparklines in text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools.curves import as_floats, read_curve, read_curves, sparkline
from hpctrain.errors import CheckpointError


@pytest.mark.parametrize("piece", [8, 24, 1 << 20])
def test_long_curves_are_thinned_from_their_end(tmp_path: Path, piece: int) -> None:
    path, values = tmp_path / "c.h5", np.arange(101.0)
    sources = [Source.of("/train/loss", values), Source.of("/train/grid", np.zeros((2, 2)))]
    write_file(path, [*sources, Source.of("/train/none", np.empty(0))], {})
    with Reader(path, piece) as reader:
        assert read_curves(reader) == {"loss": values.tolist(), "none": []}
        for longest in (1, 2, 7, 100, 101):
            stride = -(-101 // longest)
            assert read_curve(reader, "/train/loss", longest) == values[::-1][::stride][::-1].tolist()


def test_a_damaged_curve_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "c.h5"
    write_file(path, [Source.of("/train/loss", np.array([2.0, 0.2]))], {})
    path.write_bytes(path.read_bytes().replace(np.array([2.0, 0.2]).tobytes(), np.array([2.0, 0.1]).tobytes()))
    with Reader(path) as reader, pytest.raises(CheckpointError, match="/train/loss is damaged"):
        read_curves(reader)


def test_sparkline_shows_the_shape_of_a_curve() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(800), width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([0, float("nan"), 1]) == "▁ █"
    assert sparkline([]) == "" and sparkline([float("inf")]) == ""


def test_bfloat16_numbers_equal_those_of_torch() -> None:
    tensor = torch.randn(100).to(torch.bfloat16)
    ours = as_floats(tensor.view(torch.int16).numpy().view("<u2"), "bfloat16")
    assert ours.tolist() == tensor.double().tolist()
