"""Time of a step, compared with sums by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.forecasts import CPU, GPU, forecast, planned, settings

from hpctrain.forecast.machine import LinkModel
from hpctrain.forecast.rank import rank_models
from hpctrain.forecast.recorder import Call
from hpctrain.forecast.run import Group, ModelFacts, PlannedRun, facts_of
from hpctrain.forecast.time_communication import Exchange, Network, ParameterTotals, exchange_of, exposed
from hpctrain.forecast.time_layers import LayerTime
from hpctrain.forecast.time_step import StepTime, pipeline
from hpctrain.forecast.time_work import ModelWork, count
from hpctrain.parallel.offload.config import OffloadSettings


@cache
def facts() -> ModelFacts:
    return facts_of(settings())


@cache
def works() -> dict[int, ModelWork]:
    return {1: count(facts(), "cross_entropy")}


def step(run: PlannedRun, machine: Any = GPU) -> StepTime:
    return forecast(run, machine, works()).step(run)


def run(ranks: int, batch: int = 16, **options: Any) -> PlannedRun:
    return planned(ranks, batch, facts=facts(), **options)


def on_cpu(one: PlannedRun) -> PlannedRun:
    return replace(one, device="cpu")


def test_one_rank_follows_the_rates() -> None:
    found = step(run(1))
    layers = works()[1].at(16)
    forward = sum(max(one.forward.flops / 1e12, one.forward.product_bytes / 1e11) for one in layers)
    forward += sum(one.forward.other_bytes / 1e11 for one in layers)
    assert found.parts["forward"] == pytest.approx(forward)
    assert found.parts["optimizer"] == pytest.approx(28 * facts().numel / 1e11)
    assert found.parts["clip"] == pytest.approx(12 * facts().numel / 1e11)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert all(found.parts[name] == 0 for name in ("gradients", "parameters", "bubble", "offload"))
    assert found.tokens == 16 * 64 and found.flops == pytest.approx(works()[1].flops(16))
    assert found.flops_a_rank == pytest.approx(found.flops / found.seconds)
    assert found.share_of_peak == pytest.approx(found.flops_a_rank / 2e12)


def test_more_ranks_share_the_batch_and_accumulation_repeats_the_passes() -> None:
    one, four = step(run(1)), step(run(4, 64))
    assert four.parts["forward"] == pytest.approx(one.parts["forward"])
    assert four.flops == pytest.approx(4 * one.flops) and four.flops_a_rank < one.flops_a_rank
    chosen = run(1).settings
    halves = replace(run(1), settings=replace(chosen, train=replace(chosen.train, accumulate=2)))
    eight = step(run(1, 8))
    assert step(halves).parts["backward"] == pytest.approx(2 * eight.parts["backward"])


def test_recomputation_adds_the_forward_passes_of_the_blocks() -> None:
    plain, again = step(run(1)), step(run(1, recompute=True))
    assert again.parts["forward"] == plain.parts["forward"]
    blocks = works()[1].at(16)[1:5]
    more = sum(
        max(one.forward.flops / 1e12, one.forward.product_bytes / 1e11) + one.forward.other_bytes / 1e11
        for one in blocks
    )
    assert again.parts["backward"] == pytest.approx(plain.parts["backward"] + more, rel=0.05)
    assert again.flops == plain.flops  # the FLOPs of the model


BYTES = 4 * facts().numel
NO_LATENCY = replace(GPU, intra_node=LinkModel(0.0, 1e10))


def exchanged(data: str, passes: float = 0.0, ranks: int = 8, machine: Any = NO_LATENCY) -> Exchange:
    one = run(ranks, ranks, data=data)
    one = on_cpu(one) if machine.kind == "cpu" else one
    (part,) = rank_models(one)
    held = ParameterTotals(facts().numel, 0)
    return exchange_of(one, held, part.record().calls, Network(machine, machine.rank_share(ranks)), passes, passes)


def test_ddp_sends_twice_and_fsdp_three_times_the_bytes() -> None:
    ring = BYTES * 7 / 8 / 1e10
    placing = 2 * BYTES / 1e11
    ddp, zero2, fsdp = (exchanged(data) for data in ("ddp", "zero2", "fsdp"))
    assert ddp.gradients == pytest.approx(2 * ring + placing, rel=0.02) and ddp.parameters == 0
    assert zero2.gradients + zero2.parameters == pytest.approx(2 * ring + placing, rel=0.02)
    root = 4 * (256 + 64 + 2) * 128 * 7 / 8 / 1e10  # embeddings and the last norm stay unsharded between the passes
    assert fsdp.gradients + fsdp.parameters == pytest.approx(3 * ring - root + placing, rel=0.02)


def test_communication_overlaps_with_passes_on_gpus_only() -> None:
    shown, behind = exchanged("fsdp"), exchanged("fsdp", passes=0.01)
    assert behind.gradients + behind.parameters < 0.4 * (shown.gradients + shown.parameters)
    whole = shown.gradients + shown.parameters + shown.hidden
    assert behind.gradients + behind.parameters + behind.hidden == pytest.approx(whole)
    together = exchanged("fsdp", passes=0.0003)  # the link needs longer than both passes
    assert together.hidden <= 0.0006 + 1e-9 < whole
    assert exchanged("ddp", 1.0, machine=CPU) == exchanged("ddp", 0.0, machine=CPU)


def test_calls_wait_for_the_link_and_passes_for_gathers() -> None:
    group = Group(2, 1, 2)  # an all-gather of 2e7 bytes takes 1 ms, an all-reduce 2 ms
    calls = [
        Call("all_gather", 20_000_000, group, "forward", 0, issued=0.0, needed=0.0),  # exposed: 1 ms
        Call("all_gather", 20_000_000, group, "forward", 0, issued=0.0, needed=0.5),  # hidden: the pass takes 2 ms
        Call("all_reduce", 20_000_000, group, "backward", 0, issued=0.5),  # from 4 to 6 ms, when the pass is at 5
        Call("all_reduce", 20_000_000, group, "backward", 0, issued=1.0),  # from 6 to 8 ms
    ]
    network = Network(NO_LATENCY, NO_LATENCY.rank_share(2))
    found = exposed(calls, network, 0.002, 0.002)
    assert found.parameters == pytest.approx(0.001) and found.gradients == pytest.approx(0.003)
    assert found.hidden == pytest.approx(0.006 - 0.004)
    late = [replace(call, issued=1.0) for call in calls[2:]]
    assert exposed(late, network, 0.002, 0.002).gradients == pytest.approx(0.004)


def test_parameters_in_shared_memory_are_gathered_by_barriers() -> None:
    found = exchanged("fsdp", ranks=4, machine=CPU)
    assert found.parameters == pytest.approx(2 * 1e-5)  # before the update, and before the next pass
    ddp = exchanged("ddp", ranks=4, machine=CPU)
    buckets = 2  # 1 MiB, then at most 4 MiB
    assert ddp.gradients == pytest.approx(buckets * 2e-5 + 2 * BYTES / 5e8 + 2 * BYTES / 5e8, rel=0.01)


def test_sharding_divides_the_update() -> None:
    ddp, zero1 = step(run(4)), step(run(4, data="zero1"))
    assert zero1.parts["optimizer"] == pytest.approx(ddp.parts["optimizer"] / 4, rel=0.01)
    assert zero1.parts["clip"] == pytest.approx(ddp.parts["clip"] / 4, rel=0.01)


def test_slow_links_between_nodes_lengthen_the_gradients() -> None:
    near, far = step(run(4)), step(run(4, nodes=2))
    assert far.parts["gradients"] > 5 * near.parts["gradients"]
    assert far.parts["forward"] == near.parts["forward"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_have_the_published_bubble(schedule: str) -> None:
    one = run(4, 16, pipe=4, schedule=schedule, microbatches=8)
    layers = [LayerTime(1.0, 2.0)] * 4
    parts = pipeline(one, layers, [range(n, n + 1) for n in range(4)], [0.0] * 4, 0.0)
    whole = parts["forward"] + parts["backward"] + parts["bubble"]
    assert parts["forward"] == 8 and parts["backward"] == 16
    assert parts["bubble"] / whole == pytest.approx((4 - 1) / (8 + 4 - 1))  # Huang et al., GPipe


def test_messages_and_unequal_stages_lengthen_a_pipeline() -> None:
    one = run(2, 16, pipe=2, microbatches=8)
    cuts = [range(0, 1), range(1, 2)]
    even = pipeline(one, [LayerTime(1.0, 2.0)] * 2, cuts, [0.0] * 2, 0.0)
    late = pipeline(one, [LayerTime(1.0, 2.0)] * 2, cuts, [0.0] * 2, 0.5)
    odd = pipeline(one, [LayerTime(1.0, 2.0), LayerTime(2.0, 4.0)], cuts, [0.0] * 2, 0.0)
    assert sum(late.values()) > sum(even.values()) and odd["forward"] == 16


def test_two_stages_of_a_gpt_take_half_the_compute_and_a_bubble() -> None:
    whole, halves = step(run(1, 32)), step(run(2, 32, pipe=2, microbatches=8))
    compute = halves.parts["forward"] + halves.parts["backward"]
    assert 0.5 <= compute / (whole.parts["forward"] + whole.parts["backward"]) < 0.75
    assert halves.parts["bubble"] > 0 and halves.parts["optimizer"] < whole.parts["optimizer"]


def test_tensor_ranks_exchange_activations() -> None:
    one = run(2, 16, tensor=2)
    found = forecast(one, replace(GPU, intra_node=LinkModel(0.0, 1e10)), works()).step(one)
    stream = 16 * 64 * 128 * 4  # samples, tokens, width, bytes; a ring of two sends each once
    assert found.parts["activations"] >= 16 * stream / 1e10
    assert found.parts["activations"] == pytest.approx(18 * stream / 1e10, rel=0.1)


def test_an_offloaded_update_takes_host_memory_and_link_time() -> None:
    one = run(2)
    chosen = replace(one.settings)
    object.__setattr__(chosen, "offload", OffloadSettings(optimizer=True))
    found = step(replace(one, settings=chosen))
    host = 28 * facts().numel / (GPU.host_bandwidth / 2)
    assert found.parts["optimizer"] == pytest.approx(host)
    assert step(one).parts["offload"] == 0 <= found.parts["offload"] < host
