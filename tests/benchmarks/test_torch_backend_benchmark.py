"""Benchmark of torch.distributed at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch_backend_nodes
from benchmark_helpers import FOLDER, PROVENANCE
from communication_figures import MEAN_SIZES, Figures
from support.jobs import JobStarter
from torch_backend import mean_ratio, overhead, targets
from torch_backend_candidates import CALLS, Name
from torch_backend_start import GLOO, OURS, command
from torch_backend_steps import Step, Steps

RUN = FOLDER.parent / "tests" / "multinode" / "run.py"
SKIPPED = 1  # exit code of run.py on a machine that cannot simulate two nodes


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_collectives_and_steps_are_timed_on_both_back_ends(launch: JobStarter, tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "2", "--batches", "1", "--out", tmp_path)
    done = launch(2, FOLDER / "torch_backend.py", *words, timeout=300)
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("torch-backend-np2-*.json")
    found = json.loads(path.read_text())
    assert list(found["collectives"]) == list(CALLS)
    for name, rows in found["collectives"].items():
        names = {Name.GLOO, Name.OURS, *([Name.EMPTY, Name.COMMUNICATOR] if name == "all_reduce" else [])}
        assert {row["candidate"] for row in rows} == names and len(rows) == 2 * len(names)
        medians = {(row["size"], row["candidate"]): row["median"] for row in rows}
        ratio = found["ratios"][name][Name.OURS]["65536"]
        assert ratio == pytest.approx(medians[65536, Name.GLOO] / medians[65536, Name.OURS])
    step = found["steps"]["1"]
    assert list(step["seconds"]) == list(Steps) and max(step["drift"].values()) < 1e-6
    assert set(step["drift"]) == {Steps.DDP, Steps.FSDP}
    assert PROVENANCE <= found["provenance"].keys() and found["complete"]
    assert done.stdout.index("target") < done.stdout.index("times as fast") < done.stdout.index("median us")
    assert path.with_suffix(".png").stat().st_size > 1000 and path.with_suffix(".csv").exists()


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_a_run_over_two_nodes_is_compared_with_the_link_and_gloo(launch: JobStarter, tmp_path: Path) -> None:
    words = ("--quick", "--rounds", "2", "--batches", "1", "--sizes", "16M", "--out", tmp_path)
    program = FOLDER / "torch_backend.py"
    done = launch(0, RUN, "-n", "4", "--", sys.executable, program, *words, timeout=300)
    if done.returncode == SKIPPED and "two nodes on one machine" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("torch-backend-nodes2-np4-*.json")
    found = json.loads(path.read_text())
    assert found["nodes"] == 2 and max(found["steps"]["1"]["drift"].values()) < 1e-6
    rates = found["link_bytes_per_second"]
    assert len(rates) == 4 and max(rates) < 125e6  # 1 Gbit/s
    medians = {row["candidate"]: row["median"] for row in found["collectives"]["all_reduce"]}
    for name, each in found["link_ratios"].items():
        assert each[str(2**24)] == pytest.approx(medians[name] * max(rates) / 2**24)
    assert set(found["link_ratios"]) == {Name.OURS, Name.EMPTY, Name.GLOO}
    first, _, *steps = [target["what"] for target in found["targets"]]
    assert first == "all_reduce of 16 MiB: gloo / hpctrain" and len(steps) == 2
    assert "time / limit of the link" in done.stdout and path.with_suffix(".png").exists()


def figures(**microseconds: float) -> Figures:
    names = {"gloo": Name.GLOO, "ours": Name.OURS, "plain": Name.COMMUNICATOR}
    sizes = (4, *MEAN_SIZES)
    return {(size, names[key]): {"median": value * 1e-6} for size in sizes for key, value in microseconds.items()}


def test_targets_compare_medians_and_need_all_sizes() -> None:
    found = figures(gloo=200.0, ours=40.0, plain=30.0)
    assert mean_ratio(found, Name.OURS) == pytest.approx(5.0) and mean_ratio(found, Name.EMPTY) is None
    assert overhead(found) == pytest.approx(10e-6)
    del found[MEAN_SIZES[0], Name.OURS]
    assert mean_ratio(found, Name.OURS) is None
    (only,) = targets({"all_reduce": found}, {})
    assert only.value == pytest.approx(10.0) and only.met


def test_an_exchange_is_the_time_beyond_the_step_without_one() -> None:
    medians = {Steps.ALONE: 0.08, Steps.DDP_GLOO: 0.10, Steps.DDP: 0.09, Steps.FSDP_GLOO: 0.2, Steps.FSDP: 0.1}
    step = Step(64, {name: {"median": value} for name, value in medians.items()}, {})
    assert step.exchange_ratio == pytest.approx(0.5)
    assert step.ratios == pytest.approx({"DDP step": 10 / 9, "FSDP2 step": 2.0, "DDP exchange": 2.0})
    exchange, sharded = targets({}, {1: step})
    assert exchange.wanted == "<= 0.5" and sharded.met
    assert Step(64, {Steps.ALONE: {"median": 1.0}}, {}).exchange_ratio is None


def test_targets_on_several_nodes_are_gloo_and_the_link() -> None:
    size, rates = 2**24, [1e8, 2**24 / 0.14]  # an all_reduce of S bytes on two nodes sends S bytes per node
    found: Figures = {(size, name): {"median": value} for name, value in ((Name.GLOO, 0.21), (Name.OURS, 0.15))}
    found |= {(size, Name.EMPTY): {"median": 0.142}, (2**20, Name.OURS): {"median": 0.1}}
    links = torch_backend_nodes.link_ratios(found, 2, rates)
    assert {name: each[str(size)] for name, each in links.items()} == pytest.approx(
        {Name.OURS: 0.15 / 0.14, Name.EMPTY: 0.142 / 0.14, Name.GLOO: 1.5}
    )
    assert all(len(each) == 1 for each in links.values())  # latency is a part of smaller calls
    step = Step(64, {Steps.DDP_GLOO: {"median": 0.5}, Steps.DDP: {"median": 0.6}}, {})
    reduction, link, ddp = torch_backend_nodes.targets(found, links, {1: step})
    assert (reduction.value, link.value, ddp.value) == pytest.approx((1.4, 0.142 / 0.14, 5 / 6))
    assert reduction.met and link.met and not ddp.met


def test_the_start_runs_the_same_program_under_both_launchers() -> None:
    ours, theirs = command(OURS, 8), command(GLOO, 8)
    assert (
        ours[1:3] == ["-n", "8"]
        and "torch.distributed.run" in theirs
        and theirs[theirs.index("--nproc-per-node") + 1] == "8"
    )
    for words, name in ((ours, "hpctrain"), (theirs, "gloo")):
        assert f'init_process_group("{name}")' in words[-1]
        compile(words[-1], "program", "exec")
