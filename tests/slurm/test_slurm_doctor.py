"""Preflight measures the nodes of an allocation, with all ranks that srun started."""

from __future__ import annotations

import json

import pytest
from batch_jobs import HPCTRAIN, Desk

pytestmark = pytest.mark.slurm


@pytest.mark.limit(240)
def test_preflight_sees_both_nodes(desk: Desk) -> None:
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmi2", "--kill-on-bad-exit=1", f"--chdir={desk.folder}"]
    words = [str(HPCTRAIN), "doctor", "--preflight", "--seconds=5", "--output=found.json"]
    said = desk.slurm.command(*step, *words, seconds=150)
    found = json.loads((desk.folder / "found.json").read_text())
    # hostname(1) of the nodes says the same.
    assert found["hosts"] == sorted(desk.slurm.command(*step[:3], "hostname").split()) == ["a1", "a2"], said
    assert len(found["ranks"]) == 2 and all(rank["flops"] > 0 for rank in found["ranks"])
