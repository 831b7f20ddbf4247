"""Timing of single layers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from support.forecasts import CPU, forecast, planned, settings
from torch import Tensor, nn

from hpctrain.forecast.run import ModelFacts, Spec, describe, facts_of
from hpctrain.forecast.time_layers import LayerFit, LayerTimer, LinearFit, one_thread, time_layers
from hpctrain.forecast.time_work import count

STEP = 0.002  # seconds per sample


class Burn(nn.Module):
    """Layer that keeps the core busy for ``times`` steps per sample, and for as long once per call."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        if not x.is_meta:
            end = time.thread_time() + STEP * self.times * (1 + x.shape[0])
            while time.thread_time() < end:
                pass
        return x * 1.0


def burning(*times: int) -> ModelFacts:
    model = nn.Sequential(*(Burn(each) for each in times))
    return describe(model, "burns", Spec((4,), torch.float32), Spec((4,), torch.float32))


def test_each_kind_of_layer_has_a_line_through_its_times() -> None:
    facts = burning(1, 3, 1)
    found = time_layers(facts, count(facts, "mse"), 4, one_thread(CPU), "mse")
    assert found is not None and sorted(found) == [-1, 0, 1]
    for kind, times in ((0, 1), (1, 3)):
        line = found[kind].forward
        assert line.each == pytest.approx(times * STEP, rel=0.3)
        assert line.at(4) == pytest.approx(5 * times * STEP, rel=0.3)
        assert found[kind].backward.at(4) < STEP


def test_generators_and_thread_count_are_restored() -> None:
    facts = facts_of(settings())
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    found = time_layers(facts, count(facts, "cross_entropy"), 2, one_thread(CPU), "cross_entropy")
    assert found is not None and found[1].forward.at(2) > 0 and found[1].backward.at(2) > 0
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads
    assert all(one.is_meta and one.grad is None for one in facts.model.parameters())


def test_layers_that_exceed_time_or_memory_are_not_run() -> None:
    facts = facts_of(settings())
    slow = replace(one_thread(CPU), flops=1.0)
    assert time_layers(facts, count(facts, "cross_entropy"), 4, slow, "cross_entropy") is None
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**14, 2**14))  # 1 GiB, and a bias
    large = describe(model, "large", *[Spec((2**14,), torch.float32)] * 2)
    fast = one_thread(replace(CPU, flops={1: 1e15}))
    assert time_layers(large, count(large, "mse"), 4, fast, "mse") is None


def test_lines_do_not_fall_below_zero() -> None:
    assert LinearFit(-1.0, 0.5).at(1) == 0 and LinearFit(1.0, 0.5).at(4) == 3


def test_times_of_one_thread_are_scaled_to_the_threads_of_a_rank() -> None:
    run = planned(1, 8)
    plain = forecast(run, CPU)
    kinds = {layer.kind for layer in run.facts.layers} | {-1}
    timed = {kind: LayerFit(LinearFit(0.0, 1.0), LinearFit(0.0, 2.0)) for kind in kinds}
    timer = LayerTimer(CPU, plain.timer.whole, plain.timer.local, timed)
    passes = timer.layers(run, plain.network(run))
    head = passes[-2]  # one product, for which four cores are three times as fast as one
    assert 8 / 3 <= head.forward <= 8 / 2 and head.backward == pytest.approx(2 * head.forward, rel=0.01)
