"""Forecast parts of a run's memory, compared with sums by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from hpctrain.errors import SettingsError, UsageError
from hpctrain.forecast.candidates import MemoryLimits, candidates, name_of
from hpctrain.forecast.memory import CATEGORIES, Memory, memory_of
from hpctrain.forecast.plots import memory_figure
from hpctrain.forecast.run import Device, ModelFacts, PlannedRun, facts_of
from hpctrain.settings import build
from hpctrain.train.config import Settings

MODEL = {"name": "gpt-tiny", "layers": 6, "width": 64, "heads": 4, "tied": False}


def settings_of(**parallel: Any) -> Settings:
    return build(Settings, {"model": MODEL, "train": {"batch": 16}, "parallel": parallel})


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return facts_of(settings_of())


def planned(facts: ModelFacts, ranks: int = 4, a_node: int = 4, device: Device = "cpu", **parallel: Any) -> Memory:
    return memory_of(PlannedRun(settings_of(**parallel), facts, ranks, a_node, device))


def test_one_rank_holds_everything(facts: ModelFacts) -> None:
    memory = planned(facts, 1, 1)
    whole = 4 * facts.numel
    host = memory.rank.host
    assert (host["parameters"], host["optimizer states"]) == (whole, 2 * whole)
    assert memory.node == replace(memory.rank, when="")
    assert sum(memory.rank.device.values()) == 0


@pytest.mark.parametrize(
    "optimizer, kept", [({"name": "sgd"}, 0), ({"name": "sgd", "options": {"momentum": 0.9}}, 1), ({"name": "adam"}, 2)]
)
def test_states_depend_on_the_optimizer(facts: ModelFacts, optimizer: dict[str, Any], kept: int) -> None:
    settings = build(Settings, {"model": MODEL, "train": {"batch": 16}, "optimizer": optimizer})
    memory = memory_of(PlannedRun(settings, facts, 1, 1, "cpu"))
    assert memory.rank.host["optimizer states"] == kept * 4 * facts.numel


@pytest.mark.parametrize(
    "section, more", [({"health": {"fingerprint_every": 2}}, 1), ({"run": {"on_failure": "shrink"}}, 0)]
)
def test_a_copy_from_which_steps_are_repeated_is_counted(facts: ModelFacts, section: dict[str, Any], more: int) -> None:
    """Weights and the two states of Adam, on each of several ranks; none where other ranks have them."""
    settings = build(Settings, {"model": MODEL, "train": {"batch": 16}, **section})
    for ranks, copies in ((1, 0), (4, more)):
        plain = memory_of(PlannedRun(settings_of(), facts, ranks, ranks, "cpu")).rank
        kept = memory_of(PlannedRun(settings, facts, ranks, ranks, "cpu")).rank
        assert kept.host["buffers"] - plain.host["buffers"] == pytest.approx(copies * 12 * facts.numel, rel=0.02)


def test_a_copy_of_a_part_of_the_model_is_counted(facts: ModelFacts) -> None:
    """Where several ranks hold a replica, other replicas may be ahead by an update that one rank has not made."""
    parallel = {"tensor": 2}
    settings = [
        build(Settings, {"model": MODEL, "train": {"batch": 16}, "parallel": parallel, "run": {"on_failure": failure}})
        for failure in ("restart", "shrink")
    ]
    ranks = [memory_of(PlannedRun(one, facts, 4, 4, "cpu")).rank.host for one in settings]
    assert ranks[1]["buffers"] - ranks[0]["buffers"] == pytest.approx(3 * ranks[0]["parameters"], rel=0.02)


def test_two_copies_of_shards_are_counted(facts: ModelFacts) -> None:
    parallel = {"data": "fsdp"}
    shrinks = build(
        Settings, {"model": MODEL, "train": {"batch": 16}, "parallel": parallel, "run": {"on_failure": "shrink"}}
    )
    kept = memory_of(PlannedRun(shrinks, facts, 4, 4, "cpu")).rank.host["buffers"]
    more = kept - planned(facts, data="fsdp").rank.host["buffers"]
    assert more == pytest.approx(2 * 12 * facts.numel / 4, rel=0.02)


def test_copies_on_other_nodes_are_counted(facts: ModelFacts) -> None:
    found = []
    for every in (0, 10):
        sections = {"checkpoint": {"replicate": every}, "run": {"on_failure": "shrink"}, "parallel": {"data": "zero1"}}
        settings = build(Settings, {"model": MODEL, "train": {"batch": 16}, **sections})
        found.append(memory_of(PlannedRun(settings, facts, 4, 2, "cpu")).rank.host["buffers"])
    assert found[1] - found[0] == pytest.approx(4 * 12 * facts.numel / 4, rel=0.02)


def test_fsdp_ranks_of_a_node_share_parameters(facts: ModelFacts) -> None:
    ddp, fsdp = planned(facts), planned(facts, data="fsdp")
    whole = 4 * facts.numel
    assert ddp.node.host["parameters"] == 4 * whole
    for part, share in (("parameters", 1), ("gradients", 1), ("optimizer states", 2)):
        assert fsdp.node.host[part] == pytest.approx(share * whole, rel=0.02)
    assert fsdp.rank.host_total < ddp.rank.host_total


def test_zero_stages_divide_memory_on_gpus(facts: ModelFacts) -> None:
    whole = 4 * facts.numel
    shares = {"zero1": 1.0, "zero2": 1.0, "fsdp": 0.25}
    for data, share in shares.items():
        need = planned(facts, 4, 2, "cuda", data=data).rank
        assert need.device["parameters"] == pytest.approx(share * whole, rel=0.02)
        assert need.device["gradients"] == pytest.approx(whole / 4, rel=0.02)
        assert need.device["optimizer states"] == pytest.approx(whole / 2, rel=0.02)


def test_offload_keeps_no_states_on_gpus(facts: ModelFacts) -> None:
    sections = {"model": MODEL, "train": {"batch": 16}, "offload": {"parameters": True}, "parallel": {"data": "fsdp"}}
    need = memory_of(PlannedRun(build(Settings, sections), facts, 4, 4, "cuda")).rank
    assert (need.device["optimizer states"], need.device["gradients"], need.device["parameters"]) == (0, 0, 0)
    assert need.host["optimizer states"] == pytest.approx(2 * 4 * facts.numel / 4, rel=0.02)


def test_the_fullest_stage_is_named(facts: ModelFacts) -> None:
    memory = planned(facts, pipe=2, partition="2,7")
    assert [len(layers) for layers in memory.layers] == [2, 7]
    assert memory.stages[1].host["parameters"] > memory.stages[0].host["parameters"]
    held = sum(need.host["parameters"] for need in memory.stages)
    assert held == 4 * facts.numel  # no parameter is on two stages
    assert memory.rank is memory.stages[memory.fullest]


def test_gpipe_keeps_more_microbatches_than_1f1b(facts: ModelFacts) -> None:
    one, all_ = (planned(facts, 2, 2, pipe=2, microbatches=8, schedule=name) for name in ("1f1b", "gpipe"))
    assert all_.stages[0].host["activations"] > 3 * one.stages[0].host["activations"]


def test_recomputing_needs_fewer_activations(facts: ModelFacts) -> None:
    plain, again = planned(facts).rank, planned(facts, recompute=True).rank
    assert again.host["activations"] < plain.host["activations"] / 3


def test_candidates_contain_the_chosen_strategy_once(facts: ModelFacts) -> None:
    run = PlannedRun(settings_of(data="zero1"), facts, 4, 4)
    found = candidates(run, MemoryLimits(host=1))
    names = [one.name for one in found]
    assert names[0] == "zero1" and len(set(names)) == len(names)
    assert {"ddp", "fsdp", "zero2 + recompute", "tensor 2 x ddp 2", "pipe 4 x ddp 1 (1f1b)"} <= set(names)
    assert not any(one.fits for one in found)
    assert found[0].excess == (0, found[0].memory.node.host_total - 1)
    more = [one.name for one in candidates(run, MemoryLimits(), everything=True)]
    assert set(names) < set(more)


def test_reproducible_runs_have_no_split_models_and_the_memory_of_zero1(facts: ModelFacts) -> None:
    found = candidates(PlannedRun(settings_of(data="fsdp", reproducible=True), facts, 2, 2), MemoryLimits())
    assert {"fsdp", "ddp", "zero1"} <= {one.name for one in found}
    assert not any("tensor" in one.name or "pipe" in one.name for one in found)
    needs = {one.name: one.memory.rank.host_total for one in found}
    assert needs["fsdp"] == needs["zero2"] == needs["zero1"]


def test_the_legend_lists_only_what_is_drawn(facts: ModelFacts) -> None:
    legends = []
    for device in ("cpu", "cuda"):
        run = PlannedRun(settings_of(), facts, 4, 4, device)  # type: ignore[arg-type]
        (legend,) = memory_figure("a run", candidates(run, MemoryLimits(host=2**33))).legends
        legends.append([text.get_text() for text in legend.get_texts()])
    assert legends[0] == [*CATEGORIES, "limit"]
    assert legends[1] == [category for category in CATEGORIES if category not in ("allocator", "program")] + ["limit"]


def test_an_impossible_mesh_is_a_user_error(facts: ModelFacts) -> None:
    with pytest.raises(UsageError, match="cannot form a mesh"):
        planned(facts, 4, 4, pipe=3)
    with pytest.raises(SettingsError, match="batch of 16"):
        planned(facts, 5, 5)
    with pytest.raises(UsageError, match="4 heads cannot be split over 8"):
        planned(facts, 8, 8, tensor=8)


def test_names_distinguish_candidates(facts: ModelFacts) -> None:
    run = PlannedRun(settings_of(pipe=2, data="zero1", recompute=True), facts, 4, 4)
    assert name_of(run) == "pipe 2 x zero1 2 (1f1b) + recompute"


def test_needs_no_mpi() -> None:
    code = (
        "import sys; from hpctrain.cli.main import main; from hpctrain.forecast.time_forecasts import calibration\n"
        "from hpctrain.train.config import Settings; from hpctrain.forecast.run import PlannedRun, facts_of\n"
        "from hpctrain.forecast.memory import memory_of\n"
        "import hpctrain.cli.plan_run; settings = Settings()\n"
        "memory_of(PlannedRun(settings, facts_of(settings), 2, 2)); calibration()\n"
        "assert 'torch' in sys.modules and 'mpi4py' not in sys.modules and 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
