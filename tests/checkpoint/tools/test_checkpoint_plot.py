"""Plots of the curves that a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.tools.curves import draw, plot, running_mean
from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.staleness import MAX_BARS

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.figure")


def file_with(folder: Path, **curves: Any) -> Path:
    (folder / "step_00000009.h5").unlink(missing_ok=True)
    sources = [Source.of(f"/train/{name}", np.asarray(values, "f8")) for name, values in curves.items()]
    write_file(folder / "step_00000009.h5", [*sources, Source.of("/model/w", np.ones(2))], {"/": {"step": 9}})
    return folder / "step_00000009.h5"


def test_losses_share_one_panel_and_each_other_metric_has_its_own(tmp_path: Path) -> None:
    nothing = [np.nan] * 3
    curves = {"step": [1, 2, 3], "loss": nothing, "grad_norm": nothing, "g_loss_step": [1, 3], "g_loss": [3.0, 1.0]}
    curves |= {"d_loss_step": [2], "d_loss": [0.5], "accuracy_step": [3], "accuracy": [0.75]}
    top, below = draw(file_with(tmp_path, **curves)).axes
    assert {line.get_label(): line.get_xydata().tolist() for line in top.lines} == {
        "g loss": [[1.0, 3.0], [3.0, 1.0]],
        "d loss": [[2.0, 0.5]],
    }
    assert below.get_ylabel() == "accuracy" and below.lines[0].get_xydata().tolist() == [[3.0, 0.75]]
    assert top.get_title(loc="left").endswith("g loss, d loss up to step 9")
    alone = draw(file_with(tmp_path, step=[1], reward_step=[1], reward=[2.0]))
    assert [axis.get_ylabel() for axis in alone.axes] == ["reward"]


def test_the_plotted_lines_equal_the_curves(tmp_path: Path) -> None:
    steps = np.arange(1, 1001) * 10
    loss = 5 / np.sqrt(steps) + np.random.default_rng(1).normal(0, 0.05, steps.size)
    loss[400] = np.nan
    at, validation = steps[99::100], 5 / np.sqrt(steps[99::100])
    rate = np.linspace(1e-3, 0, steps.size)
    file = file_with(
        tmp_path,
        step=steps,
        loss=loss,
        learning_rate=rate,
        grad_norm=np.full(steps.size, np.nan),
        validation_step=at,
        validation_loss=validation,
    )
    top, below = draw(file).axes  # no panel for a curve without a finite value
    raw, smooth, marks = top.lines
    assert np.array_equal(raw.get_xydata(), np.stack([steps, loss], 1), equal_nan=True)
    assert smooth.get_label() == "training, mean of 21 points"
    assert smooth.get_ydata()[[200, -1]] == pytest.approx([loss[190:211].mean(), loss[-11:].mean()])
    assert np.array_equal(marks.get_xydata(), np.stack([at, validation], 1))
    assert np.array_equal(below.lines[0].get_ydata(), rate) and below.get_ylabel() == "learning rate"
    assert "step_00000009.h5" in top.get_title(loc="left") and below.get_xlabel() == "step"


def test_the_staleness_histogram_has_its_own_panel(tmp_path: Path) -> None:
    counts = [20, 300, 0, 1]
    top, below = draw(file_with(tmp_path, step=[5, 9], loss=[2.0, 1.0], staleness_histogram=counts)).axes
    assert [bar.get_height() for bar in below.patches] == counts
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in below.patches] == [0, 1, 2, 3]
    assert top.get_xlabel() == "step" and below.get_xlabel().startswith("staleness") and below.get_yscale() == "log"
    assert top.get_xlim()[1] > 9 > below.get_xlim()[1]
    full = draw(file_with(tmp_path, step=[5, 9], loss=[2.0, 1.0], staleness_histogram=[1] * MAX_BARS))
    assert full.axes[1].get_xlabel().endswith("(the last bar: and above)")
    assert len(draw(file_with(tmp_path, step=[5, 9], loss=[2.0, 1.0], staleness_histogram=[])).axes) == 1


def test_running_mean_averages_a_centred_window() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.inf, 7.0])
    assert running_mean(values, 2).tolist() == [2, 2, 4, 5, 6, 7]
    assert np.isnan(running_mean(np.array([np.nan, np.nan, 1.0]), 2)).tolist() == [True, False, False]


def test_curves_without_steps_are_drawn_over_their_indices(tmp_path: Path) -> None:
    assert draw(file_with(tmp_path, loss=[3.0, 2.0, 1.0])).axes[0].lines[0].get_xydata().tolist() == [
        [1, 3],
        [2, 2],
        [3, 1],
    ]


def test_user_errors_are_named(tmp_path: Path) -> None:
    file = file_with(tmp_path, step=[1], loss=[1.0])
    with pytest.raises(UsageError, match="must end in .png, .svg, .pdf"):
        plot(file, tmp_path / "loss.txt")
    with pytest.raises(UsageError, match="cannot write .*No such file"):
        plot(file, tmp_path / "none" / "loss.png")
    with pytest.raises(UsageError, match="holds no curve to draw"):
        plot(file_with(tmp_path, step=[1]), tmp_path / "loss.png")
