"""Check the directives of a job script as strictly as their manuals are written.

A scheduler passes over what it does not take for a directive, and a job then runs on one core, or without an end: so
what looks like a directive and is none is an error here, too.
"""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.launch.check import pbs, slurm
from hpctrain.launch.check.lines import read

__all__ = ["problems"]

_CHECKS = {"slurm": slurm.check, "pbs": pbs.check}


def problems(script: str) -> list[str]:
    """Return what is wrong with the directives of a script, in the order of its lines; empty where nothing is."""
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
