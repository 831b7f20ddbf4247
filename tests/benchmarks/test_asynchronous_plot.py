"""Plots of the asynchronous benchmark: they name all members and show the measurements."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from racing.names import DDP, DIGITS, EASGD, GPT, HOGWILD, MEMBERS, SERVER  # noqa: E402
from racing.plot import draw, histograms  # noqa: E402


def texts_of(svg: Path) -> list[str]:
    root = ElementTree.parse(svg)
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]


def member(*bars: int) -> dict[str, Any]:
    points = [
        {"samples": 10 * number, "seconds": number / 2, "accuracy": accuracy, "loss": 1 - accuracy}
        for number, accuracy in enumerate((0.1, 0.8, 0.95))
    ]
    return {"points": points, "best_accuracy": 0.95, "staleness_histogram": list(bars)}


def test_curves_and_histograms_are_drawn(tmp_path: Path) -> None:
    stale = {name: member(3, 1) if name in (SERVER, HOGWILD) else member() for name in MEMBERS}
    mark = {"accuracy": 0.95, "samples": 20}
    result: dict[str, Any] = {
        "ranks": 2,
        "tasks": {DIGITS: {"members": stale, "mark": mark}, GPT: {"members": {DDP: member()}}},
    }
    files = draw(result, tmp_path / "asynchronous-np2")
    names = [f"asynchronous-np2-{what}.{kind}" for what in (DIGITS, GPT, "staleness") for kind in ("png", "svg")]
    assert [file.name for file in files] == names and all(file.stat().st_size for file in files)
    digits = texts_of(files[1])
    assert {*MEMBERS, "seconds of training", "a point below ddp's best", "convnet on digits, 2 workers"} <= set(digits)
    assert EASGD not in texts_of(files[3]) and "a point below ddp's best" not in texts_of(files[3])
    bars = texts_of(files[5])
    assert {SERVER, HOGWILD, "staleness, 2 workers"} <= set(bars) and EASGD not in bars and GPT not in bars


def test_histograms_show_shares_of_the_counted_updates() -> None:
    assert histograms({DDP: member(), SERVER: member(3, 0, 1)}) == {SERVER: [0.75, 0.0, 0.25]}


def test_timings_alone_give_no_plot(tmp_path: Path) -> None:
    assert draw({"ranks": 2, "tasks": {DIGITS: {"exchange": {}}}}, tmp_path / "asynchronous-np2") == []
