"""Simulated steps of strategies: communication volumes of the papers, owned memory, and names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from hpctrain.forecast.run import Group, ParameterFacts
from hpctrain.forecast.simulate import MemoryItem, StrategyRecord, Task, simulate
from hpctrain.parallel.config import ParallelSettings

NODE, APART, BOTH = Group(4, 1, 4), Group(4, 4, 1), Group(8, 2, 4)
SHAPES = {
    "small": [("a", 1000), ("b", 5000), ("b", 300), ("c", 7)],
    "large": [("a", 400_000), ("b", 2_000_000), ("b", 10), ("c", 3_000_000), ("d", 40)],
}
SLACK = 64 * 8 * 6  # bytes of padding: a cache line per slice and parameter


def record(
    data: str, group: Group = NODE, shapes: str = "small", *, cpu: bool = False, **options: Any
) -> StrategyRecord:
    parallel = {name: value for name, value in options.items() if name not in ("passes", "in_parts", "buffers")}
    rest = {name: value for name, value in options.items() if name not in parallel}
    named = [
        ParameterFacts(f"{unit}.{n}", count, torch.float32, True) for n, (unit, count) in enumerate(SHAPES[shapes])
    ]
    modules = tuple((unit, True) for unit in dict.fromkeys(unit for unit, _ in SHAPES[shapes]))
    settings = ParallelSettings(data=data, **parallel)  # type: ignore[arg-type]
    return simulate(Task(tuple(named), modules, settings, group, cpu, **rest))


def volumes(found: StrategyRecord) -> dict[str, int]:
    """Return the bytes of large tensors by operation; flags and norms are small."""
    sums: Counter[str] = Counter()
    for call in found.calls:
        sums[call.operation] += call.nbytes if call.nbytes > 256 else 0
    return {operation: nbytes for operation, nbytes in sums.items() if nbytes}


def owned(found: StrategyRecord, category: str) -> list[MemoryItem]:
    return [one for one in found.owned if one.category == category and one.nbytes]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp"])
def test_volumes_are_those_of_the_zero_paper(data: str, shapes: str, cpu: bool) -> None:
    """Rajbhandari et al., section 7: gradients and parameters once each (ZeRO 1, 2), parameters twice (ZeRO 3)."""
    whole = 4 * sum(count for _, count in SHAPES[shapes])
    found = volumes(record(data, APART, shapes, cpu=cpu))
    expected = {"ddp": {"all_reduce": 1}, "fsdp": {"reduce_scatter": 1, "all_gather": 2}}
    expected |= {name: {"reduce_scatter": 1, "all_gather": 1} for name in ("zero1", "zero2")}
    assert found.keys() == expected[data].keys()
    for operation, times in expected[data].items():
        assert abs(found[operation] - times * whole) <= times * SLACK  # small ones are missing, some are padded


def test_ranks_of_a_node_gather_nothing() -> None:
    for data in ("zero1", "zero2", "fsdp"):
        assert volumes(record(data, cpu=True)).keys() == {"reduce_scatter"}


def test_a_replica_per_node_reduces_its_slices_between_nodes() -> None:
    found = record("zero2", BOTH, "large", shard_within="node")
    scattered = [call for call in found.calls if call.operation == "reduce_scatter"]
    summed = [call for call in found.calls if call.operation == "all_reduce" and call.group == Group(2, 2, 1)]
    assert [call.group for call in scattered] == [Group(4, 1, 4)] * len(summed)
    assert sorted(call.nbytes for call in scattered) == sorted(4 * call.nbytes for call in summed)


def test_half_precision_halves_the_bytes() -> None:
    plain, narrow, mixed = (
        record("ddp"),
        record("ddp", compression="bfloat16"),
        record("zero2", mixed_precision="bfloat16"),
    )
    assert volumes(narrow)["all_reduce"] == pytest.approx(volumes(plain)["all_reduce"] / 2, abs=SLACK)
    assert volumes(mixed)["reduce_scatter"] == pytest.approx(volumes(record("zero2"))["reduce_scatter"] / 2, abs=SLACK)


def test_each_pass_is_reduced_if_configured() -> None:
    local, reduced = (record("zero2", passes=3, accumulate=how) for how in ("local", "reduced"))
    passes = [
        Counter(call.number for call in one.calls if call.operation == "reduce_scatter") for one in (local, reduced)
    ]
    assert set(passes[0]) == {2} and set(passes[1]) == {0, 1, 2}


def test_a_pipeline_gathers_once_and_reduces_at_the_end() -> None:
    found = record("fsdp", in_parts=True)
    assert {call.issued for call in found.calls if call.operation == "reduce_scatter"} == {1.0}
    whole = 4 * sum(count for _, count in SHAPES["small"])
    assert volumes(found)["all_gather"] == pytest.approx(whole, abs=SLACK)


def test_gradients_are_reduced_while_the_backward_pass_computes() -> None:
    issued = [
        call.issued
        for call in record("zero2", shapes="large", bucket_mib=1.0).calls
        if call.operation == "reduce_scatter"
    ]
    assert issued == sorted(issued) and issued[0] < 0.6
    apart = [call.issued for call in record("ddp", APART, "large").calls if call.operation == "all_reduce"]
    assert set(apart) == {1.0}  # without shared memory a reduction cannot stay in progress


def test_units_are_gathered_ahead_of_their_use_on_gpus() -> None:
    ahead, never = record("fsdp", prefetch=1), record("fsdp", prefetch=0)
    gathers = [call for call in ahead.calls if call.operation == "all_gather" and call.phase == "forward"]
    assert any(call.issued < call.needed for call in gathers)
    assert all(call.issued == call.needed for call in never.calls if call.operation == "all_gather")
    most = [max(one.unsharded for one in found.forward.values()) for found in (ahead, never)]
    assert most[0] > most[1] > 0


def test_owned_memory_is_that_of_the_stages() -> None:
    whole = 4 * sum(count for _, count in SHAPES["large"])
    for data, parameters, gradients in (("zero2", 1, 0.25), ("fsdp", 0.25, 0.25)):
        found = record(data, shapes="large")
        assert sum(one.nbytes for one in owned(found, "parameters")) == pytest.approx(parameters * whole, abs=SLACK)
        assert sum(one.nbytes for one in owned(found, "gradients")) == pytest.approx(gradients * whole, abs=SLACK)
        assert found.trained_bytes == pytest.approx(whole / 4, abs=SLACK) and not found.keeps_gradients
    (shared,) = owned(record("fsdp", shapes="large", cpu=True), "parameters")
    assert (shared.shared_by, shared.on_host) == (4, True) and shared.nbytes == pytest.approx(whole, abs=SLACK)


def test_buckets_are_the_gradients_on_a_cpu_and_copies_in_host_memory_for_a_gpu() -> None:
    cpu, gpu = record("ddp", cpu=True), record("ddp")
    assert owned(cpu, "gradients") and not cpu.keeps_gradients
    assert not owned(gpu, "gradients") and gpu.keeps_gradients and all(one.on_host for one in owned(gpu, "buffers"))


def test_a_single_rank_communicates_nothing() -> None:
    found = record("fsdp", Group(1, 1, 1), buffers=(8,))
    assert found.calls == () and found.keeps_gradients
    assert [(one.category, one.nbytes) for one in found.owned] == [("parameters", 4 * 6307), ("buffers", 8)]


def test_names_do_not_matter() -> None:
    modules, held = (("x.0", True), ("head", False)), ("x.0.w", "x.0.in.b", "head.w", "scale")
    tasks = [
        Task(
            tuple(ParameterFacts(prefix + name, 50, torch.float32, True) for name in held),
            tuple((prefix + name, unit) for name, unit in modules),
            ParallelSettings(data="fsdp"),
            APART,
            False,
        )
        for prefix in ("", "model.")
    ]
    one, two = map(simulate, tasks)
    assert one.calls is two.calls and set(one.forward) == {"", "x.0", "head"}
    assert two.forward["model.x.0"] == one.forward["x.0"]
