"""Ranks of a benchmark and of the programs that it starts: torch.distributed on the same ranks, child processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from harness import run
from harness.turns import stop

import hpctrain
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import HpctrainError, UsageError

GRACE = 5.0  # seconds in which a child must end after SIGTERM
_NAP = 0.002  # seconds between two polls of a rank that waits without using a core


def start(name: str, *, least: int = 2, **options: Any) -> hpctrain.Job:
    """Join the job with the ranks that ``mpiexec`` has started; raises ``UsageError`` if they are too few."""
    job = hpctrain.init(**{"device": "cpu", **options})
    stop.install()  # again, as joining a job installs hpctrain's own handlers
    if job.size < least:
        command = f"mpiexec -n {least} {run.called_as}" if run.called_as else f"make -C benchmarks {name} NP={least}"
        refuse(f"{name} needs {least} ranks or more, not {job.size}: {command}")
    return job


def refuse(message: str) -> NoReturn:
    """Raise ``UsageError`` on all ranks."""
    raise UsageError(message, everywhere=True)


def world(comm: Communicator) -> Any:
    """Return mpi4py's communicator of the same ranks."""
    from mpi4py import MPI

    return getattr(comm.transport, "comm", MPI.COMM_SELF)  # one process without a launcher has no world


class OnRanks:
    """Base class of what runs on the ranks of a communicator."""

    comm: Communicator

    @property
    def world(self) -> Any:
        """Return mpi4py's communicator of the same ranks."""
        return world(self.comm)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size


def wait_asleep(comm: Communicator) -> None:
    """Wait for the other ranks without using a core, which they or the disk may need."""
    request = world(comm).Ibarrier()
    while not request.Test():
        time.sleep(_NAP)


@contextmanager
def process_group(comm: Communicator, backend: str = "gloo", needed: bool = True) -> Iterator[None]:
    """Initialize torch.distributed on the same ranks for the block, if it is ``needed``.

    Its store is a TCP store instead of a file, because nodes may have no common folder; MPI
    broadcasts the port.
    """
    if not needed:
        yield
        return
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    host, limit = "127.0.0.1" if comm.nodes == 1 else socket.gethostname(), timedelta(minutes=5)
    own = TCPStore(host, 0, comm.size, True, limit, False) if comm.rank == 0 else None
    host, port = comm.broadcast_object((host, own.port if own else 0))
    store = own or TCPStore(host, port, comm.size, False, limit)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    try:
        yield
    except HpctrainError as error:
        if error.everywhere:  # otherwise the other ranks still use the group: the guard ends the job
            dist.destroy_process_group()
        raise
    comm.barrier()
    dist.destroy_process_group()


def mpiexec(ranks: int) -> list[str]:
    """Return the words that start ``ranks`` ranks of a program with this interpreter's ``mpiexec``."""
    return [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]


def run_child(
    command: Sequence[str],
    *,
    timeout: float,
    watch: Callable[[], object] = lambda: None,
    interval: float = 0.2,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; a signal, or the limit in seconds, ends it and its ranks.

    ``watch`` is called in intervals. Raises ``Stopped`` after a signal, and ``UsageError`` at the limit.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    deadline = time.monotonic() + timeout
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            while True:
                stop.check()
                if time.monotonic() > deadline:
                    raise UsageError(f"{' '.join(command[:5])} ... did not end within {timeout:g} s")
                watch()
                with suppress(subprocess.TimeoutExpired):
                    out, err = process.communicate(timeout=interval)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
        finally:
            end_child(process)


def end_child(process: subprocess.Popen[str]) -> None:
    """End a program that was started in a session of its own, and all of its processes."""
    if process.poll() is not None:
        return
    process.terminate()  # a launcher passes it on to the ranks, which have sessions of their own
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
