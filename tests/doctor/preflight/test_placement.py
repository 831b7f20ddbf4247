"""Placement of ranks on nodes and cores, and findings about nodes with the same defect."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctoring import LIMITS, only, rank_placement, told

from hpctrain.cluster.resources import cpu_affinity
from hpctrain.doctor.preflight.placement import (
    Host,
    RankPlacement,
    check_hosts,
    check_placements,
    gather_hosts,
    gather_placements,
    host_name,
    numa_nodes,
    ranks_in_words,
)


def ranks(*cpus: tuple[int, ...], **other: Any) -> list[RankPlacement]:
    """Return the placement of ranks on one node with these cores."""
    return [rank_placement(rank, 0, rank, cpus=own, **other) for rank, own in enumerate(cpus)]


def test_ranks_on_separate_cores_are_ok() -> None:
    placement = [rank_placement(rank, rank // 2, rank % 2) for rank in range(4)]
    assert [finding.found for finding in check_placements(placement)] == [
        *("4 ranks on 2 nodes", "no two ranks share a core")
    ]
    # A rank that has the whole node may span it.
    assert told(check_placements([rank_placement(0, 0, 0, cpus=tuple(range(8)), numa=(0, 1), cores=8)])) == []


@pytest.mark.parametrize(
    "placement, level, words",
    [
        (ranks((0, 1, 2, 3), (0, 1, 2, 3)), "note", "2 ranks may all use cores 0-3: they are not bound (n1)"),
        (ranks((0, 1), (1, 2)), "warning", "ranks 0 and 1 share cores 1 (n1)"),
        (ranks((0,), (0,), (0,)), "warning", "3 ranks on 1 core: 0 (n1)"),
        (ranks((0,), (1,), cores=64), "note", "2 ranks may use 2 of 64 cores (n1)"),
        (ranks((0, 4), (1, 5), numa=(0, 1)), "note", "the cores of ranks 0-1 are in several NUMA nodes (n1)"),
    ],
)
def test_shared_or_wrong_cores_are_findings(placement: list[RankPlacement], level: str, words: str) -> None:
    found = only(check_placements(placement))
    assert (found.level, found.topic, found.found) == (level, "binding", words)


def test_a_finding_on_many_nodes_is_reported_once() -> None:
    both = tuple(range(8))
    found = only(check_placements([rank_placement(rank, rank // 2, rank % 2, cpus=both) for rank in range(200)]))
    assert found.found == "2 ranks may all use cores 0-7: they are not bound (100 nodes, n1 the first)"


def test_unequal_numbers_of_ranks_are_reported() -> None:
    found = only(check_placements([rank_placement(rank, rank // 2, rank % 2) for rank in range(3)]))
    assert found.found == "3 ranks on 2 nodes, from 1 to 2 on each"


def gpu(rank: int, identity: str, node: int = 0, name: str = "A100", local: int | None = None) -> RankPlacement:
    local = rank if local is None else local
    return rank_placement(rank, node, local, device=f"cuda:{local}", gpu=name, identity=identity)


@pytest.mark.parametrize("second", [gpu(1, "b"), gpu(1, "a", node=1, local=0)])
def test_separate_gpus_are_no_finding(second: RankPlacement) -> None:
    assert told(check_placements([gpu(0, "a"), second])) == []


@pytest.mark.parametrize(
    "others, level, words",
    [
        ([gpu(1, "a"), gpu(2, "b")], "error", "ranks 0-1 share a GPU of n1 (cuda:0)"),
        ([rank_placement(1, 0, 1)], "error", "rank 1 see none, others do"),
        ([gpu(1, "b", name="H100")], "note", "2 x A100, H100"),
    ],
)
def test_shared_missing_and_unequal_gpus_are_findings(others: list[RankPlacement], level: str, words: str) -> None:
    found = only(check_placements([gpu(0, "a"), *others]))
    assert (found.level, found.topic, found.found) == (level, "GPUs", words)


def test_numa_nodes_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, cpus in {"node0": "0-3,8-11\n", "node1": "4-7,12\n", "node2": "\n", "has_cpu": "0-12\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
    assert numa_nodes((2, 9), tmp_path) == (0,) and numa_nodes((3, 12), tmp_path) == (0, 1)
    assert numa_nodes((99,), tmp_path) == () == numa_nodes((0,), tmp_path / "lost")


def test_hosts_and_ranks_are_named() -> None:
    assert host_name({"SLURMD_NODENAME": "n7"}) == "n7" and host_name({}) == socket.gethostname()
    assert ranks_in_words([3]) == "rank 3" and ranks_in_words([0, 1, 2, 7]) == "ranks 0-2,7"


@pytest.mark.ranks(1, 2)
def test_take_gathers_the_placement_of_this_process(comm: Any) -> None:
    import torch

    placements = gather_placements(comm, torch.device("cpu"))
    assert [one.rank for one in placements] == list(range(comm.size))
    own = placements[comm.rank]
    assert (own.cpus, own.node, own.local_rank, own.gpu) == (cpu_affinity(), comm.node, comm.local_rank, "")


FINE = Host("n1", LIMITS, 2**36, 2**35)


@pytest.mark.parametrize("other", [replace(FINE, name="n2"), replace(FINE, limits=replace(LIMITS, affinity=(3,)))])
def test_good_nodes_are_no_finding(other: Host) -> None:
    """The number of cores is left to the check of the binding."""
    assert list(check_hosts([FINE, other])) == []


def test_a_defect_of_several_nodes_is_one_finding() -> None:
    small = replace(LIMITS, memory=2**30)
    found = only(check_hosts([FINE, *(Host(f"n{node}", small, 2**36, 2**35) for node in (2, 3, 4))]))
    assert found.level == "warning" and found.found == "limited to 1 GiB of 64 GiB (3 nodes, n2 the first)"
    found = only(check_hosts([FINE, Host("n2", LIMITS, 2**26, 2**26)]))
    assert (found.level, found.topic) == ("warning", "node memory")
    assert found.found == "/dev/shm: 64 MiB free of 64 MiB (n2)"


@pytest.mark.ranks(1, 2)
def test_take_gathers_one_host_per_node(comm: Any) -> None:
    hosts = gather_hosts(comm)
    assert len(hosts) == comm.nodes and all(host.shm >= host.shm_free > 0 for host in hosts)
