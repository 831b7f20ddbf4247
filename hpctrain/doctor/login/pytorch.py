"""Checks of torch: whether it loads, how long that takes, and the devices that it was built for."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.doctor.login.probe import LOAD_TIMEOUT, run_probe
from hpctrain.util.probe import Answer

_OLDEST = (2, 11)
_SLOW = 20.0  # seconds; from a warm local disk it takes two
_BUSY = 2.0  # processes per core


def gather() -> Answer:
    """Load torch in a subprocess."""
    return run_probe("torch")


def check(torch: Answer) -> Iterator[Finding]:
    """Yield the findings on torch."""
    if torch.timed_out:
        yield error(
            "torch",
            f"import torch did not end in {LOAD_TIMEOUT:g} s",
            "its thousands of files come from a filesystem that is cold, overloaded or gone, and every rank of a job "
            "reads them at the same time",
            "try again in a minute; put the environment on a faster filesystem, or pack it into a container image",
        )
    elif torch.error:
        yield error("torch", f"import torch failed: {torch.error}", "nothing can be trained without it", _REINSTALL)
    else:
        yield from _check_loaded(torch)


_REINSTALL = "pip install torch, for the CUDA or ROCm of the compute nodes (pytorch.org says which index)"


def _check_loaded(torch: Answer) -> Iterator[Finding]:
    version, seconds = str(torch.facts["version"]), float(torch.facts["seconds"])
    if _numbers(version) < _OLDEST:
        yield error("torch", version, "hpctrain needs torch 2.11 or newer", "pip install --upgrade torch")
    elif seconds > _SLOW and torch.facts["load"] > _BUSY:
        yield note(
            "torch",
            f"{version}, {build(torch)}; import took {seconds:.0f} s",
            f"{torch.facts['load']:.0f} processes per core of this node want to run, so this time says little",
            "check again when the load is lower",
        )
    elif seconds > _SLOW:
        yield warning(
            "torch",
            f"{version}, {build(torch)}; import took {seconds:.0f} s",
            "all ranks of a job import it at once, which is even slower, at each start of a job",
            "put the environment on a faster filesystem, or pack it into a container image",
        )
    else:
        yield ok("torch", f"{version}, {build(torch)}; import took {seconds:.1f} s")


def build(torch: Answer) -> str:
    """Return the devices that torch was built for, as text."""
    if torch.facts.get("cuda"):
        return f"built for CUDA {torch.facts['cuda']}"
    return f"built for ROCm {torch.facts['hip']}" if torch.facts.get("hip") else "built for CPUs only"


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.partition("+")[0].split(".")[:2]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
