"""SIGINT or SIGTERM to one rank at any moment after the start of its process: the job ends soon, with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from support.corpus import make_project
from support.pace import scaled

RANKS = 2
SOON = 10.0  # seconds
# HPCTRAIN_SWEEP=0.05 sends a signal every 50 ms.
STEP = float(os.environ.get("HPCTRAIN_SWEEP", "0.55"))
LAST = 4.0  # seconds after the start of the process; on a quiet machine the first steps of a run are earlier
STRATEGIES = {
    "ddp": [],
    "fsdp": ["parallel.data=fsdp"],
    "offload": ["parallel.data=fsdp", "offload.optimizer=true", "checkpoint.background=true"],
}
SETTINGS = ["run.folder=run", "train.steps=2000", "train.batch=4", "checkpoint.every=1"]


def last_rank(token: str, deadline: float) -> int:
    """Wait until the last rank runs; return its process id."""
    signs = {f"PMI_RANK={RANKS - 1}", f"OMPI_COMM_WORLD_RANK={RANKS - 1}"}
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if f"SWEEP={token}" in environ and signs & set(environ):
                return int(folder.name)
        time.sleep(0.005)
    raise TimeoutError("no rank has started")


def send(folder: Path, strategy: str, number: signal.Signals, delay: float) -> tuple[int, str, float]:
    """Return exit code and output of a job whose last rank got a signal, and the seconds from the signal to its end."""
    words = [word for setting in [*SETTINGS, *STRATEGIES[strategy]] for word in ("--set", setting)]
    token = uuid.uuid4().hex
    beside = Path(sys.executable).parent
    command = [str(beside / "mpiexec"), "-n", str(RANKS), str(beside / "hpctrain"), "train", "tiny.toml", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SWEEP": token}
    log = folder / "output.txt"
    with log.open("w") as output:
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            rank = last_rank(token, time.monotonic() + scaled(20))
            time.sleep(delay)  # the sweep is over this delay
            began = time.monotonic()
            try:
                os.kill(rank, number)
            except ProcessLookupError:
                pytest.fail(f"the job ended by itself: {log.read_text()}")
            code = job.wait(scaled(SOON))
            return code, log.read_text(), time.monotonic() - began
        except subprocess.TimeoutExpired:
            pytest.fail(f"{number.name} after {delay:g} s: the job did not end\n{log.read_text()}")
        finally:
            job.kill()
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    if f"SWEEP={token}".encode() in (folder / "environ").read_bytes():
                        os.kill(int(folder.name), signal.SIGKILL)
                except OSError:
                    continue


DELAYS = [round(0.1 + STEP * number, 3) for number in range(int((LAST - 0.1) / STEP) + 1)]


@pytest.mark.long
@pytest.mark.limit(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("delay", DELAYS)
def test_the_job_ends_soon_with_one_line(tmp_path: Path, strategy: str, number: signal.Signals, delay: float) -> None:
    make_project(tmp_path)
    code, said, seconds = send(tmp_path, strategy, number, delay)
    assert code not in (0, 2), said
    # Before hpctrain's code runs, the launcher or Python itself prints the message.
    early = "BAD TERMINATION" in said or "exited on signal" in said or "site module" in said
    signs = ("interrupted", "terminated before", "saved after")
    own = [line for line in said.splitlines() if any(sign in line for sign in signs)]
    assert early or len(own) == 1, said
    assert seconds < scaled(SOON)
