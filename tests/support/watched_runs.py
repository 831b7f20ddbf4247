"""Folders of runs as a run writes them, without training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeRun = Callable[..., Path]


def row(step: int, *, begun: float, every: float = 0.5) -> dict[str, Any]:
    """Return a row of metrics of a run with ``every`` seconds per step and a validation in each tenth step."""
    found = {"step": step, "loss": 2.0 + 3.0 / step, "learning_rate": 1e-3, "tokens": 4096 * step, "grad_norm": 1.0}
    if step % 10 == 0:
        found["validation_loss"] = 2.2 + 3.0 / step + (0.5 if step > 150 else 0.0)
    times = {"step_seconds": 0.8 * every, "communication_seconds": 0.1 * every, "data_seconds": 0.05 * every}
    times |= {"optimizer_seconds": 0.2 * every, "forward_seconds": 0.15 * every, "backward_seconds": 0.3 * every}
    times |= {"save_seconds": 0.02 * every}
    return {**found, **times, "unix_time": round(begun + every * step, 3)}


def write_run(folder: Path, steps: int = 200, *, ago: float = 1.0, every: float = 0.5, **facts: Any) -> Path:
    """Write the folder of a run with some steps, the last of which was some seconds ago; return the folder."""
    folder.mkdir(parents=True)
    begun = time.time() - ago - every * steps
    rows = [row(step, begun=begun, every=every) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    known = {"status": "running", "size": 8, "nodes": 2, "host": "n1", "pid": 77, "parallel": "fsdp"}
    known |= {"device": "cuda", "first_step": 1, "saved_step": steps // 100 * 100, "last_save_seconds": 2.5}
    known |= {"unix_time": begun - 20.0, "elapsed_seconds": 140.0, "startup_seconds": 20.0, "step_seconds": 80.0}
    known |= {"save_seconds": 5.0, "target_step": 1000, "job_id": "4711", "scheduler": "slurm", **facts}
    holder = {"host": "n1", "pid": 77, "boot_id": "elsewhere", "pid_namespace": "elsewhere"}
    (folder / "lock.json").write_text(json.dumps(holder))
    (folder / "run.json").write_text(json.dumps({"status": known["status"], "attempts": [known]}))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes the folder of a run, by its name, and returns its path."""

    def make(name: str = "run", *given: Any, **facts: Any) -> Path:
        return write_run(tmp_path / name, *given, **facts)

    return make
