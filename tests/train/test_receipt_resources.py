"""Peak memory and energy of all ranks: their sums and maxima, what is unknown, and the receipt of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.run_folders import RunFolder

from hpctrain.cluster.energy import Energy
from hpctrain.train.receipt.read import load
from hpctrain.train.receipt.render import text, to_json
from hpctrain.train.receipt.resources import Resources, host_memory, joined


def rank(
    node: int, *energy: Energy, private: int | None = 100, shared: int = 10, device: int | None = None
) -> Resources:
    return Resources(node, private, shared, device, device is not None, energy)


def test_memory_is_that_of_the_node_and_the_gpu_with_most() -> None:
    found = joined([rank(0), rank(0, private=150), rank(1, private=50, device=7), rank(1, device=9)])
    assert found == {"peak_node_bytes": 270, "peak_device_bytes": 9}
    assert joined([rank(0), rank(1, private=None)]) == {}


def test_every_device_counts_once() -> None:
    node = [Energy("rapl", "package-0", 100.0), Energy("rapl", "package-1", 50.0)]
    gpus = [Energy("nvml", "a", 30.0), Energy("nvml", "b", 40.0)]
    ranks = [rank(0, *node, gpus[0], device=1), rank(0, gpus[0], device=1), rank(0, gpus[1], device=1)]
    assert joined(ranks)["energy"] == {"rapl": 150.0, "nvml": 70.0}


def test_a_source_that_a_node_lacks_is_unknown() -> None:
    here, there = Energy("rapl", "package-0", 100.0), Energy("rapl", "package-0", 70.0)
    assert joined([rank(0, here), rank(0), rank(1, there)])["energy"] == {"rapl": 170.0}
    assert "energy" not in joined([rank(0, here), rank(0), rank(1)])
    assert "energy" not in joined([rank(0, Energy("nvml", "a", 1.0), device=1), rank(0, device=1)])


def test_a_counter_of_whole_nodes_includes_their_gpus() -> None:
    whole, gpu = Energy("pm_counters", "node", 500.0), Energy("nvml", "a", 30.0)
    assert joined([rank(0, whole, gpu, device=1)])["energy"] == {"pm_counters": 500.0}
    assert joined([rank(0, whole, gpu, device=1), rank(1, gpu, device=1)])["energy"] == {"nvml": 60.0}


def test_host_memory_leaves_out_files(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(
        "Name:\tpython\nVmHWM:\t 900 kB\nRssFile:\t 200 kB\nRssShmem:\t 100 kB\nThreads:\t4\n"
    )
    (tmp_path / "rollup").write_text("0-1 ---p 0 00:00 0 [rollup]\nPss_Shmem:    50 kB\n")
    assert host_memory(tmp_path / "status", tmp_path / "rollup") == (600 * 1024, 50 * 1024)
    assert host_memory(tmp_path / "status", tmp_path / "missing") == (600 * 1024, 0)
    assert host_memory(tmp_path / "missing", tmp_path / "rollup") == (None, 0)


def test_a_peak_that_was_freed_counts() -> None:
    before, _ = host_memory()
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    highest, now = (1024 * int(fields[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    block = torch.ones((highest - now + 200_000_000) // 4)  # beyond the peak of earlier tests
    del block
    after, _ = host_memory()
    assert before is not None and after is not None and after > before + 100_000_000


@pytest.mark.ranks(1, 2, 3)
def test_the_receipt_of_a_run_has_its_memory(job: Any, shared_tmp_path: Path) -> None:
    model = job.wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    with job.run(
        model, optimizer, torch.utils.data.DataLoader(data, 12), checkpoints=str(shared_tmp_path / "run")
    ) as run:
        for _, (inputs, targets) in run:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if job.rank == 0:
        (attempt,) = RunFolder(shared_tmp_path / "run").attempts
        least = 50_000_000 * job.size  # a process with torch has more
        assert least < attempt["peak_node_bytes"] < 100 * least and "peak_device_bytes" not in attempt
        (receipt,) = load([shared_tmp_path / "run"], {})
        assert receipt.attempts[0].peak_node_bytes == attempt["peak_node_bytes"]
        assert ("kWh" in "\n".join(text([receipt]))) is bool(receipt.joules)
        assert to_json([receipt])["runs"][0]["attempts"][0]["peak_node_bytes"] == attempt["peak_node_bytes"]
