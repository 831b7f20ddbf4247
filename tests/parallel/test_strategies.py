"""Every synchronous strategy passes the suite of strategies."""

from __future__ import annotations

from typing import Any

import pytest
from suites.strategies import Row, StrategySuite
from support.nodes import in_pairs, one_per_node

ROWS = {
    "ddp": Row({"data": "ddp"}),
    "ddp in small buckets": Row({"data": "ddp", "bucket_mib": 0.001}),
    "zero1": Row({"data": "zero1"}),
    "zero2": Row({"data": "zero2"}),
    "fsdp": Row({"data": "fsdp"}),
    "fsdp by blocks": Row({"data": "fsdp", "units": ["Block"]}),
    "fsdp, recomputed": Row({"data": "fsdp", "recompute": True}),
    "zero1, offloaded": Row({"data": "zero1"}, {"optimizer": True}),
    "fsdp, offloaded": Row({"data": "fsdp"}, {"optimizer": True}),
    "pipeline": Row({"pipe": 2, "microbatches": 2}, ranks=2),
    "zero bubble": Row({"pipe": 2, "microbatches": 2, "schedule": "zb-h1"}, ranks=2),
    "tensor": Row({"tensor": 2}, ranks=2),
    "pipeline of fsdp": Row({"pipe": 2, "microbatches": 2, "data": "fsdp"}, ranks=2),
    "tensor and zero1": Row({"tensor": 2, "data": "zero1"}, ranks=2),
    "ddp between nodes": Row({"data": "ddp", "bucket_mib": 0.001}, nodes=one_per_node),
    "zero1 between nodes": Row({"data": "zero1"}, nodes=one_per_node),
    "fsdp between nodes": Row({"data": "fsdp", "units": ["Block"]}, nodes=one_per_node),
    "fsdp, a replica per node": Row(
        {"data": "fsdp", "units": ["Block"], "shard_within": "node"}, ranks=4, nodes=in_pairs
    ),
    "sequences": Row({"tensor": 2, "sequence": True}, ranks=2),
    "sequences and fsdp": Row({"tensor": 2, "sequence": True, "data": "fsdp", "units": ["Block"]}, ranks=2),
}
pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.few(4)]


@pytest.fixture
def own(comm: Any) -> Any:
    """Return the ranks of all nodes."""
    return comm


@pytest.mark.parametrize("name", ROWS)
class TestStrategies(StrategySuite):
    """The suite on every row."""

    rows = ROWS
