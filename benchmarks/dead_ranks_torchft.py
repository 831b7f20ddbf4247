"""Dead ranks under torchft, for comparison: DDP replicas on gloo, of which one is killed at a random moment.

torchft (https://github.com/meta-pytorch/torchft) continues with the other replicas as well: a server beside the
job, the lighthouse, drops a replica whose heartbeats end, and the others form a new process group. The benchmark
of dead ranks runs this if torchft is installed, with the model, the batch and the optimizer of its jobs of kind
``plain``. A step counts if it is committed by the replicas that are left. The gradients are averaged by
torchft's ``PureDistributedDataParallel``: with torch 2.13 and gloo, its ``DistributedDataParallel`` ends the
other replicas by an AssertionError if the replica dies within a collective.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from dead_ranks_target import BATCH, model_of
from harness.ranks import end_child
from harness.turns import Progress, stop, until_stopped
from torch.nn.functional import cross_entropy

from hpctrain.errors import UsageError

RANKS, STEADY, START, END = 4, 30, 90.0, 60.0  # replicas, steps before a kill, seconds to reach them, and after it


@dataclass(frozen=True)
class Timeouts:
    """Settings of the lighthouse and the process group: ``example`` has those of torchft's own example of DDP."""

    heartbeat_ms: int
    join_ms: int
    tick_ms: int
    group_seconds: float


SETTINGS = {"example": Timeouts(5000, 10_000, 100, 5.0), "short": Timeouts(500, 500, 10, 2.0)}


def available() -> bool:
    return importlib.util.find_spec("torchft") is not None


def seconds_to_next_step(count: int, seed: int, name: str) -> list[float | None]:
    """Kill a replica in ``count`` jobs; return the seconds to the next committed step, without the step itself."""
    draw, progress, found = random.Random(seed), Progress(f"torchft, {name}", count), list[float | None]()
    with until_stopped:
        for number in range(count):
            with tempfile.TemporaryDirectory(prefix="hpctrain-torchft-") as folder:
                found.append(_job(Path(folder), SETTINGS[name], draw))
            progress(number + 1)
    return found


def _job(folder: Path, timeouts: Timeouts, draw: random.Random) -> float | None:
    os.environ["RUST_LOG"] = "error"  # else each step prints several lines
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=timeouts.join_ms,
        quorum_tick_ms=timeouts.tick_ms,
        heartbeat_timeout_ms=timeouts.heartbeat_ms,
    )
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}
    environ["OTEL_SDK_DISABLED"] = "true"
    command = [sys.executable, __file__, str(folder), str(timeouts.group_seconds)]
    processes = []
    try:
        for number in range(RANKS):
            with open(folder / f"{number}.err", "w") as errors:
                process = subprocess.Popen(
                    [*command, str(number)],
                    env=environ,
                    stdout=errors,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                )
            processes.append(process)
        step = _started(folder)
        time.sleep(draw.random())
        victim = draw.randrange(RANKS)
        processes[victim].send_signal(signal.SIGKILL)
        killed = time.time()
        others = [number for number in range(RANKS) if number != victim]
        after = _next_step(folder, others, killed)
        return None if after is None else after - killed - step
    finally:
        for process in processes:
            end_child(process)
        lighthouse.shutdown()


def _started(folder: Path) -> float:
    """Wait until all replicas take part in steps; return the median seconds of a step."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        stop.check()
        rows = [_rows(folder, number)[-STEADY:] for number in range(RANKS)]
        if all(len(own) == STEADY and min(row[2] for row in own) == RANKS for own in rows):
            times = [row[1] for row in rows[0]]
            return statistics.median(after - before for before, after in zip(times, times[1:]))
        time.sleep(0.05)
    said = (folder / "0.err").read_text()[-2000:]
    raise UsageError(f"torchft: no {STEADY} steps of {RANKS} replicas within {START:g} s:\n{said}")


def _next_step(folder: Path, others: list[int], killed: float) -> float | None:
    """Return when the other replicas have committed a step without the one that was killed."""
    deadline = time.monotonic() + END
    while time.monotonic() < deadline:
        stop.check()
        rows = [row for number in others for row in _rows(folder, number) if row[1] > killed and row[2] < RANKS]
        if rows:
            return min(row[1] for row in rows)
        time.sleep(0.01)
    return None


def _rows(folder: Path, number: int) -> list[tuple[int, float, int]]:
    """Return the committed steps of a replica: number, time, replicas that took part."""
    with suppress(FileNotFoundError):
        lines = (folder / f"{number}.txt").read_text().splitlines(keepends=True)
        rows = [line.split() for line in lines if line.endswith("\n")]
        return [(int(step), float(when), int(ranks)) for step, when, ranks in rows]
    return []


def train(folder: Path, group_seconds: float, number: int) -> None:
    """Train as one replica until killed."""
    import torch.distributed as dist
    from torchft import Manager, Optimizer
    from torchft.ddp import PureDistributedDataParallel
    from torchft.process_group import ProcessGroupGloo

    torch.manual_seed(0)
    model = model_of("plain")
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=group_seconds)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    replica, optimizer = PureDistributedDataParallel(manager, model), Optimizer(manager, inner)
    draw = torch.Generator().manual_seed(number)
    samples = BATCH // RANKS
    inputs, classes = torch.randn(samples, 32, generator=draw), torch.randint(0, 4, (samples,), generator=draw)
    with open(folder / f"{number}.txt", "w", buffering=1) as steps:
        while True:
            optimizer.zero_grad()
            cross_entropy(replica(inputs), classes).backward()  # type: ignore[no-untyped-call]
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                steps.write(f"{manager.current_step()} {time.time()} {manager.num_participants()}\n")


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
