"""Strict checks of the directives of a job script, as defined by their manuals.

A scheduler ignores a line that it does not recognize as a directive; the job then runs on one core,
or without a time limit. Therefore a line that looks like a directive, but is not one, is an error
here.
"""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.jobs.check import pbs, slurm
from hpctrain.jobs.check.lines import read

__all__ = ["problems"]

_CHECKS = {"slurm": slurm.check, "pbs": pbs.check}


def problems(script: str) -> list[str]:
    """Return the errors in the directives of a script, in the order of its lines; empty if there are none."""
    found = {marker: read(script, marker) for marker in ("SBATCH", "PBS")}
    if not any(lines.directives for lines in found.values()):
        raise UsageError("the script has no directive: its lines begin with #SBATCH (Slurm) or #PBS (PBS)")
    messages = []
    for scheduler, lines in zip(("slurm", "pbs"), found.values()):
        if lines.directives:
            messages += [*lines.strays, *_CHECKS[scheduler](lines.directives)]
    if not script.startswith("#!"):
        messages.append((1, "the first line must name the shell, as in #!/bin/bash"))
    if all(lines.directives for lines in found.values()):
        messages.append((1, "directives of Slurm and of PBS in one script: Slurm reads both"))
    return [f"line {number}: {text}" for number, text in sorted(messages)]
