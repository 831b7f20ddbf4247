"""Stacks of all threads, written at once under a heading."""

from __future__ import annotations

import threading

import pytest

from hpctrain.train.watchdog import print_stacks


def test_stacks_of_all_threads_have_one_heading(capfd: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()

    def waits_here() -> None:
        done.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    print_stacks("rank 3 on n1")
    done.set()
    thread.join()
    said = capfd.readouterr().err
    assert said.startswith("hpctrain: the stacks of rank 3 on n1:\n")
    assert "in waits_here" in said and "in test_stacks_of_all_threads_have_one_heading" in said
