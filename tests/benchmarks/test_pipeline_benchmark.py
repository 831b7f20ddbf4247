"""Benchmark of pipelines at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_helpers import FOLDER, PROVENANCE, TIME, OneRank, texts_of
from pipeline import OURS, SMALL, TORCH, WORDS, Alone, Name, differences, draw, find, targets, timed_step
from pipeline_ideal import ScheduleCost
from support.jobs import JobStarter
from support.programs import in_one_job
from torch import nn

from hpctrain import trace
from hpctrain.parallel.pipeline.schedules import make
from hpctrain.parallel.pipeline.timeline import equal_costs, simulate

WITHOUT = "torch-gpipe,torch-1f1b,alone,naive,interleaved,1f1b-4,zb-h1-4"


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_all_candidates_are_timed_and_compared_with_an_ideal(launch: JobStarter, tmp_path: Path) -> None:
    """Run in one job, after a run without torch and others that writes its result as JSON."""
    quick, without = ("--quick", "--rounds", "2", "--out"), ("--json", "--without", WITHOUT)
    calls = (*quick, tmp_path / "json", *without), (*quick, tmp_path)
    done = launch(2, in_one_job(FOLDER / "pipeline.py", *calls), timeout=300)
    assert done.returncode == 0, done
    check_json(json.JSONDecoder().raw_decode(done.stdout)[0])
    (path,) = tmp_path.glob("pipeline-np2-*.json")
    found = json.loads(path.read_text())
    assert list(found["seconds"]) == list(Name) and list(found["schedules"]) == list(OURS)
    for time in found["seconds"].values():
        assert 0 < time["min"] <= time["median"] <= time["max"] and time["repeats"] == 2
    for name, one in found["schedules"].items():
        assert one["measured"] == pytest.approx(found["seconds"][name]["median"])
        assert one["efficiency"] == pytest.approx(one["ideal"] / one["measured"]) and 0 < one["played"] <= 1
        splits = "zb-h1" in name
        assert set(one["medians"]) == ({"forward", "input", "weight"} if splits else {"forward", "backward"})
        for share in one["shares"]:
            assert 0 < share["passes"] < 1 and 0 <= share["rest"] < 1
            assert sum(share.values()) == pytest.approx(1, abs=0.2)  # medians, each of a different step
    assert found["schedules"][Name.GPIPE]["bubble"]["formula"] == pytest.approx(1 / 9)
    assert found["schedules"][Name.FEW_ONE_F_ONE_B]["bubble"]["formula"] == pytest.approx(1 / 5)
    drift = found["relative_differences_from_one_rank"]
    assert set(drift) == set(Name) and max(max(one.values()) for one in drift.values()) < 1e-5
    values = {one["what"]: one["value"] for one in found["targets"]}
    ratio = found["seconds"][Name.TORCH_GPIPE]["median"] / found["seconds"][Name.GPIPE]["median"]
    assert values[f"step: {Name.TORCH_GPIPE} / {Name.GPIPE}"] == pytest.approx(ratio) and len(values) == 7
    assert PROVENANCE <= found["provenance"].keys() and found["provenance"]["threads_per_rank"] == 1
    assert done.stdout.index("target") < done.stdout.index("median ms") < done.stdout.index("ideal ms")
    for end in (".svg", "-1f1b.svg", "-zb-h1.svg"):
        assert path.with_name(path.stem + end).exists()


def check_json(printed: dict[str, Any]) -> None:
    assert list(printed["seconds"]) == [Name.GPIPE, Name.ONE_F_ONE_B, "hpctrain zb-h1"] and printed["quick"]
    assert list(printed["cuts"]) == ["stages"] and len(printed["targets"]) == 3


# Values of the candidates ---------------------------------------------------------------------------------------------


class Rank(OneRank):
    """Rank that waits for the others outside of steps."""

    def barrier(self) -> None:
        super().barrier()
        assert not trace.recording, "waiting for the others is no part of a step"


class Broken(Alone):
    """Candidate that drops one gradient, or compares with wrong targets."""

    def __init__(self, what: str) -> None:
        super().__init__(SMALL, Rank(), 4)  # type: ignore[arg-type]
        self.what = what

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        loss = super().step(inputs, targets.roll(1, 0) if self.what == "loss" else targets)
        if self.what == "norm":
            self.model.get_parameter("norm.bias").grad = None
        return loss


def test_losses_and_gradients_equal_those_of_a_plain_pass() -> None:
    comm: Any = Rank()
    found = find(comm, Alone(SMALL, comm, 4), SMALL)
    model = SMALL.model()
    inputs, targets = SMALL.batch(-1, 4)
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert found == {"loss": pytest.approx(loss.item(), rel=1e-5), "norm": pytest.approx(norm.item(), rel=1e-5)}


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_candidate_that_computes_something_else_is_detected(what: str) -> None:
    comm: Any = Rank()
    found = differences(comm, {"right": Alone(SMALL, comm, 4), "wrong": Broken(what)}, SMALL)
    assert found["right"] == {"loss": 0, "norm": 0}
    assert found["wrong"][what] > 1e-5


def test_task_is_reproducible_and_smaller_batches_are_prefixes_of_larger_ones() -> None:
    inputs, answers = SMALL.batch(3, 8)
    assert inputs.shape == answers.shape == (8, SMALL.context) and inputs[:, 1:].equal(answers[:, :-1])
    assert SMALL.batch(3, 4)[0].equal(inputs[:4]) and not SMALL.batch(4, 8)[0].equal(inputs)
    assert all(a.equal(b) for a, b in zip(SMALL.model().parameters(), SMALL.model().parameters()))
    cuts = SMALL.cuts(2)
    assert [name for cut in cuts for name in cut] == ["embedding", *(f"blocks.{i}" for i in range(4)), "norm", "head"]
    assert "blocks.1" in cuts[0] and "blocks.2" in cuts[1]


# Timing ---------------------------------------------------------------------------------------------------------------


class Candidate:
    """Candidate that checks the state at the begin of a step, and may fail."""

    microbatches = 2

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.model = fails, nn.Linear(1, 1)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        assert self.model.weight.grad is None and not gc.isenabled()
        assert inputs.equal(SMALL.batch(5, 2)[0])
        with trace.span("backward", chunk=1, microbatch=0):
            self.model.weight.grad = torch.ones(1, 1)
            with trace.span("send"):
                pass
        if self.fails:
            raise ValueError


def test_a_timed_step_has_its_spans_and_restores_all_switches() -> None:
    comm: Any = Rank()
    turn = partial(timed_step, comm, task=SMALL, ahead=10.0, number=5)
    step = turn(Candidate())  # type: ignore[arg-type]
    assert comm.log == ["|"]
    backward, send = step.spans
    assert (backward.name, backward.chunk, backward.microbatch, send.name) == ("backward", 1, 0, "send")
    assert step.start <= backward.start <= send.start <= send.end <= backward.end <= step.end
    assert step.seconds == step.end - step.start
    with pytest.raises(ValueError):
        turn(Candidate(fails=True))  # type: ignore[arg-type]
    assert gc.isenabled() and not trace.recording


# Output ---------------------------------------------------------------------------------------------------------------


def cost(measured: float, ideal: float) -> ScheduleCost:
    return ScheduleCost(measured, ideal, 1.0, {}, [], {})


def test_schedules_are_compared_with_their_ideals_and_with_torch() -> None:
    times = {
        name: {"median": value}
        for name, value in {Name.TORCH_GPIPE: 1.1, Name.GPIPE: 1.0, Name.TORCH_ONE_F_ONE_B: 0.9}.items()
    }
    times[Name.ONE_F_ONE_B] = {"median": 1.0}
    schedules = {
        Name.ONE_F_ONE_B: cost(1.0, 0.92),
        Name.FEW_ONE_F_ONE_B: cost(0.6, 0.5),
        Name.FEW_ZERO_BUBBLE: cost(0.54, 0.5),
    }
    drift = {Name.GPIPE: {"loss": 1e-7, "norm": 2e-5}, Name.ONE_F_ONE_B: {"loss": 2e-7, "norm": 0.0}}
    found = list(targets(times, schedules, drift))
    assert [one.value for one in found] == pytest.approx([0.92, 0.9, 1.08, 1.1, 0.9, 2e-7, 2e-5])
    assert [one.met for one in found] == [False, True, False, True, False, True, False]
    assert not list(targets({Name.GPIPE: {"median": 1.0}}, {Name.FEW_ZERO_BUBBLE: cost(1, 1)}, {}))


def test_every_candidate_has_an_option_name() -> None:
    assert sorted(WORDS.values()) == sorted(Name)
    assert list(WORDS)[:3] == ["alone", "naive", "gpipe"] and WORDS["zb-h1-4"] == Name.FEW_ZERO_BUBBLE


@pytest.mark.parametrize("names", [Name, (Name.ALONE, *TORCH)])
def test_plots_name_all_candidates_and_show_timelines(tmp_path: Path, names: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    result: dict[str, Any] = {
        "ranks": 2,
        "task": {"width": 384, "layers": 8, "heads": 6, "context": 128},
        "seconds": {name: TIME for name in names},
        "schedules": {name: {"ideal": 0.45} for name in names if name in OURS},
    }
    lines = {
        Name.FEW_ONE_F_ONE_B: simulate(make("1f1b", 2, 4), equal_costs(2, forward=0.01)),
        Name.FEW_ZERO_BUBBLE: simulate(make("zb-h1", 2, 4), equal_costs(2, forward=0.01)),
    }
    files = draw(result, tmp_path / "pipeline-np2", lines)
    ends = ["", "-1f1b", "-zb-h1"]
    assert [file.name for file in files] == [f"pipeline-np2{end}.{kind}" for end in ends for kind in ("png", "svg")]
    texts = texts_of(files[1])
    for text in ("GPT of 8 layers, width 384, on 2 ranks, microbatches of 128 tokens", *names, "ms per step"):
        assert text in texts
    assert texts.count("(450 ideal)") == len(result["schedules"])
    texts = texts_of(files[3])
    assert "1f1b m = 4, measured" in texts and "time (ms)" in texts and "stage 1" in texts
