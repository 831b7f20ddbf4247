"""Benchmark over two nodes: the limit of the link, and the result file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import multinode
import pytest
from support.jobs import JobStarter

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "multinode.py"
RUN = ROOT / "tests" / "multinode" / "run.py"
SKIPPED = 1  # exit code of run.py on a machine that cannot simulate two nodes


@pytest.mark.parametrize("nodes, share", [(2, 1.0), (4, 1.5), (5, 1.6)])
def test_the_limit_is_the_fastest_measurement(nodes: int, share: float) -> None:
    # Rabenseifner's bound: a reduce-scatter and an all-gather of (N-1)/N S each.
    assert multinode.limit(10**6, nodes, [5e5, 1e6, 9e5]) == pytest.approx(share)


@pytest.mark.limit(90)
@pytest.mark.benchmark
def test_a_run_over_two_nodes_writes_its_result(launch: JobStarter, tmp_path: Path) -> None:
    options = "--sizes", "64K", "--rounds", "2", "--out", tmp_path / "results"
    done = launch(0, RUN, "-n", "4", "--", sys.executable, PROGRAM, *options, timeout=80)
    if done.returncode == SKIPPED and "two nodes on one machine" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done
    (path,) = (tmp_path / "results").glob("multinode-nodes2-np4-*.json")
    found = json.loads(path.read_text())
    rates = found["link_bytes_per_second"]
    assert len(rates) == 4 and max(rates) < 125e6  # 1 Gbit/s
    ours = next(row["median"] for row in found["rows"] if row["candidate"] == "hpctrain")
    assert found["ratios"]["65536"]["link"] == pytest.approx(ours * max(rates) / 65536)
    assert {"mpi", "gloo"} <= found["ratios"]["65536"].keys()
