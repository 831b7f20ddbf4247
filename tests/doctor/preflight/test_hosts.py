"""What is not well on compute nodes is said once for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.doctoring import LIMITS, only, told

from hpctrain.doctor.preflight.hosts import Host, check, take

FINE = Host("n1", LIMITS, 2**36, 2**35)


def test_good_nodes() -> None:
    assert list(check([FINE, replace(FINE, name="n2")])) == []


def test_bad_ones_are_named_once() -> None:
    small = replace(LIMITS, memory=2**30)
    found = only(check([FINE, *(Host(f"n{node}", small, 2**36, 2**35) for node in (2, 3, 4))]))
    assert found.level == "warning" and found.found == "limited to 1 GiB of 64 GiB (3 nodes, n2 the first)"


def test_little_node_memory() -> None:
    found = only(check([FINE, Host("n2", LIMITS, 2**26, 2**26)]))
    assert (found.level, found.topic) == ("warning", "node memory")
    assert found.found == "/dev/shm: 64 MiB free of 64 MiB (n2)"


def test_cores_are_a_matter_of_binding() -> None:
    assert told(check([replace(FINE, limits=replace(LIMITS, affinity=(3,)))])) == []


@pytest.mark.ranks(1, 2)
def test_this_node(comm: Any) -> None:
    hosts = take(comm)
    assert len(hosts) == comm.nodes and all(host.shm >= host.shm_free > 0 for host in hosts)
