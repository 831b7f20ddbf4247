"""Progress: a bar on a terminal, lines otherwise, nothing on other ranks; with a clock that the test sets."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from contextlib import redirect_stderr

import pytest

from hpctrain.log import configure
from hpctrain.train.metrics import LINE_EVERY, Progress, shown


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


def test_samples_per_second_are_shown_without_tokens(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
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
