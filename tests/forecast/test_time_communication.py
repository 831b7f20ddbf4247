"""Time of collectives, by formulas and by calibration."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from support.forecasts import CPU, GPU, planned

from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout
from hpctrain.forecast.run import Group, group_of
from hpctrain.forecast.time_communication import Network, cheapest, interpolate
from hpctrain.train.calibration import Measurement

MB = 1e6


def test_groups_of_a_mesh_follow_the_order_of_ranks_on_nodes() -> None:
    run = planned(16, nodes=2, pipe=2, tensor=2)
    assert group_of(run, "tensor") == Group(2, 1, 2)
    assert group_of(run, "data") == Group(4, 1, 4)
    assert group_of(run, "pipe") == Group(2, 2, 1)
    assert group_of(replace(run, ranks_per_node=4), "data") == Group(4, 2, 2)
    uneven = replace(run, ranks_per_node=6)  # ranks 0, 2 and 4 of the first data line are on the first node
    assert group_of(uneven, "data") == Group(4, 2, 3, uniform=False)
    assert group_of(uneven, "data", 6) == Group(4, 2, 1, uniform=False)


def test_shared_memory_collectives_take_barriers_and_copies() -> None:
    network, group = Network(CPU, CPU.rank_share(4)), Group(4, 1, 4)  # 5e8 B/s per rank, barriers of 1e-5 s
    assert network.seconds("all_reduce", 10 * MB, group) == pytest.approx(2e-5 + 2 * 10 * MB / 5e8)
    assert network.seconds("reduce_scatter", 10 * MB, group) == pytest.approx(2e-5 + 1.25 * 10 * MB / 5e8)
    assert network.seconds("all_gather", 10 * MB, group) == pytest.approx(1e-5)
    assert network.seconds("all_reduce", 10 * MB, Group(1, 1, 1)) == 0


def test_large_messages_use_a_ring_and_small_ones_a_tree() -> None:
    assert cheapest("all_reduce", 8, 1e9, 1e-6, 1e10) == pytest.approx(2 * 1e9 * 7 / 8 / 1e10, rel=0.01)
    assert cheapest("all_reduce", 1024, 8, 1e-6, 1e10) == pytest.approx(10e-6, rel=0.01)
    assert cheapest("all_gather", 8, 1e9, 1e-6, 1e10) == pytest.approx(1e9 * 7 / 8 / 1e10, rel=0.01)


def test_across_nodes_each_rank_sends_its_slice_over_its_share_of_the_link() -> None:
    network = Network(GPU, GPU.rank_share(4))
    inside, across = 2 * 1e8 * 3 / 4 / 1e10, 2 * (1e8 / 4) * 1 / 2 / (1e9 / 4)
    assert network.seconds("all_reduce", 1e8, Group(8, 2, 4)) == pytest.approx(inside + across, rel=0.01)


def test_messages_take_longest_between_nodes() -> None:
    network = Network(GPU, GPU.rank_share(4))
    assert network.message(1e6, crosses=False) == pytest.approx(1e-6 + 1e-4)
    assert network.message(1e6, crosses=True) == pytest.approx(1e-5 + 1e-3)
    shared = Network(CPU, CPU.rank_share(4))
    assert shared.message(1e6, crosses=False) == pytest.approx(1e-5 + 2 * 1e6 / 5e8)


def test_calibration_applies_to_its_layout_only() -> None:
    key = ("all_reduce", "window", "carried")
    table = AlgorithmTable(RankLayout(2, 1, 2), {key: ((100, "mpi"), (float("inf"), "window"))})
    times = {"/".join(key): {"mpi": {"100": 1.0, "10000": 9.0}, "window": {"100": 2.0, "10000": 4.0}}}
    network = Network(CPU, CPU.rank_share(2), {table.layout: Measurement(table, times, "")})
    two = Group(2, 1, 2)
    seconds = [network.seconds("all_reduce", size, two) for size in (4, 100, 1000, 10000, 20000)]
    assert seconds == pytest.approx([1.0, 1.0, 2.0, 4.0, 8.0])  # 1000 is halfway on the logarithmic scale
    assert network.seconds("all_reduce", 1000, Group(4, 1, 4)) < 1e-3
    assert network.seconds("all_gather", 1000, two) == pytest.approx(1e-5)


def test_times_are_interpolated_on_a_logarithmic_scale() -> None:
    assert interpolate({10: 1.0, 1000: 100.0}, 100) == pytest.approx(10.0)
    assert interpolate({4: 1.0, 16: 2.0}, 8) == pytest.approx(sqrt(2))
