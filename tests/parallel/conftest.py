"""Communicators of one test, on real and on simulated nodes, and a process group of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.nodes import alternating, in_pairs, on_nodes, one_per_node


@pytest.fixture
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of all ranks for one test."""
    own = comm.split(0)
    yield own
    own.free()


@pytest.fixture
def near(comm: Any) -> Iterator[Any]:
    """Return a communicator of the ranks of this node, which share memory."""
    own = comm.split(comm.node)
    if not own.shares_memory:
        pytest.skip("no two ranks share a node")
    yield own
    own.free()


@pytest.fixture(params=[in_pairs, alternating, one_per_node], ids=["in_pairs", "alternating", "one_per_node"])
def spread(comm: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a communicator of all ranks on simulated nodes: two, equal or not, or one node per rank."""
    spread = on_nodes(comm, request.param)
    yield spread
    spread.free()


@pytest.fixture
def process_group(comm: Any, shared_tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Initialise a process group of torch.distributed on the same ranks for the duration of a test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    store = f"file://{shared_tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=comm.size)
    yield
    torch.distributed.destroy_process_group()
