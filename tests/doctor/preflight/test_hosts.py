"""Findings about compute nodes: one finding for all nodes with the same defect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.doctoring import LIMITS, only, told

from hpctrain.doctor.preflight.placement import Host, check_hosts, take_hosts

FINE = Host("n1", LIMITS, 2**36, 2**35)


def test_good_nodes_are_no_finding() -> None:
    assert list(check_hosts([FINE, replace(FINE, name="n2")])) == []


def test_a_defect_of_several_nodes_is_one_finding() -> None:
    small = replace(LIMITS, memory=2**30)
    found = only(check_hosts([FINE, *(Host(f"n{node}", small, 2**36, 2**35) for node in (2, 3, 4))]))
    assert found.level == "warning" and found.found == "limited to 1 GiB of 64 GiB (3 nodes, n2 the first)"


def test_little_shared_memory_is_a_warning() -> None:
    found = only(check_hosts([FINE, Host("n2", LIMITS, 2**26, 2**26)]))
    assert (found.level, found.topic) == ("warning", "node memory")
    assert found.found == "/dev/shm: 64 MiB free of 64 MiB (n2)"


def test_the_number_of_cores_is_no_finding() -> None:
    assert told(check_hosts([replace(FINE, limits=replace(LIMITS, affinity=(3,)))])) == []


@pytest.mark.ranks(1, 2)
def test_take_gathers_one_host_per_node(comm: Any) -> None:
    hosts = take_hosts(comm)
    assert len(hosts) == comm.nodes and all(host.shm >= host.shm_free > 0 for host in hosts)
