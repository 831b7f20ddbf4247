"""CUDA-awareness probe: tests in a separate job whether an MPI library accepts device pointers.

    mpiexec -n 2 python -m hpctrain.comm.device.cuda_aware_probe

This command exchanges buffers on GPUs, checks every value, and prints a verdict as one line of
JSON. An MPI library without support for device memory treats device pointers as host pointers: the
process crashes, the numbers are wrong, or the exchange hangs. ``probe`` starts that job and
converts each of these outcomes into a verdict. No training job repeats the test at run time: it
relies on the verdict.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.cluster.launcher import without_launcher
from hpctrain.comm.transport.base import Transport
from hpctrain.errors import CommunicationError
from hpctrain.util.probe import facts_in, python, run_program

PREFIX = "hpctrain-canary "  # of the line with the verdict: MPI libraries print warnings of their own
SIZES = (2, 1000, 300_000, 4_000_000)  # elements: one size per protocol that MPI libraries use for a message
TIMEOUT = 120.0  # seconds; an exchange takes two


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe: whether an MPI library accepts device pointers, and the reason."""

    cuda_aware: bool
    reason: str
    library: str  # first line of MPI.Get_library_version(): the verdict is valid for this library only


def library_name() -> str:
    """Return the name and version of the MPI library that this process has loaded."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split())


def mpi_reports_cuda() -> bool | None:
    """Return whether the MPI library reports CUDA-awareness; None if it has no query function."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # resolves the functions of the MPI library that it is linked to
    try:
        query = library.MPIX_Query_cuda_support
    except AttributeError:
        return None
    query.restype, query.argtypes = ctypes.c_int, ()
    return bool(query())


def exchange(transport: Transport, device: torch.device, sizes: Sequence[int] = SIZES) -> list[str]:
    """Exchange buffers on ``device`` between all ranks; return a description of each wrong result on this rank."""
    wrong: list[str] = []
    for numel in sizes:
        for name, found, wanted in _results(transport, device, numel):
            wrong_values = int((found.cpu() != wanted).sum())
            if wrong_values:
                wrong.append(f"{name} of {numel} elements brought {wrong_values} wrong ones to rank {transport.rank}")
    return wrong


def _results(transport: Transport, device: torch.device, numel: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each operation with its result and the expected values."""
    rank, size = transport.rank, transport.size
    # Integers that are exact in float32; they differ between ranks and between neighbouring elements.
    values = [(torch.arange(numel, dtype=torch.float32) * 7 + 13 * other) % 8191 + 1 for other in range(size)]
    own, right, left = values[rank].to(device), (rank + 1) % size, (rank - 1) % size
    found = torch.zeros(numel, device=device)
    receive, send = transport.irecv(found, left), transport.isend(own, right)
    receive.wait()
    send.wait()
    yield "send and recv", found, values[left]
    transport.broadcast(found.copy_(own), size - 1)
    yield "broadcast", found, values[-1]
    transport.all_reduce(found.copy_(own), "sum")
    yield "all_reduce", found, torch.stack(values).sum(0)
    gathered = torch.zeros(numel * size, device=device)
    transport.all_gather(gathered, own)
    yield "all_gather", gathered, torch.cat(values)


def judge(transport: Transport, device: torch.device, library: str, sizes: Sequence[int] = SIZES) -> ProbeResult:
    """Run the exchange and return its verdict, the same on all ranks. Collective."""
    wrong = [text for texts in transport.all_gather_object(exchange(transport, device, sizes)) for text in texts]
    if wrong:
        return ProbeResult(False, wrong[0], library)
    reason = f"every value arrived on {transport.size} ranks, from memory of {device.type} to memory of {device.type}"
    return ProbeResult(device.type == "cuda", reason, library)


def probe(
    mpiexec: Sequence[str] | None = None, *, program: Sequence[str] | None = None, timeout: float = TIMEOUT
) -> ProbeResult:
    """Run the probe in a separate job and return its verdict, also after a crash, a hang or missing output.

    ``mpiexec`` is the command that starts two ranks; the default is ``mpiexec -n 2`` with the
    ``mpiexec`` beside this interpreter or in ``PATH``. The calling process must not be an MPI rank.
    """
    program = python("-m", "hpctrain.comm.device.cuda_aware_probe") if program is None else program
    command = [*(_mpiexec() if mpiexec is None else mpiexec), *program]
    answer = run_program(command, timeout=timeout, environ=without_launcher(os.environ), with_stderr=True)
    if answer.timed_out:
        return ProbeResult(False, f"the exchange did not end within {timeout:g} s", "")
    if answer.code is None:
        raise CommunicationError(answer.error)
    return _read(answer.text, answer.code)


def _mpiexec() -> list[str]:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise CommunicationError("no mpiexec beside the interpreter or in PATH: the canary needs two ranks")
    return [found, "-n", "2"]


def _read(output: str, code: int) -> ProbeResult:
    facts = facts_in(output, PREFIX)
    try:
        verdict = None if facts is None else ProbeResult(**facts)
    except TypeError:
        verdict = None
    if verdict is not None and (code == 0 or not verdict.cuda_aware):
        return verdict
    library = verdict.library if verdict else ""
    first_line = next(filter(None, (line.strip("= \t") for line in output.splitlines())), "it printed nothing")
    return ProbeResult(False, f"the exchange ended with status {code}: {first_line[:200]}", library)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of the probe; rank 0 prints the verdict."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain.comm.device.cuda_aware_probe", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the exchange itself")
    wanted = parser.parse_args(arguments).device
    from mpi4py import MPI

    from hpctrain.comm.device.cuda_mpi import CudaMpiTransport

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    reasons = MPI.COMM_WORLD.allgather(reason_to_skip(wanted, size, torch.cuda.is_available(), mpi_reports_cuda()))
    if any(reasons):
        return _print(rank, ProbeResult(False, next(filter(None, reasons)), library_name()))
    device = torch.device("cuda", rank % torch.cuda.device_count()) if wanted == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return _print(rank, judge(CudaMpiTransport(MPI.COMM_WORLD, device), device, library_name()))


def reason_to_skip(wanted: str, size: int, has_gpu: bool, reported: bool | None) -> str:
    """Return why the exchange is impossible or unnecessary; empty if it should run.

    ``reported`` is the result of ``mpi_reports_cuda``.
    """
    if size < 2:
        return "the canary needs two ranks"
    if wanted == "cuda" and not has_gpu:
        return "no GPU is visible"
    if wanted == "cuda" and reported is False:
        return "the MPI library says that it was built without CUDA (MPIX_Query_cuda_support)"
    return ""


def _print(rank: int, verdict: ProbeResult) -> int:
    if rank == 0:
        facts: dict[str, Any] = asdict(verdict)
        print(f"{PREFIX}{json.dumps(facts)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
