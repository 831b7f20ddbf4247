"""Benchmark of updates on the host at small size: its output, checks and files; and the parts without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_helpers import FOLDER, PROVENANCE, texts_of
from offload import CANDIDATES, FULL, OURS, OURS_16, SMALL, TORCH, TORCH_16, TRIAD, Ours, check_same, draw, targets
from offload_gpu import BOTH, HERE, OFFLOAD, TINY, Event, busy, draw_streams, most
from offload_gpu import targets as gpu_targets
from offload_gpu import timeline

from hpctrain.errors import HpctrainError


@pytest.mark.benchmark
@pytest.mark.limit(150)
def test_updates_are_timed_with_all_threads_and_with_one(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "offload.py", "--quick", "--rounds", "2", "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "offload.json").read_text())
    assert found["parameters"] == SMALL.numel and "1" in found["seconds"]
    for threads, times in found["seconds"].items():
        assert set(times) == {*CANDIDATES, TRIAD}
        rate = found["rates"][threads][OURS]
        assert rate == pytest.approx(28 * SMALL.numel / times[OURS]["median"])
        assert found["rates"][threads][TRIAD] == pytest.approx(3 * 64 * 2**20 / times[TRIAD]["median"])
    assert len(found["targets"]) == 2 * len(found["seconds"])
    assert PROVENANCE <= found["provenance"].keys()
    assert "one pass saves" in done.stdout and "no GPU" in done.stderr
    assert (tmp_path / "offload.svg").exists()


def test_targets_are_ratios_of_medians() -> None:
    times = {OURS: {"median": 0.02}, TORCH: {"median": 0.03}, OURS_16: {"median": 0.02}, TORCH_16: {"median": 0.01}}
    one, two = targets({"8": times})
    assert one.value == pytest.approx(1.5) and one.met and two.value == pytest.approx(0.5) and not two.met
    assert one.what == f"{OURS}: speed / torch, 8 threads"
    assert not list(targets({"1": {OURS: {"median": 1.0}}}))
    steps = {HERE: {"seconds": {"median": 1.0}}, OFFLOAD: {"seconds": {"median": 1.3}}}
    step, size = gpu_targets(steps, {HERE: 10, OFFLOAD: 60})
    assert step.value == pytest.approx(1.3) and not step.met and size.value == 6 and size.met
    assert not list(gpu_targets({}, {HERE: 0, OFFLOAD: 60}))


def test_different_bits_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(SMALL)
    monkeypatch.setattr(Ours, "step", Ours.step_16)
    with pytest.raises(HpctrainError, match="differs in bits"):
        check_same(SMALL)


def test_the_task_is_a_gpt_of_fifty_million_parameters() -> None:
    assert 49e6 < FULL.numel < 51e6
    assert torch.nn.Linear(768, 3072).weight.shape in [torch.Size(shape) for shape in FULL.buffers[1]]
    tokens = BOTH.batch * BOTH.context
    assert BOTH.flop == pytest.approx(6 * tokens * BOTH.config.parameters, rel=0.2)
    inputs, targets = TINY.batch_of(1, torch.device("cpu"))
    assert inputs[:, 1:].equal(targets[:, :-1]) and inputs.shape == (2, 32)


@pytest.mark.parametrize("true, limit, tries", [(0, 100, 1), (1, 100, 2), (37, 100, 12), (100, 99, 14), (500, 99, 14)])
def test_the_largest_size_that_fits_is_found_in_few_tries(true: int, limit: int, tries: int) -> None:
    asked: list[int] = []
    found = most(lambda count: asked.append(count) or count <= true, limit)  # type: ignore[func-returns-value]
    assert found == min(true, limit) and len(asked) <= tries and max(asked) <= limit


def test_a_profile_becomes_a_timeline_of_overlaps() -> None:
    second = 10**9
    events = [
        Event("sgemm", True, 5 * second, 2 * second),
        Event("relu", True, 6 * second, 2 * second),  # on another stream
        Event("Memcpy DtoH (Device -> Pinned)", True, 6 * second, second),
        Event("Memcpy HtoD (Pinned -> Device)", True, 9 * second, second),
        Event("Memset (Device)", True, 1, second),
        Event("aten::_fused_adamw_", False, 7 * second, 2 * second),
        Event("aten::mul", False, 1, second),
    ]
    line = timeline(events)
    assert ("kernels", 0.0, 2.0) in line and ("up", 4.0, 1.0) in line and len(line) == 5
    assert busy(line) == {"kernels": 3.0, "down": 1.0, "up": 1.0, "update": 2.0}


def test_plots_name_what_they_show(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rates = {name: 1e10 for name in (*CANDIDATES, TRIAD)}
    result: dict[str, Any] = {"parameters": 5e7, "seconds": {"2": {}, "1": {}}, "rates": {"2": rates, "1": rates}}
    _, svg = draw(result, tmp_path / "offload")
    texts = texts_of(svg)
    for text in (*CANDIDATES, "2 threads", "1 thread", "50.0 million", TRIAD):
        assert text in texts
    _, svg = draw_streams("A step", [("kernels", 0.0, 1.0), ("up", 0.5, 1.0)], tmp_path / "streams")
    assert all(text in texts_of(svg) for text in ("A step", "kernels", "down", "up", "update"))
