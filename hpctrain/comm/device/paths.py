"""Choice of the path of GPU tensors: NCCL, MPI with device pointers, or staging through the host.

The ranks exchange their capabilities (``gather_capabilities``). ``choose_path`` is a pure function of
the result, so all ranks choose the same path.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hpctrain.comm.device.nccl import identity
from hpctrain.comm.transport.base import Transport
from hpctrain.errors import CommunicationError, SettingsError

Path = Literal["nccl", "mpi", "staged"]
PATHS: tuple[Path, ...] = ("nccl", "mpi", "staged")
VARIABLE = "HPCTRAIN_CUDA_AWARE"


@dataclass(frozen=True)
class CudaAwareness:
    """Decision whether MPI is given device pointers, and its reason."""

    cuda_aware: bool
    reason: str


@dataclass(frozen=True)
class PathCapabilities:
    """Capabilities that all ranks have in common for tensors on their GPUs."""

    no_nccl: str  # why NCCL is not usable; empty if it is
    no_mpi: str  # why MPI is not given device pointers; empty if it is
    mpi_reason: str = ""


def decide_cuda_awareness(verdict: bool | None, environ: Mapping[str, str] = os.environ) -> CudaAwareness:
    """Return whether to pass device pointers to MPI.

    ``verdict`` is the result of the canary exchange of ``hpctrain bench calibrate`` for this MPI
    library, or None if it never ran. ``HPCTRAIN_CUDA_AWARE`` (1 or 0) takes precedence. The
    library's own statement is ignored: some libraries report support and crash.
    """
    text = environ.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise SettingsError(f"{VARIABLE}={text!r}: allowed are 1 (MPI takes device pointers) and 0")
    if text:
        return CudaAwareness(text == "1", f"{VARIABLE}={text}")
    if verdict is None:
        return CudaAwareness(
            False, "no canary exchange has proved that MPI takes device pointers (hpctrain bench calibrate)"
        )
    return CudaAwareness(verdict, "the canary exchange passed" if verdict else "the canary exchange failed")


def gather_capabilities(
    transport: Transport, device: torch.device, awareness: CudaAwareness, no_nccl: str
) -> PathCapabilities:
    """Return the capabilities common to all ranks, naming a rank that lacks one. Collective.

    ``no_nccl`` is why this rank cannot use NCCL; empty if it can.
    """
    own = (no_nccl, awareness, f"{socket.gethostname()} {identity(device)}")
    ranks: list[tuple[str, CudaAwareness, str]] = transport.all_gather_object(own)
    no_nccl = next((f"{why} (rank {rank})" for rank, (why, _, _) in enumerate(ranks) if why), "")
    no_mpi = next((f"{mpi.reason} (rank {rank})" for rank, (_, mpi, _) in enumerate(ranks) if not mpi.cuda_aware), "")
    shared = max(Counter(gpu for _, _, gpu in ranks).values())
    if shared > 1 and not no_nccl:
        no_nccl = f"{shared} ranks use one GPU, which NCCL refuses"
    return PathCapabilities(no_nccl, no_mpi, ranks[0][1].reason)


def choose_path(
    operation: str,
    nbytes: int,
    capabilities: PathCapabilities,
    *,
    algorithm: str = "auto",
    mpi_reduces: bool = True,
    measured: Sequence[tuple[float, Path]] = (),
) -> tuple[Path, str]:
    """Return the path of one operation of ``nbytes`` bytes, and the reason for it.

    ``algorithm`` may name a path; raises ``CommunicationError`` if that path is not usable.
    ``mpi_reduces`` tells whether MPI reduces the dtype as torch does (True for operations without
    arithmetic). ``measured`` holds the results of a calibration: (upper limit in bytes, best path),
    ascending; unusable paths are skipped. Without measurements: NCCL if usable, else MPI, else
    staging.
    """
    unavailable: dict[Path, str] = {
        "nccl": capabilities.no_nccl,
        "mpi": capabilities.no_mpi or ("" if mpi_reduces else f"MPI does not do this {operation} as torch does"),
        "staged": "",
    }
    if algorithm in PATHS:
        if unavailable[algorithm]:
            able = ", ".join(path for path in PATHS if not unavailable[path])
            raise CommunicationError(
                f"algorithm {algorithm} cannot do {operation} on the GPU: {unavailable[algorithm]}; able are {able}"
            )
        return algorithm, "asked for"
    if algorithm != "auto":
        raise CommunicationError(f"algorithm {algorithm} is not for tensors on a GPU: auto, {', '.join(PATHS)} are")
    for limit, path in measured:
        if nbytes <= limit and not unavailable[path]:
            return path, f"measured best up to {limit:.0f} bytes"
    return _by_default(unavailable, capabilities)


def _by_default(unavailable: Mapping[Path, str], capabilities: PathCapabilities) -> tuple[Path, str]:
    if not unavailable["nccl"]:
        return "nccl", "every rank has NCCL and a GPU of its own"
    if not unavailable["mpi"]:
        return "mpi", f"{capabilities.mpi_reason}; no NCCL: {unavailable['nccl']}"
    return "staged", f"no NCCL: {unavailable['nccl']}; no device pointers to MPI: {unavailable['mpi']}"
