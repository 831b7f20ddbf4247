"""Choice of the path of GPU tensors: NCCL, MPI with device pointers, or staging through the host.

The ranks exchange their capabilities (``gather_abilities``). ``choose_path`` is a pure function of
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

from hpctrain.comm.device import nccl_channel
from hpctrain.comm.device.nccl import identity
from hpctrain.comm.transport.base import Transport
from hpctrain.errors import CommunicationError, SettingsError
from hpctrain.log import logger

Path = Literal["nccl", "mpi", "staged"]
PATHS: tuple[Path, ...] = ("nccl", "mpi", "staged")
VARIABLE = "HPCTRAIN_CUDA_AWARE"


@dataclass(frozen=True)
class Belief:
    """Decision whether MPI is given device pointers, and its reason."""

    cuda_aware: bool
    reason: str


@dataclass(frozen=True)
class Abilities:
    """Capabilities that all ranks have in common for tensors on their GPUs."""

    no_nccl: str  # why NCCL is not usable; empty if it is
    no_mpi: str  # why MPI is not given device pointers; empty if it is
    ranks_per_gpu: int = 1
    mpi_reason: str = ""


@dataclass(frozen=True)
class Choice:
    """Path and the reason for it."""

    path: Path
    reason: str


def believe(verdict: bool | None, environ: Mapping[str, str] = os.environ) -> Belief:
    """Return whether to pass device pointers to MPI.

    ``verdict`` is the result of the canary exchange of ``hpctrain bench calibrate`` for this MPI
    library, or None if it never ran. ``HPCTRAIN_CUDA_AWARE`` (1 or 0) takes precedence. The
    library's own statement is ignored: some libraries report support and crash.
    """
    said = environ.get(VARIABLE, "")
    if said not in ("", "0", "1"):
        raise SettingsError(f"{VARIABLE}={said!r}: allowed are 1 (MPI takes device pointers) and 0")
    if said:
        return Belief(said == "1", f"{VARIABLE}={said}")
    if verdict is None:
        return Belief(False, "no canary exchange has proved that MPI takes device pointers (hpctrain bench calibrate)")
    return Belief(verdict, "the canary exchange passed" if verdict else "the canary exchange failed")


def gather_abilities(transport: Transport, device: torch.device, belief: Belief) -> Abilities:
    """Return the capabilities common to all ranks, naming a rank that lacks one. Collective."""
    own = (nccl_channel.why_missing(), belief, f"{socket.gethostname()} {identity(device)}")
    return combine(transport.all_gather_object(own))


def combine(ranks: Sequence[tuple[str, Belief, str]]) -> Abilities:
    """Return the common capabilities, given (why no NCCL, decision on MPI, GPU) of each rank."""
    no_nccl = next((f"{why} (rank {rank})" for rank, (why, _, _) in enumerate(ranks) if why), "")
    no_mpi = next(
        (f"{belief.reason} (rank {rank})" for rank, (_, belief, _) in enumerate(ranks) if not belief.cuda_aware), ""
    )
    shared = max(Counter(gpu for _, _, gpu in ranks).values())
    if shared > 1 and not no_nccl:
        no_nccl = f"{shared} ranks use one GPU, which NCCL refuses"
    return Abilities(no_nccl, no_mpi, shared, ranks[0][1].reason)


def choose_path(
    operation: str,
    nbytes: int,
    abilities: Abilities,
    *,
    algorithm: str = "auto",
    mpi_reduces: bool = True,
    measured: Sequence[tuple[float, Path]] = (),
) -> Choice:
    """Return the path of one operation of ``nbytes`` bytes.

    ``algorithm`` may name a path; raises ``CommunicationError`` if that path is not usable.
    ``mpi_reduces`` tells whether MPI reduces the dtype as torch does (True for operations without
    arithmetic). ``measured`` holds the results of a calibration: (upper limit in bytes, best path),
    ascending; unusable paths are skipped. Without measurements: NCCL if usable, else MPI, else
    staging.
    """
    hindrances: dict[Path, str] = {
        "nccl": abilities.no_nccl,
        "mpi": abilities.no_mpi or ("" if mpi_reduces else f"MPI does not do this {operation} as torch does"),
        "staged": "",
    }
    if algorithm in PATHS:
        if hindrances[algorithm]:
            able = ", ".join(path for path in PATHS if not hindrances[path])
            raise CommunicationError(
                f"algorithm {algorithm} cannot do {operation} on the GPU: {hindrances[algorithm]}; able are {able}"
            )
        return Choice(algorithm, "asked for")
    if algorithm != "auto":
        raise CommunicationError(f"algorithm {algorithm} is not for tensors on a GPU: auto, {', '.join(PATHS)} are")
    for limit, path in measured:
        if nbytes <= limit and not hindrances[path]:
            return Choice(path, f"measured best up to {limit:.0f} bytes")
    return _by_default(hindrances, abilities)


def _by_default(hindrances: Mapping[Path, str], abilities: Abilities) -> Choice:
    if not hindrances["nccl"]:
        return Choice("nccl", "every rank has NCCL and a GPU of its own")
    if not hindrances["mpi"]:
        return Choice("mpi", f"{abilities.mpi_reason}; no NCCL: {hindrances['nccl']}")
    return Choice("staged", f"no NCCL: {hindrances['nccl']}; no device pointers to MPI: {hindrances['mpi']}")


class PathLog:
    """Logger of paths: reports each path once per job, on rank 0, so that a slow path is visible to the user."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._said: set[Path] = set()

    def say(self, choice: Choice) -> None:
        """Log a path at its first use."""
        if choice.path not in self._said:
            self._said.add(choice.path)
            if self._rank == 0:
                how = {"nccl": "by NCCL", "mpi": "by MPI with device pointers", "staged": "through host memory"}
                logger.info("tensors on the GPU travel %s: %s", how[choice.path], choice.reason)
