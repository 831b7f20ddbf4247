"""Checks of a container's image: its packages, and whether launchers of this machine start ranks of its MPI.

The program in the image is ``doctor/probes.py``, which needs nothing of hpctrain there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpctrain._version import __version__
from hpctrain.cluster.launcher import without_launcher
from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.doctor.login.libraries import PREFIX, PROBES, build
from hpctrain.doctor.login.mpi import Mpi, check_launcher, check_srun
from hpctrain.doctor.login.schedulers import Slurm
from hpctrain.errors import UsageError
from hpctrain.jobs.profile import Profile
from hpctrain.util.probe import Answer, facts_in, run_program

TIMEOUT = 300.0  # seconds: an image may be large, cold, or be converted first
_RECIPES = "docs/containers.md shows how to build one"


@dataclass(frozen=True)
class Container:
    """Facts about an image; ``command`` is the one that ran the probes in it."""

    image: str
    command: str
    answer: Answer

    def part(self, name: str) -> Answer:
        """Return the answer of one library in the image."""
        facts: Any = self.answer.facts.get(name)
        facts = facts if isinstance(facts, dict) else {"error": "it has not been looked for"}
        return Answer(error=str(facts["error"])) if "error" in facts else Answer(facts=facts)


def query_container(image: str, profile: Profile, gpus: bool, environ: Mapping[str, str] = os.environ) -> Container:
    """Run the program of the probes in an image, as a job of this profile would. Raises ``UsageError``."""
    if image == "none":
        raise UsageError("--container none: name an image", everywhere=True)
    command = profile.in_container(image, ["python", "-c", PROBES.read_text(encoding="utf-8"), "image"], gpus=gpus)
    found = run_program(command, timeout=TIMEOUT, environ=without_launcher(environ))
    facts = None if found.error else facts_in(found.text, PREFIX)
    shown = " ".join(command[: command.index(image) + 1])
    if facts is None:
        return Container(image, shown, replace(found, error=found.error or "python in it printed nothing"))
    return Container(image, shown, replace(found, facts=facts))


def check_container(
    found: Container, host: Mpi, slurm: Slurm, environ: Mapping[str, str], *, gpus: int
) -> Iterator[Finding]:
    """Yield the findings on an image; ``gpus`` is the number of GPUs of this machine."""
    if found.answer.error:
        program = found.command.split()[0]
        advice = f"load its module, or set container_program in the profile ({program})"
        if not found.answer.missing:
            advice = f"try: {found.command} python --version"
        yield error(
            "container", f"{found.image} does not run: {found.answer.error}", "no rank could start in it", advice
        )
        return
    yield from _check_packages(found)
    yield from _check_torch(found.part("torch"), gpus)
    inside = Mpi(found.part("mpi"), (), host.mpiexec, host.version, "")
    if not inside.probe.facts:
        yield error(
            "container MPI",
            f"mpi4py in the image cannot load MPI: {inside.probe.error}",
            "a job of several ranks cannot start",
            f"install mpi4py and an MPI in the image; {_RECIPES}",
        )
        return
    yield ok("container MPI", f"{inside.described} through mpi4py {inside.probe.facts['mpi4py']}")
    yield from _check_starts(inside, host, slurm, environ)


def _check_packages(found: Container) -> Iterator[Finding]:
    packages = found.answer.facts
    lacks = [name for name in ("hpctrain", "numpy", "h5py") if not packages.get(name)]
    if lacks:
        yield error(
            "container",
            f"{found.image} has no {', '.join(lacks)}",
            "the ranks run hpctrain of the image",
            f"install it in the image; {_RECIPES}",
        )
    elif packages["hpctrain"] != __version__:
        yield warning(
            "container",
            f"hpctrain {packages['hpctrain']} in {found.image}, {__version__} here",
            "the config is checked here by another version than the one that reads it in the job",
            "install the same version in both",
        )
    else:
        yield ok("container", f"Python {packages.get('python')}, hpctrain {packages['hpctrain']} in {found.image}")


def _check_torch(torch: Answer, gpus: int) -> Iterator[Finding]:
    if torch.error:
        yield error(
            "container torch", f"import torch failed: {torch.error}", "nothing can be trained without it", _RECIPES
        )
        return
    text = f"{torch.facts['version']}, {build(torch)}"
    if gpus and not torch.facts["devices"]:
        yield error(
            "container torch",
            f"{text}, sees none of the {gpus} GPUs here",
            "a job with GPUs would end at its start",
            "install torch for these GPUs in the image; or name the container's options for them in the profile "
            "(gpu_vendor, container_gpu_options)",
        )
    else:
        yield ok("container torch", f"{text}; {torch.facts['devices']} GPUs")


def _check_starts(inside: Mpi, host: Mpi, slurm: Slurm, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the launchers of this machine start ranks of the image's MPI."""
    for one in check_launcher(inside) if host.mpiexec else ():
        yield replace(one, topic="container mpiexec")
    for one in check_srun(inside, slurm, environ):
        yield replace(one, topic="container srun")
    if not host.mpiexec and not slurm.installed:
        yield note(
            "container MPI",
            "there is neither mpiexec nor srun here",
            f"which launcher starts ranks of {inside.described} is not known",
            "check again where jobs are submitted",
        )
    name, _ = host.launcher
    outside, within = (_major(text) for text in (host.version.text, inside.described))
    if name == inside.library == "Open MPI" and outside and within and outside != within:
        yield note(
            "container MPI",
            f"{inside.described} in the image, mpiexec of Open MPI {outside} here",
            "they understand each other only as far as their versions of PMIx do",
            "start two ranks in it before you rely on it, or install the same version in the image",
        )


def _major(text: str) -> str:
    found = re.search(r"(\d+)\.\d+", text)
    return found[1] if found else ""
