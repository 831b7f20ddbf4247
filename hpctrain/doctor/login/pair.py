"""Checks that Slurm's ``srun`` and this MPI support the same PMI, without which each rank is a world of size 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.cluster import promise
from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.doctor.login.mpi import Mpi
from hpctrain.doctor.login.slurm import Slurm

_ALONE = "every rank would be a world of its own, which hpctrain refuses; the wrong type lets MPI_Init abort"


def needed(mpi: Mpi) -> str:
    """Return the ``srun --mpi=`` type that this MPI needs; empty if unknown."""
    return promise.srun_type(mpi.library)


def offers(slurm: Slurm, kind: str) -> bool:
    """Return whether srun supports this type; ``pmix`` may exist only as ``pmix_v4``."""
    return any(name == kind or name.startswith(f"{kind}_v") for name in slurm.mpi_types)


def check(mpi: Mpi, slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on how srun starts ranks of this MPI."""
    if not slurm.here or not mpi.library:
        return
    kind = needed(mpi)
    if not kind:
        yield note(
            "srun",
            f"which --mpi= {mpi.library} needs is not known here",
            _ALONE,
            "ask the site, or try: srun -n 2 --mpi=TYPE hpctrain doctor --preflight",
        )
        return
    if not slurm.mpi_types:
        advice = f"write srun --mpi={kind}, and see what srun --mpi=list prints on a login node"
        yield note("srun", f"{mpi.told} needs --mpi={kind}; srun does not list its types", _ALONE, advice)
        return
    if not offers(slurm, kind):
        yield error(
            "srun",
            f"{mpi.told} needs --mpi={kind}, and srun has only {', '.join(slurm.mpi_types)}",
            _ALONE,
            f"start with {mpi.own or 'the mpiexec of this MPI'}, or use an MPI that srun can start",
        )
        return
    yield ok("srun", f"srun --mpi={kind} starts ranks of {mpi.told}")
    yield from _check_default(mpi, slurm, environ, kind)


def _check_default(mpi: Mpi, slurm: Slurm, environ: Mapping[str, str], kind: str) -> Iterator[Finding]:
    asked = environ.get("SLURM_MPI_TYPE")
    default = asked or slurm.setting("MpiDefault")
    if default and not fits(default, kind):
        where = "SLURM_MPI_TYPE" if asked else "MpiDefault"
        yield warning(
            "srun",
            f"without --mpi= srun takes {default} ({where}), and {mpi.library} needs {kind}",
            _ALONE,
            f"write --mpi={kind} on the line of srun, or export SLURM_MPI_TYPE={kind}",
        )


def fits(asked: str, kind: str) -> bool:
    """Return whether a requested type satisfies the needed one; ``pmix_v4`` is a ``pmix``."""
    return asked == kind or asked.startswith(f"{kind}_v")
