"""Metrics: one row per step, also after torn writes and rollbacks."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import struct
import termios
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from hpctrain.log import configure
from hpctrain.train import metrics
from hpctrain.train.metrics import LINE_EVERY, NAME, Curves, Metrics, Progress, read, shown


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def _write(folder: Path, last_step: int, *steps: int) -> None:
    metrics = Metrics(folder, last_step)
    for step in steps:
        metrics.write({"step": step, "loss": step / 3})
    metrics.close()


def test_a_row_is_written_when_the_step_ends(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1, "loss": 0.1})
    assert _rows(tmp_path) == [{"step": 1, "loss": 0.1}]
    metrics.close()


def test_no_step_is_repeated_after_a_resume(tmp_path: Path) -> None:
    _write(tmp_path, 0, 1, 2, 3, 4, 5)
    _write(tmp_path, 3, 4, 5, 6)
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in _rows(tmp_path)] == [step / 3 for step in range(1, 7)]


@pytest.mark.parametrize("torn", ['{"step": 6, "lo', '{"step": 6}\n{"st', "\0\0\0", "\n", '"text"\n', "\udcff\udcfe"])
def test_a_torn_last_line_is_ignored(tmp_path: Path, torn: str) -> None:
    _write(tmp_path, 0, 1, 2, 3)
    with (tmp_path / NAME).open("a", errors="surrogateescape") as file:
        file.write(torn)
    assert [row["step"] for row in read(tmp_path / NAME)][:3] == [1, 2, 3]
    _write(tmp_path, 3, 4)
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3, 4]


def test_damaged_lines_are_counted_but_not_an_incomplete_last_line(tmp_path: Path) -> None:
    lines = ['{"step": 1}', "", '{"step": 2, "lo', '{"step": 3}', '"text"', '{"step": 1.5}', "x" * 2**21, '{"step": 4}']
    (tmp_path / NAME).write_text("\n".join([*lines, '{"step": 5, "lo']))
    rows, damaged = metrics.scan(tmp_path / NAME)
    assert [row["step"] for row in rows] == [1, 3, 4] and damaged == [3, 5, 6, 7]


def test_rewind_removes_later_rows(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    for step in (1, 2, 3, 4):
        metrics.write({"step": step})
    metrics.rewind(2)
    metrics.write({"step": 3, "again": True})
    metrics.close()
    assert _rows(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1, "loss": math.nan, "norm": math.inf, "ok": 1.5})
    metrics.close()
    assert (tmp_path / NAME).read_text() == '{"step": 1, "loss": null, "norm": null, "ok": 1.5}\n'


def test_a_list_is_written_number_by_number(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1, "counts": [3, math.nan, 1]})
    metrics.close()
    assert _rows(tmp_path) == [{"step": 1, "counts": [3, None, 1]}]


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path / NAME) == []


def test_curves_have_one_value_per_step() -> None:
    curves = Curves()
    curves.add({"step": 1, "loss": 2.0, "grad_norm": 3.0, "learning_rate": 0.1})
    curves.add({"step": 2, "loss": 1.0, "validation_loss": 1.5})
    columns = curves.columns
    assert columns["step"] == [1, 2] and columns["loss"] == [2, 1]
    assert columns["validation_step"] == [2] and columns["validation_loss"] == [1.5]
    assert columns["grad_norm"][0] == 3 and math.isnan(columns["grad_norm"][1])


def test_every_number_has_a_curve_with_its_own_steps() -> None:
    curves = Curves()
    curves.add({"step": 1, "loss": 2.0, "d_loss": 0.5, "step_seconds": 0.1, "tokens": 9, "note": "x"})
    curves.add({"step": 2, "loss": 1.0})
    curves.add({"step": 3, "loss": 0.5, "d_loss": 0.25, "accuracy": 1, "time_step": 4.0})
    names = ("d_loss_step", "d_loss", "accuracy_step", "accuracy")
    own = {name: curves.columns[name] for name in names}
    assert own == {"d_loss_step": [1.0, 3.0], "d_loss": [0.5, 0.25], "accuracy_step": [3.0], "accuracy": [1.0]}
    assert set(curves.columns) - set(own) == {"step", "loss", "learning_rate", "grad_norm"}


def test_histograms_are_summed() -> None:
    curves = Curves()
    for counts in ([1, 2], [], [5, 0, 0, 7], [1]):
        curves.add({"step": 1, "loss": 2.0, "staleness_histogram": counts})
    assert curves.columns["staleness_histogram"] == [7, 2, 0, 7] and len(curves.columns["loss"]) == 4


def test_long_curves_are_thinned_evenly_and_keep_the_newest() -> None:
    curves = Curves(100)
    for step in range(1, 2018):
        row = {"step": step, "loss": float(-step), "learning_rate": 0.1}
        curves.add(row | ({"validation_loss": float(step)} if step % 3 == 0 else {}))
        columns = curves.columns
        assert len(columns["step"]) <= 100 and columns["step"][-1] == step
        assert {len(columns[name]) for name in ("step", "loss", "learning_rate", "grad_norm")} == {len(columns["step"])}
    assert columns["loss"] == [-each for each in columns["step"]]
    assert columns["validation_loss"] == columns["validation_step"] and 50 <= len(columns["validation_loss"]) <= 100
    gaps = [after - before for before, after in zip(columns["step"], columns["step"][1:])]
    assert min(gaps) >= 1 and max(gaps) <= 3 * 2018 / 50


def test_thinning_is_the_same_after_a_resume() -> None:
    whole, parts = Curves(10), Curves(10)
    for step in range(1, 200):
        for curves in (whole, parts):
            curves.add({"step": step, "loss": 1 / step})
        if step % 7 == 0:
            resumed = Curves(10)
            resumed.columns = {name: list(values) for name, values in parts.columns.items()}
            parts = resumed
    assert repr(parts.columns) == repr(whole.columns)


def test_a_curve_of_a_repeated_step_is_bounded() -> None:
    curves = Curves(4)
    for _ in range(20):
        curves.add({"step": 3, "loss": 1.0})
    assert len(curves.columns["step"]) <= 4


# Progress: a bar on a terminal, lines otherwise, nothing on other ranks; with a clock that the test sets --------------


class Clock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_are_written_at_intervals(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    bar = Progress(10, 110, 5000, shown=True, clock=clock)
    for step in range(11, 111):
        clock.now += 1.0
        facts = {"loss": f"{step}.0"} | ({"validation": "3.5"} if step == 15 else {})
        bar.update(step, 5000 + 50 * (step - 10), facts)
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 100 / LINE_EVERY
    assert lines[0] == "step 20/110  loss 20.0  validation 3.5  tokens/s 50  ETA 1:30"
    assert lines[-1] == "step 110/110  loss 110.0  validation 3.5  tokens/s 50  ETA 0:00"


def test_the_last_step_always_has_a_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    bar = Progress(0, 2, 0, shown=True, clock=clock)
    clock.now += 0.5
    bar.update(1, 0, {})
    bar.update(2, 0, {"loss": "1"})
    assert capsys.readouterr().err == "step 2/2  loss 1  ETA 0:00\n"


def test_samples_per_second_are_shown_without_tokens(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    bar = Progress(10, 110, 0, shown=True, clock=clock)
    for step in range(11, 111):
        clock.now += 0.5
        bar.update(step, 0, shown({"step": step, "loss": 1.0, "samples": 8 * step}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 30/110  loss 1.0000  samples/s 16  ETA 0:40"
    assert lines[-1] == "step 110/110  loss 1.0000  samples/s 16  ETA 0:00"


def test_without_a_last_step_no_remaining_time_is_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    bar = Progress(0, None, 0, shown=True, clock=clock)
    clock.now += LINE_EVERY
    bar.update(1, 0, {})
    assert capsys.readouterr().err == "step 1\n"


def test_other_ranks_are_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    bar = Progress(0, 2, 0, shown=False, clock=clock)
    clock.now += 100
    bar.update(2, 0, {})
    bar.close()
    assert capsys.readouterr().err == ""


def test_a_bar_is_shown_on_a_terminal() -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # rows, columns
    with open(follower, "w") as terminal, redirect_stderr(terminal):
        bar = Progress(2, 4, 0, shown=True)
        bar.update(3, 10, {"loss": "1.25"})
        bar.update(1, 10, {})  # a run that was rolled back
        bar.update(4, 10, {})
        bar.close()
        said = ""
        while not said.endswith("\n"):  # the terminal returns its output in pieces
            said += os.read(leader, 65536).decode()
    os.close(leader)
    assert "2/4" in said and "4/4" in said and "loss=1.25" in said and "tokens/s=" in said and "\n" not in said[:-1]


def test_values_of_a_step_are_formatted() -> None:
    assert shown({"step": 3, "loss": 1.23456, "grad_norm": 2.0}) == {"loss": "1.2346"}
    assert shown({"validation_loss": 2.0, "loss": float("nan")}) == {"loss": "nan", "validation": "2.0000"}
