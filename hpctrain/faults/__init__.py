"""Injection of faults into a run, to test that jobs survive failures (docs/failures.md).

``job.run`` calls ``install`` if the variable ``HPCTRAIN_FAULT`` is set. ``spec`` parses its text,
``inject`` hooks the places of a step, ``actions`` has the effect of each kind.
"""

from __future__ import annotations

import os
from typing import Any


def install(run: Any) -> None:
    """Arm the faults of ``HPCTRAIN_FAULT`` in a ``Run`` that has not been entered. Collective.

    Raises ``UsageError`` on all ranks if the text is wrong, or a fault does not fit the run.
    """
    from hpctrain.comm.agreement import agreed
    from hpctrain.faults.actions import Actions, check, unfired
    from hpctrain.faults.inject import Injector
    from hpctrain.faults.spec import VARIABLE, parse

    job = run.job
    faults = agreed(job.comm, lambda: check(parse(os.environ.get(VARIABLE, "")), run))
    processes = [(job.node, os.getpid())]
    if any(fault.kind == "node" for fault in faults):
        processes = job.comm.all_gather_object(processes[0])
    armed = [fault for fault in unfired(run.folder, faults) if fault.rank_of(job.size) == job.rank]
    if armed:
        Injector(run, armed, Actions(run, processes)).attach()
