"""Training of PyTorch models on the ranks that ``mpirun`` or ``srun`` started.

Importing this package loads neither torch nor MPI; both are imported at first use of one of the
names below.

    import hpctrain

    job = hpctrain.init()
    model = job.wrap(model)
    with job.run(model, optimizer, loader, checkpoints="runs/a") as run:
        for step, batch in run:
            ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpctrain._version import __version__

if TYPE_CHECKING:
    from hpctrain import checkpoint as checkpoint
    from hpctrain.collectives.communicator import Communicator as Communicator
    from hpctrain.parallel.asynchronous.settings import ServerSettings as ServerSettings
    from hpctrain.parallel.offload.settings import OffloadSettings as OffloadSettings
    from hpctrain.parallel.settings import ParallelSettings as ParallelSettings
    from hpctrain.train.bootstrap import init as init
    from hpctrain.train.job import Job as Job

__all__ = [
    "Communicator",
    "Job",
    "OffloadSettings",
    "ParallelSettings",
    "ServerSettings",
    "__version__",
    "checkpoint",
    "init",
]

_HOMES = {
    "Communicator": "hpctrain.collectives.communicator",
    "Job": "hpctrain.train.job",
    "OffloadSettings": "hpctrain.parallel.offload.settings",
    "ParallelSettings": "hpctrain.parallel.settings",
    "ServerSettings": "hpctrain.parallel.asynchronous.settings",
    "init": "hpctrain.train.bootstrap",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first requested (PEP 562)."""
    if name == "checkpoint":
        return importlib.import_module("hpctrain.checkpoint")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
