"""Forecast memory of a node, compared with the memory of a run's processes according to Linux."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import forecast  # noqa: E402

LONG = ["mlp-wide ddp on 1", "embedding 1f1b on 2"]
KNOWN = {case.name: case for case in forecast.CASES}


@pytest.mark.limit(200)
@pytest.mark.parametrize("name", ["mlp-wide fsdp on 2", *(pytest.param(each, marks=pytest.mark.long) for each in LONG)])
def test_memory_of_processes_matches_the_forecast(name: str, tmp_path: Path) -> None:
    case = KNOWN[name]
    found = forecast.play(Namespace(earlier=None), case, tmp_path)
    # The table in benchmarks/results is within 10 % of the node. The memory of torch's libraries differs by machine: a
    # virtual machine with three cores had 20 MB more per rank.
    model = found.node - found.forecast.node.host["program"]
    assert found.measured == pytest.approx(found.node, abs=0.15 * model + 20_000_000 * case.ranks), found.ranks
