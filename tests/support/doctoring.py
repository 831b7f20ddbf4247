"""Fake answers of programs and fake measurements of ranks, for tests of the doctor's findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpctrain.doctor.findings import Finding
from hpctrain.doctor.login.mpi import Mpi
from hpctrain.doctor.login.resources import ProcessLimits
from hpctrain.doctor.login.schedulers import Slurm
from hpctrain.doctor.preflight.messages import Pair, ReductionCheck, Skew, Tournament, schedule
from hpctrain.doctor.preflight.placement import Host, RankPlacement
from hpctrain.doctor.preflight.rates import Written
from hpctrain.doctor.preflight.survey import PreflightReport
from hpctrain.util.probe import Answer

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri\n"
OPENMPI = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11, repo rev: v5.0.11"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\nMPI BUILD INFO : Wed"
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n"
# The output of Slurm 22.05.
TYPES = "MPI plugin types are...\n\tnone\n\tpmix\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n"
CONFIG = "JobRequeue              = 1\nKillOnBadExit           = {kill}\nKillWait = 30 sec\nMpiDefault = {default}\n"
LIMITS = ProcessLimits(8, tuple(range(8)), 65536, None, None, 0, None, 2**36, rdma=False)
MISSING = Answer(error="there is no such program", missing=True)
SILENT = Answer(error="no answer in 60 s", timed_out=True)


def facts(**found: Any) -> Answer:
    """Return the answer of a probe."""
    return Answer(facts=found)


def mpi(library: str = MPICH, launcher: str = HYDRA, mpiexec: str = "/opt/mpi/bin/mpiexec", own: str = "") -> Mpi:
    """Return an MPI and the launcher in PATH."""
    probe = facts(library=library, mpi4py="4.1.2", standard="5.0", module="MPI.so", config={})
    return Mpi(probe, (), mpiexec, Answer(launcher), own)


def slurm(types: str = TYPES, *, kill: int = 1, default: str = "pmi2", version: str = "slurm 22.05.8") -> Slurm:
    """Return a Slurm."""
    return Slurm(Answer(version), Answer(types), Answer(CONFIG.format(kill=kill, default=default)))


def told(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return level and topic of the findings that are not ok."""
    return [(finding.level, finding.topic) for finding in findings if finding.level != "ok"]


def only(findings: Iterable[Finding]) -> Finding:
    """Return the only finding that is not ok."""
    (found,) = (finding for finding in findings if finding.level != "ok")
    return found


# Measurements of ranks ------------------------------------------------------------------------------------------------


def rank_placement(rank: int, node: int, local_rank: int, **other: Any) -> RankPlacement:
    """Return the placement of a rank that has a core of its own."""
    usual = {"host": f"n{node + 1}", "cpus": (local_rank,), "numa": (0,), "cores": 1, "threads": 1}
    place = {"rank": rank, "node": node, "local_rank": local_rank, "device": "cpu", "gpu": "", "identity": "cpu"}
    return RankPlacement(**{**usual, **place, **other})


def report(nodes: int = 4, local: int = 2, **other: Any) -> PreflightReport:
    """Return measurements of ranks on equal nodes; ``other`` replaces parts of them."""
    placements = [rank_placement(rank, rank // local, rank % local) for rank in range(nodes * local)]
    ranks = range(len(placements))
    parts: dict[str, Any] = {
        "placements": placements,
        "nodes": [Host(f"n{node + 1}", LIMITS, 2**36, 2**35) for node in range(nodes)],
        "skews": [Skew(node, f"n{node + 1}", 1e-6, 1e-5) for node in range(1, nodes)],
        "products": [noisy(1e11, rank) for rank in ranks],
        "streams": [noisy(1e10, rank) for rank in ranks],
        "inside": {node: tournament([noisy(5e9, node)] * (local * (local - 1) // 2), local) for node in range(nodes)},
        "between": tournament([noisy(1e10, number) for number in range(nodes * (nodes - 1) // 2)], nodes),
        "reductions": [
            ReductionCheck(4096, 1e-5, (), len(placements)),
            ReductionCheck(2**20, 1e-3, (), len(placements)),
        ],
        "written": [Written(2**24, noisy(0.1, rank)) for rank in ranks],
        "folder": "/scratch",
        "seconds": 12.0,
    }
    return PreflightReport(**{**parts, **other})


def noisy(value: float, number: int) -> float:
    """Return the value changed by up to 10 %, always the same for the same number."""
    return value * (1 + 0.1 * (((number * 7) % 5) - 2) / 2)


def tournament(bandwidths: Sequence[float], members: int) -> Tournament:
    """Return a complete tournament with these bandwidths."""
    rounds = schedule(members) if members > 1 else []
    pairs = sorted(pair for meeting in rounds for pair in meeting)
    found = tuple(Pair(*pair, 1e-6, rate) for pair, rate in zip(pairs, bandwidths, strict=True))
    return Tournament(found, len(rounds), len(rounds))
