"""Execution of the probes of ``doctor/probes.py``, so that a library that hangs or crashes is detected."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster.launcher import without_launcher
from hpctrain.util.child import SAFE_PATH, python
from hpctrain.util.probe import Answer, facts_in, run_program

LOAD_TIMEOUT = 60.0  # seconds that a library may take to load, from a filesystem with cold caches
PREFIX = "hpctrain-doctor "  # of the line with a probe's facts
PROBES = Path(__file__).resolve().parent.parent / "probes.py"


def run_probe(
    name: str, *arguments: str, timeout: float = LOAD_TIMEOUT, isolated: bool = False, program: Path = PROBES
) -> Answer:
    """Run a probe of this name, not as a rank of this job, and return the facts that it prints.

    ``isolated`` leaves out site-packages, for a probe that needs only the standard library.
    """
    options = ["-I", "-S"] if isolated else []
    # A plain interpreter puts the program's own folder first in its path.
    command = python(*options, str(program), name, *arguments)
    found = run_program(command, timeout=timeout, environ={**without_launcher(os.environ), SAFE_PATH: "1"})
    facts = None if found.error else facts_in(found.text, PREFIX)
    if facts is None:
        return replace(found, error=found.error or "it printed nothing")
    return replace(found, facts=facts)
